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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwright.conversion.dcp import file_of
from shardwright.conversion.dcp_state import WholeTensors
from shardwright.conversion.names import TRANSFORMERS, named_tensors_of
from shardwright.conversion.pickled import InertObject, StandIn, load_pickled
from shardwright.conversion.schema import (
    Counted,
    DeepSpeedConfig,
    WholeTensor,
    ZeroGroup,
    ZeroModelFile,
    ZeroOptimizer,
    ZeroParameters,
    ZeroPartition,
    ZeroRankFile,
    ZeroStage,
    checked,
    equal_on_all,
)
from shardwright.conversion.state import MOMENTS, STEP, TrainingState
from shardwright.hugging_face.architecture import architecture_of
from shardwright.hugging_face.files import CONFIG, shortened
from shardwright.hugging_face.writer import tensor_of_file
from shardwright.system.errors import CheckpointError, DamagedError
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
        statements = ", and ".join(f"{name} says {tag!r}" for name, tag in tags.items())
        raise CheckpointError(f"{path}: {statements}, which are different steps; name one of these folders")
    if tags:
        path = inside(path, next(iter(tags.values())), DamagedError)
    has_parts = any(any(path.glob(pattern)) for pattern in (f"*{_PARTS}", f"*{_SHAPES}"))
    return path if has_parts or (path / _WHOLE).is_dir() else None


def _number_of(tag: str) -> str:
    """Return the last number in the name of a step's folder: ds_to_universal writes global_step5 to a folder such as
    global_step5_universal."""
    return next(iter(re.findall(r"\d+", tag)[::-1]), "")


def _load(path: Path) -> Any:
    return load_pickled(path, _CLASSES, "DeepSpeed")


class DeepSpeedFolder(WholeTensors):
    """A checkpoint of DeepSpeed under the names of `dcp_state`: NAME, optimizer.state.NAME.exp_avg,
    optimizer.param_groups.NAME.lr and train_state.step."""

    def __init__(self, path: Path) -> None:
        """`path`: the folder of a step. Raises CheckpointError or DamagedError with the file."""
        super().__init__(path)
        self._parts: dict[str, list[Tensor]] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._files: dict[str, Path] = {}
        self._padded = False
        self._read()
        self.tensors = {name: self._record(name) for name in self._parts}

    def file_of(self, name: str) -> Path:
        """Return the file of a value, or of a tensor's first part."""
        return self._files.get(name, self.path)

    def read_shard(self, name: str, record: ShardRecord) -> Tensor:
        """Return a whole tensor."""
        whole = torch.cat([part.flatten() for part in self._parts[name]])
        return whole[: math.prod(record.shape)].view(record.shape)

    def _record(self, name: str) -> TensorRecord:
        shape, parts = self._shapes[name], self._parts[name]
        total, needed = sum(part.numel() for part in parts), math.prod(shape)
        if total < needed or total >= needed + (max(1, len(parts)) if self._padded else 1):
            raise DamagedError(f"{self.path}: {name} has {total:,} elements, and its shape {[*shape]} needs {needed:,}")
        if len(dtypes := {part.dtype for part in parts}) > 1:
            raise DamagedError(f"{self.path}: parts of {name} have the types {', '.join(map(name_of, dtypes))}")
        shard = ShardRecord((0,) * len(shape), shape, name, "")
        return TensorRecord(shape, name_of(parts[0].dtype), (shard,))

    def _read(self) -> None:
        models = sorted(self.path.glob(f"*{_SHAPES}"))
        if others := [path.name for path in models if "mp_rank_00_" not in path.name]:
            raise CheckpointError(
                f"{self.path} has {others[0]}: DeepSpeed wrote it with tensor or pipeline parallelism; supported: ZeRO "
                f"over data-parallel ranks, and universal checkpoints"
            )
        if not models:
            raise DamagedError(f"{self.path / _SHAPES.replace('*', '00')} is missing: copy the files of all ranks")
        files = {path: checked(ZeroModelFile, _load(path), path) for path in models}
        for key in ("global_steps", "skipped_steps", "dp_world_size", "param_shapes"):
            equal_on_all({path: getattr(file, key) for path, file in files.items()}, key)
        model = files[models[0]]
        if model.frozen_param_shapes:
            raise CheckpointError(
                f"{models[0]} has frozen parameters ({next(iter(model.frozen_param_shapes))}); supported: none"
            )
        if model.skipped_steps > model.global_steps:
            raise DamagedError(f"{models[0]}: skipped_steps={model.skipped_steps} of global_steps={model.global_steps}")
        self._values["train_state.step"] = model.global_steps - model.skipped_steps
        self._files["train_state.step"] = models[0]
        if model.skipped_steps:
            self.remarks[f"{model.skipped_steps} steps without an update"] = "AdamW has not counted them"
        if (self.path / _WHOLE).is_dir():
            self._read_whole(model)
        else:
            self._read_parts(model)

    def _rank_files(self, n_ranks: int) -> list[Path]:
        """Return the file of each rank. Raises DamagedError if one is missing, or if there are more."""
        by_name = {path.name.removeprefix("bf16_"): path for path in sorted(self.path.glob(f"*{_PARTS}"))}
        paths = []
        for rank in range(n_ranks):
            name = _PARTS.replace("*", str(rank), 1).replace("*", "00")
            if name not in by_name or not by_name[name].is_file():
                raise DamagedError(f"{self.path / name} is missing: copy the files of all {n_ranks} ranks")
            paths.append(by_name.pop(name))
        if by_name:
            raise DamagedError(f"{min(by_name.values())} is of another run: dp_world_size={n_ranks}; remove the file")
        return paths

    def _read_parts(self, model: ZeroModelFile) -> None:
        """Read the file of each rank."""
        settings: dict[Path, Any] = {}
        stages: dict[Path, int] = {}
        steps: dict[int, Path] = {}
        n_ranks = model.dp_world_size
        for path in self._rank_files(n_ranks):
            content = checked(ZeroRankFile, _load(path), path)
            where = f"{path}: optimizer_state_dict"
            stages[path] = stage = checked(ZeroStage, content.optimizer_state_dict, where).zero_stage
            self._padded = stage == 3
            if stage == 3:
                for_rank = self.path / path.name.replace("optim_states", "model_states").removeprefix("bf16_")
                if not for_rank.is_file():
                    raise DamagedError(f"{for_rank} is missing: copy the files of all {n_ranks} ranks")
                parameters = checked(ZeroParameters, content.optimizer_state_dict, where)
                base, weights = parameters.optimizer_state_dict, parameters.fp32_flat_groups
                slices = [[*_cuts_of_parameters(group, n_ranks)] for group in model.param_shapes]
            else:
                if isinstance(content.optimizer_state_dict.get("base_optimizer_state"), list):
                    raise CheckpointError(
                        f"{path}: elastic_checkpoint is set, whose states are not read; supported: false"
                    )
                partition = checked(ZeroPartition, content.optimizer_state_dict, where)
                base, weights = partition.base_optimizer_state, partition.single_partition_of_fp32_groups
                slices = [
                    [(name, part.start, part.numel) for name, part in group.items()]
                    for group in partition.param_slice_mappings
                ]
            if not len(weights) == len(slices) == len(model.param_shapes):
                raise DamagedError(
                    f"{path}: it has {len(weights)} flat tensors and {len(slices)} tables of their parts, and "
                    f"{len(model.param_shapes)} of each are needed"
                )
            settings[path] = [group.model_dump(exclude={"params"}) for group in base.param_groups]
            for number, group in enumerate(model.param_shapes):
                state = dict(base.state.get(number, {}))
                of_group = _settings_of(base, number, path)
                step = checked(Counted, {"value": state.pop(STEP, of_group.step)}, f"{path}: {STEP}").value
                if step is None:
                    raise DamagedError(f"{path}: {STEP} of group {number} is missing")
                steps[step] = path
                if len(settings) == 1:
                    self._add_settings(group, of_group, step, content.ds_config, path)
                self._cut(group, {_WEIGHT: weights[number]} | state, slices[number], path)
        equal_on_all(stages, "zero_stage")
        if len(steps) > 1:
            text = ", ".join(f"{path.name}: {step}" for step, path in sorted(steps.items()))
            raise CheckpointError(f"{self.path}: its parts are of different steps ({text}); copy all files of one step")
        equal_on_all(settings, "settings of AdamW")

    def _cut(
        self,
        group: Mapping[str, tuple[int, ...]],
        flat: Mapping[str, Any],
        cuts: Iterable[tuple[str, int, int]],
        file: Path,
    ) -> None:
        """Add the parts of a rank's flat tensors. `cuts`: (parameter, first element, number of elements); they follow
        each other without a gap, and only padding is behind the last."""
        cuts, size, end = sorted(cuts, key=lambda cut: cut[1]), flat[_WEIGHT].numel(), 0
        for name, start, count in cuts:
            if name not in group:
                raise DamagedError(f"{file}: {name} is no parameter of the group that its elements are in")
            if start != end:
                raise DamagedError(f"{file}: {name} starts at element {start:,}, and {end:,} come before it")
            end += count
        for kind, tensor in flat.items():
            values = checked(WholeTensor, {"param": tensor}, f"{file}: {kind}").param
            if tuple(values.shape) != (size,) or end > size:
                raise DamagedError(
                    f"{file}: {kind} has the shape {[*values.shape]}; {_WEIGHT} has {size:,} elements, and the "
                    f"parameters in it {end:,}"
                )
            for name, start, count in cuts:
                self._add(name, kind, group[name], values.narrow(0, start, count), file)

    def _read_whole(self, model: ZeroModelFile) -> None:
        """Read the tensors of a universal checkpoint."""
        whole = inside(self.path, _WHOLE, DamagedError)
        path = whole / "optimizer_state.pt"
        optimizer = _load(path)
        if isinstance(optimizer, Mapping) and optimizer.get("optimizer_state_dict"):
            optimizer = optimizer["optimizer_state_dict"]
        base = checked(ZeroOptimizer, optimizer, path)
        for number, group in enumerate(model.param_shapes):
            settings = _settings_of(base, number, path)
            for name, shape in group.items():
                folder = inside(whole, name, DamagedError)
                kinds = sorted({entry.stem for entry in folder.glob("*.pt")} | {_WEIGHT, *MOMENTS})
                content = {kind: _load(folder / f"{kind}.pt") for kind in kinds}
                step = content.pop(STEP, base.state.get(0, {}).get(STEP, settings.step))
                counted = checked(Counted, {"value": step}, folder / f"{STEP}.pt").value
                if counted is None:
                    raise DamagedError(f"{folder / STEP}.pt is missing: copy the files of all ranks")
                for kind, stored in content.items():
                    file = folder / f"{kind}.pt"
                    stored = stored if isinstance(stored, Mapping) else {"param": stored}
                    values = checked(WholeTensor, stored, file).param
                    if tuple(values.shape) not in (shape, (math.prod(shape),)):
                        raise DamagedError(f"{file} has the shape {[*values.shape]}, and {name} is {[*shape]}")
                    self._add(name, kind, shape, values, file)
                self._add_settings({name: shape}, settings, counted, model.ds_config, path)
        known = {name for group in model.param_shapes for name in group}
        if more := {entry.name for entry in whole.iterdir() if entry.is_dir()} - known:
            raise DamagedError(f"{whole / min(more)} is no parameter of the groups in {self.path.name}")

    def _add(self, name: str, kind: str, shape: tuple[int, ...], part: Tensor, file: Path) -> None:
        place = name if kind == _WEIGHT else f"optimizer.state.{name}.{kind}"
        self._parts.setdefault(place, []).append(part.detach())
        self._shapes[place] = shape
        self._files.setdefault(place, file)

    def _add_settings(self, group: Mapping[str, Any], settings: ZeroGroup, step: int, config: Any, file: Path) -> None:
        """Add the settings and the number of updates of the parameters of a group. `config`: DeepSpeed's, or a path."""
        stored = checked(DeepSpeedConfig, config if isinstance(config, Mapping) else {}, f"{file}: ds_config").optimizer
        decoupled = stored.params.adam_w_mode if stored and stored.params else None
        unsure = isinstance(config, str) or (stored is not None and str(stored.type).lower() == "adam")
        if decoupled is None and unsure and settings.weight_decay:
            self.remarks["adam_w_mode"] = (
                "the files do not say it, as DeepSpeed 0.18.4 and older remove it or store a path; AdamW is assumed"
            )
        values = settings.model_dump(exclude={"params", STEP}) | {"adam_w_mode": decoupled is None or decoupled}
        for name in group:
            places = {f"optimizer.state.{name}.{STEP}": step}
            places |= {f"optimizer.param_groups.{name}.{key}": value for key, value in values.items()}
            self._values |= places
            self._files |= dict.fromkeys(places, file)


def _settings_of(base: ZeroOptimizer, number: int, path: Path) -> ZeroGroup:
    """Return the settings of a flat tensor."""
    fitting = [group for group in base.param_groups if number in group.params]
    if len(fitting) != 1:
        raise DamagedError(f"{path}: {len(fitting)} entries of param_groups have the number {number}; 1 is needed")
    return fitting[0]


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
    if problems := [*_misfits(state, [part.name for tensor in tensors for part in tensor.parts])]:
        raise CheckpointError(*(f"{state.weights.path}: {problem}" for problem in shortened(problems)))
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
    shapes = [{entry.name: torch.Size(entry.shape) for entry in tensors if settings[entry.name] == g} for g in groups]
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
    for kind, values in ({"the weights": state.weights} | dict(state.moments)).items():
        if types := sorted(set(values.dtypes.values()) - {"float32"}):
            yield f"{kind}: {', '.join(types)}; DeepSpeed's ZeRO keeps float32"
