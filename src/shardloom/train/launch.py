"""Start the workers of a run on this machine, watch them, and tell what happened in the words of the one at fault."""

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

from shardloom.errors import InputError, WorkerError

_POLL_S = 0.05
_LAST_WORDS_S = 1.0  # how long the reports of ranks that failed together are collected


@dataclass(frozen=True)
class Worker:
    """A rank's process and the file its stderr goes to."""

    rank: int
    process: "subprocess.Popen[bytes]"
    log: Path


def launch(run_file: Path, world_size: int, log_dir: Path, quiet: bool = False) -> None:
    """Run `world_size` workers of a resolved run file to their end.

    Rank 0 writes to this terminal; stderr of every rank goes to LOG_DIR/rank-N.log. When one fails, the others are
    ended and its own error is raised: InputError as such, all else as WorkerError. SIGINT and SIGTERM are handed to
    the workers, which finish the step and save.
    """
    log_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="shardloom-") as reports:
        workers = _start(run_file, world_size, log_dir, Path(reports), quiet)
        try:
            with _forward_signals(workers):
                failed = _first_failure(workers)
            if failed is not None:
                time.sleep(_LAST_WORDS_S)
                raise _explain(workers, Path(reports))
        finally:
            _end(workers)


def _start(run_file: Path, world_size: int, log_dir: Path, reports: Path, quiet: bool) -> list[Worker]:
    workers = []
    environment = dict(os.environ)
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port()), "WORLD_SIZE": str(world_size)}
    # Ranks share the cores: without a bound each would start as many threads as there are cores.
    threads = max(1, (os.cpu_count() or 1) // world_size)
    environment.setdefault("OMP_NUM_THREADS", str(threads))
    for rank in range(world_size):
        log = log_dir / f"rank-{rank}.log"
        with log.open("wb") as stderr:
            process = subprocess.Popen(
                [sys.executable, "-m", "shardloom.train.worker", str(run_file), str(reports), *(["quiet"] if quiet else [])],
                env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=None if rank == 0 else stderr,
                stderr=stderr,
                # A Ctrl-C of the terminal must reach the workers once, through this process.
                start_new_session=True,
            )
        workers.append(Worker(rank, process, log))
    return workers


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def _forward_signals(workers: list[Worker]) -> Iterator[None]:
    def forward(number: int, frame: FrameType | None) -> None:
        for worker in workers:
            if worker.process.poll() is None:
                worker.process.send_signal(number)

    before = {number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _first_failure(workers: list[Worker]) -> Worker | None:
    """Wait until one worker fails, or all have ended well."""
    while True:
        codes = [worker.process.poll() for worker in workers]
        for worker, code in zip(workers, codes, strict=True):
            if code not in (None, 0):
                return worker
        if all(code == 0 for code in codes):
            return None
        time.sleep(_POLL_S)


def _explain(workers: list[Worker], reports: Path) -> Exception:
    """The error to show: of the rank at fault, not of those that merely lost their connection to it."""
    told = [json.loads(path.read_text()) for path in sorted(reports.glob("rank-*.json"))]
    own = sorted((t for t in told if not t["lost_peer"]), key=lambda t: t["time"])
    if own:
        return _own_error(own[0], workers[own[0]["rank"]])
    for worker in workers:
        code = worker.process.poll()
        reported = any(t["rank"] == worker.rank for t in told)
        if code not in (None, 0) and not reported:
            return _silent_death(worker, int(code or 0))
    first = min(told, key=lambda t: t["time"])
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


def _silent_death(worker: Worker, code: int) -> WorkerError:
    if code < 0:
        name = signal.Signals(-code).name
        cause = f"was killed by signal {-code} ({name})"
        if name == "SIGKILL":
            cause += "; when no one sent it, the machine ran out of memory (see dmesg)"
    else:
        cause = f"left with code {code} without a word"
    last = worker.log.read_text(errors="replace").strip().splitlines()[-5:]
    tail = "\n".join(["", "the end of its output:", *last]) if last else ""
    return WorkerError(f"rank {worker.rank} {cause}{tail}\nits full output: {worker.log}")


def _end(workers: list[Worker]) -> None:
    """Kill what still runs: without all ranks no collective completes, so there is nothing left to wait for."""
    for worker in workers:
        if worker.process.poll() is None:
            worker.process.kill()
    for worker in workers:
        worker.process.wait()
