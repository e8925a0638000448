"""The sizes and choices that define a decoder, and its parameter and FLOP counts; no torch.

Notation of the formulas: L layers, h d_model, H heads, K kv heads, c head_dim, f d_ffn, V vocab_size,
s sequence length; of mixtures E experts, k experts per token, g d_ffn of an expert, S shared experts; of latent
attention r widths of the latent vectors, n and p unrotated and rotated elements of a head, v width of a value head.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import MISSING, dataclass, fields, replace
from typing import get_args

from shardwright.model.linear_sizes import LinearAttentionSpec
from shardwright.model.lora_sizes import GROUPS, LoraSpec, names
from shardwright.model.modules import FAMILIES, can_adapt, layer_rows, rows
from shardwright.model.mup import MupSpec
from shardwright.model.row import Row, stored_bytes
from shardwright.model.sections import LatentAttentionSpec, too_large
from shardwright.model.sizes import Activation, ModelSizes, Norm, NormPosition, Positions
from shardwright.system.errors import ConfigError, checked_constructor, nearest
from shardwright.system.units import division_problem


@checked_constructor(ConfigError)
@dataclass(frozen=True, kw_only=True)
class ModelSpec(ModelSizes):
    """Everything that defines a decoder; `problems()` lists inconsistent values.

    The head never has a bias, and embedding and residual dropout have the same probability. Attention probabilities are
    never dropped (see model/dropout.py).
    """

    def problems(self) -> list[str]:
        """Return every broken rule, each with the value, the rule and valid values; empty if there is none."""
        return list(self._problems())

    def _problems(self) -> Iterator[str]:
        if self.family not in FAMILIES:
            yield f"family={self.family!r} is not known; {nearest(self.family, FAMILIES)}"
            return
        yield from FAMILIES[self.family].problems(self)
        sizes = [size.name for size in fields(self) if size.type is int and size.default is MISSING]
        broken = [name for name in sizes if getattr(self, name) < 1]
        for name in broken:
            yield f"{name}={getattr(self, name)} is not positive; valid: 1 or more"
        linear = () if self.linear_attention is None else too_large(self.linear_attention, "linear_attention.")
        if beyond := [*too_large(self), *(() if self.moe is None else too_large(self.moe, "moe.")), *linear]:
            yield from beyond
            return  # the rules below list divisors
        choices = ("norm", Norm), ("norm_position", NormPosition), ("activation", Activation), ("positions", Positions)
        for name, literal in choices:
            if getattr(self, name) not in get_args(literal):
                yield f"{name}={getattr(self, name)!r} is not known; valid: {', '.join(get_args(literal))}"
        heads, kv_heads = self.n_heads, self.n_kv_heads
        valid = "n_heads" not in broken and "n_kv_heads" not in broken
        if valid and (problem := division_problem("n_kv_heads", kv_heads, heads, f"n_heads={heads}")):
            yield problem
        if self.positions == "rope":
            if self.head_dim > 0 and self.head_dim % 2:
                yield (
                    f"head_dim={self.head_dim} is odd, and rope turns pairs of elements; "
                    f"valid: {self.head_dim - 1 or 2}, {self.head_dim + 1}"
                )
            if self.rope_theta <= 1:
                yield f"rope_theta={self.rope_theta:g} is not greater than 1; usual: 10000 to 1000000"
        yield from self._fraction_problems()
        if self.rope_scaling is not None:
            if self.positions == "learned":
                yield "rope_scaling needs positions='rope'; with positions='learned' nothing is rotated"
            yield from self.rope_scaling.problems()
            yield from self.rope_scaling.factor_problems(self.rope_dim)
        if self.moe is not None:
            yield from self.moe.problems(self.n_layers, self.max_seq_len)
        if self.latent_attention is not None:
            yield from self._latent_problems(self.latent_attention)
        if self.linear_attention is not None:
            yield from self._linear_problems(self.linear_attention)
        if self.bias and (self.moe or self.latent_attention):
            yield "bias=true goes with plain attention and networks; experts have moe.bias, latent attention none"
        if self.qkv_bias and self.bias:
            yield "qkv_bias=true with bias=true says the same twice: bias has all linears; leave qkv_bias out"
        if self.qkv_bias and self.latent_attention:
            yield "qkv_bias=true goes with plain attention; latent attention has no biases"
        yield from self._nope_problems()
        yield from self._training_problems()
        yield from self._norm_and_scale_problems()
        yield from self._window_problems()
        if self.mup is not None:
            yield from self._mup_problems(self.mup)

    def _mup_problems(self, mup: MupSpec) -> Iterator[str]:
        yield from mup.problems()
        if mup.base_depth and self.family != "decoder":
            yield f"mup.base_depth goes with family='decoder', whose branches are scaled; family is {self.family!r}"
        for name in ("latent_attention", "linear_attention"):
            if mup.base_head_dim and getattr(self, name) is not None:
                yield f"mup.base_head_dim goes with plain attention in every layer; leave it out, or {name}"

    def folded(self) -> "ModelSpec":
        """Return the model without muP that computes the same from the same weights: other fields have its multipliers,
        and its initial values and learning rates differ."""
        return replace(
            self,
            mup=None,
            residual_scale=self.branch_scale,
            logit_divisor=self.logits_divided_by,
            attention_scale=self.score_scale,
        )

    def lora_problems(self) -> list[str]:
        """Return every broken rule of the adapters, for a model without other problems, one sentence each."""
        return [] if self.lora is None else list(self._lora_problems(self.lora))

    def _lora_problems(self, lora: LoraSpec) -> Iterator[str]:
        if lora.rank < 1:
            yield f"lora.rank={lora.rank} is not positive; valid: 1 or more, or 0 for no adapters"
            return
        if self.mup is not None:
            yield "lora goes with a model without muP: no rule scales the learning rate of adapters; leave one out"
        if not 0 < lora.alpha < math.inf:
            yield f"lora.alpha={lora.alpha:g} is not a positive number; usual: lora.rank to 2 lora.rank"
        if not 0 <= lora.dropout < 1:
            yield f"lora.dropout={lora.dropout:g} is not a probability below 1; valid: 0 <= lora.dropout < 1"
        matrices: dict[str, Row] = {}
        for layer in range(self.n_blocks):
            matrices |= {row.matrix: row for row in layer_rows(self, layer) if can_adapt(row) and not row.adapter}
        groups = [group for group in GROUPS if any(names(group, module) for module in matrices)]
        if not lora.targets:
            yield f"lora.targets=[] names no matrix; {nearest('', [*groups, *matrices])}"
        for target in lora.targets:
            if any(names(target, module) for module in matrices):
                continue
            if target == "ffn" and self.moe is not None:
                others = [other for other in lora.targets if other not in ("ffn", "experts")]
                yield (
                    f"lora.targets has 'ffn', and the feed-forward networks of this model are routed experts, which "
                    f"'experts' names; set lora.targets={[*others, 'experts']}, or leave 'ffn' out"
                )
            else:
                yield (
                    f"lora.targets has {target!r}, which names no matrix of this model; "
                    f"{nearest(target, [*groups, *_endings(matrices)])}"
                )
        routed = [name for name, row in matrices.items() if row.split == "experts" and lora.takes(name)]
        if lora.dropout and routed:
            yield (
                f"lora.dropout={lora.dropout:g} with an adapter of {routed[0]}: peft has no dropout of adapters of "
                f"experts; set lora.dropout=0, or leave experts out of lora.targets"
            )
        if lora.dora and routed:
            yield (
                f"lora.dora=true with an adapter of {routed[0]}: peft has no DoRA of experts; set lora.dora=false, or "
                f"leave experts out of lora.targets"
            )
        if lora.dora and lora.dropout:
            yield (
                f"lora.dora=true with lora.dropout={lora.dropout:g}: DoRA scales the output of the base too, which "
                f"reads the whole input; set lora.dropout=0, or lora.dora=false"
            )
        small = [(min(row.shape[-2:]), name) for name, row in matrices.items() if lora.takes(name)]
        if small and lora.rank > min(small)[0]:
            side, name = min(small)
            size = " x ".join(map(str, matrices[name].shape[-2:]))
            yield (
                f"lora.rank={lora.rank} is above the smaller side of {matrices[name].name}, {size}; valid: 1 to "
                f"{side}, or other lora.targets"
            )

    def _nope_problems(self) -> Iterator[str]:
        if not 0 <= self.nope_interval <= self.n_layers:
            yield (
                f"nope_interval={self.nope_interval} for {self.n_layers} layers; valid: 0 (all layers rotate) to "
                f"{self.n_layers}, usual: 4"
            )
        for name in ("nope_interval", "nope_layers"):
            if getattr(self, name) and self.latent_attention:
                yield f"{name} goes with plain attention; latent attention rotates in every layer"
            if getattr(self, name) and self.positions != "rope":
                yield f"{name} goes with positions='rope'; with positions='learned' no layer rotates"
        for name in ("nope_layers", "global_layers"):
            if outside := sorted(layer for layer in set(getattr(self, name)) if not 0 <= layer < self.n_layers):
                yield f"{name} has {', '.join(map(str, outside))}; valid: layers 0 to {self.n_layers - 1}"
        yield from self._temperature_problems()

    def _temperature_problems(self) -> Iterator[str]:
        scale, interval = self.temperature_scale, self.temperature_interval
        if not 0 <= scale < math.inf or interval < 0 or bool(scale) != bool(interval):
            yield (
                f"temperature_scale={scale:g} and temperature_interval={interval}; valid: both positive, usual: 0.1 "
                "and 8192, or both 0"
            )
        elif scale and (self.latent_attention or self.linear_attention or self.family != "decoder"):
            yield "temperature_scale goes with family='decoder' and plain attention in every layer"
        elif scale and all(map(self.rotates, range(self.n_layers))):
            yield (
                f"temperature_scale={scale:g} goes with layers that rotate nothing, and all rotate; set nope_interval "
                "or nope_layers, or leave it out"
            )

    def _training_problems(self) -> Iterator[str]:
        if self.mtp_modules < 0:
            yield f"mtp_modules={self.mtp_modules} is negative; valid: 0 (none) or more"
        if not self.mtp_weight > 0:
            yield f"mtp_weight={self.mtp_weight:g} is not positive; usual: 0.1 to 0.3; for no module mtp_modules=0"
        if not 0 <= self.dropout < 1:
            yield f"dropout={self.dropout:g} is not a probability below 1; valid: 0 <= dropout < 1"
        if not self.norm_eps > 0:
            yield f"norm_eps={self.norm_eps:g} is not positive; usual: 1e-6 to 1e-5"
        if not self.init_std > 0:
            yield f"init_std={self.init_std:g} is not positive; usual: 0.02"

    def _fraction_problems(self) -> Iterator[str]:
        fraction, width = self.rope_fraction, self.head_dim
        if not 0 < fraction <= 1:
            yield f"rope_fraction={fraction:g} is not a fraction of a head; valid: more than 0, up to 1 (all of it)"
        elif fraction != 1 and (self.latent_attention is not None or self.positions != "rope"):
            yield (
                "rope_fraction goes with positions='rope' and plain attention; latent attention rotates the elements "
                "of latent_attention.rope_dim"
            )
        elif fraction != 1 and width > 1 and (self.rope_dim % 2 or not self.rope_dim):
            even = [n for n in (self.rope_dim - 1, self.rope_dim + 1, 2) if 0 < n <= width and n % 2 == 0]
            valid = ", ".join(f"{n / width:g} ({n} elements)" for n in dict.fromkeys(even))
            yield (
                f"rope_fraction={fraction:g} rotates {self.rope_dim} of head_dim={width} elements, and rope turns "
                f"pairs of elements; nearest valid: {valid}"
            )

    def _norm_and_scale_problems(self) -> Iterator[str]:
        if self.parallel_branches:
            yield from self._parallel_problems()
        if self.norm_offset and self.norm != "rmsnorm":
            yield f"norm_offset=true goes with norm='rmsnorm'; norm is {self.norm!r}"
        if not self.norm_bias and self.norm != "layernorm":
            yield f"norm_bias=false goes with norm='layernorm'; {self.norm} has no bias, so leave norm_bias out"
        if self.qk_norm_whole and not self.qk_norm:
            yield "qk_norm_whole=true without qk_norm=true would have no effect; set both, or leave qk_norm_whole out"
        if self.qk_norm_heads and (not self.qk_norm or self.qk_norm_whole or not self.qk_norm_weight):
            yield (
                "qk_norm_heads=true is a LayerNorm of each head with weights: set qk_norm=true and leave out "
                "qk_norm_whole and qk_norm_weight, or leave qk_norm_heads out"
            )
        if not self.qk_norm_weight and (not self.qk_norm or self.qk_norm_whole):
            yield (
                "qk_norm_weight=false goes with norms of each head: set qk_norm=true and leave qk_norm_whole out, or "
                "leave qk_norm_weight out"
            )
        for name in ("embedding_scale", "residual_scale", "logit_divisor"):
            if not 0 < getattr(self, name) < math.inf:
                yield f"{name}={getattr(self, name):g} is not a positive number; without scaling it is 1"
        if not 0 <= self.attention_scale < math.inf:
            usual = 1 / math.sqrt(max(self.qk_dim, 1))
            yield (
                f"attention_scale={self.attention_scale:g} is not a positive number; valid: more than 0, usual "
                f"{usual:.3g}, or 0 for exactly 1 / sqrt({self.qk_dim})"
            )
        if self.attention_scale and self.latent_attention is not None:
            yield "attention_scale goes with plain attention; latent_attention scales its scores by rope_scaling"

    def _parallel_problems(self) -> Iterator[str]:
        if self.norm_position != "before":
            yield f"parallel_branches=true goes with norm_position='before'; norm_position is {self.norm_position!r}"
        for name in ("moe", "latent_attention", "linear_attention"):
            if getattr(self, name) is not None:
                yield f"parallel_branches=true goes with plain attention and dense networks; leave {name} out"
        if self.family != "decoder":
            yield f"parallel_branches goes with family='decoder'; {self.family!r} defines its own layers"

    def _window_problems(self) -> Iterator[str]:
        if not 0 <= self.window <= self.max_seq_len:
            yield (
                f"window={self.window} for sequences of max_seq_len={self.max_seq_len} tokens; valid: 0 (none) to "
                f"{self.max_seq_len}"
            )
        for name in ("global_interval", "first_window"):
            if not 0 <= getattr(self, name) <= self.n_layers:
                yield f"{name}={getattr(self, name)} for {self.n_layers} layers; valid: 0 to {self.n_layers}"
        for name in ("global_interval", "first_window", "global_layers", "window_chunked"):
            if getattr(self, name) and not self.window:
                yield f"{name}={getattr(self, name)} without a window has no effect; set window, or leave {name} out"
        if self.global_layers and self.window and not any(map(self.layer_window, range(self.n_layers))):
            yield f"global_layers={[*self.global_layers]} leaves no layer with the window; fewer layers, or window=0"
        if self.window_rope_theta:
            if self.family != "decoder":
                yield f"window_rope_theta goes with family='decoder'; layers of {self.family!r} take one rotary table"
            if not self.window or self.positions != "rope":
                yield "window_rope_theta goes with a window and positions='rope'; otherwise it has no effect"
            if self.window_rope_theta <= 1:
                yield f"window_rope_theta={self.window_rope_theta:g} is not greater than 1; usual: 10000, or 0"
        for name in ("attention_softcap", "logit_softcap"):
            if not 0 <= getattr(self, name) < math.inf:
                yield f"{name}={getattr(self, name):g} is not a positive number; usual: 30 or 50, or 0 for none"
        names = "window", "attention_softcap", "attention_sinks", "attention_gate", "o_bias"
        special = [name for name in names if getattr(self, name)]
        if special and self.latent_attention is not None:
            yield f"{special[0]} goes with plain attention; latent attention attends to all tokens, without biases"
        if self.o_bias and self.bias:
            yield "o_bias=true with bias=true says the same twice: bias has all linears; leave o_bias out"

    def _linear_problems(self, linear: LinearAttentionSpec) -> Iterator[str]:
        yield from linear.problems(self.n_layers)
        if self.family != "decoder":
            yield f"linear_attention goes with family='decoder'; layers of {self.family!r} choose their own attention"
        if self.latent_attention is not None:
            yield "linear_attention goes with plain attention in the other layers; leave latent_attention out"
        if self.window:
            yield f"linear_attention goes with layers that attend to all tokens; window is {self.window}, leave it out"
        if self.bias:
            yield "linear_attention has no biases; for biases of q, k and v in the other layers set qkv_bias"

    def _latent_problems(self, latent: LatentAttentionSpec) -> Iterator[str]:
        yield from latent.problems()
        if self.positions != "rope":
            yield f"latent_attention needs positions='rope'; positions is {self.positions!r}"
        if self.n_kv_heads != self.n_heads:
            yield (
                f"n_kv_heads={self.n_kv_heads} with latent_attention, which makes keys and values for every query "
                f"head; valid: {self.n_heads} (n_heads)"
            )
        if self.head_dim != latent.v_dim:
            yield f"head_dim={self.head_dim} is not latent_attention.v_dim={latent.v_dim}; valid: {latent.v_dim}"
        if self.qk_norm:
            yield "qk_norm=true goes with plain attention; latent_attention has norms of its own"

    @property
    def n_parameters(self) -> int:
        """All trained parameters, with the selection biases of experts; a tied embedding counts once."""
        return sum(row.numel for row in rows(self).values() if row.counted)

    @property
    def n_active_parameters(self) -> int:
        """Parameters that one token uses: all parameters except the experts that the router does not pick for it."""
        return sum(self._met(row) for row in rows(self).values() if row.counted)

    @property
    def n_matmul_parameters(self) -> int:
        """Parameters in the matmuls of one token: of the layers, with top_k of the experts, of the head even if it is
        tied, and of multi-token prediction modules, with the head once more for each.

        Embedding lookup, learned positions, norms and biases are not matmuls and are left out.
        """
        once = sum(self._met(row) for row in rows(self).values() if row.matmul)
        return once + self.mtp_modules * self.vocab_size * self.d_model

    @property
    def n_frozen_matmul_parameters(self) -> int:
        """Parameters of `n_matmul_parameters` that are frozen: with adapters all except theirs."""
        if self.lora is None:
            return 0
        return self.n_matmul_parameters - sum(self._met(row) for row in rows(self).values() if row.adapter)

    def layer_matmul_parameters(self, layer: int) -> int:
        """Return the parameters in the matmuls of one token in layer number `layer`."""
        return sum(self._met(row) for row in layer_rows(self, layer) if row.matmul)

    @property
    def n_trained_parameters(self) -> int:
        """Parameters with a gradient: all of them, or with `lora` the adapters."""
        return sum(row.numel for row in rows(self).values() if row.counted and row.trained)

    def frozen_bytes(self, element_bytes: int) -> int:
        """Return the bytes of the parameters without a gradient, `element_bytes` each if they are not quantised."""
        frozen = [row for row in rows(self).values() if row.counted and not row.trained]
        return sum(stored_bytes(row, element_bytes) for row in frozen)

    @property
    def n_experts(self) -> int:
        """Return the number of routed experts of a layer with experts, 0 without experts."""
        return 0 if self.moe is None else self.moe.n_experts

    def _met(self, row: Row) -> int:
        """Return the elements of a parameter that one token uses: for experts, only its top_k ones."""
        if row.split != "experts":
            return row.numel
        assert self.moe is not None
        return row.numel * self.moe.top_k // self.moe.n_experts

    def train_flops_per_token(self, seq_len: float, *, causal: bool = False) -> float:
        """Return the model FLOPs of forward and backward for one token, without recomputation.

        flops = 6 N + 6 L H (q + c) s + 3 F, or 6 N + 3 L H (q + c) s + 3 F with `causal`; with adapters minus 2 Z

        N `n_matmul_parameters`, Z `n_frozen_matmul_parameters`, L `n_blocks`, H query heads, q `qk_dim`, c head_dim
        (equal to q except in latent attention), s `seq_len` in tokens; if attention stays within documents, the mean
        length of a token's document (`split.documents.attended_tokens`); with windows or linear layers the mean of
        `attended` over layers; F `scan_flops` of linear layers. A multiply-add is 2 FLOPs, and the backward pass costs
        two forward passes. The second term is QK^T and the matmul with V: 2 H (q + c) s a token forward over the full
        square of positions; `causal` counts the half that is not masked. Source: PaLM (arXiv 2204.02311) appendix B;
        torchtitan reports MFU by the full square, Megatron-LM today by half of it.
        Ignored: softmax, norms, activations, rotation, embedding lookup, optimizer, the weighted sum of experts'
        outputs, the recomputation inside a fused attention's backward pass, and that nothing before the first adapter
        has a gradient: the first layer does not compute the gradient of the input of its attention.
        """
        square = 6 * self.n_blocks * self.n_heads * (self.qk_dim + self.head_dim) * self.mean_attended(seq_len)
        matmuls = 6 * self.n_matmul_parameters - 2 * self.n_frozen_matmul_parameters
        return float(matmuls + (square / 2 if causal else square) + 3 * self.scan_flops)


def _endings(modules: Iterable[str]) -> list[str]:
    """Return every last part of the names of modules: `q` and `attention.q` for `attention.q`."""
    parts = [module.split(".") for module in modules]
    return list(dict.fromkeys(".".join(names[at:]) for names in parts for at in reversed(range(len(names)))))
