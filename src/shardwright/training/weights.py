"""The weights of a model from a folder of `transformers` or of `shardwright import`, a checkpoint, or a run. Any box
of any parameter can be read, so each rank reads only its own part."""

import hashlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from math import isclose
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from shardwright.config import load_kept, spec_of_folder, table_of
from shardwright.config.reading import as_toml
from shardwright.hugging_face.files import ADAPTER, is_folder_of_transformers
from shardwright.hugging_face.reader import open_weights as open_folder_of_transformers
from shardwright.model.init import Box, whole
from shardwright.model.lora_sizes import LoraSpec
from shardwright.model.modules import row_of, rows
from shardwright.model.quantised import fill_box
from shardwright.model.saved import with_defaults
from shardwright.model.spec import ModelSpec
from shardwright.model.transformer import Transformer
from shardwright.parallel.boxes import overlap
from shardwright.runs.folder import CHECKPOINTS, RUN_FILE, published
from shardwright.system.errors import CheckpointError, DamagedError, InputError
from shardwright.system.units import counted
from shardwright.training.average import AVERAGE
from shardwright.training.checkpoint.manifest import (
    FILE_NAME,
    BaseRecord,
    CheckpointManifest,
    ShardRecord,
    TensorRecord,
    read_manifest,
)
from shardwright.training.checkpoint.storage import read_shard

MODEL, OPTIMIZER = "model/", "optimizer/"
"""Prefixes of parameters and of optimizer moments in a manifest's tensor names."""


def by_reason(left_out: Mapping[str, str]) -> list[str]:
    """Return for each reason one of the names that are left out for it, their number, and the reason."""
    names: dict[str, list[str]] = {}
    for name, reason in left_out.items():
        names.setdefault(reason, []).append(name)
    return [
        f"{first}{f' and {len(others):,} more' if others else ''} ({reason})"
        for reason, (first, *others) in names.items()
    ]


class Weights(Protocol):
    """The weights of a model under Shardwright's parameter names.

    `spec`: the model. `shapes`, `dtypes`: whole shape and torch's type name of every parameter in the source.
    `left_out`: other content of the source, which is not read -> the reason.
    """

    path: Path
    spec: ModelSpec
    shapes: dict[str, tuple[int, ...]]
    dtypes: dict[str, str]
    left_out: dict[str, str]

    def read(self, name: str, offsets: Sequence[int], shape: Sequence[int]) -> Tensor:
        """Return the box [offsets, offsets + shape) of a parameter, on the CPU, in its stored type."""
        ...

    def describe(self) -> str:
        """Return a description in one line."""
        ...


class ShardedTensors:
    """Boxes of whole tensors that are stored as shards. `held`: name -> the tensor and its shards. `read_shard`: (name,
    shard) -> the values of the shard. The last shard is cached, since a tensor is often read box by box."""

    def __init__(self, records: Mapping[str, TensorRecord], read_shard: Callable[[str, ShardRecord], Tensor]) -> None:
        self._records, self._read_shard = records, read_shard
        self.shapes = {name: record.shape for name, record in records.items()}
        self.dtypes = {name: record.dtype for name, record in records.items()}
        self._last: tuple[str, ShardRecord, Tensor] | None = None

    def read(self, name: str, offsets: Sequence[int], shape: Sequence[int]) -> Tensor:
        """Return a box of a tensor, as `Weights.read`. Raises DamagedError if a shard has changed."""
        record = self._records[name]
        box = torch.empty(tuple(shape), dtype=getattr(torch, record.dtype))
        for shard in record.shards:
            if both := overlap(offsets, shape, shard.offsets, shard.shape):
                target, source = both
                box[target] = self._shard(name, shard)[source]
        return box

    def _shard(self, name: str, record: ShardRecord) -> Tensor:
        if self._last is None or self._last[:2] != (name, record):
            self._last = None
            self._last = name, record, self._read_shard(name, record)
        return self._last[2]


class CheckpointWeights(ShardedTensors):
    """The weights of a Shardwright checkpoint of any layout. The checksum of each shard that is read is verified.

    `optimizer`: the optimizer's moments in the same form, with names such as `exp_avg/layers.0.ffn.up.weight`; None if
    there are none.
    """

    WHY_NO_MOMENTS = "the optimizer starts without states"

    def __init__(self, path: Path, manifest: CheckpointManifest, spec: ModelSpec, prefix: str = MODEL) -> None:
        self.path, self.manifest, self.spec = path, manifest, spec
        kept = {name.removeprefix(prefix): entry for name, entry in manifest.tensors.items() if name.startswith(prefix)}
        super().__init__(kept, lambda name, shard: read_shard(path, prefix + name, kept[name].dtype, shard))
        moments = sum(name.startswith(OPTIMIZER) for name in manifest.tensors)
        has_moments = prefix == MODEL and moments > 0
        self.optimizer = CheckpointWeights(path, manifest, spec, OPTIMIZER) if has_moments else None
        self.left_out = {f"{moments} tensors of the optimizer": self.WHY_NO_MOMENTS} if has_moments else {}

    def checksums(self, name: str) -> str:
        """Return the positions and checksums of the shards of a tensor as text."""
        return str([(shard.offsets, shard.shape, shard.xxh3_128) for shard in self._records[name].shards])

    def describe(self) -> str:
        """Return a description in one line."""
        step = self.manifest.progress.step
        return f"{self.path}" + (f", after {counted(step, 'step')}" if step else "")


_SAMPLED = 1024
"""Elements of each tensor that are part of a fingerprint."""


def frozen_names(spec: ModelSpec) -> list[str]:
    """Return the names of the parameters that are not trained because of adapters."""
    return [name for name, row in rows(spec).items() if row.frozen]


def frozen_weights(weights: Weights) -> Weights:
    """Return the base of weights with adapters, which has no adapters itself, and other weights as they are."""
    return weights.base if isinstance(weights, AdaptedWeights) else weights


def fingerprint(weights: Weights, names: Iterable[str], *, of_values: bool = False) -> str:
    """Return the sha256 of shape, type and first elements of some tensors that no adapter trains, or of the checksums
    of their shards.

    Training changes the first row of every matrix, so another model has another fingerprint. A changed byte elsewhere
    in a file is not detected: a whole base would have to be read twice. The fingerprint of the same weights differs
    between a folder of transformers and a checkpoint, unless it is `of_values` in both.
    """
    digest, weights = hashlib.sha256(), frozen_weights(weights)
    for name in sorted(names):
        if name not in weights.shapes:
            continue
        shape = weights.shapes[name]
        digest.update(f"{name} {list(shape)} {weights.dtypes[name]}\n".encode())
        if isinstance(weights, CheckpointWeights) and not of_values:
            digest.update(weights.checksums(name).encode())
        else:
            box = (*[1] * (len(shape) - 1), min(shape[-1], _SAMPLED))
            first = weights.read(name, (0,) * len(shape), box).contiguous().flatten()
            digest.update(first.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def record_of_base(weights: Weights, spec: ModelSpec) -> BaseRecord:
    """Return the record of the frozen weights of a model `spec` that starts with `weights`: of a run, the checkpoint
    that was opened; of weights with adapters, their base."""
    base = frozen_weights(weights)
    return BaseRecord(os.path.abspath(base.path), fingerprint(base, frozen_names(spec)))


class AdaptedWeights(CheckpointWeights):
    """The weights of a checkpoint of a run with adapters: its adapters, and the frozen weights of the base that it
    names.

    Raises CheckpointError if the base is missing, is of another model, or has changed.
    """

    def __init__(self, path: Path, manifest: CheckpointManifest, spec: ModelSpec) -> None:
        super().__init__(path, manifest, spec)
        assert manifest.base is not None
        context = f"{path} has adapters for the weights in {manifest.base.path}"
        try:
            self.base = frozen_weights(open_weights(manifest.base.path))
        except InputError as error:
            raise CheckpointError(*(f"{context}: {problem}" for problem in error.problems)) from None
        frozen = frozen_names(spec)
        if fingerprint(self.base, frozen) != manifest.base.fingerprint:
            raise CheckpointError(f"{context}, and that folder has other weights now; put the weights back")
        self._adapters = self.shapes
        self.shapes = {name: self.base.shapes[name] for name in frozen if name in self.base.shapes} | self.shapes
        self.dtypes = {name: self.base.dtypes[name] for name in frozen if name in self.base.dtypes} | self.dtypes

    def read(self, name: str, offsets: Sequence[int], shape: Sequence[int]) -> Tensor:
        """Return a box of a tensor, as `Weights.read`."""
        return super().read(name, offsets, shape) if name in self._adapters else self.base.read(name, offsets, shape)

    def describe(self) -> str:
        """Return a description in one line."""
        return f"{super().describe()}, adapters of {self.base.describe()}"


class AveragedWeights(CheckpointWeights):
    """The average of the weights in a checkpoint of a run with `[average]`, instead of its weights.

    Raises CheckpointError for weights without an average.
    """

    def __init__(self, weights: Weights) -> None:
        if not isinstance(weights, CheckpointWeights) or not (weights.path / RUN_FILE).is_file():
            raise CheckpointError(
                f"{weights.path} is no checkpoint of a run, and only a run makes averages of its weights"
            )
        config, step = load_kept(weights.path), weights.manifest.progress.step
        average = config.average
        if not (parts := average.parts(step, config.steps)):
            begins = f"the average starts after step {average.first_step(config.steps):,} of the run"
            why = "its run file has average.kind='none'" if average.kind == "none" else begins
            raise CheckpointError(f"{weights.path} has no average of the weights after step {step:,}: {why}")
        super().__init__(weights.path, weights.manifest, weights.spec)
        self.optimizer = None
        self._slots = [
            (weight, CheckpointWeights(weights.path, weights.manifest, weights.spec, f"{AVERAGE}{slot}/"))
            for slot, weight in parts.items()
        ]

    def read(self, name: str, offsets: Sequence[int], shape: Sequence[int]) -> Tensor:
        """Return a box of the average of a parameter, as `Weights.read`."""
        total = None
        for weight, slot in self._slots if name in self._slots[0][1].shapes else ():
            part = slot.read(name, offsets, shape).mul_(weight)
            total = part if total is None else total.add_(part)
        assert total is not None
        return total

    def describe(self) -> str:
        """Return a description in one line."""
        return f"the average in {super().describe()}"


def open_weights(path: str | Path) -> Weights:
    """Open the weights at a path: a folder of `transformers` or of `shardwright import`, a checkpoint, or a run (its
    newest checkpoint).

    Raises InputError for anything else, listing the supported sources, and for damaged weights.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: there is no such folder; give {WHAT}")
    if (folder / FILE_NAME).is_file():
        return weights_of_checkpoint(folder)
    if saved := published(folder / CHECKPOINTS):
        return open_weights(saved[-1])
    if is_folder_of_transformers(folder):
        return open_folder_of_transformers(folder)
    if (folder / ADAPTER).is_file():
        raise CheckpointError(
            f"{folder} has a LoRA adapter ({ADAPTER}) without the weights of its base; copy the files of the base "
            f"model next to it"
        )
    raise CheckpointError(f"{folder} holds no weights; give {WHAT}")


def weights_of_checkpoint(folder: Path) -> CheckpointWeights:
    """Open the weights of a checkpoint, or of a folder that `shardwright import` wrote.

    Raises CheckpointError if it is missing or damaged, or if its run file and manifest name different models.
    """
    manifest, spec = read_manifest(folder), spec_of_folder(folder)
    read = table_of(spec)
    saved = with_defaults(manifest.model)
    if differing := [key for key, value in saved.items() if value != read.get(key)]:
        raise DamagedError(
            f"{folder}: its run file has {differing[0]}={read.get(differing[0])!r}, and its {FILE_NAME} has "
            f"{saved[differing[0]]!r}: either the presets are from another version of shardwright, "
            f"or one file is of another checkpoint"
        )
    if spec.lora is None:
        return CheckpointWeights(folder, manifest, spec)
    if manifest.base is None:
        raise CheckpointError(f"{folder} has adapters, and its {FILE_NAME} names no base that they are for")
    return AdaptedWeights(folder, manifest, spec)


WHAT = "a folder of transformers, one that `shardwright import` wrote, a checkpoint, or a run that has one"


def adapter_differences(saved: LoraSpec | None, ours: ModelSpec) -> list[str]:
    """Return the reasons why adapters do not fit a run's, one sentence each. Targets that name the same matrices, and
    keys that make the same scale, are equal."""
    wanted = ours.lora
    if saved is None or wanted is None:
        none, some = "no adapters", "adapters"
        given = (none, some) if saved is None else (some, none)
        return [] if saved == wanted else [f"it was trained with {given[0]}, and this run has {given[1]} ([lora])"]
    keys = [] if saved.rank == wanted.rank else ["rank"]
    if keys or not isclose(saved.scale, wanted.scale):
        keys += [key for key in ("alpha", "rslora") if getattr(saved, key) != getattr(wanted, key)]
    if saved.dora != wanted.dora:
        keys.append("dora")
    if rows(replace(ours, lora=replace(wanted, targets=saved.targets))).keys() != rows(ours).keys():
        keys.append("targets")
    before, now = ({key: as_toml(value) for key, value in asdict(lora).items()} for lora in (saved, wanted))
    return [
        f"its adapters have lora.{key}={before[key]}, and this run has {now[key]}; set lora.{key}={before[key]}"
        for key in keys
    ]


def count_not_finite(tensor: Tensor) -> int:
    """Return the number of values of a tensor that are NaN or infinite."""
    return tensor.numel() - int(tensor.isfinite().sum())


def not_finite_in_words(source: str | Path, n: int, n_values: int, name: str) -> str:
    """Format a message such as `hf/x: 3 of 1,024 values of head.weight are NaN or infinite`."""
    return f"{source}: {n:,} of {n_values:,} values of {name} are NaN or infinite"


def _read_finite(weights: Weights, name: str, offsets: Sequence[int], shape: Sequence[int]) -> Tensor:
    """Return a box of a parameter. Raises CheckpointError if a value is NaN or infinite."""
    read = weights.read(name, offsets, shape)
    if n := count_not_finite(read):
        raise CheckpointError(
            f"{not_finite_in_words(weights.path, n, read.numel(), name)}, so all that the model computes would "
            f"be NaN; take an earlier checkpoint, or weights that are whole"
        )
    return read


@torch.no_grad()
def fill(
    parameters: Iterable[tuple[str, nn.Parameter]],
    spec: ModelSpec,
    weights: Weights,
    box: Callable[[nn.Parameter], Box] = whole,
) -> None:
    """Copy weights into parameters of a model `spec`, by name, or into the `box` of each parameter on this rank.

    An expert balance that is missing from `weights` is initialized as in a new model, and adapters that are missing
    keep their values. Values are converted to the parameters' types, and matrices of a quantised base are quantised.
    Raises CheckpointError for weights that are NaN or infinite.
    """
    for name, parameter in parameters:
        target, offsets = box(parameter)
        row = row_of(spec, name)
        if name in weights.shapes:
            fill_box(row, target, offsets, tuple(parameter.shape), partial(_read_finite, weights, name))
        elif not row.adapter:
            assert row.kind == "balance", f"{name} is not in {weights.path}"
            target.fill_(row.fill)


def newest_checkpoint(run_dir: Path) -> Path:
    """Return the newest checkpoint of a run. Raises CheckpointError if there is none."""
    saved = published(run_dir / CHECKPOINTS)
    if not saved:
        raise CheckpointError(
            f"{run_dir} has no checkpoint; train first: shardwright train RUN.toml --set out={run_dir}"
        )
    return saved[-1]


def restore(checkpoint: Path) -> Transformer:
    """Return the whole model of a checkpoint, on the CPU, in evaluation mode, in its training type.

    Raises CheckpointError if the checkpoint is missing or damaged.
    """
    weights = weights_of_checkpoint(checkpoint)
    with torch.device("meta"):
        model = Transformer(weights.spec).to(getattr(torch, weights.dtypes["embedding.weight"]))
    model = model.to_empty(device="cpu").eval()
    fill(model.named_parameters(), weights.spec, weights)
    return model
