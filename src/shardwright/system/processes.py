"""One process a rank on this machine: waits for them, reports the error of the rank that failed, ends the others.

`train` (training/launch.py) and `verify` (verification/ranks.py) fork their ranks from a server. Both hold each
rank as a `Worker` and wait in `results`. In the process of a rank, `ParentConnection` is the other end of the worker's
connection.
"""

import errno
import math
import os
import pickle
import queue
import signal
import socket
import subprocess
import termios
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from shardwright.system import extensions
from shardwright.system.control_groups import memory_limit
from shardwright.system.errors import FullError, ShardwrightError, WorkerError, system_limit
from shardwright.system.units import GiB, format_bytes

_POLL_S = 0.25  # how often processes are looked at whose connections say nothing
_LAST_WORDS_S = 1.0  # how long the report of the rank at fault is waited for, where others have lost it
_OTHER_WORDS_S = 0.2  # how long that of another is, which may have failed before the one that has told
_STACKS_S = 2.0  # how long ranks that hang are given to write down their stacks
PROCESS_BYTES = 0.3 * GiB
"""Of a rank before it holds any of the model: Python, PyTorch and its libraries."""
STACKS_SHOWN = 8
"""Of ranks that hang, so many tell where they stand: the others mostly stand in the same places."""
STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)
"""Signals that ask a run to end: Ctrl-C, the end of a job's time, the loss of the terminal, Ctrl-\\, and the one that
`sbatch --signal=USR1` sends before the end of a job's time."""
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
    """`rank 3`, `ranks 0, 2`, or `ranks 0, 1, 2 and 13 more`."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = ", ".join(map(str, ranks[:STACKS_SHOWN]))
    return f"ranks {shown}" + (f" and {len(ranks) - STACKS_SHOWN} more" if len(ranks) > STACKS_SHOWN else "")


class UsableMemory(NamedTuple):
    """Bytes that processes on this machine can use, and the file of their control group that allows no more; "" where
    the machine has no more."""

    n_bytes: int
    limit_file: str = ""

    def __str__(self) -> str:
        """`has 32 GiB`, `allows 8 GiB (/sys/fs/cgroup/memory.max)`: what the machine does."""
        n = format_bytes(self.n_bytes)
        return f"allows {n} ({self.limit_file})" if self.limit_file else f"has {n}"


def machine_memory() -> UsableMemory:
    """The memory of this machine, or what the control groups of this process allow of it."""
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = memory_limit()
    return (
        UsableMemory(there) if limit is None or limit.n_bytes >= there else UsableMemory(limit.n_bytes, str(limit.file))
    )


def machine_bytes() -> int:
    """The bytes of `machine_memory`."""
    return machine_memory().n_bytes


def share_bytes(ranks: int) -> float:
    """What each of so many ranks on this machine can hold of a model."""
    return machine_bytes() / ranks - PROCESS_BYTES


@dataclass(frozen=True)
class Worker:
    """A rank's process and the connection to it.

    `log` is the file that its stderr goes to; `stack` the one into which SIGUSR1 makes it write its stack. A file
    `stack` that is not there yet belongs to a process that does not answer the signal yet.
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
        """-N of a process that signal N has ended; None while it runs."""
        return self.process.exitcode if isinstance(self.process, BaseProcess) else self.process.poll()

    def wait(self) -> None:
        """Until the process has ended."""
        if isinstance(self.process, BaseProcess):
            self.process.join()
        else:
            self.process.wait()

    def send(self, task: Any) -> None:
        """Give the process something to do. One that is dead is left to `results` to report."""
        work = pickle.dumps((extensions.loaded(), pickle.dumps(task)))
        with suppress(BrokenPipeError, ConnectionResetError):
            self.link.send_bytes(work)


@dataclass(frozen=True)
class Failure:
    """How a rank failed. `error` is raised as it is; where it is None, `text` says what happened to the rank."""

    time_s: float
    text: str = ""
    error: ShardwrightError | None = None
    lost_peer: bool = False  # another rank's end is the cause
    interrupted: bool = False  # one of STOPPING ended it


class ParentConnection:
    """The connection of a rank's process to the one that started it, which is to be made first of all.

    When it closes, the parent is gone and this process ends at once: no one else would end it, and it may wait in a
    collective for ever.
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
        """What the parent sends next; the extensions that the parent has loaded are loaded here, too."""
        extended, task = pickle.loads(self._tasks.get())
        extensions.load(extended)  # before anything that they define is unpickled
        return pickle.loads(task)

    def done(self, value: Any = None) -> None:
        """Tell the parent what the task came to."""
        # multiprocessing's own pickling would share tensors by file descriptor, which ends with this process.
        self._connection.send_bytes(pickle.dumps(value))

    def failed(self, error: BaseException) -> None:
        """Tell the parent what went wrong. Without all ranks no collective completes, so this process has to end."""
        expected = in_one_sentence(error)
        text = "" if expected else f"failed: {type(error).__name__}: {error}\n\n{formatted(error)}\n"
        self.done(Failure(time.time(), text, expected, is_lost_peer(error), isinstance(error, KeyboardInterrupt)))


def threads_of_a_rank(world_size: int) -> int:
    """Threads of each rank on this machine: OMP_NUM_THREADS, or the cores divided by the ranks.

    Ranks share the cores: without a bound each would start as many threads as there are cores.
    """
    given = os.environ.get("OMP_NUM_THREADS", "")
    return int(given) if given.isdecimal() else max(1, (os.cpu_count() or 1) // world_size)


def bind_to_loopback(environment: MutableMapping[str, str]) -> None:
    """Have gloo and NCCL listen on the loopback interface alone, as all ranks are on this machine; unless it says which
    interface they are to use. Without that gloo takes the address that the host name resolves to."""
    names = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        if names:
            environment.setdefault(variable, names[0])


@contextmanager
def on_signals(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Have `handler` called for the signals of STOPPING while inside, but for SIGHUP where it is ignored (nohup)."""

    def hear(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            leave_dead_terminal()
        handler(number, frame)

    heard = [each for each in STOPPING if each != signal.SIGHUP or signal.getsignal(each) != signal.SIG_IGN]
    before = {number: signal.signal(number, hear) for number in heard}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


def leave_dead_terminal() -> None:
    """Send stdout and stderr nowhere where their terminal is gone: each write to it would be an OSError."""
    for descriptor in (1, 2):
        try:
            termios.tcgetattr(descriptor)
        except termios.error as error:
            if error.args[0] == errno.EIO:
                os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)


def formatted(error: BaseException) -> str:
    """The traceback of an error, as Python prints it."""
    return "".join(traceback.format_exception(error)).rstrip()


def in_one_sentence(error: BaseException) -> ShardwrightError | None:
    """Return the error of a rank as one that needs no traceback; None for what only a traceback explains."""
    if isinstance(error, ShardwrightError):
        return error
    if isinstance(error, OSError) and (told := system_limit(error)):
        return FullError(told)
    if isinstance(error, SystemExit):
        place = traceback.extract_tb(error.__traceback__)[-1]
        return WorkerError(f"the command was ended by SystemExit({error.code!r}) at {place.filename}:{place.lineno}")
    return None


def is_lost_peer(error: BaseException) -> bool:
    """Whether an error of torch.distributed says that another rank is gone."""
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
    """What each worker has sent with `ParentConnection.done`, by rank.

    Where one fails, its error is raised: a ShardwrightError as it is, all else as a WorkerError that names the rank
    and says what it told, or how it died. Raises WorkerError with their stacks for ranks that are not done within
    `timeout_s`, and KeyboardInterrupt for ranks that a signal of STOPPING has ended if `is_asked()`, that is, if this
    process has sent it to them on request. `watched` is called several times a second; what it returns, other than
    None, is raised. Ends no process: that is `end`'s.
    """
    told: dict[int, Any] = {}
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    failures: dict[int, Failure] = {}
    at_fault = False
    while len(told) < len(workers):
        left_s = _POLL_S if deadline is None else deadline - time.monotonic()
        told |= _news([worker for worker in workers if worker.rank not in told], left_s)
        if not failures and (failures := _failures(told)):
            # Others may have failed first and tell it later.
            deadline = time.monotonic() + _LAST_WORDS_S
        if not at_fault and (at_fault := any(not failure.lost_peer for failure in _failures(told).values())):
            deadline = min(deadline or math.inf, time.monotonic() + _OTHER_WORDS_S)
        if deadline is not None and time.monotonic() >= deadline:
            break
        if not failures and len(told) < len(workers) and (found := watched()) is not None:
            raise found
    if failures:
        failures = _failures(told)
        if is_asked() and any(failure.interrupted for failure in failures.values()):
            raise KeyboardInterrupt
        rank = min(failures, key=lambda rank: (failures[rank].lost_peer, failures[rank].time_s))
        failure, log = failures[rank], workers[rank].log
        if isinstance(failure.error, WorkerError):
            raise failure.error.of_rank(rank)
        if failure.error is not None:
            raise failure.error
        words = f"rank {rank} {failure.text}"
        raise WorkerError(words.rstrip() if log is None else f"{words}\nits full output: {log}").of_rank(rank)
    if waiting := [worker for worker in workers if worker.rank not in told]:
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
    return [told[worker.rank] for worker in workers]


def end(workers: Iterable[Worker]) -> None:
    """Kill what still runs, with its children: without all ranks no collective completes, so nothing is waited for."""
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
            # A rank that has only just been forked leads no group yet.
            (os.killpg if os.getpgid(worker.pid) == worker.pid else os.kill)(worker.pid, signal.SIGKILL)


def _failures(told: dict[int, Any]) -> dict[int, Failure]:
    return {rank: answer for rank, answer in told.items() if isinstance(answer, Failure)}


def _news(workers: Sequence[Worker], wait_s: float) -> dict[int, Any]:
    """What workers have told by now, or how they died; waits for the first of it."""
    news = {}
    wait([worker.link for worker in workers], max(0.0, min(_POLL_S, wait_s)))
    for worker in workers:
        code = worker.exit_code()  # before its connection is read, which then holds all that it has told
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
    """Python's report of a crash, if there is one, or the last lines."""
    lines = log.read_text(errors="replace").strip().splitlines()
    fatal = [line for line in lines if line.startswith("Fatal Python error")]
    if fatal:
        at = next((i for i, line in enumerate(lines) if line.startswith("Current thread")), len(lines))
        return [*fatal, *lines[at : at + 6]]
    return lines[-5:]


def _stacks(workers: Sequence[Worker]) -> str:
    """The stack of each of these ranks, which writes it to a file when SIGUSR1 comes, without running any Python."""
    ready = {worker.rank: worker.stack for worker in workers if worker.stack is not None and worker.stack.exists()}
    for worker in workers:
        if worker.rank in ready:
            with suppress(ProcessLookupError):
                os.kill(worker.pid, signal.SIGUSR1)
    until = time.monotonic() + _STACKS_S
    while time.monotonic() < until and not all(path.stat().st_size for path in ready.values()):
        time.sleep(0.02)
    return "\n".join(
        f"--- rank {worker.rank} ---\n{ready[worker.rank].read_text() if worker.rank in ready else 'had not started'}"
        for worker in workers
    )
