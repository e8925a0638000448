"""Proves that gradients sent as the largest elements of each block are the sums of one process that chooses from the
gradient of each replica, send k elements and k places of a block, and go on from a checkpoint bit for bit."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from shardwright.config import parse
from shardwright.cost import memory
from shardwright.cost.job import Candidates
from shardwright.layout.layout import Layout
from shardwright.model.modules import rows
from shardwright.parallel.norm import local_part
from shardwright.split.compression import sparsified
from shardwright.split.rules import problems
from shardwright.system.errors import CheckpointError, ConfigError, LayoutError
from shardwright.verification import Verifier
from tests.cost.jobs import job
from tests.cost.test_traffic import MODELS
from tests.distributed import run_ranks
from tests.marks import prove, rest_prove
from tests.training.bugs.bug import EXPERTS, LATENT
from tests.training.checkpoints import hop, load_ranks, save_ranks
from tests.training.test_compression import WIDE, sent_in_a_step
from tests.training.test_memory_and_traffic import EVEN
from tests.training.worlds import build, case

K_4 = {"compress_gradients": "topk-4"}
LAYOUTS = {
    "replicas": (Layout(dp_replicate=2, **K_4), {}),
    "four replicas": (Layout(dp_replicate=4, compress_gradients="topk-1"), {}),
    "tp": (Layout(dp_replicate=2, tp=2, **K_4), {}),
    "tp, replicated kv heads": (Layout(dp_replicate=2, tp=4, **K_4), {}),
    "pipeline, tied": (Layout(pp=2, dp_replicate=2, pp_schedule="zb-h1", **K_4), {"tied_embedding": True}),
    "experts": (Layout(dp_replicate=2, **K_4), {"moe": EXPERTS}),
    "latent attention": (Layout(dp_replicate=2, tp=2, **K_4), {"latent_attention": LATENT, "n_kv_heads": 4}),
    "blocks of 66 and 65 elements": (Layout(dp_replicate=2, **K_4), {"d_ffn": 131, "bias": True}),
}


@pytest.mark.parametrize("name", rest_prove(LAYOUTS, "tp"))
def test_the_largest_elements_are_those_that_one_process_chooses(name: str, verifier: Verifier):
    layout, spec = LAYOUTS[name]
    report = verifier.parity(replace(case(layout, 3, spec=replace(WIDE, **spec)), seq_len=12), layout)
    assert report.equal, report.differing or report.worst
    assert report.worst_error < 1e-10


def test_a_block_sends_its_elements_and_their_places():
    matrices = [row for row in rows(EVEN).values() if sparsified(row, 4, 1, EVEN.n_kv_heads)]
    assert len(matrices) == 7 * EVEN.n_layers
    n_blocks = sum(row.shape[0] for row in matrices)  # no row has more than 128 elements
    others = EVEN.n_parameters - sum(row.numel for row in matrices)
    for sent in run_ranks(sent_in_a_step, 2, Layout(dp_replicate=2, **K_4)):
        assert sent == {"allgather_base": 2 * n_blocks * 4 * (4 + 1), "allreduce": 4 * others}


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
    "cp": {"dp_replicate": 2, "cp": 2, "zero": 0},
    "replicas of stages": {"dp_replicate": 2, "pp": 2, "pp_schedule": "dualpipe"},
    "another type": {"dp_replicate": 2, "compute": "bf16"},
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_whole_gradients_is_refused_with_the_way_out(name: str):
    given = dict(REFUSED[name])
    precision = {"compute": given.pop("compute", "fp32")}
    run = {"out": "o", "steps": 1, "data": {"path": "d"}, "batch": {"seq_len": 128, "global_batch": 32}}
    with pytest.raises((ConfigError, LayoutError), match=r"or (set )?compress_gradients='bf16'"):
        parse(run | {"layout": K_4 | given, "precision": precision})


def test_experts_over_tp_and_fewer_digits_are_refused_with_the_way_out(verifier: Verifier):
    layout = Layout(dp_replicate=2, tp=2, **K_4)
    (problem,) = problems(MODELS["experts"], layout, 16)
    assert problem.endswith("set tp=1, or compress_gradients='bf16'")
    with pytest.raises(LayoutError, match=r"valid: dtype='float64', or layout\.compress_gradients='none'"):
        verifier.parity(case(layout, 3, "float32", WIDE), layout)
