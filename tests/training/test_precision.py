"""Proves that bf16 means bf16 products and nothing else: weights, reduced and accumulated gradients stay in fp32,
and a layout is no farther from float64 than one process in bf16 is."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.layout.layout import Layout
from shardwright.parallel import apply, data
from shardwright.parallel.norm import local_part
from shardwright.verification import Verifier
from tests.distributed import run_ranks
from tests.marks import rest_prove
from tests.training.bugs.bug import EXPERTS
from tests.training.worlds import SPEC, build, case, local_batch

LAYOUTS = {
    "zero 0": Layout(dp_replicate=2),
    "zero 1": Layout(dp_shard=2, zero=1),
    "zero 2": Layout(dp_shard=2, zero=2),
    "zero 3": Layout(dp_shard=2, zero=3),
    "zero 1, hybrid": Layout(dp_replicate=2, dp_shard=2, zero=1),
}


def types_of_a_step(layout: Layout) -> dict[str, set[torch.dtype]]:
    trainer = build(layout, torch.float32, compute=torch.bfloat16)
    seen = []
    for block in trainer.model.module.layers.values():
        block.register_forward_hook(lambda block, inputs, output: seen.append(output.dtype))
    trainer.forward_backward(local_batch(0, layout.data_rank(dist.get_rank()), layout.data_ranks, 3), 0)
    parameters = trainer.model.named_parameters.values()
    found = {
        "activations": set(seen),
        "weights": {p.dtype for p in parameters},
        "gradients": {p.grad.dtype for p in parameters if p.grad is not None},
    }
    trainer.update(1e-3)
    found["state"] = {t.dtype for state in trainer.optimizer.state.values() for t in state.values()}
    return found


@pytest.mark.parametrize("name", rest_prove(LAYOUTS, "zero 0", "zero 1, hybrid"))
def test_bf16_is_for_products_and_fp32_for_what_lasts(name: str):
    for found in run_ranks(types_of_a_step, LAYOUTS[name].world_size, LAYOUTS[name]):
        lasting = {torch.float32}
        assert found == {
            "activations": {torch.bfloat16},
            "weights": lasting,
            "gradients": lasting,
            "state": lasting,
        }


def steps_of_one_rank(compute: torch.dtype, experts: bool, fsdp: bool) -> tuple[list[Tensor], bool]:
    """Losses and norms of three steps, and the parameters after them; whether FSDP2 was used."""
    with pytest.MonkeyPatch.context() as patch:
        if fsdp:
            patch.setattr(data, "needs_masters", lambda *_: False)
            patch.setattr(apply, "needs_masters", lambda *_: False)
        spec = replace(SPEC, moe=EXPERTS) if experts else SPEC
        trainer = build(Layout(), torch.float32, spec=spec, compute=compute)
    found = []
    for step in range(3):
        result = trainer.step(local_batch(step, 0, 1, 3), step, 1e-2)
        found += [result.loss_part, result.gradient_norm]
    parameters = [local_part(each.detach()) for each in trainer.model.named_parameters.values()]
    return [*found, *parameters], not trainer.model.masters


@pytest.mark.parametrize("experts", [False, True])
@pytest.mark.parametrize("compute", [torch.bfloat16, torch.float16])
def test_one_rank_trains_as_with_fsdp_bit_for_bit(compute: torch.dtype, experts: bool):
    ours, theirs = (run_ranks(steps_of_one_rank, 1, compute, experts, fsdp)[0] for fsdp in (False, True))
    assert (ours[1], theirs[1]) == (False, True)
    assert all(torch.equal(a, b) for a, b in zip(ours[0], theirs[0], strict=True))


@pytest.mark.prove
def test_a_layout_in_bf16_is_no_farther_from_float64_than_one_process_in_bf16():
    with Verifier() as verifier:
        for name, layout in LAYOUTS.items():
            report = verifier.parity(case(layout, 3, "bfloat16"), layout)
            assert report.equal, (name, report.differing or report.worst)
            gradients = [row for row in report.rows if row.quantity.kind == "gradient" and row.quantity.step == 1]
            worst = max(row.error for row in gradients)
            assert 1e-4 < worst < 0.1, "bf16 has 8 bits: its error must show, and stay small"
            # The same products in bf16, summed in fp32 in another order.
            dealt = [row for row in report.rows if row.quantity.kind == "gradient vs one data rank"]
            assert dealt
            assert max(row.error for row in dealt) < 1e-6, name
