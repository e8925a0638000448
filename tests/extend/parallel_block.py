"""A family of models of one's own: attention and feed-forward network side by side behind one LayerNorm, with biases.

    y = LayerNorm(x)        x + attention(y) + ffn(y)        (GPT-J; PaLM, arXiv 2204.02311, section 2)

All column-parallel linears of a layer read `input_norm`, so that with tensor parallelism one all-gather (or, in the
backward pass, one sum) serves attention and network.
"""

from collections.abc import Iterator

from torch import Tensor, nn

from shardwright.model.attention import Attention
from shardwright.model.feed_forward import FeedForward
from shardwright.model.modules import Family, attention, feed_forward, norm, register
from shardwright.model.row import Row
from shardwright.model.spec import ModelSpec


def layer(spec: ModelSpec, number: int) -> Iterator[Row]:
    """Yield one row for each parameter of a layer; every layer is alike."""
    yield from norm("input_norm", spec.d_model, "layernorm")
    yield from attention(spec, input="input_norm")
    yield from feed_forward(spec, "ffn", spec.d_ffn, input="input_norm", ordered=True)


class ParallelBlock(nn.Module):
    """Its parameters have the names and shapes of the rows; it knows nothing of parallelism."""

    def __init__(self, spec: ModelSpec, number: int) -> None:
        super().__init__()
        self.input_norm = nn.LayerNorm(spec.d_model, eps=spec.norm_eps)
        self.attention = Attention(spec)
        self.ffn = FeedForward(spec, spec.d_ffn)

    def forward(
        self, x_BTD: Tensor, positions_T: Tensor, rotary_2TC: Tensor | None, site_keys_2B: Tensor | None = None
    ) -> Tensor:
        """Return the output of the layer; x (B, T, D) -> (B, T, D)."""
        y_BTD = self.input_norm(x_BTD)
        return x_BTD + self.attention(y_BTD, rotary_2TC) + self.ffn(y_BTD)


def problems(spec: ModelSpec) -> Iterator[str]:
    """Yield the settings that this family does not have."""
    if spec.norm != "layernorm":
        yield f"norm={spec.norm!r} with family='parallel-block'; valid: 'layernorm'"
    for name in ("moe", "latent_attention", "dropout"):
        if getattr(spec, name):
            yield f"{name} is not in family='parallel-block'; leave it out"


register(
    Family(
        name="parallel-block",
        help="attention and feed-forward network side by side behind one LayerNorm",
        layer=layer,
        block=ParallelBlock,
        problems=problems,
    )
)
