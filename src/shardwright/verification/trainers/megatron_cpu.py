"""Stand-ins that let the library megatron-core run on CPUs with gloo. Of this package it imports `torch_private` alone,
which imports only torch: tests copy both files into environments without this package.

The library has no path for a CPU. `run_without_cuda` replaces the device "cuda" by "cpu" wherever the library names it,
and the names of CUDA's tensor types, and mends what fails without Transformer Engine. Model, parallelism, DDP,
optimizer and checkpoints stay the library's.
"""

from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.transformer import transformer_block
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.moe import moe_utils, token_dispatcher
from torch import Tensor
from torch.distributed import all_gather as plain_all_gather
from torch.overrides import TorchFunctionMode

from shardwright.system.torch_private import all_gather_with_gradients


class OnCpu(TorchFunctionMode):
    """Replaces the device "cuda" and pinned memory in calls of torch."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if "cuda" in str(kwargs.get("device", "")):
            kwargs["device"] = "cpu"
        kwargs.pop("pin_memory", None)
        return func(*args, **kwargs)


class CpuStream:
    """Stands for a stream or an event of CUDA: work on a CPU is done when the call returns."""

    def __init__(self, *arguments: Any, **options: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return CpuStream


class CpuNorm(torch.nn.RMSNorm):
    """Stands for RMSNorm of Transformer Engine or Apex, and marks its weight as they do: with sequence parallelism the
    library then sums the gradient over tp."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **options: Any) -> None:
        super().__init__(hidden_size, eps)
        mark: Any = self.weight
        mark.sequence_parallel = config.sequence_parallel


class CpuContextAttention(DotProductAttention):
    """Stands for attention of Transformer Engine over the ranks of cp, which all-gathers keys and values. Rank r has
    chunks r and 2 cp - 1 - r of each sequence, as `get_batch_on_this_cp_rank` gives them to it.

    Shapes: (local tokens, batch, heads, head dim); the mask (1, 1, local tokens, tokens).
    """

    def __init__(self, config: Any, *arguments: Any, **options: Any) -> None:
        super().__init__(replace(config, context_parallel_size=1), *arguments, **options)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *arguments: Any, **options: Any) -> Any:
        group = parallel_state.get_context_parallel_group()
        if (n := group.size()) > 1:
            gathered = (all_gather_with_gradients(x.contiguous(), 0, group) for x in (key, value))
            key, value = (_in_order(x, n) for x in gathered)
        return super().forward(query, key, value, *arguments, **options)


def _in_order(gathered: Tensor, n: int) -> Tensor:
    """Return whole sequences of the parts of the n ranks of cp, which `gathered` has one after the other."""
    halves = [part.chunk(2) for part in gathered.chunk(n)]
    return torch.cat([*(first for first, _ in halves), *(last for _, last in reversed(halves))])


def _all_gather_uneven(outputs: list[Tensor], own: Tensor, group: Any = None, **options: Any) -> None:
    """Stands for `all_gather` of shards with unequal numbers of rows, which gloo lacks: shards are padded."""
    most = max(len(part) for part in outputs)
    padded = [part.new_zeros(most, *part.shape[1:]) for part in outputs]
    padded_own = own.new_zeros(most, *own.shape[1:])
    padded_own[: len(own)] = own
    plain_all_gather(padded, padded_own, group=group, **options)
    for output, whole in zip(outputs, padded, strict=True):
        output.copy_(whole[: len(output)])


def _reduce_scatter_uneven(output: Tensor, inputs: list[Tensor], group: Any = None, **options: Any) -> None:
    """Stands for `reduce_scatter` of shards with unequal numbers of rows, which gloo lacks: all are reduced."""
    whole = torch.cat(inputs)
    dist.all_reduce(whole, group=group)
    output.copy_(whole.split([len(part) for part in inputs])[dist.get_rank(group)])


def _nothing(*arguments: Any, **options: Any) -> None:
    """Stands for a call of torch.cuda that a CPU does not need."""


def run_without_cuda() -> None:
    """Replace the calls of CUDA of this process, until it ends; once a process.

    The library accepts parameters of three types. Float64 is shown to it as the type of float32, which it keeps as it
    is.
    """
    cuda: Any = torch.cuda
    cuda.current_device = lambda: torch.device("cpu")
    for name in ("synchronize", "set_device", "empty_cache"):
        setattr(cuda, name, partial(_nothing, name))  # torch.compile refuses one object under two names
    for name in ("current_stream", "default_stream", "Stream", "Event"):
        setattr(cuda, name, type(name, (CpuStream,), {}))
    cuda.stream = nullcontext
    distributed: Any = dist
    distributed.all_gather, distributed.reduce_scatter = _all_gather_uneven, _reduce_scatter_uneven
    transformer_block.LayerNormImpl = CpuNorm
    LocalSpecProvider.core_attention = lambda *_, **__: CpuContextAttention
    LocalSpecProvider.layer_norm = lambda *_, **__: CpuNorm
    tensor_parallel.random.CudaRNGStatesTracker.fork = nullcontext  # no dropout
    set_states = DistributedOptimizer._set_main_param_and_optimizer_states

    def set_with_counter(self: Any, parameter: Any, tensors: dict[str, Any]) -> None:
        """Add AdamW's counter, which the library expects among the tensors of a parameter but stores with the
        groups."""
        group, place = self.model_param_group_index_map[parameter]
        state = self.optimizer.state[self.optimizer.param_groups[group]["params"][place]]
        set_states(self, parameter, {**tensors, "step": state["step"]})

    DistributedOptimizer._set_main_param_and_optimizer_states = set_with_counter
    move = moe_utils.maybe_move_tensor_to_cpu

    def as_on_cuda(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        """Return the numbers of an all-to-all also for a tensor of a CPU, which the library leaves as it is."""
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else move(tensor, as_numpy, record_stream)

    token_dispatcher.maybe_move_tensor_to_cpu = as_on_cuda
    moe_utils.te_general_gemm = None  # the library reads the name without having defined it
    tensor: Any = Tensor
    plain_type = Tensor.type
    tensor.cuda = lambda self, *_, **__: self

    def type_of(self: Tensor, *arguments: Any, **options: Any) -> Any:
        name = plain_type(self, *arguments, **options)
        return f"torch.cuda.{name.rpartition('.')[2]}".replace("Double", "Float") if isinstance(name, str) else name

    tensor.type = type_of
    OnCpu().__enter__()
