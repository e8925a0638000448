"""Exchanges small objects between ranks as JSON. The object collectives of torch.distributed unpickle
received data, which can run code; JSON cannot."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from pydantic import TypeAdapter
from torch import Tensor

from shardwright.system.errors import WorkerError
from shardwright.system.files import parse_json
from shardwright.system.units import MiB, format_bytes

MOST_BYTES = 64 * MiB
"""The largest object that a rank may send."""


def gathered(value: Any, kind: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return the objects of all ranks of a group, by default of the world, in rank order. A collective of the group.

    `kind`: the type of the object: types of JSON (with infinite numbers and NaN), tuples, dataclasses and paths. Raises
    WorkerError on every rank if an object has more than `MOST_BYTES` as JSON, and on a rank that receives another type.
    """
    padded, lengths = _padded(_encoded(value), group)
    everyone = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(everyone, padded, group=group)
    return _decoded(everyone, lengths, kind)


def gathered_by_first(value: Any, kind: Any) -> list[Any]:
    """Return the objects of all ranks of the world on rank 0, an empty list elsewhere; `kind`, errors as `gathered`."""
    padded, lengths = _padded(_encoded(value), None)
    first = dist.get_rank() == 0
    everyone = [torch.empty_like(padded) for _ in lengths] if first else None
    dist.gather(padded, everyone, dst=0)
    return _decoded(everyone or [], lengths, kind)


def scattered_by_first(values: Sequence[Any], kind: Any) -> Any:
    """Return this rank's object of `values`, which rank 0 has for all ranks; `kind` and errors as `gathered`."""
    first = dist.get_rank() == 0
    texts = [_encoded(value) for value in values] if first else []
    sizes = torch.tensor([len(text) for text in texts] if first else [0] * dist.get_world_size(), device=_device(None))
    dist.broadcast(sizes, src=0)
    lengths = [int(size) for size in sizes]
    _check(lengths)
    padded = torch.zeros(max(lengths), dtype=torch.uint8, device=sizes.device)
    parts = [torch.zeros_like(padded) for _ in texts]
    for part, text in zip(parts, texts, strict=True):
        part[: len(text)] = text
    dist.scatter(padded, parts if first else None, src=0)
    return _decoded([padded], [lengths[dist.get_rank()]], kind)[0]


def _encoded(value: Any) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(value, default=_plain).encode()), dtype=torch.uint8)


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else asdict(value)


def _device(group: dist.ProcessGroup | None) -> torch.device:
    return torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")


def _padded(text: Tensor, group: dist.ProcessGroup | None) -> tuple[Tensor, list[int]]:
    """Return a text padded to the length of the longest of all ranks, and the lengths of all."""
    device = _device(group)
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, torch.tensor([len(text)], dtype=torch.int64, device=device), group=group)
    lengths = [int(size) for size in sizes]
    _check(lengths)
    padded = torch.zeros(max(lengths), dtype=torch.uint8, device=device)
    padded[: len(text)] = text
    return padded, lengths


def _check(lengths: Sequence[int]) -> None:
    largest = max(lengths)
    if largest > MOST_BYTES:
        raise WorkerError(
            f"rank {lengths.index(largest)} of {len(lengths)} sends an object of {format_bytes(largest)} to the "
            f"others; the maximum is {format_bytes(MOST_BYTES)}"
        )


def _decoded(texts: Sequence[Tensor], lengths: Sequence[int], kind: Any) -> list[Any]:
    adapter = TypeAdapter(kind)
    values = []
    for rank, (received, length) in enumerate(zip(texts, lengths, strict=False)):
        try:
            values.append(adapter.validate_python(parse_json(received[:length].cpu().numpy().tobytes())))
        except ValueError as error:  # of json and pydantic alike
            raise WorkerError(f"rank {rank} of {len(texts)} sent an object of the wrong type: {error}") from None
    return values
