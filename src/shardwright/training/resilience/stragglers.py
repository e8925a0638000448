"""Finds ranks that compute longer than they should, from the time that each rank takes for itself in each step.

A step ends for all ranks when the slowest one is done, so step times do not differ: the others wait in collectives.
What is compared is a rank's own time (`PhaseClock.own_s`), which waiting for other ranks is no part of.

Peers of a rank are the ranks that have the same work: those of the same stage of the pipeline and the same experts.
Its ratio in a step is its own time over the median of its peers'. A rank without peers is compared with all other
ranks, and that ratio with its own past: stages are unequal, but stay as unequal as they are.

A rank is a straggler if the median of its ratio over the last 20 steps is 1.2 or more and 16 of the 20 are 1.15 or
more; until that median is below 1.1. Other programs that share the cores make equal ranks differ by as much for up to
16 steps at a time, so a window of 10 steps would name ranks that are not slow. nvidia-resiliency-ext flags ranks at
1.33 (a score below 0.75), by both comparisons.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from shardwright.layout.layout import Layout
from shardwright.run_folder import MOST_RANKS_LOGGED, Record
from shardwright.system.processes import ranks_in_words
from shardwright.system.torch_private import all_gather_single
from shardwright.system.units import format_seconds
from shardwright.training.clock import PhaseClock
from shardwright.training.hooks import Hook, TakenStep
from shardwright.training.run_log import RunLog
from shardwright.training.step import Trainer

WINDOW = 20
"""Steps that a rank is judged by."""
HITS, HIT = 0.8, 1.15
"""This part of these steps has to have a ratio that high."""
SLOW, AGAIN = 1.2, 1.1
"""Median of the ratio over the window from which on a rank is a straggler, and below which it is none any more."""
PAST, LEAST_PAST = 200, 20
"""Steps before the window that are a rank's own past, and how many it takes at least."""
NOT_JUDGED = 2
"""First steps of a process: they build, compile and warm up."""

Times = NDArray[np.float64]


def gathered_times(own_s: Sequence[float]) -> Times:
    """Own times of the last steps, seconds, of every rank; (steps, ranks). Every rank calls this, with equally many."""
    mine = torch.tensor(own_s, dtype=torch.float64)
    everyone = mine.new_empty(dist.get_world_size() * len(own_s))
    all_gather_single(everyone, mine)
    return everyone.view(-1, len(own_s)).T.numpy()


@dataclass(frozen=True)
class Slowest:
    """The rank that the others wait for longest in the mean of some steps: `costs_s` seconds a step, by which its own
    time is above the median of its peers'."""

    rank: int
    costs_s: float


@dataclass(frozen=True)
class StragglerChange:
    """A rank that has become a straggler, or is none any more, after `step` steps."""

    rank: int
    step: int
    text: str


class Stragglers:
    """What is known of the speed of all ranks of a run."""

    def __init__(self, layout: Layout) -> None:
        self.groups = peers(layout)
        self.alone = np.zeros(layout.world_size, dtype=bool)
        for group in self.groups:
            self.alone[group] = len(group) == 1
        self.named: set[int] = set()
        """Ranks that are stragglers now."""
        self._n_steps = 0
        self._window: deque[tuple[Times, Times]] = deque(maxlen=WINDOW)
        """Own times and ratios of the last steps."""
        self._past: deque[Times] = deque(maxlen=PAST)
        """Ratios of the steps before."""

    def slowest(self, own_s: Times) -> Slowest:
        """Of the mean over steps of own times (steps, ranks)."""
        mean_s = own_s.mean(0, keepdims=True)
        costs_s = (mean_s - self._of_peers(mean_s))[0]
        rank = int(costs_s.argmax())
        return Slowest(rank, float(costs_s[rank]))

    def judge(self, own_s: Times, step: int) -> list[StragglerChange]:
        """Take the own times of some steps (steps, ranks), of which the last is number `step`; what changes by them."""
        changes = []
        for at, (own_R, ratio_R) in enumerate(zip(own_s, own_s / self._of_peers(own_s), strict=True), 1):
            self._n_steps += 1
            if self._n_steps > NOT_JUDGED:
                if len(self._window) == WINDOW:
                    self._past.append(self._window[0][1])
                self._window.append((own_R, ratio_R))
                changes += self._changes(step - len(own_s) + at)
        return changes

    def _changes(self, step: int) -> list[StragglerChange]:
        if len(self._window) < WINDOW:
            return []
        ratios = np.stack([ratio_R for _, ratio_R in self._window])
        if self.alone.any():
            if len(self._past) < LEAST_PAST:
                ratios[:, self.alone] = 1.0
            else:
                ratios[:, self.alone] /= np.median(np.stack(self._past), 0)[self.alone]
        often_R = (ratios >= HIT).sum(0) >= HITS * len(ratios)
        if not (self.named or often_R.any()):
            return []  # nearly always, and without a median, which takes longer than all the rest
        median_R = np.median(ratios, 0)
        slow_R = often_R & (median_R >= SLOW)
        slow = {int(rank) for rank in np.flatnonzero(slow_R)} - self.named
        again = {rank for rank in self.named if median_R[rank] < AGAIN}
        self.named = (self.named | slow) - again
        changes = [
            StragglerChange(rank, step, self._in_words(rank, step, float(median_R[rank]))) for rank in sorted(slow)
        ]
        for rank in sorted(again):
            told = f"rank {rank} is no straggler any more: {median_R[rank]:.2f} times {self._beside(rank)}"
            changes.append(StragglerChange(rank, step, told))
        return changes

    def _in_words(self, rank: int, step: int, ratio: float) -> str:
        own_s = np.stack([own_R for own_R, _ in self._window])
        mean_s = own_s.mean(0, keepdims=True)
        mine_s, theirs_s = float(mean_s[0, rank]), float(self._of_peers(mean_s)[0, rank])
        before = ""
        if len(self._past) >= LEAST_PAST and not self.alone[rank]:
            before = f"; before, {np.median(np.stack(self._past)[:, rank]):.2f} times"
        told = f"rank {rank} is a straggler: it computes {ratio:.2f} times {self._beside(rank)}"
        steps = f"steps {step - WINDOW + 1} to {step}"
        if self.alone[rank]:
            return f"{told} ({format_seconds(mine_s)} a step in {steps})"
        waits = f"; the others wait {format_seconds(max(mine_s - theirs_s, 0.0))} a step for it"
        return f"{told} ({format_seconds(mine_s)} and {format_seconds(theirs_s)} a step in {steps}{before}){waits}"

    def _beside(self, rank: int) -> str:
        if self.alone[rank]:
            return "as long as it used to, beside all other ranks"
        (group,) = (group for group in self.groups if rank in group)
        others = [int(each) for each in group if each != rank]
        return f"as long as {'the median of ' if len(others) > 1 else ''}{ranks_in_words(others)}, with the same work"

    def _of_peers(self, own_s: Times) -> Times:
        """For each step and rank the median of the own times of its peers, of all other ranks where it has none."""
        found = np.empty_like(own_s)
        for group in self.groups:
            if len(group) > 1:
                found[:, group] = _median_of_others(own_s[:, group])
        if self.alone.any():
            found[:, self.alone] = _median_of_others(own_s)[:, self.alone]
        return found


def peers(layout: Layout) -> list[NDArray[np.intp]]:
    """The ranks in groups of those that have the same work in a step: of the same stage, the same experts and, where
    ranks of cp hold unequal parts of the attention, the same part."""
    axes = ("pp", "ep", "cp") if layout.cp_method == "ring" else ("pp", "ep")
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank in range(layout.world_size):
        at = layout.coordinates(rank)
        groups.setdefault(tuple(at[axis] for axis in axes), []).append(rank)
    return [np.array(group) for group in groups.values()]


def _median_of_others(own_s: Times) -> Times:
    """For each element the median of the others of its row; (steps, ranks), 2 ranks or more."""
    order = np.sort(own_s, 1)
    place = own_s.argsort(1).argsort(1)
    others = own_s.shape[1] - 1
    middle = [(others - 1) // 2, others // 2]
    # Without the element at `place`, those from there on move one place to the front.
    halves = [np.where(at < place, order[:, at, None], order[:, at + 1, None]) for at in middle]
    return (halves[0] + halves[1]) / 2


class WatchStragglers(Hook):
    """Adds the slowest rank to log records, and reports the ranks that become stragglers or are none any more."""

    def __init__(self, layout: Layout, trainer: Trainer, clock: PhaseClock, log: RunLog) -> None:
        self.layout, self.trainer, self.clock, self.log = layout, trainer, clock, log
        self.stragglers = Stragglers(layout)
        self._changes: list[StragglerChange] = []

    def numbers(self, taken: TakenStep) -> Record:
        own_s = gathered_times(self.clock.own_s)
        if not self.log.writes or self.trainer.lacks_targets:  # a step without targets is not logged
            return {}
        self._changes = self.stragglers.judge(own_s, taken.step)
        slowest = self.stragglers.slowest(own_s)
        numbers: Record = {
            "slowest_rank": slowest.rank,
            "slowest_costs_s": slowest.costs_s,
            "stragglers": tuple(sorted(self.stragglers.named)),
        }
        if self.layout.world_size <= MOST_RANKS_LOGGED:
            numbers["own_s_by_rank"] = tuple(float(f"{rank_s:.4g}") for rank_s in own_s.mean(0))
        return numbers

    def on_log(self, taken: TakenStep, numbers: Record) -> None:
        for change in self._changes:
            self.log.say(f"step {change.step}: {change.text}")
            self.log.event("straggler", change.step, change.text, change.rank)
        self._changes = []
