"""Named model sizes: a debug model, open models, and the GPT family of published runs; no torch.

Sources: the `config.json` of each Hugging Face model; for `gpt-*` table 1 of Narayanan et al. (SC21, arXiv
2104.04473) and table 3 of Korthikanti et al. (arXiv 2205.05198). Tests hold the totals to the published ones.
"""

from shardloom.errors import ConfigError, nearest
from shardloom.model.spec import ModelSpec, RopeScaling


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
