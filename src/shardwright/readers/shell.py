"""Evaluate a shell script without executing it: assignments, arrays, expansions, tests, `if`, `case`.

The result is the list of commands with their words. A word whose text depends on a program, on an argument of the
script or on an unset variable is kept, with the reason why its text is unknown: the reader of the words decides whether
that matters.
"""

import fnmatch
import re
from dataclasses import dataclass, field
from pathlib import Path

from shardwright.readers.shell_expansion import Expansion
from shardwright.readers.shell_values import ShellTest, Word, as_word, mark
from shardwright.readers.shell_words import Array, Chars, Operator, RawWord, Token, is_name, tokens
from shardwright.system.errors import InputError
from shardwright.system.files import read_text, reason

LONGEST_VALUE = 200_000
DEEPEST = 8
"""Most files that source each other."""
MOST_FILES = 100
"""Most files that a script sources, counting each time."""
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=")
_DECLARE = ("export", "declare", "local", "readonly", "typeset")
_LOOPS = ("for", "while", "until", "select")
_ENDS = {"if": "fi", "case": "esac"} | dict.fromkeys(_LOOPS, "done")
_RESERVED = ("then", "do", "{", "}", "!", "time")
_SEPARATORS = ("\n", ";", ";;", "&", "|", "||", "&&", "|&", "(", ")")


@dataclass
class Shell:
    """The state of a script: variables, and the commands so far. `values`: name -> text or list of texts; `notes`: the
    parts that were not evaluated, each with file and line."""

    values: dict[str, list[Chars]] = field(default_factory=dict)
    arrays: set[str] = field(default_factory=set)
    commands: list[list[Word]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    depth: int = 0
    n_files: int = 0

    def run(self, path: Path) -> None:
        """Evaluate a file. Raises InputError for a file that cannot be read or parsed, or after `MOST_FILES` files."""
        self.n_files += 1
        if self.n_files > MOST_FILES:
            raise InputError(f"{path}: more than {MOST_FILES} files are sourced; give the script without the others")
        try:
            text = read_text(path)
        except (OSError, ValueError) as error:
            raise InputError(f"{path}: {reason(error)}") from None
        try:
            _Script(self, path, list(tokens(text, str(path)))).run()
        except RecursionError:
            raise InputError(f"{path}: nested too deeply") from None

    def text_of(self, name: str) -> Word | None:
        """Return the text of a variable, or None if it is not set."""
        words = self.values.get(name)
        return None if not words else as_word(words[0])


class _Script:
    """The tokens of one file, evaluated one statement after another."""

    def __init__(self, shell: Shell, path: Path, raw_tokens: list[Token]) -> None:
        self.shell, self.path, self.tokens, self.at = shell, path, raw_tokens, 0

    def run(self) -> None:
        while self.at < len(self.tokens):
            self._statement(True)

    def _peek(self) -> Token | None:
        return self.tokens[self.at] if self.at < len(self.tokens) else None

    def _raw(self) -> str:
        token = self._peek()
        return token.raw if isinstance(token, RawWord) else ""

    def _statement(self, active: bool) -> bool | None:
        """Evaluate a statement, or skip it; return its exit status if it is known."""
        token = self._peek()
        assert token is not None
        if isinstance(token, Operator):
            self.at += 1
            return None
        word = self._raw()
        if word == "if":
            self._if(active)
        elif word == "case":
            self._case(active)
        elif word in _LOOPS:
            self._skip_block(active, f"a {word} loop")
        elif self._defines_function():
            self._skip_function()
        elif word in _RESERVED:
            self.at += 1
        else:
            return self._list_of_commands(active)
        return None

    def _list_of_commands(self, active: bool) -> bool | None:
        """Evaluate a command and the commands that follow it after && and ||; return the exit status if it is known."""
        words, status = self._command_tokens(), None
        if active and words:
            status = self._command(words)
        following = self._peek()
        if isinstance(following, Operator) and following.raw in ("&&", "||"):
            self.at += 1
            self._skip_newlines()
            wanted = following.raw == "&&"
            run = active and (status is None or status is wanted)
            if self._peek() is not None:
                later = self._statement(run)
                if status is not None:
                    return later if status is wanted else status
            return None
        return status

    def _skip_newlines(self) -> None:
        while isinstance(token := self._peek(), Operator) and token.raw == "\n":
            self.at += 1

    def _defines_function(self) -> bool:
        follow = self.tokens[self.at + 1 : self.at + 3]
        return self._raw() == "function" or (
            is_name(self._raw()) and [token.raw for token in follow if isinstance(token, Operator)] == ["(", ")"]
        )

    def _skip_function(self) -> None:
        token = self.tokens[self.at]
        self.shell.notes.append(f"{token.where}: the body of a function is not evaluated")
        depth, begun = 0, False
        while self.at < len(self.tokens) and not (begun and depth == 0):
            raw = self._raw()
            depth += (raw == "{") - (raw == "}")
            begun |= raw == "{"
            self.at += 1

    def _skip_block(self, active: bool, what: str) -> None:
        """Skip a block up to its end; variables that are assigned in it become unknown."""
        first = self.tokens[self.at]
        open_ends = [_ENDS[self._raw()]]
        self.at += 1
        if active and first.raw in ("for", "select"):
            self.shell.values[self._raw()] = [mark(f"the variable of {what}, {first.where}", first.where)]
        while open_ends:
            token = self._peek()
            if token is None:
                raise InputError(f"{first.where}: {what} without its {open_ends[-1]}; the file is truncated")
            raw = self._raw()
            if active:
                self._forget(token, f"assigned in {what}, {first.where}, which would have to be executed")
            if raw == open_ends[-1]:
                open_ends.pop()
            elif raw in _ENDS and self._begins_statement():
                open_ends.append(_ENDS[raw])
            self.at += 1
        if active:
            self.shell.notes.append(f"{first.where}: {what} is not evaluated")

    def _begins_statement(self) -> bool:
        before = self.tokens[self.at - 1]
        return isinstance(before, Operator) or before.raw in (*_RESERVED, "else", "elif")

    def _forget(self, token: Token, why: str) -> None:
        """Make the variable that a token assigns unknown."""
        name = token.name if isinstance(token, Array) else ""
        if isinstance(token, RawWord) and (form := _ASSIGNMENT.match(token.raw)):
            name = form[1]
        if name:
            self.shell.values[name] = [mark(why, token.where)]

    def _block(self, active: bool, *ends: str) -> None:
        """Evaluate statements up to one of the words `ends`."""
        first = self.tokens[min(self.at, len(self.tokens) - 1)]
        while self._raw() not in ends or not self._begins_statement():
            if self._peek() is None:
                raise InputError(f"{first.where}: no {ends[-1]} follows; the file is truncated")
            self._statement(active)

    def _if(self, active: bool) -> None:
        start, whole, taken = self.tokens[self.at], self.at, False
        while self._raw() in ("if", "elif"):
            self.at += 1
            status = self._condition(active and not taken)
            if active and not taken and status is None:
                self.at = whole
                self._skip_block(active, f"an if whose condition is unknown ({self._source(start)})")
                return
            self._block(active and not taken and status is True, "elif", "else", "fi")
            taken = taken or status is True
        if self._raw() == "else":
            self.at += 1
            self._block(active and not taken, "fi")
        self.at += 1

    def _source(self, token: Token) -> str:
        """Return the source of the condition that follows a token."""
        at, words = self.tokens.index(token) + 1, []
        while at < len(self.tokens) and not isinstance(self.tokens[at], Operator):
            words.append(self.tokens[at].raw)
            at += 1
        return " ".join(words)[:80]

    def _condition(self, active: bool) -> bool | None:
        """Evaluate the statements before `then`; return the status of the last one."""
        status = None
        while self._raw() != "then":
            if self._peek() is None:
                raise InputError(f"{self.tokens[-1].where}: no then follows; the file is truncated")
            inverted = self._raw() == "!"
            self.at += inverted
            result = self._statement(active)
            status = (result if not inverted or result is None else not result) if result is not None else status
        self.at += 1
        return status

    def _case(self, active: bool) -> None:
        start, whole = self.tokens[self.at], self.at
        self.at += 1
        subject = self._expand_one(self.tokens[self.at]) if active else None
        if active and (subject is None or subject.unknown):
            self.at = whole
            self._skip_block(active, "a case whose word is unknown")
            return
        while self._raw() != "in":
            self.at += 1
            if self._peek() is None:
                raise InputError(f"{start.where}: no esac follows; the file is truncated")
        self.at += 1
        taken = False
        while True:
            while isinstance(self._peek(), Operator):
                self.at += 1
            if self._raw() == "esac":
                break
            patterns = []
            while not (isinstance(token := self._peek(), Operator) and token.raw == ")"):
                if token is None:
                    raise InputError(f"{start.where}: no esac follows; the file is truncated")
                if isinstance(token, RawWord):
                    word = self._expand_one(token)
                    patterns.append("" if word is None else word.text)
                self.at += 1
            self.at += 1
            fits = bool(
                active and not taken and subject and any(fnmatch.fnmatchcase(subject.text, p) for p in patterns)
            )
            while not (isinstance(token := self._peek(), Operator) and token.raw == ";;") and self._raw() != "esac":
                if token is None:
                    raise InputError(f"{start.where}: no esac follows; the file is truncated")
                self._statement(fits)
            taken |= fits
        self.at += 1

    def _command_tokens(self) -> list[Token]:
        """Return the tokens of a simple command, and move after them. Redirections are left out."""
        result: list[Token] = []
        test = self._raw() == "[["
        while (token := self._peek()) is not None:
            if isinstance(token, Operator):
                if token.raw in ("<", ">", ">>", "<<<", ">&", "&>") and not test:
                    self.at += 2
                    continue
                if token.raw in _SEPARATORS and not (test and token.raw != "\n"):
                    break
                result.append(RawWord(token.raw, token.where))
            else:
                result.append(token)
            self.at += 1
            if test and token.raw == "]]":
                break
        return result

    def _command(self, rest: list[Token]) -> bool | None:
        """Evaluate a simple command; return its exit status if it is known."""
        while rest and self._assign(rest[0], export=False):
            rest = rest[1:]
        if not rest:
            return True
        name = rest[0].raw
        if name in _DECLARE:
            for token in rest[1:]:
                self._assign(token, export=True)
            return True
        if name in ("[", "[[", "test"):
            tested = [self._expand_one(token) for token in rest[1:]]
            return ShellTest([word for word in tested if word.text not in ("]", "]]")]).value()
        words = [as_word(chars) for token in rest for chars in self.expand(token)]
        if name in (".", "source"):
            self._sourced(words)
            return None
        if name == "eval":
            words = [part for word in words[1:] for part in word.parts() or [word]]
        self.shell.commands.append(words)
        return {"true": True, ":": True, "false": False, "echo": True}.get(name)

    def _sourced(self, words: list[Word]) -> None:
        """Evaluate a sourced file if it lies next to the script."""
        if len(words) < 2:
            return
        name = words[1].text.rpartition("/")[2]
        near = self.path.parent / name
        if name and near.is_file() and self.shell.depth < DEEPEST:
            self.shell.depth += 1
            self.shell.run(near)
            self.shell.depth -= 1
        else:
            self.shell.notes.append(f"{words[1].where}: sources {name or 'a file'}, which is not next to the script")

    def _assign(self, token: Token, export: bool) -> bool:
        """Make the assignment of a token; return whether it is one."""
        values = self.shell.values
        if isinstance(token, Array):
            items = [chars for word in token.words for chars in self.expand(word)]
            before = values.get(token.name, []) if token.appends else []
            self._keep(token.name, [*before, *items], token)
            self.shell.arrays.add(token.name)
            return True
        form = _ASSIGNMENT.match(token.raw) if isinstance(token, RawWord) else None
        if form is None:
            return False
        value = self.expand(RawWord(token.raw[form.end() :], token.where), split=False)
        chars: Chars = [char for word in value for char in word]
        if form[2]:
            chars = [*(values.get(form[1]) or [[]])[0], *chars]
        self._keep(form[1], [chars], token)
        self.shell.arrays.discard(form[1])
        return True

    def _keep(self, name: str, words: list[Chars], token: Token) -> None:
        """Set a variable. Raises InputError if its text is longer than a script needs."""
        if sum(map(len, words)) > LONGEST_VALUE:
            raise InputError(f"{token.where}: {name} has more than {LONGEST_VALUE:,} characters")
        self.shell.values[name] = words

    def _expand_one(self, token: Token) -> Word:
        words = self.expand(token, split=False)
        return as_word([char for chars in words for char in chars]) if words else Word("", token.where)

    def expand(self, token: Token, split: bool = True) -> list[Chars]:
        """Return the words of a raw word, as `Chars`."""
        assert isinstance(token, RawWord)
        return Expansion(self.shell.values, token).words(split)
