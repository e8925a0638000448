"""Proves that every ZeRO stage on 1, 2 and 4 ranks trains as one process does: loss, raw gradients, parameters.

The reference is plain PyTorch on the whole batch at once. Masks are ragged, so that a loss normalised over anything
but the target tokens of the global batch shows. Runs anywhere, on gloo.
"""

from functools import cache

import pytest
import torch

from shardloom.layout import Layout
from tests.distributed import run_ranks
from tests.train.worlds import Outcome, one_process, train_ranks, worst_error

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


@cache
def reference(dtype: torch.dtype) -> Outcome:
    return one_process(dtype)


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_trains_as_one_process_does_in_float64(name: str, accumulation: int):
    # Sums of at most 24 x 10 tokens in another order: a few hundred roundings of 1e-16 at the very most.
    for outcome in run_ranks(train_ranks, LAYOUTS[name].world_size, LAYOUTS[name], accumulation, torch.float64):
        assert worst_error(outcome, reference(torch.float64)) < 1e-12


@pytest.mark.parametrize("layout", ON_EIGHT)
def test_eight_ranks_train_as_one_process_does(layout: Layout):
    for outcome in run_ranks(train_ranks, 8, layout, 3, torch.float64):
        assert worst_error(outcome, reference(torch.float64)) < 1e-12


@pytest.mark.parametrize("name", ["zero 0 on 4", "zero 1 on 4", "zero 2 on 4", "zero 3 on 4", "zero 3 on 2 x 2"])
def test_a_layout_trains_as_one_process_does_in_float32(name: str):
    # The same sums with roundings of 6e-8.
    for outcome in run_ranks(train_ranks, LAYOUTS[name].world_size, LAYOUTS[name], 3, torch.float32):
        assert worst_error(outcome, reference(torch.float32)) < 1e-5


def test_every_rank_reports_the_same_loss_norm_and_parameters():
    outcomes = run_ranks(train_ranks, 4, LAYOUTS["zero 2 on 2 x 2"], 3, torch.float32)
    for outcome in outcomes[1:]:
        assert outcome.losses == outcomes[0].losses
        assert outcome.norms == outcomes[0].norms
        assert all(torch.equal(outcome.parameters[n], outcomes[0].parameters[n]) for n in outcome.parameters)
