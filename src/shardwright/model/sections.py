"""The optional parts of a decoder, each with its own table in the run file; no torch.

Notation of the formulas: E experts, K experts per token, G groups of experts, T tokens of a sequence.
"""

from collections.abc import Iterator
from dataclasses import MISSING, Field, dataclass, field, fields
from math import ceil, inf, log, sqrt
from typing import Any, ClassVar, Literal, Protocol, get_args

from shardwright.layout.key import MOST_LAYERS
from shardwright.system.units import division_problem

MOST_HEADS = 2**16
MOST_WIDE = 2**31 - 1
"""The largest size that has no bound of its own: the largest 32-bit index."""
_MOST = {
    "n_layers": MOST_LAYERS,
    "mtp_modules": MOST_LAYERS,
    "n_heads": MOST_HEADS,
    "n_kv_heads": MOST_HEADS,
} | dict.fromkeys(("n_experts", "n_groups"), MOST_HEADS)
Score = Literal["softmax", "sigmoid"]
AuxScope = Literal["sequence", "batch"]
Scaling = Literal["llama3", "linear", "yarn", "dynamic", "longrope"]


class Described(Protocol):
    """A dataclass whose every field has its meaning in its metadata."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]


def descriptions(section: type[Described]) -> dict[str, str]:
    """Return field name -> meaning, in the order of definition; the run-file reference is made from it."""
    return {key.name: key.metadata["help"] for key in fields(section)}


def too_large(section: Described, prefix: str = "") -> Iterator[str]:
    """Yield a sentence for each size beyond any model's. Rules that go through all numbers below a size, and tables of
    all layers, would not end."""
    for key in fields(section):
        most, value = _MOST.get(key.name, MOST_WIDE), getattr(section, key.name)
        if key.type is int and value > most:
            yield f"{prefix}{key.name}={value} is more than any model has; valid: at most {most}"


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Scaling of the rotary frequencies, for contexts longer than in pretraining.

    The formulas are in `model/rotary.py`. A field that the `kind` does not use stays at its default.
    """

    kind: Scaling = field(
        default="llama3",
        metadata={
            "help": "llama3: the lowest frequencies are divided; linear: all are divided; yarn: frequencies with few "
            "turns are divided, and queries and keys are scaled; dynamic: none are divided up to max_seq_len, and "
            "longer sequences are refused; longrope: each is divided by a number of its own, and queries and keys are "
            "scaled (Phi-3, Phi-4-mini)."
        },
    )
    factor: float = field(metadata={"help": "Divisor of the scaled frequencies."})
    low_freq_factor: float = field(
        default=0.0,
        metadata={
            "help": "llama3: frequencies with fewer turns than this in original_max_seq_len are divided by factor."
        },
    )
    high_freq_factor: float = field(
        default=0.0,
        metadata={"help": "llama3: frequencies with more turns than this in original_max_seq_len are unchanged."},
    )
    original_max_seq_len: int = field(
        default=0,
        metadata={
            "help": "llama3, yarn, longrope: sequence length of the pretraining before the extension, in tokens."
        },
    )
    beta_fast: float = field(
        default=32.0,
        metadata={"help": "yarn: pairs with more turns than this in original_max_seq_len are unchanged."},
    )
    beta_slow: float = field(
        default=1.0,
        metadata={"help": "yarn: the frequency of pairs with fewer turns than this is divided by factor."},
    )
    attention_factor: float = field(
        default=0.0,
        metadata={
            "help": "yarn: multiplies rotated queries and keys; 0: 1 + 0.1 ln(factor), or with mscale and "
            "mscale_all_dim (1 + 0.1 mscale ln(factor)) / (1 + 0.1 mscale_all_dim ln(factor)); longrope: the same, 0: "
            "sqrt(1 + ln(factor) / ln(original_max_seq_len))."
        },
    )
    mscale: float = field(default=0.0, metadata={"help": "yarn: see attention_factor (DeepSeek); 0: none."})
    mscale_all_dim: float = field(
        default=0.0,
        metadata={
            "help": "yarn: see attention_factor; latent attention also multiplies its scores by "
            "(1 + 0.1 mscale_all_dim ln(factor))^2 (DeepSeek); 0: none."
        },
    )
    truncate: bool = field(
        default=True, metadata={"help": "yarn: the bounds of the interpolated pairs are rounded to whole pairs."}
    )

    short_factor: tuple[float, ...] = field(
        default=(),
        metadata={
            "help": "longrope: the divisor of each frequency, one for two rotated elements of a head, in sequences of "
            "up to original_max_seq_len tokens."
        },
    )
    long_factor: tuple[float, ...] = field(
        default=(), metadata={"help": "longrope: the divisor of each frequency in longer sequences."}
    )

    def __post_init__(self) -> None:
        for name in ("short_factor", "long_factor"):  # JSON has lists
            object.__setattr__(self, name, tuple(getattr(self, name)))

    def factors(self, n_tokens: int) -> tuple[float, ...]:
        """Return the divisor of each frequency by longrope in a sequence of `n_tokens` tokens."""
        return self.long_factor if n_tokens > self.original_max_seq_len else self.short_factor

    def factor_problems(self, rope_dim: int) -> Iterator[str]:
        """Yield each broken rule of the divisors of longrope, for heads with `rope_dim` rotated elements."""
        for name in ("short_factor", "long_factor"):
            given = getattr(self, name)
            if self.kind == "longrope" and given and len(given) != rope_dim // 2:
                yield (
                    f"rope_scaling.{name} has {len(given)} numbers for {rope_dim} rotated elements of a head; valid: "
                    f"{rope_dim // 2}, one for each pair"
                )
            elif not all(0 < number < inf for number in given):
                yield f"rope_scaling.{name} has numbers that are not positive; valid: more than 0, usual: 1 to 100"

    def problems(self) -> list[str]:
        """Return every broken rule, one sentence each; empty if there is none."""
        if self.kind not in get_args(Scaling):
            return [f"rope_scaling.kind={self.kind!r} is not known; valid: {', '.join(get_args(Scaling))}"]
        broken = []
        if self.factor < 1:
            broken.append(f"rope_scaling.factor={self.factor:g} is less than 1; valid: 1 or more")
        used = _USED_BY_SCALING[self.kind]
        for key in fields(self):
            value = getattr(self, key.name)
            if key.name not in used and value != key.default and key.default is not MISSING:
                takes = [name for name, names in _USED_BY_SCALING.items() if key.name in names]
                broken.append(
                    f"rope_scaling.{key.name}={value} is not used by rope_scaling.kind={self.kind!r}; leave it out, "
                    f"or set kind to {' or '.join(map(repr, takes))}"
                )
            elif key.name in used and key.default in (0, ()) and value in (0, ()) and key.name not in _MAY_BE_ZERO:
                broken.append(f"rope_scaling.{key.name}: missing, and kind={self.kind!r} has no default for it")
            elif key.name in used and isinstance(value, int | float) and value < 0:
                broken.append(f"rope_scaling.{key.name}={value:g} is negative; valid: more than 0")
        if self.kind == "llama3" and 0 < self.high_freq_factor < self.low_freq_factor:
            broken.append(
                f"rope_scaling.high_freq_factor={self.high_freq_factor:g} is less than "
                f"low_freq_factor={self.low_freq_factor:g}"
            )
        if self.kind == "yarn" and self.beta_fast < self.beta_slow:
            broken.append(
                f"rope_scaling.beta_fast={self.beta_fast:g} is less than beta_slow={self.beta_slow:g}; usual: 32 and 1"
            )
        if self.kind == "longrope" and self.original_max_seq_len == 1:
            broken.append("rope_scaling.original_max_seq_len=1 is no length of a context; usual: 4096")
        return broken

    @property
    def attention_scale(self) -> float:
        """The factor of rotated queries and keys (YaRN, arXiv 2309.00071, section 3.4; LongRoPE as in transformers)."""
        if self.kind not in ("yarn", "longrope"):
            return 1.0
        if self.attention_factor:
            return self.attention_factor
        if self.kind == "longrope":
            return sqrt(1 + log(self.factor) / log(self.original_max_seq_len)) if self.factor > 1 else 1.0
        if self.mscale and self.mscale_all_dim:
            return self._grown(self.mscale) / self._grown(self.mscale_all_dim)
        return self._grown(1.0)

    @property
    def score_scale(self) -> float:
        """The factor of latent attention's scores (the code of DeepSeek-V3)."""
        return self._grown(self.mscale_all_dim) ** 2 if self.kind == "yarn" and self.mscale_all_dim else 1.0

    def _grown(self, mscale: float) -> float:
        return 1.0 + 0.1 * mscale * log(self.factor) if self.factor > 1 else 1.0


_USED_BY_SCALING: dict[str, tuple[str, ...]] = {
    "llama3": ("kind", "low_freq_factor", "high_freq_factor", "original_max_seq_len"),
    "linear": ("kind",),
    "dynamic": ("kind",),
    "longrope": ("kind", "original_max_seq_len", "attention_factor", "short_factor", "long_factor"),
    "yarn": (
        "kind", "original_max_seq_len", "beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim",
        "truncate",
    ),
}  # fmt: skip
"""The fields besides `factor` that each kind of scaling uses."""
_MAY_BE_ZERO = ("attention_factor", "mscale", "mscale_all_dim")


@dataclass(frozen=True, kw_only=True)
class MoESpec:
    """A mixture of experts instead of the feed-forward network: a router sends each token to a few of the experts."""

    n_experts: int = field(metadata={"help": "Experts of a layer; a router picks top_k of them for each token."})
    top_k: int = field(metadata={"help": "Experts that compute each token."})
    d_ffn: int = field(metadata={"help": "Inner width of one expert."})
    n_shared: int = field(
        default=0, metadata={"help": "Shared experts, which compute every token: one network of n_shared * d_ffn."}
    )
    d_shared: int = field(
        default=0,
        metadata={"help": "Inner width of the network of shared experts, instead of n_shared * d_ffn; 0: that."},
    )
    shared_gate: bool = field(
        default=False,
        metadata={
            "help": "The output of the shared experts is multiplied by sigmoid(w x), one number a token (Qwen2-MoE)."
        },
    )
    first_dense: int = field(
        default=0, metadata={"help": "Number of first layers with a dense network, of model.d_ffn, and no experts."}
    )
    interval: int = field(
        default=1,
        metadata={"help": "Experts in every n-th layer only; the other layers have a dense network (Qwen2-MoE)."},
    )
    dense_layers: tuple[int, ...] = field(
        default=(), metadata={"help": "Numbers of further layers, from 0, with a dense network (Qwen2-MoE)."}
    )
    bias: bool = field(
        default=False,
        metadata={"help": "Bias in the router and in all matrices of the routed experts (gpt-oss); trained."},
    )
    score: Score = field(
        default="softmax",
        metadata={"help": "Function from the router's logits to scores: softmax over the experts, or sigmoid of each."},
    )
    normalise: bool = field(
        default=True, metadata={"help": "Divide the scores of a token's top_k experts by their sum."}
    )
    scale_input: bool = field(
        default=False,
        metadata={"help": "The weights multiply the inputs of the experts instead of their outputs (Llama 4)."},
    )
    weight_scale: float = field(
        default=1.0, metadata={"help": "The weights are multiplied by this (DeepSeek's routed scaling factor)."}
    )
    n_groups: int = field(
        default=1, metadata={"help": "Number of equal groups of consecutive experts, for example one for each node."}
    )
    groups_per_token: int = field(
        default=1, metadata={"help": "Number of groups with the best scores from which a token picks experts."}
    )
    capacity_factor: float = field(
        default=0.0,
        metadata={
            "help": "An expert computes at most ceil(capacity_factor * tokens * top_k / n_experts) tokens of a "
            "sequence and drops later ones; 0: no limit."
        },
    )
    bias_rate: float = field(
        default=0.001,
        metadata={
            "help": "Balancing without a loss: after each step the selection bias of an expert, which does not affect "
            "its weight, is raised by this if its load is below the mean and lowered if it is above; 0: no bias."
        },
    )
    aux_loss: float = field(
        default=0.0, metadata={"help": "Coefficient of the balance loss, which is 1 for a uniform load; 0: none."}
    )
    aux_scope: AuxScope = field(
        default="sequence",
        metadata={
            "help": "sequence: the load of each sequence is balanced; batch: the load of the global batch, counted in "
            "the previous step."
        },
    )
    z_loss: float = field(
        default=0.0,
        metadata={
            "help": "Coefficient of the mean squared log-sum-exp of the router's logits, which keeps them small."
        },
    )

    force_balance: bool = field(
        default=False,
        metadata={
            "help": "The experts of a token are drawn at random, from seed, step, sample, layer and position, instead "
            "of picked by score: for benchmarks with an even load, and for verify in 16 bits."
        },
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "dense_layers", tuple(self.dense_layers))  # files have lists

    def in_layer(self, layer: int) -> bool:
        """Return whether layer number `layer`, from 0, has experts."""
        return layer >= self.first_dense and (layer + 1) % self.interval == 0 and layer not in self.dense_layers

    @property
    def movable_together(self) -> int:
        """Number of consecutive experts between which experts may be exchanged: with node-limited routing the experts
        of one group, which are on one node, otherwise all."""
        return self.n_experts // (self.n_groups if self.groups_per_token < self.n_groups else 1)

    @property
    def shared_width(self) -> int:
        """Inner width of the network of shared experts, 0 without them."""
        return self.d_shared or self.n_shared * self.d_ffn

    @property
    def keeps_load(self) -> bool:
        """Return whether the balance loss needs the load of the previous step."""
        return self.aux_loss > 0 and self.aux_scope == "batch"

    def capacity(self, n_tokens: int) -> int:
        """Return the maximum tokens of a sequence that an expert computes: ceil(factor T K / E) (GShard, arXiv
        2006.16668, section 2.2, with a sequence as the group)."""
        return ceil(self.exact_capacity(n_tokens))

    def exact_capacity(self, n_tokens: Any) -> Any:
        """Return `capacity` before rounding up; `n_tokens` may be a float64 tensor."""
        return self.capacity_factor * n_tokens * self.top_k / self.n_experts

    def problems(self, n_layers: int, max_seq_len: int) -> Iterator[str]:
        """Yield every broken rule, for a model of `n_layers` layers and sequences of up to `max_seq_len` tokens."""
        experts, k, groups = self.n_experts, self.top_k, self.n_groups
        sizes = ("n_experts", "top_k", "d_ffn", "n_groups", "groups_per_token", "interval")
        broken = [name for name in sizes if getattr(self, name) < 1]
        yield from (f"moe.{name}={getattr(self, name)} is not positive; valid: 1 or more" for name in broken)
        at_least_zero = ("n_shared", "d_shared", "first_dense", "capacity_factor", "bias_rate", "aux_loss", "z_loss")
        for name in at_least_zero:
            if getattr(self, name) < 0:
                drops = ", and a capacity below one token drops everything" if name == "capacity_factor" else ""
                yield f"moe.{name}={getattr(self, name):g} is negative{drops}; valid: 0 (off) or more"
        for name, literal in (("score", Score), ("aux_scope", AuxScope)):
            if getattr(self, name) not in get_args(literal):
                yield f"moe.{name}={getattr(self, name)!r} is not known; valid: {', '.join(get_args(literal))}"
        if not self.weight_scale > 0:
            yield f"moe.weight_scale={self.weight_scale:g} is not positive; usual: 1 to 2.5"
        if self.first_dense >= n_layers:
            yield (
                f"moe.first_dense={self.first_dense} leaves none of n_layers={n_layers} layers with experts; "
                f"valid: 0 to {n_layers - 1}"
            )
        if broken:
            return
        yield from self._shared_and_dense_problems(n_layers)
        if k > experts:
            yield f"moe.top_k={k} is more than moe.n_experts={experts}; valid: 1 to {experts}"
        if k == 1 and self.normalise:
            yield (
                "moe.top_k=1 with moe.normalise=true makes every weight 1, so that the router would learn nothing from "
                "the loss; valid: moe.normalise=false, or moe.top_k of 2 or more"
            )
        if problem := division_problem("moe.n_groups", groups, experts, f"moe.n_experts={experts}"):
            yield problem
        elif self.groups_per_token > groups:
            yield (
                f"moe.groups_per_token={self.groups_per_token} is more than moe.n_groups={groups}; valid: 1 to {groups}"
            )
        elif k <= experts and self.groups_per_token * (experts // groups) < k:
            size = experts // groups
            yield (
                f"moe.groups_per_token={self.groups_per_token} leaves a token {self.groups_per_token} x {size} = "
                f"{self.groups_per_token * size} experts, fewer than moe.top_k={k}; valid: {ceil(k / size)} to {groups}"
            )
        room = self.capacity_factor * max_seq_len * k / experts
        if 0 < room < 1:
            yield (
                f"moe.capacity_factor={self.capacity_factor:g} gives an expert room for {room:.2g} tokens of the "
                f"longest sequence ({self.capacity_factor:g} * {max_seq_len} * {k} / {experts}), so that nearly all "
                "would be dropped; usual: 1 to 2, or 0 to drop none"
            )

    def _shared_and_dense_problems(self, n_layers: int) -> Iterator[str]:
        if self.d_shared and not self.n_shared:
            yield f"moe.d_shared={self.d_shared} without shared experts; valid: moe.n_shared of 1 or more, or 0 here"
        if self.shared_gate and not self.shared_width:
            yield "moe.shared_gate=true without shared experts has nothing to multiply; set moe.n_shared to 1 or more"
        outside = sorted(layer for layer in set(self.dense_layers) if not 0 <= layer < n_layers)
        if outside:
            yield f"moe.dense_layers has {', '.join(map(str, outside))}; valid: layers 0 to {n_layers - 1}"
        elif self.first_dense < n_layers and not any(map(self.in_layer, range(n_layers))):
            yield (
                f"moe.first_dense={self.first_dense}, moe.interval={self.interval} and moe.dense_layers="
                f"{list(self.dense_layers)} leave none of n_layers={n_layers} layers with experts; fewer dense layers, "
                "or no [model.moe]"
            )


@dataclass(frozen=True, kw_only=True)
class LatentAttentionSpec:
    """Multi-head latent attention: keys and values are made from one narrow vector a token, queries from another."""

    kv_rank: int = field(metadata={"help": "Width of the vector that keys and values are made from."})
    q_rank: int = field(
        default=0,
        metadata={"help": "Width of the vector that queries are made from; 0: from the residual stream itself."},
    )
    nope_dim: int = field(metadata={"help": "Elements of a query and key head that are not rotated."})
    rope_dim: int = field(
        metadata={"help": "Elements of a query head that are rotated, and of the one rotated key that all heads share."}
    )
    v_dim: int = field(metadata={"help": "Width of a value head; model.head_dim has to be equal to it."})

    def problems(self) -> Iterator[str]:
        """Yield every broken rule, one sentence each."""
        for name in ("kv_rank", "nope_dim", "rope_dim", "v_dim"):
            if getattr(self, name) < 1:
                yield f"latent_attention.{name}={getattr(self, name)} is not positive; valid: 1 or more"
        if self.q_rank < 0:
            yield f"latent_attention.q_rank={self.q_rank} is negative; valid: 0 (none) or more"
        if self.v_dim > self.nope_dim + self.rope_dim:
            yield (
                f"latent_attention.v_dim={self.v_dim} is more than nope_dim + rope_dim = "
                f"{self.nope_dim + self.rope_dim}; valid: 1 to {self.nope_dim + self.rope_dim}"
            )
        if self.rope_dim % 2:
            yield (
                f"latent_attention.rope_dim={self.rope_dim} is odd, and rope turns pairs of elements; "
                f"valid: {self.rope_dim - 1 or 2}, {self.rope_dim + 1}"
            )
