"""manifest.json of a checkpoint: what is in it, where, and how to tell that it is undamaged.

It ends with its own sha256, since a flipped digit in `samples` would be as bad as one in a weight. A manifest that was
written wrongly has the right sha256 too, so types, bounds and shards are checked besides. Shards, which are large, have
an xxh3_128: damage is to be found, at the speed of memory, and nobody to be kept from writing other weights.
"""

import hashlib
import itertools
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError, with_config
from typing_extensions import TypedDict

from shardwright.system.errors import CheckpointError, DamagedError
from shardwright.system.files import inside, parse_json, read_bytes
from shardwright.system.units import MiB
from shardwright.training.loss_scale import LossScaleState
from shardwright.training.resilience.spikes import SpikeState

FORMAT = 4
LONGEST_MANIFEST = 512 * MiB
"""The longest manifest.json that is read; of 1T parameters on 10,000 ranks it has some 100 MB."""
FILE_NAME = "manifest.json"

_exact = with_config(ConfigDict(strict=True, extra="forbid"))
Count = Annotated[int, Field(ge=0, lt=2**63)]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Xxh3 = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
FileName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-][A-Za-z0-9._-]*$")]
"""A file in the folder of the checkpoint itself: no path."""


def _a_type_of_torch(name: str) -> str:
    if not isinstance(getattr(torch, name, None), torch.dtype):
        raise ValueError(f"{name!r} is no type of torch")
    return name


def _not_all_zero(weights: list[int]) -> list[int]:
    if not any(weights):
        raise ValueError("no source has a weight")
    return weights


@_exact
@dataclass(frozen=True)
class ShardRecord:
    """A box of a tensor: where it begins in the whole, its shape, the file it is stored in, the xxh3_128 of
    its bytes."""

    offsets: tuple[Count, ...]
    shape: tuple[Count, ...]
    file: FileName
    xxh3_128: Xxh3


@_exact
@dataclass(frozen=True)
class TensorRecord:
    """A whole tensor as the model knows it, and the shards that make it up; `dtype` by torch's name."""

    shape: tuple[Count, ...]
    dtype: Annotated[str, AfterValidator(_a_type_of_torch)]
    shards: tuple[ShardRecord, ...]

    @property
    def is_whole(self) -> bool:
        """Whether the shards cover the tensor, each element once; PyTorch would leave a gap as it was.

        The corners of a box count +1 and -1 in turn. Boxes cover the whole once if and only if their corners add up to
        those of the whole: the sum is the mixed derivative of the number of boxes over each element.
        """
        if any(len(shard.offsets) != len(self.shape) or len(shard.shape) != len(self.shape) for shard in self.shards):
            return False
        boxes = ((shard.offsets, shard.shape) for shard in self.shards)
        return _corners(boxes) == _corners([((0,) * len(self.shape), self.shape)])


def _corners(boxes: Iterable[tuple[Sequence[int], Sequence[int]]]) -> dict[tuple[int, ...], int]:
    """Corner -> the sum of its signs over boxes (offsets, shape), zeros left out; a sign for each upper end."""
    sums: Counter[tuple[int, ...]] = Counter()
    for offsets, shape in boxes:
        spans = [((at, 1), (at + n, -1)) for at, n in zip(offsets, shape, strict=True)]
        for corner in itertools.product(*spans):
            sign = 1
            for _, each in corner:
                sign *= each
            sums[tuple(at for at, _ in corner)] += sign
    return {corner: total for corner, total in sums.items() if total}


def key_of(name: str, offsets: Sequence[int]) -> str:
    """The name of a shard in its file: that of the tensor, with @OFFSETS unless it begins where the tensor does."""
    return f"{name}@{','.join(map(str, offsets))}" if any(offsets) else name


@_exact
@dataclass(frozen=True)
class TrainingProgress:
    """Where a run stood: optimizer steps taken and samples consumed.

    That is the whole random state too: initial values, the order of data and dropout are functions of the
    seed and of these numbers.
    """

    step: Count
    samples: Count
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)]
    left_out: tuple[tuple[Count, Count], ...] = ()
    """Samples that the run does not train on: of each spike it went back from, the first running index and the one
    after the last."""


@_exact
class SourceRecord(TypedDict):
    """A source of samples, and the fingerprint of its tokens."""

    name: str
    fingerprint: str


@_exact
class StageRecord(TypedDict):
    """A `data.mixture.MixtureStage`."""

    from_step: Count
    from_sample: Count
    weights: Annotated[list[Count], AfterValidator(_not_all_zero)]


@_exact
class MixtureRecord(TypedDict):
    """The sources of a run and the stages that had begun."""

    sources: list[SourceRecord]
    stages: list[StageRecord]


@_exact
class DataRecord(TypedDict):
    """What makes sample number n the sample it is."""

    seq_len: Count
    sequences: str
    mixture: MixtureRecord


@_exact
@dataclass(frozen=True)
class CheckpointManifest:
    """The whole of a checkpoint but the bytes."""

    progress: TrainingProgress
    model: dict[str, Any]
    data: DataRecord | None
    """None where the weights were imported."""
    world_size: Annotated[int, Field(ge=1, lt=2**31)]
    tensors: dict[str, TensorRecord]
    files: dict[FileName, Sha256] = field(default_factory=dict)
    """The other files of the checkpoint that are read: the run file."""
    loss_scale: LossScaleState | None = None
    """Only of a run in fp16."""
    spikes: SpikeState | None = None
    """Only of a run with faults.spike."""

    def text(self) -> str:
        """The file of it."""
        table = {"format": FORMAT, **asdict(self)}
        return json.dumps(table | {"sha256": _sha256_of(table)}, indent=1) + "\n"

    def write(self, folder: Path) -> None:
        """Write FOLDER/manifest.json."""
        (folder / FILE_NAME).write_text(self.text())


def sha256_of_text(text: str) -> str:
    """Hex digest of a text file's bytes."""
    return hashlib.sha256(text.encode()).hexdigest()


def read_manifest(folder: Path) -> CheckpointManifest:
    """Raises DamagedError when there is none, or it or a file of `files` is not as it was written; CheckpointError for
    a foreign one."""
    path = folder / FILE_NAME
    if not folder.exists():
        raise CheckpointError(f"{folder} is not a checkpoint: there is no such folder")
    table = _table_of(folder)
    if (found := table.pop("format", None)) != FORMAT:
        kind = f"format {found}" if isinstance(found, int) and 0 <= found < 1000 else "another format"
        raise CheckpointError(f"{path} is of {kind}, of another version of shardwright; this one reads format {FORMAT}")
    try:
        manifest = _MANIFEST.validate_json(json.dumps(table))
    except ValidationError as error:
        first = error.errors()[0]
        raise DamagedError(f"{path} is damaged: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    for name in {shard.file for tensor in manifest.tensors.values() for shard in tensor.shards}:
        inside(folder, name, DamagedError)
    for name, tensor in manifest.tensors.items():
        if not tensor.is_whole:
            raise DamagedError(f"{path} is damaged: the shards of {name} do not cover each of its elements once")
    for name, sha256 in manifest.files.items():
        try:
            found = hashlib.sha256(read_bytes(inside(folder, name, DamagedError))).hexdigest()
        except OSError as error:
            raise DamagedError(f"{folder / name} cannot be read: {error.strerror}") from None
        if found != sha256:
            raise DamagedError(f"{folder / name} is damaged: it does not have the sha256 that the manifest gives")
    return manifest


_MANIFEST = TypeAdapter(CheckpointManifest)


def _table_of(folder: Path) -> dict[str, Any]:
    """What a manifest holds, if it is as it was written."""
    path = inside(folder, FILE_NAME, DamagedError)
    try:
        table = parse_json(read_bytes(path, LONGEST_MANIFEST))
        if isinstance(table, dict) and table.pop("sha256", None) == _sha256_of(table):
            return table
    except FileNotFoundError:
        raise DamagedError(f"{folder} is not a whole checkpoint: it has no {FILE_NAME}") from None
    except NotADirectoryError:
        raise DamagedError(f"{folder} is a file, and a checkpoint is a folder") from None
    except IsADirectoryError:
        raise DamagedError(f"{path} is damaged: it is a folder") from None
    except OSError as error:
        # Not damage: the next try may succeed.
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise DamagedError(f"{path} is damaged: {error}") from None
    raise DamagedError(f"{path} is damaged: its content does not have the sha256 that it ends with")


def _sha256_of(table: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(table, sort_keys=True).encode()).hexdigest()
