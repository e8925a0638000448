"""The system that a configuration belongs to, and the settings in the configuration."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from shardwright.hugging_face.files import read_sizes
from shardwright.model.spec import ModelSpec
from shardwright.readers.documents import toml_settings, tree_settings
from shardwright.readers.hugging_face import HUGGING_FACE
from shardwright.readers.megatron import MEGATRON_LM
from shardwright.readers.nemo import MLPERF, argument_settings, is_mlperf, mlperf_settings, yaml_settings, yaml_system
from shardwright.readers.python_files import python_settings
from shardwright.readers.shell import Shell
from shardwright.readers.shell_values import Word, is_unset
from shardwright.readers.table import READ, ForeignOption, Setting, System, normalised
from shardwright.readers.torchtitan import TORCHTITAN
from shardwright.readers.torchtitan_options import KINDS
from shardwright.system.errors import InputError
from shardwright.system.files import read_text, reason

SUPPORTED = (
    "a shell script or a file of arguments of Megatron-LM, or MLPerf's config_*.sh (*.sh, *.txt, *.args); YAML of NeMo "
    "and Megatron-Bridge (*.yaml); TOML or Python of torchtitan (*.toml, "
    "*.py, *.py:FUNCTION); JSON of DeepSpeed, YAML of Accelerate, JSON of TrainingArguments, and config.json (*.json, "
    "*.yaml)"
)
SHELL = (".sh", ".bash", ".txt", ".args", ".slurm", ".sbatch", "")
FEWEST_OPTIONS = 3
"""Options of a system's table from which on a command starts a training, whatever other options it has."""
NOT_READ = {"axolotl": ("base_model", range(1)), "torchtune": ("_component_", range(10))}
"""System whose YAML is not read -> the last part of a key that only its files have, and how deep it stands."""


@dataclass(frozen=True)
class ConfigurationSource:
    """A file with its settings. `skipped`: parts of a script that were not evaluated."""

    path: str
    settings: tuple[Setting, ...]
    skipped: tuple[str, ...] = ()


def sources_of(paths: Sequence[Path]) -> tuple[System, list[ConfigurationSource], ModelSpec | None]:
    """Return the system of some files, their settings, and the model if one of them is its config.json. Raises
    InputError for files that are not supported."""
    parts = [_source(path) for path in paths]
    systems = {system.name: system for system, _, _ in parts if system is not None}
    if len(systems) > 1:
        raise InputError(
            f"--from {paths[1]}: files of different systems, {' and '.join(systems)}; give the files of one system"
        )
    models = [model for _, _, model in parts if model is not None]
    if not systems:
        raise InputError(f"--from {paths[0]}: that is a model; add the file that configures the training")
    system = next(iter(systems.values()))
    sources = [source for _, source, _ in parts if source is not None]
    if len(sources) > 1 and system is not HUGGING_FACE:
        raise InputError(f"--from {paths[1]}: a configuration of {system.name} is one file")
    return system, sources, models[0] if models else None


def _source(path: Path) -> tuple[System | None, ConfigurationSource | None, ModelSpec | None]:
    file, _, function = str(path).partition(".py:")
    suffix = path.suffix.lower()
    if suffix in SHELL:
        return *_shell_source(path), None
    if suffix == ".toml":
        return TORCHTITAN, ConfigurationSource(str(path), tuple(toml_settings(path))), None
    if suffix == ".py" or function:
        named = Path(f"{file}.py") if function else path
        python = python_settings(named, function or None, KINDS)
        return TORCHTITAN, ConfigurationSource(str(named), python.settings, python.skipped), None
    if suffix in (".json", ".yaml", ".yml"):
        settings = tree_settings(path)
        for setting in settings if suffix != ".json" else ():
            for name, (key, depths) in NOT_READ.items():
                if setting.option.rpartition(".")[2] == key and setting.option.count(".") in depths:
                    raise InputError(
                        f"{setting.where}: {key} is a key of {name}, which is not read; supported: {SUPPORTED}"
                    )
        if (arguments := argument_settings(settings)) is not None:
            own, others = arguments
            notes = (f"{path}: {', '.join(others)}: not options of {MEGATRON_LM.name}",) if others else ()
            return MEGATRON_LM, ConfigurationSource(str(path), tuple(own), notes), None
        if any(setting.option in ("model_type", "architectures") for setting in settings):
            return None, None, read_sizes(path)
        if (system := yaml_system(settings)) is not None:
            return system, ConfigurationSource(str(path), tuple(yaml_settings(settings))), None
        return HUGGING_FACE, ConfigurationSource(str(path), tuple(settings)), None
    raise InputError(f"--from {path}: files named *{path.suffix} are not read; supported: {SUPPORTED}")


def _shell_source(path: Path) -> tuple[System, ConfigurationSource]:
    """Return the settings of the command in a script that starts the training, or the variables of MLPerf's."""
    shell, system = Shell(), MEGATRON_LM
    if (words := _argument_words(path)) is not None:
        shell.commands.append(words)
    else:
        shell.run(path)
    ranked = sorted(shell.commands, key=lambda words: _known_options(words, system))
    if not ranked or _known_options(ranked[-1], system) < FEWEST_OPTIONS:
        if is_mlperf(shell.values):
            texts = [(name, shell.text_of(name)) for name in shell.values]
            variables = [
                Setting(name, word.text, word.where or str(path), word.unknown) for name, word in texts if word
            ]
            return MLPERF, ConfigurationSource(str(path), tuple(mlperf_settings(variables)), tuple(shell.notes))
        if (words := _words_of_variables(shell, system)) is not None:
            return system, ConfigurationSource(str(path), tuple(settings_of(words, system.options)), tuple(shell.notes))
        # A note names a line that was not read, which may have the other options.
        ranked = [words for words in ranked if not shell.notes and _is_short_command(words, system)]
    if not ranked:
        hint = f"; {shell.notes[0]}" if shell.notes else ""
        raise InputError(f"{path}: no command with options of {system.name} is found{hint}; supported: {SUPPORTED}")
    settings = settings_of(_split(ranked[-1]), system.options)
    stated = {normalised(setting.option) for setting in settings}
    if "nproc_per_node" not in stated and "world_size" not in stated:
        word = shell.text_of("WORLD_SIZE")
        if word is not None and word.unknown is None:
            settings.append(Setting("WORLD_SIZE", word.text, word.where))
    return system, ConfigurationSource(str(path), tuple(settings), tuple(shell.notes))


def _words_of_variables(shell: Shell, system: System) -> list[Word] | None:
    """Return the options in variables of a script without a command, such as MODEL_ARGS of a file that other scripts
    source, or None if no variable has any. Adds a note that names the variables."""
    texts = {name: word for name in shell.values if (word := shell.text_of(name)) is not None}
    used = {name: word for name, word in texts.items() if _known_options([word], system) >= FEWEST_OPTIONS}
    if not used:
        return None
    shell.notes.append(f"no command starts a training: the options of {', '.join(used)} are taken")
    return [part for word in used.values() for part in _split([word])]


def _argument_words(path: Path) -> list[Word] | None:
    """Return the words of a file that has only arguments, or None if it is a script."""
    try:
        lines = read_text(path).splitlines()
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: {reason(error)}") from None
    stated = [line for line in lines if line.strip() and not line.lstrip().startswith("#")]
    if not stated or not stated[0].lstrip().startswith("--"):
        return None
    return [
        Word(word.strip("'\""), f"{path}:{number}")
        for number, line in enumerate(lines, 1)
        for word in line.partition(" #")[0].removesuffix("\\").split()
        if not line.lstrip().startswith("#")
    ]


def _split(words: Sequence[Word]) -> list[Word]:
    """Return words of a command; a word with options in it, as of `bash -c "..."`, becomes several."""
    result = []
    for word in words:
        result += word.parts() if " --" in f" {word.text}" and " " in word.text.strip() else [word]
    return result


def _known_options(words: Sequence[Word], system: System) -> int:
    return sum(name in system.options and system.options[name].fate == READ for name in _option_names(words))


def _is_short_command(words: Sequence[Word], system: System) -> bool:
    """Return whether a command with fewer than `FEWEST_OPTIONS` starts a training: it runs a program in Python, most of
    whose options are the system's. A file of arguments has no program."""
    program = next((at for at, word in enumerate(words) if word.text.endswith(".py")), None)
    if program is None and not (words and is_option(words[0])):
        return False
    own = words[(program or 0) :]  # the options before the program are the launcher's
    known = _known_options(own, system)
    return known > sum(name not in system.options for name in _option_names(own))


def _option_names(words: Sequence[Word]) -> list[str]:
    return [normalised(word.text.partition("=")[0]) for word in _split(words) if is_option(word)]


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
