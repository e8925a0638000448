"""The model of the examples: a decoder in plain PyTorch, which knows nothing of ranks.

Shapes: B sequences, T tokens, H heads, D features of a head.
"""

from torch import Tensor, nn
from torch.nn import functional as F


class Block(nn.Module):
    """Attention and a feed-forward network, each after a norm. `head_dim`: features of a head."""

    def __init__(self, d_model: int, d_ffn: int, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.attention_norm, self.ffn_norm = nn.RMSNorm(d_model), nn.RMSNorm(d_model)
        self.q, self.k, self.v, self.o = (nn.Linear(d_model, d_model, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(d_model, d_ffn), nn.Linear(d_ffn, d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.attention_norm(x)
        heads = (
            matrix(normed).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for matrix in (self.q, self.k, self.v)
        )
        x = x + self.o(F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.ffn_norm(x))))


class Decoder(nn.Module):
    """`layers`: the blocks of a pipeline stage, which has the embedding if it has block 0, and the head if it has the
    last block."""

    def __init__(self, spec, layers: range | None = None) -> None:
        super().__init__()
        layers = range(spec.n_layers) if layers is None else layers
        head_dim = spec.d_model // spec.n_heads
        first, last = layers.start == 0, layers.stop == spec.n_layers
        self.embedding = nn.Embedding(spec.vocab_size, spec.d_model) if first else None
        self.layers = nn.ModuleDict({str(n): Block(spec.d_model, spec.d_ffn, head_dim) for n in layers})
        self.norm = nn.RMSNorm(spec.d_model) if last else None
        self.head = nn.Linear(spec.d_model, spec.vocab_size, bias=False) if last else None

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.embedding is None else self.embedding(x)
        for block in self.layers.values():
            x = block(x)
        return x if self.head is None else self.head(self.norm(x))


def loss_sum(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the cross-entropy of all targets except -100."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
