"""One rank as a separate process, which `launch.py` forks from a server."""

import faulthandler
import gc
import os
import signal
import tomllib
import traceback
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from shardwright.system.console import LossyStream
from shardwright.system.errors import ShardwrightError
from shardwright.system.forks import Descriptor
from shardwright.system.processes import ParentConnection
from shardwright.system.signals import STOPPING


def serve(
    connection: "Connection[Any, Any]",
    store: tuple[str, Descriptor | str],
    output: Descriptor,
    error: Descriptor,
    environment: dict[str, str],
    n_threads: int,
    hang_up: bool,
) -> None:
    """Run the process of one rank. Its exit code is the exit code of the error.

    `connection`: to the launcher, which sends the run file and receives the result. `store`: the environment variable
    for the rendezvous file, and that file. `output`, `error`: destinations of stdout and stderr. `hang_up`: whether
    SIGHUP is not ignored.
    """
    link = ParentConnection(connection)
    _become_a_process_of_its_own(output, error, hang_up)
    name, file = store
    environment[name] = file if isinstance(file, str) else f"/proc/self/fd/{file.number}"
    os.environ.clear()
    os.environ.update(environment)
    import torch

    from shardwright.config import parse
    from shardwright.training.ranks import place_from_environment
    from shardwright.training.run import run

    torch.set_num_threads(n_threads)  # OMP_NUM_THREADS was read in the server, with the server's value
    gc.freeze()  # this process's collector skips the server's imports: saves 0.4 s of CPU
    place = place_from_environment()
    assert place is not None
    try:
        run_toml, quiet = link.next_task()
        link.done(run(parse(tomllib.loads(run_toml)), place, quiet=quiet))
    except BaseException as failure:
        # The log may be on a full disk that caused the failure.
        with suppress(OSError):
            traceback.print_exception(failure)
            LossyStream("stdout").flush()
            LossyStream("stderr").flush()
        link.failed(failure)
        # The other ranks may be waiting in a collective that this rank never joins: no clean-up can succeed.
        os._exit(exit_code(failure))
    LossyStream("stdout").flush()
    LossyStream("stderr").flush()
    os._exit(0)


def _become_a_process_of_its_own(output: Descriptor, error: Descriptor, hang_up: bool) -> None:
    """Replace the state inherited from the server: session, signal handlers, and output files."""
    os.setsid()  # a Ctrl-C of the terminal must reach the workers once, through the launcher
    os.dup2(output.number, 1)
    os.dup2(error.number, 2)
    for number in STOPPING:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    if not hang_up:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)
    faulthandler.enable()


def exit_code(error: BaseException) -> int:
    """Return the exit code of a rank that fails with `error`."""
    return error.exit_code if isinstance(error, ShardwrightError) else ShardwrightError.exit_code
