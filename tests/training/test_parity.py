"""Proves that every ZeRO stage on 1, 2 and 4 ranks trains as one process does: loss, raw gradients, parameters.

The reference is plain PyTorch on the whole batch at once. Masks are ragged, so that a loss normalised over anything
but the target tokens of the global batch shows. Runs anywhere, on gloo. That all ranks report the same loss and norm
and hold the same bits of what they share is a part of every comparison. Layouts of other axes: tests/verification.
"""

from itertools import cycle

import pytest

from shardwright.layout.layout import Layout
from shardwright.verification import Verifier
from tests.marks import prove, rest_prove
from tests.training.worlds import case

LAYOUTS = {
    "one rank": Layout(),
    "one rank, zero 3": Layout(zero=3),
    "zero 0 on 2": Layout(dp_replicate=2),
    "zero 1 on 2": Layout(dp_shard=2, zero=1),
    "zero 2 on 2": Layout(dp_shard=2, zero=2),
    "zero 3 on 2": Layout(dp_shard=2, zero=3),
    "zero 0 on 4": Layout(dp_replicate=4),
    "zero 1 on 4": Layout(dp_shard=4, zero=1),
    "zero 2 on 4": Layout(dp_shard=4, zero=2),
    "zero 3 on 4": Layout(dp_shard=4, zero=3),
    "zero 1 on 2 x 2": Layout(dp_replicate=2, dp_shard=2, zero=1),
    "zero 2 on 2 x 2": Layout(dp_replicate=2, dp_shard=2, zero=2),
    "zero 3 on 2 x 2": Layout(dp_replicate=2, dp_shard=2, zero=3),
}
ON_EIGHT = [
    Layout(dp_shard=8, zero=2),
    Layout(dp_replicate=2, dp_shard=4, zero=3),
]


QUICK = [(name, 3) for name in ("one rank, zero 3", "zero 0 on 2", "zero 1 on 2", "zero 2 on 2")]
# Each layout with or without accumulation; the matrix of verify has all of them with it.
CASES = dict.fromkeys([*QUICK, *zip(LAYOUTS, cycle([1, 3]), strict=False)])


@pytest.mark.parametrize(("name", "accumulation"), rest_prove(CASES, *QUICK))
def test_a_layout_trains_as_one_process_does_in_float64(verifier: Verifier, name: str, accumulation: int):
    report = verifier.parity(case(LAYOUTS[name], accumulation), LAYOUTS[name])
    assert report.equal, report.differing or report.worst
    # Sums of at most 24 x 10 tokens in another order: a few hundred roundings of 1e-16 at the very most.
    assert report.worst_error < 1e-12, report.worst


@prove
@pytest.mark.parametrize("layout", ON_EIGHT)
def test_eight_ranks_train_as_one_process_does(verifier: Verifier, layout: Layout):
    report = verifier.parity(case(layout, 3), layout)
    assert report.equal, report.differing or report.worst
    assert report.worst_error < 1e-12, report.worst


@prove
@pytest.mark.parametrize("name", ["zero 0 on 4", "zero 1 on 4", "zero 2 on 4", "zero 3 on 4", "zero 3 on 2 x 2"])
def test_a_layout_trains_as_one_process_does_in_float32(verifier: Verifier, name: str):
    report = verifier.parity(case(LAYOUTS[name], 3, "float32"), LAYOUTS[name])
    assert report.equal, report.differing or report.worst
    # The same sums with roundings of 6e-8.
    assert report.worst_error < 1e-5, report.worst


def test_every_parameter_gradient_and_copy_is_compared_in_each_step(verifier: Verifier):
    layout = LAYOUTS["zero 2 on 2 x 2"]
    report = verifier.parity(case(layout, 3), layout)
    n_parameters = 21
    per_training = n_parameters * (3 + 1) + 3 + 3 + 1  # gradients, parameters in the end; losses, norms, an evaluation
    assert len(report.rows) == n_parameters + 2 * per_training
    # Every shard is on two ranks; on some tensors (31 rows in two parts) there are two shards, and never fewer.
    assert report.n_replicated >= 2 * per_training
