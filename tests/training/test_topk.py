"""Proves that gradients sent as the largest elements of each block are the sums of one process that chooses from the
gradient of each replica, send k elements and k places of a block, and go on from a checkpoint bit for bit."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.config import parse
from shardwright.cost import memory
from shardwright.cost.job import Candidates
from shardwright.layout.layout import Layout
from shardwright.model.modules import row_of, rows
from shardwright.model.spec import ModelSpec
from shardwright.parallel.norm import local_part
from shardwright.split.compression import BLOCK, sparsified
from shardwright.system.errors import CheckpointError, ConfigError, LayoutError
from shardwright.verification import Verifier
from shardwright.verification.case import PLAIN_SGD
from shardwright.verification.rank import build_trainer, local_batch
from tests.cost.jobs import job
from tests.cost.test_traffic import MODELS
from tests.distributed import run_ranks
from tests.marks import prove, rest_prove
from tests.training.bugs.bug import EXPERTS, LATENT
from tests.training.checkpoints import hop, load_ranks, save_ranks
from tests.training.test_compression import WIDE, sent_in_a_step
from tests.training.test_memory_and_traffic import EVEN
from tests.training.worlds import build, case, whole

K_4 = {"compress_gradients": "topk-4"}
LAYOUTS = {
    "replicas": (Layout(dp_replicate=2, **K_4), {}),
    "four replicas": (Layout(dp_replicate=4, compress_gradients="topk-1"), {}),
    "tp": (Layout(dp_replicate=2, tp=2, **K_4), {}),
    "tp, replicated kv heads": (Layout(dp_replicate=2, tp=4, **K_4), {}),
    "pipeline, tied": (Layout(pp=2, dp_replicate=2, pp_schedule="zb-h1", **K_4), {"tied_embedding": True}),
    "experts": (Layout(dp_replicate=2, **K_4), {"moe": EXPERTS}),
    "experts on a mesh of their own": (Layout(dp_replicate=2, tp=2, ep=2, **K_4), {"moe": EXPERTS}),
    "latent attention": (Layout(dp_replicate=2, tp=2, **K_4), {"latent_attention": LATENT, "n_kv_heads": 4}),
    "blocks of 66 and 65 elements": (Layout(dp_replicate=2, **K_4), {"d_ffn": 131, "bias": True}),
}


@pytest.mark.parametrize("name", rest_prove(LAYOUTS, "experts on a mesh of their own"))
def test_the_largest_elements_are_those_that_one_process_chooses(name: str, verifier: Verifier):
    layout, spec = LAYOUTS[name]
    report = verifier.parity(replace(case(layout, 3, spec=replace(WIDE, **spec)), seq_len=12), layout)
    assert report.equal, report.differing or report.worst
    assert report.worst_error < 1e-10


def test_a_block_sends_its_elements_and_their_places():
    matrices = [row for row in rows(EVEN).values() if sparsified(row, 4, 1, 1, EVEN.n_kv_heads)]
    assert len(matrices) == 7 * EVEN.n_layers
    n_blocks = sum(row.shape[0] for row in matrices)  # no row has more than 128 elements
    others = EVEN.n_parameters - sum(row.numel for row in matrices)
    for sent in run_ranks(sent_in_a_step, 2, Layout(dp_replicate=2, **K_4)):
        assert sent == {"allgather_base": 2 * n_blocks * 4 * (4 + 1), "allreduce": 4 * others}


Gradients = dict[str, Tensor]


def first_gradients(layout: Layout, dtype: str, spec: ModelSpec) -> tuple[Gradients, Gradients]:
    """To be run on every rank: the gradients of the first step, whole, and the parts that no rank has sent, summed over
    the ranks."""
    of = replace(case(layout, 2, dtype, spec), seq_len=12)
    trainer = build_trainer(of, layout, PLAIN_SGD)
    trainer.forward_backward(local_batch(of, layout, dist.get_rank(), 0), 0)
    gradients = {name: whole(each.grad) for name, each in trainer.model.named_parameters.items() if each.requires_grad}
    kept = {name.rpartition("/")[2]: each for name, each in trainer.model.compression_state.items()}
    return gradients, {name: whole(each).sum(0) for name, each in kept.items()}


MIXTURE = replace(EXPERTS, n_experts=4)
SENT_AND_KEPT = {
    "cp": (Layout(cp=2, **K_4), "float64", {}, 2e-13),
    "cp and replicas": (Layout(cp=2, cp_method="ulysses", dp_replicate=2, **K_4), "float64", {}, 2e-13),
    "experts, cp": (Layout(cp=2, **K_4), "float64", {"moe": MIXTURE}, 2e-13),
    "experts, ep": (Layout(cp=2, ep=2, **K_4), "float64", {"moe": MIXTURE}, 2e-13),
    "bf16": (Layout(dp_replicate=2, **K_4), "bfloat16", {}, 1e-5),
    "bf16, experts, ep, pipeline": (Layout(pp=2, cp=2, ep=2, **K_4), "bfloat16", {"moe": MIXTURE}, 1e-5),
}


@pytest.mark.parametrize("name", rest_prove(SENT_AND_KEPT, "experts, ep"))
def test_the_elements_that_are_sent_and_kept_add_up_to_the_gradient(name: str):
    layout, dtype, changes, tolerance = SENT_AND_KEPT[name]
    spec, n = replace(WIDE, **changes), layout.world_size
    if spec.moe is not None and dtype != "float64":
        spec = replace(spec, moe=replace(MIXTURE, force_balance=True))
    found = run_ranks(first_gradients, n, layout, dtype, spec)
    exact = run_ranks(first_gradients, n, replace(layout, compress_gradients="none"), dtype, spec)
    for (sent, kept), (whole_gradients, none) in zip(found, exact, strict=True):
        assert kept
        assert not none
        for at, gradient in whole_gradients.items():
            error = (sent[at] + kept.get(at, 0.0) - gradient).norm()
            assert error <= tolerance * gradient.norm(), (at, float(error), float(gradient.norm()))
        for at in kept:
            compressed = row_of(spec, at)
            assert compressed.split != "experts" or layout.ep == 1
            per_row = (sent[at] != 0).sum(-1)
            blocks = -(-compressed.shape[-1] // BLOCK)
            assert 0 < int(per_row.max()) <= 4 * blocks * layout.dp_replicate * layout.cp < compressed.shape[-1]


@prove
def test_a_run_goes_on_bit_for_bit(tmp_path: Path):
    layout = Layout(dp_replicate=2, tp=2, **K_4)
    straight = run_ranks(save_ranks, 4, tmp_path / "straight", layout, 2, WIDE)
    run_ranks(hop, 4, tmp_path / "taken up", layout, 0, WIDE)
    resumed = run_ranks(hop, 4, tmp_path / "taken up", layout, 1, WIDE)
    for (_, found), expected in zip(resumed, straight, strict=True):
        assert any(name.startswith("compression/error/") and value.any() for name, value in expected.items())
        assert found.keys() == expected.keys()
        assert [name for name in expected if not found[name].equal(expected[name])] == []
    others = Layout(dp_replicate=4, **K_4)
    for error in run_ranks(load_ranks, 4, tmp_path / "straight" / "step-00000002", others, (), torch.float32, WIDE):
        assert isinstance(error, CheckpointError)
        assert "compression/error/" in str(error)


def held_for_the_next_step(layout: Layout) -> int:
    trainer = build(layout, torch.float32, MODELS["latent"])
    return sum(local_part(each).nbytes for each in trainer.model.compression_state.values())


def test_a_plan_counts_the_errors_that_are_held():
    layout = Layout(dp_replicate=2, tp=2, **K_4)
    the_job = job(MODELS["latent"], on="h100:4/4", seq_len=16, global_batch=8, precision="fp32")
    found, whole = (
        memory.estimate_memory(the_job, Candidates.from_layout(replace(layout, compress_gradients=how), 1))
        for how in (layout.compress_gradients, "none")
    )
    expected = (found.kinds["gradients"] - whole.kinds["gradients"]).item()
    assert set(run_ranks(held_for_the_next_step, 4, layout)) == {expected}


REFUSED = {
    "shards": {"dp_shard": 2},
    "replicas of stages": {"dp_replicate": 2, "pp": 2, "pp_schedule": "dualpipe"},
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_whole_gradients_is_refused_with_the_way_out(name: str):
    run = {"out": "o", "steps": 1, "data": {"path": "d"}, "batch": {"seq_len": 128, "global_batch": 32}}
    with pytest.raises((ConfigError, LayoutError), match=r"or (set )?compress_gradients='bf16'"):
        parse(run | {"layout": K_4 | REFUSED[name]})


def test_parts_of_sequences_and_fewer_digits_cannot_be_compared_and_the_way_out_is_said(verifier: Verifier):
    layout = Layout(dp_replicate=2, **K_4)
    with pytest.raises(LayoutError, match=r"verify cp with --set layout\.compress_gradients=none"):
        verifier.parity(replace(case(layout, 3, spec=WIDE), seq_len=12), replace(layout, cp=2))
    with pytest.raises(LayoutError, match=r"valid: dtype='float64', or layout\.compress_gradients='none'"):
        verifier.parity(case(layout, 3, "float32", WIDE), layout)
