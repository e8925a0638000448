"""Small objects between ranks, as JSON: unlike the object collectives of torch.distributed, which unpickle what comes
over the network, nothing that is received is run."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from pydantic import TypeAdapter

from shardwright.errors import WorkerError
from shardwright.units import MiB, format_bytes

MOST_BYTES = 64 * MiB
"""Of one rank's object."""


def gathered(mine: Any, kind: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """The object of every rank of a group, by default of the world, in their order; every rank of it calls this.

    `kind`: the type of the object, of what JSON knows (numbers as they are, infinite ones and NaN included), tuples,
    dataclasses and paths. Raises WorkerError, on every rank, where an object has more than `MOST_BYTES` as JSON, and on
    a rank that gets what is not of the type.
    """
    text = torch.frombuffer(bytearray(json.dumps(mine, default=_plain).encode()), dtype=torch.uint8)
    device = torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")
    n_ranks = dist.get_world_size(group)
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(n_ranks)]
    dist.all_gather(sizes, torch.tensor([len(text)], dtype=torch.int64, device=device), group=group)
    lengths = [int(size) for size in sizes]
    largest = max(lengths)
    if largest > MOST_BYTES:
        at = lengths.index(largest)
        raise WorkerError(
            f"rank {at} of {n_ranks} sends an object of {format_bytes(largest)} to the others, and at most "
            f"{format_bytes(MOST_BYTES)} are taken"
        )
    padded = torch.zeros(largest, dtype=torch.uint8, device=device)
    padded[: len(text)] = text
    everyone = [torch.empty_like(padded) for _ in range(n_ranks)]
    dist.all_gather(everyone, padded, group=group)
    adapter = TypeAdapter(kind)
    found = []
    for rank, (received, length) in enumerate(zip(everyone, lengths, strict=True)):
        try:
            found.append(adapter.validate_python(json.loads(received[:length].cpu().numpy().tobytes())))
        except ValueError as error:  # of json and pydantic alike
            raise WorkerError(f"what rank {rank} of {n_ranks} sent is not what was expected: {error}") from None
    return found


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else asdict(value)
