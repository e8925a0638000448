"""Configurations as they are published, with the parameters of their models."""

from typing import Any

from shardwright.hugging_face.architecture import Config

IDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "use_cache": True, "torch_dtype": "bfloat16"}


def config_of(model_type: str, class_name: str, sizes: tuple[int, ...], **more: Any) -> Config:
    keys = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size")
    named = dict(zip((*keys, "vocab_size", "max_position_embeddings"), sizes, strict=True))
    common = {"model_type": model_type, "architectures": [class_name], "hidden_act": "silu", "attention_dropout": 0.0}
    return {**common, "attention_bias": False, "initializer_range": 0.02, "rope_scaling": None, **IDS, **named, **more}


def _olmo2(*sizes: int) -> Config:
    more = {"rms_norm_eps": 1e-6, "rope_theta": 500000, "tie_word_embeddings": False}
    return config_of("olmo2", "Olmo2ForCausalLM", (*sizes, 100352, 4096), **more)


def _granite(d_model: int, d_ffn: int, **more: Any) -> Config:
    scales = {"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "mlp_bias": False, "rms_norm_eps": 1e-5}
    sizes = (40, d_model, 32, 8, d_ffn, 49155, 131072)
    return config_of("granite", "GraniteForCausalLM", sizes, tie_word_embeddings=True, **scales, **more)


def _qwen2(*sizes: int, tied: bool = False) -> Config:
    window = {"use_sliding_window": False, "sliding_window": 131072, "max_window_layers": sizes[0]}
    more = {"rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "use_mrope": False, "tie_word_embeddings": tied} | window
    config = config_of("qwen2", "Qwen2ForCausalLM", (*sizes, 32768), **more)
    del config["attention_bias"]
    return config


def _qwen2_moe(*sizes: int, dense: int, **more: Any) -> Config:
    config = _qwen2(*sizes, 151936) | {"model_type": "qwen2_moe", "architectures": ["Qwen2MoeForCausalLM"]} | more
    experts = {"decoder_sparse_step": 1, "norm_topk_prob": False, "output_router_logits": False}
    return config | experts | {"router_aux_loss_coef": 0.001, "intermediate_size": dense}


def _deepseek_v2(*sizes: int, **more: Any) -> Config:
    scaling = {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707}
    latent = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
    experts = {
        "n_shared_experts": 2, "num_experts_per_tok": 6, "first_k_dense_replace": 1, "moe_layer_freq": 1,
        "norm_topk_prob": False, "scoring_func": "softmax", "aux_loss_alpha": 0.001, "seq_aux": True, "ep_size": 1,
    }  # fmt: skip
    config = config_of("deepseek_v2", "DeepseekV2ForCausalLM", (*sizes, 102400, 163840), rms_norm_eps=1e-6, **more)
    config |= {"rope_scaling": scaling | {"original_max_position_embeddings": 4096, "type": "yarn"}}
    return config | {"rope_theta": 10000, "tie_word_embeddings": False, "pretraining_tp": 1} | latent | experts


def _gemma(*sizes: int, act: str) -> Config:
    more = {"rms_norm_eps": 1e-6, "rope_theta": 10000.0, "head_dim": 256, "hidden_activation": None}
    return config_of("gemma", "GemmaForCausalLM", (*sizes, 256000, 8192), **more) | {"hidden_act": act}


def _gemma2(*sizes: int, **more: Any) -> Config:
    common = {"rms_norm_eps": 1e-6, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh"}
    common |= {"query_pre_attn_scalar": 256, "hidden_act": "gelu_pytorch_tanh", "cache_implementation": "hybrid"}
    if sizes[-1] == 256000:
        caps = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "sliding_window": 4096}
        return config_of(
            "gemma2", "Gemma2ForCausalLM", (*sizes, 8192), **common | caps | {"rope_theta": 10000.0} | more
        )
    scaling = {"factor": 8.0, "rope_type": "linear"} if sizes[-1] == 262208 else None
    rope = {"rope_theta": 1000000, "rope_local_base_freq": 10000, "sliding_window_pattern": 6, "rope_scaling": scaling}
    caps = {"attn_logit_softcapping": None, "final_logit_softcapping": None, "sliding_window": 1024 if scaling else 512}
    whole = common | caps | rope | more
    return config_of("gemma3_text", "Gemma3ForCausalLM", (*sizes, 131072 if scaling else 32768), **whole)


def _mistral(d_ffn: int, vocab: int, longest: int, theta: float, window: int | None = None) -> Config:
    layers, d_model = (32, 4096) if window else (40, 5120)
    sizes = (layers, d_model, 32, 8, d_ffn, vocab, longest)
    more = {"head_dim": 128, "rms_norm_eps": 1e-5, "rope_theta": theta, "sliding_window": window}
    config = config_of("mistral", "MistralForCausalLM", sizes, **more, tie_word_embeddings=False)
    del config["attention_bias"]
    return config


def _olmo3(*sizes: int) -> Config:
    scaling = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192, "beta_fast": 32.0}
    scaling |= {"beta_slow": 1.0, "attention_factor": 1.2079441541679836}
    kinds = [*["sliding_attention"] * 3, "full_attention"] * (sizes[0] // 4)
    more = {"rms_norm_eps": 1e-6, "rope_theta": 500000, "rope_scaling": scaling, "sliding_window": 4096}
    return config_of("olmo3", "Olmo3ForCausalLM", (*sizes, 100278, 65536), **more, layer_types=kinds)


def _glm4(*sizes: int, attention_bias: bool) -> Config:
    more = {"rms_norm_eps": 1e-5, "rope_theta": 10000.0, "head_dim": 128, "partial_rotary_factor": 0.5}
    return config_of("glm4", "Glm4ForCausalLM", (*sizes, 151552, 32768), tie_word_embeddings=False, **more) | {
        "attention_bias": attention_bias
    }


def _cohere(*sizes: int, windows: bool, **more: Any) -> Config:
    """The keys of c4ai-command-r7b-12-2024, c4ai-command-r-v01 and c4ai-command-r-plus."""
    name = "cohere2" if windows else "cohere"
    common = {"layer_norm_eps": 1e-05, "model_max_length": sizes[-1], "use_qk_norm": False}
    with_windows = {
        "head_dim": 128, "sliding_window": 4096, "sliding_window_pattern": 4, "layer_switch": 4, "rotary_pct": 1.0,
        "order_of_interleaved_layers": "local_attn_first", "position_embedding_type": "rope_gptj",
        "use_embedding_sharing": True, "use_gated_activation": True, "use_parallel_block": True,
        "use_parallel_embedding": True, "cache_implementation": "hybrid", "logit_scale": 0.25,
    }  # fmt: skip
    class_name = "Cohere2ForCausalLM" if windows else "CohereForCausalLM"
    return config_of(name, class_name, sizes, **common | (with_windows if windows else {}) | more)


def _starcoder2(*sizes: int, theta: float, **more: Any) -> Config:
    config = config_of("starcoder2", "Starcoder2ForCausalLM", (*sizes, 49152, 16384), rope_theta=theta, **more)
    config |= {"hidden_act": "gelu_pytorch_tanh", "mlp_type": "default", "norm_type": "layer_norm"}
    config |= {"norm_epsilon": 1e-5, "embedding_dropout": 0.1, "residual_dropout": 0.1, "initializer_range": 0.018042}
    return config | {"use_bias": True, "sliding_window": 4096}


def _gpt_oss(n_layers: int, n_experts: int) -> Config:
    scaling = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
    config = config_of("gpt_oss", "GptOssForCausalLM", (n_layers, 2880, 64, 8, 2880, 201088, 131072), head_dim=64)
    kinds = ["sliding_attention", "full_attention"] * (n_layers // 2)
    config |= {"rope_scaling": scaling | {"original_max_position_embeddings": 4096}, "rope_theta": 150000}
    config |= {"num_local_experts": n_experts, "num_experts_per_tok": 4, "experts_per_token": 4, "layer_types": kinds}
    config |= {"sliding_window": 128, "swiglu_limit": 7.0, "rms_norm_eps": 1e-5, "initial_context_length": 4096}
    return config | {"attention_bias": True, "tie_word_embeddings": False, "router_aux_loss_coef": 0.9}


def _llama4(n_experts: int, step: int, longest: int, **more: Any) -> Config:
    """The `text_config` of Llama-4-Scout-17B-16E-Instruct and Llama-4-Maverick-17B-128E-Instruct."""
    sizes = {
        "attention_chunk_size": 8192, "head_dim": 128, "interleave_moe_layer_step": step,
        "intermediate_size_mlp": 16384,
        "no_rope_layers": [], "num_experts_per_tok": 1, "num_local_experts": n_experts, "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0, "output_router_logits": False, "router_aux_loss_coef": 0.001,
        "router_jitter_noise": 0.0, "for_llm_compressor": False, "tie_word_embeddings": False, "attn_scale": 0.1,
        "floor_scale": 8192, "attn_temperature_tuning": True,
    }  # fmt: skip
    config = config_of("llama4_text", "Llama4ForCausalLM", (48, 5120, 40, 8, 8192, 202048, longest), **sizes | more)
    ids = {"bos_token_id": 200000, "eos_token_id": [200001, 200007, 200008], "pad_token_id": 200018}
    return config | ids


_SCOUT_ROPE = {"factor": 16.0, "high_freq_factor": 1.0, "low_freq_factor": 1.0, "rope_type": "llama3"}
_SCOUT_ROPE |= {"original_max_position_embeddings": 8192}

PUBLISHED: dict[str, tuple[Config, int]] = {
    "llama-4-scout": (_llama4(16, 1, 10485760, use_qk_norm=True, rope_scaling=_SCOUT_ROPE), 107_769_861_120),
    "llama-4-maverick": (_llama4(128, 2, 1048576, use_qk_norm=False), 400_711_848_960),
    "gemma-2b": (_gemma(18, 2048, 8, 1, 16384, act="gelu"), 2_506_172_416),
    "gemma-7b": (_gemma(28, 3072, 16, 16, 24576, act="gelu_pytorch_tanh"), 8_537_680_896),
    "qwen2.5-0.5b": (_qwen2(24, 896, 14, 2, 4864, 151936, tied=True), 494_032_768),
    "qwen2.5-1.5b": (_qwen2(28, 1536, 12, 2, 8960, 151936, tied=True), 1_543_714_304),
    "qwen2.5-7b": (_qwen2(28, 3584, 28, 4, 18944, 152064), 7_615_616_512),
    "qwen2.5-32b": (_qwen2(64, 5120, 40, 8, 27648, 152064), 32_763_876_352),
    "qwen2.5-72b": (_qwen2(80, 8192, 64, 8, 29568, 152064), 72_706_203_648),
    "qwen1.5-moe-a2.7b": (
        _qwen2_moe(
            24, 2048, 16, 16, 5632, dense=5632, max_position_embeddings=8192, num_experts=60, num_experts_per_tok=4,
            moe_intermediate_size=1408, shared_expert_intermediate_size=5632, use_sliding_window=False,
        ),
        14_315_784_192,
    ),
    "qwen2-57b-a14b": (
        _qwen2_moe(
            28, 3584, 28, 4, 18944, dense=18944, max_position_embeddings=131072, num_experts=64, num_experts_per_tok=8,
            moe_intermediate_size=2560, shared_expert_intermediate_size=20480, mlp_only_layers=[],
        ),
        57_408_658_944,
    ),
    "qwen3-next-80b-a3b": (
        config_of(
            "qwen3_next", "Qwen3NextForCausalLM", (48, 2048, 16, 2, 5120, 151936, 262144), head_dim=256,
            partial_rotary_factor=0.25, rope_theta=10000000, rms_norm_eps=1e-6, tie_word_embeddings=False,
            full_attention_interval=4, linear_conv_kernel_dim=4, linear_key_head_dim=128, linear_num_key_heads=16,
            linear_num_value_heads=32, linear_value_head_dim=128, decoder_sparse_step=1, mlp_only_layers=[],
            moe_intermediate_size=512, norm_topk_prob=True, num_experts=512, num_experts_per_tok=10,
            output_router_logits=False, router_aux_loss_coef=0.001, shared_expert_intermediate_size=512,
            use_sliding_window=False,
        ),
        79_674_391_296,
    ),
    "deepseek-v2-lite": (
        _deepseek_v2(
            27, 2048, 16, 16, 10944, q_lora_rank=None, n_routed_experts=64, moe_intermediate_size=1408, n_group=1,
            topk_group=1, topk_method="greedy", routed_scaling_factor=1.0,
        ),
        15_706_484_224,
    ),
    "deepseek-v2": (
        _deepseek_v2(
            60, 5120, 128, 128, 12288, q_lora_rank=1536, n_routed_experts=160, moe_intermediate_size=1536, n_group=8,
            topk_group=3, topk_method="group_limited_greedy", routed_scaling_factor=16.0,
        ),
        235_741_434_880,
    ),
    "command-r7b": (_cohere(32, 4096, 32, 8, 14336, 256000, 132096, windows=True, rope_theta=50000), 8_028_033_024),
    "command-a": (_cohere(64, 12288, 96, 8, 36864, 256000, 131072, windows=True, rope_theta=50000), 111_057_580_032),
    "command-r": (
        _cohere(40, 8192, 64, 64, 22528, 256000, 131072, windows=False, rope_theta=8000000.0, logit_scale=0.0625),
        34_980_831_232,
    ),
    "command-r-plus": (
        _cohere(
            *(64, 12288, 96, 8, 33792, 256000, 131072), windows=False, rope_theta=75000000.0,
            logit_scale=0.8333333333333334, use_qk_norm=True,
        ),
        103_810_674_688,
    ),
    "aya-23-8b": (
        _cohere(32, 4096, 32, 8, 14336, 256000, 8192, windows=False, rope_theta=10000, logit_scale=0.0625),
        8_028_033_024,
    ),
    "smollm3-3b": (
        config_of(
            "smollm3", "SmolLM3ForCausalLM", (36, 2048, 16, 4, 11008, 128256, 65536), rms_norm_eps=1e-6,
            rope_theta=5000000.0, mlp_bias=False, use_sliding_window=False, sliding_window=None, max_window_layers=28,
            no_rope_layer_interval=4, no_rope_layers=[1, 1, 1, 0] * 9, layer_types=["full_attention"] * 36,
            pretraining_tp=2,
        ),
        3_075_098_624,
    ),
    "olmo2-1b": (_olmo2(16, 2048, 16, 16, 8192), 1_484_916_736),
    "olmo2-7b": (_olmo2(32, 4096, 32, 32, 11008), 7_298_617_344),
    "olmo2-13b": (_olmo2(40, 5120, 40, 40, 13824), 13_716_198_400),
    "olmo2-32b": (_olmo2(64, 5120, 40, 8, 27648), 32_234_279_936),
    "olmoe-1b-7b": (
        config_of(
            "olmoe", "OlmoeForCausalLM", (16, 2048, 16, 16, 1024, 50304, 4096), clip_qkv=None, num_experts=64,
            num_experts_per_tok=8, norm_topk_prob=False, rms_norm_eps=1e-5, rope_theta=10000.0,
            output_router_logits=False, router_aux_loss_coef=0.01, tie_word_embeddings=False,
        ),
        6_919_161_856,
    ),
    "granite-3.1-2b": (
        _granite(2048, 8192, logits_scaling=8.0, attention_multiplier=0.015625, rope_theta=5000000.0), 2_533_531_648
    ),
    "granite-3.1-8b": (
        _granite(4096, 12800, logits_scaling=16.0, attention_multiplier=0.0078125, rope_theta=10000000.0),
        8_170_848_256,
    ),
    "gemma2-2b": (_gemma2(26, 2304, 8, 4, 9216, 256000), 2_614_341_888),
    "gemma2-9b": (_gemma2(42, 3584, 16, 8, 14336, 256000), 9_241_705_984),
    "gemma2-27b": (
        _gemma2(46, 4608, 32, 16, 36864, 256000, head_dim=128, query_pre_attn_scalar=144), 27_227_128_320
    ),
    "gemma3-270m": (_gemma2(18, 640, 4, 1, 2048, 262144), 268_098_176),
    "gemma3-1b": (_gemma2(26, 1152, 4, 1, 6912, 262144), 999_885_952),
    "gemma3-27b": (
        _gemma2(62, 5376, 32, 16, 21504, 262208, head_dim=128, query_pre_attn_scalar=168), 27_009_346_304
    ),
    "mistral-7b": (_mistral(14336, 32000, 32768, 10000.0, 4096), 7_241_732_096),
    "mistral-nemo-12b": (_mistral(14336, 131072, 131072, 1000000.0), 12_247_782_400),
    "mistral-small-24b": (_mistral(32768, 131072, 32768, 100000000.0), 23_572_403_200),
    "olmo3-7b": (_olmo3(32, 4096, 32, 32, 11008), 7_298_011_136),
    "olmo3-32b": (_olmo3(64, 5120, 40, 8, 27648), 32_233_522_176),
    "phi-3-mini": (
        config_of(
            "phi3", "Phi3ForCausalLM", (32, 3072, 32, 32, 8192, 32064, 4096), embd_pdrop=0.0, resid_pdrop=0.0,
            original_max_position_embeddings=4096, rms_norm_eps=1e-5, rope_theta=10000.0, sliding_window=2047,
            tie_word_embeddings=False,
        ),
        3_821_079_552,
    ),
    "glm-4-9b-0414": (_glm4(40, 4096, 32, 2, 13696, attention_bias=True), 9_400_279_040),
    "glm-4-32b-0414": (_glm4(61, 6144, 48, 2, 23040, attention_bias=False), 32_566_081_536),
    "starcoder2-3b": (_starcoder2(30, 3072, 24, 2, 12288, theta=999999.4420358813), 3_030_371_328),
    "starcoder2-7b": (_starcoder2(32, 4608, 36, 4, 18432, theta=1000000.0), 7_173_923_840),
    "starcoder2-15b": (
        _starcoder2(40, 6144, 48, 4, 24576, theta=100000.0, tie_word_embeddings=False), 15_957_889_024
    ),
    "gpt-oss-20b": (_gpt_oss(24, 32), 20_914_757_184),
    "gpt-oss-120b": (_gpt_oss(36, 128), 116_829_156_672),
    "granite-3.1-1b-a400m": (
        _granite(1024, 512, logits_scaling=6.0, attention_multiplier=0.015625, rope_theta=1500000.0)
        | {"model_type": "granitemoe", "architectures": ["GraniteMoeForCausalLM"], "num_hidden_layers": 24}
        | {"num_attention_heads": 16, "num_local_experts": 32, "num_experts_per_tok": 8, "rms_norm_eps": 1e-6},
        1_334_628_352,
    ),
    "phi-4": (
        config_of(
            "phi3", "Phi3ForCausalLM", (40, 5120, 40, 10, 17920, 100352, 16384), embd_pdrop=0.0, resid_pdrop=0.0,
            original_max_position_embeddings=16384, rms_norm_eps=1e-5, rope_theta=250000, sliding_window=None,
            tie_word_embeddings=False,
        ),
        14_659_507_200,
    ),
}  # fmt: skip


def _phi3(*sizes: int, pairs: int, **more: Any) -> Config:
    """The published keys; the divisors of longrope, which change no shape, are other numbers."""
    rope = {"type": "longrope", "short_factor": [1.0] * pairs, "long_factor": [1.0 + pair for pair in range(pairs)]}
    more = {"rope_scaling": rope, "original_max_position_embeddings": 4096, "sliding_window": 262144} | more
    more |= {"rms_norm_eps": 1e-5, "rope_theta": 10000.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
    return config_of("phi3", "Phi3ForCausalLM", (*sizes, 131072), **more)


PHI3: dict[str, tuple[Config, int]] = {
    "phi-3.5-mini": (_phi3(32, 3072, 32, 32, 8192, 32064, pairs=48, tie_word_embeddings=False), 3_821_079_552),
    "phi-4-mini": (
        _phi3(32, 3072, 24, 8, 8192, 200064, pairs=48, partial_rotary_factor=0.75, tie_word_embeddings=True),
        3_836_021_760,
    ),
}


GLM_45 = {
    "glm-4.5-air": (
        (46, 4096, 96, 8, 10944), {"moe_intermediate_size": 1408, "n_routed_experts": 128}, 106_852_251_264,
    ),
    "glm-4.5": (
        (92, 5120, 96, 8, 12288),
        {"moe_intermediate_size": 1536, "n_routed_experts": 160, "first_k_dense_replace": 3, "use_qk_norm": True}
        | {"routed_scaling_factor": 2.5},
        352_797_829_024,
    ),
}  # fmt: skip
