"""Safe printing: control characters in text from files are escaped, secrets in URLs are masked, and a process that has
more to do than to print survives the loss of its output."""

import errno
import os
import re
import sys
import termios
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, Literal, TypeVar

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from shardwright.system.errors import NO_ROOM, without_secrets

T = TypeVar("T")
_NOT_SHOWN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\ud800-\udfff\U000e0000-\U000e007f]"
)
"""Control characters except tab and newline, line separators, marks and overrides of direction, characters without a
width (except the joiners of emoji and Persian), and halves of surrogate pairs."""


def visible(text: str) -> str:
    """Return a text from any file in printable form: control characters as `\\x1b`, line separators, marks of
    direction and characters without a width as `\\u202e`, secrets in URLs as `***`."""
    return _NOT_SHOWN.sub(_as_escape, without_secrets(text))


def visible_line(text: str) -> str:
    """Return `visible` text with its newlines and tabs as `\\x0a` and `\\x09`: a name starts no line of its own."""
    return visible(text).replace("\n", "\\x0a").replace("\t", "\\x09")


def _as_escape(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}" if code < 2**16 else f"\\U{code:08x}"


class PlainConsole(Console):
    """A console that passes every text through `visible`."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(visible(segment.text), segment.style)

    def on_broken_pipe(self) -> None:
        """Raise the BrokenPipeError that is being handled, which ends the verb quietly. rich would raise SystemExit."""
        raise


class LossyStream:
    """stdout or stderr, for text that may be lost: a write is dropped if the terminal is gone, the reader of the pipe
    has ended (`| head`), or the file is on a full disk."""

    def __init__(self, name: Literal["stdout", "stderr"]) -> None:
        self._name = name

    def write(self, text: str) -> int:
        """Write the text, or drop it."""
        return self._or_drop(lambda stream: stream.write(text), len(text))

    def flush(self) -> None:
        """Flush, or drop the text that is left."""
        self._or_drop(lambda stream: stream.flush(), None)

    def _or_drop(self, act: Callable[[Any], T], otherwise: T) -> T:
        try:
            return act(getattr(sys, self._name))
        except OSError as error:
            if error.errno == errno.EIO:
                leave_dead_terminal()
            elif error.errno == errno.EPIPE:
                discard_output(getattr(sys, self._name).fileno())
            elif error.errno not in NO_ROOM:
                raise
            return otherwise

    def __getattr__(self, name: str) -> Any:
        return getattr(getattr(sys, self._name), name)


@contextmanager
def stderr_dropped_on_error() -> Iterator[None]:
    """Hold back text that libraries write to descriptor 2 in a context. It is written at the end of the context, and
    dropped if the context raises, because the error then says the same. Without a way to hold it back, it is written
    at once."""
    with ExitStack() as stack:
        try:
            buffer = stack.enter_context(open(os.memfd_create("shardwright-stderr"), "r+b", buffering=0))
            kept = stack.enter_context(open(os.dup(2), "wb", buffering=0))
        except (AttributeError, OSError):  # another system than Linux; stderr is closed, or too few descriptors
            yield
            return
        sys.stderr.flush()
        os.dup2(buffer.fileno(), 2)
        try:
            yield
        except BaseException:
            buffer.truncate(0)
            raise
        finally:
            sys.stderr.flush()
            os.dup2(kept.fileno(), 2)
            buffer.seek(0)
            with suppress(OSError):
                kept.write(buffer.read())


def discard_output(descriptor: int) -> None:
    """Redirect a descriptor to /dev/null, so that text which is still buffered is dropped without an error."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)


def leave_dead_terminal() -> None:
    """Redirect stdout and stderr to /dev/null if their terminal is gone, since each write to it would raise OSError."""
    for descriptor in (1, 2):
        try:
            termios.tcgetattr(descriptor)
        except termios.error as error:
            if error.args[0] == errno.EIO:
                discard_output(descriptor)
