"""The time of a pipeline: simulated, or a lower bound."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import dropwhile

import numpy as np

from shardwright.cost.job import Candidates, Floats, Ints
from shardwright.schedule.actions import Op, Schedule
from shardwright.schedule.registry import find
from shardwright.schedule.simulate import Times, simulate
from shardwright.schedule.validate import play
from shardwright.split.stages import ScheduleInputs

MOST_SIMULATED = 2048
"""Most micro-batches x stages that are simulated. Longer steps are extrapolated from at least 6 rounds."""


@dataclass(frozen=True)
class StageTimes:
    """Seconds of one micro-batch in each stage, arrays (n, S), and of one message between stages, (n,)."""

    forward: Floats
    backward_input: Floats
    weight: Floats
    message: Floats


def busy(candidates: Candidates, times: StageTimes, m: Ints) -> Floats:
    """Return the seconds that each rank of `pp` computes in a step of `m` micro-batches: (n, R)."""
    whole = times.forward + times.backward_input + times.weight
    routes = candidates.shared.ways
    per_rank = np.zeros((len(candidates), candidates.pp))
    for route in routes:
        for stage, rank in enumerate(route):
            per_rank[:, rank] += whole[:, stage] / len(routes)
    return per_rank * m[:, None]


def ends(candidates: Candidates, times: StageTimes, work: Floats) -> Floats:
    """Return a lower bound on the time of the schedule from the `work` (`busy`) of each rank: (n, R) seconds.

    A rank cannot start before the first micro-batch has reached it, and after it has sent its last input gradient the
    stages before it still have to run their backward passes:

    head + m (F + I + W) + tail,  without tail if W may come last

    head: sum of F over the stages before the rank's first, with a message for each; tail: the same with I + W, or with
    only I if the backward pass is split.
    """
    if candidates.pp == 1:
        return work
    split = candidates.kind.splits_backward
    back = times.backward_input if split else times.backward_input + times.weight
    heads = np.full((len(candidates), candidates.pp), np.inf)
    tails = np.full((len(candidates), candidates.pp), np.inf)
    for route in candidates.shared.ways:
        before = np.zeros(len(candidates))
        after = np.zeros(len(candidates))
        for stage, rank in enumerate(route):
            heads[:, rank] = np.minimum(heads[:, rank], before)
            tails[:, rank] = np.minimum(tails[:, rank], after)
            hop = times.message if stage + 1 < len(route) and route[stage + 1] != rank else 0.0
            before = before + times.forward[:, stage] + hop
            after = after + back[:, stage] + hop
    return heads + work if split else heads + work + tails


def makespans(inputs: ScheduleInputs, times: StageTimes, m: Ints) -> Floats:
    """Return the simulated time of the schedule of each of n candidates: (n,) seconds; 0 without a pipeline.

    Exact up to `MOST_SIMULATED`. The time of a schedule is the longest of many paths through its actions. A longer step
    has a shorter step's paths with more micro-batches in the middle (`_SteadyRounds`). Paths that return to no action
    within a round are left out, so the result is a lower bound; seven schedules with random times have been exact.
    Because it is the longest of a fixed set of paths, no slower action makes it shorter. A searched
    schedule does not repeat its actions: a longer step takes a shorter step's time and the work of the busiest rank
    beyond it.
    """
    if inputs.pp == 1:
        return np.zeros(len(m))
    runs = [
        _makespan(
            inputs,
            int(m[at]),
            Times(
                tuple(times.forward[at].tolist()),
                tuple(times.backward_input[at].tolist()),
                tuple(times.weight[at].tolist()),
                float(times.message[at]),
            ),
        )
        for at in range(len(m))
    ]
    return np.array(runs)


@lru_cache(maxsize=4096)  # layouts that differ only in their data axes have stages of the same times
def _makespan(inputs: ScheduleInputs, m: int, times: Times) -> float:
    kind = find(inputs.name)
    stages = len(kind.ways(inputs.pp, inputs.virtual_stages)[0])
    # A whole number of rounds of an interleaved schedule, and an even number for schedules with two routes.
    unit = 2 * inputs.pp
    most = max(3, MOST_SIMULATED // stages // unit) * unit
    if m <= most + unit:
        return simulate(_built(inputs, m), times).makespan
    if kind.searched:
        short = simulate(_built(inputs, most), times)
        return short.makespan + (m - most) / most * max(short.work)
    longer = most + (m - most) % unit
    schedule, middle = _built(inputs, longer), _middle(inputs, longer, unit)
    return middle.makespan(schedule, times, (m - longer) // unit)


@lru_cache(maxsize=256)
def _built(inputs: ScheduleInputs, m: int) -> Schedule:
    return inputs.schedule(m)


@lru_cache(maxsize=256)
def _middle(inputs: ScheduleInputs, m: int, unit: int) -> "_SteadyRounds":
    return _SteadyRounds.from_schedules(_built(inputs, m), _built(inputs, m - unit))


@dataclass(frozen=True)
class _SteadyRounds:
    """A round of `unit` micro-batches in the middle of a schedule, where every rank repeats its actions.

    `order`: (rank, position) of all actions, each after the actions that it waits for. `repeats`: for each action that
    the ranks repeat, its rank and the positions at which it is repeated, in that round and at the start of the next.
    """

    order: list[tuple[int, int]]
    repeats: list[tuple[int, range]]

    @staticmethod
    def from_schedules(schedule: Schedule, shorter: Schedule) -> "_SteadyRounds":
        """Return the repeated round. `shorter`: the same schedule with a round less."""
        starts, _ = play(schedule, Times().times_by_stage(schedule.n_stages))
        order = sorted((start, rank, at) for rank, begins in enumerate(starts) for at, start in enumerate(begins))
        of_round = [len(one) - len(other) for one, other in zip(schedule.ranks, shorter.ranks, strict=True)]
        first = [(len(one) - n) // 2 for one, n in zip(schedule.ranks, of_round, strict=True)]
        unit = schedule.n_microbatches - shorter.n_microbatches
        times = next(k for k in range(unit, 0, -1) if _repeats(schedule, first, of_round, k))
        repeats = [
            (rank, range(at + k, at + k + n + 1, n // times))
            for rank, (at, n) in enumerate(zip(first, of_round, strict=True))
            for k in range(n // times)
        ]
        return _SteadyRounds([(rank, at) for _, rank, at in order], repeats)

    def makespan(self, schedule: Schedule, times: Times, rounds: int) -> float:
        """Return the longest path of the schedule with `rounds` more. Considered are the paths that reach an action,
        then cycle from it to its own later repetitions, and then run from it to the end."""
        durations = times.times_by_stage(schedule.n_stages)
        starts, _ = play(schedule, durations, times.comm)
        rest, repeated = self._rest(schedule, durations, times.comm), self._repeated(schedule, durations, times.comm)
        longest_path = 0.0
        for (rank, places), lengths in zip(self.repeats, repeated, strict=True):
            every = rounds * (len(lengths) - 1)
            longest = max(every // k * lengths[k] + lengths[every % k] for k in range(1, len(lengths)))
            longest_path = max(longest_path, starts[rank][places[0]] + longest + rest[rank][places[0]])
        return longest_path

    def _repeated(self, schedule: Schedule, durations: Mapping[Op, Sequence[float]], comm: float) -> list[list[float]]:
        """Return the longest paths from the start of each action of `repeats` to the starts of its repetitions."""
        needs, makes, _ = schedule.numbered
        n = len(self.repeats)
        # By rank and position: where a path starts, and where it is back.
        begins: dict[tuple[int, int], int] = {}
        ends: dict[tuple[int, int], int] = {}
        for number, (rank, places) in enumerate(self.repeats):
            begins[rank, places[0]] = number
            ends |= {(rank, at): number for at in places}
        clock_RS = np.full((schedule.n_ranks, n), -np.inf)  # S: the action where a path begins
        paths: list[list[float]] = [[] for _ in self.repeats]
        ended: dict[int, tuple[int, Floats]] = {}
        left = len(ends)
        for rank, at in dropwhile(lambda place: place not in begins, self.order):
            clock_S = clock_RS[rank]
            if (need := needs[rank][at]) in ended:
                maker, there_S = ended[need]
                clock_S = np.maximum(clock_S, there_S + comm if maker != rank else there_S)
            if (begun := begins.get((rank, at))) is not None:
                clock_S[begun] = 0.0
            if (ended_at := ends.get((rank, at))) is not None:
                paths[ended_at].append(float(clock_S[ended_at]))
                left -= 1
                if not left:
                    break
            stage, op, _ = schedule.ranks[rank][at]
            clock_RS[rank] = clock_S = clock_S + durations[op][stage]
            ended[makes[rank][at]] = rank, clock_S
        return paths

    def _rest(self, schedule: Schedule, durations: Mapping[Op, Sequence[float]], comm: float) -> list[list[float]]:
        """Return, for every action of every rank, the longest path from its start to the end of the schedule."""
        needs, makes, n_results = schedule.numbered
        to_end = [[0.0] * (len(actions) + 1) for actions in schedule.ranks]
        after_result: list[list[tuple[int, float]]] = [[] for _ in range(n_results)]
        for rank, at in reversed(self.order):
            stage, op, _ = schedule.ranks[rank][at]
            rest = to_end[rank][at + 1]
            for taker, its in after_result[makes[rank][at]]:
                rest = max(rest, its if taker == rank else its + comm)
            to_end[rank][at] = rest = rest + durations[op][stage]
            if (need := needs[rank][at]) >= 0:
                after_result[need].append((rank, rest))
        return to_end


def _repeats(schedule: Schedule, first: Sequence[int], of_round: Sequence[int], times: int) -> bool:
    """Return whether every rank repeats its actions `times` times in a round."""
    for actions, at, n in zip(schedule.ranks, first, of_round, strict=True):
        if n % times:
            return False
        done = [(stage, op) for stage, op, _ in actions[at : at + n]]
        step = n // times
        if done[step:] != done[: n - step]:
            return False
    return True
