"""Stand-ins that let the library megatron-core run on CPUs with gloo. This file imports nothing of this package.

The library has no path for a CPU. `run_without_cuda` replaces the device "cuda" by "cpu" wherever the library names it,
and the names of CUDA's tensor types, and mends what fails without Transformer Engine. Model, parallelism, DDP,
optimizer and checkpoints stay the library's.
"""

from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.transformer import transformer_block
from megatron.core.transformer.moe import moe_utils, token_dispatcher
from torch import Tensor
from torch.overrides import TorchFunctionMode


class OnCpu(TorchFunctionMode):
    """Replaces the device "cuda" in calls of torch."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if "cuda" in str(kwargs.get("device", "")):
            kwargs["device"] = "cpu"
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
    transformer_block.LayerNormImpl = CpuNorm
    LocalSpecProvider.layer_norm = lambda *_, **__: CpuNorm
    tensor_parallel.random.CudaRNGStatesTracker.fork = nullcontext  # no dropout
    set_states = DistributedOptimizer._set_main_param_and_optimizer_states

    def set_with_counter(self: Any, parameter: Any, tensors: dict[str, Any]) -> None:
        """The library expects AdamW's counter among the tensors of a parameter, and stores it with the groups."""
        group, place = self.model_param_group_index_map[parameter]
        state = self.optimizer.state[self.optimizer.param_groups[group]["params"][place]]
        set_states(self, parameter, {**tensors, "step": state["step"]})

    DistributedOptimizer._set_main_param_and_optimizer_states = set_with_counter
    move = moe_utils.maybe_move_tensor_to_cpu

    def as_on_cuda(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        """The library leaves a tensor of a CPU as it is, also where it needs the numbers of an all-to-all."""
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
