"""Proves that a worker that fails in any way ends the run, in its own words, and leaves no process.

The workers are real processes under the real launcher (runs.py); what happens to them is put into rank 1.
"""

import ctypes
import os
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

from shardwright.runs.records import read_events
from shardwright.training import launch
from tests.marks import prove
from tests.training.runs import Run, is_alive, kill_itself, records, train, training, trajectory, write_run_file

WITHIN_S = 90.0
"""For a run to end after its fault, also on a busy machine; left to itself a collective waits for 600 s."""


def in_step_3_of_rank_1(rank: int, what) -> None:
    from shardwright.training.step import Trainer

    forward_backward, calls = Trainer.forward_backward, []

    def fail(self, batch, step):
        calls.append(step)
        if rank == 1 and len(calls) == 3:
            # Not before rank 0 waits in a collective of this step.
            time.sleep(0.2)
            what()
        return forward_backward(self, batch, step)

    Trainer.forward_backward = fail


def ends(run_file: Path, fault, expect: int) -> Run:
    with training(run_file, fault=fault) as run:
        run.wait_for(lambda: len(trajectory(run_file)) >= 2)
        code = run.wait(WITHIN_S)
        assert code == expect, run.stderr
    assert len(run.workers()) == 2
    assert not any(is_alive(pid) for pid in run.workers())
    return run


def listening(pids: set[int]) -> list[str]:
    """The addresses at which these processes listen, as Linux writes them: IPv4 in hexadecimal, backwards."""
    held = set()
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                held.add(os.readlink(link))
    rows = [row.split() for name in ("tcp", "tcp6") for row in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    return [row[1].partition(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in held]


def test_workers_listen_on_the_loopback_interface_alone(run_file):
    with training(run_file, fault=is_slow) as run:
        run.wait_for(lambda: len(trajectory(run_file)) >= 2)
        addresses = listening({*run.workers(), run.process.pid})
    assert len(addresses) >= 2, "gloo of two ranks"
    ipv6 = ("0" * 24 + "01000000", "0" * 16 + "FFFF00000100007F")
    assert [each for each in addresses if each != "0100007F" and each not in ipv6] == []


def test_workers_meet_in_memory_that_no_other_user_can_open(run_file):
    """A server would serve anyone on the machine: PyTorch's lists its keys, and takes any value for one."""
    with training(run_file, fault=is_slow) as run:
        run.wait_for(lambda: len(trajectory(run_file)) >= 2)
        for pid in run.workers():
            held = {os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink()}
            assert "/memfd:shardwright-store (deleted)" in held
            assert Path(f"/proc/{pid}/fd").stat().st_mode & 0o077 == 0


def raises(rank: int) -> None:
    def what():
        raise RuntimeError("the dog ate rank 1's gradient")

    in_step_3_of_rank_1(rank, what)


def test_a_worker_that_raises_is_heard_and_no_one_else_is(run_file):
    run = ends(run_file, raises, 3)
    assert run.stderr.startswith("error: rank 1 failed: RuntimeError: the dog ate rank 1's gradient\n")
    assert run.stderr.count("Traceback") == 1
    assert "Connection closed" not in run.stderr
    assert f"its full output: {run_file.parent}/out/logs/rank-1.log" in run.stderr


def is_killed(rank: int) -> None:
    in_step_3_of_rank_1(rank, kill_itself)


def test_a_worker_that_is_killed_is_named(run_file):
    run = ends(run_file, is_killed, 3)
    assert run.stderr.startswith("error: rank 1 was killed by signal 9 (SIGKILL); when no one sent it, the machine")
    assert "Traceback" not in run.stderr


def reads_address_zero(rank: int) -> None:
    in_step_3_of_rank_1(rank, lambda: ctypes.string_at(0))


@prove
def test_a_worker_that_crashes_shows_where_it_was(run_file):
    run = ends(run_file, reads_address_zero, 3)
    assert run.stderr.startswith("error: rank 1 was killed by signal 11 (SIGSEGV)")
    assert "Fatal Python error: Segmentation fault" in run.stderr
    assert "ctypes/__init__.py" in run.stderr
    assert len(run.stderr.splitlines()) < 15


def leaves_with_code_5(rank: int) -> None:
    in_step_3_of_rank_1(rank, lambda: (print("so long", file=sys.stderr, flush=True), os._exit(5)))


@prove
def test_a_worker_that_leaves_without_a_word_is_noticed(run_file):
    run = ends(run_file, leaves_with_code_5, 3)
    assert run.stderr.startswith("error: rank 1 left with code 5 without a word\nthe end of its output:\nso long")


def leaves_as_if_all_were_well(rank: int) -> None:
    in_step_3_of_rank_1(rank, lambda: os._exit(0))


@prove
def test_code_0_before_the_work_is_done_is_a_failure(run_file):
    run = ends(run_file, leaves_as_if_all_were_well, 3)
    assert run.stderr.startswith("error: rank 1 left with code 0, but before its work was done")


def exits_as_if_all_were_well(rank: int) -> None:
    in_step_3_of_rank_1(rank, lambda: sys.exit(0))


def test_sys_exit_of_an_extension_on_a_worker_is_a_failure_told_in_one_sentence(run_file):
    run = ends(run_file, exits_as_if_all_were_well, 3)
    assert re.match(r"error: the command was ended by SystemExit\(0\) at \S+test_launch.py:\d+\n", run.stderr)
    assert "Traceback" not in run.stderr


def only_rank_exits(rank: int) -> None:
    in_step_3_of_rank_1(1, lambda: sys.exit(0))


def test_sys_exit_of_an_extension_where_there_is_one_rank_is_a_failure_too(run_file):
    run = train(run_file, "--set", "layout.dp_shard=1", fault=only_rank_exits, expect=3)
    assert "the command was ended by SystemExit(0) at" in run.stderr


def complains_of_input(rank: int) -> None:
    def what():
        from shardwright.system.errors import DataError

        raise DataError("tokens/train-00000.bin has a hole at 17", "and another at 34")

    in_step_3_of_rank_1(rank, what)


def test_bad_input_found_by_a_worker_is_the_plain_message_once_and_exit_code_2(run_file):
    run = ends(run_file, complains_of_input, 2)
    assert run.stderr == "error: tokens/train-00000.bin has a hole at 17\nerror: and another at 34\n"


def all_complain_of_input(rank: int) -> None:
    from shardwright.system.errors import DataError
    from shardwright.training import run

    def fail(*arguments, **named):
        raise DataError("no rank can read this")

    run.build_model = fail


def test_bad_input_found_by_every_worker_is_told_once(run_file):
    assert train(run_file, fault=all_complain_of_input, expect=2).stderr == "error: no rank can read this\n"


def is_slow(rank: int) -> None:
    in_step_3_of_rank_1(rank, lambda: time.sleep(600))


def test_a_signal_is_forwarded_though_a_worker_ends_at_that_moment():
    """The exit code of the worker is read before the signal is sent, and the worker ends in between."""
    with subprocess.Popen(["true"]) as ended, subprocess.Popen(["sleep", "600"]) as running:
        ended.wait()
        workers = [SimpleNamespace(pid=process.pid, exit_code=lambda: None) for process in (ended, running)]
        try:
            with launch._forward_signals(workers) as request:
                signal.raise_signal(signal.SIGTERM)
            assert request.signal == signal.SIGTERM
            assert running.wait(60) == -signal.SIGTERM
        finally:
            running.kill()


@prove
def test_when_the_launcher_is_killed_its_workers_leave_too(run_file):
    with training(run_file, fault=is_slow) as run:
        run.wait_for(lambda: len(trajectory(run_file)) >= 2)
        os.kill(run.process.pid, signal.SIGKILL)
        until = time.monotonic() + WITHIN_S
        while any(is_alive(pid) for pid in run.workers()):
            assert time.monotonic() < until
            time.sleep(0.05)
    assert len(run.workers()) == 2


@prove
def test_two_runs_at_once_on_one_machine_do_not_meet(tokens, tmp_path):
    files = [write_run_file(folder, tokens) for folder in (tmp_path / "a", tmp_path / "b") if not folder.mkdir()]
    # Both are also told of a port that is taken, as a shell that once ran torchrun may tell them.
    with socket.create_server(("127.0.0.1", 0)) as taken:
        environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(taken.getsockname()[1])}
        with (
            training(files[0], environment=environment) as one,
            training(files[1], "--set", "seed=4", environment=environment) as other,
        ):
            assert [one.wait(), other.wait()] == [0, 0], one.stderr + other.stderr
    assert [len(trajectory(file)) for file in files] == [20, 20]
    assert trajectory(files[0]) != trajectory(files[1])


def test_a_run_of_one_rank_needs_no_launcher_and_reports_as_one(run_file):
    train(run_file, "--set", "layout.dp_shard=1", "--set", "steps=3")
    assert not (run_file.parent / "out" / "logs").exists()
    assert records(run_file)[-1]["step"] == 3
    failed = train(
        run_file, "--set", "layout.dp_shard=1", "--set", "steps=9", "--resume", fault=raises_in_step_5, expect=3
    )
    assert failed.stderr.startswith("error: training failed: RuntimeError: alone in step 5\n")


def raises_in_step_5(rank: int) -> None:
    from shardwright.training.step import Trainer

    forward_backward = Trainer.forward_backward

    def fail(self, batch, step):
        if step == 5:
            raise RuntimeError("alone in step 5")
        return forward_backward(self, batch, step)

    Trainer.forward_backward = fail


def test_an_out_that_cannot_be_made_is_refused(run_file):
    (run_file.parent / "file").touch()
    run = train(run_file, "--set", f"out={run_file.parent}/file/out", expect=2)
    assert f"out='{run_file.parent}/file/out' cannot be made" in run.stderr
    assert "Traceback" not in run.stderr


def is_killed_once(rank: int) -> None:
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        in_step_8(rank, kill_itself)


def in_step_8(rank: int, what) -> None:
    from shardwright.training.step import Trainer

    forward_backward = Trainer.forward_backward

    def fail(self, batch, step):
        if rank == 1 and step == 7:
            what()
        return forward_backward(self, batch, step)

    Trainer.forward_backward = fail


@pytest.mark.prove
def test_torchrun_restarts_a_killed_worker_and_the_run_goes_on(run_file):
    run = train(run_file, "--resume", "--set", "steps=10", fault=is_killed_once, torchrun=True)
    assert "resumed from" in run.stdout
    assert "step-00000005: step 5" in run.stdout
    assert [step for step, _, _ in trajectory(run_file)] == list(range(1, 11))
    restart = next(each for each in read_events(run_file.parent / "out") if each.kind == "restart")
    assert restart.step == 5
    assert restart.text.startswith("restart 1 by torchrun: resumed from ")


@prove
def test_under_torchrun_a_run_goes_on_with_the_ranks_that_are_left_where_min_ranks_says_so(run_file):
    wide = ("--set", "layout.dp_shard=4", "--set", "steps=6")
    refused = train(run_file, *wide, torchrun=True, expect=1)
    assert "the layout needs 4 ranks (dp_shard 4), but 2 processes were started" in refused.stderr
    train(run_file, *wide)
    run = train(run_file, *wide, "--set", "steps=10", "--set", "faults.min_ranks=2", "--resume", torchrun=True)
    assert "layout.dp_shard 4 to 2" in run.stdout
    assert [step for step, _, _ in trajectory(run_file)] == list(range(1, 11))
    refused = train(run_file, "--max-restarts", "2", "--resume", torchrun=True, expect=1)
    assert "give torchrun itself --max-restarts" in refused.stderr


@prove
def test_under_torchrun_the_rank_at_fault_speaks_and_is_the_root_cause(run_file):
    run = train(run_file, "--resume", fault=raises, torchrun=True, expect=1)
    assert "error: rank 1: RuntimeError: the dog ate rank 1's gradient" in run.stderr
    root = run.stderr.partition("Root Cause")[2]
    assert "rank 1: RuntimeError: the dog ate" in root
    assert "exitcode  : 3" in root
    assert not any(is_alive(pid) for pid in run.workers())


@prove
def test_under_torchrun_bad_input_is_told_once_a_machine(run_file):
    train(run_file, "--set", "steps=2")
    run = train(run_file, torchrun=True, expect=1)
    assert run.stderr.count("error: " + str(run_file.parent / "out") + " already holds a run") == 2  # once a start
    assert "exitcode  : 2" in run.stderr.partition("Root Cause")[2]


def takes_its_time(rank: int) -> None:
    from shardwright.training.step import Trainer

    update = Trainer.update

    def slow(self, rate):
        time.sleep(0.1)
        return update(self, rate)

    Trainer.update = slow


@prove
def test_a_ctrl_c_under_torchrun_saves_though_it_reaches_the_workers_twice(run_file):
    with training(run_file, fault=takes_its_time, torchrun=True) as run:
        run.wait_for(lambda: len(trajectory(run_file)) >= 2)
        # A terminal sends it to every process; torchrun then hands it on.
        for pid in (*run.workers(), run.process.pid):
            os.kill(pid, signal.SIGINT)
        run.wait_for(lambda: "as asked; the last checkpoint is of this step. Continue with" in run.stdout)
    stopped = len(trajectory(run_file))
    assert (run_file.parent / "out" / "checkpoints" / f"step-{stopped:08d}").is_dir()


def shell_code(page: str, part: str) -> str:
    """The shell code of a page of the docs that has a part."""
    text = (Path(__file__).parents[2] / "docs" / page).read_text()
    return next(block for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL) if part in block)


def queued_again(script: str, folder: Path, code: int, restarts: str | None = None) -> bool:
    """Whether a batch file whose srun leaves with a code queues its job again; it has to leave with the same code."""
    for name, text in {
        "bin/srun": f"#!/bin/sh\nexit {code}\n",
        "bin/scontrol": "#!/bin/sh\necho $@\n",
        ".venv/bin/activate": "",
    }.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    job = {"SLURM_SUBMIT_DIR": str(folder), "SLURM_CPUS_PER_TASK": "8", "SLURM_JOB_ID": "4711"}
    environment = os.environ | job | {"PATH": f"{folder}/bin:{os.environ['PATH']}"}
    environment |= {"SLURM_RESTART_COUNT": restarts} if restarts is not None else {}
    done = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    assert done.stdout in ("", "requeue 4711\n"), done.stdout
    return bool(done.stdout)


def test_the_batch_file_of_the_docs_queues_a_job_again_only_if_it_was_stopped(tmp_path):
    script = shell_code("launch.md", "#SBATCH")
    assert [queued_again(script, tmp_path, code) for code in (0, 75, 3)] == [False, True, False]


def test_the_condition_of_the_docs_queues_a_job_again_after_five_faults_at_most_of_which_137_is_one(tmp_path):
    condition = re.compile(r'^if \[ "\$code".*?^fi$', re.MULTILINE | re.DOTALL)
    (snippet,) = condition.findall(shell_code("faults.md", "SLURM_RESTART_COUNT"))
    script, n = condition.subn(lambda _: snippet, shell_code("launch.md", "#SBATCH"))
    assert n == 1
    again = {code: queued_again(script, tmp_path, code) for code in (0, 1, 2, 3, 75, 137)}
    assert again == {0: False, 1: True, 2: False, 3: True, 75: True, 137: True}
    assert [queued_again(script, tmp_path, 137, restarts) for restarts in ("4", "5")] == [True, False]
    assert queued_again(script, tmp_path, 75, "5")
