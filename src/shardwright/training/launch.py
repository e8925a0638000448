"""Start the workers of a run on this machine, restart them after a fault, and forward signals to them."""

import os
import re
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import Pipe
from pathlib import Path
from types import FrameType

from shardwright.config import RunConfig, resolved_toml
from shardwright.runs.folder import METRICS, now, resumable
from shardwright.runs.records import EventRecord, append_event
from shardwright.system import forks, processes
from shardwright.system.console import LossyStream, visible
from shardwright.system.errors import CopiesError, WorkerError, cleaning_up
from shardwright.system.files import open_regular, parse_json
from shardwright.system.forks import Descriptor, fork
from shardwright.system.processes import Worker
from shardwright.system.ranks_at import RanksWatch
from shardwright.system.signals import on_signals, send_signal
from shardwright.system.units import KiB
from shardwright.training.ranks import STORE, SUPERVISED
from shardwright.training.resilience.restarts import Restarts
from shardwright.training.worker import serve

_TAIL_BYTES = 64 * KiB
"""How much of the end of metrics.jsonl to read: more than one line."""


@dataclass
class _EndSignal:
    """The first signal that asked this process to end, if any. `to_grow`: the ranks were asked to save and end, for
    a restart with more ranks."""

    signal: int | None = None
    to_grow: bool = False


def launch(config: RunConfig, log_dir: Path, quiet: bool = False, max_restarts: int = 0) -> bool:
    """Run all ranks of a run file's layout on this machine until they end. Return whether a signal stopped them.

    Rank 0 writes to this terminal; stderr of every rank goes to LOG_DIR/rank-N.log. If a rank fails, the others are
    ended and its error is raised: InputError as such, any other as WorkerError. Up to `max_restarts` times, a
    WorkerError or CopiesError instead restarts the ranks from the newest complete checkpoint. Signals of
    `signals.STOPPING` are forwarded to the workers, which finish the step and save. KeyboardInterrupt is raised if
    there is nothing to save yet, and by a second SIGINT.
    """
    out = Path(config.out)
    restarts = Restarts(config, max_restarts)
    workers: list[Worker] = []
    forks.preload("shardwright.training.preload")
    with _forward_signals(workers) as request:
        while True:
            logs = log_dir / f"restart-{restarts.n_starts}" if restarts.n_starts else log_dir
            request.to_grow = False
            try:
                with _file_of_this_user() as store:
                    stopped = _run(restarts, logs, quiet, workers, request, store)
                if not (stopped and request.to_grow and request.signal is None):
                    return stopped
                event = restarts.grow(resumable(out, config.checkpoint.local))
            except (WorkerError, CopiesError) as error:
                if request.signal is not None:
                    raise
                event = restarts.after(error, resumable(out, config.checkpoint.local))
            append_event(out, event)
            print(visible(event.text), file=LossyStream("stderr"), flush=True)


def _run(
    restarts: Restarts, log_dir: Path, quiet: bool, workers: list[Worker], request: _EndSignal, store: Descriptor | str
) -> bool:
    """Start the ranks once and wait for their end. The ranks rendezvous in the file `store`. `workers` contains the
    workers while they run."""
    log_dir.mkdir(parents=True, exist_ok=True)
    attempt, began = restarts.attempt, now()
    config, out = attempt.config, Path(attempt.config.out)
    watch = RanksWatch(out, len(attempt.places))
    watch.folder.clear()

    def watched() -> WorkerError | None:
        if not request.to_grow and request.signal is None and restarts.should_grow() and _has_logged_since(out, began):
            request.to_grow = True
            for worker in workers:
                send_signal(worker.pid, signal.SIGTERM)
        hang = watch.hang()
        if hang is None:
            return None
        blamed, text = hang
        states = watch.states()
        step = states[blamed[0]].step if blamed else max(state.step for state in states.values())
        rank = blamed[0] if len(blamed) == 1 else None
        append_event(out, EventRecord("hang", step, text, rank))
        return WorkerError(text).with_rank(rank)

    with cleaning_up(lambda: processes.end(workers), workers.clear, watch.folder.clear):
        try:
            _start(workers, attempt.places, log_dir, store)
        except (EOFError, ConnectionError):  # the same signal ended the server, which had just been started
            if request.signal is None:
                raise
        if request.signal is not None:  # the signal may have come before there were workers to forward it to
            raise KeyboardInterrupt
        for worker in workers:
            worker.send((resolved_toml(config), quiet))
        try:
            stopped = processes.results(workers, is_asked=lambda: request.signal is not None, watched=watched)
        except WorkerError as error:
            raise _with_place(error, out, watch) from None
        for worker in workers:
            worker.wait()  # the exit code does not matter once its work is done
        return any(stopped)


def _has_logged_since(out: Path, time: str) -> bool:
    """Return whether a step was logged after `time`. If so, all ranks are in training and respond to signals."""
    try:
        with open_regular(out / METRICS) as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            lines = file.read().splitlines()
        record = parse_json(lines[-1])
        return bool(record["kind"] == "train" and record["time"] > time)
    except (OSError, ValueError, TypeError, LookupError):  # no line yet, or an incomplete line
        return False


def _with_place(error: WorkerError, out: Path, watch: RanksWatch) -> WorkerError:
    """Record a rank's error as an event. Return the error, with the rank's last position if its process is dead."""
    rank = error.rank
    if rank is None or str(error).startswith("no progress"):  # a hang is recorded where it is detected
        return error
    state = watch.states().get(rank)
    append_event(out, EventRecord("fault", 0 if state is None else state.step, str(error).partition("\n")[0], rank))
    if state is None or not re.match(r"rank (\d+) (was killed|left)", str(error)):
        return error
    where = f"it was in step {state.step + 1}, {state.phase}"
    where += f", last seen at {state.line}" if state.line else ""
    return WorkerError(f"{error}\n{where}").with_rank(rank)


def _start(workers: list[Worker], places: tuple[int, ...], log_dir: Path, store: Descriptor | str) -> None:
    """Start every rank. Each is added to `workers` immediately, so that `_run` ends all of them on any error."""
    n_threads = processes.threads_of_a_rank(len(places))
    hang_up = signal.getsignal(signal.SIGHUP) != signal.SIG_IGN
    environment = dict(os.environ)
    environment.setdefault("OMP_NUM_THREADS", str(n_threads))
    environment["WORLD_SIZE"] = str(len(places))
    processes.bind_to_loopback(environment)
    for rank, place in enumerate(places):
        own = {"RANK": str(rank), "LOCAL_RANK": str(place), SUPERVISED: "1"}
        log = log_dir / f"rank-{rank}.log"
        ours, theirs = Pipe()
        with log.open("wb") as stderr, theirs:
            error = Descriptor(stderr.fileno())
            output = Descriptor(1) if rank == 0 else error
            process = fork(serve, theirs, (STORE, store), output, error, environment | own, n_threads, hang_up)
        workers.append(Worker(rank, process, ours, log))


@contextmanager
def _file_of_this_user() -> Iterator[Descriptor | str]:
    """Yield an empty file for the rendezvous of the ranks. A server on a port would accept any user of the machine.
    On Linux, the file is in memory, has no name, and is freed with the last process that has it open."""
    if hasattr(os, "memfd_create"):
        number = os.memfd_create("shardwright-store")
        try:
            yield Descriptor(number)
        finally:
            os.close(number)
    else:
        with tempfile.TemporaryDirectory(prefix="shardwright-") as folder:
            yield os.path.join(folder, "store")


@contextmanager
def _forward_signals(workers: list[Worker]) -> Iterator[_EndSignal]:
    request = _EndSignal()

    def forward(number: int, frame: FrameType | None) -> None:
        if request.signal is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        if request.signal is None:
            request.signal = number
            name = signal.Signals(number).name
            print(
                f"{name}: finishing the step and saving; Ctrl-C to leave at once, unsaved",
                file=LossyStream("stderr"),
                flush=True,
            )
        for worker in workers:
            if worker.exit_code() is None:
                send_signal(worker.pid, number)

    with on_signals(forward, last=True):
        yield request
