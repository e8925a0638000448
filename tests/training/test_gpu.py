"""Proves on one GPU that bf16 and fp32 compute what one process does in float64 on the CPU, compiled or not.

Runs where PyTorch sees a CUDA device; one rank, with the process group that `shardwright train` sets up.
"""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from shardwright.layout.layout import Layout
from shardwright.model.spec import ModelSpec
from shardwright.parallel.apply import apply
from shardwright.training.optimizer import build_optimizer
from shardwright.training.ranks import ProcessRank, process_group
from shardwright.training.step import Trainer
from tests.training.bugs.bug import EXPERTS
from tests.training.worlds import OPTIMIZER, RATE, SEED, SPEC, local_batch, one_process, relative_error, whole

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    ("compute", "tolerance"),
    [
        (torch.float32, 1e-4),  # sums of a few hundred products, each rounded to 6e-8
        (torch.bfloat16, 0.1),  # 8 bits: the same bound that holds on the CPU
    ],
)
def test_a_step_on_a_gpu_has_the_gradients_of_float64_on_the_cpu(
    compute: torch.dtype, tolerance: float, compiled: bool
):
    device = torch.device("cuda", 0)
    exact = one_process(torch.float64)
    with process_group(ProcessRank(), device):
        model = apply(SPEC, Layout(), device, seed=SEED, compute_dtype=compute, compile_blocks=compiled)
        optimizer = build_optimizer(model.named_parameters, model.spec, OPTIMIZER)
        trainer = Trainer(model, optimizer, device=device, seed=SEED, clip_norm=1.0, compile_loss=compiled)
        loss, *_ = trainer.forward_backward(local_batch(0, 0, 1, accumulation=3), 0)
        for name, parameter in model.named_parameters.items():
            found = whole(parameter.grad).cpu().double()
            assert relative_error(found, exact.gradients[0][name]) < tolerance, name
        assert float(loss) == pytest.approx(exact.losses[0], rel=tolerance)
        trainer.update(RATE)
        del model, optimizer, trainer, parameter, found, loss


@pytest.mark.parametrize("spec", [SPEC, replace(SPEC, moe=EXPERTS)], ids=["dense", "experts"])
def test_blocks_replayed_as_cuda_graphs_take_the_steps_of_blocks_that_are_launched(spec: ModelSpec):
    """Three steps of three micro-batches, and an evaluation: every replay overwrites what the one before gave."""
    device = torch.device("cuda", 0)

    def after_three_steps(cuda_graphs: bool) -> dict[str, Tensor]:
        model = apply(
            spec,
            Layout(),
            device,
            seed=SEED,
            compute_dtype=torch.bfloat16,
            compile_blocks=True,
            cuda_graphs=cuda_graphs,
        )
        optimizer = build_optimizer(model.named_parameters, model.spec, OPTIMIZER)
        trainer = Trainer(model, optimizer, device=device, seed=SEED, clip_norm=1.0, compile_loss=True)
        results = {}
        for step in range(3):
            batch = local_batch(step, 0, 1, accumulation=3)
            results[f"loss {step}"] = trainer.step(batch, step, RATE).loss_part.clone()
            if model.load is not None:
                results[f"load {step}"] = model.load.counts_LE.clone()
        results["evaluation"] = trainer.evaluate([local_batch(3, 0, 1, accumulation=3)])
        return results | {name: parameter.detach().clone() for name, parameter in model.named_parameters.items()}

    with process_group(ProcessRank(), device):
        launched, replayed = after_three_steps(False), after_three_steps(True)
        for name, value in launched.items():
            assert relative_error(replayed[name].cpu().double(), value.cpu().double()) < 1e-4, name
