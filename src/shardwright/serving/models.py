"""Models by the names that tables of measurements use: the presets, and models that are served but not trained here.

Sources: `config.json` of each Hugging Face model; for `gpt-*` FasterTransformer's docs/gpt_guide.md. GPT-J and Falcon
run attention and feed-forward network in parallel; here they have the sizes of a decoder that runs them one after the
other.
"""

import re
from dataclasses import replace
from typing import Any

from shardwright.model.presets import PRESETS
from shardwright.model.sections import LatentAttentionSpec, MoESpec
from shardwright.model.spec import ModelSpec
from shardwright.system.errors import InputError, nearest

_SIZES = ("n_layers", "d_model", "n_heads", "n_kv_heads", "head_dim", "d_ffn", "vocab_size", "max_seq_len")


def _spec(*sizes: int, **more: Any) -> ModelSpec:
    return ModelSpec(**more | dict(zip(_SIZES, sizes, strict=True)))


def _plain(*sizes: int, tied: bool = False) -> ModelSpec:
    return _spec(*sizes, tied_embedding=tied, norm="layernorm", activation="gelu_tanh", bias=True)


SERVED: dict[str, ModelSpec] = {
    "deepseek-v3": replace(PRESETS["deepseek-v3"], max_seq_len=163840),
    "llama-30b": _spec(60, 6656, 52, 52, 128, 17920, 32000, 2048),
    "llama-65b": _spec(80, 8192, 64, 64, 128, 22016, 32000, 2048),
    "codellama-7b": _spec(32, 4096, 32, 32, 128, 11008, 32016, 16384),
    "codellama-13b": _spec(40, 5120, 40, 40, 128, 13824, 32016, 16384),
    "codellama-34b": _spec(48, 8192, 64, 8, 128, 22016, 32000, 16384),
    "llama-3.2-3b": _spec(28, 3072, 24, 8, 128, 8192, 128256, 131072, tied_embedding=True),
    "mistral-7b": _spec(32, 4096, 32, 8, 128, 14336, 32000, 32768),
    "mistral-nemo-12b": _spec(40, 5120, 32, 8, 128, 14336, 131072, 131072),
    "mistral-small-24b": _spec(40, 5120, 32, 8, 128, 32768, 131072, 32768),
    "mistral-large-123b": _spec(88, 12288, 96, 8, 128, 28672, 32768, 131072),
    "mixtral-8x22b": _spec(
        *(56, 6144, 48, 8, 128, 16384, 32768, 65536), moe=MoESpec(n_experts=8, top_k=2, d_ffn=16384, bias_rate=0.0)
    ),
    "internlm-7b": _spec(32, 4096, 32, 32, 128, 11008, 103168, 2048),
    "internlm-20b": _spec(60, 5120, 40, 40, 128, 13824, 103168, 4096),
    "yi-34b": _spec(60, 7168, 56, 8, 128, 20480, 64000, 4096),
    "qwen-7b": _spec(32, 4096, 32, 32, 128, 11008, 151936, 8192),
    "qwen-14b": _spec(40, 5120, 40, 40, 128, 13696, 152064, 8192),
    "qwen-72b": _spec(80, 8192, 64, 64, 128, 24576, 152064, 32768),
    "qwen2.5-7b": _spec(28, 3584, 28, 4, 128, 18944, 152064, 131072),
    "qwen2.5-32b": _spec(64, 5120, 40, 8, 128, 27648, 152064, 131072),
    "qwen2.5-72b": _spec(80, 8192, 64, 8, 128, 29568, 152064, 131072),
    "qwen2.5-14b": _spec(48, 5120, 40, 8, 128, 13824, 152064, 131072),
    "qwen3-4b": _spec(36, 2560, 32, 8, 128, 9728, 151936, 40960, qk_norm=True, tied_embedding=True),
    "qwen3-14b": _spec(40, 5120, 40, 8, 128, 17408, 151936, 40960, qk_norm=True),
    "deepseek-v2": _spec(
        *(60, 5120, 128, 128, 128, 12288, 102400, 163840),
        latent_attention=LatentAttentionSpec(q_rank=1536, kv_rank=512, nope_dim=128, rope_dim=64, v_dim=128),
        moe=MoESpec(n_experts=160, top_k=6, d_ffn=1536, n_shared=2, first_dense=1, bias_rate=0.0),
    ),
    "bloom-176b": _plain(70, 14336, 112, 112, 128, 57344, 250880, 2048, tied=True),
    "bloom-7b": _plain(30, 4096, 32, 32, 128, 16384, 250880, 2048, tied=True),
    "opt-6.7b": _plain(32, 4096, 32, 32, 128, 16384, 50272, 2048, tied=True),
    "opt-13b": _plain(40, 5120, 40, 40, 128, 20480, 50272, 2048, tied=True),
    "opt-30b": _plain(48, 7168, 56, 56, 128, 28672, 50272, 2048, tied=True),
    "opt-66b": _plain(64, 9216, 72, 72, 128, 36864, 50272, 2048, tied=True),
    "gpt-neox-20b": _plain(44, 6144, 64, 64, 96, 24576, 50432, 2048),
    "gpt-j-6b": _plain(28, 4096, 16, 16, 256, 16384, 50400, 2048),
    "falcon-40b": _plain(60, 8192, 128, 8, 64, 32768, 65024, 2048),
    "falcon-180b": _plain(80, 14848, 232, 8, 64, 59392, 65024, 2048),
    "gpt-6.7b": _plain(32, 4096, 32, 32, 128, 16384, 51200, 2048),
    "gpt-20b": _plain(44, 6144, 48, 48, 128, 24576, 51200, 2048),
}
"""Models other than the presets, and DeepSeek-V3 with the positions of its context extension."""

_OTHER_NAMES = {
    "llama7b": "llama-2-7b",
    "llama13b": "llama-2-13b",
    "llama70b": "llama-2-70b",
    "vicuna7b": "llama-2-7b",
    "vicuna13b": "llama-2-13b",
    "bloom": "bloom-176b",
    "bloom7b1": "bloom-7b",
    "mistralnemo": "mistral-nemo-12b",
    "mistrallarge": "mistral-large-123b",
    "llama4scout17b16e": "llama-4-scout",
    "llama4maverick17b128e": "llama-4-maverick",
    "gptj": "gpt-j-6b",
    "mixtral8x7b01": "mixtral-8x7b",
    "deepseekr1": "deepseek-v3",
    "deepseekr10528": "deepseek-v3",
    "deepseekv30324": "deepseek-v3",
    "deepseekv31": "deepseek-v3",
    "deepseekr1distillllama70b": "llama-3.1-70b",
    "deepseekr1distillllama8b": "llama-3.1-8b",
    "llama33b": "llama-30b",
    "llama3405b": "llama-3.1-405b",
    "opt175b": "gpt-175b",
    "gpt3175b": "gpt-175b",
    "qwen27b": "qwen2.5-7b",
    "qwen272b": "qwen2.5-72b",
    "llama3370b": "llama-3.1-70b",
    "llama38b": "llama-3.1-8b",
    "llama370b": "llama-3.1-70b",
    "qwen3235b": "qwen3-235b-a22b",
    "qwen330b": "qwen3-30b-a3b",
}
"""Names that differ by more than case, punctuation and the words that `_letters` removes."""


def named(name: str) -> tuple[str, ModelSpec]:
    """Return the model of a name, as tables and model pages write it, with its name here.

    Raises InputError with the nearest name if there is none.
    """
    known = PRESETS | SERVED
    by_letters = {_letters(model_name): model_name for model_name in known} | _OTHER_NAMES
    letters = _letters(name.rpartition("/")[2])
    if letters not in by_letters:
        raise InputError(f"model {name!r} is not known; {nearest(name.lower(), known)}")
    matched = by_letters[letters]
    return matched, known[matched]


def _letters(name: str) -> str:
    """Return a name without case, punctuation, and words for how it was tuned or quantised."""
    plain = re.sub(r"[-_ ](instruct|chat|hf|fp8|fp16|bf16|v0\.[123]|2507|meta)(?=[-_ ]|$)", "", name.lower())
    return re.sub(r"[^a-z0-9]", "", re.sub(r"^meta[-_ ]", "", plain))
