"""Compares the traces of two runs: the error of each quantity, and the verdict.

The error of a tensor is ||a - b|| / max(||b||, floor), b the reference. The floor is FLOORS times the norm that the
tensor would have if its elements had the root mean square of all tensors of its kind: a gradient that is zero by
mathematics, such as a key bias's, is only rounding on both sides.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

from shardwright.verification.case import Case
from shardwright.verification.trace import Trace, TracedQuantity

FLOORS = {"gradient": 0.01, "parameter": 0.1, "average": 0.1, "initial": 0.1}
_ENOUGH = 24  # elements, which do not all happen to be bfloat16 numbers

Errors = dict[tuple[TracedQuantity, str], float]


@dataclass(frozen=True)
class ReportRow:
    """One comparison: of a tensor in one step, or of a number (its `name` is empty)."""

    quantity: TracedQuantity
    name: str
    error: float
    tolerance: float
    reason: str

    @property
    def equal(self) -> bool:
        """Return whether the error is within the tolerance. An error or a tolerance that is not finite is never equal:
        one process in the same type may be as wrong."""
        return math.isfinite(self.error) and self.error <= self.tolerance

    @property
    def excess(self) -> float:
        """The error as a multiple of the tolerance."""
        if not math.isfinite(self.error):
            return math.inf
        return self.error / self.tolerance if self.tolerance else (math.inf if self.error else 0.0)


class RankedLayout(Protocol):
    """A layout of this package, or a user's trainer with its axes; `str` names its axes."""

    @property
    def world_size(self) -> int: ...


@dataclass(frozen=True)
class Report:
    """The result of comparing a layout with its reference."""

    case: Case
    layout: RankedLayout
    against: str
    rows: list[ReportRow]
    n_replicated: int
    """Tensors and numbers that several ranks hold, counted each step; all were compared bit for bit."""
    differing: list[str] = field(default_factory=list)
    """A sentence for each tensor or number whose bits differ between ranks."""
    culprit: str = ""
    """If not equal: the smallest layout that still differs, and the keys that it needs."""
    crash: str = ""
    """The failure of a rank, if nothing could be compared."""
    not_compared: list[str] = field(default_factory=list)
    """The parts of the training that a user's trainer does not take from its batch."""

    def __str__(self) -> str:
        if self.crash:
            return f"{self.layout} against {self.against}: {self.crash}"
        verdict = "equal" if self.equal else "NOT EQUAL"
        (kind, training, step), name = self.worst.quantity, self.worst.name
        where = " ".join(filter(None, (kind, name and f"of {name}", f"after step {step} with {training}")))
        line = (
            f"{self.layout} against {self.against}: {verdict}; largest relative error {self.worst.error:.1e}, {where}"
        )
        return "\n".join(filter(None, (line, self.culprit)))

    @property
    def equal(self) -> bool:
        """No rank failed, nothing is beyond its tolerance, and replicas have the same bits."""
        return not self.crash and not self.differing and all(row.equal for row in self.rows)

    @property
    def worst(self) -> ReportRow:
        """The row with the largest error in multiples of its tolerance."""
        return max(self.rows, key=lambda row: row.excess)

    @property
    def worst_error(self) -> float:
        errors = [row.error for row in self.rows] or [math.inf]
        return max(errors, key=lambda error: math.inf if math.isnan(error) else error)

    def worst_of_each(self) -> list[ReportRow]:
        """Return the worst row of each kind and training, in the order in which they are computed."""
        worst: dict[tuple[str, str], ReportRow] = {}
        for row in self.rows:
            key = row.quantity[:2]
            if key not in worst or row.excess > worst[key].excess:
                worst[key] = row
        return list(worst.values())

    def document(self) -> dict[str, Any]:
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
            "crash": self.crash,
            "not_compared": self.not_compared,
        }


def _finite(error: float) -> float | str:
    return error if math.isfinite(error) else str(error)  # JSON has no infinity


def errors(trace: Trace, expected: Trace, kinds: Iterable[str] | None = None, steps: int | None = None) -> Errors:
    """Return the error of each number and tensor of `expected`; infinite if `trace` does not contain it."""

    def wanted(quantity: TracedQuantity) -> bool:
        return (kinds is None or quantity.kind in kinds) and (steps is None or quantity.step <= steps)

    result: Errors = {}
    for quantity, value in expected.scalars.items():
        if wanted(quantity):
            ours = trace.scalars.get(quantity, math.inf)
            result[quantity, ""] = abs(ours - value) / max(abs(value), math.ulp(1.0))
    for quantity in filter(wanted, expected.quantities):
        result |= _tensor_errors(trace, expected, quantity)
    return result


def _tensor_errors(trace: Trace, expected: Trace, quantity: TracedQuantity) -> Errors:
    ours, theirs = trace.shapes, expected.shapes
    result: Errors = {}
    measured: list[tuple[str, float, float, int]] = []
    for name in sorted(ours.keys() | theirs.keys()):
        a = trace.tensor(quantity, name) if ours.get(name) == theirs.get(name) else None
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


def factor(trace: Trace, expected: Trace, quantity: TracedQuantity, name: str) -> float | None:
    """Return c if a tensor is c times the reference's, up to a millionth of its norm; otherwise None."""
    a, b = trace.tensor(quantity, name), expected.tensor(quantity, name)
    if a is None or b is None or a.shape != b.shape or not float(b.norm()):
        return None
    a, b = a.double(), b.double()
    c = float((a * b).sum() / b.square().sum())
    return c if float((a - c * b).norm()) <= 1e-6 * float(a.norm()) else None


def share_of_bfloat16(trace: Trace, quantity: TracedQuantity) -> Errors:
    """Return for each tensor with enough elements the fraction of its nonzero elements that are bfloat16 numbers.

    A float32 sum of several bfloat16 terms is rarely a bfloat16 number in every element; a sum that was rounded to
    bfloat16 is. An embedding that is not tied is left out, because a row may have one term alone: from the only
    micro-batch with its token.
    """
    tied = "head.weight" not in trace.shapes
    result: Errors = {}
    for name in trace.shapes:
        left_out = "embedding" in name and not (tied and name == "embedding.weight")
        tensor = None if left_out else trace.tensor(quantity, name)
        if tensor is None:
            continue
        values = tensor[tensor != 0]
        if len(values) >= _ENOUGH:
            result[quantity, name] = float((values.bfloat16().to(values.dtype) == values).double().mean())
    return result


def differing_replicas(trace: Trace) -> tuple[int, list[str]]:
    """Return the number of tensors and numbers that several ranks hold, and a sentence for each whose bits differ."""
    count, problems = 0, []
    for quantity, name, groups in trace.replicas():
        count += 1
        if len(groups) > 1:
            ranks = " | ".join(",".join(map(str, group)) for group in groups)
            what = f"{quantity.kind} {name}".strip()
            problems.append(f"{what}, {quantity.training}, step {quantity.step}: not the same bits on ranks {ranks}")
    return count, problems
