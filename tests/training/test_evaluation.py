"""Proves that every layout comes to the evaluation loss of one process, over batches whose masks are ragged."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from shardwright.data.batches import Batch
from shardwright.data.samples import IGNORE
from shardwright.layout.layout import Layout
from shardwright.model.init import initialise
from shardwright.model.transformer import Transformer
from shardwright.parallel.norm import local_part
from tests.distributed import run_ranks
from tests.marks import rest_prove
from tests.training.worlds import RATE, SEED, SPEC, build, local_batch

GROUPED = replace(SPEC, n_heads=4, n_kv_heads=2, n_layers=4, dropout=0.2)
N_BATCHES, ROWS, T = 7, 6, 16
"""42 microbatches of one sequence, more than a pipeline takes at once; an odd number, 21, on two data ranks."""
COUNTED = torch.tensor([[0.9], [0.1], [0.5], [1.1], [0.3], [-1.0]])


def whole_batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    tokens, targets = torch.randint(SPEC.vocab_size, (2, ROWS, T), generator=generator)
    targets[torch.rand((ROWS, T), generator=generator) < COUNTED] = IGNORE
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
    rest_prove(
        [
            Layout(),
            Layout(dp_shard=2, zero=3),
            Layout(tp=2, sequence_parallel=False),
            Layout(tp=4, sequence_parallel=True),
            Layout(cp=2),
            Layout(cp=4, cp_method="usp", ulysses_degree=2, zero=1),
            Layout(dp_replicate=2, cp=2, cp_method="allgather"),
            Layout(cp=2, tp=2, sequence_parallel=True, zero=3),
            Layout(pp=4),
            Layout(pp=2, pp_schedule="dualpipe"),
            Layout(pp=2, pp_schedule="dualpipe", dp_replicate=2),
            Layout(pp=2, pp_schedule="interleaved-1f1b", virtual_stages=2, dp_shard=2, zero=3),
            Layout(pp=2, pp_schedule="zb-v", tp=2, sequence_parallel=True),
            Layout(pp=2, pp_schedule="zb-h1", dp_shard=2, zero=3, zero_pp_gather="microbatch"),
        ],
        Layout(),
        Layout(dp_shard=2, zero=3),
        Layout(pp=2, pp_schedule="dualpipe"),
    ),
    ids=str,
)
def test_a_layout_evaluates_as_one_process_does(layout: Layout):
    model = Transformer(GROUPED).double().eval()
    initialise(model, GROUPED, SEED)
    tokens, targets = (torch.cat(parts) for parts in zip(*map(whole_batch, range(N_BATCHES)), strict=True))
    with torch.no_grad():
        expected = float(F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), ignore_index=IGNORE))
    assert run_ranks(evaluated, layout.world_size, layout) == pytest.approx([expected] * layout.world_size, rel=1e-13)


def evaluation_disturbs(layout: Layout) -> list[str]:
    """Names of what two steps leave differently if there is an evaluation before, between and after them."""
    plain, disturbed = (build(layout, torch.float64, GROUPED) for _ in range(2))
    own = layout.data_rank(dist.get_rank())
    for step in range(2):
        for trainer in (plain, disturbed):
            batch = local_batch(step, own, layout.data_ranks, 2)
            if trainer is disturbed:
                trainer.evaluate([batch])
            trainer.step(batch, step, RATE)
    disturbed.evaluate([batch])
    held = disturbed.model.named_parameters
    return [n for n, p in plain.model.named_parameters.items() if not torch.equal(local_part(p), local_part(held[n]))]


@pytest.mark.parametrize(
    "layout",
    rest_prove(
        [
            Layout(pp=2, pp_schedule="dualpipe"),
            Layout(pp=2, pp_schedule="zb-h1", dp_replicate=2),
            Layout(pp=2, pp_schedule="zb-h1", dp_shard=2, zero=3),
            Layout(pp=2, pp_schedule="1f1b", dp_shard=2, zero=2),
        ],
        Layout(pp=2, pp_schedule="zb-h1", dp_shard=2, zero=3),
    ),
    ids=str,
)
def test_steps_of_a_pipeline_are_the_same_bits_with_and_without_evaluations(layout: Layout):
    assert run_ranks(evaluation_disturbs, layout.world_size, layout) == [[]] * layout.world_size
