"""manifest.json of a checkpoint: its tensors, their locations, and checksums that detect damage.

The manifest contains its own sha256, since a flipped digit in `samples` would be as bad as one in a weight. A manifest
that was written wrongly still has a valid sha256, so types, bounds and shards are checked as well. Shards are large and
use xxh3_128, which runs at memory speed: it detects damage but does not protect against deliberate changes.
"""

import hashlib
import itertools
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, NotRequired

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
"""Maximum size of a manifest.json. At 1T parameters on 10,000 ranks it has about 100 MB."""
FILE_NAME = "manifest.json"

_exact = with_config(ConfigDict(strict=True, extra="forbid"))
Count = Annotated[int, Field(ge=0, lt=2**63)]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Xxh3 = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
FileName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-][A-Za-z0-9._-]*$")]
"""A file name in the checkpoint's folder, without a path."""


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
    """A box of a tensor: its offsets in the whole tensor, its shape, the file that contains it, and the xxh3_128 of
    its bytes."""

    offsets: tuple[Count, ...]
    shape: tuple[Count, ...]
    file: FileName
    xxh3_128: Xxh3


@_exact
@dataclass(frozen=True)
class TensorRecord:
    """A whole tensor as defined by the model, and its shards. `dtype`: torch's name of the type."""

    shape: tuple[Count, ...]
    dtype: Annotated[str, AfterValidator(_a_type_of_torch)]
    shards: tuple[ShardRecord, ...]

    @property
    def is_whole(self) -> bool:
        """Return whether the shards cover each element of the tensor exactly once. PyTorch would silently leave a gap
        unfilled.

        Each corner of a box counts +1 or -1, alternating. Boxes cover the whole exactly once if and only if the sum of
        their corners equals the corners of the whole: the sum is the mixed derivative of the number of boxes over each
        element.
        """
        if any(len(shard.offsets) != len(self.shape) or len(shard.shape) != len(self.shape) for shard in self.shards):
            return False
        boxes = ((shard.offsets, shard.shape) for shard in self.shards)
        return _corners(boxes) == _corners([((0,) * len(self.shape), self.shape)])


def _corners(boxes: Iterable[tuple[Sequence[int], Sequence[int]]]) -> dict[tuple[int, ...], int]:
    """Return corner -> sum of its signs over boxes (offsets, shape), without zeros. Each upper end contributes a
    factor -1."""
    sums: Counter[tuple[int, ...]] = Counter()
    for offsets, shape in boxes:
        spans = [((at, 1), (at + n, -1)) for at, n in zip(offsets, shape, strict=True)]
        for corner in itertools.product(*spans):
            sign = 1
            for _, factor in corner:
                sign *= factor
            sums[tuple(at for at, _ in corner)] += sign
    return {corner: total for corner, total in sums.items() if total}


def key_of(name: str, offsets: Sequence[int]) -> str:
    """Return the key of a shard in its file: the tensor's name, followed by @OFFSETS unless all offsets are 0."""
    return f"{name}@{','.join(map(str, offsets))}" if any(offsets) else name


@_exact
@dataclass(frozen=True)
class TrainingProgress:
    """The position of a run: optimizer steps taken and samples consumed.

    It also determines the whole random state: initial values, data order and dropout are functions of the seed and of
    these numbers.
    """

    step: Count
    samples: Count
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)]
    left_out: tuple[tuple[Count, Count], ...] = ()
    """Samples that the run does not train on: for each rollback after a loss spike, the range [first, last + 1) of
    running sample indices."""


@_exact
class SourceRecord(TypedDict):
    """A source of samples, and the fingerprint of its tokens."""

    name: str
    fingerprint: str
    shards: NotRequired[list[str]]
    """With data.order="shards", short checksums of the shards that were published; the fingerprint is then the
    tokenizer's."""


@_exact
class StageRecord(TypedDict):
    """A stage of the mixture, as `data.mixture.MixtureStage`."""

    from_step: Count
    from_sample: Count
    weights: Annotated[list[Count], AfterValidator(_not_all_zero)]


@_exact
class MixtureRecord(TypedDict):
    """The sources of a run and the stages that had started."""

    sources: list[SourceRecord]
    stages: list[StageRecord]


@_exact
class DataRecord(TypedDict):
    """The settings that determine the content of sample number n."""

    seq_len: Count
    sequences: str
    mixture: MixtureRecord
    order: NotRequired[str]
    """`data.order`, if it is not "all"."""
    reference: NotRequired[str]
    """The digest of the weights of the reference of a run on pairs of answers."""


@_exact
@dataclass(frozen=True)
class BaseRecord:
    """The frozen weights of a run with adapters: the folder, and the fingerprint of the weights
    (`training/base_weights.py`)."""

    path: str
    fingerprint: Sha256


@_exact
@dataclass(frozen=True)
class CheckpointManifest:
    """Everything about a checkpoint except the bytes of its shards and files."""

    progress: TrainingProgress
    model: dict[str, Any]
    data: DataRecord | None
    """None if the weights were imported."""
    world_size: Annotated[int, Field(ge=1, lt=2**31)]
    tensors: dict[str, TensorRecord]
    files: dict[FileName, Sha256] = field(default_factory=dict)
    """Name -> sha256 of the other files of the checkpoint that are read: the run file."""
    loss_scale: LossScaleState | None = None
    """Present only for a run in fp16."""
    spikes: SpikeState | None = None
    """Present only for a run with `faults.spike`."""
    average: dict[str, str | int | float] | None = None
    """Present only for a run with an average of the weights (`AverageSection.identity`)."""
    base: BaseRecord | None = None
    """Present only for a run with adapters, whose checkpoints do not contain the frozen weights."""

    def text(self) -> str:
        """Return the content of manifest.json."""
        table = {"format": FORMAT, **asdict(self)}
        return json.dumps(table | {"sha256": _sha256_of(table)}, indent=1) + "\n"

    def write(self, folder: Path) -> None:
        """Write FOLDER/manifest.json."""
        (folder / FILE_NAME).write_text(self.text())


def sha256_of_text(text: str) -> str:
    """Hex digest of a text file's bytes."""
    return hashlib.sha256(text.encode()).hexdigest()


def read_manifest(folder: Path) -> CheckpointManifest:
    """Read and verify a manifest. Raises DamagedError if the manifest or a file in `files` is missing or changed,
    and CheckpointError if the manifest has another format."""
    path = folder / FILE_NAME
    if not folder.exists():
        raise CheckpointError(f"{folder} is not a checkpoint: there is no such folder")
    table = _table_of(folder)
    if (actual := table.pop("format", None)) != FORMAT:
        kind = f"format {actual}" if isinstance(actual, int) and 0 <= actual < 1000 else "another format"
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
            actual = hashlib.sha256(read_bytes(inside(folder, name, DamagedError))).hexdigest()
        except OSError as error:
            raise DamagedError(f"{folder / name} cannot be read: {error.strerror}") from None
        if actual != sha256:
            raise DamagedError(f"{folder / name} is damaged: it does not have the sha256 that the manifest gives")
    return manifest


_MANIFEST = TypeAdapter(CheckpointManifest)


def _table_of(folder: Path) -> dict[str, Any]:
    """Return the content of a manifest after verifying its sha256."""
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
        # Not damage: a retry may succeed.
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise DamagedError(f"{path} is damaged: {error}") from None
    raise DamagedError(f"{path} is damaged: its content does not have the sha256 that it ends with")


def _sha256_of(table: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(table, sort_keys=True).encode()).hexdigest()
