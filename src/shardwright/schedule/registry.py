"""The registry of schedules: one row each, with all facts that the rest of the program needs.

`schedule.named` registers the built-in schedules with the same `register` that a user's file calls (docs/schedules.md).
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache

from shardwright.schedule.actions import Schedule, Ways, round_and_round
from shardwright.schedule.validate import problems as invalid
from shardwright.system.errors import ScheduleError, nearest

Rule = Callable[[int, int, int], Iterable[str]]


def no_rule(n_ranks: int, n_microbatches: int, virtual_stages: int) -> Iterable[str]:
    """Return no rules, for a schedule that runs with any numbers of ranks and micro-batches."""
    return ()


def same_number(n_ranks: int, n_microbatches: int) -> int:
    """Return the number itself: the default of `Kind.representative`."""
    return n_microbatches


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One row of the registry.

    `builder(n_ranks, n_microbatches)` returns the `Schedule` (`actions.make`); `build.build` sets its name. If
    `virtual_stages_tried` is not empty, the builder also gets the keyword `virtual_stages`; if `searched` (the schedule
    depends on given times and takes seconds to build), the keywords `times`, `in_flight_limit` and `kept_for_weight`
    (see `build.build`).
    `help`: a sentence that describes the schedule.
    `ways(n_ranks, virtual_stages)`: the routes of micro-batches through the ranks: for each route, the rank of every
    stage in order (`schedule.actions` has the usual ones). With two routes two ranks hold each stage.
    `splits_backward`: whether the backward pass is split into I and W, which the model then computes separately.
    `virtual_stages`: default number of stages of a rank on one route. `virtual_stages_tried`: empty if that number is
    fixed; otherwise it can be chosen, and the planner tries these values.
    `rules(n_ranks, n_microbatches, virtual_stages)`: why such a schedule cannot be built, a sentence for each broken
    rule; all three are 1 or more.
    `representative(n_ranks, n_microbatches)`: a smaller number of micro-batches for which the peak activation memory of
    every rank is the same, to compute memory quickly. `microbatches_stay`: all micro-batches are in flight at once, so
    that a rank's activation memory grows with their number.
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

    def stages_per_rank(self, requested: int | None) -> int:
        """Return the virtual stages of a rank if `requested` are requested. None means the row's own number; so does 1
        if the number is fixed."""
        return (
            self.virtual_stages
            if requested is None or (requested == 1 and not self.virtual_stages_tried)
            else requested
        )


_KINDS: dict[str, Kind] = {}


def register(kind: Kind) -> Kind:
    """Add a schedule; layouts, drawings, the planner, verification and training can then use it.

    Returns the row. Raises ScheduleError if the name is taken.
    """
    if kind.name in _KINDS:
        raise ScheduleError(f"schedule {kind.name!r} is registered already; valid: another name")
    _KINDS[kind.name] = kind
    return kind


def names() -> tuple[str, ...]:
    """Return the names of all schedules, in the order of registration."""
    return tuple(_KINDS)


def find(name: str) -> Kind:
    """Return the row of a name. Raises ScheduleError for a name that is not registered."""
    if name not in _KINDS:
        raise ScheduleError(f"schedule {name!r} is not known; {nearest(name, _KINDS)}")
    return _KINDS[name]


@cache
def check_row(kind: Kind) -> None:
    """Build a small example and raise ScheduleError if it cannot be run or contradicts the row.

    Searched schedules are not checked, because the search takes long.
    """
    virtual = kind.virtual_stages
    sizes = [(ranks, 2 * ranks) for ranks in range(2, 9) if not [*kind.rules(ranks, 2 * ranks, virtual)]]
    if kind.searched or not sizes:
        return
    n_ranks, n_microbatches = sizes[0]
    chosen = {"virtual_stages": virtual} if kind.virtual_stages_tried else {}
    schedule = kind.builder(n_ranks, n_microbatches, **chosen)
    broken = invalid(schedule)
    ways = kind.ways(n_ranks, virtual)
    if not broken and (len(schedule.ranks) != n_ranks or schedule.n_stages != len(ways[0])):
        broken = [f"{schedule.n_ranks} ranks and {schedule.n_stages} stages, but `ways` has {n_ranks}, {len(ways[0])}"]
    if not broken and any(schedule.path_of(microbatch) not in ways for microbatch in range(n_microbatches)):
        broken = ["the route of a micro-batch through the ranks is not one of `ways`"]
    if not broken and schedule.splits_backward and not kind.splits_backward:
        broken = ["it has I and W, but `splits_backward` is False"]
    if broken:
        where = f"schedule {kind.name!r}, of {n_ranks} ranks and {n_microbatches} microbatches"
        raise ScheduleError(*(f"{where}: {problem}" for problem in broken))
