"""Small objects between ranks, as JSON: unlike the object collectives of torch.distributed, which unpickle what comes
over the network, nothing that is received is run."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from pydantic import TypeAdapter
from torch import Tensor

from shardwright.errors import WorkerError
from shardwright.files import parse_json
from shardwright.units import MiB, format_bytes

MOST_BYTES = 64 * MiB
"""Of one rank's object."""


def gathered(mine: Any, kind: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """The object of every rank of a group, by default of the world, in their order; every rank of it calls this.

    `kind`: the type of the object, of what JSON knows (numbers as they are, infinite ones and NaN included), tuples,
    dataclasses and paths. Raises WorkerError, on every rank, where an object has more than `MOST_BYTES` as JSON, and on
    a rank that gets what is not of the type.
    """
    padded, lengths = _padded(_encoded(mine), group)
    everyone = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(everyone, padded, group=group)
    return _decoded(everyone, lengths, kind)


def gathered_by_first(mine: Any, kind: Any) -> list[Any]:
    """The object of every rank of the world on rank 0, and an empty list on the others. As `gathered`."""
    padded, lengths = _padded(_encoded(mine), None)
    first = dist.get_rank() == 0
    everyone = [torch.empty_like(padded) for _ in lengths] if first else None
    dist.gather(padded, everyone, dst=0)
    return _decoded(everyone or [], lengths, kind)


def dealt_by_first(each: Sequence[Any], kind: Any) -> Any:
    """The object that rank 0 has for this rank; `each`: those for all ranks of the world, on rank 0. As `gathered`."""
    first = dist.get_rank() == 0
    texts = [_encoded(one) for one in each] if first else []
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
    """A text with room for the longest of all ranks, and the length of each."""
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
            f"others, and at most {format_bytes(MOST_BYTES)} are taken"
        )


def _decoded(texts: Sequence[Tensor], lengths: Sequence[int], kind: Any) -> list[Any]:
    adapter = TypeAdapter(kind)
    found = []
    for rank, (received, length) in enumerate(zip(texts, lengths, strict=False)):
        try:
            found.append(adapter.validate_python(parse_json(received[:length].cpu().numpy().tobytes())))
        except ValueError as error:  # of json and pydantic alike
            raise WorkerError(f"what rank {rank} of {len(texts)} sent is not what was expected: {error}") from None
    return found
