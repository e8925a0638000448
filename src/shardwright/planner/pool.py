"""Layouts that fit, with a lower bound on the step time of each, and a search for the fastest of any subset."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property

import numpy as np

from shardwright.cost.job import Candidates, Floats, Ints, Job
from shardwright.cost.memo import EVERY, Memo
from shardwright.cost.step import step_time
from shardwright.planner.choice import Choice, choice_at
from shardwright.planner.space import Condition, Mask
from shardwright.system.units import divisors

AT_ONCE = 2
"""Layouts simulated in one round. With more, one more result could have excluded some of them."""
BLOCK = 2048
"""Layouts of a group whose bounds are computed at once. With fewer, the overhead of numpy calls exceeds their work."""
BOUNDED = 64
"""Layouts whose bounds a search for the fastest computes first; then twice as many, and so on."""
READ = 2**15
"""Layouts that a search for the fastest first compares with its subset; then as many again."""
BITS = 40
"""Bits of a time by which layouts are ordered, 1e-12 of it. The order of additions, which depends on how many layouts
are priced at once, changes the last of 53 bits, and must not decide between layouts that take the same time."""


class LayoutPool:
    """n layouts of a job in groups that share a pipeline. `low_s`: lower bounds on their times that took little time to
    compute, `peak_bytes`; both (n,), in the order of the groups.

    A layout's bound (`step_time` without a simulation) is computed when its `low_s` is not enough, together with others
    of its group that have a similar `low_s`. The time of a layout with a pipeline is simulated on request and cached;
    any other layout's is its bound. All times are rounded to `BITS` bits. Layouts that share passes or parameters take
    them from one memo.
    """

    def __init__(self, job: Job, groups: Sequence[Candidates], low_s: Floats, peak_bytes: Floats) -> None:
        self.job = job
        self.groups = list(groups)
        self.peak_bytes = peak_bytes
        self.low_s = low_s
        self._ends = np.cumsum([len(group) for group in self.groups], dtype=np.int64)
        self._blocks: list[Ints] = []
        self._block = np.full(len(low_s), -1)
        self._bound_s = np.full(len(low_s), np.nan)
        self._exact: dict[int, float] = {}
        self._memo = memo_of(job)

    def __len__(self) -> int:
        return len(self.low_s)

    @property
    def n_simulated(self) -> int:
        """Return the number of layouts simulated so far."""
        return len(self._exact)

    @property
    def n_bounded(self) -> int:
        """Return the number of layouts with a computed bound so far."""
        return int(np.isfinite(self._bound_s).sum())

    @property
    def bound_s(self) -> Floats:
        """Return the bounds of all n layouts, (n,)."""
        return self._bounds(slice(None))

    @cached_property
    def _order(self) -> Ints:
        return np.argsort(self.low_s, kind="stable")

    @cached_property
    def _in_order(self) -> Floats:
        result: Floats = self.low_s[self._order]
        return result

    def _bounds(self, numbers: Ints | slice) -> Floats:
        """Return the bounds of some layouts; compute missing ones, a block at a time."""
        missing = np.arange(len(self))[numbers][np.isnan(self._bound_s[numbers])]
        for group in np.unique(np.searchsorted(self._ends, missing[self._block[missing] < 0], side="right")).tolist():
            end = int(self._ends[group])
            begin = end - len(self.groups[group])
            for block in _blocks(self.low_s[begin:end], begin):
                self._block[block] = len(self._blocks)
                self._blocks.append(block)
        for number in np.unique(self._block[missing]).tolist():
            block = self._blocks[number]
            group, begin = self._place(int(block[0]))
            layouts = self.groups[group].take(block - (int(block[0]) - begin))
            seconds = step_time(self.job, layouts, simulated=False, memo=self._memo).total_s
            self._bound_s[block] = rounded(seconds)
        result: Floats = self._bound_s[numbers]
        return result

    def where(self, condition: Condition) -> Mask:
        """Return the mask of a condition over all n layouts, (n,)."""
        return np.concatenate([np.zeros(0, dtype=bool), *map(condition, self.groups)])

    def numbers(self, of_group: Callable[[Candidates], Ints]) -> Ints:
        """Return an integer for each of the n layouts, (n,). `of_group`: returns the integers of a group."""
        return np.concatenate([np.zeros(0, dtype=np.int64), *map(of_group, self.groups)])

    def choice(self, number: int) -> Choice:
        """Return layout number `number`."""
        group, row = self._place(number)
        return choice_at(self.groups[group], row)

    def fastest(self, k: int, among: Mask | None = None, most_s: float = np.inf) -> list[int]:
        """Return the numbers of the k layouts with the least simulated time, the fastest first; of equals the simpler
        layout, which comes first. `among`, (n,): the subset to search. `most_s`: layouts whose bound is above it are
        left out. Returns fewer than k if there are fewer.

        Best first: layouts are simulated in the order of their bounds, until no remaining bound is below the k-th time.
        Bounds are computed in the order of `low_s`, as far as the next bounds in order must be known. No layout is
        faster than its bound, so the result is the same as after simulating all.
        """
        timed: list[tuple[float, int]] = []
        order, read, done, bounded = np.zeros(0, dtype=np.int64), 0, 0, 0
        end = len(self) if most_s == np.inf else int(np.searchsorted(self._in_order, most_s, side="right"))
        while read < end or bounded < len(order):
            bounded = max(BOUNDED, 2 * bounded)
            while len(order) <= bounded and read < end:
                some = self._order[read : min(end, max(READ, 2 * read))]
                order = np.append(order, some if among is None else some[among[some]])
                read += len(some)
            bounded = min(len(order), bounded)
            numbers = np.sort(order[:bounded])
            bound_s = self._bounds(numbers)
            ready = (bound_s < (self.low_s[order[bounded]] if bounded < len(order) else np.inf)) & (bound_s <= most_s)
            numbers, bound_s = numbers[ready], bound_s[ready]
            sorted_at = np.argsort(bound_s, kind="stable")
            for begin in range(done, len(numbers), AT_ONCE):
                if len(timed) >= k and bound_s[sorted_at[begin]] >= timed[k - 1][0]:
                    return [number for _, number in timed]
                if begin + AT_ONCE > len(numbers) and bounded < len(order):
                    break
                those = numbers[sorted_at[begin : begin + AT_ONCE]].tolist()
                timed = sorted([*timed, *zip(self.times_s(those), those, strict=True)])[:k]
                done = begin + AT_ONCE
        return [number for _, number in timed]

    def times_s(self, numbers: Iterable[int]) -> list[float]:
        """Return the simulated seconds of a step of some layouts."""
        wanted = list(numbers)
        by_group: dict[int, list[int]] = {}
        for number in wanted:
            group = self._place(number)[0]
            if number not in self._exact and self.groups[group].pp > 1:
                by_group.setdefault(group, []).append(number)
        for group, those in by_group.items():
            rows = np.array([self._place(number)[1] for number in those])
            layouts = self.groups[group].take(rows)
            seconds = rounded(step_time(self.job, layouts, simulated=True, memo=self._memo).total_s)
            self._exact.update(zip(those, seconds.tolist(), strict=True))
        bounds = self._bounds(np.array(wanted, dtype=np.int64)).tolist()
        return [self._exact.get(number, bound) for number, bound in zip(wanted, bounds, strict=True)]

    def _place(self, number: int) -> tuple[int, int]:
        """Return the index of a layout's group, and its index in the group."""
        group = int(np.searchsorted(self._ends, number, side="right"))
        return group, number - int(self._ends[group] - len(self.groups[group]))


def _blocks(low_s: Floats, begin: int) -> Iterator[Ints]:
    """Yield the numbers of the layouts of a group, from `begin`, `BLOCK` at a time in the order of `low_s`."""
    order = begin + np.argsort(low_s, kind="stable")
    for at in range(0, len(order), BLOCK):
        yield order[at : at + BLOCK]


def rounded(seconds: Floats) -> Floats:
    """Return times rounded to `BITS` bits; a longer time is never rounded to a shorter one."""
    mantissa, exponent = np.frexp(seconds)
    return np.ldexp(np.rint(np.ldexp(mantissa, BITS)), exponent - BITS)


def memo_of(job: Job) -> Memo:
    """Return an empty memo for the layouts of the space of a job."""
    degrees, experts = divisors(job.cluster.size), 1 if job.model.moe is None else job.model.moe.n_experts
    values = dict.fromkeys(("tp", "cp", "dp_shard", "dp_replicate"), degrees)
    return Memo({
        **EVERY, **values, "ep": divisors(experts), "sequence_parallel": (False, True),
        "micro_batch": divisors(job.global_batch),
    })  # fmt: skip
