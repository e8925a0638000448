"""The decoder: embedding, layers of attention and feed-forward network, norm, head.

Parameter names are global and the same for every layout: `embedding.weight`, `layers.7.attention.q.weight`,
`layers.7.ffn.down.weight`, `norm.weight`, `head.weight`; with experts `layers.7.ffn.router.weight`,
`layers.7.ffn.experts.down`, `layers.7.ffn.shared.down.weight`. Multi-token prediction (MTP) modules are numbered after
the layers, as in DeepSeek-V3's files: after 8 layers `layers.8.projection.weight`, `layers.8.block.attention.q.weight`.

Multi-token prediction (MTP): modules that predict tokens further ahead than the next one, for a second loss.

With the model's output h_0 before its last norm, module k = 1, 2, ... computes at position t

    h_k(t) = block_k(P_k [norm(embedding(token t + k)); norm(h_k-1(t))])      logits_k(t) = head(norm(h_k(t)))

and predicts token t + k + 1. The model's embedding and head are used; the norms, the projection P_k (D, 2D) and the
block are the module's own. Source: DeepSeek-V3, arXiv 2412.19437, section 2.2, equations 21 to 23; the embedding comes
first in the concatenation, as in its published weights.

Shapes: B batch, T tokens, D model, V vocab, C width of one head, K MTP modules.
"""

from collections.abc import Callable, Iterator
from typing import Any, Self, cast

import torch
from torch import Tensor, nn

from shardwright.model.attention import Attention
from shardwright.model.balance import RealTokens
from shardwright.model.documents import Documents
from shardwright.model.dropout import InputDropout, KeyedDropout, draw
from shardwright.model.feed_forward import FeedForward
from shardwright.model.latent_attention import LatentAttention
from shardwright.model.linear_attention import GatedDeltaNet
from shardwright.model.lora_sizes import LoraSpec
from shardwright.model.matmul import Linear, linear
from shardwright.model.modules import FAMILIES, row_of, rows, within_layer
from shardwright.model.moe import MoE
from shardwright.model.norm import last_norm, residual_norm
from shardwright.model.random import matrix_key, site_keys
from shardwright.model.recompute import part
from shardwright.model.rotary import query_temperature, rotary_table
from shardwright.model.spec import ModelSpec
from shardwright.system.errors import ConfigError, InputError, checked_constructor

# Sites where random numbers are drawn: one after the embedding, then two in each layer.
_EMBEDDING_SITE = 0
_SITES_PER_LAYER = 2


class Block(nn.Module):
    """One layer: x + attention(norm x), then x + ffn(norm x), or with `norm_position` "after" x + norm(attention x), or
    with `parallel_branches` x + attention(norm x) + ffn(norm x). It can be compiled on its own, because it takes
    tensors and documents, which only attention reads, outside of compiled code."""

    def __init__(self, spec: ModelSpec, layer: int) -> None:
        super().__init__()
        before, after = spec.norm_before, spec.norm_after
        self.attention_norm = residual_norm(spec) if before else None
        self.attention = _attention(spec, layer)
        self.attention_post_norm = residual_norm(spec) if after else None
        self.parallel_branches = spec.parallel_branches
        self.ffn_norm = residual_norm(spec) if before and not spec.parallel_branches else None
        self.ffn = MoE(spec) if spec.has_experts(layer) else FeedForward(spec, spec.d_ffn)
        self.ffn_post_norm = residual_norm(spec) if after else None
        self.branch_scale, self.rotates = spec.branch_scale, spec.rotates(layer)
        self.table = int(spec.layer_window(layer) > 0) if spec.window_rope_theta else None
        self.tempered = spec if spec.temperature_scale and not self.rotates else None
        self.dropout = KeyedDropout(spec.dropout)

    def forward(
        self,
        x_BTD: Tensor,
        positions_T: Tensor,
        rotary_2TC: Tensor | None,
        site_keys_2B: Tensor | None = None,
        documents: Documents | None = None,
        real: RealTokens | None = None,
    ) -> Tensor:
        """(B, T, D) -> (B, T, D). `site_keys_2B`: the random keys of the two branches; `real`: the tokens that experts
        compute, if there is padding."""
        keys_B, ffn_keys_B = (None, None) if site_keys_2B is None else site_keys_2B.unbind(0)
        if self.table is not None and rotary_2TC is not None:
            rotary_2TC = rotary_2TC[self.table]
        rotary_2TC = rotary_2TC if self.rotates else None
        normed_BTD = _normed(self.attention_norm, x_BTD)
        of_queries: tuple[Tensor, ...] = ()
        if self.tempered is not None:
            of_queries = (query_temperature(self.tempered, _embedded(positions_T, documents), x_BTD.dtype),)
        y_BTD = self.attention(normed_BTD, rotary_2TC, documents, *of_queries)
        attended_BTD = self.branch(self.attention_post_norm, y_BTD)
        x_BTD = x_BTD + self.dropout(attended_BTD, keys_B, positions_T)
        if not self.parallel_branches:
            normed_BTD = _normed(self.ffn_norm, x_BTD)
        routed: tuple[Any, ...] = ()
        if isinstance(self.ffn, MoE) and (self.ffn.drawn or real is not None):
            routed = ffn_keys_B if self.ffn.drawn else None, positions_T, real
        y_BTD = self.branch(self.ffn_post_norm, self.ffn(normed_BTD, *routed))
        return x_BTD + self.dropout(y_BTD, ffn_keys_B, positions_T)

    def branch(self, post_norm: nn.Module | None, y_BTD: Tensor) -> Tensor:
        """Return the output of a branch as it is added to the residual stream, before dropout."""
        y_BTD = _normed(post_norm, y_BTD)
        return y_BTD if self.branch_scale == 1 else y_BTD * self.branch_scale


def _attention(spec: ModelSpec, layer: int) -> nn.Module:
    """Return the attention of a layer: linear, over latent vectors, or over keys and values of heads."""
    if spec.is_linear(layer):
        return GatedDeltaNet(spec)
    return Attention(spec, layer) if spec.latent_attention is None else LatentAttention(spec)


def _normed(norm: nn.Module | None, x_BTD: Tensor) -> Tensor:
    """Return the norm of a tensor; without a norm the tensor itself."""
    if norm is None:
        return x_BTD
    normed_BTD: Tensor = part("norms", norm, x_BTD)
    return normed_BTD


@checked_constructor(ConfigError)
class Transformer(nn.Module):
    """A decoder on one device. `shardwright.model.init.initialise` fills its initial weights.

    With a tied embedding `head` is None and the forward pass uses the embedding's matrix, so there is one parameter and
    `to_empty` cannot untie it.
    """

    applies_head = True
    """Whether the forward pass returns logits; otherwise it returns the head's input, (B, T, D), instead of each."""

    sequence_len: Callable[[int], int] = staticmethod(lambda n_tokens: n_tokens)
    """The tokens of a whole sequence from the tokens of the input; replaced where the input is a part of it. Rotary
    frequencies may depend on it."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.spec = spec
        self.embedding = nn.Embedding(spec.vocab_size, spec.d_model)
        learned = spec.positions == "learned"
        self.position_embedding = nn.Embedding(spec.max_seq_len, spec.d_model) if learned else None
        self.dropout = KeyedDropout(spec.dropout)
        family = FAMILIES[spec.family]
        blocks = [family.make(spec, number) for number in range(spec.n_blocks)]
        blocks[spec.n_layers :] = [MTPModule(spec, block) for block in blocks[spec.n_layers :]]
        self.layers = nn.ModuleDict({str(number): block for number, block in enumerate(blocks)})
        self.norm = last_norm(spec)
        self.head = None if spec.tied_embedding else Linear(spec.d_model, spec.vocab_size, bias=False)
        if spec.lora is not None:
            self._adapt(spec.lora)

    def to_types(self, trained: torch.dtype, frozen: torch.dtype) -> Self:
        """Convert the parameters, frozen ones to `frozen`, in place."""
        self.to(trained)
        for name, parameter in self.named_parameters():
            row = row_of(self.spec, name)
            if row.frozen and row.kind != "balance":
                parameter.data = parameter.data.to(frozen)
        return self

    def _adapt(self, lora: LoraSpec) -> None:
        """Add the adapters, without values, and freeze all other parameters."""
        for name, row in rows(self.spec).items():
            if row.adapter:
                owner, _, attribute = name.rpartition(".")
                module: Any = self.get_submodule(owner)
                module.add_adapter(attribute, nn.Parameter(torch.empty(row.shape)), lora.scale)
                if lora.dropout:
                    module.dropout = InputDropout(p=lora.dropout, key=matrix_key(within_layer(owner)))
        for name, parameter in self.named_parameters():
            if row_of(self.spec, name).frozen:
                parameter.requires_grad_(False)

    def forward(
        self,
        tokens_BT: Tensor,
        positions_T: Tensor | None = None,
        random_keys_B: Tensor | None = None,
        documents: Documents | None = None,
        ahead_KBT: Tensor | None = None,
        real: RealTokens | None = None,
    ) -> Tensor | tuple[Tensor, ...]:
        """Return logits (B, T, V) for the token after each one of `tokens_BT` (int64).

        `positions_T` are the positions of the tokens in the whole sequence, 0 to T - 1 unless given, (T,) or (B, T);
        the causal mask follows the order in the tensor. `random_keys_B` come from `random.sample_keys`; without them,
        or in evaluation, nothing is dropped. With `documents` each token attends only to tokens of its document. Raises
        InputError if T exceeds `max_seq_len` and no positions are given; with positions a row may hold several
        sequences.

        `ahead_KBT[k - 1]` are the tokens k places after `tokens_BT`, for the multi-token prediction (MTP) modules. With
        them K further logits are returned, from module k for the token k + 1 places later; without them the modules are
        not run.

        `real`: the sequences have padding, and experts compute only the real tokens.
        """
        positions_T = self._positions(tokens_BT, positions_T)
        x_BTD = self.embed(tokens_BT, positions_T, random_keys_B, documents)
        x_BTD = self.run_layers(x_BTD, positions_T, random_keys_B, documents, real)
        return self.finish(x_BTD, positions_T, random_keys_B, documents, ahead_KBT, real)

    def finish(
        self,
        x_BTD: Tensor,
        positions_T: Tensor,
        random_keys_B: Tensor | None,
        documents: Documents | None = None,
        ahead_KBT: Tensor | None = None,
        real: RealTokens | None = None,
    ) -> Tensor | tuple[Tensor, ...]:
        """Return the results of `forward` from the output of the last layer."""
        result = self._result(self.norm(x_BTD))
        if ahead_KBT is None:
            return result
        return (result, *self.predict_ahead(x_BTD, ahead_KBT, positions_T, random_keys_B, documents, real))

    def hidden(
        self,
        tokens_BT: Tensor,
        positions_T: Tensor | None = None,
        random_keys_B: Tensor | None = None,
        documents: Documents | None = None,
    ) -> Tensor:
        """Return the head's input: the normalised output of the last layer, (B, T, D). Arguments as in `forward`."""
        positions_T = self._positions(tokens_BT, positions_T)
        x_BTD = self.embed(tokens_BT, positions_T, random_keys_B, documents)
        x_BTD = self.run_layers(x_BTD, positions_T, random_keys_B, documents)
        return cast(Tensor, self.norm(x_BTD))

    def _positions(self, tokens_BT: Tensor, positions_T: Tensor | None) -> Tensor:
        if positions_T is not None:
            return positions_T
        n_tokens = tokens_BT.shape[1]
        if n_tokens > self.spec.max_seq_len:
            raise InputError(
                f"a sequence of {n_tokens} tokens is longer than max_seq_len={self.spec.max_seq_len}; "
                f"valid: 1 to {self.spec.max_seq_len}"
            )
        return torch.arange(n_tokens, device=tokens_BT.device)

    def embed(
        self, tokens_BT: Tensor, positions_T: Tensor, random_keys_B: Tensor | None, documents: Documents | None = None
    ) -> Tensor:
        """Return the input of the first layer, (B, T, D)."""
        x_BTD = self.embed_tokens(tokens_BT)
        if self.position_embedding is not None:
            x_BTD = x_BTD + self.position_embedding(_embedded(positions_T, documents))
        keys_B = None if random_keys_B is None else site_keys(random_keys_B, _EMBEDDING_SITE, 1)[0]
        return cast(Tensor, self.dropout(x_BTD, keys_B, positions_T))

    def embed_tokens(self, tokens_BT: Tensor) -> Tensor:
        """Return the scaled embedding of tokens, without positions; (B, T) -> (B, T, D)."""
        x_BTD: Tensor = self.embedding(tokens_BT)
        return x_BTD if self.spec.embedding_scale == 1 else x_BTD * self.spec.embedding_scale

    def run_layers(
        self,
        x_BTD: Tensor,
        positions_T: Tensor,
        random_keys_B: Tensor | None,
        documents: Documents | None = None,
        real: RealTokens | None = None,
    ) -> Tensor:
        """Run the layers one after another, without MTP modules; (B, T, D) -> (B, T, D)."""
        also = self._read_by_blocks(x_BTD, positions_T, documents, real)
        for name, block in self.layers.items():
            if int(name) < self.spec.n_layers:
                keys_2B = layer_site_keys(random_keys_B, int(name))
                draw(keys_2B, positions_T)
                x_BTD = block(x_BTD, positions_T, also[0], keys_2B, *also[1:])
                self._record_load(block, x_BTD)
        return x_BTD

    def predict_ahead(
        self,
        x_BTD: Tensor,
        ahead_KBT: Tensor,
        positions_T: Tensor,
        random_keys_B: Tensor | None,
        documents: Documents | None = None,
        real: RealTokens | None = None,
    ) -> Iterator[Tensor]:
        """Yield the result (B, T, V) of each MTP module. `x_BTD`: the output of the last layer, before the last norm;
        other arguments as in `forward`."""
        also = self._read_by_blocks(x_BTD, positions_T, documents, real)
        for number, tokens_BT in enumerate(ahead_KBT, start=self.spec.n_layers):
            module = self.layers[str(number)]
            keys_2B = layer_site_keys(random_keys_B, number)
            draw(keys_2B, positions_T)
            x_BTD, normed_BTD = module(x_BTD, self.embed_tokens(tokens_BT), positions_T, also[0], keys_2B, *also[1:])
            self._record_load(module, normed_BTD)
            yield self._result(normed_BTD)

    def _read_by_blocks(
        self, x_BTD: Tensor, positions_T: Tensor, documents: Documents | None, real: RealTokens | None
    ) -> tuple[Any, ...]:
        """Return the arguments of all blocks after their input and random keys: the rotary table, and documents and
        real tokens if there are any."""
        rotary_2TC = None
        if self.spec.positions == "rope":
            n_tokens = self.sequence_len(positions_T.shape[-1])
            rotary_2TC = rotary_table(self.spec, _embedded(positions_T, documents), x_BTD.dtype, n_tokens)
        # A family of models may not take either (`Family.documents`); run files that need one are refused.
        if real is not None:
            return rotary_2TC, documents, real
        return (rotary_2TC,) if documents is None else (rotary_2TC, documents)

    def _record_load(self, block: nn.Module, y_BTD: Tensor) -> None:
        """Record the load of a block's experts; `y_BTD`: the block's output. It runs outside of the block, which may be
        compiled or recomputed in the backward pass."""
        for module in block.modules() if self.spec.moe and self.training else ():
            if isinstance(module, MoE) and module.last_load is not None:
                module.tally.record(y_BTD, module.last_load)

    def _result(self, x_BTD: Tensor) -> Tensor:
        return self.logits(x_BTD) if self.applies_head else x_BTD

    def logits(self, x_BTD: Tensor) -> Tensor:
        """Apply the head, or the tied embedding's matrix, and the soft cap; (B, T, D) -> (B, T, V)."""
        logits_BTV = linear(x_BTD, self.embedding.weight) if self.head is None else self.head(x_BTD)
        cap = self.spec.logit_softcap
        return cap * (logits_BTV / cap).tanh() if cap else logits_BTV


def _embedded(positions_T: Tensor, documents: Documents | None) -> Tensor:
    """Return the positions to embed: in the sequence, or in the document if positions restart."""
    return positions_T if documents is None or documents.positions_BT is None else documents.positions_BT


def layer_site_keys(random_keys_B: Tensor | None, layer: int) -> Tensor | None:
    """Return the random keys (2, B) of a layer's two branches; `layer` is its number in the whole model."""
    if random_keys_B is None:
        return None
    return site_keys(random_keys_B, _EMBEDDING_SITE + 1 + _SITES_PER_LAYER * layer, _SITES_PER_LAYER)


class MTPModule(nn.Module):
    """A multi-token prediction (MTP) module around `block`, a layer of the model's family."""

    def __init__(self, spec: ModelSpec, block: nn.Module) -> None:
        super().__init__()
        self.embedding_norm = residual_norm(spec)
        self.hidden_norm = residual_norm(spec)
        self.projection = Linear(2 * spec.d_model, spec.d_model, bias=False)
        self.block = block
        self.norm = last_norm(spec)

    def forward(self, x_BTD: Tensor, embedded_BTD: Tensor, *of_block: Any) -> tuple[Tensor, Tensor]:
        """Return the input of the next module and the input of the head, both (B, T, D).

        `x_BTD`: the output of the last layer or the first output of the previous module; `embedded_BTD`: the embedding
        of the tokens ahead; `of_block`: a block's other arguments (`modules.Family.block`).
        """
        both_BTE = torch.cat((self.embedding_norm(embedded_BTD), self.hidden_norm(x_BTD)), dim=-1)
        y_BTD = self.block(self.projection(both_BTE), *of_block)
        return y_BTD, self.norm(y_BTD)
