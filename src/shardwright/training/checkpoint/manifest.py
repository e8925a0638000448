"""manifest.json of a checkpoint: what is in it, where, and how to tell that it is undamaged.

It ends with its own sha256, since a flipped digit in `samples` would be as bad as one in a weight.
"""

import hashlib
import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from shardwright.errors import CheckpointError, DamagedError
from shardwright.training.loss_scale import LossScaleState

FORMAT = 2
FILE_NAME = "manifest.json"


@dataclass(frozen=True)
class ShardRecord:
    """A box of a tensor: where it begins in the whole, its shape, the file and key it is stored under, its
    sha256."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    file: str
    key: str
    sha256: str


@dataclass(frozen=True)
class TensorRecord:
    """A whole tensor as the model knows it, and the shards that make it up; `dtype` by torch's name."""

    shape: tuple[int, ...]
    dtype: str
    shards: tuple[ShardRecord, ...]

    @property
    def is_whole(self) -> bool:
        """Whether the shards have as many elements as the tensor; PyTorch would leave a gap as it was."""
        return sum(math.prod(shard.shape) for shard in self.shards) == math.prod(self.shape)


@dataclass(frozen=True)
class Progress:
    """Where a run stood: optimizer steps taken and samples consumed.

    That is the whole random state too: initial values, the order of data and dropout are functions of the
    seed and of these numbers.
    """

    step: int
    samples: int
    seed: int


@dataclass(frozen=True)
class Manifest:
    """The whole of a checkpoint but the bytes."""

    progress: Progress
    model: dict[str, Any]
    data: dict[str, Any]
    """What makes sample number n the sample it is: `seq_len`, `sequences`, and `mixture`: the fingerprints of the
    sources and the stages that had begun."""
    world_size: int
    tensors: dict[str, TensorRecord]
    loss_scale: LossScaleState | None = None
    """Only of a run in fp16."""

    def write(self, folder: Path) -> None:
        """Write FOLDER/manifest.json."""
        table = {"format": FORMAT, **asdict(self)}
        (folder / FILE_NAME).write_text(json.dumps(table | {"sha256": _sha256_of(table)}, indent=1) + "\n")


def read_manifest(folder: Path) -> Manifest:
    """Raises DamagedError when there is none or it is not as it was written, CheckpointError for a foreign
    one."""
    path = folder / FILE_NAME
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a checkpoint: there is no such folder")
    try:
        table = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise DamagedError(f"{folder} is not a whole checkpoint: it has no {FILE_NAME}") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise DamagedError(f"{path} is damaged: {error}") from None
    if not isinstance(table, dict) or table.pop("sha256", None) != _sha256_of(table):
        raise DamagedError(f"{path} is damaged: its content does not have the sha256 that it ends with")
    if table.pop("format", None) != FORMAT:
        raise CheckpointError(f"{path} is of another version of shardwright; this one reads format {FORMAT}")
    manifest = TypeAdapter(Manifest).validate_python(table)
    for name, tensor in manifest.tensors.items():
        if not tensor.is_whole:
            raise DamagedError(f"{path} does not have every shard of {name}")
    return manifest


def _sha256_of(table: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(table, sort_keys=True).encode()).hexdigest()
