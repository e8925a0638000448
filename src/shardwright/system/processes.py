"""The worker processes of one machine, one a rank: wait for them, report the error of a failed rank, kill the others.

`train` (training/launch.py) and `verify` (verification/ranks.py) fork their ranks from a server. Both represent each
rank as a `Worker` and wait in `results`. In a rank's process, `ParentConnection` is the other end of the worker's
connection.
"""

import math
import os
import pickle
import queue
import signal
import socket
import subprocess
import threading
import time
import traceback
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

from shardwright.system import extensions
from shardwright.system.control_groups import memory_limit
from shardwright.system.errors import FullError, ShardwrightError, WorkerError, system_limit
from shardwright.system.signals import STOPPING, send_signal
from shardwright.system.units import GiB, format_bytes

_POLL_S = 0.25  # interval between checks of processes that send no message
_LAST_WORDS_S = 1.0  # wait for the report of the failed rank after other ranks lost their connection to it
_OTHER_WORDS_S = 0.2  # wait for reports of other ranks, which may have failed before the rank that reported first
_STACKS_S = 2.0  # time that hung ranks have to write their stacks
PROCESS_BYTES = 0.3 * GiB
"""Memory of a rank without a model, in bytes: Python, PyTorch and its libraries."""
STACKS_SHOWN = 8
"""Number of hung ranks whose stacks are shown; the other ranks mostly wait at the same places."""
_LOST_PEER = (
    "connection closed",
    "connection reset",
    "connection refused",
    "broken pipe",
    "timed out",
    "socket",
    "gloo",
)


def ranks_in_words(ranks: Sequence[int]) -> str:
    """Return `rank 3`, `ranks 0, 2`, or `ranks 0, 1, 2 and 13 more`."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = ", ".join(map(str, ranks[:STACKS_SHOWN]))
    return f"ranks {shown}" + (f" and {len(ranks) - STACKS_SHOWN} more" if len(ranks) > STACKS_SHOWN else "")


class UsableMemory(NamedTuple):
    """Bytes that processes on this machine can use, and the file of the control group that limits them; "" if the
    machine's memory is the limit."""

    n_bytes: int
    limit_file: str = ""

    def __str__(self) -> str:
        """Return `has 32 GiB` or `allows 8 GiB (/sys/fs/cgroup/memory.max)`."""
        n = format_bytes(self.n_bytes)
        return f"allows {n} ({self.limit_file})" if self.limit_file else f"has {n}"


def machine_memory() -> UsableMemory:
    """Return the memory of this machine, or the limit of this process's control groups if that is smaller."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = memory_limit()
    return (
        UsableMemory(total) if limit is None or limit.n_bytes >= total else UsableMemory(limit.n_bytes, str(limit.file))
    )


def machine_bytes() -> int:
    """Return the bytes of `machine_memory`."""
    return machine_memory().n_bytes


def share_bytes(ranks: int) -> float:
    """Return the bytes available for the model on each of `ranks` ranks on this machine."""
    return machine_bytes() / ranks - PROCESS_BYTES


@dataclass(frozen=True)
class Worker:
    """A rank's process and the connection to it.

    `log`: the file for its stderr. `stack`: the file to which the process writes its stack on SIGUSR1. While the file
    `stack` does not exist, the process does not handle the signal yet.
    """

    rank: int
    process: "subprocess.Popen[bytes] | BaseProcess"
    link: "Connection[Any, Any]"
    log: Path | None = None
    stack: Path | None = None

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def exit_code(self) -> int | None:
        """Return the exit code, -N if signal N ended the process, or None while it runs."""
        return self.process.exitcode if isinstance(self.process, BaseProcess) else self.process.poll()

    def wait(self) -> None:
        """Wait until the process has ended."""
        if isinstance(self.process, BaseProcess):
            self.process.join()
        else:
            self.process.wait()

    def send(self, task: Any) -> None:
        """Send a task to the process. A dead process is ignored here and reported by `results`."""
        work = pickle.dumps((extensions.loaded(), pickle.dumps(task)))
        with suppress(BrokenPipeError, ConnectionResetError):
            self.link.send_bytes(work)


@dataclass(frozen=True)
class Failure:
    """The failure of a rank. `error` is raised unchanged; if it is None, `text` describes the failure."""

    time_s: float
    text: str = ""
    error: ShardwrightError | None = None
    lost_peer: bool = False  # caused by the end of another rank
    interrupted: bool = False  # ended by a signal in STOPPING


class ParentConnection:
    """The connection of a rank's process to its parent, made before anything else in the process.

    When it closes, the parent has ended and this process exits at once. Otherwise it could wait in a collective for
    ever, because no other process would end it.
    """

    def __init__(self, connection: "Connection[Any, Any]") -> None:
        self._connection = connection
        self._tasks: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        with suppress(EOFError, OSError):
            while True:
                self._tasks.put(self._connection.recv_bytes())
        os._exit(1)

    def next_task(self) -> Any:
        """Return the next task from the parent, after loading the extensions that the parent has loaded."""
        extended, task = pickle.loads(self._tasks.get())
        extensions.load(extended)  # before any class that they define is unpickled
        return pickle.loads(task)

    def done(self, value: Any = None) -> None:
        """Send the result of the task to the parent."""
        # multiprocessing's own pickling would share tensors by file descriptor, which ends with this process.
        self._connection.send_bytes(pickle.dumps(value))

    def failed(self, error: BaseException) -> None:
        """Report an error to the parent. This process must end, because no collective completes without all ranks."""
        expected = in_one_sentence(error)
        text = "" if expected else f"failed: {type(error).__name__}: {error}\n\n{formatted(error)}\n"
        self.done(Failure(time.time(), text, expected, is_lost_peer(error), isinstance(error, KeyboardInterrupt)))


def threads_of_a_rank(world_size: int) -> int:
    """Return the number of threads of each rank on this machine: OMP_NUM_THREADS, or the cores divided by the ranks.

    Without a limit each rank would start as many threads as there are cores, which the ranks share.
    """
    given = os.environ.get("OMP_NUM_THREADS", "")
    return int(given) if given.isdecimal() else max(1, (os.cpu_count() or 1) // world_size)


def bind_to_loopback(environment: MutableMapping[str, str]) -> None:
    """Make gloo and NCCL listen on the loopback interface only, because all ranks are on this machine. An interface set
    in `environment` is kept. By default gloo uses the address that the host name resolves to."""
    names = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        if names:
            environment.setdefault(variable, names[0])


def formatted(error: BaseException) -> str:
    """Return the traceback of an error as Python prints it."""
    return "".join(traceback.format_exception(error)).rstrip()


def in_one_sentence(error: BaseException) -> ShardwrightError | None:
    """Return a rank's error as an error without a traceback, or None if the traceback is needed to explain it."""
    if isinstance(error, ShardwrightError):
        return error
    if limit := system_limit(error):
        return FullError(limit)
    if isinstance(error, SystemExit):
        place = traceback.extract_tb(error.__traceback__)[-1]
        return WorkerError(f"the command was ended by SystemExit({error.code!r}) at {place.filename}:{place.lineno}")
    return None


def is_lost_peer(error: BaseException) -> bool:
    """Return whether an error of torch.distributed means that another rank is gone."""
    from torch.distributed import DistError

    return isinstance(error, DistError) or (
        isinstance(error, RuntimeError)
        and not isinstance(error, ShardwrightError)
        and any(sign in str(error).lower() for sign in _LOST_PEER)
    )


def results(
    workers: Sequence[Worker],
    timeout_s: float | None = None,
    is_asked: Callable[[], bool] = lambda: False,
    watched: Callable[[], WorkerError | None] = lambda: None,
) -> list[Any]:
    """Return the value that each worker sent with `ParentConnection.done`, by rank.

    If a rank fails, its error is raised: a ShardwrightError unchanged, any other error as a WorkerError with the rank
    and its report, or how it died. Raises WorkerError with the stacks of ranks that are not done within `timeout_s`
    seconds. Raises KeyboardInterrupt if a signal in STOPPING ended the ranks and `is_asked()` returns True, that is,
    this process sent the signal on request. `watched` is called several times a second; an error that it returns is
    raised. No process is ended here; `end` does that.
    """
    answers: dict[int, Any] = {}
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    failures: dict[int, Failure] = {}
    at_fault = False
    while len(answers) < len(workers):
        left_s = _POLL_S if deadline is None else deadline - time.monotonic()
        answers |= _news([worker for worker in workers if worker.rank not in answers], left_s)
        if not failures and (failures := _failures(answers)):
            # Other ranks may have failed first and report it later.
            deadline = time.monotonic() + _LAST_WORDS_S
        if not at_fault and (at_fault := any(not failure.lost_peer for failure in _failures(answers).values())):
            deadline = min(deadline or math.inf, time.monotonic() + _OTHER_WORDS_S)
        if deadline is not None and time.monotonic() >= deadline:
            break
        if not failures and len(answers) < len(workers) and (problem := watched()) is not None:
            raise problem
    if failures:
        failures = _failures(answers)
        if is_asked() and any(failure.interrupted for failure in failures.values()):
            raise KeyboardInterrupt
        rank = min(failures, key=lambda rank: (failures[rank].lost_peer, failures[rank].time_s))
        failure, log = failures[rank], workers[rank].log
        if isinstance(failure.error, WorkerError):
            raise failure.error.with_rank(rank)
        if failure.error is not None:
            raise failure.error
        words = f"rank {rank} {failure.text}"
        raise WorkerError(words.rstrip() if log is None else f"{words}\nits full output: {log}").with_rank(rank)
    if waiting := [worker for worker in workers if worker.rank not in answers]:
        who = f"{ranks_in_words([worker.rank for worker in waiting])} {'was' if len(waiting) == 1 else 'were'}"
        shown = waiting[:STACKS_SHOWN]
        rest = (
            f"\n\n(stacks of {len(waiting) - len(shown)} more ranks are left out)" if len(waiting) > len(shown) else ""
        )
        crowd = (
            f"; {len(workers)} processes share {os.cpu_count()} cores here: give them more time, or fewer ranks"
            if len(workers) > 4 * (os.cpu_count() or 1)
            else ""
        )
        raise WorkerError(f"{who} not done within {timeout_s:g} s{crowd}\n{_stacks(shown)}".rstrip() + rest)
    return [answers[worker.rank] for worker in workers]


def end(workers: Iterable[Worker]) -> None:
    """Kill running workers and their children without waiting: no collective completes without all ranks."""
    workers = list(workers)
    for worker in workers:
        kill(worker)
    for worker in workers:
        worker.wait()
        worker.link.close()


def kill(worker: Worker) -> None:
    """Kill a rank that still runs, with its children."""
    if worker.exit_code() is None:
        with suppress(ProcessLookupError):
            # A rank that has just been forked does not lead a process group yet.
            (os.killpg if os.getpgid(worker.pid) == worker.pid else os.kill)(worker.pid, signal.SIGKILL)


def _failures(answers: dict[int, Any]) -> dict[int, Failure]:
    return {rank: answer for rank, answer in answers.items() if isinstance(answer, Failure)}


def _news(workers: Sequence[Worker], wait_s: float) -> dict[int, Any]:
    """Wait for the first report or death of a worker; return all reports received by then, by rank."""
    news = {}
    wait([worker.link for worker in workers], max(0.0, min(_POLL_S, wait_s)))
    for worker in workers:
        code = worker.exit_code()  # read before the connection, which then contains all that it sent
        try:
            if worker.link.poll():
                news[worker.rank] = pickle.loads(worker.link.recv_bytes())
            elif code is not None:
                news[worker.rank] = _silent_death(worker)
        except (EOFError, ConnectionResetError):
            news[worker.rank] = _silent_death(worker)
    return news


def _silent_death(worker: Worker) -> Failure:
    seen_s = time.time()
    worker.wait()
    code = worker.exit_code()
    assert code is not None
    if code < 0:
        try:
            name = f"{-code} ({signal.Signals(-code).name})"
        except ValueError:
            name = str(-code)
        text = f"was killed by signal {name}"
        if -code == signal.SIGKILL:
            text += "; when no one sent it, the machine ran out of memory (see dmesg)"
    elif code == 0:
        text = "left with code 0, but before its work was done"
    else:
        text = f"left with code {code} without a word"
    if last := _last_words(worker.log) if worker.log else []:
        text = "\n".join([text, "the end of its output:", *last])
    return Failure(seen_s, text, interrupted=-code in STOPPING)


def _last_words(log: Path) -> list[str]:
    """Return Python's report of a crash, or the last lines of the log."""
    lines = log.read_text(errors="replace").strip().splitlines()
    fatal = [line for line in lines if line.startswith("Fatal Python error")]
    if fatal:
        at = next((i for i, line in enumerate(lines) if line.startswith("Current thread")), len(lines))
        return [*fatal, *lines[at : at + 6]]
    return lines[-5:]


def _stacks(workers: Sequence[Worker]) -> str:
    """Return the stacks of these ranks. On SIGUSR1 a rank writes its stack to a file without running Python."""
    ready = {worker.rank: worker.stack for worker in workers if worker.stack is not None and worker.stack.exists()}
    for worker in workers:
        if worker.rank in ready:
            send_signal(worker.pid, signal.SIGUSR1)
    until = time.monotonic() + _STACKS_S
    while time.monotonic() < until and not all(path.stat().st_size for path in ready.values()):
        time.sleep(0.02)
    return "\n".join(
        f"--- rank {worker.rank} ---\n{ready[worker.rank].read_text() if worker.rank in ready else 'had not started'}"
        for worker in workers
    )
