"""The sizes of linear attention layers, their table in the run file, and the FLOPs and state that follow; no torch."""

from collections.abc import Iterator
from dataclasses import dataclass, field, fields

from shardwright.system.units import division_problem

CHUNK = 64
"""Tokens of a chunk of the chunked form; shorter sequences are one chunk."""


@dataclass(frozen=True, kw_only=True)
class LinearAttentionSpec:
    """Layers of linear attention (gated delta net, `model/linear_attention.py`) in a pattern with full attention."""

    n_k_heads: int = field(metadata={"help": "Query and key heads of a linear layer."})
    n_v_heads: int = field(
        metadata={
            "help": "Value heads of a linear layer, each with a state, a decay and a gate; a multiple of n_k_heads, "
            "because a query and key head serves n_v_heads / n_k_heads of them."
        }
    )
    k_dim: int = field(metadata={"help": "Width of a query or key head of a linear layer."})
    v_dim: int = field(metadata={"help": "Width of a value head of a linear layer."})
    conv_width: int = field(
        default=4, metadata={"help": "Tokens of the short causal convolution of queries, keys and values."}
    )
    full_interval: int = field(
        default=4,
        metadata={"help": "Every n-th layer has full attention instead (Qwen3-Next: 4); 0: all layers are linear."},
    )

    def problems(self, n_layers: int) -> Iterator[str]:
        """Yield every broken rule, for a model of `n_layers` layers, one sentence each."""
        sizes = [size.name for size in fields(self) if size.name != "full_interval"]
        broken = [name for name in sizes if getattr(self, name) < 1]
        yield from (
            f"linear_attention.{name}={getattr(self, name)} is not positive; valid: 1 or more" for name in broken
        )
        k_heads, v_heads = self.n_k_heads, self.n_v_heads
        if not broken and (
            problem := division_problem(
                "linear_attention.n_k_heads", k_heads, v_heads, f"linear_attention.n_v_heads={v_heads}"
            )
        ):
            yield problem
        if not 0 <= self.full_interval <= n_layers or self.full_interval == 1:
            yield (
                f"linear_attention.full_interval={self.full_interval} for {n_layers} layers; valid: 0 (all layers are "
                f"linear), 2 to {n_layers}; without linear layers leave [model.linear_attention] out"
            )

    @property
    def qkv_width(self) -> int:
        """Features of queries, keys and values of all heads, which the convolution reads."""
        return 2 * self.n_k_heads * self.k_dim + self.n_v_heads * self.v_dim

    @property
    def projected_width(self) -> int:
        """Features of all projections of a token: queries, keys, values, gates, and a decay and a beta a value head."""
        return self.qkv_width + self.n_v_heads * (self.v_dim + 2)

    @property
    def state_numel(self) -> int:
        """Elements of the states of a sequence in one layer: a matrix (k_dim, v_dim) a value head."""
        return self.n_v_heads * self.k_dim * self.v_dim

    @property
    def window_numel(self) -> int:
        """Elements of the inputs of the convolution that a sequence keeps in one layer."""
        return (self.conv_width - 1) * self.qkv_width

    @property
    def scan_numel(self) -> int:
        """Elements a token of the tensors that a scan makes in one layer: n (6 k + 5 v + 3 C + k v / C), of queries and
        keys and their products with decays and betas, of values, of pairs of a chunk's tokens, and of states; symbols
        as in `scan_flops`."""
        k, v = self.k_dim, self.v_dim
        return self.n_v_heads * (6 * k + 5 * v + 3 * CHUNK + k * v // CHUNK)

    @property
    def map_numel(self) -> int:
        """Elements of the maps of states of a piece of a sequence in one layer: n matrices (k, k + v), symbols as in
        `scan_flops` (`parallel/linear_attention.py`)."""
        return self.n_v_heads * self.k_dim * (self.k_dim + self.v_dim)

    @property
    def map_flops(self) -> int:
        """FLOPs of a token in the maps of states in one layer: 4 n k (k + v), two products of a chunk with the map of
        all chunks before it; symbols as in `scan_flops`."""
        return 4 * self.map_numel

    @property
    def scan_flops(self) -> int:
        """FLOPs of a token's scan in one layer, forward: 2 n (C (2 k + v) + 3 k v).

        n value heads, k and v widths of a key and a value head, C `CHUNK` tokens: products of keys with keys and of
        queries with keys of a chunk (C k each), of these with values (C v), and three with the state (k v each: its
        reads by keys and by queries, and its update). Source: Yang et al., Gated Delta Networks, arXiv 2412.06464,
        section 3.3. Ignored: the triangular solve of a chunk, C (k + v), the convolution and element-wise work.
        """
        k, v = self.k_dim, self.v_dim
        return 2 * self.n_v_heads * (CHUNK * (2 * k + v) + 3 * k * v)
