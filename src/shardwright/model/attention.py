"""Causal self-attention with grouped key and value heads, over whole sequences or within their documents.

Shapes: B batch, T tokens, D model, H heads, K kv heads, C width of one head, N = B T.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwright.model import flex
from shardwright.model.batch_invariant import is_batch_invariant
from shardwright.model.blocks import expand_heads
from shardwright.model.device_type import device_type
from shardwright.model.documents import Documents
from shardwright.model.matmul import Linear
from shardwright.model.norm import head_norm
from shardwright.model.piece_attention import AttentionRule, piece_attention
from shardwright.model.pieces import needs_equal_heads, scores_in_rows
from shardwright.model.recompute import part
from shardwright.model.rotary import rotate
from shardwright.model.spec import ModelSpec
from shardwright.model.varlen import cumulative, has_varlen
from shardwright.system.torch_private import FakeTensor, varlen_attention

Attend = Callable[..., Tensor]
"""(q_BTHC, k_BTKC, v_BTKC, documents or None) -> o_BTHC; in a layer with an `AttentionRule` this is a fifth
argument."""


class Attention(nn.Module):
    """softmax(q k^T / sqrt(C)) v, or with `score_scale` instead of 1 / sqrt(C), over the tokens up to each
    position.

    The number of heads follows from the output of the projections, so the module also works with a shard of the heads.
    `attend` is `attend` of this module or a replacement that computes the same, such as context-parallel attention.
    """

    def __init__(self, spec: ModelSpec, layer: int = 0) -> None:
        super().__init__()
        d, c = spec.d_model, spec.head_dim
        self.head_dim = c
        self.attend: Attend = attend
        bias = spec.bias or spec.qkv_bias
        self.gate = spec.attention_gate
        self.q = Linear(d, spec.n_heads * c * (1 + self.gate), bias=bias)
        self.k = Linear(d, spec.n_kv_heads * c, bias=bias)
        self.v = Linear(d, spec.n_kv_heads * c, bias=bias)
        self.o = Linear(spec.n_heads * c, d, bias=spec.bias or spec.o_bias)
        self.sinks = nn.Parameter(torch.empty(spec.n_heads)) if spec.attention_sinks else None
        rule = AttentionRule(spec.layer_window(layer), spec.attention_softcap, chunked=spec.is_chunked(layer))
        self.rule = rule if any(rule) or spec.attention_sinks else None
        self.query_scale = spec.query_scale
        self.norm_whole = spec.qk_norm_whole
        self.q_norm = head_norm(spec, spec.n_heads) if spec.norms_heads(layer) else None
        self.k_norm = head_norm(spec, spec.n_kv_heads) if spec.norms_heads(layer) else None

    def forward(
        self,
        x_BTD: Tensor,
        rotary_2TC: Tensor | None,
        documents: Documents | None = None,
        temperature_T11: Tensor | None = None,
    ) -> Tensor:
        """(B, T, D) -> (B, T, D); tokens are in causal order. `rotary_2TC` is None without rope; with `documents` a
        token attends only to tokens of its own document; `temperature_T11` multiplies the queries, if given."""
        q_BTHC = self.q(x_BTD).unflatten(-1, (-1, self.head_dim * (1 + self.gate)))
        q_BTHC, *gate = q_BTHC.chunk(1 + self.gate, -1)
        k_BTKC = self.k(x_BTD).unflatten(-1, (-1, self.head_dim))
        v_BTKC = self.v(x_BTD).unflatten(-1, (-1, self.head_dim))
        scale = self.query_scale if temperature_T11 is None else temperature_T11 * self.query_scale
        q_BTHC = _place(q_BTHC, self.q_norm, rotary_2TC, self.norm_whole, scale)
        k_BTKC = _place(k_BTKC, self.k_norm, rotary_2TC, self.norm_whole)

        def attended(q_BTHC: Tensor, k_BTKC: Tensor, v_BTKC: Tensor) -> Tensor:
            if self.rule is None:
                return self.attend(q_BTHC, k_BTKC, v_BTKC, documents).flatten(-2)
            return self.attend(q_BTHC, k_BTKC, v_BTKC, documents, self._rule(self.rule)).flatten(-2)

        sinks = [] if self.sinks is None else [self.sinks]
        compiles = documents is None and self.rule is None
        o_BTF = part("attention", attended, q_BTHC, k_BTKC, v_BTKC, weights=sinks, compiles=compiles)
        return self.o(o_BTF * gate[0].flatten(-2).sigmoid() if gate else o_BTF)

    def _rule(self, rule: AttentionRule) -> AttentionRule:
        if self.sinks is None:
            return rule
        return rule._replace(sinks_H=self.sinks.to_local() if isinstance(self.sinks, DTensor) else self.sinks)


def _place(
    x_BTHC: Tensor,
    norm: nn.Module | None,
    rotary_2TC: Tensor | None,
    norm_whole: bool = False,
    scale: float | Tensor = 1.0,
) -> Tensor:
    """Apply the norm, of each head or of all together, the rotation and the scale to queries or keys.

    Attention saves the result, and only a norm saves its input, so this is a part for recomputation if there is a norm.
    """

    def placed(x_BTHC: Tensor) -> Tensor:
        if norm is not None:
            x_BTHC = norm(x_BTHC.flatten(-2)).view_as(x_BTHC) if norm_whole else norm(x_BTHC)
        if rotary_2TC is not None:
            x_BTHC = rotate(x_BTHC, rotary_2TC)
        return x_BTHC if isinstance(scale, float) and scale == 1 else (x_BTHC * scale).to(x_BTHC.dtype)

    return placed(x_BTHC) if norm is None else part("rope", placed, x_BTHC, weights=list(norm.parameters()))


def attend(
    q_BTHC: Tensor,
    k_BTKC: Tensor,
    v_BTKC: Tensor,
    documents: Documents | None = None,
    rule: AttentionRule | None = None,
) -> Tensor:
    """Return the attention of every token to itself and to earlier tokens, of its document if given, by `rule`;
    (B, T, H, C)."""
    if rule is None and (is_batch_invariant() or not is_fused(q_BTHC, AttentionRule())):
        rule = AttentionRule()
    if rule is not None and rule.softcap and not is_batch_invariant() and is_fused(q_BTHC, rule):
        return capped_attention(q_BTHC, k_BTKC, v_BTKC, documents, rule)
    if rule is not None:
        return piece_attention(q_BTHC, k_BTKC, v_BTKC, documents, rule)
    if documents is None:
        return causal_attention(q_BTHC, k_BTKC, v_BTKC)
    return document_attention(q_BTHC, k_BTKC, v_BTKC, documents.lengths)


def is_fused(q_BTHC: Tensor, rule: AttentionRule) -> bool:
    """Return whether kernels compute attention by a rule without scores in memory, for queries of this device, type
    and width."""
    refused = scores_in_rows(
        gpu=device_type(q_BTHC) == "cuda",
        element_bytes=q_BTHC.element_size(),
        width=q_BTHC.shape[-1],
        softcap=rule.softcap > 0,
        sinks=rule.sinks_H is not None,
        windows=rule.window > 0,
    )
    return refused is None


@torch.compiler.disable  # masks differ from one micro-batch to the next; the kernel is compiled by itself
def capped_attention(
    q_BTHC: Tensor, k_BTKC: Tensor, v_BTKC: Tensor, documents: Documents | None, rule: AttentionRule
) -> Tensor:
    """Return attention with a soft cap in one kernel. In a dry run, whose tensors have no values, return attention by
    the same rule without the cap: its kernels read and keep as much."""
    if isinstance(q_BTHC, FakeTensor):
        without = AttentionRule(rule.window, chunked=rule.chunked) if rule.window else None
        return attend(q_BTHC, k_BTKC, v_BTKC, documents, without)
    return flex.attend(q_BTHC, k_BTKC, v_BTKC, documents, rule.softcap, rule.window, chunked=rule.chunked)


def causal_attention(q_BTHC: Tensor, k_BTKC: Tensor, v_BTKC: Tensor) -> Tensor:
    """Return the attention of every token to itself and to earlier tokens; (B, T, H, C). H is a multiple of K."""
    q_BHTC, k_BKTC, v_BKTC = (x.transpose(1, 2) for x in (q_BTHC, k_BTKC, v_BTKC))
    element_bytes, width = q_BTHC.element_size(), q_BTHC.shape[-1]
    if needs_equal_heads(gpu=device_type(q_BTHC) == "cuda", element_bytes=element_bytes, width=width):
        k_BKTC, v_BKTC = (expand_heads(x_BKTC, q_BHTC) for x_BKTC in (k_BKTC, v_BKTC))
    # The flash kernel for CPUs handles grouped heads itself: forward and backward of the benchmark's layer took
    # 15.2 ms, against 16.1 ms with expanded and 17.0 ms with repeated keys and values (torch 2.13, one thread).
    grouped = q_BHTC.shape[1] != k_BKTC.shape[1]
    o_BHTC = F.scaled_dot_product_attention(q_BHTC, k_BKTC, v_BKTC, is_causal=True, enable_gqa=grouped)
    return o_BHTC.transpose(1, 2)


@torch.compiler.disable  # the number of calls and their shapes differ from one micro-batch to the next
def document_attention(q_BTHC: Tensor, k_BTKC: Tensor, v_BTKC: Tensor, lengths: tuple[tuple[int, ...], ...]) -> Tensor:
    """Return causal attention within each document; `lengths`: for each sequence, the tokens of each of its documents.

    On a GPU in 16 bits all documents take one call (PyTorch's variable-length attention), elsewhere one call each.
    """
    q_NHC, k_NKC, v_NKC = (x.flatten(0, 1) for x in (q_BTHC, k_BTKC, v_BTKC))
    documents = [length for row in lengths for length in row]
    if has_varlen(q_BTHC):
        o_NHC = _varlen_attention(q_NHC, k_NKC, v_NKC, documents)
    else:
        parts = zip(*(x.unsqueeze(0).split(documents, dim=1) for x in (q_NHC, k_NKC, v_NKC)), strict=True)
        o_NHC = torch.cat([causal_attention(*part) for part in parts], dim=1).squeeze(0)
    return o_NHC.unflatten(0, q_BTHC.shape[:2])


def _varlen_attention(q_NHC: Tensor, k_NKC: Tensor, v_NKC: Tensor, documents: list[int]) -> Tensor:
    return varlen_attention(q_NHC, k_NKC, v_NKC, cumulative(documents, q_NHC.device), max(documents))
