"""Parts that several adapters need: a decoder in plain PyTorch, the weights of a model, and the ranks as environment
variables.

Shapes: B sequences, T tokens, V vocabulary.
"""

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardwright.data.samples import IGNORE
from shardwright.model.spec import ModelSpec
from shardwright.parallel.boxes import local_box
from shardwright.system.errors import InputError
from shardwright.verification.trainers.adapter import World


def experts_of(options: Mapping[str, Any]) -> int:
    """Return the option `experts` of `--set`, by default 0; raises InputError for another value than a number of 0 or
    more."""
    value = options.get("experts", 0)
    if type(value) is not int or value < 0:
        raise InputError(f"experts={value}: valid: a whole number of 0 or more")
    return value


def expert_problem(ep: int, options: Mapping[str, Any]) -> str | None:
    """Return why `ep` ranks cannot share the experts of `--set experts`, or None."""
    experts = experts_of(options)
    if ep > 1 and not experts:
        return f"ep={ep} needs --set experts=N, a multiple of {ep}"
    return f"ep={ep} does not divide experts={experts}; --set experts={2 * ep}" if experts % ep else None


@torch.no_grad()
def load_weights(parameters: Mapping[str, Any], weights: Mapping[str, Tensor]) -> None:
    """Copy the shard of this rank of each whole weight into its parameter."""
    for name, parameter in parameters.items():
        local, offsets = local_box(parameter)
        local.copy_(weights[name][tuple(slice(at, at + n) for at, n in zip(offsets, local.shape, strict=True))])


def set_environment(world: World) -> None:
    """Set the environment variables that a launcher sets for each rank, if there is more than one rank."""
    if world.size > 1:
        rank, size = str(world.rank), str(world.size)
        os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=size, LOCAL_WORLD_SIZE=size)
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")  # the process group exists, so no port is opened


class DecoderBlock(nn.Module):
    """Attention and a feed-forward network, each after a norm."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        d_model, self.head_dim = spec.d_model, spec.d_model // spec.n_heads
        self.grouped, kv_width = spec.n_kv_heads != spec.n_heads, spec.n_kv_heads * self.head_dim
        self.attention_norm, self.ffn_norm = nn.RMSNorm(d_model), nn.RMSNorm(d_model)
        self.q, self.o = (nn.Linear(d_model, d_model, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(d_model, kv_width, bias=False) for _ in range(2))
        self.up, self.down = nn.Linear(d_model, spec.d_ffn), nn.Linear(spec.d_ffn, d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.attention_norm(x)
        q, k, v = (
            matrix(normed).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for matrix in (self.q, self.k, self.v)
        )
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.grouped)
        x = x + self.o(heads.transpose(1, 2).flatten(2))
        hidden: Tensor = self.down(F.gelu(self.up(self.ffn_norm(x))))
        return x + hidden


class Decoder(nn.Module):
    """`layers`: the blocks of a pipeline stage, by default all. The stage of block 0 has the embedding, the stage of
    the last block the head."""

    def __init__(self, spec: ModelSpec, layers: range | None = None) -> None:
        super().__init__()
        layers = range(spec.n_layers) if layers is None else layers
        first, last = layers.start == 0, layers.stop == spec.n_layers
        self.embedding = nn.Embedding(spec.vocab_size, spec.d_model) if first else None
        self.layers = nn.ModuleDict({str(n): DecoderBlock(spec) for n in layers})
        self.norm = nn.RMSNorm(spec.d_model) if last else None
        self.head = nn.Linear(spec.d_model, spec.vocab_size, bias=False) if last else None

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (B, T, V), or the output of the stage's last block."""
        x = x if self.embedding is None else self.embedding(x)
        for block in self.layers.values():
            x = block(x)
        if self.norm is None or self.head is None:
            return x
        logits_BTV: Tensor = self.head(self.norm(x))
        return logits_BTV


def loss_sum(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    """Return the sum of the cross-entropy over the targets that are counted."""
    return F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten(), ignore_index=IGNORE, reduction="sum")
