"""Runs a layout and its reference, and compares their traces."""

import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from shardwright.errors import LayoutError
from shardwright.layout import Layout
from shardwright.split import rules, stages
from shardwright.verification import compare
from shardwright.verification.case import Case
from shardwright.verification.compare import Errors, Report
from shardwright.verification.rank import train_rank
from shardwright.verification.ranks import run_ranks
from shardwright.verification.reference import train_alone
from shardwright.verification.trace import RankTrace, Trace

TrainRank = Callable[[Case, Layout, Path], RankTrace]

TIMEOUT_S = 300.0
MOST_RANKS = 64
"""Every rank is a process of this machine, of `processes.PROCESS_BYTES` and more."""


class Verifier:
    """Compares layouts of a case, and keeps the traces of references for the next one. To be used in a `with`."""

    def __init__(self, train: TrainRank = train_rank, timeout_s: float = TIMEOUT_S) -> None:
        """`train` is what each rank of a layout runs; it, or what a `functools.partial` of it holds, has to be at the
        top level of a module."""
        self.train = train
        self.timeout_s = timeout_s
        self._stack = ExitStack()
        self._kept: dict[Any, Trace] = {}
        self._alone_errors: dict[Case, Errors] = {}
        self._noise: dict[Trace, frozenset[str]] = {}

    def __enter__(self) -> "Verifier":
        return self

    def __exit__(self, *_: object) -> None:
        self._kept.clear()
        self._noise.clear()
        self._stack.close()

    def parity(self, case: Case, layout: Layout, against: tuple[Case, Layout] | None = None) -> Report:
        """Whether a layout computes what one process does, or what another layout of another `micro_batch` does.

        Raises LayoutError for a batch that the data ranks cannot share, WorkerError where a rank crashes or hangs.
        """
        _check(case, layout)
        with tempfile.TemporaryDirectory(prefix="shardwright-verify-") as folder:
            found = self._run(self.train, layout.world_size, Path(folder), case, layout)
            if against is None:
                expected, sides, name = self._alone(replace(case, dtype="float64")), 1, "one process"
            else:
                expected = self._keep(against, self.train, against[1].world_size, *against)
                sides, name = 2, str(against[1])
            tolerance = compare.with_routing(self._tolerance(case, sides), case)
            tolerance = compare.with_adams_noise(tolerance, case, self._noise_of(expected))
            rows = compare.rows(compare.errors(found, expected), tolerance)
            if case.dtype == "bfloat16" and layout.data_ranks > 1:
                rows += self._one_data_rank(case, layout, found)
            n_replicated, differing = compare.differing_replicas(found)
            return Report(case, layout, name, rows, n_replicated, differing)

    def _one_data_rank(self, case: Case, layout: Layout, found: Trace) -> list[compare.Row]:
        """In 16 bits the first gradient is compared with that of the same layout with one data rank, which is far
        nearer than float64 is: the error of a reduction in 16 bits would be lost in that of the matmuls in 16 bits.

        Not the gradients of experts under ep, whose matmuls are over the tokens of several data ranks at once.
        """
        single = layout.changed(dp_replicate=1, dp_shard=1, zero=0)
        expected = self._keep((case, single), self.train, single.world_size, case, single)
        tolerance = compare.of_partition(case.global_batch // case.micro_batch)
        errors = compare.errors(found, expected, kinds=["gradient"], steps=1)
        if layout.ep > 1:
            errors = {(quantity, name): error for (quantity, name), error in errors.items() if ".experts." not in name}
        return compare.rows(errors, tolerance, kind="gradient vs one data rank")

    def _tolerance(self, case: Case, sides: int = 1) -> compare.Tolerance:
        if case.dtype == "float64":
            return compare.of_float64(case)
        multiple = compare.MULTIPLE_WITH_EXPERTS if case.spec.moe else compare.MULTIPLE
        plain = replace(case, micro_batch=1)
        if plain not in self._alone_errors:
            exact = self._alone(replace(case, dtype="float64"))
            self._alone_errors[plain] = compare.errors(self._alone(case), exact)
        return compare.of_one_process(case, self._alone_errors[plain], sides * multiple)

    def _noise_of(self, expected: Trace) -> frozenset[str]:
        if expected not in self._noise:
            self._noise[expected] = compare.rounding_alone(expected)
        return self._noise[expected]

    def _alone(self, case: Case) -> Trace:
        case = replace(case, micro_batch=1)  # the reference has no micro-batches
        return self._keep(case, train_alone, 1, case)

    def _keep(self, key: Any, function: Callable[..., RankTrace], world_size: int, *args: Any) -> Trace:
        if key not in self._kept:
            folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="shardwright-verify-")))
            self._kept[key] = self._run(function, world_size, folder, *args)
        return self._kept[key]

    def _run(self, function: Callable[..., RankTrace], world_size: int, folder: Path, *args: Any) -> Trace:
        return Trace(folder, run_ranks(function, world_size, *args, folder, timeout_s=self.timeout_s))


def _check(case: Case, layout: Layout) -> None:
    if layout.world_size > MOST_RANKS:
        raise LayoutError(
            f"the layout has {layout.world_size} ranks ({layout}), and each would be a process of "
            f"this machine; at most {MOST_RANKS}: keep the axes and lower their degrees, as in --set "
            f"layout.dp_shard=2, since what can be wrong with an axis is wrong with 2 ranks of it"
        )
    problems = stages.schedule_problems(layout, case.accumulation(layout))
    if problems := problems + rules.problems(case.spec, layout, case.seq_len):
        raise LayoutError(*problems)


def parity(case: Case, layout: Layout, train: TrainRank = train_rank) -> Report:
    """One comparison with one process; see Verifier.parity."""
    with Verifier(train) as verifier:
        return verifier.parity(case, layout)
