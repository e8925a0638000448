"""Safe printing: control characters in text from files are escaped, and secrets in URLs are masked."""

import re
from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from shardwright.system.errors import without_secrets

_NOT_SHOWN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters except tab and newline, bidirectional overrides, and halves of surrogate pairs."""


def visible(text: str) -> str:
    """Return a text from any file in printable form: control characters as `\\x1b`, bidirectional overrides as
    `\\u202e`, secrets in URLs as `***`."""
    return _NOT_SHOWN.sub(_as_escape, without_secrets(text))


def _as_escape(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"


class PlainConsole(Console):
    """A console that passes every text through `visible`."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(visible(segment.text), segment.style)
