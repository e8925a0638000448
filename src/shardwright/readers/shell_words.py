"""The tokens of a shell script: raw words with quotes and expansions, arrays and operators, each with its line."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from shardwright.system.errors import InputError

Chars = list[tuple[str, str]]
"""Characters, each with its file and line. An element of more than one character is the reason for unknown text."""
_OPERATORS = ("\n", ";;", "&&", "||", "|&", "<<<", "<<", ">>", "&>", ">&", ";", "&", "|", "(", ")", "<", ">")
_ARRAY = re.compile(r"([A-Za-z_]\w*)(\+?)=")


@dataclass(frozen=True)
class RawWord:
    """A word before its expansion. `where`: its file and line."""

    raw: str
    where: str


@dataclass(frozen=True)
class Operator:
    """An operator or the end of a line."""

    raw: str
    where: str


@dataclass(frozen=True)
class Array:
    """The assignment of an array, `NAME=(...)` or `NAME+=(...)`."""

    name: str
    appends: bool
    words: tuple[RawWord, ...]
    where: str

    @property
    def raw(self) -> str:
        """Return the start of its source."""
        return f"{self.name}=("


Token = RawWord | Operator | Array


def is_name(text: str) -> bool:
    """Return whether a text is a name that a function can have."""
    return re.fullmatch(r"[A-Za-z_][\w-]*", text) is not None


def tokens(text: str, file: str) -> Iterator[Token]:
    """Yield the tokens of a script. Raises InputError with the line for a quote or bracket without its end."""
    yield from _Reader(text.replace("\r\n", "\n"), file).tokens()


class _Reader:
    """A place in a script."""

    def __init__(self, text: str, file: str) -> None:
        self.text, self.file, self.at, self.line = text, file, 0, 1
        self.documents: list[str] = []

    @property
    def where(self) -> str:
        return f"{self.file}:{self.line}"

    def _rest(self, n: int) -> str:
        return self.text[self.at : self.at + n]

    def _skip_blanks(self) -> None:
        while True:
            if self._rest(2) == "\\\n":
                self.at, self.line = self.at + 2, self.line + 1
            elif self._rest(1) in (" ", "\t"):
                self.at += 1
            elif self._rest(1) == "#":
                end = self.text.find("\n", self.at)
                self.at = len(self.text) if end < 0 else end
            else:
                return

    def tokens(self) -> Iterator[Token]:
        while True:
            self._skip_blanks()
            if self.at >= len(self.text):
                return
            operator = next((candidate for candidate in _OPERATORS if self.text.startswith(candidate, self.at)), None)
            if operator is None:
                yield self._word()
                continue
            where = self.where
            self.at += len(operator)
            if operator == "<<":
                self._skip_blanks()
                self.documents.append(self._word().raw.lstrip("-").strip("'\"\\"))
                continue
            if operator == "\n":
                self.line += 1
                self._skip_documents()
            yield Operator(operator, where)

    def _skip_documents(self) -> None:
        """Skip the here-documents that follow a line."""
        for end in self.documents:
            lines = self.text[self.at :].split("\n")
            last = next((number for number, line in enumerate(lines) if line.strip() == end), len(lines) - 1)
            self.at = min(len(self.text), self.at + sum(len(line) + 1 for line in lines[: last + 1]))
            self.line += last + 1
        self.documents = []

    def _word(self) -> RawWord | Array:
        start, where = self.at, self.where
        while self.at < len(self.text):
            char = self.text[self.at]
            if char == "(" and (form := _ARRAY.fullmatch(self.text, start, self.at)):
                self.at += 1
                return Array(form[1], bool(form[2]), tuple(self._items(where)), where)
            if char == "[" and _is_index(self.text, start, self.at):
                self.at = self.text.find("]", self.at) + 1 or len(self.text)
            elif char in " \t\n;&|()<>":
                break
            else:
                self._part(char)
        return RawWord(self.text[start : self.at], where)

    def _items(self, where: str) -> Iterator[RawWord]:
        """Yield the words of an array up to its `)`."""
        while True:
            self._skip_blanks()
            char = self._rest(1)
            if not char:
                raise InputError(f"{where}: an array without its ')'; the file is truncated")
            if char == "\n":
                self.at, self.line = self.at + 1, self.line + 1
            elif char == ")":
                self.at += 1
                return
            else:
                word = self._word()
                if not word.raw or isinstance(word, Array):
                    raise InputError(f"{self.where}: {char!r} in an array is not supported")
                yield word

    def _part(self, char: str) -> None:
        """Move after a character, a quoted text or an expansion."""
        start, where = self.at, self.where
        if char == "\\":
            self.at += 2
        elif char == "'":
            self.at = self.text.find("'", start + 1) + 1
        elif char == '"':
            self._quoted()
        elif char == "`":
            self.at = self.text.find("`", start + 1) + 1
        elif self._rest(2) in ("$(", "${"):
            self._bracket(self.text[start + 1])
        else:
            self.at += 1
        if self.at <= start:
            raise InputError(f"{where}: {char} without its end; the file is truncated")
        self.at = min(self.at, len(self.text))
        self.line += self.text.count("\n", start, self.at) - (self.line - int(where.rpartition(":")[2]))

    def _quoted(self) -> None:
        self.at += 1
        while self.at < len(self.text) and self.text[self.at] != '"':
            if self.text[self.at] == "\\":
                self.at += 2
            elif self._rest(2) in ("$(", "${"):
                self._bracket(self.text[self.at + 1])
            else:
                self.at += 1
        self.at = self.at + 1 if self.at < len(self.text) else 0

    def _bracket(self, opening: str) -> None:
        """Move after `$(...)` or `${...}`, whose inside may have quotes and brackets."""
        closing, depth = {"(": ")", "{": "}"}[opening], 0
        self.at += 1
        while self.at < len(self.text):
            char = self.text[self.at]
            if char == "\\":
                self.at += 1
            elif char == "'" and opening == "(":
                self.at = max(self.text.find("'", self.at + 1), self.at)
            depth += (char == opening) - (char == closing)
            self.at += 1
            if depth == 0:
                return
        self.at = 0


def _is_index(text: str, start: int, at: int) -> bool:
    """Return whether the bracket at a place is the index of an assignment, `NAME[0]=`."""
    return (
        re.fullmatch(r"[A-Za-z_]\w*", text[start:at]) is not None
        and re.match(r"\[[^\]\s]*\]\+?=", text[at:]) is not None
    )
