"""The schema of the values in checkpoints of other systems: type, range and supported versions, checked before use."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import torch
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from torch import Tensor

from shardwright.hugging_face.schema import MOST_SHOWN, Count
from shardwright.system.errors import CheckpointError, DamagedError

M = TypeVar("M", bound=BaseModel)


def _number(value: Any) -> Any:
    """Return the number in a tensor of one element; other values as they are. Raises ValueError for a tensor without
    values."""
    if not isinstance(value, Tensor) or value.numel() != 1:
        return value
    if value.is_meta:
        raise ValueError("its tensor has no values (device meta)")
    return value.item()


def _whole(value: Any) -> Any:
    value = _number(value)
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _flag(value: Any) -> Any:
    value = _number(value)
    return bool(value) if type(value) is int and value in (0, 1) else value


def _floats(value: Any) -> Any:
    if isinstance(value, Tensor) and not value.is_floating_point():
        raise ValueError(f"its type is {str(value.dtype).removeprefix('torch.')}; supported: floating point")
    return value


Whole = Annotated[Count, BeforeValidator(_whole)]
"""A count, such as the number of steps: an integer, also as a float or a tensor of one element."""
Real = Annotated[float, BeforeValidator(_number), Field(ge=0, allow_inf_nan=False)]
Beta = Annotated[Real, Field(lt=1)]
Flag = Annotated[bool, BeforeValidator(_flag)]
Floats = Annotated[Tensor, BeforeValidator(_floats)]
Shape = Annotated[tuple[Count, ...], Field(strict=False)]


class ForeignValues(BaseModel):
    """Values of another system. Keys that are not read are ignored."""

    model_config = ConfigDict(strict=True, arbitrary_types_allowed=True, from_attributes=True)


_OF_OTHERS = {
    "max_coeff": "LAMB",
    "grad_averaging": "LAMB",
    "trust_clip": "LAMB",
    "norm_type": "NovoGrad",
    "momentum_decay": "NAdam",
}
"""Setting of a group that AdamW does not have -> the optimizer that has it: DeepSpeed's, apex's and timm's LAMB, apex's
NovoGrad, and PyTorch's NAdam."""


class AdamWGroup(ForeignValues):
    """The settings of AdamW of one group of parameters."""

    lr: Real
    betas: Annotated[tuple[Beta, Beta], Field(strict=False)]
    eps: Real
    weight_decay: Real
    initial_lr: Real | None = None
    amsgrad: Flag | None = None
    maximize: Flag | None = None
    decoupled_weight_decay: Flag | None = None
    adam_w_mode: Flag | None = None
    bias_correction: Flag | None = None
    max_coeff: Any = None
    grad_averaging: Any = None
    trust_clip: Any = None
    norm_type: Any = None
    momentum_decay: Any = None

    def other_update(self) -> str | None:
        """Return the setting with which the update is not AdamW's, with the supported value; None if there is none.

        Without weight decay Adam's update is AdamW's. The states of other optimizers have the names of AdamW's, so
        their groups distinguish them (`_OF_OTHERS`); PyTorch's RAdam has `decoupled_weight_decay` and no `amsgrad`.
        """
        for key, name in _OF_OTHERS.items():
            if (value := getattr(self, key)) is not None:
                return f"{key}={value!r}, which is {name}'s; supported: AdamW"
        if self.decoupled_weight_decay is not None and self.amsgrad is None:
            return "decoupled_weight_decay without amsgrad, as RAdam has it; supported: AdamW"
        supported = {"amsgrad": False, "maximize": False, "bias_correction": True}
        if self.weight_decay:
            supported |= {"decoupled_weight_decay": True, "adam_w_mode": True}
        differing = (key for key, valid in supported.items() if getattr(self, key) not in (None, valid))
        refused = next(differing, None)
        return None if refused is None else f"{refused}={getattr(self, refused)}; supported: {supported[refused]}"


class ParameterNames(ForeignValues):
    """The parameters of a group of a distributed checkpoint."""

    params: list[str]


class Counted(ForeignValues):
    """A counter of a trainer, such as its step."""

    value: Whole | None


class DcpMetadata(ForeignValues):
    """The `.metadata` of a distributed checkpoint; PyTorch before 2.9 gives it no version."""

    storage_data: dict[Any, Any]
    state_dict_metadata: dict[str, Any]
    version: Literal["1.0.0"] | None = None


class DcpPlace(ForeignValues):
    """The bytes of a chunk in the `.metadata` of a distributed checkpoint."""

    relative_path: str
    offset: Count
    length: Count


class DcpIndex(ForeignValues):
    """The tensor and the offsets of a chunk."""

    fqn: str
    offset: Shape | None = None


class DcpChunk(ForeignValues):
    """A chunk of a tensor."""

    offsets: Shape
    sizes: Shape


class DcpTensor(ForeignValues):
    """A tensor of a distributed checkpoint."""

    size: Shape
    chunks: list[Any]


class ZeroModelFile(ForeignValues):
    """`mp_rank_00_model_states.pt`: counters, and the shapes of the parameters of each group."""

    global_steps: Whole
    skipped_steps: Whole
    dp_world_size: Annotated[Whole, Field(ge=1)]
    mp_world_size: Literal[1] = 1
    param_shapes: Annotated[list[dict[str, Shape]], Field(min_length=1)]
    frozen_param_shapes: dict[str, Any] | None = None
    ds_config: dict[str, Any] | str | None = None


class ZeroOptimizer(ForeignValues):
    """The states and groups of the optimizer under DeepSpeed's."""

    state: dict[int, dict[str, Any]] = {}
    param_groups: Annotated[list["ZeroGroup"], Field(min_length=1)]


class ZeroGroup(AdamWGroup):
    """A group of parameters, by the numbers of its flat tensors."""

    params: list[Count]
    step: Whole | None = None


class ZeroFragment(ForeignValues):
    """A part of a parameter in a flat tensor, in elements."""

    start: Count
    numel: Count


class ZeroRankFile(ForeignValues):
    """`zero_pp_rank_R_mp_rank_00_optim_states.pt`."""

    optimizer_state_dict: dict[str, Any]
    ds_config: dict[str, Any] | str | None = None


class ZeroStage(ForeignValues):
    """The stage in a rank's `optimizer_state_dict`. BF16_Optimizer has ZeRO-1 and does not store the stage."""

    zero_stage: Literal[1, 2, 3] = 1


class ZeroPartition(ForeignValues):
    """A rank's part with ZeRO-1 and 2."""

    base_optimizer_state: ZeroOptimizer
    single_partition_of_fp32_groups: list[Floats]
    param_slice_mappings: list[dict[str, ZeroFragment]]


class ZeroParameters(ForeignValues):
    """A rank's part with ZeRO-3."""

    optimizer_state_dict: ZeroOptimizer
    fp32_flat_groups: list[Floats]


class WholeTensor(ForeignValues):
    """Weights or moments, as a file of a universal checkpoint has them."""

    param: Floats


class AdamParams(ForeignValues):
    """The `params` of the optimizer of a ds_config."""

    adam_w_mode: Flag | None = None


class DeepSpeedOptimizer(ForeignValues):
    """The optimizer of a ds_config."""

    type: str | None = None
    params: AdamParams | None = None


class DeepSpeedConfig(ForeignValues):
    """The keys of a ds_config that change the update."""

    optimizer: DeepSpeedOptimizer | None = None


class MegatronFormat(ForeignValues):
    """metadata.json of Megatron, with the defaults of megatron-core 0.16.1."""

    sharded_backend: Literal["torch_dist"]
    sharded_backend_version: Literal[1] = 1
    common_backend: Literal["torch"] = "torch"
    common_backend_version: Literal[1] = 1


class MegatronCommon(ForeignValues):
    """common.pt of Megatron. Before checkpoint_version 3, queries, keys and values are in another order."""

    iteration: Whole
    checkpoint_version: Annotated[Literal[3] | None, BeforeValidator(_whole)] = None
    args: Any = None
    optimizer: dict[Any, Any] | None = None


class MegatronCounters(ForeignValues):
    """Arguments of a run of Megatron that count."""

    consumed_train_samples: Whole | None = None
    seq_length: Annotated[Whole, Field(ge=1)] | None = None


class MegatronGroup(AdamWGroup):
    """A group of Megatron's optimizer; older versions name multipliers with `pre_`."""

    wd_mult: Real | None = None
    pre_wd_mult: Real | None = None
    lr_mult: Real | None = None
    pre_lr_mult: Real | None = None
    is_expert_parallel: Flag = False
    is_decoupled_lr: Flag = False
    max_lr: Real | None = None
    step: Whole | None = None


class CommonStep(ForeignValues):
    """The counter that all groups of an optimizer of Megatron share."""

    common_step: Whole | None = None


class MegatronOptimizer(ForeignValues):
    """An optimizer of Megatron, or several under numbers."""

    param_state_sharding_type: str | None = None
    param_groups: list[Any] | None = None
    state: CommonStep = CommonStep()


def checked(form: type[M], values: Any, where: str | Path) -> M:
    """Return values of another system as `form`. `where`: the file, and the place in it.

    Raises DamagedError with the first value of another type or outside its range, and CheckpointError with a valid
    value that is not supported.
    """
    try:
        return form.model_validate(values)
    except ValidationError as error:
        problem = min(error.errors(include_url=False), key=lambda details: details["type"] == "missing")
    key = ".".join(str(part) for part in problem["loc"] if not str(part).startswith(("function-", "nullable")))
    given = problem["input"]
    shown = f"a tensor of {list(given.shape)}" if isinstance(given, Tensor) and given.numel() > 1 else repr(given)
    shown = shown if len(shown) <= MOST_SHOWN else f"{shown[:MOST_SHOWN]}..."
    if problem["type"] == "missing":
        raise DamagedError(f"{where}: {key} is missing")
    if problem["type"] == "literal_error":
        raise CheckpointError(f"{where}: {key}={shown}; supported: {problem['ctx']['expected']}")
    message = problem["msg"].removeprefix("Value error, ")
    raise DamagedError(f"{where}: {f'{key}={shown}' if key else shown}: {message[0].lower()}{message[1:]}")


def check_finite(values: Tensor, kind: str, where: str) -> Tensor:
    """Return weights or moments. Raises DamagedError if an element is not finite, or a mean of squares is negative."""
    finite = torch.isfinite(values if values.element_size() > 1 else values.float())
    if n_odd := int((~finite).sum()):
        raise DamagedError(f"{where} has {n_odd:,} elements that are not finite; convert an earlier step")
    if kind == "exp_avg_sq" and (n_odd := int((values < 0).sum())):
        raise DamagedError(f"{where} has {n_odd:,} negative elements, and it is a mean of squares")
    return values


def equal_on_all(values: Mapping[Path, Any], what: str) -> None:
    """Raise DamagedError if a value differs between the files of a checkpoint."""
    first, *others = values.items()
    for path, value in others:
        if value != first[1]:
            raise DamagedError(
                f"{path} has {what} unlike {first[0].name}: its parts are of different steps or runs; copy all files "
                f"of one step"
            )
