"""Proves that PowerSGD on any number of ranks is that of the whole gradient on one process, sends r (n + m) elements
of a matrix, and goes on from a checkpoint bit for bit."""

from dataclasses import replace
from pathlib import Path

import pytest

from shardwright.config import parse
from shardwright.layout.layout import Layout
from shardwright.model.modules import rows
from shardwright.split.compression import factored
from shardwright.system.errors import CheckpointError, ConfigError, LayoutError
from shardwright.verification import Verifier
from tests.distributed import run_ranks
from tests.marks import rest_prove
from tests.training.bugs.bug import EXPERTS, LATENT
from tests.training.checkpoints import hop, load_ranks, save_ranks
from tests.training.test_compression import WIDE, sent_in_a_step
from tests.training.test_memory_and_traffic import EVEN
from tests.training.worlds import case

RANK_2 = {"compress_gradients": "powersgd-2"}
LAYOUTS = {
    "dp": Layout(dp_replicate=4, **RANK_2),
    "cp": Layout(cp=2, zero=0, dp_replicate=2, **RANK_2),
    "pipeline": Layout(pp=2, dp_replicate=2, pp_schedule="zb-h1", **RANK_2),
    "rank 4": Layout(dp_replicate=2, compress_gradients="powersgd-4"),
}
MODELS = {
    "experts": {"moe": EXPERTS},
    "latent attention": {"latent_attention": LATENT, "n_kv_heads": 4},
    "biases, tied": {"bias": True, "tied_embedding": True},
}


def verified(verifier: Verifier, layout: Layout, **spec: object) -> None:
    given = replace(case(layout, 3, spec=replace(WIDE, **spec)), seq_len=12)  # type: ignore[arg-type]
    report = verifier.parity(given, layout)
    assert report.equal, report.differing or report.worst
    assert report.worst_error < 1e-10


@pytest.mark.parametrize("name", rest_prove(LAYOUTS, "dp"))
def test_products_are_those_of_the_whole_gradient(name: str, verifier: Verifier):
    verified(verifier, LAYOUTS[name])


@pytest.mark.prove
@pytest.mark.parametrize("name", MODELS)
def test_so_they_are_for_every_kind_of_matrix(name: str, verifier: Verifier):
    verified(verifier, LAYOUTS["rank 4"], **MODELS[name])


def test_a_matrix_sends_its_two_factors():
    matrices = [row for row in rows(EVEN).values() if factored(row, 2)]
    assert len(matrices) == 7 * EVEN.n_layers
    factors = 2 * sum(sum(row.shape) for row in matrices)
    others = EVEN.n_parameters - sum(row.numel for row in matrices)
    for sent in run_ranks(sent_in_a_step, 2, Layout(dp_replicate=2, **RANK_2)):
        assert sent == {"allreduce": 4 * (factors + others)}


def test_a_run_goes_on_bit_for_bit(tmp_path: Path):
    layout = Layout(dp_replicate=2, **RANK_2)
    straight = run_ranks(save_ranks, 2, tmp_path / "straight", layout, 2)
    run_ranks(hop, 2, tmp_path / "taken up", layout, 0)
    for (_, found), expected in zip(run_ranks(hop, 2, tmp_path / "taken up", layout, 1), straight, strict=True):
        assert any(name.startswith("compression/error/") for name in expected)
        assert found.keys() == expected.keys()
        assert [name for name in expected if not found[name].equal(expected[name])] == []
    for error in run_ranks(load_ranks, 4, tmp_path / "straight" / "step-00000002", Layout(dp_replicate=4, **RANK_2)):
        assert isinstance(error, CheckpointError)
        assert "compression/error/" in str(error)


REFUSED = {
    "shards": {"dp_shard": 2},
    "tp": {"dp_replicate": 2, "tp": 2},
    "replicas of stages": {"dp_replicate": 2, "pp": 2, "pp_schedule": "dualpipe"},
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_whole_matrices_is_refused_with_the_way_out(name: str):
    run = {"out": "o", "steps": 1, "data": {"path": "d"}, "batch": {"seq_len": 128, "global_batch": 32}}
    with pytest.raises((ConfigError, LayoutError), match="or set compress_gradients='bf16'"):
        parse(run | {"layout": RANK_2 | REFUSED[name]})
