"""Settings from the words of a command line: `--name value ...`, as argparse splits them."""

from collections.abc import Mapping, Sequence

from shardwright.readers.shell_values import Word, is_unset
from shardwright.readers.table import ForeignOption, Setting, normalised


def settings_of(words: Sequence[Word], options: Mapping[str, ForeignOption]) -> list[Setting]:
    """Return the options of a command with their values. An option that is given twice keeps its last value, as
    argparse does; a word that is no option and belongs to none is left out."""
    result: dict[str, Setting] = {}
    at = 0
    while at < len(words):
        word = words[at]
        at += 1
        if not is_option(word):
            continue
        name, equals, text = word.text.partition("=")
        values = [Word(text, word.where, word.unknown)] if equals else []
        limit = _most_values(options.get(normalised(name)))
        while not equals and at < len(words) and _is_value(words[at]) and len(values) < limit:
            values.append(words[at])
            at += 1
        setting = _setting(name, word, values, limit > 1)
        result.pop(normalised(name), None)
        result[normalised(name)] = setting
    return list(result.values())


def is_option(word: Word) -> bool:
    """Return whether a word is the name of an option."""
    return word.text.startswith("--") and len(word.text) > 2


def _is_value(word: Word) -> bool:
    """Return whether a word can be the value of an option: it is no option and no program."""
    return not is_option(word) and not word.text.endswith(".py")


def _most_values(option: ForeignOption | None) -> float:
    """Return the most values of an option; an option without a key may have any number."""
    if option is None or option.kind is list or not option.key:
        return float("inf")
    return 0 if option.kind is bool else 1


def _setting(name: str, word: Word, values: Sequence[Word], several: bool) -> Setting:
    unknown = next((value.unknown for value in values if value.unknown), None)
    known = [value for value in values if not is_unset(value)]
    if not values:
        return Setting(name, True, word.where)
    if unknown is not None:
        return Setting(name, " ".join(value.text for value in known), values[0].where, unknown)
    return Setting(name, [value.text for value in known] if several else known[0].text, values[0].where)
