"""Which decoder a published run trained: sizes from the table, the habits of its family from its name."""

import re
from dataclasses import replace

from shardloom.model.presets import resolve
from shardloom.model.sections import MoESpec
from shardloom.model.spec import ModelSpec

_GPT = r"gpt|megatron|bloom|opt|turing|mt-nlg"
_LLAMA = r"llama|mistral|mixtral|qwen|deepseek|baichuan|yi-|gemma"
_OTHERS = r"bert|t5|vit|clip|multimodal|mamba"


def family(name: str, *, gated: bool) -> str | None:
    """ "gpt", "mpt" or "llama"; None for what is no decoder. A name that says nothing goes by whether its feed-forward
    network is other than 4 x d_model wide, as `gated` ones are."""
    name = name.lower()
    if re.search(_OTHERS, name):
        return None
    if "mpt" in name:
        return "mpt"
    if re.search(_GPT, name):
        return "gpt"
    return "llama" if gated or re.search(_LLAMA, name) else "gpt"


def decoder(sizes: ModelSpec, kind: str) -> ModelSpec:
    """Sizes with the habits of a family. gpt: biases, learned positions, dropout of 0.1, as in Megatron-LM's examples;
    mpt: none of these (llm-foundry's benchmarks); llama: as the sizes say."""
    if kind == "llama":
        return sizes
    plain = replace(sizes, norm="layernorm", activation="gelu_tanh", positions="learned", tied_embedding=True)
    return replace(plain, bias=True, dropout=0.1) if kind == "gpt" else plain


def with_experts(spec: ModelSpec, moe: MoESpec, name: str) -> ModelSpec:
    """A mixture in the place of the feed-forward networks; DeepSeek's with its latent attention and shared experts.

    DeepSeek-V2 (arXiv 2405.04434, section 3.1.2) and V3 (2412.19437, 4.2) have the same latent attention, V2 two shared
    experts and one dense layer, V3 one and three. A model "cut to" a few layers keeps one dense layer.
    """
    if "deepseek" not in name.lower():
        return replace(spec, moe=moe)
    second = "v2" in name.lower()
    latent = resolve("deepseek-v3").latent_attention
    assert latent is not None
    first_dense = 1 if second or "cut to" in name else 3
    moe = replace(moe, n_shared=2 if second else 1, first_dense=first_dense)
    return replace(spec, moe=moe, latent_attention=latent, head_dim=latent.v_dim, n_kv_heads=spec.n_heads)
