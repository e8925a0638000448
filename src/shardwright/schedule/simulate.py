"""When every action of a schedule starts and ends, and what that says: makespan, bubbles, activations held.

An action starts as soon as the one before it on its rank has ended and what it needs is there; a result that another
rank made is there `comm` after the action that made it. Messages take no time from the ranks that send and receive,
and do not slow one another down.
"""

from collections import deque
from dataclasses import dataclass
from functools import cached_property

from shardwright.errors import ScheduleError
from shardwright.schedule.actions import Action, Op, Schedule
from shardwright.schedule.memory import Held, held
from shardwright.schedule.validate import deadlock

PerStage = float | tuple[float, ...]


@dataclass(frozen=True)
class Times:
    """How long an action takes, in any one unit: the same for every stage, or one number a stage.

    `forward`, `backward_input`, `weight`: of F, I and W; B takes backward_input + weight. They are the times of a
    (virtual) stage: where a rank holds two stages instead of one, each has half the layers and half the time.
    `comm`: from the end of an action until its result can be used on another rank.
    """

    forward: PerStage = 1.0
    backward_input: PerStage = 1.0
    weight: PerStage = 1.0
    comm: float = 0.0

    def of_stages(self, n_stages: int) -> dict[Op, tuple[float, ...]]:
        """For each op, its time in every stage.

        Raises ScheduleError for a number of times that is not the number of stages, and for a negative time.
        """
        found = []
        for name in ("forward", "backward_input", "weight"):
            value = getattr(self, name)
            each = value if isinstance(value, tuple) else (float(value),) * n_stages
            if len(each) != n_stages:
                raise ScheduleError(
                    f"times.{name} has {len(each)} numbers for {n_stages} stages; give one number for all stages, or "
                    f"{n_stages}"
                )
            found.append(each)
        if min(self.comm, *(min(each) for each in found)) < 0:
            raise ScheduleError(f"{self}: a time is 0 or more")
        forward, backward_input, weight = found
        both = tuple(i + w for i, w in zip(backward_input, weight, strict=True))
        return {"F": forward, "B": both, "I": backward_input, "W": weight}


def simulate(schedule: Schedule, times: Times) -> "Simulation":
    """Run a schedule on paper; the time this takes grows with the number of actions.

    The schedule has to be complete: validate one from outside first (`validate.problems`). Raises ScheduleError for an
    action of a stage or microbatch that is not there, and where every rank that is not done waits for another, or for
    what nobody makes.
    """
    needs, makes, durations = _numbered(schedule, times)
    n_ranks = schedule.n_ranks
    ended: list[float] = [-1.0] * (3 * schedule.n_stages * schedule.n_microbatches)
    maker: list[int] = [0] * len(ended)
    waiting: dict[int, list[int]] = {}
    starts: list[list[float]] = [[] for _ in range(n_ranks)]
    ends: list[list[float]] = [[] for _ in range(n_ranks)]
    comm = times.comm
    runnable = deque(range(n_ranks))
    while runnable:
        rank = runnable.popleft()
        my_starts, my_ends = starts[rank], ends[rank]
        clock = my_ends[-1] if my_ends else 0.0
        my_needs, my_makes, my_durations = needs[rank], makes[rank], durations[rank]
        for position in range(len(my_ends), len(my_needs)):
            need = my_needs[position]
            if need >= 0:
                there = ended[need]
                if there < 0.0:
                    waiting.setdefault(need, []).append(rank)
                    break
                if maker[need] != rank:
                    there += comm
                if there > clock:
                    clock = there
            my_starts.append(clock)
            clock += my_durations[position]
            my_ends.append(clock)
            made = my_makes[position]
            ended[made] = clock
            maker[made] = rank
            if made in waiting:
                runnable.extend(waiting.pop(made))
    if waiting:
        raise ScheduleError(f"{schedule.name}: {deadlock(schedule)}")
    return Simulation(schedule, times, tuple(map(tuple, starts)), tuple(map(tuple, ends)))


def _numbered(schedule: Schedule, times: Times) -> tuple[list[list[int]], list[list[int]], list[list[float]]]:
    """For every action of every rank: the number of the result it needs, or -1; of the one it makes; its duration.

    Results are numbered in three blocks (outputs, input gradients, weight gradients) of n_stages x n_microbatches.
    An action waits for one result only: the F of a stage is made before the F and so before the I of the stage after.
    """
    n_stages, m = schedule.n_stages, schedule.n_microbatches
    block = n_stages * m
    of = times.of_stages(n_stages)
    forward, both, inputs, weight = of["F"], of["B"], of["I"], of["W"]
    last = n_stages - 1
    needs, makes, durations = [], [], []
    for actions in schedule.ranks:
        my_needs, my_makes, my_durations = [], [], []
        for stage, op, microbatch in actions:
            if not (0 <= stage < n_stages and 0 <= microbatch < m):
                raise ScheduleError(
                    f"{schedule.name}: {stage}{op}{microbatch} is outside the {n_stages} stages and {m} microbatches, "
                    f"which are counted from 0"
                )
            at = stage * m + microbatch
            if op == "F":
                my_needs.append(at - m if stage else -1)
                my_makes.append(at)
                my_durations.append(forward[stage])
            elif op == "W":
                my_needs.append(block + at)
                my_makes.append(2 * block + at)
                my_durations.append(weight[stage])
            else:
                my_needs.append(block + at + m if stage != last else at)
                my_makes.append(block + at)
                my_durations.append(both[stage] if op == "B" else inputs[stage])
        needs.append(my_needs)
        makes.append(my_makes)
        durations.append(my_durations)
    return needs, makes, durations


@dataclass(frozen=True)
class Simulation:
    """A schedule with the times at which its actions start and end, in the unit of `times`, from 0.

    `starts[r][k]`, `ends[r][k]`: of `schedule.ranks[r][k]`.
    """

    schedule: Schedule
    times: Times
    starts: tuple[tuple[float, ...], ...]
    ends: tuple[tuple[float, ...], ...]

    @cached_property
    def spans(self) -> tuple[list[tuple[Action, float, float]], ...]:
        """Of every rank, its actions in order with their start and end."""
        return tuple(
            list(zip(actions, starts, ends, strict=True))
            for actions, starts, ends in zip(self.schedule.ranks, self.starts, self.ends, strict=True)
        )

    @cached_property
    def makespan(self) -> float:
        """From zero to the end of the last action of any rank."""
        return max((ends[-1] for ends in self.ends if ends), default=0.0)

    @cached_property
    def cost(self) -> float:
        """What a step costs: the makespan, or where ranks are staggered the longest time from the first action of a
        rank to its own end (Qi et al., arXiv 2401.10241, section 5.3)."""
        if not self.schedule.staggered:
            return self.makespan
        return max(
            (ends[-1] - starts[0] for starts, ends in zip(self.starts, self.ends, strict=True) if ends), default=0.0
        )

    @cached_property
    def work(self) -> tuple[float, ...]:
        """Of every rank, the sum of its actions' durations."""
        of = self.times.of_stages(self.schedule.n_stages)
        return tuple(sum(of[op][stage] for stage, op, _ in actions) for actions in self.schedule.ranks)

    @property
    def bubble_rates(self) -> tuple[float, ...]:
        """Of every rank, the share of the cost in which it is idle: (cost - work) / cost."""
        return tuple((self.cost - work) / self.cost if self.cost else 0.0 for work in self.work)

    @property
    def bubble_rate(self) -> float:
        """The share of all ranks' time that is idle; where stages are equal, that of any rank.

        Source: Qi et al., arXiv 2401.10241, section 5.3: (cost - m(F+I+W)) / cost.
        """
        rates = self.bubble_rates
        return sum(rates) / len(rates) if rates else 0.0

    @cached_property
    def held(self) -> tuple[list[Held], ...]:
        """Of every rank, how what it holds changes with time."""
        return tuple(map(held, self.spans))

    @property
    def peak_in_flight(self) -> tuple[int, ...]:
        """Of every rank, the most microbatches in flight at once, each of one stage."""
        return tuple(max((each.in_flight for each in curve), default=0) for curve in self.held)

    @property
    def peak_waiting(self) -> tuple[int, ...]:
        """Of every rank, the most microbatches that wait for their W at once, each of one stage."""
        return tuple(max((each.waiting for each in curve), default=0) for curve in self.held)

    def peak_memory(self, kept_for_weight: float) -> tuple[float, ...]:
        """Of every rank, the most that it holds at once, in units of one microbatch in flight in one stage.

        `kept_for_weight`: what one that waits for its W counts, 0 to 1.
        """
        return tuple(max((each.memory(kept_for_weight) for each in curve), default=0.0) for curve in self.held)

    @property
    def peak_in_flight_shares(self) -> tuple[float, ...]:
        """`peak_in_flight` in units of what one microbatch has on a rank when layers are dealt evenly: n_stages /
        n_ranks stages. Comparable between schedules; 1f1b has n_ranks on rank 0."""
        return self._shares(self.peak_in_flight)

    def peak_memory_shares(self, kept_for_weight: float) -> tuple[float, ...]:
        """`peak_memory` in the same units."""
        return self._shares(self.peak_memory(kept_for_weight))

    def _shares(self, peaks: tuple[float, ...]) -> tuple[float, ...]:
        return tuple(peak * self.schedule.n_ranks / self.schedule.n_stages for peak in peaks)
