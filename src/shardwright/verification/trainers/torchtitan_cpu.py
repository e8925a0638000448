"""Stand-ins that let torchtitan run on CPUs with gloo. This file imports nothing of this package.

torchtitan takes CUDA where PyTorch has no accelerator, compiles FlexAttention, which has no backward pass on CPUs,
multiplies experts by a kernel that has no float64, and reads the memory of its device. `run_without_cuda` replaces
these; model, routing, parallelism, loss and step stay torchtitan's.
"""

import sys
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import create_mask
from torchtitan.components import metrics
from torchtitan.models.common.attention import FlexAttention
from torchtitan.models.common.moe import GroupedExperts
from torchtitan.tools import utils


class CpuMemory:
    """Stands for the memory monitor of a GPU: every number of it is 0."""

    device_name = "cpu"

    def reset_peak_stats(self) -> None: ...

    def get_peak_stats(self) -> Any:
        return metrics.DeviceMemStats(*[0] * len(metrics.DeviceMemStats._fields))


def dense_attention(
    q: Tensor, k: Tensor, v: Tensor, *, block_mask: Any, scale: float | None, enable_gqa: bool, **options: Any
) -> tuple[Tensor, None]:
    """Stands for the compiled `flex_attention`: attention by the mask function of a block mask, over all pairs of
    positions.

    `q`: (batch, heads, queries, head dim); `k` and `v`: (batch, kv heads, keys, head dim). Returns the output, and None
    instead of the auxiliary results of `flex_attention`.
    """
    assert options.get("score_mod") is None
    mask = create_mask(block_mask.mask_mod, len(q), 1, q.shape[2], k.shape[2], device="cpu")
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=enable_gqa), None


def grouped_matmul(experts: GroupedExperts, *, A: Tensor, B_t: Tensor, offs: Tensor) -> Tensor:
    """Stands for `torch._grouped_mm`: multiply the rows of each expert by its matrix.

    `A`: (rows, in), sorted by expert; `B_t`: (experts, in, out); `offs`: (experts,), the end of each expert's rows.
    Returns (rows, out).
    """
    ends = offs.tolist()
    assert ends[-1] == len(A)
    return torch.cat([A[i:j] @ B for i, j, B in zip([0, *ends], ends, B_t, strict=False)])


def run_without_cuda() -> None:
    """Replace CUDA in torchtitan, until the process ends. Call it after all imports of torchtitan: its modules import
    the names of the device."""
    device: Any = ModuleType("device")
    for name in ("set_device", "synchronize", "empty_cache", "current_device", "reset_peak_memory_stats"):
        setattr(device, name, lambda *_: 0)
    for module in [loaded for name, loaded in sys.modules.items() if name.startswith("torchtitan.")]:
        for name, value in {"device_type": "cpu", "device_module": device}.items():
            if hasattr(module, name):
                setattr(module, name, value)
    utils.get_local_device = lambda: torch.device("cpu")
    metrics.build_device_memory_monitor = CpuMemory
    FlexAttention.compiled_flex_attn = staticmethod(dense_attention)
    GroupedExperts._grouped_mm = grouped_matmul
    torch.compiler.set_stance("force_eager")  # block masks are made by a compiled function
