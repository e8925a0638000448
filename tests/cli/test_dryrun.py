"""Proves that `shardwright dryrun` answers fits with 0, does not fit with 1 and what would, and bad input with 2."""

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from torch.cuda._memory_viz import trace as as_program
from typer.testing import CliRunner, Result

from shardwright.cli.main import app
from tests.report.pictures import assert_page_never_scrolls, readable_pictures

RUN = """
out = "nowhere"
steps = 4
[model]
preset = "debug"
n_layers = 2
[data]
path = "/no/data/is/needed"
[batch]
seq_len = 64
global_batch = 4
"""


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(RUN)
    return path


def dryrun(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["dryrun", *map(str, arguments)], env={"COLUMNS": "160"})


def test_it_says_what_a_rank_needs_and_whether_it_fits(run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    page, trace, snapshot = (tmp_path / name for name in ("dry.html", "trace.json", "snapshot.pickle"))
    given = (run_file, "--set", "layout.tp=2", "--ranks", "all", "--json", "--html", page)
    given = (*given, "--trace", trace, "--snapshot", snapshot, "--set", "precision.compile=true")
    with readable_pictures(monkeypatch):
        result = dryrun(*given, "--device-memory", "1GiB")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["fits"]
    assert found["compile_left_out"]
    assert "precision.compile is left out" in page.read_text()
    assert found["disagreements"] == []
    calls = [call for each in found["ranks"] for call in each["messages"] if call["n_ranks"] > 1]
    assert found["checked"] == {"ranks": 2, "calls": len(calls), "communicators": 1, "matched_sends": 0}
    assert [each["rank"] for each in found["ranks"]] == [0, 1]
    rank = found["ranks"][0]
    assert rank["peak"]["bytes"] == sum(rank["peak"]["kinds"].values()) == max(each["bytes"] for each in rank["curve"])
    assert {(each["axis"], each["op"]) for each in rank["traffic"]} >= {("tp", "all-gather"), ("tp", "reduce-scatter")}
    for each in rank["traffic"]:
        if each["axis"] == "tp" and each["op"] in ("all-gather", "reduce-scatter"):
            assert (each["plan_calls"], each["plan_bytes"]) == (each["calls"], each["bytes"])
    assert {each["line"].partition(":")[0] for each in rank["largest"]} >= {"model/matmul.py"}
    assert_page_never_scrolls(page.read_text())
    peaks = [each["peak"]["bytes"] for each in found["ranks"]]
    assert peaks_of_trace(json.loads(trace.read_text())) == peaks
    assert peaks_of_snapshot(pickle.loads(snapshot.read_bytes())) == peaks


def peaks_of_trace(trace: dict[str, Any]) -> list[int]:
    """The most bytes of each rank; its actions have to follow one another."""
    found = []
    for rank in (0, 1):
        events = [event for event in trace["traceEvents"] if event["pid"] == rank]
        actions = [event for event in events if event["ph"] == "X" and event["tid"] == 1]
        assert [event["ts"] + event["dur"] for event in actions[:-1]] == [event["ts"] for event in actions[1:]]
        assert len([event for event in events if event["ph"] == "X" and event["tid"] == 2]) > 10
        found.append(max(sum(event["args"].values()) for event in events if event["ph"] == "C"))
    return found


def peaks_of_snapshot(snapshot: dict[str, Any]) -> list[int]:
    """The most bytes of each rank; no address is given to two tensors at a time, and PyTorch's own reader takes it."""
    assert as_program(snapshot).count("= MEM[") > 100
    found = []
    for entries in snapshot["device_traces"]:
        alive: dict[int, int] = {}
        most = 0
        for entry in entries:
            if entry["action"] == "alloc":
                assert entry["addr"] not in alive
                alive[entry["addr"]] = entry["size"]
            elif entry["action"] == "free_completed":
                assert alive.pop(entry["addr"]) == entry["size"]
            most = max(most, sum(alive.values()))
        found.append(most)
    return found


@pytest.mark.prove
def test_what_does_not_fit_is_answered_with_1(run_file: Path):
    result = dryrun(run_file, "--device-memory", "64MiB")
    assert result.exit_code == 1, result.output
    assert "does not fit" in result.stdout
    assert "none of the changes that were tried makes it fit" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "the memory of a rank's device is not known; give --device-memory 80GiB"),
        (("--device-memory", "80GiB", "--steps", "1000000"), "1,000,000 steps: at most 100 are taken"),
        (("--device-memory", "80"), "device memory 80: a number above 0 and a unit are needed"),
        (("--device-memory", "80GiB", "--cluster", "h100"), "both set the memory"),
        (("--cluster", "h1000"), "cluster 'h1000' is not known"),
        (("--cluster", "h100:7"), "it has 7 accelerators, and the layout of the run file"),
        (("--device-memory", "80GiB", "--rank", "0", "--ranks", "all"), "--rank 0 and --ranks all: leave one out"),
        (("--device-memory", "80GiB", "--ranks", "some"), "--ranks some: valid: all"),
        (("--device-memory", "80GiB", "--rank", "1"), "rank 1 is not in the world of the layout"),
        (("--device-memory", "80GiB", "--set", "layout.tp=3"), "tp=3"),
        (("--device-memory", "80GiB", "--html", "no/such/folder.html"), "there is no folder no/such"),
    ],
)
def test_bad_input_is_refused_with_a_sentence(run_file: Path, arguments: tuple[str, ...], said: str):
    result = dryrun(run_file, *arguments)
    assert result.exit_code == 2, result.output
    assert said in result.stderr.replace("\n", " ")
    assert "Traceback" not in result.stderr


@pytest.mark.prove
def test_training_refuses_a_run_that_does_not_fit(run_file: Path):
    given = ["train", str(run_file), "--dryrun-first", "--set", "memory_gib=0.05"]
    result = CliRunner().invoke(app, given, env={"COLUMNS": "160"})
    assert result.exit_code == 2, result.output
    assert "rank 0 needs" in result.stderr
