"""Run a function as N ranks of one gloo world on this machine.

Ranks are forked from a server process that has imported everything and has run no autograd, so a world of 4 starts
in about a tenth of a second. The function is found by name in its module, so it has to be at the top level of one
that can be imported, and its arguments and results have to be picklable.

Processes do not stay for a second world. PyTorch caches DTensor's results for a device mesh and reuses them for every
equal mesh, with the names of the first one's process groups. In another world these names are missing or wrong.

`report_progress` counts the progress of the ranks from the files that they write.
"""

import faulthandler
import gc
import itertools
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from shardwright.system import processes
from shardwright.system.errors import cleaning_up
from shardwright.system.forks import context, environment, preload, temporary_folder, undisturbed
from shardwright.system.processes import ParentConnection, Worker
from shardwright.system.units import format_seconds

TIMEOUT_S = 200.0
_EVERY_S = 1.0
"""Seconds between two reports of progress."""
Tell = Callable[[str], None]

_starting = threading.Lock()
_running: dict[int, list[Worker]] = {}
"""The ranks of the running worlds, by the number of the world; several threads may each run one."""
_numbers = itertools.count()


ADAPTER = "SHARDWRIGHT_ADAPTER"
"""Environment variable of the server with a module that it imports after its own, if it can."""


def start_server(adapter: str = "") -> None:
    """Start the process that ranks are forked from, which imports PyTorch while the caller continues. `adapter`: a
    module that it imports then. If the import raises, a rank imports the module again and reports the error.

    To be called before the caller imports PyTorch itself: both take seconds.
    """
    preload("shardwright.verification.preload")
    with _starting, environment({ADAPTER: adapter}), undisturbed():
        pass


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_s: float = TIMEOUT_S,
    n_threads: int | None = None,
) -> list[Any]:
    """Return `[function(*args) on rank 0, on rank 1, ...]`; inside, torch.distributed is set up on gloo and CPU. A rank
    has `n_threads`, by default OMP_NUM_THREADS, or its share of the cores.

    A ShardwrightError of a rank is raised here unchanged. Raises WorkerError, which names the rank, for any other
    exception, for a rank that dies, and for ranks that are not done within `timeout_s` seconds. No rank is left behind
    in any case.
    """
    preload("shardwright.verification.preload")
    with TemporaryDirectory(dir=temporary_folder()) as folder:
        workers: list[Worker] = []
        number = next(_numbers)
        _running[number] = workers
        with cleaning_up(lambda: processes.end(workers), lambda: _running.pop(number)):
            with _starting, undisturbed():
                for rank in range(world_size):
                    ours, theirs = multiprocessing.Pipe()
                    with theirs:
                        process = context.Process(target=_rank, args=(rank, folder, theirs), daemon=True)
                        process.start()
                    workers.append(Worker(rank, process, ours, stack=_stack_file(folder, rank)))
            for worker in workers:
                worker.send((function, args, world_size, timeout_s, n_threads))
            return processes.results(workers, timeout_s)


def end_all() -> None:
    """Kill the ranks of every world that runs; the threads that wait for them get a WorkerError."""
    for workers in list(_running.values()):
        for worker in list(workers):
            processes.kill(worker)


def _stack_file(folder: str, rank: int) -> Path:
    return Path(folder, f"stack-{rank}")


def _end_with_parent() -> None:
    """End this process, which a rank has forked, when the rank has ended; it would keep the rank's output open."""
    rank = os.getppid()

    def watch() -> None:
        while os.getppid() == rank:
            time.sleep(0.1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _rank(rank: int, folder: str, connection: "Connection[Any, Any]") -> None:
    import torch
    import torch.distributed as dist

    # This process's collector need not walk the server's imports, which would also copy their pages: 0.4 s of CPU a
    # rank.
    gc.freeze()
    os.dup2(2, 1)  # the standard output is the report of the command, and a trainer or a library may print
    pid = os.getpid()
    os.register_at_fork(after_in_child=_end_with_parent)
    link = ParentConnection(connection)
    stack = _stack_file(folder, rank)
    file = stack.with_suffix(".tmp").open("w")  # it has to outlive this function
    faulthandler.register(signal.SIGUSR1, file=file)
    os.rename(file.name, stack)  # from now on the signal is answered
    try:
        function, args, world_size, timeout_s, n_threads = link.next_task()
        processes.bind_to_loopback(os.environ)
        torch.set_num_threads(n_threads or processes.threads_of_a_rank(world_size))
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(os.path.join(folder, "store"), world_size),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout_s + 60),
        )
        value = function(*args)
        gc.collect()
        dist.barrier()
        sys.stdout.flush()  # a rank that is done may be ended at once
        link.done(value)
    except BaseException as error:
        if os.getpid() == pid:  # not in a process that the function has forked
            link.failed(error)
    finally:
        # No orderly end: leaving gloo in order costs seconds, and all results have been sent.
        os._exit(0)


@contextmanager
def report_progress(
    tell: Tell, what: str, count: Callable[[], int], total: int, unit: str = "records"
) -> Iterator[None]:
    """Call `tell` each second within a context, with the number of the run's `total` records that `count` returns, and
    about how long the others take."""
    ended = threading.Event()

    def watch() -> None:
        began_s = time.monotonic()
        while not ended.wait(_EVERY_S):
            done = min(count(), total)
            left_s = (time.monotonic() - began_s) / max(done, 1) * (total - done)
            left = f", about {format_seconds(left_s)} left" if done else ""
            tell(f"{what}: {done:,} of {total:,} {unit}{left}")

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
