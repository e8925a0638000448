"""Run a function as N ranks of one gloo world on this machine, and say which rank is at fault if one is.

Ranks are forked from a server process that has imported everything and has run no autograd, so a world of 4 starts
in about a tenth of a second. The function is found by name in its module, so it has to be at the top level of one
that can be imported, and what it takes and returns has to be picklable.
"""

import faulthandler
import gc
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from types import ModuleType
from typing import Any

from shardwright import extensions
from shardwright.errors import ShardwrightError, WorkerError

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(["shardwright.verify.preload"])

TIMEOUT_S = 60.0
_STACKS_S = 2.0  # how long ranks that hang are given to write down where they stand


def run_ranks(function: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = TIMEOUT_S) -> list[Any]:
    """`[function(*args) on rank 0, on rank 1, ...]`; inside, torch.distributed is set up on gloo and CPU.

    What a rank raises on purpose (a ShardwrightError) is raised here as it is. Raises WorkerError, which names the
    rank, for any other exception, for a rank that dies, and for ranks that are not done within `timeout_s` seconds.
    Whatever happens, no rank is left behind.
    """
    work = pickle.dumps((function, args))
    with tempfile.TemporaryDirectory(prefix="shardwright-ranks-") as folder:
        pipes: list[Any] = []
        processes: list[Any] = []
        try:
            with _undisturbed():
                for rank in range(world_size):
                    ours, theirs = context.Pipe(duplex=False)
                    process = context.Process(
                        target=_rank,
                        args=(extensions.loaded(), work, rank, world_size, folder, theirs, timeout_s),
                        daemon=True,
                    )
                    process.start()
                    theirs.close()
                    pipes.append(ours)
                    processes.append(process)
            results = _collect(pipes, processes, folder, timeout_s)
        except BaseException:
            # Without all ranks no collective completes: none is waited for.
            for process in processes:
                process.kill()
            raise
        finally:
            for process in processes:
                process.join()
                process.close()
            for pipe in pipes:
                pipe.close()
    return results


@contextmanager
def _undisturbed() -> Iterator[None]:
    """What is started here ignores Ctrl-C, which this process answers for all; and does not run the main script again,
    as multiprocessing would have it do, so that a script needs no `if __name__ == "__main__"`."""
    main = sys.modules["__main__"]
    resource_tracker.ensure_running()  # which ends by unblocking SIGINT, so it comes first
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        forkserver.ensure_running()
        yield
    finally:
        sys.modules["__main__"] = main
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _collect(pipes: Sequence[Any], processes: Sequence[Any], folder: str, timeout_s: float) -> list[Any]:
    results: dict[int, Any] = {}
    deadline = time.monotonic() + timeout_s
    while len(results) < len(pipes):
        waiting = {pipe: rank for rank, pipe in enumerate(pipes) if rank not in results}
        ready = multiprocessing.connection.wait(list(waiting), max(0.0, deadline - time.monotonic()))
        if not ready:
            ranks = sorted(waiting.values())
            who = f"rank {ranks[0]} was" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} were"
            raise WorkerError(f"{who} not done within {timeout_s:g} s\n{_stacks(folder, ranks, processes)}".rstrip())
        failures: list[tuple[float, int, BaseException | str]] = []
        for pipe in ready:
            rank = waiting[pipe]
            try:
                failed_at, value = pickle.loads(pipe.recv_bytes())  # type: ignore[union-attr]
            except EOFError:
                failed_at, value = 0.0, _cause_of_death(processes[rank])
            results[rank] = value
            if failed_at is not None:
                failures.append((failed_at, rank, value))
        if failures:
            # A rank that is left alone fails too, but later.
            _, rank, cause = min(failures, key=lambda failure: failure[:2])
            if isinstance(cause, ShardwrightError):
                raise cause
            raise WorkerError(f"rank {rank} of {len(pipes)} {cause}")
    return [results[rank] for rank in range(len(pipes))]


def _cause_of_death(process: Any) -> str:
    process.join(5)
    code = process.exitcode
    if code is None or code >= 0:
        return f"left with code {code} without a word"
    name = signal.Signals(-code).name if -code in iter(signal.Signals) else "unknown"
    memory = "; when no one sent it, the machine ran out of memory" if -code == signal.SIGKILL else ""
    return f"was killed by signal {-code} ({name}){memory}"


def _stacks(folder: str, ranks: Sequence[int], processes: Sequence[Any]) -> str:
    """Where these ranks stand: each is asked by a signal, and writes it down without running any Python."""
    paths = {rank: Path(folder, f"stack-{rank}") for rank in ranks}
    there = {rank: path for rank, path in paths.items() if path.exists()}
    for rank in there:
        with suppress(ProcessLookupError):
            os.kill(processes[rank].pid, signal.SIGUSR1)
    until = time.monotonic() + _STACKS_S
    while time.monotonic() < until and not all(path.stat().st_size for path in there.values()):
        time.sleep(0.02)
    return "\n".join(
        f"--- rank {rank} ---\n{path.read_text() if rank in there else 'had not started'}"
        for rank, path in paths.items()
    )


def _rank(
    extended: Sequence[str], work: bytes, rank: int, world_size: int, folder: str, pipe: Any, timeout_s: float
) -> None:
    import torch
    import torch.distributed as dist

    # What the server has imported need not be walked by this process's collector, which would also copy its pages:
    # 0.4 s of CPU a rank.
    gc.freeze()
    _die_with_parent()
    stack = open(os.path.join(folder, f"stack.{rank}"), "w")  # noqa: SIM115  (it has to outlive this function)
    faulthandler.register(signal.SIGUSR1, file=stack)
    os.rename(stack.name, os.path.join(folder, f"stack-{rank}"))  # from now on the signal is answered
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // world_size))
    try:
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(os.path.join(folder, "store"), world_size),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout_s + 60),
        )
        extensions.load(extended)  # before anything that they define is unpickled
        function, args = pickle.loads(work)
        value = function(*args)
        gc.collect()
        dist.barrier()
        _send(pipe, None, value)
    except ShardwrightError as error:
        _send(pipe, time.time(), error)
    except BaseException as error:
        _send(pipe, time.time(), f"failed: {type(error).__name__}: {error}\n\n{traceback.format_exc()}".rstrip())
    finally:
        pipe.close()
        sys.stdout.flush()
        # No orderly end: leaving gloo in order costs seconds, and what was to be said has been sent.
        os._exit(0)


def _die_with_parent() -> None:
    """A rank whose parent was killed has no one to end it, and may wait in a collective for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _send(pipe: Any, failed_at: float | None, value: Any) -> None:
    # multiprocessing's own pickling would share tensors by file descriptor, which ends with this process.
    pipe.send_bytes(pickle.dumps((failed_at, value)))
