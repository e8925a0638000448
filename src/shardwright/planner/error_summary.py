"""Errors of predictions of training, of serving and of steps of GRPO: their summary, and the name of their interval."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any, NamedTuple, TypeVar

from shardwright.system.units import format_seconds

COVERED = 0.8
"""Share of measurements that an interval of a prediction is made to contain."""
COVERED_SHARE = f"{100 * COVERED:.0f} %"
INTERVAL = f"{COVERED_SHARE} interval"
"""Name of the interval of a prediction."""
NORMAL_80 = 1.2816
"""Standard deviations of a normal distribution on each side of the mean that contain `COVERED`."""


def bounds_in_words(bounds: tuple[float, float], text: Callable[[float], str] = format_seconds) -> str:
    """Return `14.0 s to 17.5 s`. `text`: formats a bound."""
    low, high = map(text, bounds)
    return f"{low} to {high}"


class ComparedRow(NamedTuple):
    """A prediction with its measurement. `row`: names the row of the table. With constants fitted without the row's
    source, or None: `left_out` is the prediction, `interval` its 80 % interval."""

    row: Any
    predicted: float
    measured: float
    left_out: float | None = None
    interval: tuple[float, float] | None = None

    @property
    def error(self) -> float:
        """Return predicted / measured - 1."""
        return self.predicted / self.measured - 1


@dataclass(frozen=True, kw_only=True)
class ErrorSummary:
    """Errors of n predictions, as shares; `worst_row` has the largest. With constants fitted without the source:
    `left_out` is the mean absolute error and `inside` the share of rows inside their intervals, else None."""

    n: int
    mean_absolute: float
    median_absolute: float
    bias: float
    worst: float
    worst_row: Any
    left_out: float | None
    inside: float | None


Summary = TypeVar("Summary", bound=ErrorSummary)


def summary(kind: Callable[..., Summary], rows: Sequence[ComparedRow], **names: str) -> Summary:
    """Return the summary of one row or more. `names`: the fields of `kind` that name the rows."""
    errors = [row.error for row in rows]
    worst = max(rows, key=lambda row: abs(row.error))
    left_out = [abs(row.left_out / row.measured - 1) for row in rows if row.left_out is not None]
    inside = [low <= row.measured <= high for row in rows if row.interval for low, high in (row.interval,)]
    return kind(
        **names,
        n=len(errors),
        mean_absolute=fmean(map(abs, errors)),
        median_absolute=median(map(abs, errors)),
        bias=fmean(errors),
        worst=worst.error,
        worst_row=worst.row,
        left_out=fmean(left_out) if left_out else None,
        inside=fmean(inside) if inside else None,
    )
