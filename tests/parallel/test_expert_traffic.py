"""Proves that the bytes which are said to be sent for experts are those of the rows that leave a rank."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwright.model.moe import MoE
from shardwright.model.presets import resolve
from shardwright.parallel.expert import ExchangingMoE, ExpertExchange, take_sent_bytes
from tests.distributed import run_ranks

D = 8
# Rows that each of two ranks has for the experts 0, 1 (of rank 0) and 2, 3 (of rank 1).
COUNTS = ([3, 2, 4, 1], [0, 6, 2, 2])


class Doubled(nn.Module):
    """Stands for the experts of a rank."""

    def forward(self, rows_SD: Tensor, counts_e: Tensor) -> Tensor:
        return rows_SD * 2


def sent_of(training: bool) -> tuple[int, int]:
    """Bytes of one forward pass, and of the backward pass after it."""
    exchange = ExpertExchange(dist.distributed_c10d._get_default_group())
    experts = Doubled().train(training)
    layer = ExchangingMoE(MoE(resolve("debug-moe")), experts, exchange)
    rows_RD = torch.ones(10, D, requires_grad=True)
    out_RD = exchange(experts, rows_RD, torch.tensor(COUNTS[dist.get_rank()]))()
    model = nn.ModuleDict({"layers": nn.ModuleDict({"0": nn.ModuleDict({"ffn": layer})})})
    forward = take_sent_bytes(model)
    if training:
        out_RD.sum().backward()
    return forward, take_sent_bytes(model)


@pytest.mark.parametrize("training", [True, False])
def test_rows_that_leave_a_rank_and_come_back_are_counted_in_training_alone(training: bool) -> None:
    # Rank 0 sends 4 + 1 rows and gives back 0 + 6; rank 1 the other way round. Backward passes send them once more.
    row_bytes = D * 4
    expected = 11 * row_bytes if training else 0
    for forward, backward in run_ranks(sent_of, 2, training):
        assert (forward, backward) == (expected, expected)
