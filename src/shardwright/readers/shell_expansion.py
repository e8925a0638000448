"""The expansion of one raw word: quotes, variables, arrays, defaults, arithmetic."""

import re
from collections.abc import MutableMapping

from shardwright.readers.shell_values import as_word, evaluate, mark
from shardwright.readers.shell_words import Chars, RawWord

Variables = MutableMapping[str, list[Chars]]
"""Name -> its value, or the values of an array."""


class Expansion:
    """The expansion of one raw word. `line`: of the place in it."""

    def __init__(self, variables: Variables, token: RawWord) -> None:
        self.variables, self.raw, self.at = variables, token.raw, 0
        self.file, _, line = token.where.rpartition(":")
        self.line = int(line)
        self.result: list[Chars] = []
        self.word: Chars = []
        self.begun = False

    @property
    def where(self) -> str:
        return f"{self.file}:{self.line}"

    def words(self, split: bool) -> list[Chars]:
        while self.at < len(self.raw):
            self._step(split)
        self._end()
        return self.result

    def _end(self) -> None:
        if self.begun:
            self.result.append(self.word)
        self.word, self.begun = [], False

    def _add(self, char: str) -> None:
        self.word.append((char, self.where))
        self.begun = True

    def _step(self, split: bool) -> None:
        char = self.raw[self.at]
        if char == "'":
            end = self.raw.index("'", self.at + 1)
            self.begun = True
            for literal in self.raw[self.at + 1 : end]:
                self._add(literal)
                self.line += literal == "\n"
            self.at = end + 1
        elif char == '"':
            self._double_quoted()
        elif char == "\\":
            self._escaped()
        elif char in "$`":
            self._parameters(quoted=not split)
        else:
            self._add(char)
            self.line += char == "\n"
            self.at += 1

    def _escaped(self) -> None:
        following = self.raw[self.at + 1 : self.at + 2]
        if following == "\n":
            self.line += 1
        elif following:
            self._add(following)
        self.at += 2

    def _double_quoted(self) -> None:
        self.at += 1
        self.begun = True
        while self.at < len(self.raw) and self.raw[self.at] != '"':
            char = self.raw[self.at]
            if char == "\\" and self.raw[self.at + 1 : self.at + 2] in ("\n", '"', "$", "`", "\\"):
                self._escaped()
            elif char in "$`":
                self._parameters(quoted=True)
            else:
                self._add(char)
                self.line += char == "\n"
                self.at += 1
        self.at += 1

    def _parameters(self, quoted: bool) -> None:
        """Add the value of the expansion at this place: a variable, arithmetic or a command's output."""
        source = _source_at(self.raw, self.at)
        self.at += len(source)
        words, separate = self._value(source)
        self.line += source.count("\n")
        for number, chars in enumerate(words):
            if number and (separate or not quoted):
                self._end()
            if quoted:
                self.word += chars
                self.begun = True
                continue
            for char, where in chars:
                if char.isspace():
                    self._end()
                else:
                    self.word.append((char, where))
                    self.begun = True

    def _value(self, source: str) -> tuple[list[Chars], bool]:
        """Return the values of an expansion, and whether they stay separate words in quotes."""
        if source.startswith("$(("):
            return [self._plain(self._arithmetic(source[3:-2]))], False
        if source.startswith(("$(", "`")):
            why = f"{self.where}: {' '.join(source.split())[:60]} would have to be executed"
            return [mark(why, self.where)], False
        if source == "$":
            return [self._plain("$")], False
        inner = source[2:-1] if source.startswith("${") else source[1:]
        form = re.fullmatch(r"([A-Za-z_]\w*|[0-9]+|[@*#?$!-])(\[[^\]]*\])?(?s:(.*))", inner)
        if form is None:
            return [mark(f"{self.where}: {source} is an expansion that is not evaluated", self.where)], False
        name, index, rest = form[1], form[2] or "", form[3]
        words = self.variables.get(name)
        if index not in ("", "[@]", "[*]"):
            at = index[1:-1]
            words = [words[int(at)]] if words is not None and at.isdecimal() and int(at) < len(words) else None
        elif not index and words:
            words = words[:1]
        if rest:
            words = self._modified(name, words, rest, source)
        if words is None:
            words = [mark(f"${name} is not set", self.where)]
        return words, index == "[@]"

    def _modified(self, name: str, words: list[Chars] | None, rest: str, source: str) -> list[Chars] | None:
        """Apply `:-default` and its relatives."""
        operator = next(
            (candidate for candidate in (":-", ":=", ":?", ":+", "-", "=", "?", "+") if rest.startswith(candidate)),
            None,
        )
        if operator is None:
            return [mark(f"{self.where}: {source} is an expansion that is not evaluated", self.where)]
        given = words is not None and (":" not in operator or any(words))
        if operator[-1] == "?":
            return words if given else None
        if (operator[-1] == "+") is given:
            other = Expansion(self.variables, RawWord(rest[len(operator) :], self.where)).words(split=False)
            value = [[char for chars in other for char in chars]]
            if operator[-1] == "=":
                self.variables[name] = value
            return value
        return [[]] if operator[-1] == "+" else words

    def _plain(self, text: str | Chars) -> Chars:
        return text if isinstance(text, list) else [(char, self.where) for char in text]

    def _arithmetic(self, source: str) -> str | Chars:
        def value_of(form: re.Match[str]) -> str:
            words = self.variables.get(form[1] or form[2])
            word = as_word(words[0]) if words else None
            if word is None or word.unknown or not re.fullmatch(r"\s*-?[0-9]+\s*", word.text):
                raise ValueError(form[1] or form[2])
            return f"({word.text})"

        try:
            text = re.sub(r"\$?\{?\b([A-Za-z_]\w*)\b\}?|\$\{?([0-9]+)\}?", value_of, source)
            return str(evaluate(text))
        except (ValueError, ArithmeticError, RecursionError):
            return mark(f"{self.where}: $(({source.strip()})) has a part that is unknown", self.where)


def _source_at(raw: str, at: int) -> str:
    """Return the source of the expansion that starts at a place."""
    if raw[at] == "`":
        end = raw.find("`", at + 1)
        return raw[at : end + 1] if end > 0 else raw[at:]
    for opening, closing in (("(", ")"), ("{", "}")):
        if raw[at + 1 : at + 2] == opening:
            depth = 0
            for place in range(at + 1, len(raw)):
                depth += (raw[place] == opening) - (raw[place] == closing)
                if depth == 0:
                    return raw[at : place + 1]
            return raw[at:]
    form = re.compile(r"\$([A-Za-z_]\w*|[0-9@*#?$!-])?").match(raw, at)
    assert form is not None
    return form[0]
