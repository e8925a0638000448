"""The time of a pipeline: simulated, or a lower bound."""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from shardwright.cost.job import Candidates, Floats, Ints
from shardwright.schedule.actions import Schedule
from shardwright.schedule.build import build
from shardwright.schedule.registry import find
from shardwright.schedule.simulate import Times, simulate

MOST_SIMULATED = 2048
"""Micro-batches times stages that are simulated at most; a longer step is extrapolated from a shorter one of at least 6
rounds."""


@dataclass(frozen=True)
class StageTimes:
    """Seconds of one micro-batch in each stage, arrays (n, S), and of one message between stages, (n,)."""

    forward: Floats
    backward_input: Floats
    weight: Floats
    message: Floats


def busy(candidates: Candidates, times: StageTimes, m: Ints) -> Floats:
    """Seconds that each rank of `pp` computes in a step of `m` micro-batches: (n, R)."""
    whole = times.forward + times.backward_input + times.weight
    routes = candidates.shared.ways
    found = np.zeros((len(candidates), candidates.pp))
    for route in routes:
        for stage, rank in enumerate(route):
            found[:, rank] += whole[:, stage] / len(routes)
    return found * m[:, None]


def least(candidates: Candidates, times: StageTimes, work: Floats) -> Floats:
    """A lower bound on the time of the schedule: (n,) seconds. `work`: of each rank (`busy`).

    A rank cannot begin before the first micro-batch has reached it, and after it has sent its last input gradient the
    stages before it still have to run their backward passes:

    max over ranks of  head + m (F + I + W) + tail,  without tail if W may come last

    head: sum of F over the stages before the rank's first, with a message for each; tail: the same with I + W, or with
    only I if the backward pass is split.
    """
    if candidates.pp == 1:
        return work[:, 0]
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
    if split:
        return (heads + work).max(axis=1)
    return (heads + work + tails).max(axis=1)


def makespans(candidates: Candidates, times: StageTimes, m: Ints) -> Floats:
    """The simulated time of the schedule: (n,) seconds; 0 without a pipeline.

    Exact up to `MOST_SIMULATED`. The time of a schedule is the longest of many paths, each of which grows linearly with
    m, so it is convex in m. For a longer step the result is the linear extrapolation of the last micro-batches of a
    shorter one, a lower bound; `least` is another. If a rank that is hardly slower than the others is not yet on the
    longest path of the shorter step, the larger of the two is some tenths of a percent too low.
    """
    if candidates.pp == 1:
        return np.zeros(len(candidates))
    runs = [
        _makespan(
            (candidates.shared.pp_schedule, candidates.pp, candidates.shared.virtual_stages),
            int(m[at]),
            Times(
                tuple(times.forward[at].tolist()),
                tuple(times.backward_input[at].tolist()),
                tuple(times.weight[at].tolist()),
                float(times.message[at]),
            ),
        )
        for at in range(len(candidates))
    ]
    return np.array(runs)


@lru_cache(maxsize=4096)  # layouts that differ only in their data axes have stages of the same times
def _makespan(pipeline: tuple[str, int, int], m: int, times: Times) -> float:
    name, pp, virtual_stages = pipeline
    stages = len(find(name).ways(pp, virtual_stages)[0])
    # A whole number of rounds of an interleaved schedule, and an even number for schedules with two routes.
    unit = 2 * pp
    most = max(3, MOST_SIMULATED // stages // unit) * unit
    if m <= most + unit:
        return _run(pipeline, m, times)
    longer = most + (m - most) % unit
    ends = [_run(pipeline, count, times) for count in (longer - unit, longer)]
    return ends[1] + (ends[1] - ends[0]) / unit * (m - longer)


def _run(pipeline: tuple[str, int, int], m: int, times: Times) -> float:
    return simulate(_built(pipeline, m), times).makespan


@lru_cache(maxsize=256)
def _built(pipeline: tuple[str, int, int], m: int) -> Schedule:
    name, pp, virtual_stages = pipeline
    return build(name, pp, m, virtual_stages)
