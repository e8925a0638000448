"""Errors, tolerances and the verdict.

The error of a tensor is ||a - b|| / max(||b||, floor), b the reference. The floor is FLOORS times what the tensor's
norm would be if its elements were as large as those of all tensors of its kind are on average (root mean square): a
gradient that is zero by mathematics, as that of a key's bias, is rounding and nothing else on both sides.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from shardwright.layout import Layout
from shardwright.verification.case import Case
from shardwright.verification.trace import Quantity, Trace

FLOORS = {"gradient": 0.01, "parameter": 0.1, "initial": 0.1}
FLOAT64_LIMIT = 1e-10
MULTIPLE = 4.0
"""How much farther from float64 a layout may be than one process in the same dtype. Measured over the matrix of 2
ranks: up to 2.5 times in float32 and 2.3 times in bfloat16."""
MULTIPLE_WITH_EXPERTS = 8.0
"""The same for models with experts, where rounding can send a whole token to another expert. Measured: up to 4.2
times in bfloat16."""
MOST_REROUTED = 1 / 16
"""The share of the choices of experts in a step that may differ in 32 or 16 bits."""

_EPS = {"float64": 2.0**-52, "float32": 2.0**-23}

Errors = dict[tuple[Quantity, str], float]


@dataclass(frozen=True)
class Row:
    """One comparison: of a tensor in one step, or of a number (its `name` is empty)."""

    quantity: Quantity
    name: str
    error: float
    tolerance: float
    reason: str

    @property
    def equal(self) -> bool:
        """Within the tolerance; what is not a number is not equal."""
        return self.error <= self.tolerance

    @property
    def excess(self) -> float:
        """The error as a multiple of the tolerance."""
        if math.isnan(self.error):
            return math.inf
        return self.error / self.tolerance if self.tolerance else (math.inf if self.error else 0.0)


@dataclass(frozen=True)
class Report:
    """The result of comparing a layout with its reference."""

    case: Case
    layout: Layout
    against: str
    rows: list[Row]
    n_replicated: int
    """Tensors and numbers that several ranks hold, counted each step; all were compared bit for bit."""
    differing: list[str] = field(default_factory=list)
    """A sentence for each of them whose bits differ between ranks."""
    culprit: str = ""
    """Where it is not equal: the smallest layout that still differs, and the keys it needs for that."""

    def __str__(self) -> str:
        verdict = "equal" if self.equal else "NOT EQUAL"
        (kind, training, step), name = self.worst.quantity, self.worst.name
        where = " ".join(filter(None, (kind, name and f"of {name}", f"after step {step} with {training}")))
        line = (
            f"{self.layout} against {self.against}: {verdict}; largest relative error {self.worst.error:.1e}, {where}"
        )
        return "\n".join(filter(None, (line, self.culprit)))

    @property
    def equal(self) -> bool:
        """Nothing is beyond its tolerance, and replicas have the same bits."""
        return not self.differing and all(row.equal for row in self.rows)

    @property
    def worst(self) -> Row:
        """The row with the largest error in multiples of its tolerance."""
        return max(self.rows, key=lambda row: row.excess)

    @property
    def worst_error(self) -> float:
        """The largest error of all rows."""
        return max((row.error for row in self.rows), key=lambda error: math.inf if math.isnan(error) else error)

    def worst_of_each(self) -> list[Row]:
        """The worst row of each kind and training, in the order in which they are computed."""
        found: dict[tuple[str, str], Row] = {}
        for row in self.rows:
            key = row.quantity[:2]
            if key not in found or row.excess > found[key].excess:
                found[key] = row
        return list(found.values())

    def document(self) -> dict[str, Any]:
        """The report for `--json`."""
        rows = [row for row in self.rows if not row.equal] or self.worst_of_each()
        return {
            "layout": str(self.layout),
            "against": self.against,
            "dtype": self.case.dtype,
            "equal": self.equal,
            "worst_error": _finite(self.worst_error),
            "worst": [
                {
                    **row.quantity._asdict(),
                    "name": row.name,
                    "error": _finite(row.error),
                    "tolerance": row.tolerance,
                    "reason": row.reason,
                }
                for row in sorted(rows, key=lambda row: -row.excess)
            ],
            "compared": len(self.rows),
            "replicas": self.n_replicated,
            "replicas_that_differ": self.differing,
            "culprit": self.culprit,
        }


def _finite(error: float) -> float | str:
    return error if math.isfinite(error) else str(error)  # JSON has no infinity


def errors(found: Trace, expected: Trace, kinds: Iterable[str] | None = None, steps: int | None = None) -> Errors:
    """The error of everything that both computed; infinite where there is nothing to compare with."""

    def wanted(quantity: Quantity) -> bool:
        return (kinds is None or quantity.kind in kinds) and (steps is None or quantity.step <= steps)

    result: Errors = {}
    for quantity, value in expected.scalars.items():
        if wanted(quantity):
            ours = found.scalars.get(quantity, math.inf)
            result[quantity, ""] = abs(ours - value) / max(abs(value), math.ulp(1.0))
    for quantity in filter(wanted, expected.quantities):
        result |= _tensor_errors(found, expected, quantity)
    return result


def _tensor_errors(found: Trace, expected: Trace, quantity: Quantity) -> Errors:
    ours, theirs = found.shapes(), expected.shapes()
    result: Errors = {}
    measured: list[tuple[str, float, float, int]] = []
    for name in sorted(ours.keys() | theirs.keys()):
        a = found.tensor(quantity, name) if ours.get(name) == theirs.get(name) else None
        b = expected.tensor(quantity, name) if a is not None else None
        if a is None or b is None:
            result[quantity, name] = math.inf
            continue
        a, b = a.double(), b.double()
        measured.append((name, float((a - b).norm()), float(b.norm()), b.numel()))
    elements = sum(n for *_, n in measured)
    mean_square = sum(norm**2 for _, _, norm, _ in measured) / max(elements, 1)
    for name, distance, norm, n in measured:
        floor = FLOORS[quantity.kind] * math.sqrt(mean_square * n)
        result[quantity, name] = distance / max(norm, floor, math.ulp(0.0))
    return result


@dataclass(frozen=True)
class Tolerance:
    """How large the error of something may be, and why."""

    limit: Callable[[Quantity, str], float]
    reason: str


def of_float64(case: Case) -> Tolerance:
    """The bound on the rounding of sums taken in another order."""
    terms, chain = _longest_sum(case), _matmuls(case)
    bound = _EPS["float64"] * terms * chain
    limit = max(FLOAT64_LIMIT, bound)
    reason = (
        f"float64: {_EPS['float64']:.1e} a rounding x {terms} terms of the longest sum x {chain} matmuls one after "
        f"another = {bound:.1e}, " + (f"under {limit:g}" if bound < limit else "which is the tolerance")
    )
    return Tolerance(lambda quantity, name: limit, reason)


def of_one_process(case: Case, alone: Errors, multiple: float = MULTIPLE) -> Tolerance:
    """A multiple of the error of one process in the same dtype against float64.

    Of a tensor: of its own error there, or, where that came out small by luck, of the middle one of its kind and step.
    A norm can be off by as much as what it is the norm of. Of a loss, which is often right by luck: of the largest
    error in any step. Initial values are those of float64, rounded once. With experts, which tensor is hit by a token
    that picked another one is luck, so there the largest error of its kind and step stands for every tensor.
    """
    by_quantity: dict[Quantity, list[float]] = {}
    for (quantity, _), error in alone.items():
        by_quantity.setdefault(quantity, []).append(error)
    losses = max(error for (quantity, _), error in alone.items() if quantity.kind == "loss")

    def limit(quantity: Quantity, name: str) -> float:
        if quantity.kind == "initial":
            return _EPS["float32"]
        if quantity.kind == "loss":
            base = losses
        else:
            of = quantity._replace(kind="gradient") if quantity.kind == "grad norm" else quantity
            found = sorted(by_quantity[of])
            base = found[-1] if case.spec.moe else max(alone.get((quantity, name), 0.0), found[len(found) // 2])
        return multiple * max(base, _EPS["float32"])

    reason = f"{case.dtype}: {multiple:g} x the error that one process in {case.dtype} has against float64"
    if case.spec.moe:
        reason += ", the largest of any tensor, for near ties pick other experts"
    return Tolerance(limit, reason)


def of_partition(microbatches: int) -> Tolerance:
    """In 16 bits: micro-batches have the same matmuls on whichever rank they run; only their sum is in another order,
    and it is in float32."""
    limit = 8 * _EPS["float32"] * microbatches
    reason = (
        f"the same {microbatches} micro-batches on one data rank: the same bfloat16 matmuls, summed in float32; "
        f"8 x {_EPS['float32']:.1e} x {microbatches} = {limit:.1e}"
    )
    return Tolerance(lambda quantity, name: limit, reason)


def untrained(name: str) -> bool:
    """Whether a tensor is not trained but follows the load of experts."""
    return name.endswith((".router.bias", ".router.load"))


def with_routing(tolerance: Tolerance, case: Case) -> Tolerance:
    """The same in float64; in 32 and 16 bits not for what follows the load of experts.

    Where two scores are equal but for rounding, a token picks one expert or the other, and counts are whole numbers. A
    bias then moves by the sign of a difference of counts: all that is certain is its rate. Of a load it is how many
    tokens may have picked another expert.
    """
    moe = case.spec.moe
    if case.dtype == "float64" or moe is None or not (moe.bias_rate or moe.keeps_load):
        return tolerance
    # Two biases that differ by 2 rates more after each step, over the floor of the error.
    bias = 2 * moe.bias_rate * case.steps / (FLOORS["parameter"] * case.spec.init_std)
    # A token moves E / (N K) from one of E loads, of which the norm is sqrt(E) and more, to another.
    load = math.sqrt(2 * moe.n_experts) * MOST_REROUTED

    def limit(quantity: Quantity, name: str) -> float:
        if quantity.kind == "parameter" and untrained(name):
            return bias if name.endswith(".bias") else load
        return tolerance.limit(quantity, name)

    reason = (
        f"{tolerance.reason}; biases of routers go by the sign of a difference of counts: 2 x rate {moe.bias_rate:g} x "
        f"{case.steps} steps over the floor = {bias:.1e}, and loads by the counts: {MOST_REROUTED:.1%} of the choices "
        f"= {load:.1e}"
    )
    return Tolerance(limit, reason)


def with_adams_noise(tolerance: Tolerance, case: Case, noise: frozenset[str]) -> Tolerance:
    """The same, but where a parameter's gradient is zero by mathematics, as that of a key's bias: those of `noise`.

    Adam divides such a gradient, which is rounding and nothing else, by its own size, and so makes steps of it that no
    two summation orders share. They are bounded by the rate; gradients and SGD are held to `tolerance` as all are.
    """
    if not noise:
        return tolerance
    # Two parameters that differ by 2 lr more after each step, over the floor of the error.
    bound = 2 * case.optimizer.lr * case.steps / (FLOORS["parameter"] * case.spec.init_std)

    def limit(quantity: Quantity, name: str) -> float:
        steps_of_noise = quantity.kind == "parameter" and quantity.training != "sgd" and name in noise
        return max(bound, tolerance.limit(quantity, name)) if steps_of_noise else tolerance.limit(quantity, name)

    reason = (
        f"{tolerance.reason}; for {len(noise)} parameters whose gradient is zero but for rounding, AdamW's steps of "
        f"it: 2 x lr {case.optimizer.lr:g} x {case.steps} steps over the floor = {bound:.1e}"
    )
    return Tolerance(limit, reason)


def rounding_alone(trace: Trace) -> frozenset[str]:
    """Names of parameters whose gradient is nowhere more than a billionth of what it would be at the mean square of
    all."""
    found = {name for name in trace.shapes() if not untrained(name)}
    for quantity in trace.quantities:
        if quantity.kind == "gradient" and found:
            tensors = {name: trace.tensor(quantity, name) for name in trace.shapes()}
            norms = {name: (float(t.double().norm()), t.numel()) for name, t in tensors.items() if t is not None}
            mean_square = sum(norm**2 for norm, _ in norms.values()) / max(sum(n for _, n in norms.values()), 1)
            found &= {name for name, (norm, n) in norms.items() if norm <= 1e-9 * math.sqrt(mean_square * n)}
    return frozenset(found)


def rows(found: Errors, tolerance: Tolerance, kind: str | None = None) -> list[Row]:
    """Errors beside their tolerances; `kind` replaces that of the quantities."""
    return [
        Row(
            quantity._replace(kind=kind or quantity.kind),
            name,
            error,
            tolerance.limit(quantity, name),
            tolerance.reason,
        )
        for (quantity, name), error in found.items()
    ]


def differing_replicas(trace: Trace) -> tuple[int, list[str]]:
    """The number of tensors and numbers that several ranks hold, and a sentence for each whose bits differ."""
    count, found = 0, []
    for quantity, name, groups in trace.replicas():
        count += 1
        if len(groups) > 1:
            ranks = " | ".join(",".join(map(str, group)) for group in groups)
            what = f"{quantity.kind} {name}".strip()
            found.append(f"{what}, {quantity.training}, step {quantity.step}: not the same bits on ranks {ranks}")
    return count, found


def _longest_sum(case: Case) -> int:
    spec = case.spec
    picks = spec.moe.top_k if spec.moe else 1
    return max(picks * case.global_batch * case.seq_len, spec.d_ffn, spec.vocab_size, spec.n_heads * spec.head_dim)


def _matmuls(case: Case) -> int:
    """Matmuls that an input of the first step goes through until the last update: q k^T, times v, the output
    projection and two of the network in every layer, and the head; forward and backward, each step."""
    return 2 * (5 * case.spec.n_layers + 1) * case.steps
