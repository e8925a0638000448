"""How long a pipeline takes: run on paper, or the least that any order of its work could take."""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from shardwright.cost.job import Candidates, Floats, Ints
from shardwright.schedule.actions import Schedule
from shardwright.schedule.build import build
from shardwright.schedule.registry import find
from shardwright.schedule.simulate import Times, simulate

MOST_SIMULATED = 2048
"""Microbatches times stages that are simulated; a longer step is drawn out from a shorter one, of 6 rounds at least."""


@dataclass(frozen=True)
class StageTimes:
    """Seconds of one microbatch in each stage, arrays (n, S), and of one message between stages, (n,)."""

    forward: Floats
    backward_input: Floats
    weight: Floats
    message: Floats


def busy(of: Candidates, times: StageTimes, m: Ints) -> Floats:
    """Seconds of work of each rank of `pp` in a step of `m` microbatches: (n, R)."""
    whole = times.forward + times.backward_input + times.weight
    ways = of.shared.ways
    found = np.zeros((len(of), of.pp))
    for way in ways:
        for stage, rank in enumerate(way):
            found[:, rank] += whole[:, stage] / len(ways)
    return found * m[:, None]


def least(of: Candidates, times: StageTimes, work: Floats) -> Floats:
    """A time that no run of the schedule is under: (n,) seconds. `work`: of each rank (`busy`).

    The work of a rank cannot begin before the first microbatch has come to it, and after it has given the last input
    gradient away the stages before it still have to pass that on:

    max over ranks of  head + m (F + I + W) + tail,  without tail where W may come last

    head: sum of F over the stages before the rank's first, and a message for each; tail: the same with I + W, or with
    I alone where the backward pass is split.
    """
    if of.pp == 1:
        return work[:, 0]
    split = of.kind.splits_backward
    back = times.backward_input if split else times.backward_input + times.weight
    heads = np.full((len(of), of.pp), np.inf)
    tails = np.full((len(of), of.pp), np.inf)
    for way in of.shared.ways:
        before = np.zeros(len(of))
        after = np.zeros(len(of))
        for stage, rank in enumerate(way):
            heads[:, rank] = np.minimum(heads[:, rank], before)
            tails[:, rank] = np.minimum(tails[:, rank], after)
            hop = times.message if stage + 1 < len(way) and way[stage + 1] != rank else 0.0
            before = before + times.forward[:, stage] + hop
            after = after + back[:, stage] + hop
    if split:
        return (heads + work).max(axis=1)
    return (heads + work + tails).max(axis=1)


def makespans(of: Candidates, times: StageTimes, m: Ints) -> Floats:
    """What the schedule takes with these times: (n,) seconds; 0 without a pipeline, where nothing waits.

    Exact for `MOST_SIMULATED` and fewer. The time of a schedule is the longest of many paths, each of which grows with
    m by as much as its slowest rank has to do, so that it is convex in m: a longer step takes at least what the last
    microbatches of a shorter one go on to, which is what is given, and at least `least`. Of the larger of the two,
    where a rank that is hardly slower than the others has not yet come to lead, some tenths of a percent are missing.
    """
    if of.pp == 1:
        return np.zeros(len(of))
    runs = [
        _makespan(
            (of.shared.pp_schedule, of.pp, of.shared.virtual_stages),
            int(m[at]),
            Times(
                tuple(times.forward[at].tolist()),
                tuple(times.backward_input[at].tolist()),
                tuple(times.weight[at].tolist()),
                float(times.message[at]),
            ),
        )
        for at in range(len(of))
    ]
    return np.array(runs)


@lru_cache(maxsize=4096)  # layouts that differ in their data axes alone have stages of the same times
def _makespan(pipeline: tuple[str, int, int], m: int, times: Times) -> float:
    name, pp, virtual_stages = pipeline
    stages = len(find(name).ways(pp, virtual_stages)[0])
    # A whole number of rounds of an interleaved schedule, and an even one for those with two directions.
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
