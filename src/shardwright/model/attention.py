"""Causal self-attention with grouped key and value heads.

Shapes: B batch, T tokens, D model, H heads, K kv heads, C width of one head.
"""

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from shardwright.model.matmul import Linear
from shardwright.model.rotary import rotate
from shardwright.model.spec import ModelSpec


class Attention(nn.Module):
    """softmax(q k^T / sqrt(C)) v over the tokens up to each position.

    The number of heads follows from the output of the projections, so the module also works with a shard of the heads.
    `attend` is `causal_attention` or a replacement that computes the same, such as context-parallel attention.
    """

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        d, c = spec.d_model, spec.head_dim
        self.head_dim = c
        self.attend: Callable[[Tensor, Tensor, Tensor], Tensor] = causal_attention
        self.q = Linear(d, spec.n_heads * c, bias=spec.bias)
        self.k = Linear(d, spec.n_kv_heads * c, bias=spec.bias)
        self.v = Linear(d, spec.n_kv_heads * c, bias=spec.bias)
        self.o = Linear(spec.n_heads * c, d, bias=spec.bias)
        self.q_norm = nn.RMSNorm(c, eps=spec.norm_eps) if spec.qk_norm else None
        self.k_norm = nn.RMSNorm(c, eps=spec.norm_eps) if spec.qk_norm else None

    def forward(self, x_BTD: Tensor, rotary_2TC: Tensor | None) -> Tensor:
        """(B, T, D) -> (B, T, D); tokens are in causal order. `rotary_2TC` is None without rope."""
        q_BTHC = self.q(x_BTD).unflatten(-1, (-1, self.head_dim))
        k_BTKC = self.k(x_BTD).unflatten(-1, (-1, self.head_dim))
        v_BTKC = self.v(x_BTD).unflatten(-1, (-1, self.head_dim))
        if self.q_norm is not None and self.k_norm is not None:
            q_BTHC, k_BTKC = self.q_norm(q_BTHC), self.k_norm(k_BTKC)
        if rotary_2TC is not None:
            q_BTHC, k_BTKC = rotate(q_BTHC, rotary_2TC), rotate(k_BTKC, rotary_2TC)
        return self.o(self.attend(q_BTHC, k_BTKC, v_BTKC).flatten(-2))


def causal_attention(q_BTHC: Tensor, k_BTKC: Tensor, v_BTKC: Tensor) -> Tensor:
    """Attention of every token to itself and to those before it; (B, T, H, C). H is a multiple of K."""
    q_BHTC, k_BKTC, v_BKTC = (x.transpose(1, 2) for x in (q_BTHC, k_BTKC, v_BTKC))
    # The flash kernel for CPUs handles grouped heads itself: forward and backward of the benchmark's layer took
    # 15.2 ms, against 16.1 ms with expanded and 17.0 ms with repeated keys and values (torch 2.13, one thread).
    grouped = q_BHTC.shape[1] != k_BKTC.shape[1]
    o_BHTC = F.scaled_dot_product_attention(q_BHTC, k_BKTC, v_BKTC, is_causal=True, enable_gqa=grouped)
    return o_BHTC.transpose(1, 2)
