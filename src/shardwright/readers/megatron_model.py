"""The model that options of Megatron-LM describe."""

import ast
import re
from typing import Any

from shardwright.layout.key import MOST_LAYERS
from shardwright.model.linear_sizes import LinearAttentionSpec
from shardwright.model.sections import LatentAttentionSpec, MoESpec, RopeScaling
from shardwright.model.sizes import Norm, Positions
from shardwright.model.spec import ModelSpec
from shardwright.readers.table import Values
from shardwright.system.errors import InputError

TOKENS = {
    r"GPT2BPETokenizer": 50257,
    r"Llama2Tokenizer": 32000,
    r"(^|[-_/])(meta-)?llama-?3": 128256,
    r"(^|[-_/])(meta-)?llama-?2": 32000,
    r"mixtral-8x7b|mistral-7b": 32000,
    r"mixtral-8x22b": 32768,
    r"qwen3|qwen2\.?5": 151936,
    r"deepseek-?v[23]|DeepSeekV2Tokenizer": 129280,
    r"Llama3Tokenizer": 128256,
    r"multiMixV8\S*128k": 131072,
    r"nemotron_2_256k": 256000,
}
"""Pattern of a tokenizer's type or name -> its number of tokens, from the config.json of its model."""


def model_of(values: Values, seq_len: int) -> ModelSpec:
    """Return the model. Adds problems to `values`."""
    if values.given_model is not None:
        return values.given_model
    n_layers = values["num_layers"] or values["encoder_num_layers"] or values.needed("num_layers")
    if n_layers > MOST_LAYERS:
        raise InputError(f"{values.source}: num_layers {n_layers}: valid: at most {MOST_LAYERS}")
    width, heads = values.needed("hidden_size"), values.needed("num_attention_heads")
    latent = _latent(values)
    _refuse_mamba(values)
    d_ffn = values["ffn_hidden_size"] or (int(4 * width * 2 / 3) // 64 * 64 if values["swiglu"] else 4 * width)
    head_dim = values["kv_channels"] or max(width // max(heads, 1), 1)
    groups = values["num_query_groups"] if _grouped(values) else heads
    positions: Positions = "rope" if latent else _positions(values)
    most = values["max_position_embeddings"] or seq_len
    norm: Norm = "rmsnorm" if values["normalization"] == "RMSNorm" else "layernorm"
    biased = values["add_bias_linear"]
    biased = bool(biased if biased is not None else not values["disable_bias_linear"])
    experts = _experts(values, n_layers, d_ffn, biased)
    plain = experts is None and latent is None
    tied = values["share_embeddings_and_output_weights"]
    return ModelSpec(
        n_layers=n_layers,
        d_model=width,
        n_heads=heads,
        n_kv_heads=heads if latent else groups,
        head_dim=latent.v_dim if latent else head_dim,
        d_ffn=d_ffn,
        vocab_size=_vocabulary(values),
        max_seq_len=most,
        norm=norm,
        norm_eps=values["norm_epsilon"] if values.given("norm_epsilon") else values["layernorm_epsilon"],
        norm_offset=(values["apply_layernorm_1p"] or values["layernorm_zero_centered_gamma"]) and norm == "rmsnorm",
        activation=_activation(values),
        positions=positions,
        rope_fraction=values["rotary_percent"] if positions == "rope" and latent is None else 1.0,
        rope_theta=values["rotary_base"],
        rope_scaling=_scaling(values, positions),
        qk_norm=values["qk_layernorm"] and latent is None,
        bias=biased and plain,
        qkv_bias=(values["add_qkv_bias"] and not biased) or (biased and latent is None and not plain),
        o_bias=biased and latent is None and not plain,
        tied_embedding=tied if tied is not None else not values["untie_embeddings_and_output_weights"],
        dropout=values["hidden_dropout"],
        moe=experts,
        latent_attention=latent,
        mtp_modules=values["mtp_num_layers"] or 0,
        mtp_weight=values["mtp_loss_scaling_factor"],
        init_std=values["init_method_std"],
        attention_sinks=values["softmax_type"] == "learnable",
        attention_gate=values["attention_output_gate"] and latent is None,
        linear_attention=_linear_attention(values, n_layers),
        **_windows(values, n_layers),
        **_without_rope(values, n_layers),
    )


def _grouped(values: Values) -> bool:
    """Return whether the groups of queries count: in YAML num_query_groups alone is enough."""
    if values.given("num_query_groups") and not values["group_query_attention"]:
        if not values.settings["num_query_groups"].option.startswith("--"):
            return values.settings["num_query_groups"].value is not None
        values.changes["num_query_groups"] = "without --group-query-attention Megatron-LM gives every head its own keys"
    return bool(values["group_query_attention"])


_FUNCTIONS = {"swiglu": "silu", "squared_relu": "relu2", "openai_gelu": "gelu", "quick_geglu": "gelu"}
"""Option -> its function; other options say whether there is a gate."""


def _activation(values: Values) -> Any:
    if values["quick_geglu"] and (values["activation_func_clamp_value"] or values["glu_linear_offset"]):
        return "swiglu_clamped"
    given = [name for name in _FUNCTIONS if values[name]]
    if len({_FUNCTIONS[name] for name in given}) > 1:
        values.refuse(given[-1], f"contradicts {values.spelled(given[0])}; leave one out")
    gated = bool(values["gated_linear_unit"])
    function = _FUNCTIONS[given[0]] if given else "silu" if gated else ""
    if function == "gelu":
        return "geglu_tanh" if gated or values["quick_geglu"] else "gelu_tanh"
    if function == "relu2" and gated:
        values.refuse("squared_relu", f"contradicts {values.spelled('gated_linear_unit')}; leave one out")
    return {"silu": "swiglu", "relu2": "relu2"}.get(function, "gelu")


def _positions(values: Values) -> Any:
    kind = values["position_embedding_type"]
    if values["use_rotary_position_embeddings"] or values["enable_gpt_oss"] or kind in ("rope", "yarn"):
        return "rope"
    if kind == "relative":
        values.refuse("position_embedding_type", "a bias of scores by distance has no price; supported: rope, yarn, "
                     "learned_absolute, none and mrope")  # fmt: skip
    if kind in ("none", "mrope"):
        values.changes["position_embedding_type"] = f"{kind} has no counterpart: priced as rope"
        values.assumed.append(f"positions {kind} are priced as rope, and a run file of it computes rope")
        return "rope"
    if values["no_position_embedding"]:
        values.assumed.append("no positions are added (no_position_embedding); priced as rope")
        return "rope"
    return "learned"


def _scaling(values: Values, positions: str) -> RopeScaling | None:
    if not values["use_rope_scaling"] or positions != "rope":
        return None
    factor = values["rope_scaling_factor"]
    return RopeScaling(factor=factor, low_freq_factor=1.0, high_freq_factor=4.0, original_max_seq_len=8192)


def _vocabulary(values: Values) -> int:
    """Return the number of tokens, from the option or from the name of a known tokenizer."""
    for name in ("vocab_size", "padded_vocab_size"):
        if values[name]:
            return int(values[name])
    kind, model = str(values["tokenizer_type"]), values.settings.get("tokenizer_model")
    named = kind if model is None or not isinstance(model.value, str) else f"{kind} {model.value}"
    for pattern, n_tokens in TOKENS.items():
        if any(re.search(pattern, word, re.I) for word in named.split()):
            given = values.settings.get("tokenizer_type") or model
            why = f"{given.where}: {given.option} {given.value}" if given else f"the default tokenizer, {kind}"
            values.assumed.append(f"vocab_size {n_tokens}: {why}")
            return n_tokens
    values.problems.append(
        f"{values.source}: {values.spell('vocab_size')} is missing, and the number of tokens of {named} is not known "
        f"here; add it to the file, or name the model by --model"
    )
    return 1


def _latent(values: Values) -> LatentAttentionSpec | None:
    if not (values["multi_latent_attention"] or values.given("kv_lora_rank")):
        return None
    return LatentAttentionSpec(
        kv_rank=values["kv_lora_rank"],
        q_rank=values["q_lora_rank"] or 0,
        nope_dim=values["qk_head_dim"],
        rope_dim=values["qk_pos_emb_head_dim"],
        v_dim=values["v_head_dim"],
    )


def _experts(values: Values, n_layers: int, d_ffn: int, biased: bool) -> MoESpec | None:
    count = values["num_experts"] or values["num_moe_experts"]
    if not count:
        return None
    width = max(values["moe_ffn_hidden_size"] or d_ffn, 1)
    shared_width = values["moe_shared_expert_intermediate_size"] or 0
    shared, rest = divmod(shared_width, width)
    if rest:
        shared = 1
    scope = values["moe_router_load_balancing_type"][0]
    balanced = values["moe_router_enable_expert_bias"]
    score = values["moe_router_score_function"]
    if score == "sqrtsoftplus":
        values.changes["moe_router_score_function"] = "priced as sigmoid"
        score = "sigmoid"
    return MoESpec(
        n_experts=count,
        top_k=values["moe_router_topk"],
        d_ffn=width,
        n_shared=shared,
        d_shared=shared_width if rest else 0,
        bias=biased,
        **_dense_layers(values, n_layers),
        score=score,
        normalise=values["moe_router_topk"] > 1,
        weight_scale=values["moe_router_topk_scaling_factor"] or 1.0,
        n_groups=values["moe_router_num_groups"] or 1,
        groups_per_token=values["moe_router_group_topk"] or 1,
        capacity_factor=max(values["moe_expert_capacity_factor"] or 0.0, 0.0),
        bias_rate=values["moe_router_bias_update_rate"] if balanced else 0.0,
        aux_loss=_number(values["moe_aux_loss_coeff"][0]) if scope not in ("none", "sinkhorn", "quantile") else 0.0,
        aux_scope="sequence" if scope == "seq_aux_loss" else "batch",
        z_loss=values["moe_z_loss_coeff"] or 0.0,
        force_balance=bool(values["moe_router_force_load_balancing"]),
        shared_gate=bool(values["moe_shared_expert_gate"] and shared),
    )


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0


def _dense_layers(values: Values, n_layers: int) -> dict[str, Any]:
    """Return the keys of the layers without experts. `moe_layer_freq` is a number n, for experts in layers 0, n, 2 n
    and so on, or a list such as ([0]*3+[1]*58)."""
    pattern = _by_layer(values, "moe_layer_freq", n_layers)
    if pattern is None or pattern == 1:
        return {}
    if isinstance(pattern, int):
        pattern = [int(layer % pattern == 0) for layer in range(n_layers)]
    if 1 not in pattern:
        values.refuse("moe_layer_freq", "no layer has experts; leave --num-experts out")
        return {}
    first = pattern.index(1)
    if first and pattern == [int((layer + 1) % (first + 1) == 0) for layer in range(n_layers)]:
        return {"interval": first + 1}
    later = tuple(layer for layer in range(first, n_layers) if not pattern[layer])
    return {"first_dense": first, "dense_layers": later}


def _refuse_mamba(values: Values) -> None:
    """Add a problem for layers of Mamba: the rest of the model would be priced as if they were attention."""
    for name in ("hybrid_layer_pattern", "hybrid_override_pattern", "is_hybrid_model"):
        if values[name] and ("M" in str(values[name]) or values[name] is True):
            values.refuse(name, "layers of Mamba have no price; supported: layers of attention, and of gated_delta_net")


def _windows(values: Values, n_layers: int) -> dict[str, Any]:
    """Return the keys of attention within windows: the size, and which layers have none."""
    sizes = [part for text in values["window_size"] for part in text.strip("()[]").replace(",", " ").split()]
    if not sizes:
        return {}
    if not re.fullmatch(r"\d{1,9}", sizes[0]):
        values.refuse("window_size", "not the tokens before and after, such as 127,0")
        return {}
    full = _by_layer(values, "window_attn_skip_freq", n_layers)
    more: dict[str, Any] = {}
    if isinstance(full, int):
        more = {"global_interval": full}
    elif full is not None:
        more = {"global_layers": tuple(layer for layer, windowed in enumerate(full) if not windowed)}
    return {"window": int(sizes[0]) + 1} | more


def _without_rope(values: Values, n_layers: int) -> dict[str, Any]:
    pattern = _by_layer(values, "no_rope_freq", n_layers)
    if pattern is None:
        return {}
    if isinstance(pattern, int):
        return {"nope_interval": pattern}
    return {"nope_layers": tuple(layer for layer, without in enumerate(pattern) if without)}


def _linear_attention(values: Values, n_layers: int) -> LinearAttentionSpec | None:
    """Return the layers of gated delta net. Other variants are named as options without a counterpart."""
    variant = values["experimental_attention_variant"]
    if variant is None or str(variant).lower() == "none":
        return None
    if variant not in ("gated_delta_net", "gdn"):
        values.changes["experimental_attention_variant"] = f"{variant} has no counterpart: priced as full attention"
        return None
    pattern = _by_layer(values, "linear_attention_freq", n_layers)
    if isinstance(pattern, list):
        full = [layer for layer, linear in enumerate(pattern) if not linear]
        interval = full[0] + 1 if full else 0
        if full != (list(range(interval - 1, n_layers, interval)) if interval else []):
            values.refuse("linear_attention_freq", "only every n-th layer may have full attention; supported: a number")
        pattern = interval
    return LinearAttentionSpec(
        n_k_heads=values["linear_num_key_heads"],
        n_v_heads=values["linear_num_value_heads"],
        k_dim=values["linear_key_head_dim"],
        v_dim=values["linear_value_head_dim"],
        conv_width=values["linear_conv_kernel_dim"],
        full_interval=pattern or 0,
    )


def _by_layer(values: Values, name: str, n_layers: int) -> int | list[int] | None:
    """Return an option that states layers, as a number n or as 0 or 1 for each layer; None: not given, or a
    problem."""
    if values[name] is None:
        return None
    text = " ".join(values[name]) if isinstance(values[name], list) else str(values[name])
    try:
        pattern = _pattern(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        pattern = None
    if isinstance(pattern, int) and pattern > 0:
        return pattern
    if isinstance(pattern, list) and len(pattern) == n_layers and set(pattern) <= {0, 1}:
        return pattern
    values.refuse(
        name, f"not a number of 1 or more, or a list of 0 and 1 for {n_layers} layers, such as ([0]*3+[1]*58)"
    )
    return None


def _pattern(node: ast.AST) -> Any:
    """Return the value of a number, a list of 0 and 1, or sums and multiples of lists. Raises ValueError."""
    if isinstance(node, ast.Constant) and type(node.value) is int and node.value <= 2**14:
        return node.value
    if isinstance(node, ast.List):
        return [_pattern(element) for element in node.elts]
    if isinstance(node, ast.BinOp):
        left, right = _pattern(node.left), _pattern(node.right)
        if isinstance(node.op, ast.Add) and isinstance(left, list) and isinstance(right, list):
            return left + right
        if isinstance(node.op, ast.Mult) and isinstance(left, list) and isinstance(right, int):
            if len(left) * right > MOST_LAYERS:
                raise ValueError("more layers than any model has")
            return left * right
    raise ValueError(ast.dump(node))
