"""Finds ranks that compute for too long, from each rank's own time in each step.

A step ends on all ranks when the slowest rank is done, since the others wait in collectives, so step times do not
differ. The compared quantity is a rank's own time (`PhaseClock.own_s`), which excludes waiting for other ranks.

The peers of a rank are the ranks with the same work: the same pipeline stage and the same experts. A rank's ratio in a
step is its own time over the median own time of its peers. A rank without peers is compared with all other ranks, and
this ratio with its own past ratios: stages are unequal, but their ratios stay constant.

A rank becomes a straggler if the median of its ratio over the last 20 steps is at least 1.2 and 16 of the 20 ratios are
at least 1.15. It stops being one when the median falls below 1.1. Other programs that share the cores make equal ranks
differ by as much for up to 16 consecutive steps, so a window of 10 steps would report ranks that are not slow.
nvidia-resiliency-ext flags ranks at 1.33 (a score below 0.75), by both comparisons.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from shardwright.layout.layout import Layout
from shardwright.runs.folder import MOST_RANKS_LOGGED
from shardwright.runs.records import Record
from shardwright.system.processes import ranks_in_words
from shardwright.system.torch_private import all_gather_single
from shardwright.system.units import format_seconds
from shardwright.training.clock import PhaseClock
from shardwright.training.hooks import Hook, TakenStep
from shardwright.training.run_log import RunLog
from shardwright.training.step import Trainer

WINDOW = 20
"""Number of steps over which a rank is judged."""
HITS, HIT = 0.8, 1.15
"""Required fraction of the window's steps, and the ratio that those steps must reach."""
SLOW, AGAIN = 1.2, 1.1
"""Median ratio over the window at which a rank becomes a straggler, and below which it stops being one."""
PAST, LEAST_PAST = 200, 20
"""Maximum and minimum number of steps before the window that form a rank's own past."""
NOT_JUDGED = 2
"""Number of first steps of a process that are ignored, because they build, compile and warm up."""

Times = NDArray[np.float64]


def gathered_times(own_s: Sequence[float]) -> Times:
    """Return the own times of the last steps on all ranks, in seconds, of shape (steps, ranks). Every rank calls
    this with the same number of steps."""
    local_s = torch.tensor(own_s, dtype=torch.float64)
    everyone = local_s.new_empty(dist.get_world_size() * len(own_s))
    all_gather_single(everyone, local_s)
    return everyone.view(-1, len(own_s)).T.numpy()


@dataclass(frozen=True)
class Slowest:
    """The rank that the others wait for longest, averaged over some steps. `costs_s`: its own time minus the median
    of its peers, in seconds per step."""

    rank: int
    costs_s: float


@dataclass(frozen=True)
class StragglerChange:
    """A rank that has become a straggler, or has stopped being one, after `step` steps."""

    rank: int
    step: int
    text: str


class Stragglers:
    """Detects stragglers from the own times of all ranks of a run."""

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
        """Ratios of the steps before the window."""

    def slowest(self, own_s: Times) -> Slowest:
        """Return the slowest rank by mean over steps of `own_s` (steps, ranks)."""
        mean_s = own_s.mean(0, keepdims=True)
        costs_s = (mean_s - self._peer_medians(mean_s))[0]
        rank = int(costs_s.argmax())
        return Slowest(rank, float(costs_s[rank]))

    def judge(self, own_s: Times, step: int) -> list[StragglerChange]:
        """Add own times (steps, ranks), the last being step number `step`. Return the changes of stragglers."""
        changes = []
        for at, (own_R, ratio_R) in enumerate(zip(own_s, own_s / self._peer_medians(own_s), strict=True), 1):
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
            return []  # almost always returns here, without the median, which takes longer than all other parts
        median_R = np.median(ratios, 0)
        slow_R = often_R & (median_R >= SLOW)
        slow = {int(rank) for rank in np.flatnonzero(slow_R)} - self.named
        again = {rank for rank in self.named if median_R[rank] < AGAIN}
        self.named = (self.named | slow) - again
        changes = [
            StragglerChange(rank, step, self._in_words(rank, step, float(median_R[rank]))) for rank in sorted(slow)
        ]
        for rank in sorted(again):
            text = f"rank {rank} is no straggler any more: {median_R[rank]:.2f} times {self._compared_with_peers(rank)}"
            changes.append(StragglerChange(rank, step, text))
        return changes

    def _in_words(self, rank: int, step: int, ratio: float) -> str:
        own_s = np.stack([own_R for own_R, _ in self._window])
        mean_s = own_s.mean(0, keepdims=True)
        mine_s, theirs_s = float(mean_s[0, rank]), float(self._peer_medians(mean_s)[0, rank])
        before = ""
        if len(self._past) >= LEAST_PAST and not self.alone[rank]:
            before = f"; before, {np.median(np.stack(self._past)[:, rank]):.2f} times"
        text = f"rank {rank} is a straggler: it computes {ratio:.2f} times {self._compared_with_peers(rank)}"
        steps = f"steps {step - WINDOW + 1} to {step}"
        if self.alone[rank]:
            return f"{text} ({format_seconds(mine_s)} a step in {steps})"
        waits = f"; the others wait {format_seconds(max(mine_s - theirs_s, 0.0))} a step for it"
        return f"{text} ({format_seconds(mine_s)} and {format_seconds(theirs_s)} a step in {steps}{before}){waits}"

    def _compared_with_peers(self, rank: int) -> str:
        if self.alone[rank]:
            return "as long as it used to, compared with all other ranks"
        (group,) = (group for group in self.groups if rank in group)
        others = [int(other) for other in group if other != rank]
        return f"as long as {'the median of ' if len(others) > 1 else ''}{ranks_in_words(others)}, with the same work"

    def _peer_medians(self, own_s: Times) -> Times:
        """Return, for each step and rank, the median own time of its peers, or of all other ranks without peers."""
        peers_s = np.empty_like(own_s)
        for group in self.groups:
            if len(group) > 1:
                peers_s[:, group] = _median_of_others(own_s[:, group])
        if self.alone.any():
            peers_s[:, self.alone] = _median_of_others(own_s)[:, self.alone]
        return peers_s


def peers(layout: Layout) -> list[NDArray[np.intp]]:
    """Return the groups of ranks that have the same work in a step: the same stage, the same experts and, if ranks
    of cp have unequal parts of the attention, the same part."""
    axes = ("pp", "ep", "cp") if layout.cp_method == "ring" else ("pp", "ep")
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank in range(layout.world_size):
        at = layout.coordinates(rank)
        groups.setdefault(tuple(at[axis] for axis in axes), []).append(rank)
    return [np.array(group) for group in groups.values()]


def _median_of_others(own_s: Times) -> Times:
    """Return, for each element, the median of the other elements of its row. `own_s`: (steps, ranks >= 2)."""
    order = np.sort(own_s, 1)
    place = own_s.argsort(1).argsort(1)
    others = own_s.shape[1] - 1
    middle = [(others - 1) // 2, others // 2]
    # Without the element at `place`, all elements after it move one place to the front.
    halves = [np.where(at < place, order[:, at, None], order[:, at + 1, None]) for at in middle]
    return (halves[0] + halves[1]) / 2


class WatchStragglers(Hook):
    """Adds the slowest rank to log records, and reports ranks that become stragglers or stop being stragglers."""

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
