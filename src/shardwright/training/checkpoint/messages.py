"""Point-to-point messages of files and texts between ranks, over a separate process group. A thread can use it
during training without changing the order of training's collectives. A message involves only its two ranks."""

import json
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, BinaryIO

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.system.errors import CheckpointError
from shardwright.system.files import parse_json
from shardwright.system.units import MiB

_CHUNK_BYTES = 16 * MiB
_NONE = -1
"""Size sent if the file cannot be read."""


class CheckpointMessages:
    """Sends and receives messages. For each pair of ranks, both must send and receive in the same order."""

    def __init__(self, timeout_s: float) -> None:
        """Create the process group; every rank calls this. `timeout_s`: how long to wait for each chunk, in seconds."""
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        self._sent: list[tuple[Any, Tensor]] = []
        """Pending sends, each with the tensor that it sends, which must stay alive."""

    def send_file(self, path: Path | None, to: int) -> None:
        """Start to send a file from its memory mapping. `path` None: report to the receiver that there is no file."""
        n = _NONE if path is None else path.stat().st_size
        self._send(torch.tensor(n), to)
        if path is not None and n:
            content = torch.from_file(str(path), shared=False, size=n, dtype=torch.uint8)
            self._send_parts(content, to)

    def send_text(self, value: Any, to: int) -> None:
        """Start to send a value as JSON."""
        text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        self._send(torch.tensor(len(text)), to)
        self._send_parts(text, to)

    def receive_text(self, source: int) -> Any:
        """Return the value sent by `send_text` on rank `source`."""
        text = torch.empty(self._size(source), dtype=torch.uint8)
        for part in _parts(text):
            dist.recv(part, source, group=self._group)
        return parse_json(text.numpy().tobytes())

    def receive_file(self, path: Path, source: int) -> None:
        """Write to `path` the file sent by `send_file` on rank `source`. The whole message is received even if
        writing fails. Raises OSError if writing fails, and CheckpointError if the sender had no file."""
        n = self._size(source)
        failed: OSError | None = None
        if n == _NONE:
            raise CheckpointError(f"rank {source} had no {path.name} to send")
        file: BinaryIO | None = None
        fresh, part = path.with_name(f"{path.name}.tmp"), torch.empty(min(n, _CHUNK_BYTES), dtype=torch.uint8)
        try:
            file = fresh.open("wb")
        except OSError as error:
            failed = error
        for begin in range(0, n, _CHUNK_BYTES):
            chunk = part[: min(_CHUNK_BYTES, n - begin)]
            dist.recv(chunk, source, group=self._group)
            try:
                if file is not None and failed is None:
                    file.write(chunk.numpy().data)
            except OSError as error:
                failed = error
        try:
            if file is not None:
                file.close()
        except OSError as error:
            failed = failed or error
        if failed is not None:
            raise failed
        fresh.rename(path)

    def settle(self) -> None:
        """Wait until all pending sends have been received."""
        sent, self._sent = self._sent, []
        for work, _ in sent:
            work.wait()

    def _size(self, source: int) -> int:
        size = torch.zeros((), dtype=torch.int64)
        dist.recv(size, source, group=self._group)
        return int(size)

    def _send_parts(self, content: Tensor, to: int) -> None:
        for part in _parts(content):
            self._send(part, to)

    def _send(self, content: Tensor, to: int) -> None:
        self._sent.append((dist.isend(content, to, group=self._group), content))


def _parts(content: Tensor) -> Sequence[Tensor]:
    return content.split(_CHUNK_BYTES)
