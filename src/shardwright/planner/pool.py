"""Layouts that fit, with a lower bound on the step time of each, and a search for the fastest of any subset."""

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from shardwright.cost.job import Candidates, Floats, Ints, Job
from shardwright.cost.memo import EVERY, Memo
from shardwright.cost.step import step_time
from shardwright.planner.choice import Choice, choice_at
from shardwright.planner.space import Condition, Mask
from shardwright.system.units import divisors

AT_ONCE = 2
"""Layouts simulated in one round. With more, one more result could have excluded some of them."""
BITS = 40
"""Bits of a time by which layouts are ordered, 1e-12 of it. The order of additions, which depends on how many layouts
are priced at once, changes the last of 53 bits, and must not decide between layouts that take the same time."""


class LayoutPool:
    """n layouts of a job in groups that share a pipeline. `bound_s`, `peak_bytes`: (n,), in the order of the groups.

    The time of a layout with a pipeline is simulated on request and cached; any other layout's is its bound. All times
    are rounded to `BITS` bits. Layouts that share passes or parameters take them from one memo.
    """

    def __init__(self, job: Job, groups: Sequence[Candidates], bound_s: Floats, peak_bytes: Floats) -> None:
        self.job = job
        self.groups = list(groups)
        self.bound_s = rounded(bound_s)
        self.peak_bytes = peak_bytes
        self._ends = np.cumsum([len(group) for group in self.groups], dtype=np.int64)
        self._order = np.argsort(self.bound_s, kind="stable")
        self._exact: dict[int, float] = {}
        self._memo = memo_of(job)

    def __len__(self) -> int:
        return len(self.bound_s)

    @property
    def n_simulated(self) -> int:
        """Return the number of layouts simulated so far."""
        return len(self._exact)

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

    def fastest(self, k: int, among: Mask | None = None) -> list[int]:
        """Return the numbers of the k layouts with the least simulated time, the fastest first; of equals the simpler
        layout, which comes first. `among`, (n,): the subset to search. Returns fewer than k if the subset has fewer.

        Best first: layouts are simulated in the order of their bounds, until no remaining bound is below the k-th time.
        No layout is faster than its bound, so the result is the same as after simulating all.
        """
        order = self._order if among is None else self._order[among[self._order]]
        found: list[tuple[float, int]] = []
        for begin in range(0, len(order), AT_ONCE):
            if len(found) >= k and self.bound_s[order[begin]] >= found[k - 1][0]:
                break
            numbers = order[begin : begin + AT_ONCE].tolist()
            found = sorted([*found, *zip(self.times_s(numbers), numbers, strict=True)])[:k]
        return [number for _, number in found]

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
        return [self._exact.get(number, float(self.bound_s[number])) for number in wanted]

    def _place(self, number: int) -> tuple[int, int]:
        """Return the index of a layout's group, and its index in the group."""
        group = int(np.searchsorted(self._ends, number, side="right"))
        return group, number - int(self._ends[group] - len(self.groups[group]))


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
