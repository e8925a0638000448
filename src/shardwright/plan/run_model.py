"""Which decoder a published run trained: sizes from the table, the habits of its family from its name."""

import re
from dataclasses import replace

from shardwright.model.presets import resolve
from shardwright.model.sections import MoESpec
from shardwright.model.spec import ModelSpec

# A family's word stands by itself or before a number (llama3, GPT530B), and not inside of another word.
_OTHERS = r"(?:m|u|flan)?t5|\w*berta?|vit|clip|multimodal|\w*mamba"
_LLAMA = r"\w*llama|mistral|ministral|mixtral|qwen|deepseek|baichuan|yi|gemma"
_GPT = r"\w*gpt|megatron|bloom|opt|turing|mt nlg"
HABITS = {
    "gpt": "gpt habits: biases, learned positions, tied embedding, dropout 0.1",
    "mpt": "mpt habits: no biases, learned positions, tied embedding, no dropout",
    "llama": "llama habits: gated network, rotary positions, no biases, a head of its own, no dropout",
}


def family(name: str, *, gated: bool) -> str | None:
    """ "gpt", "mpt" or "llama"; None for what is no decoder. A name that says nothing goes by whether its feed-forward
    network is other than 4 x d_model wide, as `gated` ones are."""
    words = " ".join(re.findall(r"[a-z0-9]+", name.lower()))
    if _names(_OTHERS, words):
        return None
    if _names("mpt", words):
        return "mpt"
    # A llama trained by Megatron is a llama.
    if _names(_LLAMA, words):
        return "llama"
    if _names(_GPT, words):
        return "gpt"
    return "llama" if gated else "gpt"


def decoder(sizes: ModelSpec, kind: str) -> ModelSpec:
    """Sizes with the habits of a family, those of `HABITS`. gpt: as in Megatron-LM's examples; mpt: as in
    llm-foundry's benchmarks; llama: as the sizes say."""
    if kind == "llama":
        return sizes
    plain = replace(sizes, norm="layernorm", activation="gelu_tanh", positions="learned", tied_embedding=True)
    return replace(plain, bias=True, dropout=0.1) if kind == "gpt" else plain


def with_experts(spec: ModelSpec, moe: MoESpec, name: str) -> ModelSpec:
    """A mixture in the place of the feed-forward networks; DeepSeek's with its latent attention and shared experts.

    DeepSeek-V2 (arXiv 2405.04434, section 3.1.2) and V3 (2412.19437, 4.2) have the same latent attention, V2 two shared
    experts and one dense layer, V3 one and three. A model "cut to" a few layers keeps one dense layer.
    """
    # Experts come without biases, and a router that picks one has its score as the weight.
    moe, spec = replace(moe, normalise=moe.top_k > 1), replace(spec, bias=False)
    if "deepseek" not in name.lower():
        return replace(spec, moe=moe)
    second = "v2" in name.lower()
    latent = resolve("deepseek-v3").latent_attention
    assert latent is not None
    first_dense = 1 if second or "cut to" in name else 3
    moe = replace(moe, n_shared=2 if second else 1, first_dense=first_dense)
    return replace(spec, moe=moe, latent_attention=latent, head_dim=latent.v_dim, n_kv_heads=spec.n_heads)


def _names(families: str, words: str) -> bool:
    return re.search(rf"\b(?:{families})(?:v?\d\w*)?\b", words) is not None
