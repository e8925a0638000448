"""Proves that published configurations are accepted as they are published, and have the published parameters."""

from typing import Any

import pytest

import shardwright.hugging_face.files  # noqa: F401  # registers the architectures
from shardwright.hugging_face.architecture import Config, find
from shardwright.model.presets import resolve
from shardwright.system.errors import ConfigError
from tests.hugging_face.published import GLM_45, PHI3, PUBLISHED, config_of


@pytest.mark.parametrize("name", PHI3)
def test_a_published_configuration_with_longrope_is_written_as_it_was(name: str):
    config, n_parameters = PHI3[name]
    spec = find(config).spec(config)
    assert spec.n_parameters == n_parameters
    assert spec.rope_scaling is not None
    assert spec.rope_scaling.factor == 32.0
    assert spec.rope_scaling.attention_scale == pytest.approx(1.190238, abs=1e-6)
    written = find(config).config(spec)
    assert {key: written[key] for key in ("rope_scaling", "original_max_position_embeddings")} == {
        key: config[key] for key in ("rope_scaling", "original_max_position_embeddings")
    }
    assert find(config).spec(written) == spec
    su = config | {"rope_scaling": config["rope_scaling"] | {"type": "su"}}
    assert find(su).spec(su) == spec


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_configuration_is_the_preset_and_has_its_parameters(name: str):
    config, n_parameters = PUBLISHED[name]
    spec, preset = find(config).spec(config), resolve(name)
    assert spec.n_parameters == preset.n_parameters == n_parameters
    assert find(config).config(spec) == find(config).config(preset)


VISION = {"hidden_size": 1408, "model_type": "some_vision_model", "num_hidden_layers": 34}
OF_IMAGES: dict[str, tuple[Config, str]] = {
    "llama4": ({"text_config": PUBLISHED["llama-4-scout"][0], "tie_word_embeddings": False}, "llama-4-scout"),
    "gemma3": (
        {
            "text_config": {
                "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
                "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
            },
            "eos_token_id": [1, 106], "mm_tokens_per_image": 256, "image_token_index": 262144,
        },
        "gemma3-4b",
    ),
    "mistral3": (
        {
            "text_config": {
                "attention_dropout": 0.0, "head_dim": 128, "hidden_act": "silu", "hidden_size": 5120,
                "initializer_range": 0.02, "intermediate_size": 32768, "max_position_embeddings": 131072,
                "model_type": "mistral", "num_attention_heads": 32, "num_hidden_layers": 40, "num_key_value_heads": 8,
                "rms_norm_eps": 1e-05, "rope_theta": 1000000000.0, "sliding_window": None, "use_cache": True,
                "vocab_size": 131072,
            },
            "spatial_merge_size": 2, "projector_hidden_act": "gelu", "multimodal_projector_bias": False,
        },
        "mistral-small-24b",
    ),
}  # fmt: skip


@pytest.mark.parametrize("model_type", OF_IMAGES)
def test_the_text_part_of_a_published_model_of_images_has_the_parameters_of_its_preset(model_type: str):
    more, preset = OF_IMAGES[model_type]
    class_name = f"{model_type.capitalize()}ForConditionalGeneration"
    config = {"model_type": model_type, "architectures": [class_name], "vision_config": VISION, **more}
    assert find(config).spec(config).n_parameters == resolve(preset).n_parameters
    with pytest.raises(ConfigError, match="text_config is missing"):
        find(config).spec({key: value for key, value in config.items() if key != "text_config"})


@pytest.mark.parametrize(
    ("preset", "n_active"), [("llama-4-scout", 17_172_894_720), ("llama-4-maverick", 17_184_691_200)]
)
def test_a_llama_4_computes_a_token_with_17_billion_parameters(preset: str, n_active: int):
    assert resolve(preset).n_active_parameters == n_active


def test_kimi_k2_is_a_deepseek_v3_of_a_trillion_parameters():
    assert round(resolve("kimi-k2").n_parameters / 1e9) == 1026
    assert round(resolve("kimi-k2").n_active_parameters / 1e9) in (32, 33)


def test_the_configuration_of_kimi_k2_is_refused_for_its_weights_alone():
    """Its YaRN has one bound for both ends, `beta_fast` and `beta_slow`."""
    scaling = {"type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "mscale": 1.0}
    scaling |= {"mscale_all_dim": 1.0, "beta_fast": 1.0, "beta_slow": 1.0}
    sizes = {
        "n_routed_experts": 384, "n_shared_experts": 1, "num_experts_per_tok": 8, "moe_intermediate_size": 2048,
        "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "norm_topk_prob": True,
        "routed_scaling_factor": 2.827, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "q_lora_rank": 1536,
        "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "moe_layer_freq": 1,
        "num_nextn_predict_layers": 0, "ep_size": 1, "seq_aux": True, "aux_loss_alpha": 0.001,
    }  # fmt: skip
    config = config_of(
        "kimi_k2", "DeepseekV3ForCausalLM", (61, 7168, 64, 64, 18432, 163840, 131072), rms_norm_eps=1e-6,
        rope_theta=50000.0, tie_word_embeddings=False, **sizes,
    )  # fmt: skip
    config["rope_scaling"] = scaling
    assert find(config).spec(config).n_parameters == resolve("kimi-k2").n_parameters
    with pytest.raises(ConfigError, match="the weights are quantised"):
        find(config).spec(config | {"quantization_config": {"quant_method": "fp8"}})


@pytest.mark.parametrize("name", GLM_45)
def test_glm_45_is_its_preset_and_has_its_parameters_besides_its_module(name: str):
    sizes, experts, n_parameters = GLM_45[name]
    config = config_of(
        "glm4_moe", "Glm4MoeForCausalLM", (*sizes, 151552, 131072), head_dim=128, rms_norm_eps=1e-5, n_group=1,
        topk_group=1, n_shared_experts=1, num_experts_per_tok=8, norm_topk_prob=True, rope_theta=1000000,
        tie_word_embeddings=False, num_nextn_predict_layers=1, **{"first_k_dense_replace": 1, **experts},
    ) | {"attention_bias": True}  # fmt: skip
    for rotated in ({}, {"partial_rotary_factor": 0.5}):
        alone = find(config).spec(config | rotated | {"num_nextn_predict_layers": 0})
        assert alone.n_parameters == resolve(name).n_parameters == n_parameters
        assert find(config).config(alone) == find(config).config(resolve(name))
    assert find(config).spec(config).mtp_modules == 1


def test_an_unknown_architecture_names_its_blocks_that_no_table_has():
    config = PUBLISHED["olmo2-7b"][0] | {
        "model_type": "unknown", "attn_logit_softcapping_of_unknown": 50.0, "hidden_act": "quick_gelu",
        "use_parallel_residual": True, "clip_qkv": 8.0, "attention_bias": True,
    }  # fmt: skip
    with pytest.raises(ConfigError) as refused:
        find(config)
    _, unknown, *values = refused.value.problems
    assert "attn_logit_softcapping_of_unknown=50.0, use_parallel_residual=True" in unknown
    assert [value.split(" is not")[0] for value in values] == ["clip_qkv=8.0", "hidden_act='quick_gelu'"]


@pytest.mark.parametrize(("key", "value"), [
    ("attention_multiplier", -1.0), ("logits_scaling", 0.0), ("embedding_multiplier", float("inf")),
])  # fmt: skip
def test_a_scale_without_meaning_is_refused(key: str, value: float):
    config = PUBLISHED["granite-3.1-2b"][0] | {key: value}
    with pytest.raises(ConfigError, match="is not a positive number"):
        find(config).spec(config)


WITHOUT_PATTERN = {
    "gemma2-2b": ["full_attention", "sliding_attention", "full_attention", *["sliding_attention"] * 23],
    "olmo3-7b": ["full_attention", *["sliding_attention"] * 3] * 8,
    "gpt-oss-20b": ["full_attention", *["sliding_attention", "full_attention"] * 11, "sliding_attention"],
    "command-r7b": ["full_attention", *["sliding_attention"] * 15] * 2,
}


@pytest.mark.parametrize("name", WITHOUT_PATTERN)
def test_kinds_of_layers_without_a_pattern_are_read_and_written_one_by_one(name: str):
    kinds = WITHOUT_PATTERN[name]
    config = PUBLISHED[name][0] | {"layer_types": kinds}
    spec = find(config).spec(config)
    with_window = [kind != "full_attention" for kind in kinds]
    assert [spec.layer_window(layer) > 0 for layer in range(spec.n_layers)] == with_window
    if name == "command-r7b":  # only layers with a window rotate
        assert [spec.rotates(layer) for layer in range(spec.n_layers)] == with_window
    written = find(config).config(spec)
    assert written["layer_types"] == kinds
    assert find(config).spec(written) == spec


@pytest.mark.parametrize("flags", [[1, 0] * 18, [0, 1, 1] * 12, [1] * 36, [0] * 36])
def test_layers_without_rotation_are_read_and_written_one_by_one(flags: list[int]):
    config = PUBLISHED["smollm3-3b"][0] | {"no_rope_layers": flags}
    spec = find(config).spec(config)
    assert [spec.rotates(layer) for layer in range(36)] == [flag == 1 for flag in flags]
    written = find(config).config(spec)
    assert written["no_rope_layers"] == flags
    assert find(config).spec(written) == spec


LISTS = (("type", "longrope"), ("short_factor", (1.0, 1.0)), ("long_factor", (1.0,) * 64))
WRONG = {
    ("llama-4-scout", "attention_chunk_size", 0): "attention_chunk_size=0 is not a whole number above 0",
    ("llama-4-scout", "attention_chunk_size", None): "attention_chunk_size=0 is not a whole number above 0",
    ("llama-4-scout", "no_rope_layers", (1, 0)): "is not a list of 0 and 1, one for each of 48 layers",
    ("llama-4-scout", "moe_layers", (48,)): "moe_layers=[48] is not a list of numbers of layers; valid: 0 to 47",
    ("llama-4-scout", "moe_layers", ()): "leave none of n_layers=48 layers with experts",
    ("llama-4-scout", "layer_types", ("sliding_attention",) * 48): "valid: full_attention, chunked_attention",
    ("llama-4-scout", "floor_scale", 0): "floor_scale=0 is not a whole number above 0",
    (
        "llama-4-scout",
        "rope_scaling",
        (("rope_type", "yarn"), ("factor", 2.0)),
    ): "'yarn' scales queries and keys, which use_qk_norm=true norms again",
    ("deepseek-v2", "norm_topk_prob", True): "norm_topk_prob=True is not supported for deepseek_v2; valid: False",
    ("deepseek-v2", "topk_method", "noaux_tc"): "topk_method='noaux_tc' is not supported",
    ("deepseek-v2", "topk_group", 9): "moe.groups_per_token=9 is more than moe.n_groups=8; valid: 1 to 8",
    ("deepseek-v2", "moe_layer_freq", 2): "moe_layer_freq=2 is not supported",
    ("qwen2-57b-a14b", "shared_expert_intermediate_size", 0): "valid: 1 or more",
    ("qwen2-57b-a14b", "decoder_sparse_step", 0): "moe.interval=0 is not positive; valid: 1 or more",
    ("qwen2-57b-a14b", "decoder_sparse_step", 29): "leave none of n_layers=28 layers with experts",
    ("qwen2-57b-a14b", "mlp_only_layers", (3, 28)): "moe.dense_layers has 28; valid: layers 0 to 27",
    ("qwen2-57b-a14b", "mlp_only_layers", ("3",)): "mlp_only_layers=['3'] is not a list of whole numbers",
    ("qwen2-57b-a14b", "mlp_only_layers", 3): "mlp_only_layers=3 is not a list of whole numbers",
    ("command-r7b", "head_dim", 64): "head_dim=64: transformers takes hidden_size / num_attention_heads = 128",
    ("command-r", "use_qk_norm", 2): "use_qk_norm",
    ("command-r", "logit_scale", 1e-320): "logit_divisor=inf is not a positive number",
    ("smollm3-3b", "no_rope_layers", (1, 0) * 17): "is not a list of 0 and 1, one for each of 36 layers",
    ("smollm3-3b", "no_rope_layers", 3): "is not a list of 0 and 1",
    ("smollm3-3b", "no_rope_layers", (2,) * 36): "is not a list of 0 and 1",
    ("smollm3-3b", "no_rope_layer_interval", 0): "is not a whole number above 0",
    ("smollm3-3b", "layer_types", ("sliding_attention",) * 36): "valid: full_attention in every layer",
    (
        "gemma2-2b",
        "layer_types",
        ("full_attention",) * 2 + ("sliding_attention",) * 2,
    ): "has 4 entries for num_hidden_l",
    ("gemma2-2b", "layer_types", ("full_attention",) * 2): "has 2 entries for num_hidden_layers=26; valid: one for",
    ("mistral-7b", "layer_types", ("chunked_attention",) * 32): "layer_types has chunked_attention; valid: full_att",
    (
        "mistral-7b",
        "layer_types",
        ("full_attention",) * 32,
    ): "transformers gives every layer of this architecture sliding",
    (
        "phi-3-mini",
        "layer_types",
        ("full_attention", "sliding_attention") * 16,
    ): "gives every layer of this architecture",
    ("starcoder2-3b", "layer_types", ("full_attention",)): "layer_types has 1 entries for num_hidden_layers=30",
    ("gemma3-1b", "num_hidden_layers", 10**9): "n_layers=1000000000",
    ("mistral-7b", "sliding_window", "4096"): "sliding_window='4096' is not a whole number; it is model.window here",
    ("mistral-7b", "sliding_window", -1): "window=-1 for sequences of max_seq_len=32768",
    ("gemma2-2b", "attn_logit_softcapping", -50.0): "attention_softcap=-50 is not a positive number",
    ("phi-4", "rope_scaling", (("type", "linear"), ("factor", 2.0))): "'linear' is not supported for phi3",
    ("phi-4", "rope_scaling", LISTS): "short_factor has 2 numbers for 128 rotated elements of a head; valid: 64",
    ("phi-4", "partial_rotary_factor", 0.51): "rotates 65 of head_dim=128 elements, and rope turns pairs",
    ("qwen2.5-7b", "partial_rotary_factor", 0.5): "transformers rotates whole heads of this architecture",
}


def test_scaled_frequencies_of_windowed_layers_are_refused():
    rope = {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_type": "yarn", "factor": 2.0}}
    with pytest.raises(ConfigError, match=r"rope_parameters\.sliding_attention\.rope_type='yarn' is not supported"):
        find(PUBLISHED["gemma3-1b"][0]).spec(PUBLISHED["gemma3-1b"][0] | {"rope_parameters": rope})


@pytest.mark.parametrize("case", WRONG, ids=lambda case: "-".join(map(str, case[:2])))
def test_patterns_of_layers_that_are_not_supported_are_refused_with_the_reason(case: tuple[str, str, Any]):
    name, key, value = case
    value = dict(value) if key == "rope_scaling" else list(value) if isinstance(value, tuple) else value
    with pytest.raises(ConfigError) as refused:
        find(PUBLISHED[name][0]).spec(PUBLISHED[name][0] | {key: value})
    assert WRONG[case] in "\n".join(refused.value.problems)
