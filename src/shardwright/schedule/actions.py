"""A pipeline schedule: for each rank of `pp`, the list of its actions, in order.

The layers of a model are partitioned into consecutive stages 0 to S-1. An action is one op of one stage on one
micro-batch:

| op | computes                                         | depends on (same micro-batch)                  |
| -- | ------------------------------------------------ | ---------------------------------------------- |
| F  | forward: the stage's output                      | F of the previous stage                        |
| I  | the gradient of the stage's input                | F of this stage; I or B of the next stage      |
| W  | the gradients of the stage's weights             | I of this stage                                |
| B  | the whole backward pass, I and W in one          | as I                                           |

Most schedules run a stage on one rank for all micro-batches. In DualPipe two ranks hold each stage: one runs the first
half of the micro-batches, the other the second half.

The assignment of stages to ranks of `pp` is written as the routes of micro-batches through the ranks.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from shardwright.system.errors import ScheduleError

Op = Literal["F", "B", "I", "W"]
OPS: tuple[Op, ...] = ("F", "B", "I", "W")
Result = tuple[int, Op, int]
"""The result of an action: (stage, op, micro-batch) with op F for an output, I for an input gradient (of I or B),
and W for the gradients of weights."""


class Action(NamedTuple):
    """One op of a stage on a micro-batch; written `3F0`, as in PyTorch's compute-only CSV."""

    stage: int
    op: Op
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.op}{self.microbatch}"

    @property
    def sends_back(self) -> bool:
        """Return whether its result is the gradient that the previous stage needs."""
        return self.op in ("I", "B")

    @property
    def makes(self) -> Result:
        """The result of the action. B has two; this is the input's gradient, on which another action depends."""
        return self.stage, "I" if self.sends_back else self.op, self.microbatch


@dataclass(frozen=True)
class Schedule:
    """The actions of every rank: `ranks[r]` is the list of rank r of `pp`, in order.

    `staggered`: ranks may start a step at different times, so that idle time counts from a rank's own first action
    (Qi et al., arXiv 2401.10241, section 5.3); otherwise it counts from time zero.
    """

    name: str
    n_stages: int
    n_microbatches: int
    ranks: tuple[tuple[Action, ...], ...]
    staggered: bool = False

    @property
    def n_ranks(self) -> int:
        """Number of ranks along `pp`."""
        return len(self.ranks)

    def actions(self) -> Iterator[tuple[int, Action]]:
        return ((rank, action) for rank, actions in enumerate(self.ranks) for action in actions)

    @cached_property
    def place(self) -> dict[tuple[int, int], int]:
        """(stage, micro-batch) -> the rank that runs it."""
        return {(action.stage, action.microbatch): rank for rank, action in self.actions()}

    def path_of(self, microbatch: int) -> tuple[int, ...]:
        """Return the route of a micro-batch through the ranks: the rank of every stage, in order."""
        return tuple(self.place[stage, microbatch] for stage in range(self.n_stages))

    def stages_of(self, rank: int) -> tuple[int, ...]:
        return tuple(sorted({action.stage for action in self.ranks[rank]}))

    @cached_property
    def splits_backward(self) -> bool:
        """Return whether any backward pass is split into I and W."""
        return any(action.op == "W" for _, action in self.actions())

    def needs(self, action: Action) -> tuple[int, int] | None:
        """Return the other stage's (stage, micro-batch) on which an action depends: on its F for a forward action, on
        its I or B for a backward action; None at the ends of the pipeline and for W."""
        if action.op == "F":
            return (action.stage - 1, action.microbatch) if action.stage else None
        if action.sends_back:
            return (action.stage + 1, action.microbatch) if action.stage + 1 < self.n_stages else None
        return None

    def waits_for(self, action: Action) -> Result | None:
        """Return the result on which an action depends, of another stage (`needs`) or its own. One is enough: I of the
        next stage implies F of the next stage, which implies F of this stage."""
        other = self.needs(action)
        if other is not None:
            return other[0], "F" if action.op == "F" else "I", other[1]
        return None if action.op == "F" else (action.stage, "I" if action.op == "W" else "F", action.microbatch)

    @cached_property
    def numbered(self) -> tuple[list[list[int]], list[list[int]], int]:
        """Return, for every action of every rank, the number of the result on which it depends, or -1, and the number
        of its own result; and the number of results. Raises ScheduleError for a stage or micro-batch out of range."""
        numbers: dict[Result | None, int] = {None: -1}
        for _, (stage, op, microbatch) in self.actions():
            if not (0 <= stage < self.n_stages and 0 <= microbatch < self.n_microbatches):
                raise ScheduleError(
                    f"{self.name}: {stage}{op}{microbatch} is outside the {self.n_stages} stages and "
                    f"{self.n_microbatches} microbatches, which are counted from 0"
                )
        needs = [
            [numbers.setdefault(self.waits_for(action), len(numbers) - 1) for action in actions]
            for actions in self.ranks
        ]
        makes = [[numbers.setdefault(action.makes, len(numbers) - 1) for action in actions] for actions in self.ranks]
        return needs, makes, len(numbers) - 1


def make(
    n_stages: int,
    n_microbatches: int,
    ranks: Iterable[Iterable[Action]],
    *,
    name: str = "schedule",
    staggered: bool = False,
) -> Schedule:
    """Return a schedule from a builder's lists of actions; `schedule.build.build` sets its registered name."""
    return Schedule(name, n_stages, n_microbatches, tuple(tuple(actions) for actions in ranks), staggered)


Ways = tuple[tuple[int, ...], ...]
"""The routes of micro-batches: each is the rank of every stage, in order. With n routes, the first n-th of the
micro-batches takes the first route, and so on."""


def round_and_round(n_ranks: int, virtual_stages: int) -> Ways:
    """Return one route: stage s is on rank s % n_ranks."""
    return (tuple(range(n_ranks)) * virtual_stages,)


def down_and_up(n_ranks: int, virtual_stages: int) -> Ways:
    """Return one route along a V: the first half of the stages in the order of the ranks, the second in reverse."""
    down = tuple(range(n_ranks))
    return (down + down[::-1],)


def from_both_ends(n_ranks: int, virtual_stages: int) -> Ways:
    """Return two routes: the first half of the micro-batches in the order of the ranks, the second in reverse order."""
    down = tuple(range(n_ranks))
    return down, down[::-1]


def stages_of_rank(routes: Ways, rank: int) -> list[int]:
    """Return the stages of a rank: first the stages of the first route in order, then of the second."""
    return [stage for route in routes for stage, owner in enumerate(route) if owner == rank]
