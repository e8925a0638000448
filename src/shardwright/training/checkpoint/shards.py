"""A rank's part of a checkpoint: its file of shards, and their records for rank 0.

STEP.partial/
  rank-00001.safetensors    the shards that rank 1 writes
  written/rank-00001.json   their records; has this name once the shards are on the disk
  written/rank-00001.failed error text if they cannot be written

Rank 0 thus finds from the folder alone when a checkpoint is complete, and no collective runs during training.
"""

import json
import os
import re
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter
from torch import Tensor

from shardwright.hugging_face.writer import TensorToWrite, write_safetensors
from shardwright.system.errors import CheckpointError
from shardwright.training.checkpoint.manifest import ShardRecord, TensorRecord
from shardwright.training.checkpoint.plan import CheckpointPlan, TensorPiece
from shardwright.training.checkpoint.storage import xxh3_128_of
from shardwright.training.checkpoint.store import WRITTEN

_LOOK_S = 0.01
_LOOK_MOST_S = 1.0
_RECORDS = TypeAdapter(list[tuple[str, ShardRecord]])


def file_name(rank: int) -> str:
    """Return the name of a rank's file of shards."""
    return f"rank-{rank:05d}.safetensors"


def rank_of(name: str) -> int | None:
    """Return the rank whose file of shards has this name, or None for another file."""
    found = re.fullmatch(r"rank-(\d{5,})\.safetensors", name)
    return int(found[1]) if found else None


def write_shards(folder: Path, rank: int, pieces: Sequence[TensorPiece], take: Callable[[TensorPiece], Tensor]) -> None:
    """Write a rank's shards to the disk, then their records. `take` returns the tensor of a piece and is called once
    per piece, in order. Raises OSError if the disk fails."""
    of_entry = {piece.entry: piece for piece in pieces}
    records: list[tuple[str, ShardRecord]] = []

    def taken(entry: TensorToWrite) -> Tensor:
        piece = of_entry[entry]
        tensor = take(piece).detach().cpu().contiguous()
        records.append((piece.name, ShardRecord(piece.offsets, entry.shape, file_name(rank), xxh3_128_of(tensor))))
        return tensor

    path = folder / file_name(rank)
    write_safetensors(path, [piece.entry for piece in pieces], taken)
    with path.open("rb") as file:
        os.fsync(file.fileno())
    told = [(name, asdict(record)) for name, record in records]
    _put(folder / WRITTEN / f"rank-{rank:05d}.json", json.dumps(told))


def tell_failure(folder: Path, rank: int, text: str) -> None:
    """Report to rank 0 that a rank's shards cannot be written. If this fails too, `gathered` ends once abandoned."""
    try:
        _put(folder / WRITTEN / f"rank-{rank:05d}.failed", text)
    except OSError:
        return


def gathered(folder: Path, world_size: int, abandoned: Callable[[], bool]) -> list[tuple[str, ShardRecord]] | None:
    """Return the records of all ranks once written, or None if abandoned before. Raises CheckpointError if a rank
    failed."""
    pause_s = _LOOK_S
    waiting = set(range(world_size))
    while waiting:
        there = {path.name for path in (folder / WRITTEN).iterdir()}
        if failed := sorted(name for name in there if name.endswith(".failed")):
            raise CheckpointError((folder / WRITTEN / failed[0]).read_text(encoding="utf-8"))
        waiting = {rank for rank in waiting if f"rank-{rank:05d}.json" not in there}
        if waiting:
            if abandoned():
                return None
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LOOK_MOST_S)
    return [each for rank in range(world_size) for each in records_of(folder, rank)]


def records_of(folder: Path, rank: int) -> list[tuple[str, ShardRecord]]:
    """Return the records of the shards that a rank has written."""
    return _RECORDS.validate_json((folder / WRITTEN / f"rank-{rank:05d}.json").read_bytes(), strict=True)


def records_from(told: Any) -> list[tuple[str, ShardRecord]]:
    """Parse records that another rank sent as JSON."""
    return _RECORDS.validate_json(json.dumps(told), strict=True)


def tensor_records(plan: CheckpointPlan, shards: Sequence[tuple[str, ShardRecord]]) -> dict[str, TensorRecord]:
    """Return tensor name -> record with its shards. Asserts that the shards cover each tensor."""
    by_name: dict[str, list[ShardRecord]] = defaultdict(list)
    for name, shard in shards:
        by_name[name].append(shard)
    records = {name: TensorRecord(shape, dtype, tuple(by_name[name])) for name, (shape, dtype) in plan.tensors.items()}
    for name, record in records.items():
        assert record.is_whole, f"{name} would be saved with a gap"
    return records


def _put(path: Path, text: str) -> None:
    """Write a file under a temporary name and rename it once complete."""
    fresh = path.with_suffix(".tmp")
    fresh.write_text(text, encoding="utf-8")
    fresh.rename(path)
