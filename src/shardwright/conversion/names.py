"""The names that trainers give to the tensors of a model, each as a table of an architecture of `transformers`."""

from collections.abc import Mapping
from dataclasses import replace

from shardwright.hugging_face.architecture import Architecture, Stored, Table, architecture_of
from shardwright.hugging_face.llama import LLAMA
from shardwright.hugging_face.table import FileTensor, file_tensors
from shardwright.model.spec import ModelSpec
from shardwright.system.errors import ConfigError

_LAYER: Table = {
    "attention_norm": "attention_norm",
    "attention.o": "attention.wo",
    "ffn_norm": "ffn_norm",
    "ffn.gate": "feed_forward.w1",
    "ffn.up": "feed_forward.w3",
    "ffn.down": "feed_forward.w2",
}


def _torchtitan(heads: str, head: str) -> Architecture:
    """Return torchtitan's names of Llama 3. `heads`: the module of queries, keys and values. The rotated elements of a
    head are paired 2i with 2i + 1, as complex numbers."""
    attention: Table = {
        "attention.q": Stored(f"{heads}.wq", interleaved=True),
        "attention.k": Stored(f"{heads}.wk", interleaved=True),
        "attention.v": f"{heads}.wv",
    }
    ends: Table = {"embedding": "tok_embeddings", "norm": "norm", "head": head}
    return replace(LLAMA, prefix="", ends=ends, layer=_LAYER | attention, ignored={})


_MEGATRON: Table = {
    "attention_norm.weight": "self_attention.linear_qkv.layer_norm_weight",
    ("attention.q", "attention.k", "attention.v"): Stored("self_attention.linear_qkv", by_kv_head=True),
    "attention.q_norm": "self_attention.q_layernorm",
    "attention.k_norm": "self_attention.k_layernorm",
    "attention.o": "self_attention.linear_proj",
}
_MEGATRON_DENSE: Table = {
    "ffn_norm.weight": "mlp.linear_fc1.layer_norm_weight",
    ("ffn.gate", "ffn.up"): "mlp.linear_fc1",
    "ffn.down": "mlp.linear_fc2",
}
_MEGATRON_EXPERTS: Table = {
    "ffn_norm": "pre_mlp_layernorm",
    "ffn.router": "mlp.router",
    ("ffn.experts.gate", "ffn.experts.up"): "mlp.experts.experts.linear_fc1.weight",
    "ffn.experts.down": "mlp.experts.experts.linear_fc2.weight",
}
"""The experts of a layer are one tensor (experts, out, in), also where each is a module of its own."""
_IN_MEGATRON = ("llama", "qwen2", "qwen3", "mixtral", "qwen3_moe")
"""Architectures of transformers whose layers are one of the tables of Megatron."""
MEGATRON_LAYERS = "decoder.layers."

TRANSFORMERS, TORCHTITAN, MEGATRON = "transformers", "torchtitan", "megatron"
_TABLES: Mapping[str, Architecture] = {
    TORCHTITAN: _torchtitan("attention.qkv_linear", "lm_head"),
    "torchtitan before 0.3": _torchtitan("attention", "output"),
}
NAMINGS = (TRANSFORMERS, *_TABLES)
"""Names of tensors in a distributed checkpoint. One is written with the first or the second."""


def named_tensors_of(naming: str, spec: ModelSpec) -> list[FileTensor]:
    """Return the tensors of a model under the names of a trainer. Raises ConfigError with the reasons if the trainer
    does not have the model."""
    if naming == TRANSFORMERS:
        return [tensor for tensor in file_tensors(architecture_of(spec), spec) if not tensor.copy]
    if naming == MEGATRON:
        return file_tensors(_megatron(spec), spec)
    misfits = LLAMA.misfits(spec) + (["the embedding is tied to the head"] if spec.tied_embedding else [])
    if misfits or spec.bias:
        reasons = "; ".join(misfits or ["it has biases"])
        raise ConfigError(
            f"torchtitan's names are known for Llama 3 only, and the model is another: {reasons}; --to dcp writes the "
            f"names of transformers for every architecture that `export` has"
        )
    return file_tensors(_TABLES[naming], spec)


def _megatron(spec: ModelSpec) -> Architecture:
    """Return megatron-core's names of a GPTModel. Raises ConfigError if Megatron's names of a model are not known."""
    name = architecture_of(spec).model_type
    mixed = spec.moe is not None and (spec.moe.first_dense or spec.moe.dense_layers or spec.moe.interval > 1)
    unlike = [
        *([] if name in _IN_MEGATRON else [f"its architecture is {name}"]),
        *(["some of its layers are dense and others have experts"] if mixed else []),
        *(["it attends to windows"] if spec.window else []),
        *(["it has modules of multi-token prediction"] if spec.mtp_modules else []),
        *(
            [f"its rope_scaling is {scaling.kind}"]
            if (scaling := spec.rope_scaling) and scaling.kind != "llama3"
            else []
        ),
    ]
    if unlike:
        raise ConfigError(
            f"Megatron's names are known for {', '.join(_IN_MEGATRON)}, without windows, and with experts in every "
            f"layer or in none; {' and '.join(unlike)}; --to hf writes the weights of every architecture"
        )
    ends: Table = {"embedding": "embedding.word_embeddings", "norm": "decoder.final_layernorm", "head": "output_layer"}
    layer = _MEGATRON | (_MEGATRON_DENSE if spec.moe is None else _MEGATRON_EXPERTS)
    return replace(LLAMA, prefix="", layers=MEGATRON_LAYERS + "{layer}.", ends=ends, layer=layer, ignored={})
