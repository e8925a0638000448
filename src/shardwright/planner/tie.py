"""Layouts that the prediction cannot put in order, and which of them is recommended.

Two predictions for one model on one cluster err together: in the rates of matmuls, and in what the software costs.
Their difference is known better than either. The error of the difference, as a logarithm, grows with the share of the
step that the two layouts spend on different work:

    d = base + moved x,    x = sum over kinds of work k of |a_k - b_k| / (t_a + t_b)

a_k, b_k are the seconds of kind k in a step of layout a and of layout b, and t_a, t_b their steps. The coefficients are
a median regression over pairs of published runs of one source, model, software and cluster whose layouts differ, in
which each family of runs counts the same (`benchmarks/calibrate.py`): half of the differences are predicted within d.
Two layouts that differ by less than d are a tie. Of the published pairs that do, 52 % were measured in the other order;
of pairs that differ by 1 to 2 d 27 %, and of those that differ by more 8 %.
"""

from collections.abc import Iterator, Mapping, Sequence
from math import exp, log
from typing import Any

import numpy as np

from shardwright.cost.job import Candidates, Ints
from shardwright.layout import Layout
from shardwright.planner.pool import Pool
from shardwright.planner.priced import Priced

MODEL_AXES = ("tp", "pp", "cp", "ep")
"""Degrees that divide the work on one sequence; data ranks divide only the batch."""
NEAR = 1.25
"""Step time relative to the fastest layout's, up to which a simpler layout is shown."""
PREFERENCES = {
    "fastest": "the fastest layout, though a simpler one may be a tie",
    "simplest": f"the layout with fewest axes of those that take at most {NEAR:g} times as long",
    "cheapest": "the fewest accelerator-hours, on all accelerators or on a part of them",
}


def complexity(candidates: Candidates, node_size: int) -> Ints:
    """A number for each of n layouts, (n,): larger for more axes that divide a model or a sequence; of as many axes,
    larger for a schedule other than plain 1f1b.

    tp counts as two axes where its groups do not stay within nodes: each layer then has four collectives over the
    network, whose price is less certain than any other.
    """
    used = [getattr(candidates, axis) > 1 for axis in MODEL_AXES]
    counted = [np.broadcast_to(each, len(candidates)) for each in (*used, leaves_nodes(candidates.tp, node_size))]
    scheduled = candidates.pp > 1 and candidates.shared.pp_schedule != Layout.pp_schedule
    return np.asarray(2 * np.sum(counted, axis=0) + scheduled)


def leaves_nodes(tp: Any, node_size: int) -> Any:
    """Whether the ranks of a tp group are in several nodes; for each candidate where `tp` is an array."""
    return node_size % tp != 0


def moved_share(parts_s: Mapping[str, float], other_s: Mapping[str, float]) -> float:
    """x: the share of two steps that is spent on different work, 0 to 1; `parts_s`, `other_s`: seconds by kind."""
    kinds = {**parts_s, **other_s}
    changed = sum(abs(parts_s.get(kind, 0.0) - other_s.get(kind, 0.0)) for kind in kinds)
    return changed / (sum(parts_s.values()) + sum(other_s.values()))


def difference_error(one: Priced, other: Priced) -> float:
    """d: within which the logarithm of the quotient of the two steps is predicted for half of the pairs."""
    by = one.job.calibration.difference
    return by["base"] + by["moved"] * moved_share(one.parts_s, other.parts_s)


def ties(one: Priced, other: Priced) -> bool:
    """Whether the two layouts differ by no more than the error of the difference."""
    return abs(log(one.step_s / other.step_s)) <= difference_error(one, other)


def simpler(best: Priced, pool: Pool) -> Iterator[Priced]:
    """The simplest layout of a pool that takes at most `NEAR` times as long as the fastest one, `best`; then, for each
    larger complexity below that of `best`, the fastest layout that can tie with it."""
    node_size, by = best.job.cluster.node_size, best.job.calibration.difference
    near = pool.bound_s <= NEAR * best.step_s
    of_each = np.concatenate([complexity(group, node_size) for group in pool.groups])
    for least in np.unique(of_each[near]):
        if least >= complexity(best.choice.candidates, node_size)[0]:
            return
        if fastest := pool.fastest(1, near & (of_each == least)):
            found = Priced.of(best.job, pool.choice(fastest[0]))
            if found.step_s <= NEAR * best.step_s:
                yield found
                near = pool.bound_s <= exp(by["base"] + by["moved"]) * best.step_s


def simplest(found: Sequence[Priced]) -> Priced:
    """The simplest of layouts; of equally simple ones the fastest."""
    node_size = found[0].job.cluster.node_size
    return min(found, key=lambda each: (int(complexity(each.choice.candidates, node_size)[0]), each.step_s))


def simplest_tie(found: Sequence[Priced]) -> Priced:
    """The simplest of layouts that tie with the fastest, which is the first; of equally simple ones the fastest."""
    return simplest([each for each in found if ties(found[0], each)])
