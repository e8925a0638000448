"""A family of models of your own, verified against one process and then trained on two ranks.

python examples/own_model.py                                 verify it with tensor parallelism
torchrun --nproc-per-node 2 examples/own_model.py train      train it

Each branch of a layer is normalised before and after, as in Gemma 2 (arXiv 2408.00118, section 2):

    x = x + norm(attention(norm(x)))
    x = x + norm(ffn(norm(x)))
"""

import sys
from collections.abc import Iterator

import torch
from torch import Tensor, nn

import shardwright
from shardwright.model.attention import Attention
from shardwright.model.feed_forward import FeedForward
from shardwright.model.modules import Family, attention, feed_forward, norm, register
from shardwright.model.row import Row


def layer(spec: shardwright.ModelSpec, number: int) -> Iterator[Row]:
    """One row for each parameter of a layer: what it is, how it is initialised, how tensor parallelism splits it."""
    for name in ("attention_norm", "attention_post_norm", "ffn_norm", "ffn_post_norm"):
        yield from norm(name, spec.d_model)
    yield from attention(spec, input="attention_norm")
    yield from feed_forward(spec, "ffn", spec.d_ffn, input="ffn_norm")


class Block(nn.Module):
    """A layer as one device runs it; its parameters have the names and shapes of the rows."""

    def __init__(self, spec: shardwright.ModelSpec, number: int) -> None:
        super().__init__()
        self.attention = Attention(spec)
        self.ffn = FeedForward(spec, spec.d_ffn)
        for name in ("attention_norm", "attention_post_norm", "ffn_norm", "ffn_post_norm"):
            self.add_module(name, nn.RMSNorm(spec.d_model, eps=spec.norm_eps))

    def forward(
        self, x_BTD: Tensor, positions_T: Tensor, rotary_2TC: Tensor | None, site_keys_2B: Tensor | None = None
    ) -> Tensor:
        """(B, T, D) -> (B, T, D)."""
        x_BTD = x_BTD + self.attention_post_norm(self.attention(self.attention_norm(x_BTD), rotary_2TC))
        return x_BTD + self.ffn_post_norm(self.ffn(self.ffn_norm(x_BTD)))


SIZES = dict(n_layers=4, d_model=64, n_heads=4, n_kv_heads=2, head_dim=16, d_ffn=176, vocab_size=512, max_seq_len=128)
FAMILY = Family(name="sandwich-norm", help="norms before and after each branch", layer=layer, block=Block)


def main() -> None:
    """Verify, or train."""
    shardwright.extend(__file__)  # registers the family, here and in the processes that verify starts
    spec = shardwright.ModelSpec(**SIZES, family="sandwich-norm")
    layout = shardwright.Layout(tp=2)
    if "train" not in sys.argv:
        print(shardwright.verify(layout, spec))
        return
    model = shardwright.parallelize(spec, layout, seq_len=64, device="cpu")
    optimizer = torch.optim.AdamW(model.parameter_groups(), lr=3e-3)
    sequences = torch.arange(8)[:, None] * 50 + torch.arange(65)
    for _ in range(30):
        loss = model.forward_backward(sequences[:, :-1], sequences[:, 1:])
        optimizer.step()
    if model.rank == 0:
        print(f"loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
else:
    register(FAMILY)
