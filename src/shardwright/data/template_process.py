"""The process that renders conversations by a chat template: a stranger's program, bounded in time and memory."""

import json
import signal
import subprocess
import sys
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any

from shardwright.data.template import TemplateRefusal
from shardwright.system.errors import DataError
from shardwright.system.units import GiB, format_bytes

CPU_S = 10
"""CPU-seconds for a conversation."""
MEMORY_BYTES = 2 * GiB
_START = "import sys; sys.path.append(sys.argv[1]); from shardwright.data.template import main; main()"


class TemplateProcess:
    """Renders conversations by a template. `reads`: the variables that the template reads.

    `settings`: `template`, `tokens` (name -> text), `special_tokens`, `now` (seconds since 1970) and `utc`. Raises
    DataError for a template that is not Jinja, and for a conversation that takes more than CPU_S or MEMORY_BYTES.
    """

    def __init__(self, **settings: Any) -> None:
        root = str(Path(__file__).parents[2])
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", _START, root],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        weakref.finalize(self, _end, self._process)
        answer = self._ask(settings | {"cpu_s": CPU_S, "memory_bytes": MEMORY_BYTES})
        if "error" in answer:
            raise DataError(f"the chat template is not Jinja: {answer['error']}")
        self.reads = frozenset(answer["reads"])

    def write(
        self, messages: list[dict[str, Any]], trained: list[bool], given: dict[str, Any]
    ) -> tuple[str, list[list[int]]]:
        answer = self._ask([messages, trained, given])
        if "error" in answer:
            raise TemplateRefusal(answer["error"])
        return answer["text"], answer["spans"]

    def prompt(self, messages: list[dict[str, Any]]) -> str:
        answer = self._ask([messages, None, {}])
        if "error" in answer:
            raise TemplateRefusal(answer["error"])
        return str(answer["text"])

    def _ask(self, question: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            # Values that are not JSON (dates and bytes of Parquet) are shown to a template as the name of their type.
            self._process.stdin.write(json.dumps(question, default=_type_name).encode() + b"\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = b""
        if not line:
            ended_by = -self._process.wait()
            too_slow = ended_by in (signal.SIGXCPU, signal.SIGKILL)
            reason = f"{CPU_S} CPU-seconds" if too_slow else f"{format_bytes(MEMORY_BYTES)} of memory"
            raise DataError(
                f"the chat template takes more than {reason} for a conversation, as one that loops without end does; "
                f"choose another with --chat-template"
            )
        answer: dict[str, Any] = json.loads(line)
        return answer


def _type_name(value: Any) -> str:
    return f"<{type(value).__name__}>"


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with suppress(BrokenPipeError):  # of a question that a dead process never read
                stream.close()
