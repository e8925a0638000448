"""The decoder: embedding, layers of attention and feed-forward network, norm, head.

Parameter names are global and the same for every layout: `embedding.weight`,
`layers.7.attention.q.weight`, `layers.7.ffn.down.weight`, `norm.weight`, `head.weight`; with experts
`layers.7.ffn.router.weight`, `layers.7.ffn.experts.down`, `layers.7.ffn.shared.down.weight`.

Shapes: B batch, T tokens, D model, V vocab, C width of one head.
"""

from typing import cast

import torch
from torch import Tensor, nn

from shardwright.errors import InputError
from shardwright.model.attention import Attention
from shardwright.model.documents import Documents
from shardwright.model.dropout import KeyedDropout
from shardwright.model.feed_forward import FeedForward
from shardwright.model.latent_attention import LatentAttention
from shardwright.model.matmul import Linear, linear
from shardwright.model.modules import FAMILIES
from shardwright.model.moe import MoE
from shardwright.model.random import site_keys
from shardwright.model.rotary import rotary_table
from shardwright.model.spec import ModelSpec

# Sites where random numbers are drawn: one after the embedding, then two in each layer.
_EMBEDDING_SITE = 0
_SITES_PER_LAYER = 2


def _norm(spec: ModelSpec) -> nn.Module:
    """The norm of the spec; both kinds compute in float32 for 16-bit input."""
    if spec.norm == "layernorm":
        return nn.LayerNorm(spec.d_model, eps=spec.norm_eps)
    return nn.RMSNorm(spec.d_model, eps=spec.norm_eps)


class Block(nn.Module):
    """One layer: x + attention(norm x), then x + ffn(norm x). It takes tensors, and documents that only attention
    reads, outside of compiled code, so that it can be compiled on its own."""

    def __init__(self, spec: ModelSpec, layer: int) -> None:
        super().__init__()
        self.attention_norm = _norm(spec)
        self.attention = Attention(spec) if spec.latent_attention is None else LatentAttention(spec)
        self.ffn_norm = _norm(spec)
        self.ffn = MoE(spec) if spec.has_experts(layer) else FeedForward(spec, spec.d_ffn)
        self.dropout = KeyedDropout(spec.dropout)

    def forward(
        self,
        x_BTD: Tensor,
        positions_T: Tensor,
        rotary_2TC: Tensor | None,
        site_keys_2B: Tensor | None = None,
        documents: Documents | None = None,
    ) -> Tensor:
        """(B, T, D) -> (B, T, D). `site_keys_2B` are the random keys of the two branches."""
        keys_B, ffn_keys_B = (None, None) if site_keys_2B is None else site_keys_2B.unbind(0)
        attended_BTD = self.attention(self.attention_norm(x_BTD), rotary_2TC, documents)
        x_BTD = x_BTD + self.dropout(attended_BTD, keys_B, positions_T)
        normed_BTD = self.ffn_norm(x_BTD)
        drawn = isinstance(self.ffn, MoE) and self.ffn.drawn
        y_BTD = self.ffn(normed_BTD, ffn_keys_B, positions_T) if drawn else self.ffn(normed_BTD)
        return x_BTD + self.dropout(y_BTD, ffn_keys_B, positions_T)


class Transformer(nn.Module):
    """A decoder on one device. `shardwright.model.init.initialise` fills its initial weights.

    With a tied embedding `head` is None and the forward pass uses the embedding's matrix, so there is one parameter and
    `to_empty` cannot untie it.
    """

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.spec = spec
        self.embedding = nn.Embedding(spec.vocab_size, spec.d_model)
        learned = spec.positions == "learned"
        self.position_embedding = nn.Embedding(spec.max_seq_len, spec.d_model) if learned else None
        self.dropout = KeyedDropout(spec.dropout)
        family = FAMILIES[spec.family]
        self.layers = nn.ModuleDict({str(i): family.make(spec, i) for i in range(spec.n_layers)})
        self.norm = _norm(spec)
        self.head = None if spec.tied_embedding else Linear(spec.d_model, spec.vocab_size, bias=False)

    def forward(
        self,
        tokens_BT: Tensor,
        positions_T: Tensor | None = None,
        random_keys_B: Tensor | None = None,
        documents: Documents | None = None,
    ) -> Tensor:
        """Logits (B, T, V) for the token after each one of `tokens_BT` (int64).

        `positions_T` are the positions of the tokens in the whole sequence, 0 to T - 1 unless given, (T,) or (B, T);
        the causal mask follows the order in the tensor. `random_keys_B` come from `random.sample_keys`; without them,
        or in evaluation, nothing is dropped. With `documents` each token attends to those of its document only. Raises
        InputError if T exceeds `max_seq_len` and no positions are given; with them a row may hold several sequences.
        """
        return self.logits(self.hidden(tokens_BT, positions_T, random_keys_B, documents))

    def hidden(
        self,
        tokens_BT: Tensor,
        positions_T: Tensor | None = None,
        random_keys_B: Tensor | None = None,
        documents: Documents | None = None,
    ) -> Tensor:
        """The input of the head: the normalised output of the last layer, (B, T, D). Arguments as in `forward`."""
        if positions_T is None:
            n_tokens = tokens_BT.shape[1]
            if n_tokens > self.spec.max_seq_len:
                raise InputError(
                    f"a sequence of {n_tokens} tokens is longer than max_seq_len={self.spec.max_seq_len}; "
                    f"valid: 1 to {self.spec.max_seq_len}"
                )
            positions_T = torch.arange(n_tokens, device=tokens_BT.device)
        x_BTD = self.embed(tokens_BT, positions_T, random_keys_B, documents)
        x_BTD = self.run_layers(x_BTD, positions_T, random_keys_B, documents)
        return cast(Tensor, self.norm(x_BTD))

    def embed(
        self, tokens_BT: Tensor, positions_T: Tensor, random_keys_B: Tensor | None, documents: Documents | None = None
    ) -> Tensor:
        """The input of the first layer, (B, T, D)."""
        x_BTD = self.embedding(tokens_BT)
        if self.position_embedding is not None:
            x_BTD = x_BTD + self.position_embedding(_embedded(positions_T, documents))
        keys_B = None if random_keys_B is None else site_keys(random_keys_B, _EMBEDDING_SITE, 1)[0]
        return cast(Tensor, self.dropout(x_BTD, keys_B, positions_T))

    def run_layers(
        self, x_BTD: Tensor, positions_T: Tensor, random_keys_B: Tensor | None, documents: Documents | None = None
    ) -> Tensor:
        """Run the layers one after another; (B, T, D) -> (B, T, D)."""
        uses_rope = self.spec.positions == "rope"
        rotary_2TC = rotary_table(self.spec, _embedded(positions_T, documents), x_BTD.dtype) if uses_rope else None
        # A family of models may not take documents (`Family.documents`); run files that ask for both are refused.
        also = () if documents is None else (documents,)
        for name, block in self.layers.items():
            x_BTD = block(x_BTD, positions_T, rotary_2TC, layer_site_keys(random_keys_B, int(name)), *also)
            # Outside of the block, which may be compiled or recomputed in the backward pass.
            for module in block.modules() if self.spec.moe and self.training else ():
                if isinstance(module, MoE) and module.last_load is not None:
                    module.tally.record(x_BTD, module.last_load)
        return x_BTD

    def logits(self, x_BTD: Tensor) -> Tensor:
        """Apply the head, or the tied embedding's matrix; (B, T, D) -> (B, T, V)."""
        return linear(x_BTD, self.embedding.weight) if self.head is None else self.head(x_BTD)


def _embedded(positions_T: Tensor, documents: Documents | None) -> Tensor:
    """The positions that are embedded: those in the sequence, or in the document where they restart."""
    return positions_T if documents is None or documents.positions_BT is None else documents.positions_BT


def layer_site_keys(random_keys_B: Tensor | None, layer: int) -> Tensor | None:
    """The random keys (2, B) of a layer's two branches; `layer` is its number in the whole model."""
    if random_keys_B is None:
        return None
    return site_keys(random_keys_B, _EMBEDDING_SITE + 1 + _SITES_PER_LAYER * layer, _SITES_PER_LAYER)
