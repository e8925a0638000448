"""Proves that a run that is interrupted anywhere, and resumed on any layout, goes on as if nothing had happened.

Every test lets the real `shardwright train` run with real workers (runs.py), ends it in the middle of something, and
compares what the resumed run writes with a run that was left alone. Dropout is on in all of them.
"""

import fcntl
import functools
import os
import re
import select
import signal
import subprocess
import sys
import termios
import textwrap
import time
from pathlib import Path

import pytest

from shardwright.system.signals import send_signal
from tests.marks import prove, rest_prove
from tests.training.runs import checkpoints, checksums, kill_itself, train, training, trajectory


def same_run(run_file: Path, uninterrupted: Path) -> None:
    """Each step once, every loss and norm to the last bit, and the same tensors in the end."""
    assert [step for step, _, _ in trajectory(run_file)] == list(range(1, 21))
    assert trajectory(run_file) == trajectory(uninterrupted)
    assert checksums(run_file, 20) == checksums(uninterrupted, 20)


def killed_in_step_13(rank: int) -> None:
    """Rank 1 dies between the backward pass and the update."""
    from shardwright.training.step import Trainer

    update, calls = Trainer.update, []

    def update_or_die(self, rate):
        calls.append(rate)
        if rank == 1 and len(calls) == 13:
            kill_itself()
        return update(self, rate)

    Trainer.update = update_or_die


def killed_in_the_middle_of_a_shard(rank: int) -> None:
    """Rank 1 dies when half of its second file is written."""
    from shardwright.training.checkpoint import shards

    write, calls = shards.write_safetensors, []

    def write_half(path, entries, make):
        write(path, entries, make)
        calls.append(path)
        if rank == 1 and len(calls) == 2:
            os.truncate(path, path.stat().st_size // 2)
            kill_itself()

    shards.write_safetensors = write_half


def killed_between_shards_and_manifest(rank: int) -> None:
    from shardwright.training.checkpoint.store import CheckpointStore

    complete = CheckpointStore.complete

    def die_or_complete(self, step, manifest, run_toml):
        if step == 10:
            kill_itself()
        complete(self, step, manifest, run_toml)

    CheckpointStore.complete = die_or_complete


def killed_before_the_rename(rank: int) -> None:
    from shardwright.training.checkpoint.store import CheckpointStore

    publish = CheckpointStore.publish

    def die_or_publish(self, step):
        if step == 10:
            kill_itself()
        publish(self, step)

    CheckpointStore.publish = die_or_publish


def killed_after_the_rename(rank: int) -> None:
    """Rank 0 dies when the checkpoint is published but the older ones are not yet deleted."""
    from shardwright.training.checkpoint import store

    rmtree = store.shutil.rmtree

    def die_or_delete(path, **how):
        if path.name == "step-00000005.deleted.partial":
            kill_itself()
        rmtree(path, **how)

    store.shutil.rmtree = die_or_delete


FAULTS = {
    killed_in_step_13: (1, 10, ["step-00000005", "step-00000010"]),
    killed_in_the_middle_of_a_shard: (1, 5, ["step-00000005", "step-00000010.partial"]),
    killed_between_shards_and_manifest: (0, 5, ["step-00000005", "step-00000010.partial"]),
    killed_before_the_rename: (0, 5, ["step-00000005", "step-00000010.partial"]),
    killed_after_the_rename: (0, 15, ["step-00000005.deleted.partial", "step-00000010", "step-00000015"]),
}


@pytest.mark.parametrize("fault", rest_prove(FAULTS), ids=lambda fault: fault.__name__)
def test_after_a_kill_the_resumed_run_is_the_uninterrupted_one_to_the_last_bit(fault, run_file, uninterrupted):
    rank, resumed_step, left = FAULTS[fault]
    killed = train(run_file, fault=fault, expect=3)
    assert f"error: rank {rank} was killed by signal 9 (SIGKILL)" in killed.stderr
    assert "Traceback" not in killed.stderr
    assert checkpoints(run_file) == left
    resumed = train(run_file, "--resume")
    assert f"resumed from {run_file.parent}/out/checkpoints/step-{resumed_step:08d}" in resumed.stdout
    assert "changed since then" not in resumed.stdout
    assert f"step {resumed_step}, {4 * resumed_step} samples seen" in resumed.stdout
    same_run(run_file, uninterrupted)
    assert checkpoints(run_file) == ["step-00000015", "step-00000020"]


def slowly(rank: int) -> None:
    """Steps that leave the time to send a signal in the middle of one."""
    from shardwright.training.step import Trainer

    update = Trainer.update

    def slow(self, rate):
        time.sleep(0.1)
        return update(self, rate)

    Trainer.update = slow


@pytest.mark.parametrize(
    "number",
    rest_prove([signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1], signal.SIGINT),
    ids=lambda number: number.name,
)
def test_a_signal_finishes_the_step_saves_and_says_how_to_go_on(number, run_file, uninterrupted):
    with training(run_file, fault=slowly) as run:
        run.wait_for(lambda: len(trajectory(run_file)) >= 2)
        os.kill(run.process.pid, number)
        while number == signal.SIGUSR1 and run.process.is_alive():  # a scheduler may repeat it until the end
            send_signal(run.process.pid, number)
            time.sleep(0.001)
        assert run.wait() == 75
    stopped = re.search(
        r"stopped at step (\d+) of 20, as asked; the last checkpoint.*\n *shardwright train \S*/run.toml --resume",
        run.stdout,
    )
    assert stopped, run.stdout
    assert 2 < int(stopped[1]) < 20
    assert checkpoints(run_file)[-1] == f"step-{int(stopped[1]):08d}"
    assert f"{number.name}: finishing the step" in run.stderr
    train(run_file, "--resume")
    same_run(run_file, uninterrupted)


@prove
def test_a_terminal_that_goes_away_ends_the_run_saved(run_file):
    def own_terminal() -> None:
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)

    ours, theirs = os.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "shardwright", "train", str(run_file), "--set", "steps=2000"],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        preexec_fn=own_terminal,
    )
    os.close(theirs)
    try:
        until = time.monotonic() + 120
        while process.poll() is None and len(trajectory(run_file)) < 2 and time.monotonic() < until:
            if select.select([ours], [], [], 0.05)[0]:
                os.read(ours, 2**16)
        os.close(ours)
        assert process.wait(120) == 75
    finally:
        process.kill()
    stopped = len(trajectory(run_file))
    assert 2 <= stopped < 2000
    assert checkpoints(run_file)[-1] == f"step-{stopped:08d}"


def test_a_second_ctrl_c_leaves_at_once(run_file):
    with training(run_file, fault=slowly) as run:
        run.wait_for(lambda: len(trajectory(run_file)) >= 1)
        os.kill(run.process.pid, signal.SIGINT)
        run.wait_for(lambda: "SIGINT" in run.stderr)
        os.kill(run.process.pid, signal.SIGINT)
        assert run.wait() == 130
    assert "interrupted" in run.stderr
    assert "Traceback" not in run.stderr


def waits_before_it_trains(rank: int) -> None:
    from shardwright.training import run

    def wait(*arguments, **named):
        print("building", flush=True)
        time.sleep(600)

    run.build_model = wait


def test_ctrl_c_before_the_first_step_is_no_failure(run_file):
    with training(run_file, fault=waits_before_it_trains) as run:
        run.wait_for(lambda: "building" in run.stdout)
        os.kill(run.process.pid, signal.SIGINT)
        assert run.wait() == 130
    assert "interrupted" in run.stderr
    assert "Traceback" not in run.stderr


def records_samples(folder: Path, rank: int) -> None:
    """Every rank writes down the samples of each step that it takes."""
    from shardwright.training.step import Trainer

    step = Trainer.step
    file = (folder / f"samples-{os.getpid()}").open("w")

    def record(self, batch, number, rate):
        file.write("".join(f"{i}\n" for i in batch.sample_ids_AB.flatten().tolist()))
        file.flush()
        return step(self, batch, number, rate)

    Trainer.step = record


@prove
def test_a_run_resumed_on_other_layouts_sees_each_sample_once_and_learns_the_same(run_file, uninterrupted):
    hops = [
        ("layout.dp_shard=2", "layout.zero=1"),
        ("layout.dp_shard=1", "layout.zero=0"),
        ("layout.dp_shard=4", "layout.zero=3"),
        ("layout.dp_shard=2", "layout.dp_replicate=2", "layout.zero=2"),
        ("layout.dp_shard=1", "layout.dp_replicate=2", "layout.zero=0"),
    ]
    recorder = functools.partial(records_samples, run_file.parent)
    for i, hop in enumerate(hops):
        settings = [argument for setting in (*hop, f"steps={4 * i + 4}") for argument in ("--set", setting)]
        run = train(run_file, *settings, *(["--resume"] if i else []), fault=recorder)
        said = "changed since then: " in run.stdout
        assert said == bool(i), run.stdout
    assert "steps 16 to 20" in run.stdout
    assert "layout.dp_shard 2 to 1" in run.stdout
    seen = [int(i) for path in run_file.parent.glob("samples-*") for i in path.read_text().split()]
    assert sorted(seen) == list(range(20 * 4))
    for (step, loss, norm), (same_step, same_loss, same_norm) in zip(
        trajectory(run_file), trajectory(uninterrupted), strict=True
    ):
        assert step == same_step
        # The same sums in another order: float32 rounds at 6e-8, a few hundred times over 20 steps.
        assert loss == pytest.approx(same_loss, rel=1e-5)
        assert norm == pytest.approx(same_norm, rel=1e-4)


@prove
def test_a_run_goes_on_cut_by_tensor_and_context_parallelism_and_learns_the_same(run_file, uninterrupted):
    hops = [
        ("layout.dp_shard=1", "layout.tp=2"),  # 2 query heads, and copies of the 1 kv head
        ("layout.dp_shard=1", "layout.cp=2", "layout.zero=2"),
        ("layout.dp_shard=2", "layout.tp=2", "layout.zero=3"),
        ("layout.dp_shard=1", "layout.cp=2", "layout.cp_method=ulysses"),
        ("layout.dp_shard=1", "layout.cp=2", "layout.tp=2", "layout.sequence_parallel=false", "layout.recompute=full"),
    ]
    for i, hop in enumerate(hops):
        settings = [argument for setting in (*hop, f"steps={4 * i + 4}") for argument in ("--set", setting)]
        train(run_file, *settings, *(["--resume"] if i else []))
    for ours, theirs in zip(trajectory(run_file), trajectory(uninterrupted), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4), "step, loss and norm"


def test_a_run_that_is_done_resumes_to_nothing(run_file, uninterrupted):
    before = (uninterrupted.parent / "out" / "metrics.jsonl").read_text()
    run = train(uninterrupted, "--resume")
    assert "step 20, 80 samples seen" in run.stdout
    assert (uninterrupted.parent / "out" / "metrics.jsonl").read_text() == before


@pytest.mark.prove
def test_the_run_file_that_a_resumed_run_leaves_does_not_resume_by_itself(run_file):
    train(run_file, "--set", "steps=5")
    train(run_file, "--resume", "--set", "steps=6")
    kept = [run_file.parent / "out" / place for place in ("run.toml", "checkpoints/step-00000006/run.toml")]
    assert ['resume = "no"' in path.read_text() for path in kept] == [True, True]
    again = run_file.parent / "again.toml"
    again.write_text(kept[0].read_text())
    assert "already holds a run, saved up to step-00000006; add --resume" in train(again, expect=2).stderr


def flip(path: Path, at: int = -1) -> None:
    """Change one bit of a file."""
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


@prove
def test_resume_passes_over_damaged_checkpoints_and_says_so_and_refuses_when_all_are(run_file, uninterrupted):
    train(run_file, "--set", "steps=15", "--set", "checkpoint.keep_last=3")
    folder = run_file.parent / "out" / "checkpoints"
    flip(folder / "step-00000015" / "rank-00001.safetensors")
    os.truncate(folder / "step-00000010" / "manifest.json", 3000)
    # keep_last=1 counts the new good ones: the damaged ones, though of later steps, do not push them out.
    resumed = train(run_file, "--resume", "--set", "checkpoint.keep_last=1", "--set", "steps=7")
    said = resumed.stdout
    assert re.search(
        r"step-00000015/rank-00001.safetensors is damaged: the bytes of \S+ do not have the xxh3_128", said
    )
    assert "step-00000010/manifest.json is damaged" in said
    assert f"resumed from {folder}/step-00000005" in said
    assert checkpoints(run_file) == ["step-00000007"]
    train(run_file, "--resume")
    same_run(run_file, uninterrupted)

    before = trajectory(run_file)
    for path in folder.iterdir():
        flip(path / "rank-00000.safetensors")
    refused = train(run_file, "--resume", expect=2)
    assert refused.stderr.count("is damaged") == 2
    assert "no checkpoint in" in refused.stderr
    assert "Traceback" not in refused.stderr
    assert trajectory(run_file) == before
    assert checkpoints(run_file) == ["step-00000015", "step-00000020"]


@pytest.mark.prove
def test_resume_by_another_model_or_precision_is_refused_and_changes_nothing(run_file):
    train(run_file, "--set", "steps=10")
    before = {
        p: p.read_bytes()
        for p in sorted((run_file.parent / "out").rglob("*"))
        if p.suffix != ".log" and p.name != ".lock" and p.is_file()
    }
    for setting, words in {
        "model.d_ffn=32": "it is of another model: d_ffn=24, and this run has 32",
        'precision.compute="fp64"': "model/embedding.weight is float32 [300, 16], and this run has float64 [300, 16]",
        "steps=8": "is at step 10, beyond the steps=8",
    }.items():
        refused = train(run_file, "--resume", "--set", setting, expect=2)
        # Of the newest only: an older checkpoint of the same run is no better.
        assert words in refused.stderr
        assert "step-00000005" not in refused.stderr + refused.stdout
        assert "Traceback" not in refused.stderr
    assert {p: p.read_bytes() for p in before} == before


def test_a_folder_that_holds_a_run_is_not_written_over(run_file):
    train(run_file, "--set", "steps=10")
    again = train(run_file, expect=2)
    assert "already holds a run, saved up to step-00000010; add --resume" in again.stderr
    older = run_file.parent / "out" / "checkpoints" / "step-00000005"
    back = train(run_file, "--set", f"checkpoint.resume={older}", expect=2)
    assert "which a run from" in back.stderr
    train(run_file, "--set", f"checkpoint.resume={older}", "--set", f"out={run_file.parent}/branch")
    assert [step for step, _, _ in trajectory(run_file, "branch")] == list(range(6, 21))


SITE = """
import sys
if any("forkserver" in word for word in sys.orig_argv):  # the server that ranks are forked from
    import os, signal
    from shardwright.training.step import Trainer
    update, calls = Trainer.update, []
    def update_or_die(self, rate):
        calls.append(rate)
        if os.environ.get("RANK") == "1" and len(calls) == 8:
            os.kill(os.getpid(), signal.SIGKILL)
        return update(self, rate)
    Trainer.update = update_or_die
"""


@prove
def test_the_installed_command_with_workers_of_its_own_resumes_after_a_kill(run_file, uninterrupted):
    (run_file.parent / "sitecustomize.py").write_text(textwrap.dedent(SITE))
    command = [sys.executable, "-m", "shardwright", "train", str(run_file)]
    fault = {"PYTHONPATH": f"{run_file.parent}:{os.environ.get('PYTHONPATH', '')}"}
    killed = subprocess.run(command, env=os.environ | fault, capture_output=True, text=True)
    assert killed.returncode == 3, killed.stderr
    assert killed.stderr.startswith("error: rank 1 was killed by signal 9 (SIGKILL)")
    assert re.search(r"saved up to .*step-\d{8}; continue from it with --resume", killed.stderr), killed.stderr
    resumed = subprocess.run([*command, "--resume"], capture_output=True, text=True)
    assert resumed.returncode == 0, resumed.stderr
    same_run(run_file, uninterrupted)


def test_a_resume_that_finds_nothing_says_that_it_starts_anew(run_file):
    run = train(run_file, "--resume", "--set", "steps=1", "--set", "lr_schedule.warmup_steps=0")
    assert "out/checkpoints to resume from: starting from step 0" in run.stdout
