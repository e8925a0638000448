"""The only multi-process helper of the tests: run a function as N ranks of one gloo world.

Ranks are forked from a server process that has imported everything and has run no autograd, so a world of 4 starts
in about a tenth of a second. The function is found by name in its module, so it has to be at the top level of one.
A rank that raises ends the world with its own traceback; a world that hangs ends by a timeout that names the
ranks that had not come back, with the stack of each.
"""

import faulthandler
import gc
import multiprocessing
import multiprocessing.connection
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["tests.preload"])


def run_ranks(function: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 60.0) -> list[Any]:
    """`[function(*args) on rank 0, on rank 1, ...]`; inside, torch.distributed is set up on gloo and CPU."""
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        pipes, processes = [], []
        for rank in range(world_size):
            ours, theirs = _context.Pipe(duplex=False)
            process = _context.Process(
                target=_rank, args=(function, args, rank, world_size, folder, theirs, timeout_s), daemon=True
            )
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        try:
            return _collect(pipes, folder, timeout_s)
        finally:
            for process in processes:
                process.join(5)
                if process.is_alive():
                    process.kill()
                    process.join()


def _collect(pipes: list[Any], folder: str, timeout_s: float) -> list[Any]:
    results: dict[int, Any] = {}
    deadline = time.monotonic() + timeout_s
    while len(results) < len(pipes):
        waiting = {pipe: rank for rank, pipe in enumerate(pipes) if rank not in results}
        ready = multiprocessing.connection.wait(list(waiting), max(0.0, deadline - time.monotonic()))
        if not ready:
            ranks = sorted(waiting.values())
            raise TimeoutError(f"ranks {ranks} did not come back within {timeout_s} s\n{_stacks(folder, ranks)}")
        failures = []
        for pipe in ready:
            rank = waiting[pipe]
            try:
                good, value = pickle.loads(pipe.recv_bytes())
            except EOFError:
                good, value = False, "died without a word"
            results[rank] = value
            if not good:
                failures.append(f"rank {rank}: {value}")
        if failures:
            raise AssertionError("\n".join(failures))
    return [results[rank] for rank in range(len(pipes))]


def _stacks(folder: str, ranks: list[int]) -> str:
    """The stacks that the ranks wrote down when their own alarms went off, a little before the timeout."""
    found = []
    for rank in ranks:
        path = os.path.join(folder, f"stack-{rank}")
        if os.path.exists(path):
            with open(path) as file:
                found.append(f"--- rank {rank} ---\n{file.read()}")
    return "\n".join(found)


def _rank(function: Any, args: Any, rank: int, world_size: int, folder: str, pipe: Any, timeout_s: float) -> None:
    import torch
    import torch.distributed as dist

    stack = open(os.path.join(folder, f"stack-{rank}"), "w")  # noqa: SIM115  (it has to outlive this function)
    faulthandler.dump_traceback_later(max(0.1, timeout_s - 0.5), file=stack)
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(os.path.join(folder, "store"), world_size),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=120),
        )
        value = function(*args)
        gc.collect()
        dist.barrier()
        _send(pipe, True, value)
    except BaseException:
        _send(pipe, False, traceback.format_exc())
    finally:
        faulthandler.cancel_dump_traceback_later()
        pipe.close()
        sys.stdout.flush()
        # No orderly end: leaving gloo in order costs seconds, and what was to be said has been sent.
        os._exit(0)


def _send(pipe: Any, good: bool, value: Any) -> None:
    # multiprocessing's own pickling would share tensors by file descriptor, which ends with this process.
    pipe.send_bytes(pickle.dumps((good, value)))
