"""Parameters that a rank holds, by stage: exact, from the sizes of the model and the table of splits (`split.table`).

Shapes: n candidates, S stages.
"""

from dataclasses import dataclass

import numpy as np

from shardwright.cost.job import Ints
from shardwright.cost.pipeline import Stages
from shardwright.model.spec import ModelSpec


@dataclass(frozen=True)
class Parameters:
    """Elements that a rank of tp holds. Dense ones are copies on all ranks of dp x cp; experts are dealt out over ep.

    `dense`, `expert`, (n, S): of each stage. `layer_dense`, `layer_expert`, (n,): of the largest layer, which is what
    ZeRO-3 gathers at once; `matrix`, (n,): of its largest matrix, gate and up or that of all its experts as one.
    `head`, (n,): of the matrix that makes logits. `ends`, (n, S): embedding, positions, last norm and head, a part of
    `dense`.
    """

    dense: Ints
    expert: Ints
    ends: Ints
    layer_dense: Ints
    layer_expert: Ints
    matrix: Ints
    head: Ints


def of_ranks(
    model: ModelSpec, stages: Stages, tp: Ints, ep: Ints, tp_rank: int = 0, vocabulary_multiple: int = 0
) -> Parameters:
    """Parameters of rank `tp_rank` of each tp group, for n pairs of tp and ep.

    Rank 0 has the most: shares of the vocabulary are rounded up, and the last ranks have what is left
    (`split.tensor.vocabulary_rows`). `vocabulary_multiple`: a stack that adds rows instead, until they divide by this
    times tp (Megatron-LM: 128).

    Ignored: nothing; the biases by which experts are picked count as parameters, as in `ModelSpec.n_parameters`.
    """
    attention = _attention(model, tp)
    norms = model.parameters_by_module()["layer.norms"]
    network = _network(model, tp, model.d_ffn)
    plain = attention + norms + network
    mixture = plain
    experts = np.zeros_like(tp)
    if model.moe is not None:
        of_expert = model.parameters_by_module()["layer.experts"] // model.moe.n_experts
        shared = _network(model, tp, model.moe.n_shared * model.moe.d_ffn) if model.moe.n_shared else 0
        mixture = attention + norms + model.parameters_by_module()["layer.router"] + shared
        experts = model.moe.n_experts * of_expert // ep
    inputs = 2 if model.activation == "swiglu" else 1
    widest = model.d_model * inputs * model.d_ffn // tp if stages.plain.any() else np.zeros_like(tp)
    ends = _ends(model, len(stages.layers), tp, tp_rank, vocabulary_multiple)
    dense = plain[:, None] * stages.plain + mixture[:, None] * stages.mixtures + ends
    largest = np.maximum(plain, mixture) if stages.plain.any() else mixture
    return Parameters(
        dense=dense,
        expert=experts[:, None] * stages.mixtures,
        ends=ends,
        layer_dense=largest,
        layer_expert=experts,
        matrix=np.maximum(widest, experts * inputs // (inputs + 1)),
        head=vocabulary_rows(model, tp, tp_rank, vocabulary_multiple) * model.d_model,
    )


def vocabulary_rows(model: ModelSpec, tp: Ints, tp_rank: int = 0, multiple: int = 0) -> Ints:
    """Rows of embedding and head that a rank has, (n,)."""
    if multiple:
        unit = multiple * tp
        return -(-model.vocab_size // unit) * multiple
    share = -(-model.vocab_size // tp)
    return np.clip(model.vocab_size - tp_rank * share, 0, share)


def _attention(model: ModelSpec, tp: Ints) -> Ints:
    """Of one layer, its inner norms included: q and o cut by head, k and v by kv head, or copies of one where there are
    fewer than ranks; what latent attention makes narrow vectors with is a copy on every rank."""
    h, q = model.d_model, model.n_heads * model.head_dim // tp
    latent = model.latent_attention
    if latent is None:
        kv = np.maximum(model.n_kv_heads // tp, 1) * model.head_dim
        found = 2 * h * (q + kv)
        if model.bias:
            found = found + q + 2 * kv + h
        return found + (2 * model.head_dim if model.qk_norm else 0)
    heads = model.n_heads // tp
    queries = latent.q_rank * (h + 1 + heads * model.qk_dim) if latent.q_rank else h * heads * model.qk_dim
    narrow = h * (latent.kv_rank + latent.rope_dim) + latent.kv_rank
    return queries + narrow + latent.kv_rank * heads * (latent.nope_dim + latent.v_dim) + heads * latent.v_dim * h


def _network(model: ModelSpec, tp: Ints, width: int) -> Ints:
    """A feed-forward network of inner width `width`: gate and up by rows, down by columns, its bias a copy."""
    inputs, inner = (2 if model.activation == "swiglu" else 1), width // tp
    found = (inputs + 1) * model.d_model * inner
    return found + inputs * inner + model.d_model if model.bias else found


def _ends(model: ModelSpec, n_stages: int, tp: Ints, tp_rank: int, multiple: int) -> Ints:
    """Embedding and learned positions in the first stage, norm and head in the last, (n, S). A tied matrix counts in
    both, once where they are one."""
    modules = model.parameters_by_module()
    matrix = vocabulary_rows(model, tp, tp_rank, multiple) * model.d_model
    found = np.zeros((len(tp), n_stages), dtype=np.int64)
    found[:, 0] += matrix + modules["positions"]
    found[:, -1] += modules["final_norm"]
    if not model.tied_embedding or n_stages > 1:
        found[:, -1] += matrix
    return found
