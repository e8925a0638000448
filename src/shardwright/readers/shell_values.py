"""Values of a shell: words, integer arithmetic and the tests of `[ ... ]`."""

import ast
import fnmatch
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from shardwright.readers.shell_words import Chars


@dataclass(frozen=True)
class Word:
    """A word of a command. `where`: its file and line. `unknown`: why its text is unknown, or None. `chars`: its
    characters, if it was expanded."""

    text: str
    where: str
    unknown: str | None = None
    chars: tuple[tuple[str, str], ...] = ()

    def parts(self) -> "list[Word]":
        """Return the words between its blanks. Only the words that have unknown text are unknown."""
        if not self.chars:
            return [Word(part, self.where, self.unknown) for part in self.text.split()]
        result: list[Chars] = [[]]
        for char, where in self.chars:
            if char.isspace():
                result.append([])
            else:
                result[-1].append((char, where))
        return [as_word(chars) for chars in result if chars]


def as_word(chars: Chars) -> Word:
    """Return characters as a word; its place is the place of the first character."""
    unknown = next((char[1:] for char, _ in chars if len(char) > 1), None)
    text = "".join(char for char, _ in chars if len(char) == 1)
    return Word(text, chars[0][1] if chars else "", unknown, tuple(chars))


def mark(why: str, where: str) -> Chars:
    """Return one element that stands for unknown text."""
    return [("\0" + why, where)]


def is_unset(word: Word) -> bool:
    """Return whether a word is an unset variable alone, which a shell drops."""
    return word.unknown is not None and word.unknown.startswith("$") and not word.text


_ARITHMETIC: dict[type, Callable[[int, int], int]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.Div: lambda a, b: int(a / b),
    ast.Mod: lambda a, b: a % b,
    ast.Gt: lambda a, b: int(a > b),
    ast.Lt: lambda a, b: int(a < b),
    ast.GtE: lambda a, b: int(a >= b),
    ast.LtE: lambda a, b: int(a <= b),
    ast.Eq: lambda a, b: int(a == b),
    ast.NotEq: lambda a, b: int(a != b),
}


def evaluate(text: str) -> int:
    """Return the value of integer arithmetic. Raises ValueError or ArithmeticError."""
    if "?" in text:
        condition, _, rest = text.partition("?")
        one, _, other = rest.partition(":")
        return evaluate(one if evaluate(condition) else other)
    try:
        return _evaluated(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, RecursionError, MemoryError):
        raise ValueError(text) from None


def _evaluated(node: ast.AST) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int and abs(node.value) < 2**63:
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_evaluated(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
        return _ARITHMETIC[type(node.op)](_evaluated(node.left), _evaluated(node.right))
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _ARITHMETIC:
        return _ARITHMETIC[type(node.ops[0])](_evaluated(node.left), _evaluated(node.comparators[0]))
    raise ValueError(ast.dump(node))


class ShellTest:
    """The words of `[ ... ]`, `[[ ... ]]` or `test`."""

    def __init__(self, words: list[Word]) -> None:
        self.words = words

    def value(self) -> bool | None:
        """Return the value of the test, or None if it is unknown."""
        for operators, joined in ((("||", "-o"), any), (("&&", "-a"), all)):
            parts = list(self._split(operators))
            if len(parts) > 1:
                values = [ShellTest(part).value() for part in parts]
                decisive = joined is any
                return decisive if decisive in values else None if None in values else not decisive
        words = self.words
        if words and words[0].text == "!":
            inner = ShellTest(words[1:]).value()
            return None if inner is None else not inner
        if len(words) == 2 and words[0].text in ("-z", "-n"):
            known = words[1].unknown is None or is_unset(words[1])
            return (not words[1].text) == (words[0].text == "-z") if known else None
        if len(words) == 1:
            return bool(words[0].text) if words[0].unknown is None or is_unset(words[0]) else None
        return self._compared(words) if len(words) == 3 else None

    def _split(self, operators: tuple[str, ...]) -> Iterator[list[Word]]:
        part: list[Word] = []
        for word in self.words:
            if word.text in operators:
                yield part
                part = []
            else:
                part.append(word)
        yield part

    def _compared(self, words: list[Word]) -> bool | None:
        left, operator, right = words
        if any(word.unknown and not is_unset(word) for word in (left, right)):
            return None
        if operator.text in ("=", "=="):
            return fnmatch.fnmatchcase(left.text, right.text)
        if operator.text == "!=":
            return not fnmatch.fnmatchcase(left.text, right.text)
        numbers = {"-eq": "==", "-ne": "!=", "-gt": ">", "-lt": "<", "-ge": ">=", "-le": "<="}
        if operator.text in numbers and left.text and right.text:
            try:
                return bool(evaluate(f"({left.text}) {numbers[operator.text]} ({right.text})"))
            except (ValueError, ArithmeticError):
                return None
        return None
