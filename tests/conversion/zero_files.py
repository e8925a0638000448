"""Files in the form in which DeepSpeed 0.19.8 writes them with ZeRO, and its names of classes in them. No test compares
them with files of the library: where it is installed, test_deepspeed.py reads its own."""

import math
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from shardwright.conversion.names import TRANSFORMERS, named_tensors_of
from shardwright.model.spec import ModelSpec
from tests.training.plain_loop import BETA1, BETA2, EPS, WEIGHT_DECAY

KINDS = ("fp32", "exp_avg", "exp_avg_sq")
STEP = 5
Values = dict[str, dict[str, Tensor]]


class LossScaler:
    def __init__(self) -> None:
        self.cur_scale = 1.0


class ZeroStageEnum(IntEnum):
    optimizer_states = 1
    gradients = 2
    weights = 3


@dataclass
class fragment_address:
    numel: int
    start: int


@contextmanager
def under_their_names() -> Iterator[None]:
    """Pickle the classes of this file under the names of DeepSpeed's modules."""
    places = {
        LossScaler: "deepspeed.runtime.fp16.loss_scaler",
        ZeroStageEnum: "deepspeed.runtime.zero.config",
        fragment_address: "deepspeed.utils.tensor_fragment",
    }
    parts = [name.split(".") for name in places.values()]
    names = {".".join(part[:n]) for part in parts for n in range(1, len(part) + 1)}
    modules = {name: types.ModuleType(name) for name in names}
    for each, name in places.items():
        setattr(modules[name], each.__name__, each)
        each.__module__ = name
    with patch.dict(sys.modules, modules):
        yield


def random_values(spec: ModelSpec) -> Values:
    """Weights and moments by kind and name."""
    generator = torch.Generator().manual_seed(0)
    tensors = named_tensors_of(TRANSFORMERS, spec)
    return {kind: {each.name: torch.rand(each.shape, generator=generator) for each in tensors} for kind in KINDS}


def groups_of(values: Values) -> list[list[str]]:
    """The names of the tensors with weight decay, and without."""
    return [[name for name, each in values["fp32"].items() if each.dim() == n] for n in (2, 1)]


def write_zero(folder: Path, values: Values, stage: int, n_ranks: int, config: Any = None, bf16: bool = False) -> None:
    """Write a checkpoint after STEP steps. `config`: the ds_config, or the path that older releases store. `bf16`: as
    BF16_Optimizer writes it, whose stage is 1 and not in the file."""
    groups, step_folder = groups_of(values), folder / f"global_step{STEP}"
    step_folder.mkdir(parents=True)
    (folder / "latest").write_text(step_folder.name)
    shapes = [{name: values["fp32"][name].shape for name in group} for group in groups]
    model = {"module": {}, "param_shapes": shapes, "global_steps": STEP, "skipped_steps": 0, "dp_world_size": n_ranks}
    for rank in range(n_ranks):
        name = f"zero_pp_rank_{rank}_mp_rank_00"
        if stage == 3 or rank == 0:
            torch.save(model, step_folder / f"{name if stage == 3 else 'mp_rank_00'}_model_states.pt")
        state = _rank_states(values, groups, stage, rank, n_ranks)
        if bf16:
            del state["zero_stage"], state["loss_scaler"]
        with under_their_names():
            content = {"optimizer_state_dict": state, "ds_config": config or {}}
            torch.save(content, step_folder / f"{'bf16_' * bf16}{name}_optim_states.pt")


def _rank_states(values: Values, groups: list[list[str]], stage: int, rank: int, n_ranks: int) -> dict[str, Any]:
    cut = _cut_parameters if stage == 3 else _cut_groups
    flat = [{kind: cut(each, group, rank, n_ranks) for kind, each in values.items()} for group in groups]
    step = torch.tensor(float(STEP))
    settings = {"lr": 0.01, "betas": (BETA1, BETA2), "eps": EPS, "amsgrad": False, "maximize": False}
    base = {
        "state": {
            n: {"step": step, "exp_avg": f["exp_avg"], "exp_avg_sq": f["exp_avg_sq"]} for n, f in enumerate(flat)
        },
        "param_groups": [
            {**settings, "weight_decay": decay, "params": [n]} for n, decay in enumerate((WEIGHT_DECAY, 0.0))
        ],
    }
    weights = [each["fp32"].requires_grad_() for each in flat]
    common = {"loss_scaler": LossScaler(), "zero_stage": ZeroStageEnum(stage)}
    if stage == 3:
        return {**common, "optimizer_state_dict": base, "fp32_flat_groups": weights}
    slices = [_fragments(values["fp32"], group, rank, n_ranks) for group in groups]
    return {
        **common,
        "base_optimizer_state": base,
        "single_partition_of_fp32_groups": weights,
        "param_slice_mappings": slices,
    }


def _cut_parameters(values: dict[str, Tensor], group: list[str], rank: int, n_ranks: int) -> Tensor:
    """ZeRO-3: a part of each parameter; the last part is padded."""
    parts = []
    for name in group:
        size = -(-values[name].numel() // n_ranks)
        padded = torch.nn.functional.pad(values[name].flatten(), (0, size * n_ranks - values[name].numel()), value=-7)
        parts.append(padded[rank * size : (rank + 1) * size])
    return torch.cat(parts)


def _part_size(values: dict[str, Tensor], group: list[str], n_ranks: int) -> int:
    """ZeRO-1 and 2: elements of a rank, with a padding to a multiple of twice the ranks."""
    total, unit = sum(values[name].numel() for name in group), 2 * n_ranks
    return -(-total // unit) * unit // n_ranks


def _cut_groups(values: dict[str, Tensor], group: list[str], rank: int, n_ranks: int) -> Tensor:
    size = _part_size(values, group, n_ranks)
    whole = torch.cat([values[name].flatten() for name in group])
    padded = torch.nn.functional.pad(whole, (0, size * n_ranks - len(whole)), value=-7)
    return padded[rank * size : (rank + 1) * size].clone()


def _fragments(values: dict[str, Tensor], group: list[str], rank: int, n_ranks: int) -> dict[str, fragment_address]:
    size, start, result = _part_size(values, group, n_ranks), 0, {}
    low, high = rank * size, (rank + 1) * size
    for name in group:
        end = start + math.prod(values[name].shape)
        if (first := max(start, low)) < (last := min(end, high)):
            result[name] = fragment_address(last - first, first - low)
        start = end
    return result
