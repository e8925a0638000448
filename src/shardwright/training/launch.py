"""Start the workers of a run on this machine, and hand them the signals that this process gets."""

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import Pipe
from pathlib import Path
from types import FrameType

from shardwright import processes
from shardwright.config import RunConfig, resolved_toml
from shardwright.errors import WorkerError
from shardwright.processes import Worker
from shardwright.ranks_at import Watch
from shardwright.run_folder import Event, append_event

LISTEN_FD = "SHARDWRIGHT_LISTEN_FD"  # the descriptor of a socket, bound here, that rank 0 listens on


SUPERVISED = "SHARDWRIGHT_SUPERVISED"
"""In the environment of a rank whose parent process compares the ranks."""


@dataclass
class _Asked:
    """The first signal to this process that asked for an end, if any."""

    signal: int | None = None


def launch(config: RunConfig, log_dir: Path, quiet: bool = False) -> bool:
    """Run every rank of a run file's layout on this machine, to their end. Returns whether a signal stopped them.

    Rank 0 writes to this terminal; stderr of every rank goes to LOG_DIR/rank-N.log. When one fails, the
    others are ended and its own error is raised: InputError as such, all else as WorkerError. Signals of
    `processes.STOPPING` are handed to the workers, which finish the step and save; KeyboardInterrupt is raised where
    there was nothing to save yet, and by a second SIGINT.
    """
    log_dir.mkdir(parents=True, exist_ok=True)
    workers: list[Worker] = []
    watch = Watch(Path(config.out), config.layout.layout().world_size)
    watch.folder.clear()

    def watched() -> str | None:
        found = watch.hang()
        if found is None:
            return None
        blamed, told = found
        states = watch.states()
        step = states[blamed[0]].step if blamed else max(state.step for state in states.values())
        append_event(Path(config.out), Event("hang", step, told, blamed[0] if len(blamed) == 1 else None))
        return told

    try:
        with _forward_signals(workers) as asked:
            _start(workers, config.layout.layout().world_size, log_dir)
            for worker in workers:
                worker.send((resolved_toml(config), quiet))
            try:
                stopped = processes.results(workers, is_asked=lambda: asked.signal is not None, watched=watched)
            except WorkerError as error:
                raise _with_place(error, Path(config.out), watch) from None
            for worker in workers:
                worker.wait()  # how it ends says nothing once its work is done
            return any(stopped)
    finally:
        processes.end(workers)
        watch.folder.clear()


def _with_place(error: WorkerError, out: Path, watch: Watch) -> WorkerError:
    """An error of a rank, written down as an event, with where that rank was when it is dead."""
    named = re.match(r"rank (\d+) (was killed|left)", str(error))
    if named is None:
        return error
    rank = int(named[1])
    state = watch.states().get(rank)
    if state is None:
        return error
    where = f"it was in step {state.step + 1}, {state.phase}"
    where += f", last seen at {state.line}" if state.line else ""
    append_event(out, Event("fault", state.step, str(error).partition("\n")[0], rank))
    return WorkerError(f"{error}\n{where}")


def _start(workers: list[Worker], world_size: int, log_dir: Path) -> None:
    """Start every rank, adding each to `workers` at once, so that `launch` ends all of them, whatever fails."""
    environment = dict(os.environ)
    environment.setdefault("OMP_NUM_THREADS", str(processes.threads_of_a_rank(world_size)))
    # Bound here and handed to rank 0: a port that is merely found free can be another program's a second
    # later.
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world_size)}
        for rank in range(world_size):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank), SUPERVISED: "1"}
            passed = []
            if rank == 0:
                own[LISTEN_FD] = str(listener.fileno())
                passed = [listener.fileno()]
            log = log_dir / f"rank-{rank}.log"
            ours, theirs = Pipe()
            with log.open("wb") as stderr, theirs:
                process = subprocess.Popen(
                    [sys.executable, "-m", "shardwright.training.worker", str(theirs.fileno())],
                    env=environment | own,
                    pass_fds=[theirs.fileno(), *passed],
                    stdin=subprocess.DEVNULL,
                    stdout=None if rank == 0 else stderr,
                    stderr=stderr,
                    # A Ctrl-C of the terminal must reach the workers once, through this process.
                    start_new_session=True,
                )
            workers.append(Worker(rank, process, ours, log))


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
            if worker.exit_code() is None:
                os.kill(worker.pid, number)

    with processes.on_signals(forward):
        yield asked
