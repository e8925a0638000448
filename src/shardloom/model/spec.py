"""The sizes and choices that define a decoder, and what follows from them by arithmetic; no torch.

Notation of the formulas: L layers, h d_model, H heads, K kv heads, c head_dim, f d_ffn, V vocab_size,
s sequence length.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Literal, get_args

Norm = Literal["rmsnorm", "layernorm"]
Activation = Literal["swiglu", "gelu_tanh"]
Positions = Literal["rope", "learned"]


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Llama-3's change of the rotary frequencies for contexts longer than the pretraining one."""

    factor: float = field(metadata={"help": "How many times slower the slowest pairs of elements turn."})
    low_freq_factor: float = field(
        metadata={"help": "Pairs with fewer turns than this in original_max_seq_len are slowed by factor."}
    )
    high_freq_factor: float = field(
        metadata={"help": "Pairs with more turns than this in original_max_seq_len stay as they are."}
    )
    original_max_seq_len: int = field(
        metadata={"help": "Sequence length of the pretraining before the extension, in tokens."}
    )

    def problems(self) -> list[str]:
        """Every broken rule, one a line; empty if there is none."""
        found = []
        if self.factor < 1:
            found.append(f"rope_scaling.factor={self.factor:g} is less than 1; valid: 1 or more")
        if self.low_freq_factor <= 0:
            found.append(f"rope_scaling.low_freq_factor={self.low_freq_factor:g} is not positive")
        if self.high_freq_factor <= self.low_freq_factor:
            found.append(
                f"rope_scaling.high_freq_factor={self.high_freq_factor:g} is not greater than "
                f"low_freq_factor={self.low_freq_factor:g}"
            )
        if self.original_max_seq_len < 1:
            found.append(f"rope_scaling.original_max_seq_len={self.original_max_seq_len} is not positive")
        return found


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """Everything that defines a decoder; `problems()` says whether the values fit together.

    The head never has a bias, and the embedding and residual dropout share one probability. Attention
    probabilities are never dropped (see model/dropout.py).
    """

    n_layers: int = field(metadata={"help": "Transformer layers."})
    d_model: int = field(metadata={"help": "Width of the residual stream."})
    n_heads: int = field(metadata={"help": "Query heads of a layer."})
    n_kv_heads: int = field(
        metadata={"help": "Key and value heads of a layer; divides n_heads, equal to it without grouping."}
    )
    head_dim: int = field(metadata={"help": "Width of one head; n_heads * head_dim need not equal d_model."})
    d_ffn: int = field(metadata={"help": "Inner width of the feed-forward network."})
    vocab_size: int = field(metadata={"help": "Rows of the embedding, so the number of token ids."})
    max_seq_len: int = field(metadata={"help": "Longest sequence in tokens the model is meant for."})
    norm: Norm = field(
        default="rmsnorm",
        metadata={"help": "Normalisation before attention, before the network and at the end."},
    )
    norm_eps: float = field(default=1e-5, metadata={"help": "Added to the variance in the normalisation."})
    activation: Activation = field(
        default="swiglu",
        metadata={"help": "swiglu: down(silu(gate(x)) * up(x)); gelu_tanh: down(gelu(up(x))), gelu as in GPT-2."},
    )
    positions: Positions = field(
        default="rope",
        metadata={"help": "rope: queries and keys are rotated; learned: a trained vector a position is added."},
    )
    rope_theta: float = field(
        default=10000.0, metadata={"help": "Base of the rotary frequencies; not used with learned positions."}
    )
    rope_scaling: RopeScaling | None = field(
        default=None, metadata={"help": "Llama-3 scaling of the rotary frequencies, or none."}
    )
    qk_norm: bool = field(
        default=False, metadata={"help": "RMSNorm of every query and key head before the rotation (Qwen3)."}
    )
    bias: bool = field(default=False, metadata={"help": "Bias in all linears of the layers; the head has none."})
    tied_embedding: bool = field(default=False, metadata={"help": "The head uses the embedding's matrix."})
    dropout: float = field(
        default=0.0,
        metadata={"help": "Probability of dropping an element of the embedding and of each residual branch."},
    )
    init_std: float = field(default=0.02, metadata={"help": "Standard deviation of the initial matrices."})

    def problems(self) -> list[str]:
        """Every broken rule, each with the value, the rule and what is valid; empty if there is none."""
        return list(self._problems())

    def _problems(self) -> Iterator[str]:
        sizes = [each.name for each in fields(self) if each.type is int]
        broken = [name for name in sizes if getattr(self, name) < 1]
        for name in broken:
            yield f"{name}={getattr(self, name)} is not positive; valid: 1 or more"
        for name, literal in (("norm", Norm), ("activation", Activation), ("positions", Positions)):
            if getattr(self, name) not in get_args(literal):
                yield f"{name}={getattr(self, name)!r} is not known; valid: {', '.join(get_args(literal))}"
        heads, kv_heads = self.n_heads, self.n_kv_heads
        if "n_heads" not in broken and "n_kv_heads" not in broken and heads % kv_heads:
            divisors = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
            yield (
                f"n_kv_heads={kv_heads} does not divide n_heads={heads} "
                f"({heads} = {kv_heads}*{heads // kv_heads} + {heads % kv_heads}); valid: {divisors}"
            )
        if self.positions == "rope":
            if self.head_dim > 0 and self.head_dim % 2:
                yield (
                    f"head_dim={self.head_dim} is odd, and rope turns pairs of elements; "
                    f"valid: {self.head_dim - 1 or 2}, {self.head_dim + 1}"
                )
            if self.rope_theta <= 1:
                yield f"rope_theta={self.rope_theta:g} is not greater than 1; usual: 10000 to 1000000"
        if self.rope_scaling is not None:
            if self.positions == "learned":
                yield "rope_scaling needs positions='rope'; with positions='learned' nothing is rotated"
            yield from self.rope_scaling.problems()
        if not 0 <= self.dropout < 1:
            yield f"dropout={self.dropout:g} is not a probability below 1; valid: 0 <= dropout < 1"
        if not self.norm_eps > 0:
            yield f"norm_eps={self.norm_eps:g} is not positive; usual: 1e-6 to 1e-5"
        if not self.init_std > 0:
            yield f"init_std={self.init_std:g} is not positive; usual: 0.02"

    @property
    def n_parameters(self) -> int:
        """All trained numbers; a tied embedding counts once."""
        modules = self.parameters_by_module()
        layer = sum(count for name, count in modules.items() if name.startswith("layer."))
        rest = sum(count for name, count in modules.items() if not name.startswith("layer."))
        return self.n_layers * layer + rest

    def parameters_by_module(self) -> dict[str, int]:
        """Parameters of each part; the `layer.` entries are those of ONE layer, and a tied `head` is 0.

        The per-head norms of `qk_norm` belong to `layer.attention`, as their names in the model do.
        """
        h, q, kv = self.d_model, self.n_heads * self.head_dim, self.n_kv_heads * self.head_dim
        norm = h * (2 if self.norm == "layernorm" else 1)
        biases = q + 2 * kv + h if self.bias else 0
        ffn_biases = (self._ffn_inputs * self.d_ffn + h) if self.bias else 0
        return {
            "embedding": self.vocab_size * h,
            "positions": self.max_seq_len * h if self.positions == "learned" else 0,
            "layer.attention": self._attention_matrices + biases + (2 * self.head_dim if self.qk_norm else 0),
            "layer.ffn": self._ffn_matrices + ffn_biases,
            "layer.norms": 2 * norm,
            "final_norm": norm,
            "head": 0 if self.tied_embedding else self.vocab_size * h,
        }

    @property
    def n_matmul_parameters(self) -> int:
        """Elements of the matrices a token is multiplied by: those of the layers, and the head even if tied.

        Embedding lookup, learned positions, norms and biases are no matrix products and are left out.
        """
        return self.n_layers * (self._attention_matrices + self._ffn_matrices) + self.vocab_size * self.d_model

    def train_flops_per_token(self, seq_len: int, *, causal: bool = False) -> float:
        """Model FLOPs of forward and backward for one token, without recomputation.

        flops = 6 N + 12 L H c s, or 6 N + 6 L H c s with `causal`

        N `n_matmul_parameters`, L layers, H query heads, c head_dim, s `seq_len` in tokens. A multiply-add
        is 2 FLOPs, and the backward pass costs two forwards. The second term is QK^T and the product with
        V: 2 * 2 H c s a token forward over the full square of positions; `causal` counts the half that is
        not masked. Source: PaLM (arXiv 2204.02311) appendix B; torchtitan reports MFU by the full square,
        Megatron-LM today by half of it. Ignored: softmax, norms, activations, rotation, embedding lookup,
        optimizer, and what a fused attention computes again in its backward pass.
        """
        square = 12 * self.n_layers * self.n_heads * self.head_dim * seq_len
        return float(6 * self.n_matmul_parameters + (square / 2 if causal else square))

    @property
    def _ffn_inputs(self) -> int:
        """Matrices from d_model to d_ffn: gate and up, or up alone."""
        return 2 if self.activation == "swiglu" else 1

    @property
    def _attention_matrices(self) -> int:
        return 2 * self.d_model * self.head_dim * (self.n_heads + self.n_kv_heads)

    @property
    def _ffn_matrices(self) -> int:
        return (self._ffn_inputs + 1) * self.d_model * self.d_ffn


def descriptions(spec: type[ModelSpec] | type[RopeScaling]) -> dict[str, str]:
    """Field name -> what it means, in the order of definition; the run-file reference is made from it."""
    return {each.name: each.metadata["help"] for each in fields(spec)}
