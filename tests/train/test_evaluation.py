"""Proves that every layout comes to the evaluation loss of one process, over batches whose masks are ragged."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from shardloom.data.batches import Batch
from shardloom.data.samples import IGNORE
from shardloom.layout import Layout
from shardloom.model.init import initialise
from shardloom.model.transformer import Transformer
from shardloom.verify.compare import describe
from tests.distributed import run_ranks
from tests.train.worlds import SEED, SPEC, build

GROUPED = replace(SPEC, n_heads=4, n_kv_heads=2, dropout=0.2)
N_BATCHES, ROWS, T = 2, 4, 16


def whole_batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    tokens, targets = torch.randint(SPEC.vocab_size, (2, ROWS, T), generator=generator)
    targets[torch.rand((ROWS, T), generator=generator) < torch.tensor([[0.9], [0.1], [0.5], [1.1]])] = IGNORE
    return tokens, targets


def evaluated(layout: Layout) -> float:
    trainer = build(layout, torch.float64, GROUPED)
    batches = []
    for number in range(N_BATCHES):
        own = slice(*(ROWS // layout.data_ranks * (layout.data_rank(dist.get_rank()) + i) for i in (0, 1)))
        tokens, targets = (whole[own][:, None] for whole in whole_batch(number))
        batches.append(Batch(tokens, targets, torch.zeros(tokens.shape[:2], dtype=torch.int64), 0))
    return float(trainer.evaluate(batches))


@pytest.mark.parametrize(
    "layout",
    [
        Layout(),
        Layout(dp_shard=2, zero=3),
        Layout(tp=2),
        Layout(tp=4, sequence_parallel=True),
        Layout(cp=2),
        Layout(cp=4, cp_method="usp", ulysses_degree=2, zero=1),
        Layout(dp_replicate=2, cp=2, cp_method="allgather"),
        Layout(cp=2, tp=2, sequence_parallel=True, zero=3),
    ],
    ids=describe,
)
def test_a_layout_evaluates_as_one_process_does(layout: Layout):
    model = Transformer(GROUPED).double().eval()
    initialise(model, GROUPED, SEED)
    tokens, targets = (torch.cat(parts) for parts in zip(*map(whole_batch, range(N_BATCHES)), strict=True))
    with torch.no_grad():
        expected = float(F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), ignore_index=IGNORE))
    assert run_ranks(evaluated, layout.world_size, layout) == pytest.approx([expected] * layout.world_size, rel=1e-13)
