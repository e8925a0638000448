"""Proves what each ZeRO stage holds and sends: bytes of parameters, gradients and optimizer state on a rank, and the
collectives of one step, against the formulas of the table in parallel/data.py.

P, G, O are the bytes of whole parameters, gradients and optimizer state, n the ranks of dp_shard, A the accumulation.
"""

import gc
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardwright.layout.layout import Layout
from shardwright.model.modules import end_rows
from shardwright.parallel.microbatch_runner import SequentialRunner
from tests.distributed import run_ranks
from tests.marks import rest_prove
from tests.traffic import Traffic
from tests.training.worlds import RATE, SPEC, build, local_batch

# Every dim that FSDP cuts is a multiple of 4, so shares are exact and nothing is padded.
EVEN = replace(SPEC, n_heads=4, n_kv_heads=2, head_dim=8, d_model=32, d_ffn=64, vocab_size=32, n_layers=3)
ACCUMULATION = 3
ELEMENT = 8  # bytes of float64
P = EVEN.n_parameters * ELEMENT
GROUPS = EVEN.n_layers + 1

LAYOUTS = {
    "zero 0": Layout(dp_replicate=4),
    "zero 1": Layout(dp_shard=4, zero=1),
    "zero 2": Layout(dp_shard=4, zero=2),
    "zero 3": Layout(dp_shard=4, zero=3),
    "zero 1, hybrid": Layout(dp_replicate=2, dp_shard=2, zero=1),
    "zero 2, hybrid": Layout(dp_replicate=2, dp_shard=2, zero=2),
    "zero 3, hybrid": Layout(dp_replicate=2, dp_shard=2, zero=3),
}
QUICK = ("zero 1", "zero 3, hybrid")


def traffic_of_a_step(layout: Layout) -> tuple[dict[str, int], dict[str, int]]:
    trainer = build(layout, torch.float64, EVEN)
    data_rank = layout.data_rank(dist.get_rank())
    with Traffic() as traffic:
        trainer.step(local_batch(0, data_rank, layout.data_ranks, ACCUMULATION), 0, RATE)
    return dict(traffic.calls), dict(traffic.bytes)


def expected_traffic(layout: Layout) -> dict[str, tuple[int, int]]:
    """Calls and bytes of one step by the table; an all-gather and a reduce-scatter of everything is P."""
    share = P // layout.dp_shard
    match layout.zero:
        case 0:
            return {"allreduce": (1, P)}
        case 1:
            found = {"allgather_base": (GROUPS, P), "reduce_scatter_base": (GROUPS, P)}
        case 2:
            found = {
                "allgather_base": (GROUPS, P),
                "reduce_scatter_base": (ACCUMULATION * GROUPS, ACCUMULATION * P),
            }
        case 3:
            rest = sum(row.numel for row in end_rows(EVEN)) * ELEMENT
            found = {
                "allgather_base": (ACCUMULATION * (2 * GROUPS - 1), ACCUMULATION * (2 * P - rest)),
                "reduce_scatter_base": (ACCUMULATION * GROUPS, ACCUMULATION * P),
            }
    if layout.dp_replicate > 1:
        found["allreduce"] = (GROUPS, share)
    return found


@pytest.mark.parametrize("name", rest_prove(LAYOUTS, *QUICK))
def test_a_step_sends_what_the_table_says(name: str):
    for calls, sent in run_ranks(traffic_of_a_step, 4, LAYOUTS[name]):
        found = {kind: (calls[kind], sent[kind]) for kind in calls if kind != "small"}
        assert found == expected_traffic(LAYOUTS[name])
        # The count of target tokens, and the norm's sum of squares where gradients are sharded.
        assert calls["small"] == (1 if LAYOUTS[name].zero == 0 else 2)


def held_bytes(layout: Layout) -> dict[str, int]:
    """Bytes of all tensors alive on a rank between two microbatches and between two steps, by what they are."""
    trainer = build(layout, torch.float64, EVEN)
    data_rank = layout.data_rank(dist.get_rank())
    for step in range(2):
        trainer.step(local_batch(step, data_rank, layout.data_ranks, ACCUMULATION), step, RATE)
    state = sum(_local(t).nbytes for s in trainer.optimizer.state.values() for k, t in s.items() if k != "step")
    between_steps = _alive() - state
    batch = local_batch(2, data_rank, layout.data_ranks, ACCUMULATION)
    trainer.model.module.train()
    assert isinstance(trainer.model.runner, SequentialRunner)
    loss = trainer.loss_sum(trainer.model.module(batch.tokens_ABT[0]), batch.targets_ABT[0])
    trainer.model.runner.engine.before_backward(split=False, last=False)
    loss.backward()
    del loss
    # Python sees a gradient once it is asked for.
    assert all(p.grad is not None or layout.zero >= 2 for p in trainer.model.module.parameters())
    between_microbatches = _alive() - state - _alive_in(batch)
    return {"optimizer": state, "between steps": between_steps, "between microbatches": between_microbatches}


def _alive_in(batch: object) -> int:
    return sum(t.untyped_storage().nbytes() for t in vars(batch).values() if isinstance(t, Tensor))


def _alive() -> int:
    """Bytes of the storages of all floating-point and integer tensors that Python can reach, each once."""
    dist.barrier()  # gloo's threads hold what is still on its way
    gc.collect()
    storages = {}
    for found in gc.get_objects():
        if issubclass(type(found), Tensor) and not isinstance(found, DTensor) and found.device.type == "cpu":
            storage = found.untyped_storage()
            if found.dtype == torch.float64 or found.dtype == torch.int64:
                storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def expected_held(layout: Layout) -> dict[str, int]:
    share = P // layout.dp_shard
    whole_parameters = {0: P, 1: P + share, 2: P + share, 3: share}[layout.zero]
    gradients = {0: P, 1: P, 2: share, 3: share}[layout.zero]
    return {
        "optimizer": 2 * (P if layout.zero == 0 else share),
        # Gradients are views of the buckets, which stay.
        "between steps": share if layout.zero else 2 * P,
        "between microbatches": whole_parameters + gradients,
    }


@pytest.mark.parametrize("name", rest_prove(LAYOUTS, *QUICK))
def test_a_rank_holds_what_the_table_says(name: str):
    for held in run_ranks(held_bytes, 4, LAYOUTS[name]):
        expected = expected_held(LAYOUTS[name])
        # Counters, step numbers and the loss are a few bytes each.
        assert {kind: held[kind] - expected[kind] for kind in held} == pytest.approx(dict.fromkeys(held, 0), abs=1024)
