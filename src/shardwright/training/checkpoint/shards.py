"""The part of each rank of a checkpoint: its file of shards, and the records of them for rank 0.

STEP.partial/
  rank-00001.safetensors    the shards that rank 1 writes
  written/rank-00001.json   their records; there under this name when the shards are on the disk
  written/rank-00001.failed why they cannot be written

So rank 0 can tell from the folder alone when a checkpoint is complete, and no collective has to run beside training.
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
    """The file of shards of a rank."""
    return f"rank-{rank:05d}.safetensors"


def rank_of(name: str) -> int | None:
    """The rank whose file of shards this is; None of another file."""
    found = re.fullmatch(r"rank-(\d{5,})\.safetensors", name)
    return int(found[1]) if found else None


def write_shards(folder: Path, rank: int, pieces: Sequence[TensorPiece], take: Callable[[TensorPiece], Tensor]) -> None:
    """Write the shards of a rank to the disk, then their records. `take` gives the tensor of a piece, when it is its
    turn. Raises OSError if the disk fails."""
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
    """Leave word for rank 0 that the shards of a rank will not come; if that fails too, `gathered` is abandoned."""
    try:
        _put(folder / WRITTEN / f"rank-{rank:05d}.failed", text)
    except OSError:
        return


def gathered(folder: Path, world_size: int, abandoned: Callable[[], bool]) -> list[tuple[str, ShardRecord]] | None:
    """The records of all ranks, once all are there; None if it is abandoned before. Raises CheckpointError where a
    rank has failed."""
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
    """The records of the shards that a rank has written."""
    return _RECORDS.validate_json((folder / WRITTEN / f"rank-{rank:05d}.json").read_bytes(), strict=True)


def records_from(told: Any) -> list[tuple[str, ShardRecord]]:
    """Records that came from another rank as JSON."""
    return _RECORDS.validate_json(json.dumps(told), strict=True)


def tensor_records(plan: CheckpointPlan, shards: Sequence[tuple[str, ShardRecord]]) -> dict[str, TensorRecord]:
    """Every tensor of a checkpoint with its shards, which have to cover it."""
    by_name: dict[str, list[ShardRecord]] = defaultdict(list)
    for name, shard in shards:
        by_name[name].append(shard)
    records = {name: TensorRecord(shape, dtype, tuple(by_name[name])) for name, (shape, dtype) in plan.tensors.items()}
    for name, record in records.items():
        assert record.is_whole, f"{name} would be saved with a gap"
    return records


def _put(path: Path, text: str) -> None:
    """Write a file that is there when it is complete."""
    fresh = path.with_suffix(".tmp")
    fresh.write_text(text, encoding="utf-8")
    fresh.rename(path)
