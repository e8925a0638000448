"""A rank's part of a checkpoint: its file of shards, and the records of the shards."""

import os
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from torch import Tensor

from shardwright.hugging_face.writer import TensorToWrite, write_safetensors
from shardwright.training.checkpoint.manifest import ShardRecord, TensorRecord
from shardwright.training.checkpoint.parts import ShardRecords
from shardwright.training.checkpoint.plan import TensorPiece
from shardwright.training.checkpoint.storage import xxh3_128_of


def file_name(rank: int) -> str:
    """Return the name of a rank's file of shards."""
    return f"rank-{rank:05d}.safetensors"


def rank_of(name: str) -> int | None:
    """Return the rank whose file of shards has this name, or None for another file."""
    match = re.fullmatch(r"rank-(\d{5,})\.safetensors", name)
    return int(match[1]) if match else None


def write_shards(
    folder: Path, rank: int, pieces: Sequence[TensorPiece], take: Callable[[TensorPiece], Tensor]
) -> ShardRecords:
    """Write a rank's shards as `write_pieces` does."""
    return write_pieces(folder / file_name(rank), pieces, take)


def write_pieces(path: Path, pieces: Sequence[TensorPiece], take: Callable[[TensorPiece], Tensor]) -> ShardRecords:
    """Write pieces as the shards of one file to the disk and return their records. `take` returns the tensor of a piece
    and is called once per piece, in order. Raises OSError if the disk fails."""
    of_entry = {piece.entry: piece for piece in pieces}
    records: list[tuple[str, ShardRecord]] = []

    def taken(entry: TensorToWrite) -> Tensor:
        piece = of_entry[entry]
        tensor = take(piece).detach().cpu().contiguous()
        records.append((piece.name, ShardRecord(piece.offsets, entry.shape, path.name, xxh3_128_of(tensor))))
        return tensor

    write_safetensors(path, [piece.entry for piece in pieces], taken)
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return records


def tensor_records(tensors: Mapping[str, tuple[tuple[int, ...], str]], shards: ShardRecords) -> dict[str, TensorRecord]:
    """Return tensor name -> record with its shards. `tensors`: name -> (shape, type). Asserts that the shards cover
    each tensor."""
    by_name: dict[str, list[ShardRecord]] = defaultdict(list)
    for name, shard in shards:
        by_name[name].append(shard)
    records = {name: TensorRecord(shape, dtype, tuple(by_name[name])) for name, (shape, dtype) in tensors.items()}
    for name, record in records.items():
        assert record.is_whole, f"{name} would be saved with a gap"
    return records
