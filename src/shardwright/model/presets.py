"""Named model sizes: a debug model, open models, and the GPT family of published runs; no torch.

Sources: the `config.json` of each Hugging Face model, for `deepseek-v3` also sections 2.1, 4.1 and 4.2 of its report
(arXiv 2412.19437); it is the model as pretrained on sequences of 4096, without the later stretching of its context
and without the module that predicts a second token. Coefficients of balance losses are the published ones; the loss
itself is defined as in `balance.py`, whatever the code they were published with. For `gpt-*` table 1 of Narayanan et
al. (SC21, arXiv 2104.04473) and table 3 of Korthikanti et al. (arXiv 2205.05198). Tests hold the totals to the
published ones.
"""

from dataclasses import replace

from shardwright.errors import ConfigError, nearest
from shardwright.model.sections import LatentAttentionSpec, MoESpec, RopeScaling
from shardwright.model.spec import ModelSpec


def _llama3(n_layers: int, d_model: int, n_heads: int, d_ffn: int, *, factor: float, tied: bool) -> ModelSpec:
    return ModelSpec(
        n_layers=n_layers,
        d_model=d_model,
        n_heads=n_heads,
        n_kv_heads=8,
        head_dim=d_model // n_heads,
        d_ffn=d_ffn,
        vocab_size=128256,
        max_seq_len=131072,
        rope_theta=500000.0,
        rope_scaling=RopeScaling(factor=factor, low_freq_factor=1.0, high_freq_factor=4.0, original_max_seq_len=8192),
        tied_embedding=tied,
    )


def _qwen3(n_layers: int, d_model: int, n_heads: int, d_ffn: int, *, tied: bool) -> ModelSpec:
    return ModelSpec(
        n_layers=n_layers,
        d_model=d_model,
        n_heads=n_heads,
        n_kv_heads=8,
        head_dim=128,
        d_ffn=d_ffn,
        vocab_size=151936,
        max_seq_len=40960,
        norm_eps=1e-6,
        rope_theta=1000000.0,
        qk_norm=True,
        tied_embedding=tied,
    )


def _qwen3_moe(n_layers: int, d_model: int, n_heads: int, d_ffn: int, d_expert: int) -> ModelSpec:
    dense = _qwen3(n_layers, d_model, n_heads, d_ffn, tied=False)
    experts = MoESpec(n_experts=128, top_k=8, d_ffn=d_expert, bias_rate=0.0, aux_loss=0.001, aux_scope="batch")
    return replace(dense, n_kv_heads=4, moe=experts)


def _gpt(n_layers: int, d_model: int, n_heads: int, *, vocab: int = 51200, seq: int = 2048) -> ModelSpec:
    return ModelSpec(
        n_layers=n_layers,
        d_model=d_model,
        n_heads=n_heads,
        n_kv_heads=n_heads,
        head_dim=d_model // n_heads,
        d_ffn=4 * d_model,
        vocab_size=vocab,
        max_seq_len=seq,
        norm="layernorm",
        activation="gelu_tanh",
        positions="learned",
        bias=True,
        tied_embedding=True,
    )


PRESETS: dict[str, ModelSpec] = {
    "debug": ModelSpec(
        n_layers=4,
        d_model=64,
        n_heads=4,
        n_kv_heads=2,
        head_dim=16,
        d_ffn=176,
        vocab_size=512,
        max_seq_len=256,
    ),
    "debug-moe": ModelSpec(
        n_layers=4,
        d_model=64,
        n_heads=4,
        n_kv_heads=2,
        head_dim=16,
        d_ffn=176,
        vocab_size=512,
        max_seq_len=256,
        moe=MoESpec(n_experts=8, top_k=2, d_ffn=88, score="sigmoid", bias_rate=0.01),  # runs of hundreds of steps
    ),
    "smollm2-135m": ModelSpec(
        n_layers=30,
        d_model=576,
        n_heads=9,
        n_kv_heads=3,
        head_dim=64,
        d_ffn=1536,
        vocab_size=49152,
        max_seq_len=8192,
        rope_theta=100000.0,
        tied_embedding=True,
        init_std=1 / 24,
    ),
    "smollm2-1.7b": ModelSpec(
        n_layers=24,
        d_model=2048,
        n_heads=32,
        n_kv_heads=32,
        head_dim=64,
        d_ffn=8192,
        vocab_size=49152,
        max_seq_len=8192,
        rope_theta=130000.0,
        tied_embedding=True,
    ),
    "llama-3.2-1b": _llama3(16, 2048, 32, 8192, factor=32.0, tied=True),
    "llama-3.1-8b": _llama3(32, 4096, 32, 14336, factor=8.0, tied=False),
    "llama-3.1-70b": _llama3(80, 8192, 64, 28672, factor=8.0, tied=False),
    "llama-3.1-405b": _llama3(126, 16384, 128, 53248, factor=8.0, tied=False),
    "qwen3-0.6b": _qwen3(28, 1024, 16, 3072, tied=True),
    "qwen3-8b": _qwen3(36, 4096, 32, 12288, tied=False),
    "qwen3-32b": _qwen3(64, 5120, 64, 25600, tied=False),
    "mixtral-8x7b": ModelSpec(
        n_layers=32,
        d_model=4096,
        n_heads=32,
        n_kv_heads=8,
        head_dim=128,
        d_ffn=14336,
        vocab_size=32000,
        max_seq_len=32768,
        rope_theta=1000000.0,
        moe=MoESpec(n_experts=8, top_k=2, d_ffn=14336, bias_rate=0.0, aux_loss=0.02, aux_scope="batch"),
    ),
    "qwen3-30b-a3b": _qwen3_moe(48, 2048, 32, 6144, d_expert=768),
    "qwen3-235b-a22b": _qwen3_moe(94, 4096, 64, 12288, d_expert=1536),
    "deepseek-v3": ModelSpec(
        n_layers=61,
        d_model=7168,
        n_heads=128,
        n_kv_heads=128,
        head_dim=128,
        d_ffn=18432,
        vocab_size=129280,
        max_seq_len=4096,
        norm_eps=1e-6,
        latent_attention=LatentAttentionSpec(q_rank=1536, kv_rank=512, nope_dim=128, rope_dim=64, v_dim=128),
        moe=MoESpec(
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
        ),
        init_std=0.006,
    ),
    "gpt2": _gpt(12, 768, 12, vocab=50257, seq=1024),
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
# One model under the name of either paper: SC21 prints the exact size, Korthikanti et al. the round one.
PRESETS["gpt-529.6b"] = PRESETS["gpt-530b"]
PRESETS["gpt-1008b"] = PRESETS["gpt-1t"]


def resolve(name: str) -> ModelSpec:
    """The preset of that name; raises ConfigError with the nearest name if there is none."""
    if name not in PRESETS:
        raise ConfigError(f"model preset {name!r} does not exist; {nearest(name, PRESETS)}")
    return PRESETS[name]
