"""Proves that `shardwright watch` shows a run that goes on, has ended, or is being copied, and ends with it."""

import json
import os
import signal
import socket
import subprocess
import threading
import time
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from shardwright.cli import watch as module
from shardwright.cli.followed import FollowedRun
from shardwright.cli.watch import watch
from shardwright.cli.watch_view import drawn, state_in_words
from shardwright.runs.records import EventRecord, append_event
from shardwright.system import signals
from tests.report.runs import evaluation, train_record, usual, write_run

app = typer.Typer()
app.command()(watch)
RANKS = {"slowest_rank": 1, "slowest_costs_s": 0.012, "stragglers": [1], "own_s_by_rank": [0.04, 0.052]}
SAVED = {"kind": "checkpoint", "step": 50, "blocked_s": 0.25, "took_s": 1.5, "n_bytes": 2**20}


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def owned_by(folder: Path, pid: int, host: str | None = None) -> None:
    """Write down who trains in a folder."""
    (folder / ".lock").write_text(f"process {pid} on {host or socket.gethostname()}\n")


def gone() -> int:
    """The number of a process that has ended."""
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


def add(folder: Path, text: str) -> None:
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(text)


def test_one_page_has_the_numbers_the_ranks_the_checkpoints_and_the_events(tmp_path: Path) -> None:
    folder = usual(tmp_path)
    add(folder, json.dumps(train_record(60, **RANKS)) + "\n" + json.dumps(SAVED) + "\n")
    append_event(folder, EventRecord("straggler", 52, "rank 1 is a straggler: 1.3 times", 1))
    owned_by(folder, os.getppid())
    done = run(folder, "--once")
    assert done.exit_code == 0, done.output
    words = " ".join(done.output.split())
    for part in (
        "debug, 250K parameters, on 2 ranks with ZeRO-3",
        "step 60 of 100, 2.56 s of steps left",
        "loss 4.8000",
        "validation loss 5.1000",
        "tokens per second 1K",
        "memory 1 MiB",
        "0 40 ms 77%",
        "1 52 ms 100%",
        "rank 1 takes 12 ms a step longer than the median of its peers",
        "step-00000050 1 MiB 1.5 s 250 ms",
        "straggler 52 1 rank 1 is a straggler: 1.3 times",
    ):
        assert part in words, done.output


def test_json_is_one_document_with_the_state_and_the_newest_records(tmp_path: Path) -> None:
    folder = usual(tmp_path)
    append_event(folder, EventRecord("skip", 50, "the loss is nan"))
    owned_by(folder, os.getppid())
    done = run(folder, "--json")
    assert done.exit_code == 0, done.output
    data = json.loads(done.stdout)
    assert (data["step"], data["steps"], data["running"]) == (50, 100, True)
    assert (data["train"]["step"], data["train"]["loss"], data["evaluation"]["loss"]) == (50, 5.0, 5.1)
    assert data["checkpoints"] == ["step-00000020", "step-00000050"]
    assert [event["text"] for event in data["events"]] == ["the loss is nan"]
    add(folder, json.dumps(train_record(60, loss=float("nan"))) + "\n")
    assert json.loads(run(folder, "--json").stdout, parse_constant=pytest.fail)["train"]["loss"] == "nan"


def local(step: int) -> str:
    saved = {"kind": "checkpoint", "step": step, "blocked_s": 0.002, "took_s": 0.5, "n_bytes": 2**20, "local": True}
    return json.dumps(saved) + "\n"


def test_the_last_local_checkpoints_are_shown_until_a_run_is_done(tmp_path: Path) -> None:
    """One that is killed goes on from them; one that is done has deleted them."""
    folder = usual(tmp_path)
    add(folder, json.dumps(SAVED) + "\n" + local(52))
    owned_by(folder, os.getppid())
    words = " ".join(run(folder, "--once").output.split())
    assert "step-00000050 1 MiB 1.5 s 250 ms step-00000052, local 1 MiB 500 ms 2 ms" in words, words
    assert "in all" not in words
    add(folder, local(54) + local(56))
    owned_by(folder, gone())
    words = " ".join(run(folder, "--once").output.split())
    assert "step-00000054, local 1 MiB 500 ms 2 ms step-00000056, local 1 MiB 500 ms 2 ms" in words, words
    assert "step-00000052" not in words
    assert "3 local ones so far, for which training stood still 6 ms in all" in words
    add(folder, json.dumps(train_record(100)) + "\n")
    words = " ".join(run(folder, "--once").output.split())
    assert ", local" not in words
    assert "step-00000050 1 MiB" in words


def test_local_checkpoints_are_shown_where_there_is_no_other_yet(tmp_path: Path) -> None:
    folder = write_run(tmp_path, [train_record(2)])
    add(folder, local(2))
    words = " ".join(run(folder, "--once").output.split())
    assert "Checkpoints" in words
    assert "step-00000002, local 1 MiB 500 ms 2 ms" in words


def test_without_a_terminal_the_lines_come_until_the_run_ends(tmp_path: Path, monkeypatch) -> None:
    """The run writes a record in two halves, an event and its last step, and is then gone."""
    folder = usual(tmp_path)
    owned_by(folder, os.getppid())
    looks, last = [], json.dumps(train_record(100))

    def goes_on(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) == 1:
            add(folder, last[:40])
        elif len(looks) == 2:
            add(folder, last[40:] + "\n")
            append_event(folder, EventRecord("save", 100, "saved it"))
        else:
            owned_by(folder, gone())

    monkeypatch.setattr(module.time, "sleep", goes_on)
    done = run(folder, "--every", "0.5")
    assert done.exit_code == 0, done.output
    lines = done.output.splitlines()
    assert [line.split("|")[0].split() for line in lines[:-2]] == [
        ["step", "0/100"],
        *(["step", f"{step}/100"] for step in (10, 20, 30, 40, 50)),
        ["step", "50/100"],
        ["step", "100/100"],
    ]
    assert lines[-2:] == ["save after step 100: saved it", "all 100 steps are done"]
    assert looks == [0.5] * 3


def test_of_a_long_run_the_last_lines_are_shown(tmp_path: Path) -> None:
    write_run(tmp_path, [train_record(step) for step in range(1, 101)])
    lines = run(tmp_path).output.splitlines()
    assert lines[0] == "(90 lines before)"
    assert lines[1].startswith("step    91/100 | ")
    assert len(lines) == 12


def test_of_a_long_run_evenly_spaced_steps_and_the_last_are_in_memory(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("shardwright.cli.followed.TRAIN_RECORDS", 8)
    monkeypatch.setattr("shardwright.runs.records.READ_BYTES", 1000)  # a few lines at once
    followed = FollowedRun(write_run(tmp_path, []))
    for last in range(1, 60):
        add(tmp_path, json.dumps(train_record(last)) + "\n")
        followed.look()
        steps = [record.step for record in followed.train]
        spacing = steps[1] - steps[0] if last > 1 else 1
        assert spacing in (1, 2, 4, 8, 16)
        assert steps == sorted({*range(1, last + 1, spacing), last})
        assert (len(steps) <= 8, followed.step) == (True, last)
    anew = FollowedRun(tmp_path)
    assert anew.look().n_losses == 59
    assert [record.step for record in anew.train] == steps


def test_a_run_that_goes_back_to_a_checkpoint_is_read_anew(tmp_path: Path) -> None:
    followed = FollowedRun(usual(tmp_path))
    assert followed.look().n_losses == 7
    write_run(tmp_path, [train_record(10), train_record(20)])
    followed.look()
    assert ([record.step for record in followed.train], followed.others) == ([10, 20], [])
    fresh = tmp_path / "fresh"
    fresh.write_text("".join(json.dumps(train_record(step)) + "\n" for step in (10, 20, 30)))
    fresh.replace(tmp_path / "metrics.jsonl")
    assert [record.step for record in followed.look().losses] == [10, 20, 30]
    assert followed.look().n_losses == 0


def test_a_folder_that_is_copied_while_it_is_written_is_read_at_every_length(tmp_path: Path) -> None:
    whole = (usual(tmp_path / "there") / "metrics.jsonl").read_bytes()
    here = write_run(tmp_path / "here", [])
    followed, n_records = FollowedRun(here), 0
    for length in range(0, len(whole) + 1, 7):
        (here / "metrics.jsonl").write_bytes(whole[:length])
        n_records += followed.look().n_losses
        assert n_records == whole[:length].count(b"\n")


@pytest.mark.parametrize(
    ("step", "owner", "quiet_s", "ended", "told"),
    [
        (100, "gone", 0, True, "all 100 steps are done"),
        (100, "there", 0, False, "the run continues to its end"),
        (50, "there", 1000, False, "step 50 of 100"),
        (50, "gone", 0, False, "stopped after step 50 of 100: its process is gone"),  # it may be restarted
        (
            50,
            "gone",
            1000,
            True,
            "written last 16 min 40 s ago; no checkpoint is complete, so it can only start again from step 0",
        ),
        (50, "elsewhere", 1000, False, "not a process of this machine"),
        (100, "elsewhere", 0, True, "all 100 steps are done"),
    ],
)
def test_when_a_run_has_ended(step: int, owner: str, quiet_s: float, ended: bool, told: str, tmp_path: Path) -> None:
    folder = write_run(tmp_path, [train_record(step)])
    pid = gone() if owner == "gone" else os.getppid()
    owned_by(folder, pid, "node7" if owner == "elsewhere" else None)
    for name in ("metrics.jsonl", "run.toml"):
        os.utime(folder / name, (time.time() - quiet_s,) * 2)
    followed = FollowedRun(folder)
    followed.look()
    assert followed.has_ended == ended
    assert told in state_in_words(followed)


@pytest.mark.parametrize("local", [False, True])
def test_a_killed_run_says_from_where_and_how_it_continues(local: bool, tmp_path: Path) -> None:
    keys = ("checkpoint.local_every=20", f"checkpoint.local={tmp_path}/local") if local else ()
    folder = write_run(tmp_path / "run", [train_record(40), train_record(50)], *keys)
    (tmp_path / "local/step-00000040" if local else folder / "checkpoints/step-00000040").mkdir(parents=True)
    owned_by(folder, gone())
    followed = FollowedRun(folder)
    followed.look()
    told = state_in_words(followed)
    assert told.startswith("stopped after step 50 of 100: its process is gone; written last ")
    assert told.endswith(f"this continues from step 40: shardwright train {folder}/run.toml --resume")
    shown = run(folder, "--once").stdout.replace("│", "")
    assert "".join(told.split()) in "".join(shown.split())  # a long path is broken where a line ends


def test_ctrl_c_ends_it_without_a_word(tmp_path: Path, monkeypatch) -> None:
    folder = usual(tmp_path)
    owned_by(folder, os.getppid())

    def interrupted(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(module.time, "sleep", interrupted)
    done = run(folder)
    assert (done.exit_code, done.stderr) == (0, "")


def test_ctrl_c_is_not_repeated_while_the_last_page_is_printed(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(signals, "_AGAIN_S", 0.02)
    folder, shown, sleep = usual(tmp_path), [], time.sleep
    owned_by(folder, os.getppid())

    def show(*arguments: object, **named: object) -> None:
        for _ in range(10):
            sleep(0.01)
        shown.append(True)

    monkeypatch.setattr(module, "show", show)
    monkeypatch.setattr(module.time, "sleep", lambda seconds: os.kill(os.getpid(), signal.SIGTERM))
    monkeypatch.setattr(module, "_lines", lambda run, news, every: module._live(run, every))
    assert (run(folder).exit_code, shown) == (0, [True])


def test_a_terminal_shows_a_page_that_changes(tmp_path: Path) -> None:
    """In a process of its own, whose stdout is a terminal."""
    folder = usual(tmp_path)
    owned_by(folder, os.getpid())
    ours, theirs = os.openpty()
    code = "import sys; from shardwright.cli.main import app; sys.argv[0] = 'shardwright'; app()"
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "110", "LINES": "40"}
    command = [os.sys.executable, "-c", code, "watch", str(folder), "--every", "0.1"]
    seen: list[bytes] = []
    with subprocess.Popen(command, stdout=theirs, stderr=theirs, env=environment) as process:
        os.close(theirs)
        reader = threading.Thread(target=read_all, args=(ours, seen))
        reader.start()
        until(lambda: b"5.0000" in b"".join(seen))
        add(folder, json.dumps(train_record(100)) + "\n")
        until(lambda: b"4.0000" in b"".join(seen))
        owned_by(folder, gone())
        assert process.wait(60) == 0
    reader.join()
    os.close(ours)
    text = b"".join(seen).decode()
    assert "\x1b[?1049h" in text  # another screen, and back
    last = text.rpartition("\x1b[?1049l")[2]
    assert "all 100 steps are done" in last
    assert "Traceback" not in text


def read_all(descriptor: int, into: list[bytes]) -> None:
    while True:
        try:
            into.append(os.read(descriptor, 4096))
        except OSError:  # the other end is closed
            return


def until(what, timeout_s: float = 60.0) -> None:
    ends_s = time.monotonic() + timeout_s
    while not what():
        assert time.monotonic() < ends_s
        time.sleep(0.05)


def test_a_run_that_is_starting_is_waited_for(tmp_path: Path, monkeypatch) -> None:
    looks = []

    def starts(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) == 1:
            (tmp_path / "run").mkdir()
            owned_by(tmp_path / "run", gone())
            (tmp_path / "run" / "ranks").mkdir()  # of the hang monitor, which may write before rank 0
        elif len(looks) == 3:
            write_run(tmp_path / "run", [train_record(100)])

    monkeypatch.setattr(module.time, "sleep", starts)
    done = run(tmp_path / "run")
    assert done.exit_code == 0, done.output
    assert "there is no run in" in done.stderr
    assert "waiting for a run to start there, up to 60 s" in done.stderr
    assert "all 100 steps are done" in done.stdout
    assert len(looks) == 3


def test_what_is_no_run_is_refused(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(module, "START_S", 0.0)
    assert run(tmp_path / "none").exit_code == 2
    (tmp_path / "empty").mkdir()
    empty = run(tmp_path / "empty", "--once")
    assert empty.exit_code == 2
    assert "has no metrics.jsonl and no run.toml" in empty.stderr
    monkeypatch.setattr(module, "START_S", 1e9)
    (tmp_path / "others").mkdir()
    (tmp_path / "others" / "notes.txt").touch()
    assert "has no metrics.jsonl" in run(tmp_path / "others").stderr
    assert run(tmp_path / "no folder" / "run").exit_code == 2
    (tmp_path / "file").touch()
    assert "is a file; give the folder of a run" in run(tmp_path / "file").stderr
    for every in ("0", "-1", "nan", "1e9"):
        refused = run(write_run(tmp_path / "run", []), "--every", every)
        assert (refused.exit_code, "--every" in refused.stderr) == (2, True)


def test_a_damaged_line_is_named_and_an_escape_of_the_terminal_is_not_obeyed(tmp_path: Path) -> None:
    folder = usual(tmp_path)
    append_event(folder, EventRecord("fault", 3, "\x1b]0;mine\x07 [bold]x[/]"))
    output = run(folder, "--once").output
    assert "\\x1b]0;mine\\x07 [bold]x[/]" in output
    assert "\x1b" not in output
    add(folder, '{"kind": "train", "step": "x"}\n')
    damaged = run(folder, "--once")
    assert damaged.exit_code == 2
    assert "metrics.jsonl, line 8 is not a record of a run" in damaged.stderr
    (folder / "metrics.jsonl").write_text("[" * 100_000 + "\n")
    nested = run(folder, "--once")
    assert (nested.exit_code, "nested too deeply" in nested.stderr) == (2, True)


def test_a_run_without_a_step_yet_is_shown(tmp_path: Path) -> None:
    folder = write_run(tmp_path, [])
    done = run(folder, "--once")
    assert done.exit_code == 0, done.output
    assert "no step has been logged yet" in done.output
    add(folder, json.dumps(evaluation(0, 6.2)) + "\n")
    assert run(folder, "--once").exit_code == 0


def test_steps_of_no_time_and_a_step_beyond_the_run_are_shown(tmp_path: Path) -> None:
    folder = usual(tmp_path)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    last = next(line for line in reversed(lines) if line["kind"] == "train")
    add(
        folder,
        json.dumps({key: 0.0 if key.endswith("_s") else value for key, value in last.items()} | {"step": 2**52}) + "\n",
    )
    shown = run(folder, "--once")
    assert shown.exit_code == 0, shown.exception
    assert "100%" in shown.output


def test_values_are_drawn_from_the_lowest_to_the_highest() -> None:
    assert drawn([1, 2, 3], 10) == "▁▅█"
    assert drawn([1, float("nan"), 3], 10) == "▁ █"
    assert drawn([1, 1, 3, 3], 2) == "▁█"
    assert drawn([5, 5], 10) == "▁▁"
    assert drawn([5], 10) == ""
