"""The 80 % interval of a predicted rate or latency of an engine.

The half width h is a logarithm, so the interval is x e^-h to x e^h. h is the 80 % quantile of |log(predicted /
measured)| over the packaged measurements, predicted by constants that were fitted without their source, in which each
source counts the same (`half_widths`; `tests/serving/test_evaluate.py` computes it again). A mean of many requests is
measured, so the interval of a first token is the interval of its mean.
Ignored: rows of one source err in one direction, and hold or fail together. `generate` is measured on its own machine,
and has no interval.
"""

from collections import defaultdict
from collections.abc import Iterable
from math import exp

import numpy as np

from shardwright.planner.error_summary import COVERED

RATE, FIRST, FURTHER = "rate", "first token", "further token"
KINDS = {
    "output_tokens_per_s": RATE,
    "total_tokens_per_s": RATE,
    "e2e_latency_s": RATE,
    "ttft_s": FIRST,
    "tpot_s": FURTHER,
}
"""The kind of quantity of each metric; the latency of a whole answer is the inverse of a rate."""
HALF_WIDTHS = {RATE: 0.183, FIRST: 0.645, FURTHER: 0.246}


def interval(value: float, kind: str) -> tuple[float, float]:
    """Return the least and the largest value that are expected, of a predicted value of one of `HALF_WIDTHS`."""
    width = exp(HALF_WIDTHS[kind])
    return value / width, value * width


def half_widths(rows: Iterable[tuple[str, str, float, float]]) -> dict[str, float]:
    """Return the half width of each kind from (source, metric, predicted, measured), predicted without the source."""
    errors: dict[str, dict[tuple[str, str], list[float]]] = defaultdict(lambda: defaultdict(list))
    for source, metric, predicted, measured in rows:
        errors[KINDS[metric]][source, metric].append(abs(float(np.log(predicted / measured))))
    return {kind: _quantile(list(by_source.values())) for kind, by_source in errors.items()}


def _quantile(groups: list[list[float]]) -> float:
    """Return the quantile `COVERED` of all values, in which each group has the same weight."""
    values = np.concatenate(groups)
    weights = np.concatenate([np.full(len(group), 1 / len(group)) for group in groups])
    order = np.argsort(values)
    shares = np.cumsum(weights[order]) / weights.sum()
    return float(values[order][np.searchsorted(shares, COVERED)])
