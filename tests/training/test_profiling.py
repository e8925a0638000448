"""Proves that given steps of given ranks are traced, that the traces of all ranks become one file on one clock, and
that snapshots of a GPU's allocator are written on request and on out of memory."""

import json
import pickle
import re
import runpy
import shlex
import sys
import tracemalloc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shardwright.config import RunConfig, parse
from shardwright.report.traces import merge_traces
from shardwright.runs.folder import trace_files
from shardwright.system.errors import ConfigError, InputError, WorkerError
from shardwright.training import profiling
from shardwright.training.hooks import RunStart
from shardwright.training.profiling import ProfileSteps, clock_ahead_ns, command_that_draws, memory_errors_explained
from shardwright.training.start import start
from tests.distributed import run_ranks
from tests.training.metric_records import config
from tests.training.runs import train, write_run_file


def profiled(folder: Path, device: str = "auto", **keys: object) -> RunConfig:
    return parse(config(folder).model_dump(exclude_none=True) | {"profile": keys, "device": device})


def test_the_steps_and_ranks_that_a_run_file_names_are_traced_and_merged_on_one_clock(tokens: Path, tmp_path: Path):
    run_file = write_run_file(tmp_path, tokens)
    settings = ("steps=5", "profile.first_step=3", "profile.steps=2", "checkpoint.every=0", "evaluation.samples=0")
    told = train(run_file, *(word for each in settings for word in ("--set", each))).stdout
    out = tmp_path / "out"
    assert "traced steps 3 to 4: shardwright report " in told
    assert [path.relative_to(out) for path in trace_files(out)] == [
        Path("profile/steps-3-4/rank-0.json"),
        Path("profile/steps-3-4/rank-1.json"),
    ]
    merge_traces(out, tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {0: "rank 0", 1: "rank 1"}
    for rank in names:
        phases = [event for event in events if event["pid"] == rank and event.get("cat") == "user_annotation"]
        for phase in ("data", "forward_backward", "optimizer"):
            assert len([each for each in phases if each["name"] == phase and "dur" in each]) == 2, (rank, phase)
    spans = [[e for e in events if e["pid"] == rank and e["name"] == "forward_backward"] for rank in names]
    for ours, theirs in zip(*spans, strict=True):  # all-reduces join them
        assert ours["ts"] < theirs["ts"] + theirs["dur"]
        assert theirs["ts"] < ours["ts"] + ours["dur"]
    assert min(event["ts"] for event in events if "ts" in event) == 0


def ahead_of_a_fake_clock(skews_s: tuple[float, ...]) -> int:
    """What a rank of another host finds whose clock is ahead."""
    import time

    rank = torch.distributed.get_rank()
    return clock_ahead_ns(f"host-{rank}", lambda: time.time_ns() + round(skews_s[rank] * 1e9))


def test_ranks_find_by_how_much_their_hosts_clocks_are_ahead():
    skews_s = (-500.0, 1000.0)
    first, second = run_ranks(ahead_of_a_fake_clock, 2, skews_s)
    assert first == 0
    assert second / 1e9 == pytest.approx(1500.0, abs=100.0), "barriers of a loaded machine are far shorter than 100 s"
    everyone = [("a", [0, 10, 20]), ("a", [1, 9, 25]), ("b", [100, 111, 117]), ("b", [104, 108, 119])]
    ahead = [profiling._ahead_ns(everyone, host) for host, _ in everyone]
    assert ahead[:2] == [0, 0], "ranks of one host share a clock"
    assert ahead[2] == ahead[3] == 100


def trace(rank: int, ahead_ns: int, base_ns: int, events: list[Any]) -> dict[str, Any]:
    about = {"rank": rank, "host": f"host-{rank}", "clock_ahead_ns": ahead_ns, "coordinates": {"tp": rank}}
    return {"schemaVersion": 1, "shardwright": about, "baseTimeNanoseconds": base_ns, "traceEvents": events}


def write_traces(out: Path, *traces: Any) -> Path:
    folder = out / "profile" / "steps-10-12"
    folder.mkdir(parents=True, exist_ok=True)
    for rank, content in enumerate(traces):
        (folder / f"rank-{rank}.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


def test_merged_traces_keep_threads_and_arrows_of_each_rank_apart(tmp_path: Path):
    def events(at_us: float) -> list[Any]:
        here = {"pid": 77, "tid": 5}
        return [
            {"ph": "M", "name": "process_labels", "pid": 77, "tid": 0, "args": {"labels": "CPU"}},
            {"ph": "M", "name": "thread_name", **here, "args": {"name": "main"}},
            {"ph": "X", "name": "mm", **here, "ts": at_us, "dur": 2.0, "args": {"External id": 1}},
            {"ph": "s", "name": "ac2g", **here, "ts": at_us, "id": 3},
            {"ph": "f", "name": "ac2g", "pid": 0, "tid": "stream 7", "ts": at_us + 1, "id": 3},
            {"ph": "X", "name": "no time", **here},
        ]

    # The clock of host 1 is 2 s ahead, and its base is 3 s later: both ranks multiply at the same time.
    write_traces(tmp_path, trace(0, 0, 10**18, events(5e6)), trace(1, 2 * 10**9, 10**18 + 3 * 10**9, events(4e6)))
    (tmp_path / "profile" / "steps-2-3").mkdir()
    merge_traces(tmp_path, tmp_path / "t.json")
    merged = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    matmuls = [event for event in merged if event["name"] == "mm"]
    assert [(event["pid"], event["ts"], event["dur"]) for event in matmuls] == [(0, 0.0, 2.0), (1, 0.0, 2.0)]
    assert [event["id"] for event in merged if event["ph"] in "sf"] == ["0.3", "0.3", "1.3", "1.3"]
    threads = {
        (event["pid"], event["tid"]): event["args"]["name"] for event in merged if event["name"] == "thread_name"
    }
    assert threads[0, matmuls[0]["tid"]] == "CPU: main"
    assert len(threads) == 4
    labels = {event["pid"]: event["args"]["labels"] for event in merged if event["name"] == "process_labels"}
    assert labels == {0: "host-0: tp 0", 1: "host-1: tp 1"}
    assert "no time" not in {event["name"] for event in merged}


def test_the_memory_of_a_merge_does_not_grow_with_the_number_of_ranks(tmp_path: Path):
    events = [{"ph": "X", "name": f"op {n}", "pid": 1, "tid": 1, "ts": float(n), "dur": 0.5} for n in range(2000)]

    def peak_bytes(n_ranks: int) -> int:
        out = tmp_path / f"of-{n_ranks}"
        write_traces(out, *(trace(rank, 0, 0, events) for rank in range(n_ranks)))
        tracemalloc.start()
        try:
            merge_traces(out, tmp_path / f"{n_ranks}.json")
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    peak_bytes(1)  # caches of libraries
    assert peak_bytes(6) < 1.3 * peak_bytes(1)
    merged = json.loads((tmp_path / "6.json").read_text())["traceEvents"]
    assert len([event for event in merged if event["ph"] == "X"]) == 6 * 2000


GOOD = trace(0, 0, 0, [])


@pytest.mark.parametrize(
    "content",
    [
        "", "[", "[]", "3", "[" * 100_000, {}, {"traceEvents": []}, GOOD | {"traceEvents": {}},
        GOOD | {"traceEvents": [3]},
        GOOD | {"shardwright": None}, trace(-1, 0, 0, []), trace(0, 10**300, 0, []), trace(0, 0, 10**300, []),
    ],
)  # fmt: skip
def test_a_damaged_trace_is_named(tmp_path: Path, content: Any):
    folder = write_traces(tmp_path, content)
    with pytest.raises(
        InputError, match=f"{folder / 'rank-0.json'} is not the trace of a rank .*trace the steps again"
    ):
        merge_traces(tmp_path, tmp_path / "t.json")


def test_strange_events_are_left_out_and_links_are_not_followed(tmp_path: Path):
    good = {"ph": "X", "name": "mm", "pid": 1, "tid": 1, "ts": 1.0}
    strange = [{"ph": ["X"]}, {"ts": 10**400}, {"ts": float("nan")}, {"ts": "1"}, {"ph": "M", "args": 3}, {"pid": [[]]}]
    folder = write_traces(tmp_path, trace(0, 0, 0, [good | each for each in strange]))
    merge_traces(tmp_path, tmp_path / "t.json")
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert len([event for event in events if event["name"] == "mm"]) == 1
    (folder / "rank-1.json").symlink_to("/dev/zero")
    with pytest.raises(InputError, match="a link out of this folder, to /dev/zero"):
        merge_traces(tmp_path, tmp_path / "t.json")


def test_a_run_without_traces_is_told_the_key(tmp_path: Path):
    with pytest.raises(InputError, match=r"has no trace of a step; set profile\.first_step"):
        merge_traces(tmp_path, tmp_path / "t.json")
    with pytest.raises(InputError, match=r"valid: a file named \*\.json"):
        merge_traces(tmp_path, tmp_path / "t.svg")


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"first_step": 10}, "profile.first_step=10 is after the last step of the run, steps=9; valid: 1 to 9"),
        ({"first_step": 1, "ranks": [0, 1, -1]}, "the layout has 1 ranks, so there is no rank 1, -1; valid: 0 to 0"),
        ({"ranks": [0]}, "profile.ranks=[0] without profile.first_step"),
        ({"steps": 2}, "profile.steps=2 without profile.first_step"),
        ({"first_step": 0}, "profile.first_step"),
        ({"first_step": 1, "steps": 101}, "profile.steps"),
    ],
)
def test_a_profile_that_cannot_be_is_refused(tmp_path: Path, keys: dict[str, object], told: str):
    with pytest.raises(ConfigError, match=re.escape(told)):
        profiled(tmp_path, **keys)


def test_snapshots_of_memory_on_a_cpu_are_refused_before_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ConfigError, match=r"profile\.memory=true with device='cpu': only the allocator of GPUs"):
        profiled(tmp_path, "cpu", memory=True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InputError, match=r"profile\.memory=true with no GPU here"):
        start(profiled(tmp_path, memory=True))
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The calls of PyTorch's allocator, in the place of a GPU."""
    calls: list[Any] = []
    monkeypatch.setattr(profiling, "record_memory_history", lambda *enabled: calls.append(("record", *enabled)))
    monkeypatch.setattr(profiling, "dump_memory_snapshot", lambda path: (Path(path).touch(), calls.append(path)))
    return calls


def test_a_snapshot_is_written_on_out_of_memory_with_the_command_that_draws_it(tmp_path: Path, allocator: list[Any]):
    for memory, drawing in ((False, "segment_plot"), (True, "trace_plot")):
        with (
            pytest.raises(
                WorkerError, match=r"rank 2: CUDA out of memory\.; to need less: less; snapshot of the allocator: "
            ) as told,
            memory_errors_explained(profiled(tmp_path, memory=memory), 2, "less"),
        ):
            raise torch.OutOfMemoryError("CUDA out of memory.\nmore lines")
        snapshot = tmp_path / "profile" / "memory-rank-2.pickle"
        assert str(told.value).endswith(f"python -m torch.cuda._memory_viz {drawing} {snapshot} -o memory.html")
        assert allocator.pop() == str(snapshot)


def test_a_snapshot_that_cannot_be_written_does_not_hide_out_of_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "profile").write_text("in the way")
    with (
        pytest.raises(WorkerError, match=r"rank 0: full; to need less: less$"),
        memory_errors_explained(profiled(tmp_path), 0, "less"),
    ):
        raise torch.OutOfMemoryError("full")


def test_allocations_are_recorded_from_the_start_of_a_run_to_its_end(tmp_path: Path, allocator: list[Any]):
    said: list[str] = []
    hook = ProfileSteps(
        profiled(tmp_path, memory=True),
        0,
        torch.device("cuda", 0),
        SimpleNamespace(say=said.append),  # type: ignore[arg-type]
    )
    hook.on_start(RunStart())
    hook.close()
    assert allocator == [("record",), ("record", None)]


@pytest.mark.parametrize("history", [False, True])
def test_the_command_that_a_run_prints_draws_a_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], history: bool
):
    snapshot = tmp_path / "a snapshot.pickle"
    snapshot.write_bytes(pickle.dumps({"segments": [], "device_traces": [[]], "allocator_settings": {}}))
    python, option, module, *arguments = shlex.split(command_that_draws(snapshot, history))
    assert (python, option) == ("python", "-m")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [module, *arguments])
    runpy.run_module(module, run_name="__main__")
    assert "<" in (tmp_path / "memory.html").read_text()
