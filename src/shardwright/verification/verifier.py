"""Run a layout and its reference, compare their traces, and find the smallest layout that still differs: axes and keys
are switched off one by one while it differs.
"""

import shutil
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Self, TypeVar

from shardwright.layout.box import DENSE_AXES
from shardwright.layout.key import written
from shardwright.layout.keys import KEYS
from shardwright.layout.layout import Layout
from shardwright.model.number_formats import replica_problems
from shardwright.split import rules, stages
from shardwright.split.compression import elements_of_block, gradient_roundings
from shardwright.system.errors import LayoutError, ShardwrightError, WorkerError
from shardwright.system.forks import temporary_folder
from shardwright.system.units import format_bytes, format_count
from shardwright.verification import compare
from shardwright.verification.case import (
    OVERFLOW_STEP,
    PLAIN_SGD,
    Case,
    not_with,
    only_in_float64,
    with_choices_of,
    with_drawn_experts,
)
from shardwright.verification.compare import Errors, RankedLayout, Report, ReportRow
from shardwright.verification.rank import train_rank
from shardwright.verification.ranks import Tell, end_all, report_progress, run_ranks
from shardwright.verification.reduce import most_ranks
from shardwright.verification.reference import train_alone
from shardwright.verification.tolerance import (
    Tolerance,
    float64_tolerance,
    one_process_tolerance,
    partition_tolerance,
    rounding_alone,
    sum_tolerance,
    with_adams_noise,
    with_compression,
)
from shardwright.verification.trace import RankTrace, Trace, TracedQuantity

TrainRank = Callable[[Case, Layout, Path], RankTrace]

C = TypeVar("C", bound=Case)

TIMEOUT_S = 300.0
_SMALL = 10_000_000  # parameters
_ENOUGH_TERMS = 4
"""Number of micro-batches and ranks; at least two of them have a gradient in every tensor: a query's gradient is zero
if the only target is the first token."""
MOST_RANKS = 64
"""Every rank is a process of this machine with at least `processes.PROCESS_BYTES`."""


class Verifier:
    """Compares layouts of a case, and keeps the traces of references for later comparisons. Use it in a `with`."""

    def __init__(self, train: TrainRank = train_rank, timeout_s: float = TIMEOUT_S) -> None:
        """`train` is the program of each rank of a layout; it, or the function in a `functools.partial`, has to be at
        the top level of a module."""
        self.train = train
        self.references: Verifier = self
        """The verifier that keeps the traces of one process; several may share one."""
        self.timeout_s = timeout_s
        self.tell: Tell = lambda line: None
        """Called with the progress of the ranks if the model is large."""
        self._stack = ExitStack()
        self._kept: dict[Any, Trace] = {}
        self._keeping = threading.Lock()
        self._alone_errors: dict[Case, Errors] = {}
        self._noise: dict[Trace, frozenset[str]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._kept.clear()
        self._noise.clear()
        self._stack.close()

    def parity(self, case: Case, layout: Layout, against: tuple[Case, Layout] | None = None) -> Report:
        """Compare a layout with one process, or with another layout that has another `micro_batch`.

        Raises LayoutError for a batch that the data ranks cannot share, WorkerError if a rank crashes or hangs.
        """
        _check(case, layout)
        case = with_choices_of(layout, case)
        case = _with_overflow(with_drawn_experts(case, rounded=gradient_roundings(layout) > 0))
        ours = self._prepared(case)
        with tempfile.TemporaryDirectory(dir=temporary_folder()) as folder:
            trace = self._run(self.train, layout.world_size, Path(folder), ours, layout)
            if against is None:
                expected, sides, name = self._exact(case), 1, "one process"
            else:
                other = replace(ours, micro_batch=against[0].micro_batch, stages=against[0].stages)
                expected = self._keep((other, against[1]), self.train, against[1].world_size, other, against[1])
                sides, name = 2, str(against[1])
            tolerance = with_compression(self._tolerance(case, sides), case, layout)
            tolerance = with_adams_noise(tolerance, case, self._noise_of(expected))
            rows = tolerance.rows(compare.errors(trace, expected))
            if case.dtype in ("bfloat16", "float16") and not gradient_roundings(layout):
                rows += self._in_16_bits(ours, layout, trace)
            if gradient_roundings(layout) == 1 and layout.compress_gradients == "bf16":
                rows += _summed_wide(ours, layout, trace)
            n_replicated, differing = compare.differing_replicas(trace)
            return Report(case, layout, name, rows, n_replicated, differing)

    def parities(self, pairs: Sequence[tuple[Case, RankedLayout]]) -> Iterator[Report]:
        """Yield `parity` of each case and layout with one process, in order, as they are done; several run at once. If
        a rank crashes or hangs, its report contains the crash and the others continue (`outcome`)."""
        world_size = max(layout.world_size for _, layout in pairs)
        # While some ranks wait for each other, or this process compares, ranks of another world run.
        at_once = max(1, min(4, most_ranks() // world_size))
        with ThreadPoolExecutor(at_once) as threads:
            try:
                yield from threads.map(lambda pair: self.outcome(*pair), pairs)
            except BaseException:
                threads.shutdown(wait=False, cancel_futures=True)
                end_all()
                raise

    def outcome(self, case: Case, layout: RankedLayout) -> Report:
        """Return `parity` with one process; a crash, a hang or a refusal of a valid setting is in the report.

        Raises LayoutError for a setting that breaks a rule.
        """
        assert isinstance(layout, Layout)
        _check(case, layout)
        try:
            return self.parity(case, layout)
        except ShardwrightError as error:
            return Report(case, layout, "one process", [], 0, crash=str(error))

    def _prepared(self, case: C) -> C:
        """Return the case with the norms that its reference clips to."""
        norms = self._exact(case).ranks[0].clip_norms
        return replace(case, clip_norms=tuple(tuple(norms[training]) for training in case.trainings))

    def _in_16_bits(self, case: Case, layout: Layout, trace: Trace) -> list[ReportRow]:
        """Return the errors of reductions in 16 bits, which the errors of matmuls in 16 bits would hide.

        The first gradient is compared with the same layout's on one data rank, which is far nearer than float64's. This
        is left out for weights sent as integers, which one rank does not have, and under ep, where an expert's matmuls
        are over the tokens of several data ranks at once, and a matmul of more rows may round an element the other way.
        Also, sums must not have been rounded to 16 bits: neither the gradients, nor, if they are reduced for each
        micro-batch, the gradients of one micro-batch; this is checked in bfloat16, because the code is the same.
        """
        rows: list[ReportRow] = []
        if layout.data_ranks > 1 and layout.ep == 1 and layout.compress_weights == "none":
            single = layout.changed(dp_replicate=1, dp_shard=1, zero=0)
            expected = self._keep((case, single), self.train, single.world_size, case, single)
            errors = compare.errors(trace, expected, kinds=["gradient"], steps=1)
            microbatches = case.global_batch // case.micro_batch
            rows += partition_tolerance(microbatches).rows(errors, kind="gradient vs one data rank")
        first = TracedQuantity("gradient", PLAIN_SGD, 1)
        if case.dtype == "float16":
            return rows
        terms = layout.data_ranks * layout.cp * case.accumulation(layout)
        if terms >= _ENOUGH_TERMS:
            rows += sum_tolerance(terms).rows(compare.share_of_bfloat16(trace, first), kind="bfloat16 share")
        if layout.zero > 1 and layout.cp > 1 and layout.pp == 1 and case.accumulation(layout) > 1:
            whole = replace(case, micro_batch=case.global_batch // layout.data_ranks, steps=1, stages=())
            once = self._keep((whole, layout), self.train, layout.world_size, whole, layout)
            ranks = layout.data_ranks * layout.cp
            shares = compare.share_of_bfloat16(once, first)
            rows += sum_tolerance(ranks).rows(shares, kind="bfloat16 share, one micro-batch")
        return rows

    def _tolerance(self, case: Case, sides: int = 1) -> Tolerance:
        if case.dtype == "float64":
            return float64_tolerance(case)
        plain = replace(case, micro_batch=1)
        known = self.references._alone_errors
        if plain not in known:
            alone = self._alone(self._prepared(case))
            known[plain] = compare.errors(alone, self._exact(case))
        return one_process_tolerance(case, known[plain], sides)

    def _noise_of(self, expected: Trace) -> frozenset[str]:
        if expected not in self._noise:
            self._noise[expected] = rounding_alone(expected)
        return self._noise[expected]

    def _exact(self, case: Case) -> Trace:
        """Return the reference in float64."""
        return self._alone(replace(case, dtype="float64"))

    def _alone(self, case: Case) -> Trace:
        # The reference has micro-batches only with fp8, where each has its own scale.
        case = replace(case, micro_batch=1 if case.fp8 is None else case.micro_batch, compiled=False)
        return self.references._keep(case, train_alone, 1, case)

    def _keep(
        self, key: Any, function: Callable[..., RankTrace], world_size: int, case: Case, *layout: RankedLayout
    ) -> Trace:
        with self._keeping:
            if key not in self._kept:
                folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(dir=temporary_folder())))
                self._kept[key] = self._run(function, world_size, folder, case, *layout)
            return self._kept[key]

    def _run(
        self, function: Callable[..., RankTrace], world_size: int, folder: Path, case: Case, *layout: RankedLayout
    ) -> Trace:
        # The threads of a small matmul wait for each other longer than they compute, above all on a busy machine.
        small = case.spec.n_parameters < _SMALL
        who = f"{f'{world_size} ranks' if layout else 'one process'} in {case.dtype}"

        def n_written() -> int:
            return len(list(folder.glob("*-0-0.safetensors")))  # the first file of rank 0 of each record

        with nullcontext() if small else report_progress(self.tell, who, n_written, case.n_records):
            ranks = run_ranks(
                function,
                world_size,
                case,
                *layout,
                folder,
                timeout_s=self.timeout_s,
                n_threads=1 if small else None,
            )
        return Trace(folder, ranks)


def _summed_wide(case: Case, layout: Layout, trace: Trace) -> list[ReportRow]:
    """Return whether gradients sent in bfloat16 were not also summed in it: ZeRO-2's and -3's have a term for each rank
    and micro-batch, ZeRO-1's for each rank."""
    terms = layout.data_ranks * layout.cp * (case.accumulation(layout) if layout.zero > 1 else 1)
    if terms < _ENOUGH_TERMS:
        return []
    return sum_tolerance(terms).rows(
        compare.share_of_bfloat16(trace, TracedQuantity("gradient", PLAIN_SGD, 1)), "bfloat16 share"
    )


def _with_overflow(case: Case) -> Case:
    """Return the case with a step in which a gradient overflows, in float16, if it has one after the first."""
    return (
        replace(case, overflow_step=OVERFLOW_STEP) if case.dtype == "float16" and case.steps > OVERFLOW_STEP else case
    )


def _check(case: Case, layout: Layout) -> None:
    if layout.world_size > MOST_RANKS:
        raise LayoutError(
            f"the layout has {layout.world_size} ranks ({layout}), and each would be a process of "
            f"this machine; at most {MOST_RANKS}: keep the axes and lower their degrees, as in --set "
            f"layout.dp_shard=2, since what can be wrong with an axis is wrong with 2 ranks of it"
        )
    # The layout and its reference in float64; or that reference, and the layout and one process in fewer bits: half.
    bytes_ = 2 * 8 * case.n_records * case.spec.n_parameters
    free_bytes = shutil.disk_usage(tempfile.gettempdir()).free
    if bytes_ > free_bytes:
        raise LayoutError(
            f"comparing a model of {format_count(case.spec.n_parameters)} parameters for {case.steps} steps writes up "
            f"to {format_bytes(bytes_)} of gradients and parameters to {tempfile.gettempdir()}, which has "
            f"{format_bytes(free_bytes)} left; take fewer --steps, or set TMPDIR to a larger disk"
        )
    sizes = [case.step_case(step) for step in range(case.steps)] + [case]
    problems = [problem for one in sizes for problem in stages.schedule_problems(layout, one.accumulation(layout))]
    problems += replica_problems(case.spec, layout, case.fp8)
    rounding = {f"layout.{key}": getattr(layout, key) for key in ("compress_dispatch", "compress_pipeline")}
    rounding |= {} if case.fp8 is None else {"precision.fp8": case.fp8.recipe}
    rounding = {key: value for key, value in rounding.items() if value != "none"}
    if gradient_roundings(layout):
        problems += [not_with(layout.compress_gradients, key, value) for key, value in rounding.items()]
    if elements_of_block(layout):
        if layout.cp > 1:
            problems.append(
                f"layout.compress_gradients={layout.compress_gradients!r} with layout.cp={layout.cp}: the choice is "
                f"made from the gradient of a rank's part of each sequence, and one process computes the gradient of "
                f"whole sequences; verify cp with --set layout.compress_gradients=none, and this value with cp=1"
            )
        rounding["layout.compress_gradients"] = layout.compress_gradients
    if case.dtype != "float64":
        problems += [only_in_float64(case.dtype, key, value) for key, value in rounding.items()]
    problems += [problem for one in sizes for problem in rules.problems(case.spec, layout, one.seq_len)]
    if problems:
        raise LayoutError(*dict.fromkeys(problems))


def parity(case: Case, layout: Layout, train: TrainRank = train_rank) -> Report:
    """Compare a layout once with one process; see Verifier.parity."""
    with Verifier(train) as verifier:
        return verifier.parity(case, layout)


Setting = tuple[Case, Layout]


def find_culprit(verifier: Verifier, report: Report, tell: Callable[[str], None] = lambda line: None) -> str:
    """Return a sentence with the smallest setting that is not equal to one process, and the axes and keys left in it.

    `tell` is called with each trial. Every trial is a separate run.
    """
    assert isinstance(report.layout, Layout)
    setting: Setting = (report.case, report.layout)
    if report.against != "one process" and _fails(verifier, setting, tell) is not True:
        return f"it equals one process: look at the other side, {report.against}"
    return _sentence(*smallest(setting, lambda pair: switched_off(*pair), lambda pair: _fails(verifier, pair, tell)))


S = TypeVar("S")


def smallest(
    setting: S, smaller: Callable[[S], Iterable[tuple[str, S]]], fails: Callable[[S], bool | None]
) -> tuple[S, list[str]]:
    """Return the smallest setting that still fails, and the names of the switches that it needs.

    `smaller`: the settings with one thing switched off, each with the name of the thing. `fails`: None for a setting
    that cannot be run.
    """
    known: dict[S, bool | None] = {}
    while True:
        needed: list[str] = []
        for name, other in smaller(setting):
            if other not in known:
                known[other] = fails(other)
            if known[other]:
                setting = other
                break
            if known[other] is False:
                needed.append(name)
        else:
            return setting, needed


def _fails(verifier: Verifier, setting: Setting, tell: Callable[[str], None]) -> bool | None:
    """Return whether a setting is not equal; None if it cannot be run, which is another fault."""
    tell(f"trying {_name(setting)}")
    try:
        return not verifier.parity(*setting).equal
    except (LayoutError, WorkerError):
        return None


def switched_off(case: Case, layout: Layout) -> Iterator[tuple[str, Setting]]:
    """Yield every setting with one axis, key, accumulation or dropout less than this one; axes first."""
    for name, changes in _fewer(layout):
        try:
            smaller = layout.changed(**changes)
        except LayoutError:
            continue
        # The micro-batches stay the same, so that switching off one thing does not switch on accumulation.
        yield name, (_accumulating(case, smaller, case.accumulation(layout)), smaller)
    if case.stages:
        yield "stages of the batch", (replace(case, stages=()), layout)
    if case.accumulation(layout) > 1:
        yield "accumulation", (_accumulating(case, layout, 1), layout)
    if case.spec.dropout:
        yield "dropout", (replace(case, spec=replace(case.spec, dropout=0.0)), layout)
    for key, off in _OF_ADAPTERS.items():
        if (lora := case.spec.lora) is not None and getattr(lora, key):
            without: dict[str, Any] = {key: off}
            yield f"lora.{key}", (replace(case, spec=replace(case.spec, lora=replace(lora, **without))), layout)


_OF_ADAPTERS = {"dropout": 0.0, "dora": False}
"""Keys of [lora] that can be switched off, with the value that does it."""


def _accumulating(case: Case, layout: Layout, accumulation: int) -> Case:
    return replace(case, micro_batch=case.global_batch // (layout.data_ranks * accumulation), stages=())


def _fewer(layout: Layout) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the switches, by name, with the changes that they make: axes first, then dependent keys."""
    axes = ("pp", "ep", *reversed(DENSE_AXES[1:]))
    for axis in axes:
        if layout.degree(axis) > 1:
            yield f"{axis}={layout.degree(axis)}", {axis: 1}
    for name, key in KEYS.items():
        value = getattr(layout, name)
        off = key.off(layout) if key.off else {name: key.default}
        usual = key.default_in(layout) if off.get(name) is None else off[name]
        if name in axes or not key.used(layout) or value == usual:
            continue
        yield f"{name}={written(value)}", off
        if key.milder not in (None, value):
            yield f"{name}={value}, not {name}={key.milder}", {name: key.milder}


def _name(setting: Setting) -> str:
    case, layout = setting
    extra = [f"accumulation {n}"] if (n := case.accumulation(layout)) > 1 else []
    extra += ["stages of the batch"] if case.stages else []
    extra += [f"dropout {case.spec.dropout:g}"] if case.spec.dropout else []
    lora = case.spec.lora
    extra += [f"lora.{key} {written(value)}" for key in _OF_ADAPTERS if (value := getattr(lora, key, None))]
    return ", ".join([str(layout), *extra])


def _sentence(setting: Setting, needed: list[str]) -> str:
    smallest = f"the smallest layout that still differs: {_name(setting)} ({setting[1].world_size} ranks)"
    if not needed:
        return f"{smallest}; no axis is left, so the fault is in the model, the loss or the update itself"
    return f"{smallest}; it is equal without {' and without '.join(needed)}"
