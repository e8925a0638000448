"""A pipeline schedule: for each rank of `pp`, what it computes, in order.

The layers of a model are cut into stages 0 to S-1, one after another. An action is one op on one microbatch in one
stage:

| op | computes                                         | needs first                                    |
| -- | ------------------------------------------------ | ---------------------------------------------- |
| F  | the stage's output                               | F of the stage before, same microbatch         |
| I  | the gradient of the stage's input                | its own F; I or B of the stage after           |
| W  | the gradient of the stage's weights              | its own I                                      |
| B  | both at once                                     | as I                                           |

A stage belongs to a rank for a microbatch: in most schedules to the same rank for all of them; in DualPipe each stage
lives on two ranks, of which one runs the first half of the microbatches and the other the second half.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from shardwright.errors import ScheduleError

Op = Literal["F", "B", "I", "W"]
OPS: tuple[Op, ...] = ("F", "B", "I", "W")
Result = tuple[int, Op, int]
"""What an action makes: (stage, op, microbatch) with op F for an output, I for the gradient of an input, by I or B, and
W for the gradient of weights."""


class Action(NamedTuple):
    """One op of a stage on a microbatch; written `3F0`, as in PyTorch's compute-only CSV."""

    stage: int
    op: Op
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.op}{self.microbatch}"

    @property
    def sends_back(self) -> bool:
        """Whether its result is the gradient that the stage before waits for."""
        return self.op in ("I", "B")

    @property
    def makes(self) -> Result:
        """Its result; of B, which also makes the gradient of the weights, the one that another action waits for."""
        return self.stage, "I" if self.sends_back else self.op, self.microbatch


@dataclass(frozen=True)
class Schedule:
    """What every rank runs. `ranks[r]` are the actions of rank r of `pp`, in order.

    `staggered`: ranks may begin a step at different times, so that a bubble counts from a rank's own first action
    (Qi et al., arXiv 2401.10241, section 5.3); else it counts from zero.
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
        """Every action, with its rank."""
        return ((rank, action) for rank, actions in enumerate(self.ranks) for action in actions)

    @cached_property
    def place(self) -> dict[tuple[int, int], int]:
        """(stage, microbatch) -> the rank that runs it."""
        return {(action.stage, action.microbatch): rank for rank, action in self.actions()}

    def path_of(self, microbatch: int) -> tuple[int, ...]:
        """The rank of every stage in order, for a microbatch."""
        return tuple(self.place[stage, microbatch] for stage in range(self.n_stages))

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages whose weights a rank holds, in order."""
        return tuple(sorted({action.stage for action in self.ranks[rank]}))

    @cached_property
    def splits_backward(self) -> bool:
        """Whether any backward pass is in two, I and W."""
        return any(action.op == "W" for _, action in self.actions())

    def needs(self, action: Action) -> tuple[int, int] | None:
        """The (stage, microbatch) whose F, for a forward action, or I or B, for a backward one, has to come first on
        another stage; None at the ends of the pipeline and for W."""
        if action.op == "F":
            return (action.stage - 1, action.microbatch) if action.stage else None
        if action.sends_back:
            return (action.stage + 1, action.microbatch) if action.stage + 1 < self.n_stages else None
        return None

    def waits_for(self, action: Action) -> Result | None:
        """The result that an action cannot start without: of another stage (`needs`), or else of its own. It is one
        only: F of a stage comes before F and so before I of the stage after."""
        other = self.needs(action)
        if other is not None:
            return other[0], "F" if action.op == "F" else "I", other[1]
        return None if action.op == "F" else (action.stage, "I" if action.op == "W" else "F", action.microbatch)

    @cached_property
    def numbered(self) -> tuple[list[list[int]], list[list[int]], int]:
        """For every action of every rank the number of the result that it waits for, or -1, and of the one that it
        makes; and how many results there are. Raises ScheduleError for a stage or microbatch that is not there."""
        numbers: dict[Result | None, int] = {None: -1}
        for _, (stage, op, microbatch) in self.actions():
            if not (0 <= stage < self.n_stages and 0 <= microbatch < self.n_microbatches):
                raise ScheduleError(
                    f"{self.name}: {stage}{op}{microbatch} is outside the {self.n_stages} stages and "
                    f"{self.n_microbatches} microbatches, which are counted from 0"
                )
        needs = [
            [numbers.setdefault(self.waits_for(action), len(numbers) - 1) for action in each] for each in self.ranks
        ]
        makes = [[numbers.setdefault(action.makes, len(numbers) - 1) for action in each] for each in self.ranks]
        return needs, makes, len(numbers) - 1


def make(
    n_stages: int,
    n_microbatches: int,
    ranks: Iterable[Iterable[Action]],
    *,
    name: str = "schedule",
    staggered: bool = False,
) -> Schedule:
    """A schedule of lists that a builder has filled; `schedule.build.build` names it as it is registered."""
    return Schedule(name, n_stages, n_microbatches, tuple(tuple(actions) for actions in ranks), staggered)
