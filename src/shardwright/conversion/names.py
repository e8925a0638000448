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


TRANSFORMERS, TORCHTITAN = "transformers", "torchtitan"
_TABLES: Mapping[str, Architecture] = {
    TORCHTITAN: _torchtitan("attention.qkv_linear", "lm_head"),
    "torchtitan before 0.3": _torchtitan("attention", "output"),
}
NAMINGS = (TRANSFORMERS, *_TABLES)
"""Names of tensors that are read. A checkpoint is written with the first or the second."""


def named_tensors_of(naming: str, spec: ModelSpec) -> list[FileTensor]:
    """Return the tensors of a model under the names of a trainer. Raises ConfigError with the reasons if the trainer
    does not have the model."""
    if naming == TRANSFORMERS:
        return [tensor for tensor in file_tensors(architecture_of(spec), spec) if not tensor.copy]
    misfits = LLAMA.misfits(spec) + (["the embedding is tied to the head"] if spec.tied_embedding else [])
    if misfits or spec.bias:
        said = "; ".join(misfits or ["it has biases"])
        raise ConfigError(
            f"torchtitan's names are known for Llama 3 only, and the model is another: {said}; --to dcp writes the "
            f"names of transformers for every architecture that `export` has"
        )
    return file_tensors(_TABLES[naming], spec)
