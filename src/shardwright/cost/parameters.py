"""Parameters of a rank, by stage: exact counts from the rows of the model (`model.modules`).

Shapes: n candidates, S stages.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

import numpy as np

from shardwright.cost import ledger
from shardwright.cost.blocks import BlockShape
from shardwright.cost.job import Candidates, Floats, Ints, Job
from shardwright.cost.pipeline import Stages
from shardwright.model.modules import end_rows, rows
from shardwright.model.row import SPLIT_DIM, Row, Split
from shardwright.model.spec import ModelSpec
from shardwright.optimizers import n_blocks
from shardwright.split.compression import BUCKET_BYTES
from shardwright.system.units import in_groups

DENSE, EXPERT = "dense parameters", "parameters in experts"
"""Ledger names of the parameters of a rank."""


@dataclass(frozen=True)
class Parameters:
    """Elements of the parameters of a rank of tp, before ZeRO shards them; experts are sharded over ep.

    `dense`, `expert`, (n, S): of each stage. `layer_dense`, `layer_expert`, (n,): of the largest layer, which ZeRO-3
    gathers at once; `matrix`, (n,): of the largest matmul of a feed-forward network, or of all experts together.
    `head`, (n,): of the matrix of the logits. `ends`, (n, S): embedding, positions, last norm and head. `hidden`, (n,
    S): hidden matrices. Both are included in `dense`. `of_block`: dense and expert elements of a layer of each kind,
    (n,). `trained`: the same without frozen parameters; if none is frozen, this object. `stored`: the same with
    quantised matrices as the elements that take as many bytes; if none is quantised, this object.
    """

    dense: Ints
    expert: Ints
    ends: Ints
    hidden: Ints
    layer_dense: Ints
    layer_expert: Ints
    matrix: Ints
    head: Ints
    of_block: Mapping[BlockShape, tuple[Ints, Ints]]
    of_trained: "Parameters | None" = None
    of_stored: "Parameters | None" = None

    @property
    def trained(self) -> "Parameters":
        return self if self.of_trained is None else self.of_trained

    @property
    def stored(self) -> "Parameters":
        return self if self.of_stored is None else self.of_stored

    def note(self, stages: Stages, rank: int) -> None:
        """Record the parameters of a rank of `pp` of one candidate: P dense parameters and Q in experts, and if some
        are frozen the A parameters of adapters, which are trained."""
        if not ledger.recording():
            return
        if self.of_trained is not None:
            adapters = self.of_trained.dense[:, stages.of_rank[rank]].sum(1)
            ledger.note("A", "", adapters, "", f"parameters of adapters, rank {rank} of pp")
        own_stages = stages.of_rank[rank]
        layers = {block: int(counts[own_stages].sum()) for block, counts in stages.layers_by_kind.items()}
        layers = {block: count for block, count in layers.items() if count}
        ends = self.ends[:, own_stages].sum(1)
        for name, kind, numel, place in (("P", DENSE, self.dense, 0), ("Q", EXPERT, self.expert, 1)):
            terms = {ledger.identifier(f"{kind} of {block.name}"): block for block in layers}
            terms = {term: block for term, block in terms.items() if np.any(self.of_block[block][place])}
            formula = [f"{layers[block]} * {term}" for term, block in terms.items()]
            formula += ["ends"] * (place == 0 and bool(np.any(ends)))
            if np.any(value := numel[:, own_stages].sum(1)):
                inputs = {term: self.of_block[block][place] for term, block in terms.items()}
                ledger.note(name, " + ".join(formula), value, "", f"parameters, rank {rank} of pp", ends=ends, **inputs)


class RankParameters(NamedTuple):
    """Parameters on a rank of `pp`, each (n,). `ends`: embedding, last norm and head; `hidden`: hidden matrices; both
    are included in `dense`. `frozen`, `frozen_experts`, `frozen_ends`: the parts of `dense`, `experts` and `ends`
    without gradients, which ZeRO shards; `hidden` has none. `replicas`: parameters replicated over tp with partial
    gradients on all tp ranks; `kv_replicas`: with partial gradients on the ranks with the same kv heads. `blocks`:
    layers of the rank; `expert_blocks`: layers with experts; `end_groups`: its stages with parameters outside of the
    layers. `untrained`: dense parameters without gradients, which every rank keeps. `compressed`: parameters whose
    gradients are compressed with error feedback, with the rows and the columns of logical matrices that are sent as
    products, the blocks of others, and the number of stages with some. `layer_padding`, `end_padding`,
    `expert_padding`, `frozen_padding`, `frozen_expert_padding`: elements that pad rows (`parameters.padding`), the
    last two of frozen parameters. `saved`, `saved_experts`: elements by which a quantised base is smaller. `buckets`:
    number of buckets of fp32 gradients without ZeRO, 0 if they are not counted."""

    dense: Ints
    experts: Ints
    ends: Ints
    hidden: Ints
    frozen: Ints
    frozen_experts: Ints
    frozen_ends: Ints
    replicas: Ints
    kv_replicas: Ints
    blocks: Ints
    expert_blocks: Ints
    end_groups: Ints
    untrained: Ints
    compressed: Ints
    left_rows: Ints
    right_columns: Ints
    blocks_of_gradients: Ints
    compressed_stages: Ints
    layer_padding: Ints
    end_padding: Ints
    expert_padding: Ints
    frozen_padding: Ints
    frozen_expert_padding: Ints
    buckets: Ints
    saved: Ints
    saved_experts: Ints

    @property
    def trained_dense(self) -> Ints:
        """Return the dense parameters that are not frozen."""
        return self.dense - self.frozen

    @property
    def trained_experts(self) -> Ints:
        """Return the parameters in experts that are not frozen."""
        return self.experts - self.frozen_experts


def tp_rank_parameters(
    model: ModelSpec,
    stages: Stages,
    tp: Ints,
    ep: Ints,
    tp_rank: int = 0,
    vocabulary_multiple: int = 0,
    element_bytes: int = 2,
    ends_tp: tuple[Ints, Ints] | None = None,
) -> Parameters:
    """Return the parameters of rank `tp_rank` of each tp group, for n pairs of tp and ep. `element_bytes`: of a weight.

    Rank 0 has the most: vocabulary shards are rounded up, and the last ranks have the remainder
    (`split.tensor.vocabulary_rows`). `vocabulary_multiple`: for a stack that pads the vocabulary to a multiple of this
    times tp (Megatron-LM: 128). `ends_tp`: as `vocabulary_shards` of the stack, else tp.

    Ignored: rows that no published number counts, such as the load of the experts.
    """
    of_embedding, of_head = (vocabulary_rows(model, n, tp_rank, vocabulary_multiple) for n in ends_tp or (tp, tp))
    matrix_rows = {"embedding": of_embedding, "head": of_head}
    whole = _parameters(model, stages, tp, ep, matrix_rows, trained=False)
    if model.lora is None:
        return whole
    whole = replace(whole, of_trained=_parameters(model, stages, tp, ep, matrix_rows, trained=True))
    if model.lora.base == "compute":
        return whole
    stored = _parameters(model, stages, tp, ep, matrix_rows, trained=False, element_bytes=element_bytes)
    return replace(whole, of_stored=stored)


def _parameters(
    model: ModelSpec,
    stages: Stages,
    tp: Ints,
    ep: Ints,
    matrix_rows: dict[str, Ints],
    *,
    trained: bool,
    element_bytes: int = 0,
) -> Parameters:
    """Return the parameters of a rank with `matrix_rows` of the vocabulary in embedding and head; with `trained`
    without frozen ones; with `element_bytes` as `Parameters.stored`."""
    ends = _ends(model, len(stages.layers), matrix_rows, trained=trained)
    dense, expert, hidden = ends.copy(), np.zeros_like(ends), np.zeros_like(ends)
    of_block: dict[BlockShape, tuple[Ints, Ints]] = {}
    layer_dense, layer_expert, matrix = np.zeros_like(tp), np.zeros_like(tp), np.zeros_like(tp)
    for kind, layers in stages.layers_by_kind.items():
        block = kind.trained if trained else kind.stored(element_bytes) if element_bytes else kind
        of_plain = np.zeros_like(tp)
        for split, numel in block.dense_numel.items():
            of_plain += numel // tp_shards(model, split, tp)
        of_hidden = np.zeros_like(tp)
        for split, numel in block.hidden_numel.items():
            of_hidden += numel // tp_shards(model, split, tp)
        of_experts = block.expert_numel // ep
        if block is kind:
            _note_block(model, block, tp, ep, of_plain, of_experts)
        of_block[kind] = (of_plain, of_experts)
        dense += of_plain[:, None] * layers
        expert += of_experts[:, None] * layers
        hidden += of_hidden[:, None] * layers
        layer_dense, layer_expert = np.maximum(layer_dense, of_plain), np.maximum(layer_expert, of_experts)
        matrix = np.maximum(matrix, np.maximum(block.network_numel // tp, block.expert_matmul_numel // ep))
        for row in block.adapters:
            matrix = np.maximum(matrix, elements(model, row, tp, ep))
    head = matrix_rows["head"] * model.d_model * (not trained)
    return Parameters(dense, expert, ends, hidden, layer_dense, layer_expert, matrix, head, of_block)


def with_partial_gradients(model: ModelSpec, stages: Stages, candidates: Candidates) -> tuple[Ints, Ints]:
    """Return the elements of parameters that are replicated over tp with partial gradients, each (n, S): replicas on
    all ranks of tp, and replicas of kv heads on the ranks with the same head; as `split.tensor.summed_over`."""
    tp, n_stages = candidates.tp, len(stages.layers)
    shape = (len(tp), n_stages)
    of_shards, of_heads, of_kv = (np.zeros(n_stages, np.int64) for _ in range(3))
    by_split = {"replicated": of_shards, "per_head": of_heads, "kv_column": of_kv}
    for block, layers in stages.layers_by_kind.items():
        for row in block.rows:
            if row.trained and row.split in by_split:
                by_split[row.split] += row.numel * layers
    for row in end_rows(model):
        if row.trained and row.split == "replicated":
            of_shards[_stages_of_end(model, row, n_stages)] += row.numel
    several = (tp > 1)[:, None]
    replicas = several * (of_heads + np.broadcast_to(candidates.sequence_parallel[:, None], shape) * of_shards)
    return replicas, (tp > model.n_kv_heads)[:, None] * (of_kv // model.n_kv_heads)


def means(model: ModelSpec, stages: Stages, tp: Ints, ep: Ints) -> tuple[Ints, Ints, Ints]:
    """Return the state elements of an optimizer with `means` on rank 0 of tp, each (n, S): a mean over each row of a
    matrix and all elements of a vector; a mean over each column of each logical matrix; and both means of experts."""
    shape = (len(tp), len(stages.layers))
    totals = np.zeros(shape, np.int64), np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    for block, layers in stages.layers_by_kind.items():
        for row in block.rows:
            if row.counted:
                for total, count in zip(totals, _means_of(model, row, tp, ep), strict=True):
                    total += count[:, None] * layers
    for row in end_rows(model):
        for stage in _stages_of_end(model, row, shape[1]):
            for total, count in zip(totals, _means_of(model, row, tp, ep), strict=True):
                total[:, stage] += count
    return totals


def _means_of(model: ModelSpec, row: Row, tp: Ints, ep: Ints) -> tuple[Ints, Ints, Ints]:
    """Return the counts of `means` of one parameter, each (n,)."""
    none = np.zeros_like(tp)
    if not row.trained:
        return none, none, none
    if row.split == "experts":
        if len(row.shape) == 2:  # biases: one matrix, whose rows are the experts
            return none, none, row.shape[0] // ep + row.shape[1]
        experts, height, width = row.shape
        return none, none, experts // ep * (height + max(1, len(row.parts)) * width)
    n_rows, n_columns = _rows_and_columns(model, row, tp)
    if len(row.shape) == 1:
        return n_rows, none, none
    return n_rows, max(1, len(row.parts)) * n_columns, none


def buckets(model: ModelSpec, stages: Stages, tp: Ints, ep: Ints) -> Ints:
    """Return the buckets of ZeRO-0's fp32 gradient sums of each stage (`split.compression`) on rank 0 of tp, (n, S)."""
    degrees, back = np.unique(np.stack([tp, ep]), axis=1, return_inverse=True)
    layers = tuple(map(tuple, stages.layers))
    counts = np.array([_buckets(model, layers, *degree) for degree in degrees.T.tolist()], dtype=np.int64)
    return np.asarray(counts[back.ravel()])


@cache
def _buckets(model: ModelSpec, layers: tuple[tuple[int, ...], ...], tp: int, ep: int) -> tuple[int, ...]:
    """Return the number of buckets of each stage."""
    sizes: list[list[int]] = [[] for _ in layers]
    stage_of = {number: stage for stage, numbers in enumerate(layers) for number in numbers}
    copies: list[tuple[int, int]] = []
    for name, row in sorted(rows(model).items(), key=lambda item: item[1].kind != "embedding"):
        if not (row.trained and row.counted):
            continue
        place, layer = name.split(".")[:2]
        first, *others = [stage_of[int(layer)]] if place == "layers" else _stages_of_end(model, row, len(layers))
        n_rows, n_columns = _rows_and_columns(model, row, np.array(tp))
        numel = row.numel // ep if row.split == "experts" else int(n_rows * n_columns)
        sizes[first].append(4 * numel)
        copies += [(other, 4 * numel) for other in others]
    for stage, size in copies:  # the tied matrix is the head of the last stage
        sizes[stage].append(size)
    return tuple(sum(1 for _ in in_groups(reversed(n_bytes), int, BUCKET_BYTES)) for n_bytes in sizes)


def padding(model: ModelSpec, stages: Stages, candidates: Candidates) -> Ints:
    """Return the elements with which FSDP2 pads the rows of parameters that its ranks do not divide, on rank 0 of tp,
    (5, n, S): of dense parameters in layers, of other dense parameters, and of experts; and of these sums the parts of
    frozen parameters that are dense, and in experts."""
    tp, ep = candidates.tp, candidates.ep
    result = np.zeros((5, len(tp), len(stages.layers)), np.int64)
    for block, layers in stages.layers_by_kind.items():
        for row in block.rows:
            if row.counted and row.kind != "balance":
                in_experts = row.split == "experts"
                over = candidates.expert_shards if in_experts else candidates.shards
                n = _padding_of(model, row, tp, ep, over)[:, None] * layers
                result[2 * in_experts] += n
                result[3 + in_experts] += n * row.frozen
    for row in end_rows(model):
        for stage in _stages_of_end(model, row, result.shape[2]):
            n_of_end = _padding_of(model, row, tp, ep, candidates.shards)
            result[1, :, stage] += n_of_end
            result[3, :, stage] += n_of_end * row.frozen
    return result


def _padding_of(model: ModelSpec, row: Row, tp: Ints, ep: Ints, over: Ints) -> Ints:
    """Return the padding of one parameter over `over` ranks, (n,). Experts not divisible by it are sharded by row."""
    if row.split == "experts":
        experts = row.shape[0] // ep
        if not np.any(by_row := experts % over > 0):
            return np.zeros_like(tp)
        return np.asarray(by_row * (-row.shape[1] % over * experts * math.prod(row.shape[2:])))
    n_rows, n_columns = _rows_and_columns(model, row, tp)
    return np.asarray(-n_rows % over * n_columns)


def _rows_and_columns(model: ModelSpec, row: Row, tp: Ints) -> tuple[Ints, Ints]:
    """Return the rows of a parameter of all tokens on rank 0 of tp, and the elements of each row, (n,)."""
    rows_over, columns_over = (tp_shards(model, row.split, tp) if row.split_dim == dim else 1 for dim in (0, 1))
    n_rows = vocabulary_rows(model, tp) if row.split == "vocabulary" else row.shape[0] // rows_over
    none = np.zeros_like(tp)
    return n_rows + none, math.prod(row.shape[1:]) // columns_over + none


def elements(model: ModelSpec, row: Row, tp: Ints, ep: Ints) -> Ints:
    """Return the elements of a parameter on rank 0 of tp and ep, (n,)."""
    if row.split == "experts":
        return np.asarray(row.numel // ep)
    n_rows, n_columns = _rows_and_columns(model, row, tp)
    return np.asarray(n_rows * n_columns)


def in_blocks(job: Job, stages: Stages, tp: Ints, ep: Ints) -> Ints:
    """Return, for an optimizer whose states are `in_blocks`, the elements whose states are codes, and the scales of one
    state, on rank 0 of tp, (4, n, S): both of dense parameters, and both of experts."""
    shape = (len(tp), len(stages.layers))
    result = np.zeros((4, *shape), np.int64)
    for block, layers in stages.layers_by_kind.items():
        for row in block.rows:
            if row.counted:
                result += _in_blocks_of(job, row, tp, ep)[..., None] * layers
    for row in end_rows(job.model):
        for stage in _stages_of_end(job.model, row, shape[1]):
            result[..., stage] += _in_blocks_of(job, row, tp, ep)
    return result


def _in_blocks_of(job: Job, row: Row, tp: Ints, ep: Ints) -> Ints:
    """Return the counts of `in_blocks` of one parameter, (4, n): codes and scales, dense and of experts."""
    none, options, model = np.zeros_like(tp), job.options_of_optimizer, job.model
    if not (row.trained and job.optimizer_kind.has_codes(row, options)):
        return np.stack([none] * 4)
    blocks = n_blocks(row.shape[-1], options["block_size"])
    if row.split == "experts":
        rows_of_rank = row.shape[0] // ep * math.prod(row.shape[1:-1])
        return np.stack([none, none, rows_of_rank * row.shape[-1], rows_of_rank * blocks])
    n_rows, n_columns = _rows_and_columns(model, row, tp)
    return np.stack([n_rows * n_columns, n_rows * blocks, none, none])


def vocabulary_rows(model: ModelSpec, tp: Ints, tp_rank: int = 0, multiple: int = 0) -> Ints:
    """Return the rows of embedding and head on a rank, (n,)."""
    if multiple:
        unit = multiple * tp
        return -(-model.vocab_size // unit) * multiple
    shard_rows = -(-model.vocab_size // tp)
    return np.clip(model.vocab_size - tp_rank * shard_rows, 0, shard_rows)


def vocabulary_shards(job: Job, candidates: Candidates) -> tuple[Ints, Ints]:
    """Return the number of ranks of tp over which the embedding and the head are sharded, each (n,)."""
    if not job.stack.tp_by_matrix:
        return candidates.tp, candidates.tp
    return np.ones_like(candidates.tp), candidates.token_shards


def _note_block(model: ModelSpec, block: BlockShape, tp: Ints, ep: Ints, dense: Ints, experts: Ints) -> None:
    divided = {"kv_column": " / min(tp, kv_heads)"} | dict.fromkeys(SPLIT_DIM.keys() - {"kv_column"}, " / tp")
    formula = " + ".join(f"{split}{divided.get(split, '')}" for split in block.dense_numel)
    ledger.note(
        f"{DENSE} of {block.name}", formula, dense, "", "on a rank, by how tp splits them", "Parameters of a layer",
        tp=tp, kv_heads=model.n_kv_heads, **block.dense_numel,
    )  # fmt: skip
    if block.experts:
        sizes: ledger.Inputs = {"expert_elements": block.expert_numel, "ep": ep}
        name = f"{EXPERT} of {block.name}"
        ledger.note(name, "expert_elements / ep", experts, "", "", "Parameters of a layer", **sizes)


def tp_shards(model: ModelSpec, split: Split, tp: Ints) -> Ints | int:
    """Return the number of shards of a parameter over tp; kv heads are replicated if there are fewer than ranks."""
    if split == "kv_column":
        return np.minimum(tp, model.n_kv_heads)
    return tp if split in SPLIT_DIM else 1


def scaled_outputs(model: ModelSpec, block: BlockShape, tp: Ints) -> dict[str, Floats | float]:
    """Return for each token the sum of the outputs that DoRA scales on a rank, by symbol: of column-parallel matrices,
    which have all tokens, and of others, which have a shard of the tokens."""
    column = [row for row in block.scaled if row.split != "replicated"]
    return {
        "outputs_scaled": sum(row.numel / tp_shards(model, row.split, tp) for row in column),
        "results_scaled": sum(row.numel for row in block.scaled if row.split == "replicated"),
    }


def computed_share(model: ModelSpec, row: Row, tp: Ints) -> Floats | float:
    """Return the rows that a rank multiplies by a matrix / the tokens of a layer: of experts top_k / tp."""
    return model.moe.top_k / tp if model.moe is not None and row.split == "experts" else 1.0


def _ends(model: ModelSpec, n_stages: int, matrix_rows: dict[str, Ints], *, trained: bool = False) -> Ints:
    """Return embedding and learned positions in the first stage, norm and head in the last, (n, S). A tied embedding,
    or an embedding that modules of multi-token prediction read, counts in both stages, or once if there is one stage.
    `matrix_rows`: rows of the vocabulary on a rank, of each kind of matrix. `trained`: leave out frozen parameters."""
    result = np.zeros((len(matrix_rows["head"]), n_stages), dtype=np.int64)
    for row in end_rows(model):
        if trained and row.frozen:
            continue
        count: Ints | int = matrix_rows[row.kind] * model.d_model if row.split == "vocabulary" else row.numel
        for stage in _stages_of_end(model, row, n_stages):
            result[:, stage] += count
    return result


def _stages_of_end(model: ModelSpec, row: Row, n_stages: int) -> list[int]:
    """Return the stages that have a parameter which is in no layer."""
    stage = 0 if row.kind == "embedding" else n_stages - 1
    read_again = row.name == "embedding.weight" and bool(row.matmul or model.mtp_modules)
    return [stage, n_stages - 1] if read_again and n_stages > 1 else [stage]
