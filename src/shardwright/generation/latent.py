"""The cache of multi-head latent attention: one latent vector and one rotated key a token, for all heads.

The query of a head is multiplied by that head's matrix of keys, and the output by its matrix of values, instead of
every cached latent vector (DeepSeek-V2, arXiv 2405.04434, section 2.1.2: the matrices are absorbed):

    q_N . (W_k latent) = (q_N W_k) . latent        sum_s p_s (W_v latent_s) = W_v (sum_s p_s latent_s)

So the scores of all heads read one cached row of L + P elements, whose first L elements are the values too. The pass in
which a sequence starts computes keys and values of every head, as training does, which is less work for many queries.

Shapes: N tokens of a pass, H heads, L latent, N unrotated part of a head, P rotated part, V value, X = N + V.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shardwright.generation.cache import LayerCache, padded
from shardwright.model.documents import Documents
from shardwright.model.latent_attention import LatentAttention
from shardwright.parallel.norm import local_part


class CachedLatentAttention:
    """A replacement for `LatentAttention.over_latents` of `module`, with the cache of one layer.

    `gather_shards`: this rank's token shard of latent vectors -> the latent vectors of all tokens (sequence
    parallelism); `gather_context`: the same over cp, in the pass that starts a sequence.
    """

    def __init__(
        self,
        module: Any,
        layer: LayerCache,
        gather_shards: Callable[[Tensor], Tensor],
        gather_context: Callable[[Tensor], Tensor],
    ) -> None:
        self.module, self.layer = module, layer
        self.gather_shards, self.gather_context = gather_shards, gather_context

    def __call__(self, q_1NHC: Tensor, latent_1NL: Tensor, k_1N1P: Tensor, documents: Documents | None) -> Tensor:
        batch = self.layer.cache.batch
        n = batch.n_tokens
        kept_1NX = torch.cat((self.gather_shards(latent_1NL), k_1N1P.squeeze(2)), -1)
        if batch.held is not None:
            kept_1NX = self.gather_context(kept_1NX)
        if n:
            self.layer.write(kept_1NX[0, :n].unsqueeze(1))
        if batch.is_prefill and n:
            return LatentAttention.over_latents(self.module, q_1NHC, latent_1NL, k_1N1P, documents)
        return self._absorbed(q_1NHC)

    def _absorbed(self, q_1NHC: Tensor) -> Tensor:
        nope, v_dim = self.module.kv_widths
        weight_HXL = local_part(self.module.kv_up.weight).unflatten(0, (-1, nope + v_dim))
        w_k_HNL, w_v_HVL = weight_HXL.split((nope, v_dim), 1)
        n = self.layer.cache.batch.n_tokens
        if n == 0:
            return q_1NHC.new_zeros(*q_1NHC.shape[:3], v_dim)
        q_NHC = q_1NHC[0, :n]
        q_NHN, q_NHP = q_NHC.split(self.module.widths, -1)
        q_NHL = torch.einsum("nhc,hcl->nhl", q_NHN, w_k_HNL)
        o_NHL = self.layer.attend(torch.cat((q_NHL, q_NHP), -1), scale=q_NHC.shape[-1] ** -0.5)[..., : w_k_HNL.shape[2]]
        return padded(torch.einsum("nhl,hvl->nhv", o_NHL, w_v_HVL), q_1NHC)
