"""Named model sizes: a debug model, open models, and the GPT family of published runs; no torch.

Sources: the `config.json` of each Hugging Face model; for `deepseek-v3` also sections 2.1, 4.1 and 4.2 of its report
(arXiv 2412.19437). `deepseek-v3` is the model as pretrained on sequences of 4096, before the context extension and
without the multi-token prediction module, which `mtp_modules=1` adds. Coefficients of balance losses are the published
ones; the loss is defined by `balance.py` and may differ from the published code's. For `gpt-*`: table 1 of Narayanan et
al. (SC21, arXiv 2104.04473) and table 3 of Korthikanti et al. (arXiv 2205.05198). Tests compare the totals with
published ones.
"""

import math
from dataclasses import replace
from typing import Any

from shardwright.model.linear_sizes import LinearAttentionSpec
from shardwright.model.sections import LatentAttentionSpec, MoESpec, RopeScaling
from shardwright.model.spec import ModelSpec
from shardwright.system.errors import ConfigError, nearest

_SIZES = ("n_layers", "d_model", "n_heads", "n_kv_heads", "head_dim", "d_ffn", "vocab_size", "max_seq_len")


def _spec(*sizes: int, **more: Any) -> ModelSpec:
    """Return a model from its `_SIZES`, in that order, and the fields that are not at their defaults."""
    return ModelSpec(**more | dict(zip(_SIZES, sizes, strict=True)))


def _smollm2(n_layers: int, d_model: int, n_heads: int, kv_heads: int, d_ffn: int, **more: Any) -> ModelSpec:
    return _spec(n_layers, d_model, n_heads, kv_heads, 64, d_ffn, 49152, 8192, tied_embedding=True, **more)


def _llama3(n_layers: int, d_model: int, n_heads: int, d_ffn: int, *, factor: float, tied: bool = False) -> ModelSpec:
    scaling = RopeScaling(factor=factor, low_freq_factor=1.0, high_freq_factor=4.0, original_max_seq_len=8192)
    more = {"rope_theta": 500000.0, "rope_scaling": scaling, "tied_embedding": tied}
    return _spec(n_layers, d_model, n_heads, 8, d_model // n_heads, d_ffn, 128256, 131072, **more)


def _gemma(*sizes: int, **more: Any) -> ModelSpec:
    """Return a model with the norms, activation and embedding of all Gemmas."""
    same = {"norm_eps": 1e-6, "norm_offset": True, "activation": "geglu_tanh", "tied_embedding": True}
    return _spec(*sizes, embedding_scale=math.sqrt(sizes[1]), **more | same)


def _gemma1(n_layers: int, d_model: int, n_heads: int, kv_heads: int, d_ffn: int) -> ModelSpec:
    return _gemma(n_layers, d_model, n_heads, kv_heads, 256, d_ffn, 256000, 8192)


def _gemma2(*sizes: int, **more: Any) -> ModelSpec:
    caps = {"attention_softcap": 50.0, "logit_softcap": 30.0, "window": 4096, "global_interval": 2}
    return _gemma(*sizes, 256000, 8192, norm_position="both", **caps | more)


def _gemma3(*sizes: int, window: int = 1024, vocab: int = 262208, **more: Any) -> ModelSpec:
    layers = {"window": window, "global_interval": 6, "window_rope_theta": 10000.0, "rope_theta": 1000000.0}
    scaling = {"rope_scaling": RopeScaling(kind="linear", factor=8.0)} if vocab == 262208 else {}
    fixed = {"norm_position": "both", "qk_norm": True}
    return _gemma(*sizes, vocab, 131072 if scaling else 32768, **fixed | layers | scaling | more)


def _olmo3(n_layers: int, d_model: int, n_heads: int, kv_heads: int, d_ffn: int) -> ModelSpec:
    scaling = RopeScaling(kind="yarn", factor=8.0, original_max_seq_len=8192, attention_factor=1.2079441541679836)
    sizes = _olmo2(n_layers, d_model, n_heads, kv_heads, d_ffn)
    return replace(
        sizes,
        vocab_size=100278,
        max_seq_len=65536,
        window=4096,
        global_interval=4,
        window_rope_theta=500000.0,
        rope_scaling=scaling,
    )


def _qwen2(n_layers: int, d_model: int, n_heads: int, kv_heads: int, d_ffn: int, vocab: int = 152064) -> ModelSpec:
    more = {"norm_eps": 1e-6, "rope_theta": 1000000.0, "qkv_bias": True, "tied_embedding": vocab == 151936}
    return _spec(n_layers, d_model, n_heads, kv_heads, d_model // n_heads, d_ffn, vocab, 32768, **more)


def _qwen2_experts(n_experts: int, top_k: int, d_ffn: int, d_shared: int) -> MoESpec:
    experts = _qwen3_experts(d_ffn)
    experts = replace(experts, n_experts=n_experts, top_k=top_k, normalise=False)
    return replace(experts, n_shared=1, d_shared=d_shared, shared_gate=True)


def _qwen3(n_layers: int, d_model: int, n_heads: int, d_ffn: int, kv_heads: int = 8, **more: Any) -> ModelSpec:
    more |= {"norm_eps": 1e-6, "rope_theta": 1000000.0, "qk_norm": True}
    return _spec(n_layers, d_model, n_heads, kv_heads, 128, d_ffn, 151936, 40960, **more)


def _qwen3_experts(d_ffn: int) -> MoESpec:
    return MoESpec(n_experts=128, top_k=8, d_ffn=d_ffn, bias_rate=0.0, aux_loss=0.001, aux_scope="batch")


def _olmo2(n_layers: int, d_model: int, n_heads: int, kv_heads: int, d_ffn: int) -> ModelSpec:
    more = {"norm_eps": 1e-6, "rope_theta": 500000.0, "norm_position": "after", "qk_norm": True, "qk_norm_whole": True}
    return _spec(n_layers, d_model, n_heads, kv_heads, 128, d_ffn, 100352, 4096, **more)


def _glm4(n_layers: int, d_model: int, n_heads: int, d_ffn: int, *, qkv_bias: bool) -> ModelSpec:
    more = {"norm_position": "both", "rope_fraction": 0.5, "qkv_bias": qkv_bias}
    return _spec(n_layers, d_model, n_heads, 2, 128, d_ffn, 151552, 32768, **more)


def _starcoder2(n_layers: int, d_model: int, n_heads: int, kv_heads: int, theta: float, tied: bool) -> ModelSpec:
    more = {"norm": "layernorm", "bias": True, "activation": "gelu_tanh", "rope_theta": theta, "window": 4096}
    sizes = (n_layers, d_model, n_heads, kv_heads, 128, 4 * d_model, 49152, 16384)
    return _spec(*sizes, **more, tied_embedding=tied, init_std=0.018042)


def _cohere(n_layers: int, d_model: int, n_heads: int, kv_heads: int, d_ffn: int, **more: Any) -> ModelSpec:
    """Return a Command R; with a window, a model in which only layers with a window rotate."""
    layers = {"global_interval": 4, "nope_interval": 4, "rope_theta": 50000.0} if "window" in more else {}
    same = {"norm": "layernorm", "norm_bias": False, "parallel_branches": True, "tied_embedding": True}
    sizes = (n_layers, d_model, n_heads, kv_heads, d_model // n_heads, d_ffn, 256000)
    return _spec(*sizes, more.pop("max_seq_len", 131072), **same | layers | more)


def _granite(d_model: int, d_ffn: int, *, logit_divisor: float, **more: Any) -> ModelSpec:
    scales = {"embedding_scale": 12.0, "residual_scale": 0.22, "logit_divisor": logit_divisor, "tied_embedding": True}
    return _spec(40, d_model, 32, 8, d_model // 32, d_ffn, 49155, 131072, **more | scales)


def _gpt(n_layers: int, d_model: int, n_heads: int, vocab: int = 51200, seq: int = 2048) -> ModelSpec:
    more = {"norm": "layernorm", "activation": "gelu_tanh", "positions": "learned", "bias": True}
    sizes = (n_layers, d_model, n_heads, n_heads, d_model // n_heads, 4 * d_model, vocab, seq)
    return _spec(*sizes, tied_embedding=True, **more)


def _gpt3(n_layers: int, d_model: int, n_heads: int) -> ModelSpec:
    return _gpt(n_layers, d_model, n_heads, 50257, 2048)


_DEBUG = _spec(4, 64, 4, 2, 16, 176, 512, 256)
# Its runs have hundreds of steps, in which the usual bias_rate would change little.
_DEBUG_MOE = MoESpec(n_experts=8, top_k=2, d_ffn=88, score="sigmoid", bias_rate=0.01)
_MIXTRAL = MoESpec(n_experts=8, top_k=2, d_ffn=14336, bias_rate=0.0, aux_loss=0.02, aux_scope="batch")
_OLMOE = MoESpec(
    n_experts=64, top_k=8, d_ffn=1024, normalise=False, bias_rate=0.0, aux_loss=0.01, aux_scope="batch", z_loss=0.001
)
_DEEPSEEK_MOE = MoESpec(
    n_experts=256,
    top_k=8,
    d_ffn=2048,
    n_shared=1,
    first_dense=3,
    score="sigmoid",
    weight_scale=2.5,
    n_groups=8,
    groups_per_token=4,
    bias_rate=0.001,
    aux_loss=0.0001,
)
_DEEPSEEK_ATTENTION = LatentAttentionSpec(q_rank=1536, kv_rank=512, nope_dim=128, rope_dim=64, v_dim=128)

_DEEPSEEK_V2_MOE = MoESpec(
    n_experts=160,
    top_k=6,
    d_ffn=1536,
    n_shared=2,
    first_dense=1,
    normalise=False,
    weight_scale=16.0,
    n_groups=8,
    groups_per_token=3,
    bias_rate=0.0,
    aux_loss=0.001,
)


def _deepseek_v2(*sizes: int, **more: Any) -> ModelSpec:
    scaling = RopeScaling(kind="yarn", factor=40.0, original_max_seq_len=4096, mscale=0.707, mscale_all_dim=0.707)
    return _spec(*sizes, 102400, 163840, norm_eps=1e-6, rope_scaling=scaling, **more)


def _gpt_oss(n_layers: int, n_experts: int) -> ModelSpec:
    scaling = RopeScaling(kind="yarn", factor=32.0, original_max_seq_len=4096, truncate=False)
    more = {"rope_theta": 150000.0, "rope_scaling": scaling, "window": 128, "global_interval": 2}
    more |= {"attention_sinks": True, "qkv_bias": True, "o_bias": True, "activation": "swiglu_clamped"}
    moe = replace(_MIXTRAL, n_experts=n_experts, top_k=4, d_ffn=2880, bias=True, aux_loss=0.001)
    return _spec(n_layers, 2880, 64, 8, 64, 2880, 201088, 131072, moe=moe, **more)


def _llama4(n_experts: int, interval: int, max_seq_len: int, **more: Any) -> ModelSpec:
    layers = {"window": 8192, "window_chunked": True, "global_interval": 4, "nope_interval": 4, "rope_theta": 500000.0}
    layers |= {"temperature_scale": 0.1, "temperature_interval": 8192}
    router = MoESpec(n_experts=n_experts, top_k=1, d_ffn=8192, score="sigmoid", normalise=False, bias_rate=0.0)
    moe = replace(router, n_shared=1, scale_input=True, interval=interval, aux_loss=0.001, aux_scope="batch")
    return _spec(48, 5120, 40, 8, 128, 16384, 202048, max_seq_len, moe=moe, **layers | more)


def _glm45(n_layers: int, d_model: int, d_ffn: int, moe: MoESpec, **more: Any) -> ModelSpec:
    fixed = {"rope_theta": 1000000.0, "rope_fraction": 0.5, "qkv_bias": True, "moe": moe}
    return _spec(n_layers, d_model, 96, 8, 128, d_ffn, 151552, 131072, **fixed | more)


_GLM_MOE = replace(
    _DEEPSEEK_MOE, n_experts=128, d_ffn=1408, first_dense=1, weight_scale=1.0, n_groups=1, groups_per_token=1
)

PRESETS: dict[str, ModelSpec] = {
    "debug": _DEBUG,
    "debug-moe": replace(_DEBUG, moe=_DEBUG_MOE),
    "smollm2-135m": _smollm2(30, 576, 9, 3, 1536, rope_theta=100000.0, init_std=1 / 24),
    "smollm2-1.7b": _smollm2(24, 2048, 32, 32, 8192, rope_theta=130000.0),
    "llama-2-7b": _spec(32, 4096, 32, 32, 128, 11008, 32000, 4096),
    "llama-2-13b": _spec(40, 5120, 40, 40, 128, 13824, 32000, 4096),
    "llama-2-70b": _spec(80, 8192, 64, 8, 128, 28672, 32000, 4096),
    "llama-3.2-1b": _llama3(16, 2048, 32, 8192, factor=32.0, tied=True),
    "llama-3.2-3b": _llama3(28, 3072, 24, 8192, factor=32.0, tied=True),
    "llama-3.1-8b": _llama3(32, 4096, 32, 14336, factor=8.0),
    "llama-3.1-70b": _llama3(80, 8192, 64, 28672, factor=8.0),
    "llama-3.1-405b": _llama3(126, 16384, 128, 53248, factor=8.0),
    "smollm3-3b": _spec(
        *(36, 2048, 16, 4, 128, 11008, 128256, 65536),
        norm_eps=1e-6,
        rope_theta=5000000.0,
        nope_interval=4,
        tied_embedding=True,
    ),
    "qwen2.5-0.5b": _qwen2(24, 896, 14, 2, 4864, 151936),
    "qwen2.5-1.5b": _qwen2(28, 1536, 12, 2, 8960, 151936),
    "qwen2.5-7b": _qwen2(28, 3584, 28, 4, 18944),
    "qwen2.5-32b": _qwen2(64, 5120, 40, 8, 27648),
    "qwen2.5-72b": _qwen2(80, 8192, 64, 8, 29568),
    "qwen1.5-moe-a2.7b": replace(
        _qwen2(24, 2048, 16, 16, 5632, 151936),
        max_seq_len=8192,
        tied_embedding=False,
        moe=_qwen2_experts(60, 4, 1408, 5632),
    ),
    "qwen2-57b-a14b": replace(
        _qwen2(28, 3584, 28, 4, 18944, 151936),
        max_seq_len=131072,
        tied_embedding=False,
        moe=_qwen2_experts(64, 8, 2560, 20480),
    ),
    "gemma-2b": _gemma1(18, 2048, 8, 1, 16384),
    "gemma-7b": _gemma1(28, 3072, 16, 16, 24576),
    "gemma2-2b": _gemma2(26, 2304, 8, 4, 256, 9216),
    "gemma2-9b": _gemma2(42, 3584, 16, 8, 256, 14336),
    "gemma2-27b": _gemma2(46, 4608, 32, 16, 128, 36864, attention_scale=144**-0.5),
    "gemma3-270m": _gemma3(18, 640, 4, 1, 256, 2048, window=512, vocab=262144),
    "gemma3-1b": _gemma3(26, 1152, 4, 1, 256, 6912, window=512, vocab=262144),
    "gemma3-4b": _gemma3(34, 2560, 8, 4, 256, 10240),
    "gemma3-12b": _gemma3(48, 3840, 16, 8, 256, 15360),
    "gemma3-27b": _gemma3(62, 5376, 32, 16, 128, 21504, attention_scale=168**-0.5),
    "mistral-7b": _spec(32, 4096, 32, 8, 128, 14336, 32000, 32768, window=4096),
    "mistral-nemo-12b": _spec(40, 5120, 32, 8, 128, 14336, 131072, 131072, rope_theta=1000000.0),
    "mistral-small-24b": _spec(40, 5120, 32, 8, 128, 32768, 131072, 32768, rope_theta=100000000.0),
    "glm-4-9b-0414": _glm4(40, 4096, 32, 13696, qkv_bias=True),
    "glm-4-32b-0414": _glm4(61, 6144, 48, 23040, qkv_bias=False),
    "starcoder2-3b": _starcoder2(30, 3072, 24, 2, 999999.4420358813, tied=True),
    "starcoder2-7b": _starcoder2(32, 4608, 36, 4, 1000000.0, tied=True),
    "starcoder2-15b": _starcoder2(40, 6144, 48, 4, 100000.0, tied=False),
    "qwen3-0.6b": _qwen3(28, 1024, 16, 3072, tied_embedding=True),
    "qwen3-1.7b": _qwen3(28, 2048, 16, 6144, tied_embedding=True),
    "qwen3-4b": _qwen3(36, 2560, 32, 9728, tied_embedding=True),
    "qwen3-8b": _qwen3(36, 4096, 32, 12288),
    "qwen3-14b": _qwen3(40, 5120, 40, 17408),
    "qwen3-32b": _qwen3(64, 5120, 64, 25600),
    "mixtral-8x7b": _spec(32, 4096, 32, 8, 128, 14336, 32000, 32768, rope_theta=1000000.0, moe=_MIXTRAL),
    "qwen3-30b-a3b": _qwen3(48, 2048, 32, 6144, 4, moe=_qwen3_experts(768)),
    "qwen3-235b-a22b": _qwen3(94, 4096, 64, 12288, 4, moe=_qwen3_experts(1536)),
    "qwen3-next-80b-a3b": _spec(
        *(48, 2048, 16, 2, 256, 5120, 151936, 262144),
        norm_eps=1e-6,
        rope_theta=1e7,
        qk_norm=True,
        rope_fraction=0.25,
        norm_offset=True,
        attention_gate=True,
        linear_attention=LinearAttentionSpec(n_k_heads=16, n_v_heads=32, k_dim=128, v_dim=128),
        moe=replace(_qwen3_experts(512), n_experts=512, top_k=10, n_shared=1, shared_gate=True),
    ),
    "deepseek-v2-lite": _deepseek_v2(
        *(27, 2048, 16, 16, 128, 10944),
        latent_attention=replace(_DEEPSEEK_ATTENTION, q_rank=0),
        moe=replace(_DEEPSEEK_V2_MOE, n_experts=64, d_ffn=1408, weight_scale=1.0, n_groups=1, groups_per_token=1),
    ),
    "deepseek-v2": _deepseek_v2(
        *(60, 5120, 128, 128, 128, 12288), latent_attention=_DEEPSEEK_ATTENTION, moe=_DEEPSEEK_V2_MOE
    ),
    "deepseek-v3": _spec(
        *(61, 7168, 128, 128, 128, 18432, 129280, 4096),
        norm_eps=1e-6,
        latent_attention=_DEEPSEEK_ATTENTION,
        moe=_DEEPSEEK_MOE,
        init_std=0.006,
    ),
    "glm-4.5-air": _glm45(46, 4096, 10944, _GLM_MOE),
    "glm-4.5": _glm45(
        92, 5120, 12288, replace(_GLM_MOE, n_experts=160, d_ffn=1536, first_dense=3, weight_scale=2.5), qk_norm=True
    ),
    "kimi-k2": _spec(
        *(61, 7168, 64, 64, 128, 18432, 163840, 4096),
        norm_eps=1e-6,
        rope_theta=50000.0,
        latent_attention=_DEEPSEEK_ATTENTION,
        moe=replace(_DEEPSEEK_MOE, n_experts=384, first_dense=1, weight_scale=2.827, n_groups=1, groups_per_token=1),
    ),
    "olmo2-1b": _olmo2(16, 2048, 16, 16, 8192),
    "olmo2-7b": _olmo2(32, 4096, 32, 32, 11008),
    "olmo2-13b": _olmo2(40, 5120, 40, 40, 13824),
    "olmo2-32b": _olmo2(64, 5120, 40, 8, 27648),
    "olmo3-7b": _olmo3(32, 4096, 32, 32, 11008),
    "olmo3-32b": _olmo3(64, 5120, 40, 8, 27648),
    "olmoe-1b-7b": _spec(*(16, 2048, 16, 16, 128, 1024, 50304, 4096), qk_norm=True, qk_norm_whole=True, moe=_OLMOE),
    "granite-3.1-2b": _granite(2048, 8192, logit_divisor=8.0, attention_scale=0.015625, rope_theta=5000000.0),
    "granite-3.1-8b": _granite(4096, 12800, logit_divisor=16.0, attention_scale=0.0078125, rope_theta=10000000.0),
    "phi-3-mini": _spec(32, 3072, 32, 32, 96, 8192, 32064, 4096, window=2047),
    "granite-3.1-1b-a400m": replace(
        _granite(1024, 512, logit_divisor=6.0, attention_scale=0.015625, rope_theta=1500000.0),
        n_layers=24,
        n_heads=16,
        head_dim=64,
        norm_eps=1e-6,
        moe=MoESpec(n_experts=32, top_k=8, d_ffn=512, bias_rate=0.0),
    ),
    "phi-4": _spec(40, 5120, 40, 10, 128, 17920, 100352, 16384, rope_theta=250000.0),
    "command-r": _cohere(40, 8192, 64, 64, 22528, logit_divisor=16.0, rope_theta=8000000.0),
    "command-r-plus": _cohere(
        *(64, 12288, 96, 8, 33792), logit_divisor=1.2, rope_theta=75000000.0, qk_norm=True, qk_norm_heads=True
    ),
    "command-r7b": _cohere(32, 4096, 32, 8, 14336, logit_divisor=4.0, window=4096, max_seq_len=132096),
    "command-a": _cohere(64, 12288, 96, 8, 36864, logit_divisor=4.0, window=4096),
    "aya-23-8b": _cohere(32, 4096, 32, 8, 14336, logit_divisor=16.0, max_seq_len=8192),
    "gpt-oss-20b": _gpt_oss(24, 32),
    "gpt-oss-120b": _gpt_oss(36, 128),
    "llama-4-scout": _llama4(
        *(16, 1, 10485760),
        qk_norm=True,
        qk_norm_weight=False,
        rope_scaling=RopeScaling(factor=16.0, low_freq_factor=1.0, high_freq_factor=1.0, original_max_seq_len=8192),
    ),
    "llama-4-maverick": _llama4(128, 2, 1048576),
    "gpt2": _gpt(12, 768, 12, 50257, 1024),
    "gpt3-125m": _gpt3(12, 768, 12),
    "gpt3-350m": _gpt3(24, 1024, 16),
    "gpt3-760m": _gpt3(24, 1536, 16),
    "gpt3-1.3b": _gpt3(24, 2048, 16),
    "gpt3-2.7b": _gpt3(32, 2560, 32),
    "gpt3-6.7b": _gpt3(32, 4096, 32),
    "gpt3-13b": _gpt3(40, 5120, 40),
    "gpt3-175b": _gpt3(96, 12288, 96),
    "gpt-1.7b": _gpt(24, 2304, 24),
    "gpt-3.6b": _gpt(30, 3072, 32),
    "gpt-7.5b": _gpt(36, 4096, 32),
    "gpt-18.4b": _gpt(40, 6144, 48),
    "gpt-22b": _gpt(48, 6144, 64),
    "gpt-39.1b": _gpt(48, 8192, 64),
    "gpt-76.1b": _gpt(60, 10240, 80),
    "gpt-145.6b": _gpt(80, 12288, 96),
    "gpt-175b": _gpt(96, 12288, 96),
    "gpt-310.1b": _gpt(96, 16384, 128),
    "gpt-530b": _gpt(105, 20480, 128),
    "gpt-1t": _gpt(128, 25600, 160),
}
# The same model under the names of both papers: SC21 prints the exact size, Korthikanti et al. a rounded one.
PRESETS["gpt-529.6b"] = PRESETS["gpt-530b"]
PRESETS["gpt-1008b"] = PRESETS["gpt-1t"]


def resolve(name: str) -> ModelSpec:
    """Return the preset `name`; raises ConfigError with the nearest name if there is none."""
    if name not in PRESETS:
        raise ConfigError(f"model preset {name!r} does not exist; {nearest(name, PRESETS)}")
    return PRESETS[name]
