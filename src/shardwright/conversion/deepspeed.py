"""Checkpoints of DeepSpeed: ZeRO-1, 2 and 3 as its engine saves them, and universal checkpoints, read and written.

FOLDER/latest                                                the name of the step's folder
FOLDER/STEP/[zero_pp_rank_R_]mp_rank_00_model_states.pt      shapes of the parameters of each group, and counters
FOLDER/STEP/[bf16_]zero_pp_rank_R_mp_rank_00_optim_states.pt rank R's part of the float32 weights and of the moments
FOLDER/STEP/zero/NAME/{fp32,exp_avg,exp_avg_sq,step}.pt      universal: whole tensors; `latest_universal` names STEP

ZeRO-1 and 2 cut the parameters of a group, one after the other, into equal parts, one for each rank. ZeRO-3 cuts each
parameter into equal parts, the last one padded. Files are loaded with `weights_only=True`, and the tensors are mapped.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwright.conversion.dcp import file_of
from shardwright.conversion.names import TRANSFORMERS, named_tensors_of
from shardwright.conversion.pickled import InertObject, StandIn, load_pickled
from shardwright.conversion.state import MOMENTS, STEP, TrainingState
from shardwright.hugging_face.architecture import architecture_of
from shardwright.hugging_face.files import CONFIG, said_shortly
from shardwright.hugging_face.writer import tensor_of_file
from shardwright.system.errors import CheckpointError, DamagedError, InputError
from shardwright.system.files import inside, open_regular
from shardwright.training.checkpoint.manifest import ShardRecord, TensorRecord
from shardwright.training.checkpoint.storage import name_of

LATEST = ("latest_universal", "latest")
VERSION = "0.19.8"
"""The version of DeepSpeed whose files are written."""
_PARTS, _SHAPES, _WHOLE = "zero_pp_rank_*_mp_rank_*_optim_states.pt", "mp_rank_*_model_states.pt", "zero"
_WEIGHT = "fp32"


_CLASSES: list[StandIn] = [
    (InertObject, "deepspeed.runtime.fp16.loss_scaler.LossScaler"),
    (InertObject, "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler"),
    (InertObject, "deepspeed.utils.tensor_fragment.fragment_address"),
    (int, "deepspeed.runtime.zero.config.ZeroStageEnum"),
]
"""The classes that are read besides PyTorch's own, each with the class that is constructed here."""


def step_folder(path: Path) -> Path | None:
    """Return the folder of a step in a checkpoint folder of DeepSpeed, or the folder itself if it is one; None if there
    is none."""
    tags = {}
    for name in LATEST:
        if (path / name).is_file():
            with open_regular(inside(path, name, DamagedError)) as file:
                tags[name] = file.read(1000).decode("utf-8", "replace").strip()
    if len({_number_of(tag) for tag in tags.values()}) > 1:
        said = ", and ".join(f"{name} says {tag!r}" for name, tag in tags.items())
        raise CheckpointError(f"{path}: {said}, which are different steps; name one of these folders")
    if tags:
        path = inside(path, next(iter(tags.values())), DamagedError)
    there = any(any(path.glob(pattern)) for pattern in (f"*{_PARTS}", f"*{_SHAPES}"))
    return path if there or (path / _WHOLE).is_dir() else None


def _number_of(tag: str) -> str:
    """Return the last number in the name of a step's folder: ds_to_universal writes global_step5 to a folder such as
    global_step5_universal."""
    return next(iter(re.findall(r"\d+", tag)[::-1]), "")


def _load(path: Path) -> Any:
    return load_pickled(path, _CLASSES, "DeepSpeed")


class DeepSpeedFolder:
    """A checkpoint of DeepSpeed under the names of `dcp_state`: NAME, optimizer.state.NAME.exp_avg,
    optimizer.param_groups.NAME.lr and train_state.step. `remarks`: left-out content -> the reason."""

    def __init__(self, path: Path) -> None:
        """`path`: the folder of a step. Raises CheckpointError or DamagedError with the file."""
        self.path = path
        self._parts: dict[str, list[Tensor]] = {}
        self._values: dict[str, Any] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self.remarks: dict[str, str] = {}
        try:
            self._read()
            self.tensors = {name: self._record(name) for name in self._parts}
        except InputError:
            raise
        except Exception as error:  # a damaged file has values of any type
            raise DamagedError(
                f"{path} is damaged, or of a version of DeepSpeed with other files: {type(error).__name__}: {error}"
            ) from None

    @property
    def names(self) -> list[str]:
        """The names of tensors and of other values."""
        return [*self._parts, *self._values]

    def value(self, name: str) -> Any:
        """Return a value that is no tensor, or None."""
        return self._values.get(name)

    def read_shard(self, name: str, record: ShardRecord) -> Tensor:
        """Return a whole tensor."""
        whole = torch.cat([part.flatten() for part in self._parts[name]])
        return whole[: math.prod(record.shape)].view(record.shape)

    def read_all(self, places: Mapping[str, str]) -> dict[str, Tensor]:
        """Return the whole tensors of some places."""
        return {name: self.read_shard(place, self.tensors[place].shards[0]) for name, place in places.items()}

    def _record(self, name: str) -> TensorRecord:
        shape, parts = self._shapes[name], self._parts[name]
        held, needed = sum(part.numel() for part in parts), math.prod(shape)
        # ZeRO-3 pads the parts of a parameter to one size.
        if held < needed or held >= needed + max(1, len(parts)):
            raise DamagedError(f"{self.path}: {name} has {held:,} elements, and its shape {[*shape]} needs {needed:,}")
        if len(dtypes := {part.dtype for part in parts}) > 1:
            raise DamagedError(f"{self.path}: parts of {name} have the types {', '.join(map(name_of, dtypes))}")
        shard = ShardRecord((0,) * len(shape), shape, name, "")
        return TensorRecord(shape, name_of(parts[0].dtype), (shard,))

    def _read(self) -> None:
        models = sorted(self.path.glob(f"*{_SHAPES}"))
        if others := [each.name for each in models if "mp_rank_00_" not in each.name]:
            raise CheckpointError(
                f"{self.path} has {others[0]}: DeepSpeed wrote it with tensor or pipeline parallelism; supported: ZeRO "
                f"over data-parallel ranks, and universal checkpoints"
            )
        if not models:
            raise DamagedError(f"{self.path / _SHAPES.replace('*', '00')} is missing: copy the files of all ranks")
        model = _load(models[0])
        skipped = int(model["skipped_steps"])
        self._values["train_state.step"] = int(model["global_steps"]) - skipped
        if skipped:
            self.remarks[f"{skipped} steps without an update"] = "AdamW has not counted them"
        if frozen := model.get("frozen_param_shapes"):
            raise CheckpointError(f"{models[0]} has frozen parameters ({next(iter(frozen))}); supported: none")
        groups = [{name: tuple(shape) for name, shape in group.items()} for group in model["param_shapes"]]
        if (self.path / _WHOLE).is_dir():
            self._read_whole(groups, model.get("ds_config"))
        else:
            self._read_parts(groups, int(model["dp_world_size"]))

    def _read_parts(self, groups: Sequence[Mapping[str, tuple[int, ...]]], n_ranks: int) -> None:
        """Read the file of each rank."""
        steps: dict[int, Path] = {}
        for rank in range(n_ranks):
            name = _PARTS.replace("*", str(rank), 1).replace("*", "00")
            path = next((each for each in (self.path / name, self.path / f"bf16_{name}") if each.is_file()), None)
            if path is None:
                raise DamagedError(f"{self.path / name} is missing: copy the files of all {n_ranks} ranks")
            content = _load(path)
            stored = content["optimizer_state_dict"]
            by_parameter = int(stored.get("zero_stage", 1)) == 3  # BF16_Optimizer has ZeRO-1 and does not say so
            base = stored["optimizer_state_dict" if by_parameter else "base_optimizer_state"]
            if not isinstance(base, Mapping):
                raise CheckpointError(f"{path}: elastic_checkpoint is set, whose states are not read; supported: false")
            weights = stored["fp32_flat_groups" if by_parameter else "single_partition_of_fp32_groups"]
            for number, group in enumerate(groups):
                flat = {_WEIGHT: weights[number]} | dict(base["state"][number])
                settings = next(each for each in base["param_groups"] if number in each["params"])
                step = int(flat.pop(STEP, settings.get(STEP)))
                steps[step] = path
                if rank == 0:
                    self._add_settings(group, settings, step, content.get("ds_config"))
                cuts = (
                    _cuts_of_parameters(group, n_ranks)
                    if by_parameter
                    else ((name, at.start, at.numel) for name, at in stored["param_slice_mappings"][number].items())
                )
                for name, start, count in cuts:
                    for kind, tensor in flat.items():
                        self._add(name, kind, group[name], tensor.narrow(0, start, count))
        if len(steps) > 1:
            said = ", ".join(f"{path.name}: {step}" for step, path in sorted(steps.items()))
            raise CheckpointError(f"{self.path}: its parts are of different steps ({said}); copy all files of one step")

    def _read_whole(self, groups: Sequence[Mapping[str, tuple[int, ...]]], config: Any) -> None:
        """Read the tensors of a universal checkpoint."""
        whole = inside(self.path, _WHOLE, DamagedError)
        optimizer = _load(whole / "optimizer_state.pt")
        base = optimizer.get("optimizer_state_dict") or optimizer
        for number, group in enumerate(groups):
            settings = next(each for each in base["param_groups"] if number in each["params"])
            for name, shape in group.items():
                folder = inside(whole, name, DamagedError)
                kinds = sorted({each.stem for each in folder.glob("*.pt")} | {_WEIGHT, *MOMENTS})
                content = {kind: _load(folder / f"{kind}.pt") for kind in kinds}
                step = content.pop(STEP, base.get("state", {}).get(0, {}).get(STEP))
                for kind, tensor in content.items():
                    self._add(name, kind, shape, tensor["param"] if isinstance(tensor, Mapping) else tensor)
                self._add_settings({name: shape}, settings, int(step), config)

    def _add(self, name: str, kind: str, shape: tuple[int, ...], part: Tensor) -> None:
        place = name if kind == _WEIGHT else f"optimizer.state.{name}.{kind}"
        self._parts.setdefault(place, []).append(part.detach())
        self._shapes[place] = shape

    def _add_settings(self, group: Mapping[str, Any], settings: Mapping[str, Any], step: int, config: Any) -> None:
        """Add the settings and the number of updates of the parameters of a group. `config`: DeepSpeed's, or a path."""
        optimizer = (config.get("optimizer") or {}) if isinstance(config, Mapping) else {}
        decoupled = (optimizer.get("params") or {}).get("adam_w_mode")
        unsure = isinstance(config, str) or str(optimizer.get("type")).lower() == "adam"
        if decoupled is None and unsure and settings.get("weight_decay"):
            self.remarks["adam_w_mode"] = (
                "the files do not say it, as DeepSpeed 0.18.4 and older remove it or store a path; AdamW is assumed"
            )
        decoupled = decoupled is None or decoupled
        for name in group:
            self._values[f"optimizer.state.{name}.{STEP}"] = step
            for key, value in (dict(settings) | {"adam_w_mode": decoupled}).items():
                if key != "params":
                    self._values[f"optimizer.param_groups.{name}.{key}"] = value


def _cuts_of_parameters(group: Mapping[str, tuple[int, ...]], n_ranks: int) -> Iterator[tuple[str, int, int]]:
    """Yield name, first element and number of elements of ZeRO-3's part of each parameter of a group."""
    start = 0
    for name, shape in group.items():
        count = -(-math.prod(shape) // n_ranks)
        yield name, start, count
        start += count


def write_universal_state(state: TrainingState, out: Path) -> list[str]:
    """Write a training state as a universal checkpoint, with one tensor in memory at a time. Return remarks. Raises
    CheckpointError with every reason why DeepSpeed has no place for it."""
    tensors = named_tensors_of(TRANSFORMERS, state.spec)
    if problems := [*_misfits(state, [part.name for each in tensors for part in each.parts])]:
        raise CheckpointError(*(f"{state.weights.path}: {problem}" for problem in said_shortly(problems)))
    settings = {tensor.name: state.settings[tensor.parts[0].name] for tensor in tensors}
    groups = list(dict.fromkeys(settings.values()))
    step, tag = float(state.step or 0), f"global_step{state.step}"
    for tensor in tensors:
        folder = out / tag / _WHOLE / tensor.name
        folder.mkdir(parents=True)
        for kind, values in ({_WEIGHT: state.weights} | dict(state.moments)).items():
            whole = tensor_of_file(tensor, values.read, getattr(torch, values.dtypes[tensor.parts[0].name]))
            (folder / f"{kind}.pt").write_bytes(file_of({"param": whole.contiguous().clone()}))
        (folder / f"{STEP}.pt").write_bytes(file_of(torch.tensor(step)))
    written = [{**group.group(), "params": [number]} for number, group in enumerate(groups)]
    base = {"state": {0: {STEP: torch.tensor(step)}}, "param_groups": written}
    optimizer = {"param_groups": written, "optimizer_state_dict": base, "ds_version": VERSION}
    (out / tag / _WHOLE / "optimizer_state.pt").write_bytes(file_of(optimizer))
    shapes = [{each.name: torch.Size(each.shape) for each in tensors if settings[each.name] == g} for g in groups]
    model: dict[str, Any] = {
        "module": {},
        "param_shapes": shapes,
        "global_steps": state.step,
        "skipped_steps": 0,
        "lr_scheduler": None,
    }
    for name in ("mp_rank_00", "zero_pp_rank_0_mp_rank_00"):  # DeepSpeed reads the second with ZeRO-3
        content = file_of({**model, "dp_world_size": 1, "mp_world_size": 1})
        (out / tag / f"{name}_model_states.pt").write_bytes(content)
    (out / LATEST[0]).write_text(tag)
    (out / CONFIG).write_text(json.dumps(architecture_of(state.spec).config(state.spec), indent=2) + "\n")
    differing = ["weight_decay", *(key for key in ("eps", "lr") if len({getattr(g, key) for g in groups}) > 1)]
    order = ", then ".join(
        f"{len(shapes[n])} with {', '.join(f'{key}={getattr(g, key):g}' for key in differing)}"
        for n, g in enumerate(groups)
    )
    remarks = [f'DeepSpeed loads it with "checkpoint": {{"load_universal": true}}; groups of the optimizer: {order}']
    if len(groups) > 1:
        remarks.append(
            "DeepSpeed's ZeRO-3 gives all groups the settings of the first, and one shared counter of steps: set "
            "weight_decay, eps and lr of each group after load_checkpoint, and copy its step"
        )
    return remarks


def _misfits(state: TrainingState, names: Sequence[str]) -> Iterator[str]:
    """Yield why DeepSpeed has no place for a state."""
    if state.step is None:
        yield "it has no optimizer, and a universal checkpoint needs one; DeepSpeed starts from --to hf"
        return
    if others := [name for name in names if name not in state.settings]:
        yield f"{others[0]} has no state of the optimizer, and a universal checkpoint has only trained parameters"
    for kind, each in ({"the weights": state.weights} | dict(state.moments)).items():
        if types := sorted(set(each.dtypes.values()) - {"float32"}):
            yield f"{kind}: {', '.join(types)}; DeepSpeed's ZeRO keeps float32"
