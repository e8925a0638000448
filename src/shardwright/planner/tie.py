"""Layouts whose order the prediction cannot determine.

The predictions of two layouts for one model on one cluster have a common error: in the rates of matmuls, and in the
overhead of software. Their difference is known better than either. The error of the difference, as a logarithm, grows
with the share of the step that the two layouts spend on different work:

    d = base + moved x,    x = sum over kinds of work k of |a_k - b_k| / (t_a + t_b)

a_k, b_k are the seconds of kind k in a step of layout a and of layout b, and t_a, t_b their steps. The coefficients are
a median regression over pairs of published runs of one source, model, software and cluster whose layouts differ, in
which each family of runs counts the same (`benchmarks/calibrate.py`): half of the differences are predicted within d.
Two layouts that differ by less than d are a tie. Published pairs were measured in the other order in 52 % of the ties,
in 27 % of the pairs that differ by 1 to 2 d, and in 8 % of the pairs that differ by more.
"""

from collections.abc import Mapping
from math import log

from shardwright.planner.priced import PricedLayout


def moved_share(parts_s: Mapping[str, float], other_s: Mapping[str, float]) -> float:
    """Return x, the share of two steps spent on different work, 0 to 1; `parts_s`, `other_s`: seconds by kind."""
    kinds = {**parts_s, **other_s}
    changed = sum(abs(parts_s.get(kind, 0.0) - other_s.get(kind, 0.0)) for kind in kinds)
    return changed / (sum(parts_s.values()) + sum(other_s.values()))


def difference_error(one: PricedLayout, other: PricedLayout) -> float:
    """Return d, the median error of the logarithm of the ratio of the two step times."""
    by = one.job.calibration.difference
    return by["base"] + by["moved"] * moved_share(one.parts_s, other.parts_s)


def ties(one: PricedLayout, other: PricedLayout) -> bool:
    """Return whether the two layouts differ by no more than the error of the difference."""
    return abs(log(one.step_s / other.step_s)) <= difference_error(one, other)
