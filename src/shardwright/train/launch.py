"""Start the workers of a run on this machine, watch them, and tell what happened in the words of the one
at fault."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from shardwright.errors import InputError, WorkerError

LISTEN_FD = "SHARDWRIGHT_LISTEN_FD"  # the descriptor of a socket, bound here, that rank 0 listens on
_POLL_S = 0.05
_LAST_WORDS_S = 1.0  # how long the reports of ranks that failed together are waited for


@dataclass(frozen=True)
class Worker:
    """A rank's process and the file its stderr goes to."""

    rank: int
    process: "subprocess.Popen[bytes]"
    log: Path


@dataclass
class _Asked:
    """The first signal to this process that asked for an end, if any."""

    signal: int | None = None


def launch(run_toml: str, world_size: int, log_dir: Path, quiet: bool = False) -> None:
    """Run `world_size` workers of a resolved run file, given as text, to their end.

    Rank 0 writes to this terminal; stderr of every rank goes to LOG_DIR/rank-N.log. When one fails, the
    others are ended and its own error is raised: InputError as such, all else as WorkerError. SIGINT and
    SIGTERM are handed to the workers, which finish the step and save; KeyboardInterrupt is raised where
    there was nothing to save yet, and by a second SIGINT.
    """
    log_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="shardwright-") as folder:
        reports = Path(folder)
        run_file = reports / "run.toml"
        run_file.write_text(run_toml, encoding="utf-8")
        workers: list[Worker] = []
        try:
            with _forward_signals(workers) as asked:
                _start(workers, run_file, world_size, log_dir, reports, quiet)
                failed = _first_failure(workers, reports)
            if failed is not None:
                seen_s = time.time()
                while time.time() < seen_s + _LAST_WORDS_S and any(w.process.poll() is None for w in workers):
                    time.sleep(_POLL_S)
                raise _explain(workers, reports, failed, seen_s, asked)
        finally:
            _end(workers)


def _start(workers: list[Worker], run_file: Path, world_size: int, log_dir: Path, reports: Path, quiet: bool) -> None:
    """Start every rank, adding each to `workers` at once, so that whatever happens none is forgotten."""
    environment = dict(os.environ)
    # Ranks share the cores: without a bound each would start as many threads as there are cores.
    threads = max(1, (os.cpu_count() or 1) // world_size)
    environment.setdefault("OMP_NUM_THREADS", str(threads))
    # Bound here and handed to rank 0: a port that is merely found free can be another program's a second
    # later.
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world_size)}
        for rank in range(world_size):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            log = log_dir / f"rank-{rank}.log"
            with log.open("wb") as stderr:
                process = subprocess.Popen(
                    [
                        *(sys.executable, "-m", "shardwright.train.worker"),
                        *(str(run_file), str(reports), str(os.getpid())),
                        *(["quiet"] if quiet else []),
                    ],
                    env=environment | own | ({LISTEN_FD: str(listener.fileno())} if rank == 0 else {}),
                    pass_fds=[listener.fileno()] if rank == 0 else [],
                    stdin=subprocess.DEVNULL,
                    stdout=None if rank == 0 else stderr,
                    stderr=stderr,
                    # A Ctrl-C of the terminal must reach the workers once, through this process.
                    start_new_session=True,
                )
            workers.append(Worker(rank, process, log))


@contextmanager
def _forward_signals(workers: list[Worker]) -> Iterator[_Asked]:
    asked = _Asked()

    def forward(number: int, frame: FrameType | None) -> None:
        if asked.signal is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        if asked.signal is None:
            asked.signal = number
            name = signal.Signals(number).name
            print(
                f"{name}: finishing the step and saving; Ctrl-C to leave at once, unsaved",
                file=sys.stderr,
                flush=True,
            )
        for worker in workers:
            if worker.process.poll() is None:
                worker.process.send_signal(number)

    before = {number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _first_failure(workers: list[Worker], reports: Path) -> Worker | None:
    """Wait until one worker fails, or all have ended well.

    What a worker says decides, not its exit code alone: code 0 without having finished is a failure, and
    after having finished nothing is one.
    """
    while True:
        ended = [worker for worker in workers if worker.process.poll() is not None]
        for worker in ended:
            if not _is_done(worker, reports):
                return worker
        if len(ended) == len(workers):
            return None
        time.sleep(_POLL_S)


def _is_done(worker: Worker, reports: Path) -> bool:
    return (reports / f"rank-{worker.rank}.done").exists()


def _explain(workers: list[Worker], reports: Path, failed: Worker, seen_s: float, asked: _Asked) -> BaseException:
    """The error to show: of the rank at fault, not of those that merely lost their connection to it.

    `failed` is the rank that was first seen to have ended, at the time `seen_s`.
    """
    told = {t["rank"]: t for path in reports.glob("rank-*.json") if (t := json.loads(path.read_text()))}
    own = sorted((t for t in told.values() if not t["lost_peer"]), key=lambda t: t["time"])
    silent = [
        worker
        for worker in (failed, *workers)
        if worker.process.poll() is not None and worker.rank not in told and not _is_done(worker, reports)
    ]
    stopped = [worker for worker in silent if -worker.process.returncode in (signal.SIGINT, signal.SIGTERM)]
    if asked.signal is not None and (stopped or any(t["kind"] == "KeyboardInterrupt" for t in own)):
        return KeyboardInterrupt()
    if silent and failed is silent[0] and not (own and own[0]["time"] <= seen_s):
        return _silent_death(failed)
    if own:
        return _own_error(own[0], workers[own[0]["rank"]])
    if silent:
        return _silent_death(silent[0])
    first = min(told.values(), key=lambda t: t["time"])
    return _own_error(first, workers[first["rank"]])


def _own_error(told: dict[str, Any], worker: Worker) -> Exception:
    if told["expected"] and told["exit_code"] == InputError.exit_code:
        return InputError(*told["problems"])
    if told["expected"]:
        return WorkerError("\n".join(told["problems"]))
    text = "".join(told["traceback"]).rstrip()
    return WorkerError(
        f"rank {told['rank']} failed: {told['kind']}: {' '.join(told['problems'])}\n\n{text}\n\n"
        f"its full output: {worker.log}"
    )


def _silent_death(worker: Worker) -> WorkerError:
    code = worker.process.returncode
    if code < 0:
        try:
            name = f"{-code} ({signal.Signals(-code).name})"
        except ValueError:
            name = str(-code)
        cause = f"was killed by signal {name}"
        if -code == signal.SIGKILL:
            cause += "; when no one sent it, the machine ran out of memory (see dmesg)"
    elif code == 0:
        cause = "left with code 0, but before its work was done"
    else:
        cause = f"left with code {code} without a word"
    last = _last_words(worker.log)
    tail = "\n".join(["", "the end of its output:", *last]) if last else ""
    return WorkerError(f"rank {worker.rank} {cause}{tail}\nits full output: {worker.log}")


def _last_words(log: Path) -> list[str]:
    """Python's report of a crash, if there is one, or the last lines."""
    lines = log.read_text(errors="replace").strip().splitlines()
    fatal = [line for line in lines if line.startswith("Fatal Python error")]
    if fatal:
        at = next((i for i, line in enumerate(lines) if line.startswith("Current thread")), len(lines))
        return [*fatal, *lines[at : at + 6]]
    return lines[-5:]


def _end(workers: list[Worker]) -> None:
    """Kill what still runs, with its children: without all ranks no collective completes, so nothing is
    waited for."""
    for worker in workers:
        if worker.process.poll() is None:
            os.killpg(worker.process.pid, signal.SIGKILL)
    for worker in workers:
        worker.process.wait()
