"""Batch-invariant arithmetic: the result of a token depends on the token and the tokens before it, not on the other
tokens of the pass, so training, scoring and generation with a cache compute equal bits.

A library chooses a kernel, and with it an order of additions, by the shape of a matmul (He, "Defeating Nondeterminism
in LLM Inference", Thinking Machines Lab, 2025). Within `batch_invariant()` the shapes are fixed:

    matmul          ROWS rows at a time, the last ones padded with zeros; of a grouped matmul for each expert
    attention       QUERIES queries and KEYS keys at a time; a block of keys starts at a multiple of KEYS of the
                    document, and the blocks of a query are added in their order
    element by      on a CPU ELEMENTS at a time, so that no element is in the last part of a loop over vectors, which
    element         calls another exponential, and no block is divided among threads; all operators that PyTorch tags
                    as pointwise, except `_EXACT`

A row of a matmul does not depend on its place among the ROWS, which `shardwright score --check --batch-invariant`
measures. Norms and softmax reduce each row by itself. The mode is seen by operators below autograd, so it needs no
change of a model; the backward pass is exact, but not invariant.

Shapes: N rows, R ROWS, D and F widths, E experts, T queries, S keys, H heads, K kv heads, G = H / K, C width of a head.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardwright.model.device_type import device_type
from shardwright.system.errors import InputError
from shardwright.system.torch_private import DispatchMode, operator_arguments, operator_results

ROWS, QUERIES, KEYS, ELEMENTS = 32, 16, 128, 16384
"""`ELEMENTS` is below the 32,768 elements that PyTorch divides among threads."""
_VECTORS = 256
"""A multiple of the elements that a loop over vectors computes at a time, for any CPU and type."""

aten = torch.ops.aten
_active = False


@contextmanager
def batch_invariant(wanted: bool = True) -> Iterator[None]:
    """Compute everything in the block in fixed shapes and a fixed order, if `wanted`."""
    global _active
    if not wanted or _active:
        yield
        return
    _active = True
    try:
        with _FixedShapes():
            yield
    finally:
        _active = False


def is_batch_invariant() -> bool:
    """Return whether the code runs within `batch_invariant`."""
    return _active


class _FixedShapes(DispatchMode):
    """Replaces operators by their rules (`_rule_of`)."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its shards come back here
        rule = _rule_of(func, kwargs or {})
        if rule is not None:
            return rule(*args, **(kwargs or {}))
        if torch.is_inference_mode_enabled():  # operators of several others arrive whole
            with self:
                result = func.decompose(*args, **(kwargs or {}))
            if result is not NotImplemented:
                return result
        return func(*args, **(kwargs or {}))


def _blocks(x: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Yield the places of ROWS rows of x and the contiguous rows, the last ones followed by zeros."""
    for start in range(0, len(x), ROWS):
        part = x[start : start + ROWS]
        at = slice(start, start + len(part))
        missing = ROWS - len(part)
        yield at, F.pad(part, (0, 0) * (x.dim() - 1) + (0, missing)) if missing else part.contiguous()


def _matmul(x_ND: Tensor, weight_DF: Tensor) -> Tensor:
    y_NF = x_ND.new_empty(len(x_ND), weight_DF.shape[1])
    for at, rows_RD in _blocks(x_ND):
        y_NF[at] = torch.mm(rows_RD, weight_DF)[: at.stop - at.start]
    return y_NF


def _add_matmul(
    bias: Tensor,
    x: Tensor,
    weight: Tensor,
    *,
    beta: float = 1,
    alpha: float = 1,
    product: Callable[[Tensor, Tensor], Tensor] = _matmul,
) -> Tensor:
    y = product(x, weight)
    return bias + y if beta == alpha == 1 else bias * beta + y * alpha


def _into(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return the variant of an operator that writes its result into `out`."""
    return lambda *args, out, **options: out.copy_(function(*args, **options))


def _batched_matmul(a: Tensor, b: Tensor) -> Tensor:
    y = a.new_empty(len(a), a.shape[1], b.shape[2])
    for (at, some_a), (_, some_b) in zip(_blocks(a), _blocks(b), strict=True):
        y[at] = torch.bmm(some_a, some_b)[: at.stop - at.start]
    return y


def _grouped_matmul(x_RD: Tensor, weight_EFD: Tensor, counts_E: Tensor) -> Tensor:
    y_RF, start = x_RD.new_zeros(len(x_RD), weight_EFD.shape[1]), 0
    for weight_FD, count in zip(weight_EFD, counts_E.tolist(), strict=True):
        y_RF[start : start + count] = _matmul(x_RD[start : start + count], weight_FD.T)
        start += count
    return y_RF


def _by_elements(function: Callable[..., Tensor], *args: Any, **options: Any) -> Tensor:
    """Return `function`, which works element by element, of tensors, which are broadcast to one shape, and numbers."""
    places = [at for at, arg in enumerate(args) if isinstance(arg, Tensor) and arg.dim()]
    if not places or device_type(args[places[0]]) != "cpu":
        return function(*args, **options)
    wide = torch.broadcast_tensors(*(args[at] for at in places))
    flat = [x.reshape(-1) for x in wide]
    n_elements, parts = flat[0].numel(), []
    for start in range(0, n_elements, ELEMENTS):
        some, n = list(args), min(ELEMENTS, n_elements - start)
        missing = -n % _VECTORS
        for at, x in zip(places, flat, strict=True):
            some[at] = F.pad(x[start : start + n], (0, missing)) if missing else x[start : start + n]
        parts.append(function(*some, **options)[:n])
    return torch.cat(parts).view(wide[0].shape) if parts else function(*args, **options)


_EXACT = {
    "abs", "add", "bitwise_and", "bitwise_left_shift", "bitwise_not", "bitwise_or", "bitwise_right_shift",
    "bitwise_xor", "ceil", "clamp", "clamp_max", "clamp_min", "clone", "copysign", "div", "eq", "floor", "fmax", "fmin",
    "fmod", "frac", "gcd", "ge", "gt", "heaviside", "isfinite", "isinf", "isnan", "isneginf", "isposinf", "lcm", "le",
    "logical_and", "logical_not", "logical_or", "logical_xor", "lt", "masked_fill", "max", "maximum", "min", "minimum",
    "mul", "nan_to_num", "native_dropout_backward", "ne", "neg", "positive", "reciprocal", "relu", "remainder", "round",
    "rsub", "sgn", "sign", "signbit", "sqrt", "square", "sub", "threshold", "threshold_backward", "trunc", "where",
}  # fmt: skip
"""Pointwise operators that every kernel rounds alike: one operation, correctly rounded. `add`, `sub` and `rsub` with a
factor `alpha` are two operations, which some kernels fuse."""
_REFUSED = ("_scaled_dot_product", "_flash_attention", "_efficient_attention", "convolution", "glu", "log_sigmoid")
"""Operators, by the first letters of their names, for which the mode has no rule. The backward pass has none."""


def _name_of(operator: Any) -> str:
    """Return the name of an operator of PyTorch without its overload; empty for others."""
    return operator.overloadpacket.__name__ if getattr(operator, "namespace", "") == "aten" else ""


@cache
def _pointwise_rule(operator: Any) -> Callable[..., Tensor] | None:
    """Return the rule of an operator that PyTorch tags as pointwise, also of its variants that write into a tensor."""
    name = _name_of(operator)
    packet = getattr(aten, name.removesuffix("_"), None)
    if packet is None or operator_results(operator) != ["Tensor"]:
        return None
    if not any(torch.Tag.pointwise in getattr(packet, overload).tags for overload in packet.overloads()):
        return None
    if name.endswith("_"):
        return lambda x, *args, **options: x.copy_(_by_elements(packet, x, *args, **options))
    rule = partial(_by_elements, packet)
    return _into(rule) if "out" in operator_arguments(operator) else rule


def _rule_of(operator: Any, options: Mapping[str, Any]) -> Callable[..., Tensor] | None:
    """Return the rule of an operator with these options, or None if it is called as it is."""
    name = _name_of(operator)
    if name.startswith(_REFUSED) and not name.endswith("_backward"):
        raise InputError(
            f"batch invariance with the operator {name!r}: its rounding depends on the shapes of the pass, and the "
            f"mode has no rule for it; valid: matmuls, attention of `model/attention.py`, pointwise operators"
        )
    if operator in _RULES or (name.removesuffix("_") in _EXACT and options.get("alpha", 1) == 1):
        return _RULES.get(operator)
    return _pointwise_rule(operator)


_RULES: dict[Any, Callable[..., Tensor]] = {
    aten.mm.default: _matmul,
    aten.mm.out: _into(_matmul),
    aten.mv.default: lambda x_ND, weight_D: _matmul(x_ND, weight_D[:, None])[:, 0],
    aten.addmm.default: _add_matmul,
    aten.addmm.out: _into(_add_matmul),
    aten.bmm.default: _batched_matmul,
    aten.baddbmm.default: partial(_add_matmul, product=_batched_matmul),
}


def replace_operator(operator: Any) -> None:
    """Replace an operator of the grouped matmul (`model/matmul.py`), (x_RD, weight_EFD, counts_E) -> y_RF."""
    _RULES[operator] = _grouped_matmul


def _seen(columns_1S: Tensor, last_Q1: Tensor, window: int) -> Tensor:
    """Return which columns each query reads, (Q, S), from the last column of each."""
    seen_QS = (columns_1S >= 0) & (columns_1S <= last_Q1)
    return seen_QS & (columns_1S > last_Q1 - window) if window else seen_QS


@torch.library.custom_op("shardwright::attend_in_blocks", mutates_args=())
def attend_in_blocks(
    q_HTC: Tensor,
    k_KSC: Tensor,
    v_KSC: Tensor,
    sinks_H: Tensor | None,
    shift: int,
    window: int,
    first: int,
    softcap: float,
) -> tuple[Tensor, Tensor]:
    """Return causal attention (H, T, C) and the log-sum-exp of the scores (H, T), in fp32 or wider. `shift`, `window`,
    `first`: see `pieces.AttentionPiece`; `sinks_H`, `softcap`: see `piece_attention.AttentionRule`.

    The largest score of a query is found first; then exp(s - largest) and its products with the values are added block
    by block. A block without a key that a query reads adds zeros, so a query's result does not depend on the others.
    """
    wide, n_kv, n_queries = torch.promote_types(q_HTC.dtype, torch.float32), len(k_KSC), q_HTC.shape[1]
    before = first % KEYS
    k_bKSC, v_bKSC = (
        F.pad(x.to(wide), (0, 0, before, -(before + x.shape[1]) % KEYS)).unflatten(1, (-1, KEYS)).transpose(0, 1)
        for x in (k_KSC, v_KSC)
    )
    k_bKSC, v_bKSC = k_bKSC.contiguous(), v_bKSC.contiguous()
    q_KGTC = q_HTC.to(wide).unflatten(0, (n_kv, -1)) * q_HTC.shape[-1] ** -0.5
    columns_S = torch.arange(len(k_bKSC) * KEYS, device=q_HTC.device) - before
    outputs, sums = [], []
    for row in range(0, n_queries, QUERIES):
        stop = min(row + QUERIES, n_queries)
        some_KGQC = F.pad(q_KGTC[:, :, row:stop], (0, 0, 0, QUERIES - (stop - row)))
        last_Q1 = (torch.arange(row, row + QUERIES, device=q_HTC.device).clamp(max=stop - 1) + shift)[:, None]
        lowest = max(0, row + shift - window + 1) if window else 0
        blocks = range((lowest + before) // KEYS, (stop - 1 + shift + before) // KEYS + 1)
        shape = some_KGQC.shape[:3]
        start_KGQ = some_KGQC.new_full(shape, float("-inf"))
        if sinks_H is not None:
            start_KGQ = sinks_H.to(wide).view(n_kv, -1, 1).expand(shape)
        largest_KGQ, scores = start_KGQ, []
        for block in blocks:
            s_KGQS = torch.bmm(some_KGQC.flatten(1, 2), k_bKSC[block].mT).view(*shape, KEYS)
            if softcap:
                s_KGQS = _by_elements(torch.tanh, s_KGQS / softcap) * softcap
            columns_1S = columns_S[block * KEYS : (block + 1) * KEYS]
            scores.append(s_KGQS.masked_fill_(~_seen(columns_1S, last_Q1, window), float("-inf")))
            largest_KGQ = torch.maximum(largest_KGQ, s_KGQS.amax(-1))
        sum_KGQ = _by_elements(torch.exp, start_KGQ - largest_KGQ)
        o_KGQC = torch.zeros_like(some_KGQC)
        for block, s_KGQS in zip(blocks, scores, strict=True):
            p_KGQS = _by_elements(torch.exp, s_KGQS - largest_KGQ[..., None])
            sum_KGQ = sum_KGQ + p_KGQS.sum(-1)
            o_KGQC = o_KGQC + torch.bmm(p_KGQS.flatten(1, 2), v_bKSC[block]).view_as(o_KGQC)
        outputs.append((o_KGQC / sum_KGQ[..., None])[:, :, : stop - row])
        sums.append((largest_KGQ + _by_elements(torch.log, sum_KGQ))[:, :, : stop - row])
    return torch.cat(outputs, 2).flatten(0, 1), torch.cat(sums, 2).flatten(0, 1)
