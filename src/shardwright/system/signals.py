"""Signals that ask this process to end, and commands that end it without saying so."""

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.machinery import ExtensionFileLoader
from types import FrameType
from typing import NoReturn

from shardwright.system.console import leave_dead_terminal
from shardwright.system.errors import WorkerError

_POLL_S = 0.25
"""Interval after which a signal that waits for an import is raised again, in seconds."""
_LONGEST_IMPORT_S = 5.0
_AGAIN_S = 1.0
STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)
"""Signals that ask a run to end: Ctrl-C, the end of a job's time, the loss of the terminal, Ctrl-\\, and the signal
that `sbatch --signal=USR1` sends before the end of a job's time."""
_signal_s: float | None = None
"""When the first signal that is not handled yet came; None if there is none."""


def send_signal(pid: int, number: int) -> None:
    """Send a signal to a process unless it has ended, which it may at any time."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)


@contextmanager
def on_signals(handler: Callable[[int, FrameType | None], None], *, last: bool = False) -> Iterator[None]:
    """Call `handler` for the signals in STOPPING during the block, except for SIGHUP if it is ignored (nohup).

    `last`: the process ends soon after the block. SIGUSR1, which only asks for a stop, is then ignored until the end.
    """

    def hear(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            leave_dead_terminal()
        handler(number, frame)

    heard = [number for number in STOPPING if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, hear) for number in heard}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, signal.SIG_IGN if last and number == signal.SIGUSR1 else earlier)


@contextmanager
def interrupts(*, last: bool = False) -> Iterator[None]:
    """Raise KeyboardInterrupt for the signals in STOPPING during the block. `last`: as in `on_signals`.

    C code may ignore an error of the Python code that it calls: PyTorch imports numpy, and continues without it. So a
    signal while an extension module is imported is raised when that import has ended
    (`raise_postponed_interrupt`), or `_LONGEST_IMPORT_S` later, or at the second signal, and is raised again every
    `_AGAIN_S` until the block is left or `interrupt_is_handled` is called, except during the cleanup that it has
    caused.
    """
    before = signal.getsignal(signal.SIGALRM)

    def interrupt(number: int, frame: FrameType | None) -> None:
        global _signal_s
        if number == signal.SIGALRM and _signal_s is None:  # it was on its way when the signal was handled
            return
        again, now_s = _signal_s is not None, time.monotonic()
        if _signal_s is None:
            _signal_s = now_s
            signal.signal(signal.SIGALRM, interrupt)
        importing = _loads_extension(frame) and now_s - _signal_s < _LONGEST_IMPORT_S
        signal.setitimer(signal.ITIMER_REAL, _POLL_S if importing else _AGAIN_S)
        cleaning = again and _handles_interrupt(sys.exc_info()[1])
        if not (importing or cleaning) or (again and number != signal.SIGALRM):
            raise KeyboardInterrupt

    with on_signals(interrupt, last=last):
        try:
            yield
        finally:
            interrupt_is_handled()
            if signal.getsignal(signal.SIGALRM) is interrupt:
                signal.signal(signal.SIGALRM, before)


def interrupt_is_handled() -> None:
    """Raise the signals of `interrupts` that have come until now no more. A verb that ends normally at Ctrl-C calls it
    before its last work, so that this is not interrupted again."""
    global _signal_s
    if _signal_s is not None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        _signal_s = None


def raise_postponed_interrupt() -> None:
    """Raise KeyboardInterrupt if a signal of `interrupts` has waited for the end of an import."""
    if _signal_s is not None:
        raise KeyboardInterrupt


def _handles_interrupt(error: BaseException | None) -> bool:
    """Return whether an error that is being handled is a KeyboardInterrupt, or came up while one was handled."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__context__
    return error is not None


def _loads_extension(frame: FrameType | None) -> bool:
    """Return whether a frame runs below the initialisation of an extension module in C."""
    while frame is not None and not isinstance(frame.f_locals.get("self"), ExtensionFileLoader):
        frame = frame.f_back
    return frame is not None


@contextmanager
def leaving_is_failure() -> Iterator[None]:
    """Let `os._exit(0)` end this process with the exit code of a failure and one line on stderr, in any thread of the
    block: an extension would otherwise end a run as if it were complete. Forked processes may exit."""
    leave, process = os._exit, os.getpid()

    def fail(code: int) -> NoReturn:
        if code == 0 and os.getpid() == process:
            place = traceback.extract_stack()[-2]
            text = f"error: the command was ended by os._exit(0) at {place.filename}:{place.lineno}\n"
            with suppress(OSError):
                os.write(2, text.encode(errors="backslashreplace"))
            code = WorkerError.exit_code
        leave(code)

    os._exit = fail  # type: ignore[assignment]
    try:
        yield
    finally:
        os._exit = leave
