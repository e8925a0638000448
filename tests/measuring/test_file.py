"""The file of a measured machine is a hardware file that `plan` reads, with the rates that were measured."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from shardwright.cli.main import app
from shardwright.cost.hardware import cluster
from shardwright.cost.hardware_file import name_of_file
from shardwright.cost.job import Job
from shardwright.cost.machine import on_machine
from shardwright.cost.matmuls import Matmul
from shardwright.measuring.file import hardware_toml
from shardwright.model.presets import resolve
from tests.measuring.machines import LINK, RATE, machine, message_points


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    path = tmp_path / "my laptop.toml"
    path.write_text(hardware_toml(machine(), name_of_file(path), "shardwright measure"))
    return path


def test_the_file_has_what_was_measured(mine: Path):
    two, one = cluster("my-laptop:2", mine), cluster("my-laptop:1", mine)
    assert two.accelerator.on_host
    assert (two.inside.bytes_per_s, two.inside.latency_s) == pytest.approx((LINK.bytes_per_s, LINK.latency_s), rel=0.02)
    assert one.accelerator.memory_bytes == pytest.approx(2 * two.accelerator.memory_bytes)
    product = Matmul("product", 1024, 1024, 768)
    jobs = [
        on_machine(Job(model=resolve("debug"), cluster=each, seq_len=128, global_batch=8, precision="fp32"))
        for each in (one, two)
    ]
    seconds = [float(product.seconds(each)) for each in jobs]
    assert seconds[1] / seconds[0] == pytest.approx(2, rel=0.01)
    assert 2 * 1024 * 1024 * 768 / seconds[0] == pytest.approx(RATE, rel=0.15)


def test_plan_takes_the_file(mine: Path):
    words = ["plan", "--model", "debug", "--cluster", "my-laptop:2", "--global-batch", "8", "--seq-len", "128"]
    words += ["--hardware", str(mine), "--precision"]
    result = CliRunner().invoke(app, [*words, "fp32", "--json"])
    assert result.exit_code == 0, result.output
    best = json.loads(result.stdout)["best"][0]
    assert best["time_s"]["launch"] > 0
    told = CliRunner().invoke(app, [*words, "fp32"])
    assert "peak 0.05" in told.output  # TFLOP/s; not rounded to 0
    refused = CliRunner().invoke(app, [*words, "fp8"])
    assert refused.exit_code == 2
    assert "known: bf16, fp32" in refused.output or "known: fp32, bf16" in refused.output


def test_an_update_that_was_too_quick_to_be_timed_is_planned_with_the_bytes_that_it_moves(tmp_path: Path):
    measured = machine()
    ranks = tuple(
        replace(each, kernels=tuple(kernel for kernel in each.kernels if kernel.name != "optimizer_bytes"))
        for each in measured.ranks
    )
    path = tmp_path / "quick.toml"
    path.write_text(hardware_toml(replace(measured, ranks=ranks), "quick", "shardwright measure"))
    job = Job(model=resolve("debug"), cluster=cluster("quick:1", path), seq_len=128, global_batch=8, precision="fp32")
    assert on_machine(job).stack.speed.optimizer_bytes == job.stack.speed.optimizer_bytes


def test_links_between_nodes_are_a_network_of_the_file(tmp_path: Path):
    from dataclasses import replace

    path = tmp_path / "mine.toml"
    path.write_text(hardware_toml(replace(machine(), across=message_points()), "mine", "shardwright measure"))
    found = cluster("mine:8", path)
    assert found.across.name == "mine"
    assert found.across.bytes_per_s == pytest.approx(LINK.bytes_per_s, rel=0.02)


def test_the_page_has_the_curves(tmp_path: Path):
    from shardwright.measuring.view import machine_document
    from shardwright.view.html import page as page_of

    page = page_of(machine_document(machine()))
    for part in ("a CPU, measured", "bf16, 2 of a node", "heads of 64", "all-gather", "<svg"):
        assert part in page
