"""The tolerance of each compared quantity: a bound on rounding, with its reason."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from shardwright.layout.layout import Layout
from shardwright.model.modules import rows
from shardwright.split.compression import gradient_roundings
from shardwright.verification.case import DTYPES, PLAIN_SGD, Case
from shardwright.verification.compare import FLOORS, Errors, ReportRow
from shardwright.verification.trace import Trace, TracedQuantity

EPS = {"float64": 2.0**-52, "float32": 2.0**-23}
FLOAT64_LIMIT = 1e-10
MULTIPLE = 4.0
"""Multiple of the distance from float64 of one process in the same dtype that a layout may have. Measured over 7 models
and 30 seeds: up to 2.5 in bfloat16, 3.0 in float32."""
MULTIPLE_OF_NUMBERS = 6.0
"""The same multiple for a loss or a norm, which have fewer values for the largest error. Measured: up to 4."""
_OF_NORM = 0.25
"""The error of a norm as a fraction of the error of its gradients, mostly orthogonal to them. Measured: up to 0.3."""
_NOISE = 0.01
"""The fraction of a parameter's elements whose gradient may be mostly rounding."""
_OF_COUNTS = 8.0
"""Roundings of a result that is computed from counts."""
MOST = 0.45
"""The largest error that is allowed in 32 and 16 bits."""
HALF_STEP = {"bf16": 2.0**-8, "int8": 4 / 254, "int4": 4 / 14}
"""The relative error of one rounding, for each encoding of gradients: for bf16 the maximum; for integers half a scale,
in blocks whose largest element is 4 times their root mean square."""
_COMPRESSED = 1.0
"""Multiple of its roundings that the error of a gradient may have: its addends may be larger than their sum, but their
errors partly cancel. Measured: up to 0.65."""
WEIGHTS = ("parameter", "average")
"""The kinds of values that an update of the optimizer changes."""

_SHARE = {"grad norm": 0.25, "loss": 0.0625, "parameter": 0.0625, "average": 0.0625}
"""The fraction of a gradient's error that reaches other results with plain SGD. Measured: up to 0.03, 0.0005, 0.005."""
_GROWN = 16.0
"""The growth of errors that is allowed after steps of Adam. Measured: up to 7 times."""
MOST_BFLOAT16 = 0.98
"""The largest fraction of a gradient's elements that may be bfloat16 numbers after a sum in float32. Measured: up to
0.64."""


@dataclass(frozen=True)
class Tolerance:
    """The limit of the error of each quantity, and its reason."""

    limit: Callable[[TracedQuantity, str], float]
    reason: str

    def rows(self, errors: Errors, kind: str | None = None) -> list[ReportRow]:
        """Return errors next to their limits; `kind` replaces the kind of the quantities."""
        return [
            ReportRow(
                quantity._replace(kind=kind or quantity.kind),
                name,
                error,
                self.limit(quantity, name),
                self.reason,
            )
            for (quantity, name), error in errors.items()
        ]


def float64_tolerance(case: Case) -> Tolerance:
    """Return the bound on the rounding of sums taken in another order."""
    terms, chain = _longest_sum(case), _matmuls(case)
    bound = EPS["float64"] * terms * chain
    limit = max(FLOAT64_LIMIT, bound)
    reason = (
        f"float64: {EPS['float64']:.1e} a rounding x {terms} terms of the longest sum x {chain} matmuls one after "
        f"another = {bound:.1e}, " + (f"under {limit:g}" if bound < limit else "which is the tolerance")
    )
    return Tolerance(lambda quantity, name: limit, reason)


def one_process_tolerance(case: Case, alone: Errors, sides: int = 1) -> Tolerance:
    """Return a multiple of the error `alone` of one process in the same dtype against float64, for each of the `sides`
    of a comparison that are in that dtype.

    The limit is a multiple of one of these errors in `alone`. A tensor: its own error or, if that is small by luck, the
    median error of its kind and step. A parameter after steps of Adam, which divides a gradient by its size and so
    takes a full step for an element that is mostly rounding: the largest error of its kind and step, or the error if
    `_NOISE` of the elements step the other way. A number (loss, norm, evaluation), which is often right by luck: the
    largest error of its kind in any step; for a norm at least `_OF_NORM` of the median gradient's error. Initial values
    are float64's, rounded once: frozen ones to the type of matmuls. Gradients are never allowed `MOST` or more, where a
    missing or doubled gradient passes.
    """
    multiple = MULTIPLE * sides
    tensors: dict[TracedQuantity, list[float]] = {}
    numbers: dict[str, float] = {}
    for (quantity, name), error in alone.items():
        if name:
            tensors.setdefault(quantity, []).append(error)
        else:
            kind = _number(quantity)
            numbers[kind] = max(numbers.get(kind, 0.0), error)
    middle = {quantity: sorted(errors)[len(errors) // 2] for quantity, errors in tensors.items()}
    largest = {quantity: max(errors) for quantity, errors in tensors.items()}
    gradient = max(error for quantity, error in middle.items() if quantity.kind == "gradient")
    numbers["grad norm"] = max(numbers["grad norm"], _OF_NORM * gradient)

    def limit(quantity: TracedQuantity, name: str) -> float:
        if quantity.kind == "initial":
            kept, compute = DTYPES[case.dtype]
            row = rows(case.spec).get(name)  # None: a parameter of another trainer's model
            return torch.finfo(compute if row is not None and row.frozen else kept).eps
        if _follows_load(name):
            return _OF_COUNTS * EPS["float32"]
        if not name:
            base = numbers[_number(quantity)]
        elif quantity.kind in WEIGHTS and quantity.training != PLAIN_SGD:
            return min(MOST, max(multiple * largest[quantity], math.sqrt(_NOISE) * _all_steps(case)))
        else:
            base = max(alone.get((quantity, name), 0.0), middle[quantity])
        factor = multiple if name else MULTIPLE_OF_NUMBERS * sides
        return min(MOST, factor * max(base, EPS["float32"]))

    reason = (
        f"{case.dtype}: {multiple:g} x the error that one process in {case.dtype} has against float64, of a loss or "
        f"norm {MULTIPLE_OF_NUMBERS * sides:g} x, and {MOST:g} at most"
    )
    if case.spec.moe:
        reason += "; experts are drawn and not picked, since rounding would pick others where two are nearly equal"
    return Tolerance(limit, reason)


def _all_steps(case: Case) -> float:
    """Return the error of a parameter whose every element Adam steps the other way: by 2 lr more after each step, with
    the largest learning rate of a kind of parameter, over the floor of the error."""
    scales = [case.optimizer.lr_scale_of(row) for row in rows(case.spec).values() if row.trained]
    return 2 * case.optimizer.lr * max(1.0, *scales) * case.steps / (FLOORS["parameter"] * case.spec.init_std)


def _follows_load(name: str) -> bool:
    """Return whether a tensor has no gradient and is updated from the counts of tokens, which are exact if experts are
    drawn."""
    return name.endswith((".router.bias", ".router.load"))


def _number(quantity: TracedQuantity) -> str:
    return "loss" if quantity.kind in ("evaluation", "mtp loss", "mtp evaluation") else quantity.kind


def partition_tolerance(microbatches: int) -> Tolerance:
    """Return the bound for 16 bits: micro-batches have the same matmuls on any rank; only their sum, in float32, is in
    another order."""
    limit = 8 * EPS["float32"] * microbatches
    reason = (
        f"the same {microbatches} micro-batches on one data rank: the same matmuls in 16 bits, summed in float32; "
        f"8 x {EPS['float32']:.1e} x {microbatches} = {limit:.1e}"
    )
    return Tolerance(lambda quantity, name: limit, reason)


def sum_tolerance(terms: int) -> Tolerance:
    """Return the bound for 16 bits: sums of `terms` gradients in float32 are not all bfloat16 numbers."""
    reason = f"share of a gradient's elements that are bfloat16 numbers: sums of {terms} terms in float32 seldom are"
    return Tolerance(lambda quantity, name: MOST_BFLOAT16, reason)


def with_compression(tolerance: Tolerance, case: Case, layout: Layout) -> Tolerance:
    """Return `tolerance` plus the effect of rounding compressed gradients (`layout.compress_gradients`).

    An element is rounded `compression.gradient_roundings` times, each by `HALF_STEP` of its size; a gradient is allowed
    the sum of these, times `_COMPRESSED`. Some of that reaches a norm, a loss and the parameters. Steps of Adam, which
    divides by the size of a gradient, let it grow in later steps; so do weights sent as integers, where an element
    between two integers arrives as the other one.
    """
    if not gradient_roundings(layout):
        return tolerance
    bound = _COMPRESSED * gradient_roundings(layout) * HALF_STEP[layout.compress_gradients]

    def limit(quantity: TracedQuantity, name: str) -> float:
        kind, training, step = quantity
        before_any = kind == "initial" or (step == 1 and kind in ("loss", "mtp loss"))
        added = 0.0 if before_any else bound * (_SHARE.get(_number(quantity), 1.0))
        after_a_step = step > 1 or _number(quantity) == "loss"
        if after_a_step and (training != PLAIN_SGD or layout.compress_weights != "none"):
            added *= _GROWN
        if training != PLAIN_SGD and kind in WEIGHTS:
            added = max(added, math.sqrt(_NOISE) * _all_steps(case))
        return min(MOST, tolerance.limit(quantity, name) + added)

    reason = (
        f"{tolerance.reason}; gradients travel in {layout.compress_gradients}: {gradient_roundings(layout)} roundings "
        f"of {HALF_STEP[layout.compress_gradients]:.1e} x {_COMPRESSED:g} = {bound:.1e}, and {_GROWN:g} x that after "
        f"steps of Adam"
    )
    return Tolerance(limit, reason)


def with_adams_noise(tolerance: Tolerance, case: Case, noise: frozenset[str]) -> Tolerance:
    """Return `tolerance`, except for parameters in `noise`, whose gradient is zero by mathematics, such as a key bias.

    Adam divides such a gradient, which is only rounding, by its own size, and so makes steps that no two summation
    orders share. The rate bounds these steps; gradients and SGD have to meet `tolerance` like all others.
    """
    if not noise:
        return tolerance
    bound = _all_steps(case)

    def limit(quantity: TracedQuantity, name: str) -> float:
        steps_of_noise = quantity.kind in WEIGHTS and quantity.training != PLAIN_SGD and name in noise
        return max(bound, tolerance.limit(quantity, name)) if steps_of_noise else tolerance.limit(quantity, name)

    reason = (
        f"{tolerance.reason}; for {len(noise)} parameters whose gradient is zero except for rounding, AdamW's steps of "
        f"it: 2 x lr {case.optimizer.lr:g} x {case.steps} steps over the floor = {bound:.1e}"
    )
    return Tolerance(limit, reason)


def rounding_alone(trace: Trace) -> frozenset[str]:
    """Return the parameters whose gradient is nowhere more than a billionth of its size at the mean square of all."""
    names = {name for name in trace.shapes if not _follows_load(name)}
    for quantity in trace.quantities:
        if quantity.kind == "gradient" and names:
            tensors = {name: trace.tensor(quantity, name) for name in trace.shapes}
            norms = {name: (float(t.double().norm()), t.numel()) for name, t in tensors.items() if t is not None}
            mean_square = sum(norm**2 for norm, _ in norms.values()) / max(sum(n for _, n in norms.values()), 1)
            names &= {name for name, (norm, n) in norms.items() if norm <= 1e-9 * math.sqrt(mean_square * n)}
    return frozenset(names)


def _longest_sum(case: Case) -> int:
    spec = case.spec
    picks = spec.moe.top_k if spec.moe else 1
    return max(picks * case.global_batch * case.seq_len, spec.d_ffn, spec.vocab_size, spec.n_heads * spec.head_dim)


def _matmuls(case: Case) -> int:
    """Return the matmuls that an input of the first step goes through until the last update: q k^T, times v, the output
    projection and two of the network in every layer, and the head; forward and backward, each step."""
    return 2 * (5 * case.spec.n_blocks + 1) * case.steps
