"""Multi-head latent attention: keys and values of all heads come from one narrow vector a token (DeepSeek-V2, arXiv
2405.04434, section 2.1, equations 9 to 19).

    latent = norm(x W_down)          k, v of every head = latent W_up          one rotated key a token, for all heads
    q = norm(x W_q_down) W_q_up      or q = x W_q

Training runs attention on full keys and values, because it uses them once. Generation stores only the latent vector and
the rotated key of a token (`generation/cache.py`).

The rotated elements of a head are paired i with i + P/2, as everywhere in Shardwright; DeepSeek's checkpoints pair 2i
with 2i + 1. The scores do not depend on the order of the elements, so it is enough to permute the rows of the weights
that produce the rotated elements once, when a checkpoint is read.

Shapes: B batch, T tokens, D model, H heads, L latent, N unrotated part of a head, P rotated part, C = N + P, V value.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwright.model.attention import Attend, attend
from shardwright.model.documents import Documents
from shardwright.model.matmul import Adaptable, Linear, Recipe, linear, with_magnitude
from shardwright.model.norm import RMSNorm
from shardwright.model.recompute import part
from shardwright.model.rotary import rotate
from shardwright.model.spec import ModelSpec


class LatentAttention(nn.Module):
    """softmax(q k^T / sqrt(C)) v, with q and k of C elements a head and v of V.

    `attend` is `model.attention.attend` or a replacement that computes the same. The number of heads follows from the
    output of the projections, so the module also works with a shard of the heads.
    """

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        latent = spec.latent_attention
        assert latent is not None
        d, heads = spec.d_model, spec.n_heads
        self.widths = (latent.nope_dim, latent.rope_dim)
        self.kv_widths = (latent.nope_dim, latent.v_dim)
        self.score_scale = 1.0 if spec.rope_scaling is None else spec.rope_scaling.score_scale
        self.attend: Attend = attend
        self.q_down = Linear(d, latent.q_rank, bias=False) if latent.q_rank else None
        self.q_latent_norm = RMSNorm(latent.q_rank, eps=spec.norm_eps) if latent.q_rank else None
        self.q_up = Linear(latent.q_rank or d, heads * spec.qk_dim, bias=False)
        self.kv_down = LatentAndKey(d, latent.kv_rank, latent.rope_dim)
        self.kv_latent_norm = RMSNorm(latent.kv_rank, eps=spec.norm_eps)
        self.kv_up = Linear(latent.kv_rank, heads * sum(self.kv_widths), bias=False)
        self.o = Linear(heads * latent.v_dim, d, bias=False)

    def forward(self, x_BTD: Tensor, rotary_2TP: Tensor | None, documents: Documents | None = None) -> Tensor:
        """(B, T, D) -> (B, T, D); arguments as in `Attention.forward`."""
        assert rotary_2TP is not None
        q_input = x_BTD
        if self.q_down is not None and self.q_latent_norm is not None:
            q_input = part("norms", self.q_latent_norm, self.q_down(x_BTD))
        q_BTHN, q_BTHP = self.q_up(q_input).unflatten(-1, (-1, sum(self.widths))).split(self.widths, -1)
        q_BTHC = torch.cat((q_BTHN, rotate(q_BTHP, rotary_2TP)), -1)
        if self.score_scale != 1:
            q_BTHC = q_BTHC * self.score_scale
        latent_BTL, k_BTP = self.kv_down(x_BTD)
        k_BT1P = rotate(k_BTP.unsqueeze(2), rotary_2TP)
        normed_BTL = part("norms", self.kv_latent_norm, latent_BTL)
        return self.o(self.over_latents(q_BTHC, normed_BTL, k_BT1P, documents).flatten(-2))

    def over_latents(self, q_BTHC: Tensor, latent_BTL: Tensor, k_BT1P: Tensor, documents: Documents | None) -> Tensor:
        """Return attention on every head's keys and values, computed from the latent vectors and the rotated keys;
        (B, T, H, V). Generation replaces this method, to store the latent vectors alone."""
        weights = list(self.kv_up.parameters())
        k_BTHC, v_BTHC = part("mla_up", self.keys_and_values, latent_BTL, k_BT1P, weights=weights)

        def attended(q_BTHC: Tensor, k_BTHC: Tensor, v_BTHC: Tensor) -> Tensor:
            return self.attend(q_BTHC, k_BTHC, v_BTHC, documents)[..., : self.kv_widths[1]].contiguous()

        return part("attention", attended, q_BTHC, k_BTHC, v_BTHC, compiles=documents is None)

    def keys_and_values(self, latent_BTL: Tensor, k_BT1P: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and the padded values of every head, each (B, T, H, C)."""
        kv_BTHX = self.kv_up(latent_BTL).unflatten(-1, (-1, sum(self.kv_widths)))
        return part("rope", self._padded, kv_BTHX, k_BT1P)

    def _padded(self, kv_BTHX: Tensor, k_BT1P: Tensor) -> tuple[Tensor, Tensor]:
        k_BTHN, v_BTHV = kv_BTHX.split(self.kv_widths, -1)
        k_BTHC = torch.cat((k_BTHN, k_BT1P.expand(-1, -1, k_BTHN.shape[2], -1)), -1)
        # Fused kernels require values as wide as keys, so values are padded. On a CPU, forward and backward of 1024
        # tokens with 8 heads took 73 ms with values of 64 padded to 96, and 173 ms with the unfused kernel.
        return k_BTHC, F.pad(v_BTHV, (0, sum(self.widths) - v_BTHV.shape[-1]))


class LatentAndKey(Adaptable):
    """The matmul with two outputs that all heads read: (B, T, D) -> the latent vector of keys and values (B, T, L), and
    the rotated part of the key (B, T, P)."""

    recipe: Recipe | None = None
    """See `matmul.Linear`."""

    def __init__(self, d_model: int, kv_rank: int, rope_dim: int) -> None:
        super().__init__()
        self.widths = (kv_rank, rope_dim)
        self.weight = nn.Parameter(torch.empty(kv_rank + rope_dim, d_model))

    def forward(self, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
        also_BTX, y_BTX = self.low_rank(x_BTD), linear(x_BTD, self.weight, recipe=self.recipe)
        change_X = self.magnitude_change(self.recipe)
        y_BTX = y_BTX if also_BTX is None else y_BTX + also_BTX
        latent_BTL, k_BTP = (y_BTX if change_X is None else with_magnitude(y_BTX, change_X)).split(self.widths, -1)
        return latent_BTL, k_BTP
