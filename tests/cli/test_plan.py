"""Proves that `shardwright plan` finds and tells, explains what it chose, and imports little."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer

from shardwright.cli.main import VERBS, app
from shardwright.config import load
from shardwright.cost.hardware import cluster
from shardwright.cost.job import Job
from shardwright.model.presets import PRESETS
from shardwright.planner.alternatives import Alternative
from shardwright.planner.batches import tried
from shardwright.planner.choice import PricedLayout, read
from shardwright.planner.simplicity import complexity
from shardwright.planner.words import verdict
from tests.cli.imports import runs_without
from tests.cli.plans import EXAMPLES, REAL, SMALL, TIED, TINY, document, plan


def test_the_best_layout_is_told_with_memory_time_and_what_others_lose():
    result = plan(*REAL, "--budget-tokens", "1e12")
    assert result.exit_code == 0, result.output
    for part in (
        "llama-3.1-8b, 8.03B parameters, on h100:8: 128 sequences of 8,192 tokens a step, bf16",
        "layouts",
        "a step takes",
        "tokens/s",
        "MFU",
        "matmuls",
        "activations",
        "peak",
        "limit",
        "Of the fastest 10",
        "another tp",
        "also with zero=3",
        "does not fit",
        "accelerator-hours",
    ):
        assert part in result.output


def test_the_document_is_consistent(told: Any):
    best = told["best"][0]
    assert told["n_fit"] <= told["n_layouts"]
    assert len(told["best"]) == 10
    times = [each["step_s"] for each in told["best"]]
    assert times == sorted(times)
    for each in told["best"]:
        assert sum(each["time_s"].values()) == pytest.approx(each["step_s"])
        assert each["peak_bytes"] <= told["limit_bytes"]
        assert each["tokens_per_s"] == pytest.approx(128 * 8192 / each["step_s"])
        assert each["mfu_causal"] < each["mfu_full"] < 1
        assert str(read(each["text"])) == each["text"]
    assert told["limit_bytes"] == pytest.approx(0.9 * told["memory_bytes"])
    whole = best["whole_run"]
    assert whole["parts_days"]["steps"] == pytest.approx(15e12 / best["tokens_per_s"] / 86400)
    assert best["days"] == whole["days"] == pytest.approx(sum(whole["parts_days"].values()))
    assert best["accelerator_hours"] == pytest.approx(best["days"] * 24 * 8)
    assert all(each["fits"] == ("step_s" in each) for each in told["alternatives"])
    taken = told["recommended"]
    assert best["step_s"] <= min(taken["step_s"], told["simplest"]["step_s"])
    for each in told["alternatives"]:
        if each["fits"]:
            assert each["slower"] == pytest.approx(each["step_s"] / taken["step_s"] - 1)


def test_the_recommended_layout_of_8b_on_a_node_has_no_axis_but_zero(told: Any):
    assert complexity(read(told["recommended"]["text"]).candidates, 8)[0] == 0


@pytest.mark.prove
def test_the_layouts_to_choose_from_are_in_the_first_ten_lines_and_a_gap_beyond_the_error_is_no_tie():
    """Tensor and pipeline parallelism gain 6 %, and the difference is known to 3 %."""
    result, told = plan(*TIED), document(*TIED)
    first = result.output.splitlines()[:10]
    for each in (told["recommended"], told["best"][0], told["simplest"]):
        assert any(line.rstrip().endswith(each["text"]) for line in first)
    assert told["recommended"]["text"] == told["best"][0]["text"]
    taken, simple = (read(told[name]["text"]).candidates for name in ("recommended", "simplest"))
    assert complexity(simple, 8)[0] < complexity(taken, 8)[0]
    assert 1.05 < told["simplest"]["step_s"] / told["recommended"]["step_s"] < 1.1


@pytest.mark.prove
def test_the_preference_decides_what_is_recommended_and_written(tmp_path: Path):
    for prefer, name in (("fastest", "best"), ("simplest", "simplest")):
        path = tmp_path / f"{prefer}.toml"
        told = document(*TIED, "--top", 1, "--prefer", prefer, "--write", path)
        chosen = told["best"][0] if name == "best" else told["simplest"]
        assert told["recommended"]["text"] == chosen["text"]
        assert load(path).layout.layout() == read(chosen["text"]).layout
    assert "did you mean 'cheapest'" in plan(*TINY, "--prefer", "cheapst").output


def test_the_written_run_file_is_for_the_device_of_the_cluster(tmp_path: Path):
    source = EXAMPLES / "debug.toml"
    assert load(source).device == "cpu"
    for name, device in (("h100:2", "auto"), ("cpu:2", "cpu")):
        path = tmp_path / f"{device}.toml"
        document(source, "--cluster", name, "--write", path)
        assert load(path).device == device


@pytest.mark.prove
def test_the_cheapest_plan_takes_fewer_accelerator_hours_on_a_part_of_the_cluster(tmp_path: Path):
    asked = ("--model", "gpt2", "--cluster", "h100:4", "--global-batch", 4, "--seq-len", 256, "--top", 1)
    whole, part = document(*asked), document(*asked, "--prefer", "cheapest", "--write", tmp_path / "run.toml")
    assert part["accelerators"] < whole["accelerators"]
    seconds = [each["recommended"]["step_s"] * each["accelerators"] for each in (whole, part)]
    assert seconds[1] < seconds[0]
    requested = part["requested"]
    assert (requested["cluster"], requested["accelerators"]) == (whole["cluster"], whole["accelerators"])
    assert requested["recommended"]["step_s"] == whole["recommended"]["step_s"]
    assert whole["requested"] is None
    assert load(tmp_path / "run.toml").layout.layout().world_size == part["accelerators"]
    shown = plan(*asked, "--prefer", "cheapest").output
    assert f"{part['accelerators']} of the 4 accelerators take" in shown
    assert f"{part['accelerators']} of 4 in " in shown.splitlines()[0]


def test_the_layout_of_the_run_file_comes_first():
    own = EXAMPLES / "llama-3.1-8b.toml"
    lines = plan(own, "--cluster", "h100:32").output.splitlines()
    assert lines[4].startswith("run file")
    assert lines[5].startswith("recommended")
    told = document(own, "--cluster", "h100:32")["run_file"]
    assert told["text"] in lines[4]
    assert f"{told['slower']:+.1%}" in lines[4]
    explained = document("--explain", own, "--cluster", "h100:32")
    assert explained["text"] == told["text"]
    assert explained["step_s"] == pytest.approx(told["step_s"])


def test_explaining_the_best_layout_comes_to_what_the_search_said(told: Any):
    best = told["best"][0]
    again = document(*REAL, "--explain", best["text"])
    assert again["step_s"] == pytest.approx(best["step_s"])
    assert again["peak_bytes"] == pytest.approx(best["peak_bytes"])
    assert len(again["formulas"]) > 25
    shown = plan(*REAL, "--explain", best["text"], columns=400)
    assert shown.exit_code == 0, shown.output
    assert "tokens of a step = global_batch * s = 128 * 8192 = 1048576 tokens" in shown.output


def test_one_sequence_is_one_and_the_peak_is_that_of_the_format_and_every_part_is_shown():
    asked = (*SMALL[:2], "--cluster", "h100:1/1", "--global-batch", 1, "--seq-len", 128, "--precision", "fp32")
    result = plan(*asked, columns=400)
    assert "1 sequence of 128 tokens a step" in result.output
    assert "peak 67 TFLOP/s" in result.output
    assert "peak 494 TFLOP/s" in plan(*asked[:-1], "tf32", columns=400).output
    parts = document(*asked)["best"][0]["time_s"]
    assert all(kind in result.output for kind, seconds in parts.items() if seconds > 1e-6)


def test_a_small_model_has_its_times_in_ms_and_its_memory_in_mib_and_equals_of_listed_rows_only():
    lines = plan(*TINY, columns=400).output.splitlines()
    parts = document(*TINY)["best"][0]["time_s"]
    assert any(line.split() == ["time", "ms", "share"] for line in lines)
    assert any(line.split()[:2] == ["optimizer", f"{1e3 * parts['optimizer']:.4g}"] for line in lines)
    header = next(at for at, line in enumerate(lines) if line.split()[:3] == ["step", "ms", "change"])
    assert "MiB" in lines[header].split()
    listed = {line.split()[0] for line in lines[header + 1 : lines.index("Why not another")] if line[:1].isdigit()}
    equal = next(line for line in lines if " as one of these: " in line)
    named = [number for each in re.findall(r"numbers? ([\d, ]+) also", equal) for number in each.split(", ")]
    assert named
    assert set(named) <= listed


@pytest.mark.prove
def test_a_layout_that_is_as_fast_is_named_in_one_line():
    asked = ("--model", "llama-3.1-70b", "--cluster", "h100:64", "--global-batch", 1024, "--seq-len", 8192)
    result = plan(*asked, columns=400)
    alike = r"\d more layouts cost as much time and memory as one of these: (each|numbers [\d, ]+) also with zero=3"
    assert re.search(alike, result.output)
    assert not re.search(r"[+-]0\.0%", result.output.split("Why not another")[1])


def test_top_is_how_many_are_listed():
    assert len(document(*TINY, "--top", 3)["best"]) == 3


@pytest.mark.prove
def test_a_larger_margin_leaves_less():
    n_fit = [document(*REAL, "--top", 1, "--memory-margin", margin)["n_fit"] for margin in (0.0, 0.1, 0.5)]
    assert n_fit[0] > n_fit[1] > n_fit[2]


@pytest.mark.prove
def test_a_plan_of_a_mixture_says_that_loads_are_even_and_prices_uneven_ones():
    asked = ("--model", "mixtral-8x7b", "--cluster", "h100:16", "--global-batch", 64, "--seq-len", 2048, "--top", 1)
    layout = ("--fix", "ep=8,pp=1,tp=1,cp=1,zero=3")
    even, uneven = (document(*asked, *layout, *load) for load in ((), ("--expert-load", "cv=0.3")))
    assert even["recommended"]["expert_load"].startswith("experts have even loads; with --expert-load cv=0.3 a step")
    assert uneven["expert_load"] == "cv=0.3"
    assert uneven["recommended"]["step_s"] > even["recommended"]["step_s"]
    said = uneven["recommended"]["expert_load"]
    assert said.startswith("with --expert-load cv=0.3 the busiest rank has 1.43 times the mean load, and a step takes")
    assert said in plan(*asked, *layout, "--expert-load", "cv=0.3", columns=500).output


def test_a_run_file_says_how_it_is_saved_and_evaluated():
    asked = ("--cluster", "h100:32", "--top", 1, "--fix", "pp=1,tp=1,cp=1", "--budget-tokens", "15e9")
    config = load(EXAMPLES / "llama-3.1-8b.toml")
    run = document(EXAMPLES / "llama-3.1-8b.toml", *asked)["recommended"]["whole_run"]
    assert (run["save"], run["every_steps"]) == ("sync", config.checkpoint.every)
    assert run["parts_days"]["evaluation"] > 0
    changed = ("--operations", "save=async,save_every=7,evaluate_every=0")
    other = document(EXAMPLES / "llama-3.1-8b.toml", *asked, *changed)["recommended"]["whole_run"]
    assert (other["save"], other["every_steps"], other["parts_days"]["evaluation"]) == ("async", 7, 0)


@pytest.mark.prove
def test_the_layout_of_a_run_file_is_held_against_the_best():
    found = document(EXAMPLES / "llama-3.1-8b.toml", "--cluster", "h100:32")
    own = found["run_file"]
    assert read(own["text"]).layout == load(EXAMPLES / "llama-3.1-8b.toml").layout.layout()
    assert own["step_s"] >= found["best"][0]["step_s"] if own["fits"] else own["peak_bytes"] > found["limit_bytes"]


def test_where_nothing_fits_the_exit_code_is_1_and_remedies_are_told():
    asked = ("--model", "llama-3.1-8b", "--cluster", "h100:1/1", "--global-batch", 8, "--seq-len", 8192)
    result = plan(*asked)
    assert result.exit_code == 1
    for part in ("nothing fits", "nearest: ", "needs", "what would make it fit", "accelerators of the same kind"):
        assert part in result.output
    found = document(*asked, exit_code=1)
    assert found["best"] == []
    assert found["nearest"]["peak_bytes"] > found["limit_bytes"]
    assert found["remedies"]


def test_an_anti_pattern_of_an_asked_layout_is_told():
    result = plan(*REAL[:2], "--cluster", "h100:16", *REAL[4:], "--explain", "tp=16", columns=400)
    assert result.exit_code == 0, result.output
    assert "warning: tp=16 does not stay within nodes of 8" in result.output


def test_planning_needs_no_torch():
    runs_without({"torch", "shardwright.config"}, ["plan", *TINY])


def test_the_list_of_verbs_tells_what_their_own_help_tells():
    group: Any = typer.main.get_command(app)
    for name, told in VERBS.items():
        own = (group.commands[name].help or "").strip().splitlines()[0]
        assert own == told


@pytest.mark.prove
def test_a_batch_that_does_not_divide_has_better_ones_beside_it():
    asked = ("--model", "debug", "--cluster", "h100:4", "--seq-len", 128, "--top", 1, "--global-batch", 11)
    near = document(*asked)["near_batches"]
    assert {each["global_batch"] for each in near} <= {8, 12}
    assert near[0]["saved"] > 0.01
    said = f"--global-batch {near[0]['global_batch']} takes {near[0]['saved']:.1%} less time for a token"
    assert said in plan(*asked).output


def test_batches_that_divide_well_have_none_beside_them():
    of = Job(model=PRESETS["debug"], cluster=cluster("h100:64"), seq_len=128, global_batch=100)
    assert tried(of) == [128, 96]
    assert [tried(replace(of, global_batch=even)) for even in (64, 128, 8, 1)] == [[]] * 4


def test_a_plan_prints_as_a_table_and_shows_html_in_a_notebook():
    from shardwright import plan as python_plan

    result = python_plan("debug", "h100:2", global_batch=16, seq_len=128, top=3, prefer="fastest")
    assert result.recommended is not None
    assert str(result.recommended.choice) in str(result).splitlines()[3]
    assert f"{result.recommended.choice}</td>" in result._repr_html_()  # type: ignore[attr-defined]
    layouts = [line.split()[-1] for line in str(result).splitlines() if "micro_batch=" in line]
    assert len(layouts) == len(set(layouts))


def test_a_layout_that_is_as_fast_in_the_digits_that_are_shown_has_no_change_of_zero():
    taken = PricedLayout.from_choice(
        Job(model=PRESETS["debug"], cluster=cluster("h100:2"), seq_len=128, global_batch=16), read("tp=2")
    )
    assert verdict(taken, Alternative("another", taken, None), 1e9) == "as fast"


def test_the_memory_of_the_host_that_an_offload_needs_is_a_row():
    """8 bytes of parameters and gradients and 8 of optimizer states, of 8.03 billion parameters on one node."""
    asked = (*REAL, "--explain", "dp_shard=8,zero=3,recompute=full,offload_optimizer=cpu,offload_parameters=cpu")
    assert document(*asked)["host_bytes_per_node"] == pytest.approx(16 * 8.03e9, rel=0.01)
    assert "memory of the host: 120 GiB (128 GB) for each node of 8, by the plan; 5.8% of 2 TiB" in plan(*asked).output


@pytest.mark.prove
def test_an_offload_that_needs_more_memory_than_the_host_of_a_node_has_does_not_fit():
    """Of 70.6 billion parameters 16 bytes, in one node; what a node with RTX 4090 has is not published."""
    asked = ("--model", "llama-3.1-70b", "--cluster", "rtx4090:8", "--global-batch", 64, "--seq-len", 4096)
    offload = "zero=3,offload_optimizer=cpu,offload_parameters=cpu"
    unknown = plan(*asked)
    assert unknown.exit_code == 1
    assert f"--fix {offload}, with 1.03 TiB (1.13 TB) of host memory in each node of 8; how much" in unknown.output
    refused = plan(*asked, "--fix", offload, "--host-memory", "512GB")
    assert refused.exit_code == 1
    assert "or more than 477 GiB (512 GB) of host memory in each node" in refused.output
    assert "1.03 TiB (1.13 TB) of 477 GiB (512 GB) of host memory in each node" in refused.output
    larger = re.search(
        r"more memory of the host: (--host-memory \d+GiB), in nodes whose host has 1.03 T", refused.output
    )
    assert larger is not None, refused.output
    fits = document(*asked, "--fix", offload, *larger[1].split())
    needed, has = fits["recommended"]["host_bytes_per_node"], fits["host_memory_bytes_per_node"]
    assert needed == pytest.approx(16 * 70.55e9, rel=0.01)
    assert needed <= has == int(larger[1].split()[1].removesuffix("GiB")) * 2**30
    layout = fits["recommended"]["text"]
    explained = plan(*asked, "--explain", layout, "--host-memory", "512GB")
    assert explained.exit_code == 1
    assert re.search(r"memory of the host: 1.03 TiB .*; 220.\d% of 477 GiB \(512 GB\), does not fit", explained.output)
    assert "; how much a node has is not known, --host-memory SIZE says it" in plan(*asked, "--explain", layout).output
    mistyped = plan(*asked, "--host-memory", "512")
    assert mistyped.exit_code == 2
    assert "--host-memory 512: a number above 0 and a unit are needed" in mistyped.output
