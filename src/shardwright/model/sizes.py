"""The sizes and choices that define a decoder, without the parameters that follow from them; no torch.

`model.modules` makes rows of parameters from these fields, and `model.spec.ModelSpec` counts the rows.
"""

import math
from dataclasses import dataclass, field
from typing import Literal

from shardwright.model.linear_sizes import LinearAttentionSpec
from shardwright.model.lora_sizes import LoraSpec
from shardwright.model.mup import MupSpec
from shardwright.model.sections import LatentAttentionSpec, MoESpec, RopeScaling

Norm = Literal["rmsnorm", "layernorm"]
NormPosition = Literal["before", "after", "both"]
Activation = Literal["swiglu", "swiglu_clamped", "geglu", "geglu_tanh", "gelu", "gelu_tanh", "relu2"]
GATED = ("swiglu", "swiglu_clamped", "geglu", "geglu_tanh")
"""The activations with two matrices in, gate and up; the others have only up."""
Positions = Literal["rope", "learned"]


@dataclass(frozen=True, kw_only=True)
class ModelSizes:
    """The fields of a `ModelSpec`, and the numbers that follow from them alone."""

    family: str = field(
        default="decoder",
        metadata={"help": "Family of models, which defines the layers: decoder, or one registered by an extension."},
    )
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
    norm_position: NormPosition = field(
        default="before",
        metadata={
            "help": "before: a branch reads the norm of the residual stream; after: it reads the residual stream, "
            "and the norm of its output is added (OLMo 2); both: two norms (Gemma 2)."
        },
    )
    parallel_branches: bool = field(
        default=False,
        metadata={
            "help": "Attention and the feed-forward network read one norm, and both outputs are added together: "
            "x + attention(norm x) + ffn(norm x) (Cohere)."
        },
    )
    norm_offset: bool = field(
        default=False, metadata={"help": "The weights of RMSNorms are stored as w and multiply as 1 + w (Gemma)."}
    )
    norm_bias: bool = field(
        default=True, metadata={"help": "LayerNorms have a bias; false: only a weight. RMSNorms never have one."}
    )
    activation: Activation = field(
        default="swiglu",
        metadata={
            "help": "swiglu: down(silu(gate(x)) * up(x)); geglu, geglu_tanh: gelu instead of silu (Gemma: geglu_tanh); "
            "gelu, gelu_tanh: down(gelu(up(x))); relu2: down(relu(up(x))^2). gelu is exact, and gelu_tanh its "
            "approximation by tanh, as in GPT-2. swiglu_clamped: down(g sigmoid(1.702 g) * (u + 1)), with g = gate(x) "
            "up to 7 and u = up(x) within -7 and 7 (gpt-oss)."
        },
    )
    positions: Positions = field(
        default="rope",
        metadata={"help": "rope: queries and keys are rotated; learned: a trained vector a position is added."},
    )
    rope_theta: float = field(
        default=10000.0, metadata={"help": "Base of the rotary frequencies; not used with learned positions."}
    )
    rope_scaling: RopeScaling | None = field(
        default=None, metadata={"help": "Scaling of the rotary frequencies for longer contexts, or none."}
    )
    rope_fraction: float = field(
        default=1.0,
        metadata={
            "help": "The first rope_fraction * head_dim elements of a query and key head are rotated (GLM-4: 0.5; "
            "Phi-4-mini: 0.75)."
        },
    )
    qk_norm: bool = field(
        default=False, metadata={"help": "RMSNorm of every query and key head before the rotation (Qwen3)."}
    )
    qk_norm_whole: bool = field(
        default=False,
        metadata={"help": "With qk_norm: one RMSNorm over all heads of a token instead of each head (OLMo 2)."},
    )
    qk_norm_heads: bool = field(
        default=False,
        metadata={
            "help": "With qk_norm: each head has a LayerNorm without bias and weights of its own (Command R+), instead "
            "of an RMSNorm with the weights of all heads."
        },
    )
    qk_norm_weight: bool = field(
        default=True,
        metadata={
            "help": "With qk_norm: false: the RMSNorms have no weight, and only layers that rotate have them (Llama 4)."
        },
    )
    embedding_scale: float = field(
        default=1.0,
        metadata={"help": "The embedding of a token is multiplied by this (Gemma: sqrt(d_model); Granite)."},
    )
    residual_scale: float = field(
        default=1.0, metadata={"help": "The output of each branch is multiplied by this before it is added (Granite)."}
    )
    attention_scale: float = field(
        default=0.0,
        metadata={"help": "Attention scores q k are multiplied by this (Granite); 0: 1 / sqrt(width of a query head)."},
    )
    logit_divisor: float = field(default=1.0, metadata={"help": "The logits are divided by this (Granite, MiniCPM)."})
    bias: bool = field(default=False, metadata={"help": "Bias in all linears of the layers; the head has none."})
    qkv_bias: bool = field(
        default=False, metadata={"help": "Bias in the projections to queries, keys and values only (Qwen2)."}
    )
    nope_interval: int = field(
        default=0,
        metadata={"help": "With rope: in every n-th layer nothing is rotated (SmolLM3: 4); 0: all layers rotate."},
    )
    nope_layers: tuple[int, ...] = field(
        default=(), metadata={"help": "With rope: numbers of further layers, from 0, in which nothing is rotated."}
    )
    temperature_scale: float = field(
        default=0.0,
        metadata={
            "help": "In layers that rotate nothing, queries at position p are multiplied by 1 + temperature_scale * "
            "ln(1 + floor((p + 1) / temperature_interval)) (Llama 4: 0.1); 0: they are not."
        },
    )
    temperature_interval: int = field(
        default=0, metadata={"help": "Positions between two values of that factor (Llama 4: 8192)."}
    )
    window: int = field(
        default=0,
        metadata={
            "help": "A token of a windowed layer attends to the last `window` tokens, itself included (Mistral); "
            "0: no layer has a window."
        },
    )
    window_chunked: bool = field(
        default=False,
        metadata={
            "help": "With window: sequences, or documents, are divided into chunks of `window` tokens, and a token of "
            "a windowed layer attends to its chunk alone (Llama 4: 8192)."
        },
    )
    global_interval: int = field(
        default=0,
        metadata={"help": "With window: every n-th layer attends to all tokens (Gemma 2: 2, Gemma 3: 6); 0: no layer."},
    )
    first_window: int = field(
        default=0, metadata={"help": "With window: layers before this number, from 0, have no window (Qwen2)."}
    )
    global_layers: tuple[int, ...] = field(
        default=(), metadata={"help": "With window: numbers of further layers, from 0, that attend to all tokens."}
    )
    window_rope_theta: float = field(
        default=0.0,
        metadata={
            "help": "With window and rope: base of the rotary frequencies in windowed layers, without rope_scaling "
            "(Gemma 3: 10000); 0: as in other layers."
        },
    )
    attention_sinks: bool = field(
        default=False, metadata={"help": "Each head has a trained logit without a value in its softmax (gpt-oss)."}
    )
    attention_softcap: float = field(
        default=0.0,
        metadata={"help": "Attention scores s become softcap * tanh(s / softcap) (Gemma 2: 50); 0: as they are."},
    )
    logit_softcap: float = field(
        default=0.0, metadata={"help": "Logits z become softcap * tanh(z / softcap) (Gemma 2: 30); 0: as they are."}
    )
    attention_gate: bool = field(
        default=False,
        metadata={
            "help": "The output of each head is multiplied by sigmoid(x W), a second half of the projection to queries "
            "(Qwen3-Next)."
        },
    )
    o_bias: bool = field(default=False, metadata={"help": "Bias in the projection of attention's output (gpt-oss)."})
    tied_embedding: bool = field(default=False, metadata={"help": "The head uses the embedding's matrix."})
    dropout: float = field(
        default=0.0,
        metadata={"help": "Probability of dropping an element of the embedding and of each residual branch."},
    )
    moe: MoESpec | None = field(
        default=None, metadata={"help": "Mixture of experts instead of the feed-forward network, or none."}
    )
    latent_attention: LatentAttentionSpec | None = field(
        default=None, metadata={"help": "Multi-head latent attention (DeepSeek), or none."}
    )
    linear_attention: LinearAttentionSpec | None = field(
        default=None,
        metadata={"help": "Linear attention (gated delta net) in a pattern with full attention (Qwen3-Next), or none."},
    )
    mtp_modules: int = field(
        default=0,
        metadata={
            "help": "Multi-token prediction modules (DeepSeek-V3 has 1): module k, a layer of its own, predicts from a "
            "token the one k + 1 places later, in training only; 0: none."
        },
    )
    mtp_weight: float = field(
        default=0.3,
        metadata={
            "help": "The mean loss of the multi-token prediction modules is multiplied by this and added to the loss "
            "(DeepSeek-V3: 0.3, and 0.1 for the last third of its tokens)."
        },
    )
    init_std: float = field(default=0.02, metadata={"help": "Standard deviation of the initial values of matrices."})
    mup: MupSpec | None = field(
        default=None,
        metadata={
            "help": "muP: initial values, learning rates and multipliers follow width and depth from a base model, or "
            "none. A run file may also have it as the section [mup]."
        },
    )
    lora: LoraSpec | None = field(
        default=None, metadata={"help": "Adapters of matrices, with all other parameters frozen, or none."}
    )

    def __post_init__(self) -> None:
        for name in ("nope_layers", "global_layers"):  # files have lists
            object.__setattr__(self, name, tuple(getattr(self, name)))

    def has_experts(self, layer: int) -> bool:
        """Return whether layer number `layer` has a mixture of experts instead of its feed-forward network. The block
        of a multi-token prediction module has the same kind of network as the last layer."""
        return self.moe is not None and self.moe.in_layer(min(layer, self.n_layers - 1))

    def rotates(self, layer: int) -> bool:
        """Return whether layer number `layer`, from 0, rotates queries and keys."""
        is_nth = self.nope_interval and (layer + 1) % self.nope_interval == 0
        return self.positions == "rope" and not is_nth and layer not in self.nope_layers

    def norms_heads(self, layer: int) -> bool:
        """Return whether layer number `layer`, from 0, norms queries and keys."""
        return self.qk_norm and (self.qk_norm_weight or self.rotates(layer))

    def is_linear(self, layer: int) -> bool:
        """Return whether layer number `layer`, from 0, has linear attention. Blocks of multi-token prediction modules
        have full attention."""
        linear = self.linear_attention
        if linear is None or layer >= self.n_layers:
            return False
        return not (linear.full_interval and (layer + 1) % linear.full_interval == 0)

    @property
    def n_linear_layers(self) -> int:
        """Layers with linear attention."""
        return sum(map(self.is_linear, range(self.n_layers)))

    @property
    def scan_flops(self) -> int:
        """FLOPs of a token in the scans of all linear layers, forward."""
        return 0 if self.linear_attention is None else self.n_linear_layers * self.linear_attention.scan_flops

    def layer_window(self, layer: int) -> int:
        """Return the window of layer number `layer`, from 0; 0: it attends to all tokens."""
        is_global = self.global_interval and (layer + 1) % self.global_interval == 0
        return 0 if layer < self.first_window or is_global or layer in self.global_layers else self.window

    def is_chunked(self, layer: int) -> bool:
        """Return whether layer number `layer`, from 0, attends to chunks of its window."""
        return self.window_chunked and self.layer_window(layer) > 0

    def attended(self, layer: int, seq_len: float) -> float:
        """Return the length of the sequence over which full causal attention has as many scores as layer number
        `layer` over `seq_len` tokens: w (2 s - w) / s with a window w below the s tokens, (n w^2 + r^2) / s with chunks
        of w tokens, n whole ones and one of r, 0 in a linear layer, otherwise s."""
        if self.is_linear(layer):
            return 0.0
        window = self.layer_window(layer)
        if not 0 < window < seq_len:
            return seq_len
        if self.window_chunked:
            n, rest = divmod(seq_len, window)
            return (n * window**2 + rest**2) / seq_len
        return window * (2 * seq_len - window) / seq_len

    def mean_attended(self, seq_len: float) -> float:
        """Return the mean of `attended` over all blocks."""
        if not self.window and self.linear_attention is None:
            return seq_len
        return sum(self.attended(layer, seq_len) for layer in range(self.n_blocks)) / self.n_blocks

    def kept_share(self, length: float) -> float:
        """Return the share of the keys of `length` tokens that a cache keeps, on average over the layers."""
        full = [layer for layer in range(self.n_layers) if not self.is_linear(layer)]
        kept = [min(length, self.layer_window(layer) or length) for layer in full]
        return sum(kept) / (length * self.n_layers)

    @property
    def norm_before(self) -> bool:
        """Return whether a branch reads the norm of the residual stream."""
        return self.norm_position != "after"

    @property
    def norm_after(self) -> bool:
        """Return whether the output of a branch has a norm."""
        return self.norm_position != "before"

    @property
    def gated(self) -> bool:
        """Return whether networks have two matrices in, gate and up."""
        return self.activation in GATED

    @property
    def width_ratio(self) -> float:
        """d_model / base_width; 1 without muP."""
        return self.d_model / self.mup.base_width if self.mup and self.mup.base_width else 1.0

    @property
    def depth_ratio(self) -> float:
        """n_layers / base_depth; 1 without muP."""
        return self.n_layers / self.mup.base_depth if self.mup and self.mup.base_depth else 1.0

    @property
    def branch_scale(self) -> float:
        """The factor of a branch's output: `residual_scale`, and with muP 1 / d."""
        return self.residual_scale / self.depth_ratio

    @property
    def logits_divided_by(self) -> float:
        """The divisor of the logits: `logit_divisor`, and with muP m."""
        return self.logit_divisor * self.width_ratio

    @property
    def score_scale(self) -> float:
        """The factor of attention scores; 0: 1 / sqrt(width of a query head). With `base_head_dim` it falls as 1 /
        head_dim, from its value in the base model."""
        if self.mup is None or not self.mup.base_head_dim:
            return self.attention_scale
        base = self.mup.base_head_dim
        return (self.attention_scale or 1 / math.sqrt(base)) * base / self.head_dim

    @property
    def query_scale(self) -> float:
        """The factor of queries with which kernels that divide scores by sqrt(qk_dim) apply `score_scale`."""
        return self.score_scale * math.sqrt(self.qk_dim) if self.score_scale else 1.0

    @property
    def n_blocks(self) -> int:
        """The number of layers and of multi-token prediction modules, whose blocks are numbered after the layers."""
        return self.n_layers + self.mtp_modules

    @property
    def n_expert_layers(self) -> int:
        """Layers with a mixture of experts."""
        return sum(map(self.has_experts, range(self.n_layers)))

    @property
    def draws(self) -> bool:
        """Return whether training draws random numbers, which needs random keys."""
        of_adapters = self.lora is not None and self.lora.dropout > 0
        return self.dropout > 0 or of_adapters or (self.moe is not None and self.moe.force_balance)

    @property
    def qk_dim(self) -> int:
        """Width of a query or key head."""
        latent = self.latent_attention
        return self.head_dim if latent is None else latent.nope_dim + latent.rope_dim

    @property
    def rope_dim(self) -> int:
        """Elements of a query or key head that are rotated."""
        latent = self.latent_attention
        return int(self.head_dim * self.rope_fraction) if latent is None else latent.rope_dim
