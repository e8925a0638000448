"""Proves that compiled blocks train as uncompiled ones do, also when they are gathered and freed, or cut, and that the
blocks of all these layouts run compiled code."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from shardwright.layout.layout import Layout
from shardwright.model.spec import ModelSpec
from shardwright.parallel.apply import apply
from shardwright.training.optimizer import build_optimizer
from shardwright.training.step import Trainer
from tests.distributed import run_ranks
from tests.marks import prove
from tests.training.bugs.bug import EXPERTS
from tests.training.worlds import OPTIMIZER, RATE, SEED, SPEC, local_batch

GROUPED = replace(SPEC, n_heads=4, n_kv_heads=2)
WITH_EXPERTS = replace(GROUPED, moe=EXPERTS)
CPU = torch.device("cpu")


def losses(layout: Layout, compiled: bool, spec: ModelSpec = GROUPED) -> tuple[list[float], int]:
    """Of three steps; and how many pieces of blocks have been compiled, with that of the loss."""
    model = apply(spec, layout, CPU, seed=SEED, compile_blocks=compiled)
    optimizer = build_optimizer(model.named_parameters, model.spec, OPTIMIZER)
    trainer = Trainer(model, optimizer, device=CPU, seed=SEED, clip_norm=1.0, compile_loss=compiled)
    stats = torch._dynamo.utils.counters["stats"]
    found, graphs = [], stats["unique_graphs"]
    for step in range(3):
        batch = local_batch(step, layout.data_rank(dist.get_rank()), layout.data_ranks, accumulation=2)
        loss = trainer.step(batch, step, RATE).loss_part
        model.sum_over_losses(loss)
        found.append(float(loss))
    return found, stats["unique_graphs"] - graphs


@prove
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("layout", "spec"),
    [
        (Layout(tp=2, sequence_parallel=True), GROUPED),
        (Layout(cp=2, cp_method="ring", recompute="full"), GROUPED),
        (Layout(dp_shard=2, zero=3, recompute="full"), WITH_EXPERTS),
        (Layout(dp_shard=2, ep=2, zero=1, recompute="full"), replace(WITH_EXPERTS, n_layers=2)),
        (Layout(dp_shard=2, zero=3, recompute="selective"), GROUPED),
        (Layout(pp=2), GROUPED),
        (Layout(pp=2, pp_schedule="zb-h1"), GROUPED),
    ],
    ids=[
        "tp2 sp",
        "cp2, recomputed",
        "zero 3, experts, recomputed",
        "ep2, recomputed",
        "zero 3, selective",
        "pp2 1f1b",
        "pp2 zb-h1",
    ],
)
def test_compiled_blocks_give_the_losses_of_uncompiled_ones(layout: Layout, spec: ModelSpec):
    plain, _ = run_ranks(losses, 2, layout, False, spec)[0]
    ranks = run_ranks(losses, 2, layout, True, spec, timeout_s=250)
    compiled, _ = ranks[0]
    # Fused kernels round float32 elsewhere; three steps apart.
    assert compiled == pytest.approx(plain, rel=1e-5)
    assert sum(graphs for _, graphs in ranks) > 2, "of blocks, beside that of the loss of each rank"
