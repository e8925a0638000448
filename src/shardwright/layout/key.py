"""The description of a layout key, shared by the run file, the planner, verify and the docs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from shardwright.system.errors import nearest

MOST_RANKS = 2**22
"""Maximum world size. A larger degree is a typing mistake, and the work of a search grows with the degree."""

MOST_LAYERS = 2**14
"""Maximum number of layers of a model, since each layer has rows in parameter tables."""


class JobSizes(NamedTuple):
    """The sizes of a job that `LayoutKey.words` uses; `seq_len` in tokens, `node_size` in ranks."""

    n_layers: int
    n_experts: int
    seq_len: int
    node_size: int


@dataclass(frozen=True, kw_only=True)
class LayoutKey:
    """The description of a layout key. The run file, the planner, verify and the docs read it from `KEYS`.

    `help`: the effect of the key, for the run-file reference.
    `words(layout, sizes)`: the meaning of its value, for the page and the printed plan.
    `choices()`: the valid values; None for a degree or count from `least` to `most`, or a list of them.
    `members()`: the valid words of a list of words, each at most once.
    `derived(layout)`: its default, if the default depends on other keys.
    `used(layout)`: whether the key has a meaning in a layout; also called with arrays (`cost.job.Candidates`).
    `needs`: the condition for `used`, in words. If given, a value other than the default is an error when unused.
    `always_written`: whether the key is written wherever it is used, and not only where it differs from its default.
    `group`: the name of the choice to which several keys belong; its own name by default.
    `off(layout)`: the changes that disable it, for the search for a culprit; its default unless given.
    `milder`: a value to try after `off`.
    `in_turn`: other values; the verify matrix pairs values of different keys in some layouts, not each value in every
    layout.
    `unverified`: why the verify matrix leaves the key at its default.
    `in_run_file`: values allowed in a run file that are resolved before there is a layout (`config/settle.py`).
    `planned(layout)`: the values that the planner searches; by default all choices, or the default if there are no
    choices.
    `not_priced()`: values that the cost model has no formulas for.
    `runner_up`: whether a plan shows the best layout with another value.
    """

    name: str = ""
    type: Any = None
    default: Any = None
    help: str
    words: Callable[[Any, JobSizes], str]
    choices: Callable[[], Sequence[Any]] | None = None
    least: int = 1
    most: int = MOST_RANKS
    members: Callable[[], Sequence[str]] | None = None
    derived: Callable[[Any], Any] | None = None
    used: Callable[[Any], Any] = lambda layout: True
    needs: str = ""
    always_written: bool = False
    group: str = ""
    off: Callable[[Any], dict[str, Any]] | None = None
    milder: Any = None
    in_turn: tuple[Any, ...] = ()
    in_run_file: tuple[Any, ...] = ()
    unverified: str = ""
    planned: Callable[[Any], Sequence[Any]] | None = None
    not_priced: Callable[[], Sequence[Any]] = tuple
    runner_up: bool = False

    def default_in(self, layout: Any) -> Any:
        """Return the key's default value in a layout."""
        return self.derived(layout) if self.derived else self.default

    def problem(self, value: Any, also: Sequence[Any] = ()) -> str | None:
        """Return the rule that a value breaks regardless of other keys, or None. `also`: additional valid values."""
        if value in also:
            return None
        if self._is_unset(value):
            return None
        if self.members is not None:
            return _members_problem(value, self.members())
        if (not_whole := self.number_problem(value)) is not None:
            return not_whole
        if self.choices is not None:
            valid = (*self.choices(), *also)
            if value not in valid:
                hint = nearest(value, valid) if isinstance(value, str) else f"valid: {', '.join(map(str, valid))}"
                return f"not one of the choices; {hint}"
        elif self.type in (int, int | None) and value < self.least:
            ranks = value == -1 and self.least == 1
            rest = ": the number itself, there is no -1 for the ranks that are left" if ranks else ""
            return f"{self.least} or more is needed{rest}"
        elif self.type in (int, int | None) and value > self.most:
            return f"at most {self.most:,} is possible"
        return None

    def number_problem(self, value: Any) -> str | None:
        """Return the rule that a value breaks which is no number, for a key that is one; else None."""
        number = self.type in (int, int | None) and not self._is_unset(value)
        return "a whole number is needed" if number and type(value) is not int else None

    def _is_unset(self, value: Any) -> bool:
        return value is None and (self.derived is not None or self.default is None)

    def searched(self, layout: Any) -> Sequence[Any]:
        """Return the values that the planner tries instead of the layout's own value."""
        if not self.used(layout):
            return (self.default_in(layout),)
        if self.planned is not None:
            return self.planned(layout)
        return self.choices() if self.choices is not None else (self.default_in(layout),)


def _members_problem(values: Sequence[str], valid: Sequence[str]) -> str | None:
    if invalid := [value for value in values if value not in valid]:
        return f"{invalid[0]!r} is not one of the choices; {nearest(invalid[0], valid)}"
    if not values or len(set(values)) < len(values):
        return f"one or more are needed, each once; valid: {', '.join(valid)}"
    return None


def written(value: Any) -> str:
    """Return a key's value as it is printed: `true`, `20+21+20`."""
    if isinstance(value, bool):
        return str(value).lower()
    return "+".join(map(str, value)) if isinstance(value, tuple) else str(value)
