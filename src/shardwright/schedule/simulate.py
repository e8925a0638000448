"""Simulates a schedule: the start and end of every action (`play`), the makespan, bubbles and activation memory.

Messages do not occupy the ranks that send and receive them, and do not slow each other down.

The activation memory of a rank depends on the states of its micro-batches. From the start of its F to the end of its I
or B a micro-batch is **in flight**: the rank keeps all its activations. From the end of I to the end of W it is
**waiting**: the rank keeps the operands of the weight gradients and frees the rest. With M_B and M_W the bytes of a
micro-batch in the two states, a rank needs M_B (in flight + M_W / M_B waiting). Source: Qi et al., arXiv 2401.10241,
section 2.3 and table 1. Ignored: parameters, message buffers, and temporary buffers of an action.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from shardwright.schedule.actions import Action, Op, Schedule
from shardwright.schedule.validate import deadlock, play
from shardwright.system.errors import ScheduleError

KEPT_FOR_WEIGHT = 3 / 8
"""M_W / M_B, the fraction of a micro-batch's activations that is kept from I to W; the default of a pipeline without a
model.

The paper counts M_B = (34 h + 5 a s) s b and M_W = 32 h s b bytes a layer, for b sequences of s tokens, a heads and
d_model h: 32 / (34 + 5 a s / h), which is 0.37 for its smallest model (a = 24, s = 1024, h = 2304). The term with a is
the attention matrix. Fused attention does not store it, and the fraction is then near 1: 32 / 34.
"""


class MicrobatchCounts(NamedTuple):
    """A rank's numbers of micro-batches in flight and waiting from `time` on; each is counted for one stage."""

    time: float
    in_flight: int
    waiting: int

    def memory(self, kept_for_weight: float) -> float:
        """Return activation memory in units of one micro-batch in flight; a waiting one counts `kept_for_weight`."""
        return self.in_flight + kept_for_weight * self.waiting


def count_microbatches(spans: Iterable[tuple[Action, float, float]]) -> list[MicrobatchCounts]:
    """Return the counts of a rank after each change. `spans`: its actions in order, with start and end in any unit."""
    curve = []
    in_flight = waiting = 0
    for action, start, end in spans:
        if action.op == "F":
            in_flight += 1
        elif action.op == "W":
            waiting -= 1
        else:
            in_flight -= 1
            waiting += action.op == "I"
        curve.append(MicrobatchCounts(start if action.op == "F" else end, in_flight, waiting))
    return curve


PerStage = float | tuple[float, ...]


@dataclass(frozen=True)
class Times:
    """The times of actions, in any unit: one number for all stages, or one number for each stage.

    `forward`, `backward_input`, `weight`: the times of F, I and W of a (virtual) stage; B takes backward_input +
    weight. If a rank holds two stages instead of one, each has half the layers and half the time.
    `comm`: time from the end of an action until another rank can use its result.
    """

    forward: PerStage = 1.0
    backward_input: PerStage = 1.0
    weight: PerStage = 1.0
    comm: float = 0.0

    def times_by_stage(self, n_stages: int) -> dict[Op, tuple[float, ...]]:
        """Return for each op its time in every stage.

        Raises ScheduleError if the number of times is not the number of stages, and for a negative time.
        """
        columns = []
        for name in ("forward", "backward_input", "weight"):
            value = getattr(self, name)
            column = value if isinstance(value, tuple) else (float(value),) * n_stages
            if len(column) != n_stages:
                raise ScheduleError(
                    f"times.{name} has {len(column)} numbers for {n_stages} stages; give one number for all stages, or "
                    f"{n_stages}"
                )
            columns.append(column)
        if min(self.comm, *(min(column) for column in columns)) < 0:
            raise ScheduleError(f"{self}: a time is 0 or more")
        forward, backward_input, weight = columns
        both = tuple(i + w for i, w in zip(backward_input, weight, strict=True))
        return {"F": forward, "B": both, "I": backward_input, "W": weight}


def simulate(schedule: Schedule, times: Times) -> "Simulation":
    """Simulate a schedule; the run time is linear in the number of actions.

    The schedule has to be complete: validate an external one first (`validate.problems`). Raises ScheduleError for an
    action with a stage or micro-batch out of range, and for a deadlock.
    """
    starts, ends = play(schedule, times.times_by_stage(schedule.n_stages), times.comm)
    if list(map(len, ends)) != list(map(len, schedule.ranks)):
        raise ScheduleError(f"{schedule.name}: {deadlock(schedule)}")
    return Simulation(schedule, times, tuple(map(tuple, starts)), tuple(map(tuple, ends)))


@dataclass(frozen=True)
class Simulation:
    """A schedule with the starts and ends of its actions, in the unit of `times`, from 0.

    `starts[r][k]` and `ends[r][k]` are the times of `schedule.ranks[r][k]`.
    """

    schedule: Schedule
    times: Times
    starts: tuple[tuple[float, ...], ...]
    ends: tuple[tuple[float, ...], ...]

    @cached_property
    def spans(self) -> tuple[list[tuple[Action, float, float]], ...]:
        """Return for every rank its actions in order, with their start and end."""
        return tuple(
            list(zip(actions, starts, ends, strict=True))
            for actions, starts, ends in zip(self.schedule.ranks, self.starts, self.ends, strict=True)
        )

    @cached_property
    def makespan(self) -> float:
        """Time from zero to the end of the last action of any rank."""
        return max((ends[-1] for ends in self.ends if ends), default=0.0)

    @cached_property
    def cost(self) -> float:
        """The time of a step: the makespan, or with staggered ranks the longest time from the first action of a rank to
        its last (Qi et al., arXiv 2401.10241, section 5.3)."""
        if not self.schedule.staggered:
            return self.makespan
        return max(
            (ends[-1] - starts[0] for starts, ends in zip(self.starts, self.ends, strict=True) if ends), default=0.0
        )

    @cached_property
    def work(self) -> tuple[float, ...]:
        """Return for every rank the sum of the durations of its actions."""
        durations = self.times.times_by_stage(self.schedule.n_stages)
        return tuple(sum(durations[op][stage] for stage, op, _ in actions) for actions in self.schedule.ranks)

    @property
    def bubble_rates(self) -> tuple[float, ...]:
        """Return for every rank the fraction of the cost in which it is idle: (cost - work) / cost."""
        return tuple((self.cost - work) / self.cost if self.cost else 0.0 for work in self.work)

    @property
    def bubble_rate(self) -> float:
        """The fraction of all ranks' time that is idle; with equal stages, of any rank's.

        Source: Qi et al., arXiv 2401.10241, section 5.3: (cost - m(F+I+W)) / cost.
        """
        rates = self.bubble_rates
        return sum(rates) / len(rates) if rates else 0.0

    @cached_property
    def resident(self) -> tuple[list[MicrobatchCounts], ...]:
        """Return for every rank its micro-batches in flight and waiting over time."""
        return tuple(map(count_microbatches, self.spans))

    @property
    def peak_in_flight(self) -> tuple[int, ...]:
        """Return for every rank the most micro-batches in flight at once, each counted for one stage."""
        return tuple(max((point.in_flight for point in curve), default=0) for curve in self.resident)

    @property
    def peak_waiting(self) -> tuple[int, ...]:
        """Return for every rank the most micro-batches that wait for W at once, each counted for one stage."""
        return tuple(max((point.waiting for point in curve), default=0) for curve in self.resident)

    def peak_memory(self, kept_for_weight: float) -> tuple[float, ...]:
        """Return every rank's peak activation memory, in units of one micro-batch in flight in one stage.

        `kept_for_weight`: the fraction, 0 to 1, that a micro-batch that waits for its W counts.
        """
        return tuple(max((point.memory(kept_for_weight) for point in curve), default=0.0) for curve in self.resident)

    @property
    def peak_in_flight_shares(self) -> tuple[float, ...]:
        """`peak_in_flight` in units of one micro-batch in 1 / n_ranks of the layers (n_stages / n_ranks stages), which
        is comparable between schedules; 1f1b has n_ranks on rank 0."""
        return self._shares(self.peak_in_flight)

    def peak_memory_shares(self, kept_for_weight: float) -> tuple[float, ...]:
        """Return `peak_memory` in the units of `peak_in_flight_shares`."""
        return self._shares(self.peak_memory(kept_for_weight))

    def _shares(self, peaks: tuple[float, ...]) -> tuple[float, ...]:
        return tuple(peak * self.schedule.n_ranks / self.schedule.n_stages for peak in peaks)
