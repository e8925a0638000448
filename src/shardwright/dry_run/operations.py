"""FLOPs of single operations, and the temporary bytes that they allocate and free on a GPU."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

Flops = Callable[..., int]


@cache
def op_name(func: Any) -> str:
    """Return `mm` for `aten::mm`."""
    return str(func.overloadpacket.__name__)


@cache
def formulas_of(func: Any) -> tuple[Flops | None, Flops | None]:
    """Return the formulas for the FLOPs of an operation and for its temporary bytes on a GPU; None if missing."""
    name = op_name(func)
    # PyTorch has formulas for out-of-place operations; an in-place operation such as addmm_ has as many FLOPs.
    known = getattr(torch.ops.aten, name.rstrip("_"), None) if func.namespace == "aten" else func.overloadpacket
    return _OWN_FLOPS.get(name) or flop_registry.get(known), _WORKSPACE.get(name)


def _grouped(x_RD: Tensor, weight: Tensor, *_: Any, **__: Any) -> int:
    return 2 * x_RD.shape[0] * weight.shape[-1] * weight.shape[-2]


def _grouped_weight(dy_RF: Tensor, x_RD: Tensor, *_: Any, **__: Any) -> int:
    return 2 * x_RD.shape[0] * x_RD.shape[1] * dy_RF.shape[1]


def _attention(q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> int:
    return int(
        sdpa_flop_count(q.shape, (*k.shape[:1], q.shape[1], *k.shape[2:]), (*v.shape[:1], q.shape[1], *v.shape[2:]))
    )


def _attention_backward(do: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> int:
    heads = q.shape[1]
    k_shape, v_shape = ((*x.shape[:1], heads, *x.shape[2:]) for x in (k, v))
    return int(sdpa_backward_flop_count(do.shape, q.shape, k_shape, v_shape))


_OWN_FLOPS: dict[str, Flops] = {
    "grouped_matmul": _grouped,
    "grouped_weight_gradient": _grouped_weight,
    "_scaled_dot_product_flash_attention_for_cpu": _attention,
    "_scaled_dot_product_flash_attention": _attention,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
    "_scaled_dot_product_flash_attention_backward": _attention_backward,
}


def _flash_backward_bytes(do: Tensor, q: Tensor, k: Tensor, *_: Any) -> int:
    """Return the temporary bytes of FlashAttention-2's backward pass (`mha_bwd` of PyTorch 2.13).

    They are: the sums of dq in fp32 with tokens in blocks of 128 and heads in multiples of 32, the row sums of do * o,
    and with grouped heads dk and dv of every query head.
    """
    batch, heads, tokens, width = q.shape
    rows = -(-tokens // 128) * 128
    sums = batch * rows * heads * (-(-width // 32) * 32) * 4 + batch * heads * rows * 4
    if k.shape[1] == heads:
        return sums
    return sums + 2 * batch * k.shape[2] * heads * width * k.element_size()


_WORKSPACE: dict[str, Callable[..., int]] = {
    "_scaled_dot_product_flash_attention_for_cpu_backward": _flash_backward_bytes,
    "_scaled_dot_product_flash_attention_backward": _flash_backward_bytes,
}
