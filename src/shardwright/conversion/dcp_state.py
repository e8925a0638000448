"""Training states in PyTorch's distributed checkpoints: torchtitan's, and trainers' with the names of `transformers`.
DeepSpeed's checkpoints (`deepspeed.py`) are read under the same names.

torchtitan: NAME, optimizer.state.NAME.exp_avg, optimizer.param_groups.NAME.lr, lr_scheduler.last_epoch,
train_state.step. Others: model.NAME, optimizer.state.NAME.exp_avg, and groups by name or by number with a list of names
(`torch.distributed.checkpoint.state_dict`).
"""

import json
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from shardwright.conversion.dcp import DcpWriter, read_dcp
from shardwright.conversion.names import NAMINGS, TORCHTITAN, TRANSFORMERS, named_tensors_of
from shardwright.conversion.schema import AdamWGroup, Counted, ParameterNames, check_finite, checked
from shardwright.conversion.state import MOMENTS, STEP, AdamWSettings, TrainingState, trained_parameters
from shardwright.hugging_face.architecture import architecture_of
from shardwright.hugging_face.files import CONFIG, shortened
from shardwright.hugging_face.reader import MappedTensors, Spans
from shardwright.hugging_face.table import FileTensor
from shardwright.hugging_face.writer import tensor_of_file
from shardwright.model.spec import ModelSpec
from shardwright.system.errors import CheckpointError, ConfigError, DamagedError
from shardwright.training.checkpoint.manifest import ShardRecord, TensorRecord
from shardwright.training.weights import ShardedTensors, Weights

_PREFIXES, _OPTIMIZERS = ("", "model."), ("optimizer.", "optim.")
_STEPS = ("train_state.step", "lr_scheduler.last_epoch")
TOKENS, SAMPLES = "train_state.ntokens_seen", "train_state.samples_seen"
_DATA = "dataloader."
_NOT_TENSORS = (_DATA, "lr_scheduler.", "train_state.")
CHUNK_BYTES = 2**28
"""Largest chunk that is written, unless one row is larger."""


class TensorFolder(Protocol):
    """A checkpoint of a trainer. `names`: of its tensors and of its other values."""

    @property
    def path(self) -> Path: ...
    @property
    def tensors(self) -> Mapping[str, TensorRecord]: ...
    @property
    def names(self) -> list[str]: ...
    def file_of(self, name: str) -> Path: ...
    def value(self, name: str) -> Any: ...
    def read_shard(self, name: str, record: ShardRecord) -> Tensor: ...
    def read_all(self, places: Mapping[str, str]) -> dict[str, Tensor]: ...


class WholeTensors(ABC):
    """A `TensorFolder` that returns each tensor whole. `remarks`: left-out content -> the reason."""

    tensors: Mapping[str, TensorRecord]

    def __init__(self, path: Path) -> None:
        self.path = path
        self.remarks: dict[str, str] = {}
        self._values: dict[str, Any] = {}

    @property
    def names(self) -> list[str]:
        """The names of tensors and of other values."""
        return [*self.tensors, *self._values]

    def value(self, name: str) -> Any:
        """Return a value that is no tensor, or None."""
        return self._values.get(name)

    @abstractmethod
    def read_shard(self, name: str, record: ShardRecord) -> Tensor:
        """Return a whole tensor."""

    def read_all(self, places: Mapping[str, str]) -> dict[str, Tensor]:
        """Return the whole tensors of some places."""
        return {name: self.read_shard(place, self.tensors[place].shards[0]) for name, place in places.items()}


class TrainerWeights(MappedTensors):
    """The parameters in a checkpoint of a trainer, or the moments of one kind. `place`: the name of a tensor in the
    folder, with {} for the trainer's name of the parameter."""

    left_out: dict[str, str]

    def __init__(
        self, folder: TensorFolder, shards: ShardedTensors, spec: ModelSpec, tensors: Sequence[FileTensor], place: str
    ) -> None:
        """Raises CheckpointError with every problem: tensors that are missing or have another shape."""
        self.path, self.left_out = folder.path, {}
        self._folder, self._shards, self._place = folder, shards, place
        problems = []
        for tensor in tensors:
            name = place.format(tensor.name)
            if (stored := folder.tensors.get(name)) is None:
                problems.append(f"{name} is missing")
            elif stored.shape != tensor.shape:
                problems.append(f"{name} is {[*stored.shape]}, and the model makes it {[*tensor.shape]}")
            elif not getattr(torch, stored.dtype).is_floating_point:
                problems.append(f"{name} has the type {stored.dtype}; supported: floating point")
        if problems:
            raise CheckpointError(*(f"{folder.path}: {problem}" for problem in shortened(problems)))
        dtypes = {tensor.name: shards.dtypes[place.format(tensor.name)] for tensor in tensors}
        super().__init__(spec, tensors, dtypes, self._slice)

    def _slice(self, name: str, spans: Spans) -> Tensor:
        low, high = zip(*spans, strict=True)
        place = self._place.format(name)
        box = self._shards.read(place, low, [b - a for a, b in zip(low, high, strict=True)])
        return check_finite(box, place.rpartition(".")[2], f"{self._folder.file_of(place)}: {place}")

    def read_all(self) -> dict[str, Tensor]:
        """Return every tensor by its name in the file."""
        return self._folder.read_all({name: self._place.format(name) for name in self.in_files})

    def describe(self) -> str:
        """Return a description in one line."""
        return f"checkpoint {self.path}"


def read_dcp_state(path: Path, spec: ModelSpec) -> TrainingState:
    """Return the training state of a distributed checkpoint of a model. Raises CheckpointError with all problems."""
    return state_of_folder(read_dcp(path), spec)


def state_of_folder(
    folder: TensorFolder, spec: ModelSpec, format: str | None = None, namings: Sequence[str] = NAMINGS
) -> TrainingState:
    """Return the training state of a checkpoint of a trainer. `format`: its name; None: the format of a distributed
    checkpoint with its names. `namings`: the names that its tensors can have. Raises CheckpointError with all
    problems."""
    path = folder.path
    prefix, naming, tensors = _naming(folder, spec, namings)
    shards = ShardedTensors(folder.tensors, folder.read_shard)
    weights = TrainerWeights(folder, shards, spec, tensors, prefix + "{}")
    names = folder.names
    optimizer = next((key for key in _OPTIMIZERS if any(name.startswith(f"{key}state.") for name in names)), None)
    outside = (*_NOT_TENSORS, *([] if optimizer is None else [optimizer]))
    known = {prefix + tensor.name for tensor in tensors}
    problems = [f"{name} is not a tensor of this model" for name in names if name not in known]
    problems = list(dict.fromkeys(problem for problem in problems if not problem.startswith(outside)))
    trained = set(trained_parameters(spec))
    updated = [tensor for tensor in tensors if trained.issuperset(part.name for part in tensor.parts)]
    if optimizer is not None:
        problems += _unknown_states(names, f"{optimizer}state.", updated)
    if problems:
        raise CheckpointError(*(f"{path}: {problem}" for problem in shortened(problems)))
    data = {"dataloader": "the data position of torchtitan is in a form of its own"}
    state = TrainingState(
        format=format or ("dcp" if naming == TRANSFORMERS else TORCHTITAN),
        weights=weights,
        naming=naming,
        left_out=data if any(name.startswith(_DATA) for name in names) else {},
    )
    if optimizer is None:
        return state
    of_parameter = f"{optimizer}state.{{}}."
    return replace(
        state,
        moments={kind: TrainerWeights(folder, shards, spec, updated, of_parameter + kind) for kind in MOMENTS},
        settings=_settings(folder, f"{optimizer}param_groups.", updated),
        step=_step(folder, of_parameter + STEP, updated),
        tokens=_count(folder, TOKENS),
        samples=_count(folder, SAMPLES),
    )


def _naming(folder: TensorFolder, spec: ModelSpec, namings: Sequence[str]) -> tuple[str, str, list[FileTensor]]:
    """Return the prefix of parameters, the naming and the tensors that most names of a checkpoint belong to. Raises
    CheckpointError if none does."""
    best: tuple[int, str, str, list[FileTensor]] = (0, "", "", [])
    misfits = []
    for naming in namings:
        try:
            tensors = named_tensors_of(naming, spec)
        except ConfigError as error:
            misfits += error.problems
            continue
        for prefix in _PREFIXES:
            fits = sum(prefix + tensor.name in folder.tensors for tensor in tensors)
            best = max(best, (fits, prefix, naming, tensors), key=lambda candidate: candidate[0])
    if not best[0]:
        some = ", ".join(sorted(folder.tensors)[:3]) or "no tensors"
        raise CheckpointError(
            f"{folder.path} has other names of tensors ({some}); supported: the names of {', '.join(namings)}",
            *misfits,
        )
    return best[1:]


def _unknown_states(names: Iterable[str], state: str, updated: Sequence[FileTensor]) -> Iterator[str]:
    """Yield why the states are not AdamW's."""
    known = {f"{state}{tensor.name}.{kind}" for tensor in updated for kind in (*MOMENTS, STEP)}
    others = sorted({name.rpartition(".")[2] for name in names if name.startswith(state) and name not in known})
    if others:
        yield (
            f"the optimizer has states {', '.join(others)} besides AdamW's, or states of other parameters; supported: "
            f"AdamW ({', '.join((*MOMENTS, STEP))})"
        )


def _step(folder: TensorFolder, place: str, updated: Sequence[FileTensor]) -> int:
    """Return the number of steps taken. Raises CheckpointError if parts of the checkpoint differ in it."""
    steps = Counter(_count(folder, place.format(tensor.name)) for tensor in updated)
    totals = {name: value for name in _STEPS if (value := _count(folder, name)) is not None}
    if len({*steps, *totals.values()}) > 1 or None in steps:
        parts = [f"{n} parameters at step {step}" for step, n in steps.items()]
        parts += [f"{name}={value}" for name, value in totals.items()]
        raise CheckpointError(
            f"{folder.path}: its parts are of different steps ({', '.join(parts)}); copy all files of one step"
        )
    (step,) = steps
    assert step is not None
    return step


def _count(folder: TensorFolder, name: str) -> int | None:
    """Return a counter, or None if the checkpoint does not have it. Raises DamagedError if it is no count."""
    return checked(Counted, {"value": folder.value(name)}, f"{folder.file_of(name)}: {name}").value


def _settings(folder: TensorFolder, groups: str, updated: Sequence[FileTensor]) -> dict[str, AdamWSettings]:
    """Return the settings of each parameter. Raises CheckpointError if settings are missing, or if the update with
    them is not AdamW's."""
    numbers = {m[1] for name in folder.names if (m := re.fullmatch(rf"{re.escape(groups)}(\d+)\.params", name))}
    group_of: dict[str, str] = {}
    for number in sorted(numbers, key=int):
        where = f"{groups}{number}.params"
        inside = checked(ParameterNames, {"params": folder.value(where)}, f"{folder.file_of(where)}: {groups}{number}")
        if twice := [*(group_of.keys() & inside.params), *(n for n, k in Counter(inside.params).items() if k > 1)]:
            raise DamagedError(f"{folder.file_of(where)}: {twice[0]} is in the optimizer's groups twice")
        group_of |= dict.fromkeys(inside.params, number)
    settings: dict[str, AdamWSettings] = {}
    with_peak: dict[bool, str] = {}
    for tensor in updated:
        place = f"{groups}{group_of.get(tensor.name, tensor.name)}."
        if folder.value(place + "lr") is None:
            raise CheckpointError(f"{folder.path} has moments of {tensor.name}, and no settings of AdamW ({place}lr)")
        stored = {key: value for key in AdamWGroup.model_fields if (value := folder.value(place + key)) is not None}
        group = checked(AdamWGroup, stored, f"{folder.file_of(place + 'lr')}: {place.removesuffix('.')}")
        if other := group.other_update():
            raise CheckpointError(f"{folder.path}: {place}{other}")
        with_peak[group.initial_lr is not None] = place
        peak = group.lr if group.initial_lr is None else group.initial_lr
        settings |= dict.fromkeys(
            [part.name for part in tensor.parts],
            AdamWSettings(group.lr, group.betas, group.eps, group.weight_decay, peak),
        )
    if len(with_peak) > 1:
        raise DamagedError(
            f"{folder.path}: {with_peak[False]}initial_lr is missing, and {with_peak[True]}initial_lr is not"
        )
    return settings


def write_dcp_state(state: TrainingState, out: Path, naming: str) -> None:
    """Write a training state as a distributed checkpoint with the names of a trainer, and the model's config.json."""
    spec, writer = state.spec, DcpWriter(out)
    tensors = named_tensors_of(naming, spec)
    prefix = ("model",) if naming == TRANSFORMERS else ()
    for tensor in tensors:
        _write(writer, (*prefix, tensor.name), tensor, state.weights)
    updated = [tensor for tensor in tensors if state.moments and tensor.parts[0].name in state.settings]
    for kind, moments in state.moments.items():
        for tensor in updated:
            _write(writer, ("optimizer", "state", tensor.name, kind), tensor, moments)
    for tensor in updated:
        writer.write_tensor(("optimizer", "state", tensor.name, STEP), (), [((), torch.tensor(float(state.step or 0)))])
        (settings,) = {state.settings[part.name] for part in tensor.parts}
        for key, value in settings.group().items():
            writer.write_object(("optimizer", "param_groups", tensor.name, key), value)
    if state.step is not None:
        for name in _STEPS:
            writer.write_object(tuple(name.split(".")), state.step)
    if state.tokens is not None:
        writer.write_object(tuple(TOKENS.split(".")), state.tokens)
    writer.finish()
    (out / CONFIG).write_text(json.dumps(architecture_of(spec).config(spec), indent=2) + "\n")


def _write(writer: DcpWriter, path: tuple[str, ...], tensor: FileTensor, weights: Weights) -> None:
    """Write one tensor of a trainer, cut along its first dim."""
    dtype = getattr(torch, weights.dtypes[tensor.parts[0].name])
    values = tensor_of_file(tensor, weights.read, dtype)
    n_rows = max(1, CHUNK_BYTES // max(1, values[0].nbytes))
    rest = (0,) * (values.dim() - 1)
    cuts = zip(range(0, len(values), n_rows), values.split(n_rows), strict=True)
    writer.write_tensor(path, tensor.shape, (((first, *rest), chunk) for first, chunk in cuts))
