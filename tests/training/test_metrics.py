"""Proves what a run says about itself: JSON lines that survive a kill, the screen line, extras, known peaks only."""

import dataclasses
import json
import os
import re
import resource
import shutil
import socket
import sys
import types
import urllib.request
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import pytest
import torch

from shardwright.config import RunConfig, parse
from shardwright.errors import InputError
from shardwright.model.presets import resolve
from shardwright.model.sections import MoESpec
from shardwright.parallel.model import ExpertLoad
from shardwright.run_folder import Evaluated, Logged, Saved, read_events
from shardwright.training.device import peak_flops_per_s, peak_of_name
from shardwright.training.load import expert_numbers
from shardwright.training.metrics import JsonLines, _numbers, line, missing_extras, open_writers
from shardwright.training.start import start
from tests.marks import prove
from tests.training.runs import checkpoints, lines, records, train, training, trajectory, write_run_file

RECORD = {
    "kind": "train",
    "step": 3,
    "loss": 2.5,
    "grad_norm": 0.5,
    "lr": 1e-3,
    "target_tokens": 100,
    "tokens_per_s": 12345.0,
    "tokens_per_s_per_device": 6172.5,
    "tflops_per_s_per_device": 0.5,
    "mfu": None,
    "memory_bytes": 2**30,
    "step_s": 0.2,
    "data_s": 0.001,
    "forward_backward_s": 0.15,
    "optimizer_s": 0.049,
}


def config(folder: Path, **metrics: object) -> RunConfig:
    return parse(
        {
            "out": str(folder),
            "steps": 9,
            "data": {"path": "x"},
            "batch": {"seq_len": 4, "global_batch": 1},
            "metrics": metrics,
        }
    )


def test_a_line_says_all_that_was_asked_for():
    text = line(RECORD, 9)
    for part in (
        "step     3/9",
        "loss 2.5",
        "grad_norm 0.5",
        "lr 1.00e-03",
        "12.3K tok/s",
        "6.17K/device",
        "0.5 TFLOP/s",
    ):
        assert part in text
    for part in ("MFU n/a", "1 GiB", "data 1 ms", "fwd+bwd 150 ms", "opt 49 ms"):
        assert part in text
    assert "MFU 51.2%" in line({**RECORD, "mfu": 0.512}, 9)


def moe(**changes: object) -> MoESpec:
    debug = resolve("debug-moe").moe
    assert debug is not None
    return dataclasses.replace(debug, n_experts=4, **changes)  # type: ignore[arg-type]


# Layer 0 is dense; a quarter of the pairs of layer 2 is dropped.
LOAD = ExpertLoad(
    torch.tensor([[0, 0, 0, 0], [2, 2, 2, 2], [8, 0, 0, 0]]),
    torch.tensor([0, 0, 4]),
    torch.tensor([[0.0, 0.0], [0.1, 0.01], [0.4, 0.02]], dtype=torch.float64),
)


def test_the_load_of_experts_is_a_mean_over_the_layers_that_have_some():
    assert expert_numbers(LOAD, moe(first_dense=1)) == {
        "load_max_over_mean": 2.5,
        "load_entropy": pytest.approx(0.5),
        "load_by_layer": [1.0, 4.0],
    }


def test_losses_and_dropped_pairs_are_told_where_the_run_file_has_them():
    told = expert_numbers(LOAD, moe(first_dense=1, capacity_factor=1.0, aux_loss=0.1, z_loss=0.001))
    assert told["dropped_fraction"] == 0.25
    assert (told["balance_loss"], told["z_loss"]) == (pytest.approx(0.5), pytest.approx(0.03))


def test_a_run_with_experts_records_their_load_and_what_is_sent_and_one_without_does_not(tmp_path: Path, tokens: Path):
    run_file = write_run_file(tmp_path, tokens)
    experts = "model.moe={n_experts=4, top_k=2, d_ffn=8, aux_loss=0.01, z_loss=0.001}"
    train(run_file, "--set", "steps=2", "--set", experts, "--set", "layout.ep=2")
    # 2 sequences of 16 tokens on a rank, 2 experts each, 16 floats, 2 layers: all of it there and back, twice.
    most_bytes = 4 * (2 * 16) * 2 * (16 * 4) * 2
    for record in records(run_file):
        first, second = record["load_by_layer"]
        assert all(1 <= load <= 4 for load in (first, second))
        assert record["load_max_over_mean"] == pytest.approx((first + second) / 2, abs=1e-3)
        assert 0 < record["expert_sent_bytes"] <= most_bytes
        assert record["balance_loss"] == pytest.approx(2 * 0.01, rel=0.1)  # of two layers, near 1 at first
        assert record["z_loss"] > 0
        assert "dropped_fraction" not in record
    train(run_file, "--set", "steps=1", "--set", f"out={tmp_path / 'dense'}")
    (dense,) = records(run_file, "dense")
    assert not dense.keys() & {"load_max_over_mean", "load_by_layer", "expert_sent_bytes", "balance_loss"}


def test_the_line_has_the_load_beside_the_loss_where_there_are_experts():
    assert "| loss 2.5000 | load 1.14 | grad_norm" in line({**RECORD, "load_max_over_mean": 1.138}, 9)
    assert "load" not in line(RECORD, 9)


def test_a_resumed_run_drops_the_lines_of_steps_it_takes_again_and_half_a_line(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    lines = [json.dumps({**RECORD, "step": step}) for step in (1, 2, 3, 4)]
    path.write_text("\n".join(lines) + '\n{"kind": "tra')
    writer = JsonLines(path, resumed_step=2)
    writer.write({**RECORD, "step": 3, "loss": 9.0})
    writer.close()
    found = [json.loads(text) for text in path.read_text().splitlines()]
    assert [(r["step"], r["loss"]) for r in found] == [(1, 2.5), (2, 2.5), (3, 9.0)]


def test_a_file_that_was_deleted_takes_no_line_in_silence(tmp_path: Path):
    writer = JsonLines(tmp_path / "metrics.jsonl", resumed_step=0)
    writer.write(RECORD)
    (tmp_path / "metrics.jsonl").unlink()
    with pytest.raises(InputError, match=r"metrics\.jsonl was deleted while the run goes on, perhaps with its folder"):
        writer.write(RECORD)
    writer.close()


@prove
def test_a_run_whose_folder_is_deleted_ends_at_its_next_line_and_says_so(run_file):
    with training(run_file, "--set", "steps=100000") as run:
        run.wait_for(lambda: len(trajectory(run_file)) >= 3)
        shutil.rmtree(run_file.parent / "out", ignore_errors=True)
        assert run.wait() == 2, run.stderr
    assert "metrics.jsonl was deleted while the run goes on" in run.stderr
    assert "Traceback" not in run.stderr


def test_lines_that_a_full_disk_does_not_take_are_written_when_it_does(tmp_path: Path):
    """A limit on the size of files stands for the disk: what was written before it stays, half a line too."""
    path = tmp_path / "metrics.jsonl"
    writer = JsonLines(path, resumed_step=0)
    told = [{"kind": "evaluation", "step": step, "loss": 1 / step} for step in range(1, 6)]
    writer.write(told[0])
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 9, limits[1]))
    try:
        for record in told[1:4]:
            writer.write(record)
        assert path.read_text().count("\n") == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    writer.write(told[4])
    writer.close()
    assert [json.loads(each) for each in path.read_text().splitlines()] == told


def disk_is_full_from_step_8_to_11(out: Path, rank: int) -> None:
    """Of any rank no file grows beyond the size that the metrics had, in which the checkpoint of step 10 falls."""
    from shardwright.training.step import Trainer

    step, limits = Trainer.step, resource.getrlimit(resource.RLIMIT_FSIZE)

    def limited(self, batch, at, rate):
        if at in (8, 11):
            n_bytes = (out / "metrics.jsonl").stat().st_size if at == 8 else limits[0]
            resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, limits[1]))
        return step(self, batch, at, rate)

    Trainer.step = limited


@prove
def test_a_run_goes_on_over_a_disk_that_is_full_for_a_while_without_a_checkpoint_or_a_lost_line(tmp_path, tokens):
    path = write_run_file(tmp_path, tokens)
    run = train(
        path, "--set", "checkpoint.on_error=continue", fault=partial(disk_is_full_from_step_8_to_11, tmp_path / "out")
    )
    told = "the checkpoint after step 10 is not written: "
    assert told in " ".join(run.stdout.split())
    assert [record["step"] for record in records(path)] == list(range(1, 21))
    assert checkpoints(path) == ["step-00000015", "step-00000020"]


def disk_stays_full_from_step_8(out: Path, rank: int) -> None:
    """No file of any rank grows beyond the size that the metrics had after 8 steps."""
    from shardwright.training.step import Trainer

    step = Trainer.step

    def limited(self, batch, at, rate):
        if at == 8:
            n_bytes = (out / "metrics.jsonl").stat().st_size
            resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, n_bytes))
        return step(self, batch, at, rate)

    Trainer.step = limited


@pytest.mark.parametrize("every", [5, 20])
def test_a_disk_that_stays_full_ends_a_run_at_its_next_checkpoint_with_that_error_and_no_restart(
    every, tmp_path, tokens
):
    """The metrics cannot be written at the end either, and that error comes later."""
    path = write_run_file(tmp_path, tokens)
    options = ("--max-restarts", "3", "--set", f"checkpoint.every={every}", "--set", "steps=12")
    run = train(path, *options, fault=partial(disk_stays_full_from_step_8, tmp_path / "out"), expect=3)
    assert "step-000000" + ("10" if every == 5 else "12") in run.stderr
    assert "File too large" in run.stderr
    assert "metrics.jsonl" not in run.stderr
    assert "Traceback" not in run.stderr
    assert ("saved up to" in run.stderr) == (every == 5)
    assert [event.kind for event in read_events(tmp_path / "out")].count("restart") == 0
    assert max(record["step"] for record in records(path)) == 8


def stdout_is_on_a_full_disk(rank: int) -> None:
    os.dup2(os.open("/dev/full", os.O_WRONLY), 1)


def test_a_run_goes_on_where_stdout_is_on_a_full_disk(tmp_path, tokens):
    path = write_run_file(tmp_path, tokens)
    train(path, "--set", "steps=2", fault=stdout_is_on_a_full_disk)
    assert len(trajectory(path)) == 2


def test_every_line_has_the_time_and_each_start_says_where_and_with_what(tmp_path: Path, tokens: Path):
    run_file = write_run_file(tmp_path, tokens)
    train(run_file, "--set", "steps=2")
    done = train(run_file, "--resume", "--set", "steps=3", "--set", "layout.dp_shard=1")
    found = lines(run_file)
    assert [(line["kind"], line["step"]) for line in found] == [
        *(("run", 0), ("train", 1), ("train", 2), ("checkpoint", 2), ("run", 2), ("train", 3), ("checkpoint", 3)),
    ]
    times = [datetime.fromisoformat(line["time"]) for line in found]
    assert times == sorted(times)
    assert all(time.tzinfo == UTC for time in times)
    first, second = found[0], found[4]
    assert (first["world_size"], first["layout"], second["layout"]) == (2, "2 ranks with ZeRO-3", "1 rank")
    assert (first["device"], first["torch"]) == ("cpu", torch.__version__)
    assert second["checkpoint"].endswith("step-00000002")
    assert "steps   1, from 3 to 3: 64 tokens" in done.stdout
    assert re.search(r"saved to \S+/step-00000003\n +shardwright report \S+/out\n +shardwright generate", done.stdout)


def test_the_header_says_what_is_trained_and_the_lines_how_long_it_takes(tmp_path: Path, tokens: Path):
    run_file = write_run_file(tmp_path, tokens)
    said = train(run_file, "--set", "steps=2").stdout.splitlines()
    assert said[0] == "model   Llama-style, 13.5K parameters"
    assert said[1] == "layout  2 ranks with ZeRO-3; device cpu, fp32"
    assert said[2] == "update  adamw, learning rate 0.0003: constant"
    assert said[3] == "batch   64 tokens a step: 4 sequences of 16 tokens: 2 data ranks x 2 micro-batches x 1"
    assert re.match(r"steps   2: 128 tokens, [\d.e-]+ epochs of the \S+ tokens in ", said[4])
    assert [" | ETA " in line for line in said if line.startswith("step  ")] == [True, False]


def test_a_resumed_run_drops_the_start_of_one_that_took_no_step(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        "".join(json.dumps({"kind": kind, "step": n}) + "\n" for kind, n in (("run", 0), ("train", 2), ("run", 2)))
    )
    JsonLines(path, resumed_step=2).close()
    assert [json.loads(line)["kind"] for line in path.read_text().splitlines()] == ["run", "train"]


@pytest.mark.parametrize("line", ["[" * 100_000, "[1]", '{"step": "x", "kind": "train"}', "{}", "null"])
def test_a_resumed_run_refuses_a_line_that_is_no_record(tmp_path: Path, line: str):
    path = tmp_path / "metrics.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(InputError, match=r"metrics\.jsonl is damaged .* mend or remove it, and resume again"):
        JsonLines(path, resumed_step=2)
    assert path.read_text() == line + "\n"


def test_tensorboard_gets_every_number(tmp_path: Path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    writers = open_writers(config(tmp_path, tensorboard=True), 0)
    for writer in writers:
        writer.write({"kind": "run", "step": 2, "world_size": 2})
        writer.write(RECORD)
        writer.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert events.Scalars("train/loss")[0].value == 2.5
    assert "train/mfu" not in events.Tags()["scalars"]


def test_wandb_gets_every_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    told: list[tuple[object, object]] = []
    run = types.SimpleNamespace(
        log=lambda values, step: told.append((values, step)), finish=lambda: told.append(("end", 0))
    )
    fake = types.ModuleType("wandb")
    fake.init = lambda **settings: run if settings["project"] == "mine" else None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", fake)
    for writer in open_writers(config(tmp_path, wandb_project="mine"), 0):
        writer.write({"kind": "run", "step": 2, "world_size": 2})
        writer.write(RECORD)
        writer.close()
    values, step = told[0]
    assert step == 3
    assert values["train/loss"] == 2.5  # type: ignore[index]
    assert told[-1] == ("end", 0)


@pytest.mark.parametrize(
    ("module", "metrics"),
    [
        ("tensorboard", {"tensorboard": True}),
        ("wandb", {"wandb_project": "x"}),
        ("prometheus_client", {"prometheus_port": 61234}),
    ],
)
def test_an_extra_that_is_not_installed_is_named_with_its_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, metrics: dict[str, object]
):
    monkeypatch.setitem(sys.modules, module, None)
    assert missing_extras(config(tmp_path)) == []
    assert f"pip install {module}" in missing_extras(config(tmp_path, **metrics))[0]
    with pytest.raises(InputError, match=f"{module}, which is not installed"):
        start(config(tmp_path, **metrics))
    assert list(tmp_path.iterdir()) == [], "nothing is written for a run that is refused"


def test_extras_are_not_imported_unless_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for module in ("torch.utils.tensorboard.writer", "tensorboard", "wandb", "prometheus_client"):
        monkeypatch.setitem(sys.modules, module, None)
    for writer in open_writers(config(tmp_path), 0):
        writer.close()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def scraped(port: int) -> dict[str, float]:
    """What Prometheus would read: name and labels -> value."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    return {name: float(value) for name, value in re.findall(r"^(shardwright_\S+) (\S+)$", text, re.MULTILINE)}


def test_prometheus_gets_every_number_of_the_newest_record(tmp_path: Path):
    pytest.importorskip("prometheus_client")
    port = free_port()
    writers = open_writers(config(tmp_path, prometheus_port=port), 0)
    newest = {**RECORD, "step": 4, "epochs": {"web": 0.5}, "own_s_by_rank": (0.25, 0.5), "loss": float("nan")}
    evaluated = {"kind": "evaluation", "step": 4, "loss": 3.5, "time": "now"}
    for writer in writers:
        for record in ({"kind": "run", "step": 0, "layout": "x"}, {**RECORD, "own_s_by_rank": (1, 2, 3)}):
            writer.write(record)
        writer.write(newest)
        writer.write(evaluated)
    found = scraped(port)
    expected = {f"shardwright_train_{key}": value for key, value in newest.items() if isinstance(value, int | float)}
    expected |= {f"shardwright_evaluation_{key}": evaluated[key] for key in ("step", "loss")}
    expected |= {
        'shardwright_train_epochs{of="web"}': 0.5,
        'shardwright_train_own_s_by_rank{of="0"}': 0.25,
        'shardwright_train_own_s_by_rank{of="1"}': 0.5,
    }
    assert found == pytest.approx(expected, nan_ok=True)
    for writer in writers:
        writer.close()
    with pytest.raises(OSError):
        scraped(port)


def test_a_port_that_is_taken_is_told_before_the_run_starts(tmp_path: Path):
    pytest.importorskip("prometheus_client")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            InputError, match=f"metrics.prometheus_port={port}: cannot listen on 127.0.0.1:{port} .*set"
        ):
            start(config(tmp_path, prometheus_port=port))
        assert list(tmp_path.iterdir()) == []
        with pytest.raises(InputError, match="set another one"):
            open_writers(config(tmp_path, prometheus_port=port), 0)
    for wrong in (0, 65536, -1):
        with pytest.raises(InputError, match="prometheus_port"):
            config(tmp_path, prometheus_port=wrong)


@prove
def test_a_run_is_scraped_while_it_trains(tokens: Path, tmp_path: Path):
    pytest.importorskip("prometheus_client")
    run_file, port = write_run_file(tmp_path, tokens), free_port()
    arguments = (f"metrics.prometheus_port={port}", "steps=5000", "checkpoint.every=0")
    with training(run_file, *(part for each in arguments for part in ("--set", each))) as run:
        run.wait_for(lambda: len(trajectory(run_file)) >= 3)
        found = scraped(port)
    logged = {record["step"]: record for record in records(run_file)}[found["shardwright_train_step"]]
    for key in ("loss", "grad_norm", "lr", "tokens_per_s", "memory_bytes", "slowest_costs_s"):
        assert found[f"shardwright_train_{key}"] == logged[key]
    assert {name for name in found if "own_s_by_rank" in name} == {
        f'shardwright_train_own_s_by_rank{{of="{rank}"}}' for rank in (0, 1)
    }


def test_the_dashboard_asks_for_numbers_that_there_are():
    kinds = {"train": Logged, "evaluation": Evaluated, "checkpoint": Saved}
    path = Path(__file__).parents[2] / "examples" / "grafana-dashboard.json"
    asked = [target["expr"] for panel in json.loads(path.read_text())["panels"] for target in panel["targets"]]
    assert len(asked) > 10
    for name in asked:
        kind, _, key = name.removeprefix("shardwright_").partition("_")
        assert key in {each.name for each in dataclasses.fields(kinds[kind])}, name


@pytest.mark.parametrize(
    ("name", "flops_per_s"),
    [
        ("NVIDIA H200", 989e12),
        ("NVIDIA B200", 2250e12),
        ("NVIDIA GB200", 2500e12),
        ("NVIDIA GeForce RTX 4090", 165.2e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA GeForce RTX 5050", None),
        ("NVIDIA H20", 148e12),
        ("NVIDIA H100 NVL", 835e12),
        ("NVIDIA H800 PCIe", None),
        ("NVIDIA A100-PCIE-40GB", 312e12),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),
    ],
)
def test_a_peak_is_that_of_the_device_or_not_known(name: str, flops_per_s: float | None):
    assert peak_of_name(name, torch.bfloat16) == flops_per_s


def test_the_peak_of_fp32_is_that_outside_tensor_cores_unless_tf32_is_on():
    assert peak_of_name("NVIDIA H200", torch.float32) == 67e12
    assert peak_of_name("NVIDIA H200", torch.float32, tf32=True) == 494.5e12
    assert peak_of_name("NVIDIA H200", torch.float64) is None


def test_a_cpu_has_no_known_peak():
    assert peak_flops_per_s(torch.device("cpu"), torch.float32) is None


def test_a_line_of_a_mixture_has_the_epochs_and_losses_of_its_sources():
    assert " | epochs web 0.25, code 1.5 | " in line(RECORD | {"epochs": {"web": 0.25, "code": 1.5}}, 20)
    told = {"kind": "evaluation", "step": 5, "loss": 2.5, "sources": {"web": 2.0, "code": 3.0}}
    assert line(told, 20) == "step     5/20 | validation loss 2.5000 | web 2.0000, code 3.0000"
    assert _numbers(told) == {"loss": 2.5, "sources/web": 2.0, "sources/code": 3.0}
