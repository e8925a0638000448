"""Proves what a run says about itself: JSON lines that survive a kill, the screen line, known peaks only."""

import dataclasses
import json
import re
import shutil
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shardwright.config import load, parse
from shardwright.layout.layout import Layout
from shardwright.model.lora_sizes import LoraSpec
from shardwright.model.modules import row_of
from shardwright.model.presets import resolve
from shardwright.model.sections import MoESpec
from shardwright.parallel.boxes import local_box
from shardwright.parallel.model import ExpertLoad
from shardwright.parallel.norm import local_part
from shardwright.parallel.similarity import similar_experts, similar_routers
from shardwright.runs.folder import PHASES
from shardwright.system.errors import InputError, ShardwrightError
from shardwright.training.device import peak_flops_per_s, peak_of_name
from shardwright.training.numbers import LogNumbers, expert_numbers, speed_numbers, tokens_by_expert
from shardwright.training.run_log import line
from shardwright.training.writers.files import JsonLines
from shardwright.training.writers.writer import numbers_of
from tests.distributed import run_ranks
from tests.marks import prove
from tests.training.bugs.bug import EXPERTS
from tests.training.metric_records import RECORD
from tests.training.runs import lines, records, train, training, trajectory, write_run_file
from tests.training.worlds import SPEC, build


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
    assert expert_numbers(LOAD, moe(first_dense=1), (1, 2)) == {
        "load_max_over_mean": 2.5,
        "load_entropy": pytest.approx(0.5),
        "load_by_layer": [1.0, 4.0],
    }


def test_the_tokens_of_each_expert_are_those_of_the_layers_and_of_one_layer_where_they_are_many(
    monkeypatch: pytest.MonkeyPatch,
):
    assert tokens_by_expert(LOAD, (1, 2)) == [[2, 2, 2, 2], [8, 0, 0, 0]]
    monkeypatch.setattr("shardwright.training.numbers.MOST_LOADS_LOGGED", 7)
    assert tokens_by_expert(LOAD, (1, 2)) == [[8, 0, 0, 0]]


def test_losses_and_dropped_pairs_are_told_where_the_run_file_has_them():
    told = expert_numbers(LOAD, moe(capacity_factor=1.0, aux_loss=0.1, z_loss=0.001), (1, 2))
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
        # 4 sequences of 16 tokens, 2 experts each.
        assert [sum(layer) for layer in record["tokens_by_expert"]] == [4 * 16 * 2] * 2
        assert [max(layer) * 4 / sum(layer) for layer in record["tokens_by_expert"]] == pytest.approx(
            [first, second], abs=1e-3
        )
        assert 0 < record["expert_sent_bytes"] <= most_bytes
        assert all(-1 <= cosine < 1 for cosine in record["router_similarity_by_layer"])
        assert record["balance_loss"] == pytest.approx(2 * 0.01, rel=0.1)  # of two layers, near 1 at first
        assert record["z_loss"] > 0
        assert "dropped_fraction" not in record
    split = ("layout.tp=2", "layout.dp_shard=1", "metrics.every=2")
    train(
        run_file,
        "--set",
        f"out={tmp_path / 'dense'}",
        *(word for key in ("steps=2", *split) for word in ("--set", key)),
    )
    (dense,) = records(run_file, "dense")
    # Two ranks of tp work on the same 4 sequences of 16 tokens.
    assert dense["step_s"] == pytest.approx(sum(dense[f"{phase}_s"] for phase in PHASES))
    assert dense["tokens_per_s"] * dense["step_s"] == pytest.approx(4 * 16)
    assert dense["tokens_per_s_per_device"] == pytest.approx(dense["tokens_per_s"] / 2)
    flops = load(run_file).model.spec().train_flops_per_token(16)
    assert dense["tflops_per_s_per_device"] == pytest.approx(dense["tokens_per_s_per_device"] * flops / 1e12)
    assert not dense.keys() & {"load_max_over_mean", "load_by_layer", "expert_sent_bytes", "balance_loss"}


def test_the_flops_of_logged_steps_are_those_of_their_stages():
    text = {"out": "x", "steps": 9, "model": {"preset": "debug"}, "data": {"path": "none"}}
    stages = [{"from_step": 2, "global_batch": 8}, {"from_step": 4, "seq_len": 64, "global_batch": 2}]
    config = parse(text | {"batch": {"seq_len": 16, "global_batch": 4, "stages": stages}})
    clock: Any = SimpleNamespace(read=lambda: {"data": 0.0, "forward_backward": 15.0, "optimizer": 0.0})
    sources = SimpleNamespace(attended_tokens=lambda step, seq_len: seq_len, schedule=config.batch.schedule)
    samples: Any = SimpleNamespace(sources=sources)
    nothing: Any = SimpleNamespace()
    found = LogNumbers(config, nothing, samples, torch.device("cpu"), clock, nothing)._speed(6, 5)
    # Step 2 has 4 x 16 tokens, steps 3 and 4 have 8 x 16, and steps 5 and 6 have 2 x 64; 3 s each.
    assert found["tokens_per_s"] == (64 + 2 * 128 + 2 * 128) / 15
    flops = [config.model.spec().train_flops_per_token(seq_len) for seq_len in (16, 64)]
    assert found["tflops_per_s_per_device"] == pytest.approx((320 * flops[0] + 256 * flops[1]) / 15 / 1e12)


def test_the_speed_is_that_of_a_step_and_of_a_device():
    phases_s = {"data": 0.5, "forward_backward": 2.5, "optimizer": 1.0}
    assert speed_numbers(phases_s, 4096, 8, 2e9, 1e12) == {
        "tokens_per_s": 1024.0,
        "tokens_per_s_per_device": 128.0,
        "tflops_per_s_per_device": 0.256,
        "mfu": 0.256,
        "step_s": 4.0,
        "data_s": 0.5,
        "forward_backward_s": 2.5,
        "optimizer_s": 1.0,
    }
    assert speed_numbers(phases_s, 4096, 8, 2e9, None)["mfu"] is None


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
    said = r"metrics\.jsonl was deleted during the run, perhaps with its folder"
    with pytest.raises(ShardwrightError, match=said) as deleted:
        writer.write(RECORD)
    assert deleted.value.exit_code == 3
    writer.close()


@prove
def test_a_run_whose_folder_is_deleted_ends_at_its_next_line_and_says_so(run_file):
    with training(run_file, "--set", "steps=100000") as run:
        run.wait_for(lambda: len(trajectory(run_file)) >= 3)
        shutil.rmtree(run_file.parent / "out", ignore_errors=True)
        assert run.wait() == 3, run.stderr
    assert "metrics.jsonl was deleted during the run" in run.stderr
    assert "Traceback" not in run.stderr


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
    assert numbers_of(told) == {"loss": 2.5, "sources/web": 2.0, "sources/code": 3.0}


def similarity(layout: Layout, alike: bool, lora: LoraSpec | None = None) -> list[tuple[list[float], list[float]]]:
    """Of the routers and of the experts of a model of four layers, after experts have moved, if they do: the largest
    cosines and their pairs. If `alike`, the third layer has equal rows of the router, and experts 1 and 3 are equal."""
    spec = replace(SPEC, n_heads=4, n_kv_heads=2, d_model=32, n_layers=4, moe=EXPERTS, lora=lora)
    model = build(layout, torch.float32, spec).model
    for name, parameter in model.named_parameters.items():
        if alike and name.startswith("layers.2.") and name.endswith("router.weight"):
            with torch.no_grad():
                local_part(parameter).fill_(0.5)
        if alike and name.startswith("layers.2.") and ".experts." in name:
            local, (first, *_) = local_box(parameter)
            for expert in {1, 3} & {*range(first, first + len(local))}:
                with torch.no_grad():
                    local[expert - first] = 0.01 * torch.arange(parameter.shape[1]).view(-1, 1)
        if alike and lora is not None and row_of(spec, name).adapter:
            with torch.no_grad():
                local_part(parameter).normal_()
    if model.places is not None:
        shifted = {layer: (*order[1:], *order[:1]) for layer, order in model.places.home.items()}
        model.places.move(shifted, model.named_parameters)
    found = similar_routers(model), similar_experts(model)
    return [
        ([round(value, 5) for value in most_L3[:, 0].tolist()], most_L3[:, 1:].tolist())
        for most_L3 in found
        if most_L3 is not None
    ]


def test_the_similarity_of_experts_with_adapters_is_of_their_base_and_not_of_quantised_bytes():
    lora = LoraSpec(rank=4, targets=("experts",))
    (with_adapters,) = run_ranks(similarity, 1, Layout(), True, lora)
    assert with_adapters == run_ranks(similarity, 1, Layout(), True)[0]
    (quantised,) = run_ranks(similarity, 1, Layout(), False, replace(lora, base="int8"))
    assert len(quantised) == 1, "routers alone"


def test_the_similarity_of_routers_and_of_experts_is_the_same_on_every_layout():
    (whole,) = run_ranks(similarity, 1, Layout(), False)
    (alike,) = run_ranks(similarity, 1, Layout(), True)
    assert all(-0.9 < value < 0.9 for values, _ in whole for value in values)
    assert [values for values, _ in alike] == [[*values[:2], 1.0, values[3]] for values, _ in whole]
    assert alike[1][1] == [*whole[1][1][:2], [1.0, 3.0], whole[1][1][3]]
    moving = Layout(tp=2, dp_shard=2, ep=2, zero=1, place_experts_every=1)
    for layout in (Layout(pp=2, dp_shard=2, zero=3), moving):
        assert run_ranks(similarity, 4, layout, False) == [whole] * 4
        assert run_ranks(similarity, 4, layout, True) == [alike] * 4
