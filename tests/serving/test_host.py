"""Passes of `generate` on a measured processor against what can be counted by hand, and `plan serve` of it."""

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from shardwright.cli.main import app
from shardwright.cost.hardware import Cluster, cluster
from shardwright.cost.speed import SHARDWRIGHT
from shardwright.measuring.file import hardware_toml
from shardwright.measuring.points import GenerationPoints
from shardwright.model.presets import resolve
from shardwright.serving import forms, host
from shardwright.serving.formats import CACHE_BYTES, FORMATS, caches_on, weights_on
from shardwright.serving.host import rates_of
from shardwright.serving.search import layouts
from shardwright.serving.setting import Degrees, Serving, Settings
from shardwright.serving.simulate import PassTable, closed_loop, run
from tests.measuring.machines import (
    CACHED_HEAD_S,
    CACHED_RATE,
    PARTIAL,
    RAMP,
    RATE,
    cached_points,
    machine,
    weights_points,
)
from tests.serving.cases import scheduler

ONE, TWO = Settings.from_layouts([Degrees(1)]), Settings.from_layouts([Degrees(2)])
PASSES = GenerationPoints(
    layer_s=500e-6, pass_s=600e-6, request_s=30e-6, sequence_s=4e-6, prompt_s=60e-6, split_layer_s=1300e-6,
    split_pass_s=2000e-6, matmuls=weights_points(), cached=cached_points(),
)  # fmt: skip
ROW, WEIGHTS = 8e9, 5e9


def hardware() -> str:
    """A file of `measure` with these passes."""
    found = machine()
    ranks = tuple(replace(each, generation=PASSES) for each in found.ranks)
    return hardware_toml(replace(found, ranks=ranks), "mine", "shardwright measure")


def cluster_of(ranks: int) -> Cluster:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "mine.toml"
        path.write_text(hardware())
        return cluster(f"mine:{ranks}/{ranks}", path)


def served(ranks: int = 1) -> Serving:
    there = cluster_of(ranks)
    assert there.accelerator.rates is not None
    rates = rates_of(there.accelerator.rates)
    return Serving(model=resolve("debug"), cluster=there, rates=rates, precision="fp32", kv_precision="fp32")


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    path = tmp_path / "mine.toml"
    path.write_text(hardware())
    return path


def decode(there: Serving, requests: float, context: float = 0.0, settings: Settings = ONE) -> float:
    return float(np.max(forms.decode_s(there, settings, requests, context)))


def prefill(there: Serving, requests: float, tokens: float, settings: Settings = ONE) -> float:
    return float(np.max(forms.prefill_s(there, settings, requests, tokens)))


def test_a_token_takes_the_launches_the_weights_and_the_operations():
    there = served()
    model = there.model
    weights = 4 * (model.n_matmul_parameters) / ROW
    launches = (
        model.n_layers * (PASSES.layer_s + PASSES.sequence_s + model.n_heads * CACHED_HEAD_S)
        + PASSES.pass_s
        + PASSES.request_s
    )
    operations = decode(there, 1.0) - weights - launches
    # Norms were measured as 20 bytes an element of 16 bits, at 8 GB/s; the others are those of the stack.
    of_layer = model.d_model * 2 * (20 + SHARDWRIGHT.residual_bytes) + model.d_ffn * SHARDWRIGHT.gated_bytes
    of_layer += model.head_dim * (model.n_heads + model.n_kv_heads) * SHARDWRIGHT.rope_bytes
    assert operations == pytest.approx(model.n_layers * of_layer * 2 / 8e9, rel=0.01)


def test_many_tokens_read_the_weights_together():
    there, k, n = served(), 512, 512
    found = {m: float(host.matmul_s(there, "a matmul", m, k, n, "fp32", 4, 1.0)) for m in (1, 16, 32)}
    share = 1 / (1 + PARTIAL) * k / (k + RAMP)  # n / 128 tiles of a quarter of the rows each
    assert (found[32] - found[16]) / 16 == pytest.approx(2 * k * n / (RATE * share), rel=0.1)
    assert found[1] == pytest.approx(4 * k * n / ROW, rel=0.01)
    assert found[16] == pytest.approx(4 * k * n / WEIGHTS + 16 * 2 * k * n / (RATE * share), rel=0.1)


def test_attention_to_the_cache_has_its_measured_rate():
    there = served()
    model = there.model
    flops = 8 * 100 * model.n_layers * 4 * model.n_heads * model.head_dim
    assert decode(there, 8.0, 1100.0) - decode(there, 8.0, 1000.0) == pytest.approx(flops / CACHED_RATE, rel=0.02)


def test_each_prompt_is_attended_by_itself():
    there = served()
    one, many = prefill(there, 1.0, 64.0), prefill(there, 16.0, 4.0)
    launches = 15 * (there.model.n_layers * PASSES.prompt_s + PASSES.request_s)
    assert many - one > 0.9 * launches  # as many tokens; attention over shorter prompts is less
    assert many - one < 1.2 * launches + 15 * 2 * there.model.vocab_size * there.model.d_model / RATE


def test_over_tp_a_layer_has_its_own_launches_and_its_messages():
    there = served(2)
    messages = 2 * (50e-6 + 2 * 100e-6)  # all-reduces of next to no bytes: a start and two messages
    per_layer = PASSES.split_layer_s + messages
    deeper = replace(there, model=replace(there.model, n_layers=there.model.n_layers + 10))
    slope = (decode(deeper, 1.0, settings=TWO) - decode(there, 1.0, settings=TWO)) / 10
    assert slope == pytest.approx(per_layer, rel=0.15)
    assert slope > per_layer


def test_ranks_beyond_the_cores_share_them():
    assert decode(served(4), 1.0) == pytest.approx(2 * decode(served(2), 1.0), rel=0.01)


def test_the_simulated_scheduler_takes_as_long_as_its_passes():
    there = served()
    table = PassTable(there, Degrees(1), 8192)
    found = run(table, scheduler(8, 8192, 1e9, mixed=False), closed_loop([512] * 8, [3] * 8), 8)
    assert float(found.ttft_s.max()) == pytest.approx(prefill(there, 8.0, 512.0), rel=0.05)
    assert float(found.tpot_s.mean()) == pytest.approx(decode(there, 8.0, 512.5), rel=0.05)


ASKED = ("--input-len", "32", "--output-len", "64")


def serve(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["plan", "serve", *map(str, arguments)], env={"COLUMNS": "300"})


def test_a_measured_processor_is_planned_for_generate(mine: Path, tmp_path: Path):
    file = tmp_path / "run.toml"
    file.write_text(Path("examples/debug.toml").read_text())
    for model in ((file,), ("--model", "debug")):
        result = serve(*model, "--hardware", mine, "--cluster", "mine:2", *ASKED)
        assert result.exit_code == 0, result.output
        assert "weights fp32, cache fp32; constants of generate" in result.output
    explained = serve(
        "--model", "debug", "--hardware", mine, "--cluster", "mine:2", *ASKED, "--explain", "tp=2,batch=8"
    )
    assert "measured on this machine" in explained.output, explained.output


def test_what_cannot_be_priced_on_a_processor_is_refused(mine: Path, tmp_path: Path):
    old = tmp_path / "old.toml"
    old.write_text("\n".join(line for line in mine.read_text().splitlines() if not line.startswith("generation")))
    here = ("--hardware", mine, "--cluster", "mine:2", *ASKED)
    for arguments, said in (
        (
            ("--model", "debug", *here, "--engine", "vllm"),
            "that engine runs on GPUs, and mine is a CPU; valid: generate",
        ),
        (
            ("--model", "debug", "--cluster", "h100:1/1", "--engine", "generate", *ASKED),
            "h100 is none; valid here: fast",
        ),
        (("--model", "debug", "--hardware", old, "--cluster", "mine:2", *ASKED), "measured without the passes of"),
        (("nowhere", *here), "nowhere: there is no such file or folder; name a run file"),
        ((tmp_path, *here), "it has no run.toml; name a run file"),
        (("--model", "debug", *here, "--separate"), "generate reads prompts and decodes on the same ranks"),
        ((mine, "--model", "debug", *here), "both name a model; leave one out"),
        (("--model", "debug", *here, "--precision", "fp8"), "--precision fp8: mine has no fp8; it has fp32, bf16"),
    ):
        result = serve(*arguments)
        assert result.exit_code == 2, result.output
        assert said in result.output, result.output
    large = serve("--model", "llama-3.1-8b", *here)
    assert large.exit_code == 1
    assert "nothing fits" in large.output
    assert "accelerators of the same kind" not in large.output  # ranks of a processor share its memory


def test_experts_of_generate_are_whole():
    there = cluster_of(4)
    assert {
        each.degrees.ep == each.degrees.tp * each.degrees.dp for each in layouts(resolve("mixtral-8x7b"), there)
    } == {True}


def test_rates_of_few_tokens_are_found_again():
    from shardwright.measuring.fit import fit_cached, fit_matmuls, fit_weights

    large = fit_matmuls(machine().ranks[0].matmuls)
    row, weights, error = fit_weights(weights_points(), large)
    assert (row, weights) == pytest.approx((ROW, WEIGHTS), rel=0.1)
    assert error < 0.05
    faster = tuple(replace(each, seconds=1e-9) if each.m > 1 else each for each in weights_points())
    assert fit_cached(cached_points()) == pytest.approx((CACHED_HEAD_S, CACHED_RATE, 0.0), rel=1e-6, abs=1e-9)
    assert fit_weights(faster, large)[1] > 0  # a machine on which it takes no time to lay out the weights


@pytest.mark.parametrize("precision", ["int8", "int4", "mxfp4"])
def test_a_processor_serves_no_weights_that_it_would_have_to_cast(mine: Path, precision: str):
    there = cluster("mine:1/1", mine).accelerator
    assert weights_on(there) == [name for name in FORMATS if name in there.flops_per_s]
    assert caches_on(there) == [name for name in CACHE_BYTES if name in there.flops_per_s]
    result = serve("--model", "debug", "--hardware", mine, "--cluster", "mine:1", *ASKED, "--precision", precision)
    assert (result.exit_code, f"mine has no {precision}; it has" in result.output) == (2, True), result.output
