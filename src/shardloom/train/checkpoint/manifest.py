"""manifest.json of a checkpoint: what is in it, where, and how to tell that it is undamaged."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shardloom.errors import CheckpointError

FORMAT = 1
FILE_NAME = "manifest.json"


@dataclass(frozen=True)
class ShardRecord:
    """A box of a tensor: where it begins in the whole tensor, its shape, the file and key it lies under, its sha256."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    file: str
    key: str
    sha256: str


@dataclass(frozen=True)
class TensorRecord:
    """A whole tensor as the model knows it, and the shards that make it up. `dtype` is torch's name: `float32`."""

    shape: tuple[int, ...]
    dtype: str
    shards: tuple[ShardRecord, ...]


@dataclass(frozen=True)
class Progress:
    """Where a run stood: optimizer steps taken and samples consumed.

    That is the whole random state too: initial values, the order of data and dropout are functions of the seed and
    of these numbers.
    """

    step: int
    samples: int
    seed: int


@dataclass(frozen=True)
class Manifest:
    """The whole of a checkpoint but the bytes."""

    progress: Progress
    model: dict[str, Any]
    data_fingerprint: str
    world_size: int
    tensors: dict[str, TensorRecord]

    def write(self, folder: Path) -> None:
        """Write FOLDER/manifest.json."""
        (folder / FILE_NAME).write_text(json.dumps({"format": FORMAT, **asdict(self)}, indent=1) + "\n")


def read_manifest(folder: Path) -> Manifest:
    """Raises CheckpointError when there is none, or one that cannot be read."""
    path = folder / FILE_NAME
    try:
        table = json.loads(path.read_text())
    except FileNotFoundError:
        raise CheckpointError(f"{folder} is not a checkpoint: it has no {FILE_NAME}") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from None
    if table.get("format") != FORMAT:
        raise CheckpointError(f"{path} has format {table.get('format')!r}; this version reads format {FORMAT}")
    try:
        del table["format"]
        tensors = {
            name: TensorRecord(
                tuple(entry["shape"]),
                entry["dtype"],
                tuple(
                    ShardRecord(tuple(s["offsets"]), tuple(s["shape"]), s["file"], s["key"], s["sha256"])
                    for s in entry["shards"]
                ),
            )
            for name, entry in table.pop("tensors").items()
        }
        return Manifest(progress=Progress(**table.pop("progress")), tensors=tensors, **table)
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is damaged: a field is missing or wrong ({error})") from None
