"""PyTorch's own FSDP2, HSDP, tensor parallelism and pipelines: `shardwright verify --trainer torch --matrix 4`.

Axes: dp (replicas), fsdp (shards), tp (DTensor, with token shards between blocks), pp (torch.distributed.pipelining).
`--set schedule=ZBVZeroBubble` names a schedule of pp. The options `scale_grads=true` and `divide=true` leave a default
of PyTorch as it is: gradients divided by the number of micro-batches, or by the number of data ranks.
"""

import logging
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from shardwright.model.spec import ModelSpec
from shardwright.system.errors import InputError
from shardwright.verification.trainers.adapter import StepBatch, World
from shardwright.verification.trainers.pieces import Decoder, load_weights, loss_sum

warnings.filterwarnings("ignore", message="FSDP2-wrapped module")  # about in-place operations, which it has not
logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)  # about speed
_IN_V = ("ZBVZeroBubble", "DualPipeV")
"""Schedules in which rank r has stages r and 2 pp - 1 - r."""
_COLUMNS = ColwiseParallel(input_layouts=Shard(1))
_ROWS = RowwiseParallel(output_layouts=Shard(1))
_BLOCK = {
    "attention_norm": SequenceParallel(),
    **dict.fromkeys(("q", "k", "v", "up"), _COLUMNS),
    "o": _ROWS,
    "ffn_norm": SequenceParallel(),
    "down": _ROWS,
}
_ENDS = {
    "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "norm": SequenceParallel(),
    "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
}


class TorchTrainer:
    """The stages of this rank, sharded in the order tp, fsdp, pp, and SGD with momentum."""

    AXES = ("dp", "fsdp", "tp", "pp")

    @staticmethod
    def problem(spec: ModelSpec, axes: Mapping[str, int], options: Mapping[str, Any]) -> str | None:
        """Return why the degrees do not fit the model, or None."""
        stages = axes["pp"] * (2 if _has_two_stages(options) else 1)
        for name, parts in (("n_kv_heads", axes["tp"]), ("n_layers", stages)):
            if getattr(spec, name) % parts:
                return f"{parts} parts do not divide {name}={getattr(spec, name)}; --set model.{name}={parts}"
        return None

    def __init__(self, spec: ModelSpec, world: World) -> None:
        mesh = world.mesh()
        self.data, self.pp = mesh["dp", "fsdp"], mesh["pp"].get_group()
        self.data_ranks = self.data.size()
        self.data_rank = mesh["dp"].get_local_rank() * world.axes["fsdp"] + mesh["fsdp"].get_local_rank()
        self.schedule = get_schedule_class(world.options.get("schedule", "1F1B")) if world.axes["pp"] > 1 else None
        self.scale_grads = world.options.get("scale_grads", False)
        divides = world.options.get("divide", False)
        numbers, n_stages = _stages(world.options, mesh["pp"].get_local_rank(), world.axes["pp"])
        size = spec.n_layers // n_stages
        self.models = [Decoder(spec, range(number * size, (number + 1) * size)) for number in numbers]
        for model in self.models:
            if world.axes["tp"] > 1:
                parallelize_module(model, mesh["tp"], {n: p for n, p in _ENDS.items() if getattr(model, n) is not None})
                for block in model.layers.values():
                    parallelize_module(block, mesh["tp"], _BLOCK)
            if self.data_ranks > 1:
                for module in (*model.layers.values(), model):
                    _shard(module, self.data, divides)
        self.stages = [
            PipelineStage(model, number, n_stages, world.device, group=self.pp)
            for number, model in zip(numbers, self.models, strict=True)
        ]
        self.optimizer = torch.optim.SGD(self.parameters().values(), momentum=0.9)

    def load(self, weights: Mapping[str, Tensor]) -> None:
        load_weights(self.parameters(), weights)

    def step(self, batch: StepBatch) -> float | None:
        self.optimizer.zero_grad()
        losses = self._in_one_stage(batch) if self.schedule is None else self._in_pipeline(batch)
        parameters = list(self.parameters().values())
        norm = get_total_norm([p.grad for p in parameters if p.grad is not None])
        square = (norm.full_tensor() if isinstance(norm, DTensor) else norm) ** 2
        dist.all_reduce(square, group=self.pp)
        self.norm = square.sqrt()
        clip_grads_with_norm_(parameters, batch.clip_norm, self.norm)
        self.optimizer.param_groups[0]["lr"] = batch.lr
        self.optimizer.step()
        if not losses:
            return None  # the last stage has the loss
        total = torch.stack(losses).sum()
        for axis in ("dp", "fsdp"):
            dist.all_reduce(total, group=self.data[axis].get_group())
        return total.item()

    def _in_one_stage(self, batch: StepBatch) -> list[Tensor]:
        (model,), losses = self.models, []
        for n, (tokens_BT, targets_BT) in enumerate(batch.micro_batches, start=1):
            if isinstance(model, FSDPModule):
                model.set_requires_gradient_sync(n == len(batch.micro_batches))
            losses.append(loss_sum(model(tokens_BT), targets_BT) / batch.n_targets)
            losses[-1].backward()
        return [loss.detach() for loss in losses]

    def _in_pipeline(self, batch: StepBatch) -> list[Tensor]:
        assert self.schedule is not None
        losses: list[Tensor] = []
        stages: Any = self.stages if issubclass(self.schedule, PipelineScheduleMulti) else self.stages[0]
        make: Callable[..., Any] = self.schedule
        try:
            schedule = make(
                stages,
                len(batch.micro_batches),
                loss_fn=lambda logits, targets: loss_sum(logits, targets) / batch.n_targets,
                scale_grads=self.scale_grads,
            )
        except ValueError as error:
            raise InputError(f"{self.schedule.__name__}: {error}; --set batch.global_batch changes them") from None
        inputs = (batch.tokens,) if any(stage.is_first for stage in self.stages) else ()
        last = any(stage.is_last for stage in self.stages)
        schedule.step(*inputs, target=batch.targets if last else None, losses=losses)
        return [loss.detach() for loss in losses]

    def gradients(self) -> dict[str, Any]:
        return {name: p.grad for name, p in self.parameters().items()}

    def gradient_norm(self) -> float:
        return self.norm.item()

    def parameters(self) -> dict[str, Any]:
        return {name: p for model in self.models for name, p in model.named_parameters()}


def _shard(module: nn.Module, mesh: Any, divides: bool) -> None:
    """Shard a module by FSDP2, with gradients summed, or divided by the number of ranks as FSDP2 does by default."""
    sharded = fully_shard(module, mesh=mesh)
    if not divides:
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)  # gloo has no pre-multiplied sum


def _has_two_stages(options: Mapping[str, Any]) -> bool:
    """Return whether each rank has two stages; the schedules of PyTorch with one stage have no other class."""
    name = options.get("schedule", "1F1B")
    try:
        return issubclass(get_schedule_class(name), PipelineScheduleMulti)
    except ValueError as error:
        raise InputError(f"schedule={name}: {error}") from None


def _stages(options: Mapping[str, Any], rank: int, n_ranks: int) -> tuple[list[int], int]:
    """Return the numbers of a rank's stages, and the number of all stages."""
    if n_ranks == 1 or not _has_two_stages(options):
        return [rank], n_ranks
    n = 2 * n_ranks
    return [rank, n - 1 - rank if options["schedule"] in _IN_V else n_ranks + rank], n


Trainer = TorchTrainer
