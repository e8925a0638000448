"""What is known of a key of the layout, for everything that reads keys: the run file, the planner, verify, the docs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from shardwright.system.errors import nearest

MOST_RANKS = 2**22
"""The most ranks of a world. A larger degree is a mistake of typing, and the work of a search grows with it."""

MOST_LAYERS = 2**14
"""The most layers of a model, each of which has rows in tables of parameters."""


class JobSizes(NamedTuple):
    """What `LayoutKey.words` mentions of a job; `seq_len` in tokens, `node_size` in ranks."""

    n_layers: int
    n_experts: int
    seq_len: int
    node_size: int


@dataclass(frozen=True, kw_only=True)
class LayoutKey:
    """All that is known of a key of the layout. The run file, the planner, verify and the docs read it from `KEYS`.

    `help`: what it sets, for the reference of the run file. `words(layout, sizes)`: what its value means, for the page
    and the printed plan. `choices()`: the valid values; None: a degree or count, `least` to `most`, or a list of them.
    `members()`: the valid words of a list of words, each at most once.
    `derived(layout)`: its default, where that depends on other keys.
    `used(layout)`: whether it has a meaning in a layout; also asked of `cost.job.Candidates`, with arrays. `needs`:
    what that takes, in words; where this is given, a value other than the default that is not used is an error.
    `said`: whether it is written down wherever it is used, and not only where it differs from its default.
    `group`: the name of the choice that it is part of, where several keys are one choice; else its own name.
    `off(layout)`: the changes that switch it off, for the search for a culprit; its default unless given. `milder`: a
    value that is tried after that. `in_turn`: other values, of which the matrix of verify has any two of different keys
    together in some layouts, and not each in every one. `unverified`: why that matrix leaves it at its default.
    `in_run_file`: values that a run file may have, in the place of which another is decided before there is a layout
    (`config/settle.py`).
    `planned(layout)`: the values that the planner searches; all choices unless given, the default where there are none.
    `not_priced()`: values that the cost model has no formulas for. `runner_up`: whether a plan shows the best layout
    with another value.
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
    said: bool = False
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
        """Its value in a layout where it is not given."""
        return self.derived(layout) if self.derived else self.default

    def problem(self, value: Any, also: Sequence[Any] = ()) -> str | None:
        """The rule that a value breaks whatever else is chosen; None where there is none. `also`: values that are valid
        here besides."""
        if value in also:
            return None
        if value is None and (self.derived or self.default is None):
            return None
        if self.members is not None:
            return _members_problem(value, self.members())
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

    def searched(self, layout: Any) -> Sequence[Any]:
        """The values that the planner tries in the place of that of a layout."""
        if not self.used(layout):
            return (self.default_in(layout),)
        if self.planned is not None:
            return self.planned(layout)
        return self.choices() if self.choices is not None else (self.default_in(layout),)


def _members_problem(values: Sequence[str], valid: Sequence[str]) -> str | None:
    if wrong := [value for value in values if value not in valid]:
        return f"{wrong[0]!r} is not one of the choices; {nearest(wrong[0], valid)}"
    if not values or len(set(values)) < len(values):
        return f"one or more are needed, each once; valid: {', '.join(valid)}"
    return None


def written(value: Any) -> str:
    """A value of a key as it is written in a line: `true`, `20+21+20`."""
    if isinstance(value, bool):
        return str(value).lower()
    return "+".join(map(str, value)) if isinstance(value, tuple) else str(value)
