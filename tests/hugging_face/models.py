"""Small models of `transformers` with random weights, one for each supported architecture, and helpers to compare."""

import atexit
import shutil
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn

from shardwright.hugging_face.float64 import Float64
from shardwright.model.transformer import Transformer
from shardwright.training.weights import Weights, fill, open_weights

transformers.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()

VOCABULARY, LENGTH = 96, 64
COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": LENGTH,
    # A large epsilon and a small base, so that an error in either shows in the logits.
    "rms_norm_eps": 0.03,
    "rope_parameters": {"rope_type": "default", "rope_theta": 150.0},
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
SCALINGS: dict[str, dict[str, Any]] = {
    "llama3": {
        "rope_type": "llama3",
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "linear": {"rope_type": "linear", "factor": 4.0},
    "longrope": {
        "rope_type": "longrope",
        "factor": 3.0,
        "original_max_position_embeddings": 32,
        "short_factor": [1.0] * 6,
        "long_factor": [1.0, 1.5, 2.0, 3.0, 5.0, 8.0],
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 4.0},
    "yarn, one bound": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "beta_fast": 1.0,
        "beta_slow": 1.0,
    },
    "yarn, exact bounds": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "attention_factor": 1.4,
        "truncate": False,
    },
    "yarn, mscale": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "mscale": 1.0,
        "mscale_all_dim": 0.7,
    },
}


def llama(**more: Any) -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**COMMON | more))


def scaled(kind: str, of: Callable[..., nn.Module] = llama) -> nn.Module:
    return of(rope_parameters={"rope_theta": 150.0, **SCALINGS[kind]})


def smollm2() -> nn.Module:
    return llama(tie_word_embeddings=True, num_attention_heads=3, num_key_value_heads=1, head_dim=8, hidden_size=24)


def qwen2() -> nn.Module:
    # Qwen2's config has no head_dim of its own, but the code reads one.
    return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**COMMON))


def gemma() -> nn.Module:
    # The factor of embeddings is kept in float32, so the root of the width is a whole number.
    sizes = COMMON | {"hidden_size": 64, "pad_token_id": 0, "tie_word_embeddings": True}
    return transformers.GemmaForCausalLM(transformers.GemmaConfig(**sizes))


def smollm3(**more: Any) -> nn.Module:
    sizes = COMMON | {"num_hidden_layers": 4, "no_rope_layer_interval": 2, "pad_token_id": 0}
    return transformers.SmolLM3ForCausalLM(transformers.SmolLM3Config(**sizes | more))


def qwen3() -> nn.Module:
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**COMMON))


def gpt2() -> nn.Module:
    sizes = {"vocab_size": VOCABULARY, "n_positions": LENGTH, "n_embd": 32, "n_layer": 2, "n_head": 4}
    config = transformers.GPT2Config(**sizes, layer_norm_epsilon=0.02, bos_token_id=1, eos_token_id=2)
    return transformers.GPT2LMHeadModel(config)


def mistral(window: int | None = None) -> nn.Module:
    return transformers.MistralForCausalLM(transformers.MistralConfig(sliding_window=window, **COMMON))


FOUR = COMMON | {"num_hidden_layers": 4, "pad_token_id": 0, "sliding_window": 7}


def qwen2_windows() -> nn.Module:
    sizes = FOUR | {"use_sliding_window": True, "max_window_layers": 2}
    return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**sizes))


def gemma2(**more: Any) -> nn.Module:
    sizes = FOUR | {"hidden_size": 16, "query_pre_attn_scalar": 30, "tie_word_embeddings": True}
    caps = {"attn_logit_softcapping": 1.5, "final_logit_softcapping": 2.0, "attn_implementation": "eager"}
    return transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**sizes | caps | more))


def gemma3(**more: Any) -> nn.Module:
    rope = {
        "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 150.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 60.0},
    }
    sizes = FOUR | {"hidden_size": 16, "query_pre_attn_scalar": 30, "tie_word_embeddings": True}
    sizes |= {"layer_types": [*["sliding_attention"] * 2, "full_attention", "sliding_attention"]}
    sizes |= {"rope_parameters": rope}
    return transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**sizes | more))


def olmo3(**more: Any) -> nn.Module:
    rope = {"full_attention": SCALINGS["yarn"] | {"rope_theta": 150.0}, "sliding_attention": {"rope_theta": 150.0}}
    rope["sliding_attention"]["rope_type"] = "default"
    return transformers.Olmo3ForCausalLM(transformers.Olmo3Config(**FOUR | {"rope_parameters": rope} | more))


EXPERTS = {"num_experts_per_tok": 2, "experts_implementation": "eager"}


def llama4(**more: Any) -> nn.Module:
    sizes = FOUR | EXPERTS | {"num_experts_per_tok": 1, "num_local_experts": 4, "intermediate_size_mlp": 40}
    del sizes["sliding_window"]
    layers = {"attention_chunk_size": 9, "no_rope_layers": [1, 0, 0, 1], "attn_scale": 0.7, "floor_scale": 5}
    return transformers.Llama4ForCausalLM(transformers.Llama4TextConfig(**sizes | layers | more))


def ministral(**more: Any) -> nn.Module:
    kinds = ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]
    return transformers.MinistralForCausalLM(transformers.MinistralConfig(**FOUR | {"layer_types": kinds} | more))


def cohere(of: str = "Cohere2", **more: Any) -> nn.Module:
    sizes = FOUR | {"head_dim": 8, "layer_norm_eps": 0.03, "logit_scale": 0.3, "attention_bias": True} | more
    return getattr(transformers, f"{of}ForCausalLM")(getattr(transformers, f"{of}Config")(**sizes))


def mixtral() -> nn.Module:
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(num_local_experts=4, **EXPERTS, **COMMON))


def qwen3_moe(normalise: bool = True) -> nn.Module:
    config = transformers.Qwen3MoeConfig(
        num_experts=4, moe_intermediate_size=20, norm_topk_prob=normalise, mlp_only_layers=[], **EXPERTS, **COMMON
    )
    return transformers.Qwen3MoeForCausalLM(config)


def qwen3_moe_dense() -> nn.Module:
    pattern = {"num_hidden_layers": 5, "decoder_sparse_step": 2, "mlp_only_layers": [3]}
    sizes = COMMON | EXPERTS | {"num_experts": 4, "moe_intermediate_size": 20} | pattern
    return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**sizes))


def qwen2_moe(**more: Any) -> nn.Module:
    experts = {"num_experts": 4, "moe_intermediate_size": 20, "shared_expert_intermediate_size": 28}
    pattern = {"num_hidden_layers": 3, "mlp_only_layers": [1]}
    return transformers.Qwen2MoeForCausalLM(transformers.Qwen2MoeConfig(**COMMON | EXPERTS | experts | pattern | more))


def qwen3_next(**more: Any) -> nn.Module:
    linear = {"linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 10}
    linear |= {"linear_value_head_dim": 7, "linear_conv_kernel_dim": 3}
    experts = {"num_experts": 4, "moe_intermediate_size": 20, "shared_expert_intermediate_size": 28}
    sizes = COMMON | EXPERTS | linear | experts | {"num_hidden_layers": 5, "full_attention_interval": 3}
    sizes |= {"rope_parameters": {"rope_type": "default", "rope_theta": 150.0, "partial_rotary_factor": 0.5}}
    return transformers.Qwen3NextForCausalLM(transformers.Qwen3NextConfig(**sizes | more))


def deepseek_v3(q_rank: int | None = 24, **more: Any) -> nn.Module:
    sizes = COMMON | {"rms_norm_eps": 1e-6, "num_hidden_layers": 3, "num_key_value_heads": 4, **EXPERTS}
    del sizes["head_dim"]
    latent = {
        "q_lora_rank": q_rank,
        "kv_lora_rank": 20,
        "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
    }
    experts = {"n_routed_experts": 8, "moe_intermediate_size": 12, "n_shared_experts": 2, "first_k_dense_replace": 1}
    groups = {"n_group": 4, "topk_group": 2, "num_nextn_predict_layers": 0}
    return transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**sizes | latent | experts | groups | more))


def deepseek_v2(q_rank: int | None = 24, **more: Any) -> nn.Module:
    sizes = COMMON | EXPERTS | {"rms_norm_eps": 1e-6, "num_hidden_layers": 3, "num_key_value_heads": 4}
    del sizes["head_dim"]
    latent = {
        "q_lora_rank": q_rank,
        "kv_lora_rank": 20,
        "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
    }
    experts = {"n_routed_experts": 8, "moe_intermediate_size": 12, "n_shared_experts": 2, "first_k_dense_replace": 1}
    # Fewer groups than experts of a token: the best experts are not always in the best groups.
    groups = {"n_group": 2, "topk_group": 1, "topk_method": "group_limited_greedy", "routed_scaling_factor": 2.5}
    return transformers.DeepseekV2ForCausalLM(transformers.DeepseekV2Config(**sizes | latent | experts | groups | more))


def glm4_moe(**more: Any) -> nn.Module:
    experts = {"n_routed_experts": 8, "moe_intermediate_size": 12, "n_shared_experts": 2, "first_k_dense_replace": 1}
    groups = {"n_group": 2, "topk_group": 1, "routed_scaling_factor": 2.5, "num_nextn_predict_layers": 0}
    sizes = COMMON | EXPERTS | {"num_hidden_layers": 3}
    sizes["rope_parameters"] = COMMON["rope_parameters"] | {"partial_rotary_factor": 0.5}
    return transformers.Glm4MoeForCausalLM(transformers.Glm4MoeConfig(**sizes | experts | groups | more))


def gpt_oss(**more: Any) -> nn.Module:
    sizes = COMMON | EXPERTS | {"num_hidden_layers": 3, "num_local_experts": 4, "sliding_window": 9}
    return transformers.GptOssForCausalLM(transformers.GptOssConfig(**sizes | more))


def olmo2() -> nn.Module:
    return transformers.Olmo2ForCausalLM(transformers.Olmo2Config(**COMMON))


def olmoe(normalise: bool = False) -> nn.Module:
    # OLMoE's code takes no head_dim: heads are as wide as hidden_size / num_attention_heads.
    sizes = COMMON | EXPERTS | {"head_dim": 8, "num_experts": 4, "norm_topk_prob": normalise}
    return transformers.OlmoeForCausalLM(transformers.OlmoeConfig(**sizes))


def granite(**more: Any) -> nn.Module:
    scales = {"embedding_multiplier": 3.5, "residual_multiplier": 0.7, "attention_multiplier": 0.11}
    config = transformers.GraniteConfig(**COMMON | scales | {"logits_scaling": 1.9} | more)
    return transformers.GraniteForCausalLM(config)


def granite_moe() -> nn.Module:
    scales = {"embedding_multiplier": 3.5, "residual_multiplier": 0.7, "attention_multiplier": 0.11}
    sizes = COMMON | EXPERTS | {"num_local_experts": 4, "logits_scaling": 1.9, "head_dim": 8}
    return transformers.GraniteMoeForCausalLM(transformers.GraniteMoeConfig(**sizes | scales))


LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.3, 1.1],
    "long_factor": [1.2, 2.5, 7.0],
}


def phi3(window: int | None = None, fraction: float = 1.0, **more: Any) -> nn.Module:
    rope = COMMON["rope_parameters"] | {"partial_rotary_factor": fraction} | more.pop("rope", {})
    sizes = COMMON | {"head_dim": 8, "pad_token_id": 0, "sliding_window": window, "rope_parameters": rope} | more
    return transformers.Phi3ForCausalLM(transformers.Phi3Config(**sizes))


def glm4(of: str = "Glm4", **more: Any) -> nn.Module:
    # Heads of 12 elements, of which 6 are rotated. The configuration writes the fraction into the dictionary.
    sizes = COMMON | {"pad_token_id": 0, "rope_parameters": dict(COMMON["rope_parameters"])} | more
    return getattr(transformers, f"{of}ForCausalLM")(getattr(transformers, f"{of}Config")(**sizes))


def starcoder2(**more: Any) -> nn.Module:
    sizes = COMMON | {"norm_epsilon": 0.03, "head_dim": 8, "tie_word_embeddings": False} | more
    return transformers.Starcoder2ForCausalLM(transformers.Starcoder2Config(**sizes))


FAMILIES: dict[str, Callable[[], nn.Module]] = {
    "llama": llama,
    "llama 3": lambda: scaled("llama3"),
    "smollm2": smollm2,
    "mistral": mistral,
    "mistral, windows": lambda: mistral(7),
    "qwen2, windows": qwen2_windows,
    "gemma2": gemma2,
    "gemma3": gemma3,
    "olmo3": olmo3,
    "llama4": lambda: llama4(moe_layers=[1, 2]),
    "llama4, two experts, biases, scaled, no norms of heads": lambda: llama4(
        num_experts_per_tok=2,
        attention_bias=True,
        interleave_moe_layer_step=2,
        use_qk_norm=False,
        rope_parameters={"rope_theta": 150.0, **SCALINGS["llama3"]},
        tie_word_embeddings=True,
    ),
    "ministral": ministral,
    "cohere2": lambda: cohere(layer_types=["sliding_attention", "full_attention"] * 2),
    "cohere2, whole windows, no biases, not tied": lambda: cohere(
        sliding_window=LENGTH, attention_bias=False, tie_word_embeddings=False
    ),
    "cohere2, no windows": lambda: cohere(layer_types=["full_attention"] * 4),
    "cohere": lambda: cohere("Cohere", sliding_window=None),
    "cohere, norms of heads": lambda: cohere("Cohere", sliding_window=None, use_qk_norm=True),
    "phi3, windows": lambda: phi3(9),
    "qwen2": qwen2,
    "gemma": gemma,
    "smollm3": smollm3,
    "smollm3, biases": lambda: smollm3(attention_bias=True, mlp_bias=True),
    "qwen3": qwen3,
    "gpt2": gpt2,
    "mixtral": mixtral,
    "qwen3-moe": qwen3_moe,
    "qwen3-moe, not normalised": lambda: qwen3_moe(False),
    "qwen3-moe, dense layers": qwen3_moe_dense,
    "qwen2-moe": qwen2_moe,
    "qwen2-moe, normalised, no biases": lambda: qwen2_moe(norm_topk_prob=True, qkv_bias=False, mlp_only_layers=[]),
    "qwen3-next": qwen3_next,
    "qwen3-next, dense layers, tied": lambda: qwen3_next(
        num_hidden_layers=3,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        mlp_only_layers=[1],
        tie_word_embeddings=True,
        norm_topk_prob=False,
        linear_num_key_heads=6,
    ),
    "olmo2": olmo2,
    "olmoe": olmoe,
    "olmoe, normalised": lambda: olmoe(True),
    "granite": granite,
    "granite, biases": lambda: granite(attention_bias=True, mlp_bias=True),
    "granite-moe": granite_moe,
    "phi3": phi3,
    "phi3, partial rotation": lambda: phi3(fraction=0.75),
    "phi3, longrope, short": lambda: phi3(fraction=0.75, rope=LONGROPE, original_max_position_embeddings=48),
    "phi3, longrope, long": lambda: phi3(fraction=0.75, rope=LONGROPE, original_max_position_embeddings=40),
    "phi3, longrope, attention factor": lambda: phi3(
        fraction=0.75, rope=LONGROPE | {"attention_factor": 1.7}, original_max_position_embeddings=40
    ),
    "starcoder2": starcoder2,
    "starcoder2, windows": lambda: starcoder2(sliding_window=9),
    "starcoder2, tied, no biases, linear": lambda: starcoder2(
        tie_word_embeddings=True, use_bias=False, rope_parameters={"rope_theta": 150.0, **SCALINGS["linear"]}
    ),
    "glm4": glm4,
    "glm4, yarn": lambda: glm4(rope_parameters={"rope_theta": 150.0, **SCALINGS["yarn, exact bounds"]}),
    "glm": lambda: glm4("Glm"),
    "deepseek-v2": deepseek_v2,
    "deepseek-v2-lite, yarn": lambda: deepseek_v2(
        None, topk_method="greedy", rope_parameters={"rope_theta": 150.0, **SCALINGS["yarn, mscale"]}
    ),
    "gpt-oss": gpt_oss,
    "gpt-oss, yarn": lambda: gpt_oss(rope_parameters={"rope_theta": 150.0, **SCALINGS["yarn, exact bounds"]}),
    "glm-4.5": glm4_moe,
    "glm-4.5, biases, norms of heads, not normalised": lambda: glm4_moe(
        attention_bias=True, use_qk_norm=True, norm_topk_prob=False
    ),
    "deepseek-v3": deepseek_v3,
    "deepseek-v3, no query latent, yarn": lambda: deepseek_v3(
        None, rope_parameters={"rope_theta": 150.0, **SCALINGS["yarn, mscale"]}
    ),
}


def saved(folder: Path, make: Callable[[], nn.Module], max_shard_size: str = "5GB") -> Path:
    """A model with weights so large that every one matters for the logits, norms and biases included, as `transformers`
    saves it."""
    torch.manual_seed(0)
    model = make()
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "inv_freq" not in name and tensor.is_floating_point():
                tensor.normal_(std=1.5 / tensor.shape[-1] ** 0.5 if tensor.dim() > 1 else 0.3)
                if "norm" in name or "ln_" in name:
                    tensor.add_(1.0)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return folder


def theirs(folder: Path, dtype: torch.dtype) -> nn.Module:
    """The model of a folder as `transformers` loads it."""
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, experts_implementation="eager").eval()


@torch.no_grad()
def their_logits(folder: Path, dtype: torch.dtype, tokens_BT: Tensor) -> Tensor:
    """Logits of the model of a folder by `transformers`, all in `dtype`."""
    with Float64() if dtype == torch.float64 else nullcontext():
        logits_BTV: Tensor = theirs(folder, dtype)(tokens_BT).logits
    return logits_BTV


def ours(weights: Weights, dtype: torch.dtype) -> Transformer:
    """The model of some weights, on one process."""
    model = Transformer(weights.spec).to(dtype).eval()
    fill(model.named_parameters(), weights.spec, weights)
    return model


@cache
def kept(family: str) -> Path:
    """The folder of a model, one of `FAMILIES` or `SCALINGS`, that all tests of a process share; not to be changed."""
    folder = Path(tempfile.mkdtemp(prefix="shardwright-tests-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return saved(folder, FAMILIES.get(family, lambda: scaled(family)))


def tokens(n_sequences: int = 2, n_tokens: int = 48) -> Tensor:
    return torch.randint(VOCABULARY, (n_sequences, n_tokens), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def logits_error(folder: Path, weights: str | Path, dtype: torch.dtype) -> float:
    """Largest difference of logits from those of `transformers`, relative to the largest logit."""
    tokens_BT = tokens()
    expected_BTV = their_logits(folder, dtype, tokens_BT)
    found_BTV = ours(open_weights(weights), dtype)(tokens_BT)
    return float((found_BTV - expected_BTV).abs().max() / expected_BTV.abs().max())


def their_rounding(folder: Path) -> float:
    """Largest difference of the logits of `transformers` in float32 from its own in float64, relative to the largest
    logit."""
    exact_BTV = their_logits(folder, torch.float64, tokens())
    return float((their_logits(folder, torch.float32, tokens()) - exact_BTV).abs().max() / exact_BTV.abs().max())


def tensors(folder: Path) -> dict[str, Tensor]:
    """Every tensor of the safetensors files of a folder."""
    return {name: each for path in sorted(folder.glob("*.safetensors")) for name, each in load_file(path).items()}
