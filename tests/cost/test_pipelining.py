"""Proves the buffers for messages that a stack of `torch.distributed.pipelining` is said to hold: those that its stages
hold after a real step on gloo, for inputs and for gradients."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

from shardwright.cost import pipeline, states
from shardwright.cost.stack import FSDP
from shardwright.model.presets import resolve
from tests.cost.layouts import job, one
from tests.distributed import run_ranks

SEQ_LEN, WIDTH, MICRO_BATCH = 8, 16, 2
MODEL = replace(resolve("debug"), n_layers=4, d_model=WIDTH)


def _buffers(n_microbatches: int, virtual_stages: int) -> float:
    """Bytes of the buffers of this rank's stages after one step."""
    torch.manual_seed(0)
    rank, n_ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    n_stages = n_ranks * virtual_stages
    stages = [
        PipelineStage(nn.Linear(WIDTH, WIDTH), number, n_stages, torch.device("cpu"))
        for number in range(rank, n_stages, n_ranks)
    ]
    made = {"n_microbatches": n_microbatches, "loss_fn": nn.functional.mse_loss}
    schedule = ScheduleInterleaved1F1B(stages, **made) if virtual_stages > 1 else Schedule1F1B(stages[0], **made)
    batch = torch.randn(n_microbatches * MICRO_BATCH, SEQ_LEN, WIDTH)
    inputs = (batch,) if rank == 0 else ()
    schedule.step(*inputs, **({"target": batch} if rank == n_ranks - 1 else {}))
    held = [infos for stage in stages for infos in (*stage.args_recv_info.values(), *stage.grad_recv_info.values())]
    tensors = [getattr(info, "buffer", None) for infos in held for info in infos]
    return float(sum(each.numel() * each.element_size() for each in tensors if each is not None))


@pytest.mark.parametrize(("n_ranks", "virtual_stages", "n_microbatches"), [(3, 1, 4), (2, 2, 4)])
def test_a_stage_of_pytorchs_pipelining_has_a_buffer_for_each_message_that_it_receives(
    n_ranks: int, virtual_stages: int, n_microbatches: int
):
    real = run_ranks(_buffers, n_ranks, n_microbatches, virtual_stages)
    layout = one(
        MICRO_BATCH,
        pp=n_ranks,
        pp_schedule="interleaved-1f1b" if virtual_stages > 1 else "1f1b",
        virtual_stages=virtual_stages,
    )
    the_job = job(MODEL, FSDP, SEQ_LEN, n_microbatches * MICRO_BATCH, precision="fp32")
    found = states.messages(the_job, layout, pipeline.stages(the_job, layout))
    assert found[0].tolist() == real
