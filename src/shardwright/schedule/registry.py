"""The schedules there are: one row each, which says all that the rest of the program has to know of a schedule.

Our own are registered in `schedule.named` through the same `register` that a user's file calls (docs/schedules.md).
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache

from shardwright.errors import ScheduleError, nearest
from shardwright.schedule.actions import Schedule
from shardwright.schedule.placement import Ways, round_and_round
from shardwright.schedule.validate import problems as invalid

Rule = Callable[[int, int, int], Iterable[str]]


def no_rule(n_ranks: int, n_microbatches: int, virtual_stages: int) -> Iterable[str]:
    """The rules of a schedule that runs at any size."""
    return ()


def same_number(n_ranks: int, n_microbatches: int) -> int:
    """`Kind.representative` of a schedule of which nothing is known: the number itself."""
    return n_microbatches


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One row of the registry.

    `builder(n_ranks, n_microbatches)` returns the `Schedule` (`actions.make`), which `build.build` names. Where
    `virtual_stages_tried`, the builder is also given `virtual_stages` by name; where `searched`, which means that the
    schedule is made for given times, `times`, `in_flight_limit` and `kept_for_weight` (see `build.build`).
    `help`: a sentence on what the schedule does.
    `ways(n_ranks, virtual_stages)`: the ways that microbatches take through the stages: for each way, the rank of
    every stage in order (`schedule.placement` has the usual ones). With two ways each stage is held by two ranks.
    `splits_backward`: whether the backward pass is split into I and W, so that the model has to compute them apart.
    `virtual_stages`: stages of a rank on one way, where nothing else is asked for. `virtual_stages_tried`: empty where
    that number is fixed; else other numbers can be asked for, and the planner tries these.
    `rules(n_ranks, n_microbatches, virtual_stages)`: why such a schedule cannot be built, a sentence for each broken
    rule; all three are 1 or more.
    `representative(n_ranks, n_microbatches)`: a smaller number of microbatches with which every rank holds as many
    activations at its fullest moments, to count memory quickly; `microbatches_stay`: all microbatches are in flight at
    once, so that what a rank holds grows with their number.
    """

    name: str
    builder: Callable[..., Schedule]
    help: str
    ways: Callable[[int, int], Ways] = round_and_round
    splits_backward: bool = False
    virtual_stages: int = 1
    virtual_stages_tried: tuple[int, ...] = ()
    rules: Rule = no_rule
    searched: bool = False
    representative: Callable[[int, int], int] = same_number
    microbatches_stay: bool = False

    @property
    def priced(self) -> bool:
        """Whether the planner can predict its time: not where the schedule depends on the times of the actions."""
        return not self.searched

    def stages_per_rank(self, asked: int | None) -> int:
        """The virtual stages of a rank where `asked` were asked for. None means the row's own number; so does 1 where
        the number is fixed."""
        return self.virtual_stages if asked is None or (asked == 1 and not self.virtual_stages_tried) else asked


_KINDS: dict[str, Kind] = {}


def register(kind: Kind) -> Kind:
    """Add a schedule; from then on it is valid in a layout, drawn, searched by the planner, verified and trained.

    Returns the row. Raises ScheduleError for a name that is taken.
    """
    if kind.name in _KINDS:
        raise ScheduleError(f"schedule {kind.name!r} is registered already; valid: another name")
    _KINDS[kind.name] = kind
    return kind


def names() -> tuple[str, ...]:
    """The names of all schedules, in the order in which they were registered."""
    return tuple(_KINDS)


def find(name: str) -> Kind:
    """The row of a name. Raises ScheduleError for one that is not registered."""
    if name not in _KINDS:
        raise ScheduleError(f"schedule {name!r} is not known; {nearest(name, _KINDS)}")
    return _KINDS[name]


@cache
def check_row(kind: Kind) -> None:
    """Build a small example and raise ScheduleError where it cannot be run, or is not what the row says.

    Not for a schedule that is searched: that takes long, and the search is our own.
    """
    virtual = kind.virtual_stages
    sizes = [(ranks, 2 * ranks) for ranks in range(2, 9) if not [*kind.rules(ranks, 2 * ranks, virtual)]]
    if kind.searched or not sizes:
        return
    n_ranks, n_microbatches = sizes[0]
    asked = {"virtual_stages": virtual} if kind.virtual_stages_tried else {}
    schedule = kind.builder(n_ranks, n_microbatches, **asked)
    wrong = invalid(schedule)
    ways = kind.ways(n_ranks, virtual)
    if not wrong and (len(schedule.ranks) != n_ranks or schedule.n_stages != len(ways[0])):
        wrong = [f"{schedule.n_ranks} ranks and {schedule.n_stages} stages, but `ways` has {n_ranks}, {len(ways[0])}"]
    if not wrong and any(schedule.path_of(microbatch) not in ways for microbatch in range(n_microbatches)):
        wrong = ["a microbatch goes another way through the ranks than those of `ways`"]
    if not wrong and schedule.splits_backward and not kind.splits_backward:
        wrong = ["it has I and W, but `splits_backward` is False"]
    if wrong:
        where = f"schedule {kind.name!r}, of {n_ranks} ranks and {n_microbatches} microbatches"
        raise ScheduleError(*(f"{where}: {problem}" for problem in wrong))
