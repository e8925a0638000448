"""Memory of a rank that lasts for a whole step: parameters, gradients, optimizer states and related buffers.

With P elements of parameters on the rank, N ranks over which they are sharded (`Candidates.shards`, for experts
`expert_shards`), e bytes of a working weight, and from `Stack` g `gradient_bytes`, w `master_bytes` (none in fp32) and
m `state_bytes` for each optimizer state:

| zero | weights | gradients | master and moments |
| ---- | ------- | --------- | ------------------ |
| 0    | e P     | g P       | (w + m) P          |
| 1    | e P     | g P       | (w + m) P / N      |
| 2    | e P     | g P / N   | (w + m) P / N      |
| 3    | e P / N | g P / N   | (w + m) P / N      |

In fp32 there are no master weights, but a stack that gathers from shards (`Stack.gathers_master`) has e P / N of them
in addition to the gathered weights with zero 1 and 2 too.

If a stack keeps no buffer for gradients (`Stack.keeps_gradients`), the gradients of a stage exist from its first
backward pass of a step on; after its last one they are sharded with zero 1 too (`stage_state_bytes`).

With adapters (`model.lora`) g, w and m count for the A parameters of the adapters alone. The base is frozen: it has
e bytes for each of its parameters, which ZeRO-3 alone shards, and no gradients or optimizer states. Of a quantised base
`P_stored` and `Q_stored` count the elements of e bytes that take as many bytes; ZeRO-3 gathers these bytes.

Source: ZeRO, arXiv 1910.02054, section 5, with 2, 2 and 12 bytes; Megatron-LM's distributed optimizer is stage 1 with
2, 4 and 12. If a stack gathers from the master weights, zero 3 has no working weights except the gathered ones. A
pipeline that gathers once a step (`Layout.zero_pp_gather`) has unsharded weights and gradients until the end of the
step; FSDP in `torch.distributed.pipelining` has them with gathers in each pass, too. Ignored: padding of shards; and
that the second replica of a tied embedding has no optimizer states if one rank has the first and the last stage.
"""

import numpy as np
from numpy.typing import NDArray

from shardwright.cost import compression, ledger, parameters
from shardwright.cost.compression import waits_for_replicas
from shardwright.cost.gradients import gathers_all, keeps_gradients, shares_gradients
from shardwright.cost.job import Candidates, Floats, Job
from shardwright.cost.ledger import Formulas
from shardwright.cost.parameters import Parameters
from shardwright.cost.pipeline import Stages
from shardwright.cost.rank_parameters import again_ranks
from shardwright.layout.keys import ERROR_FEEDBACK
from shardwright.optimizers import OFFLOAD_CHUNK_BYTES
from shardwright.split.compression import powersgd_rank


def rank_state_bytes(job: Job, candidates: Candidates, stages: Stages, params: Parameters) -> dict[str, Floats]:
    """Return the bytes by kind, each (n, R)."""
    stack, has_master = job.stack, job.precision != "fp32"
    sharded = candidates.zero == 3
    f = _formulas(job, candidates, stages, params)
    f.add(
        kept_weights=~(sharded & (stack.gathers_master and has_master))[:, None] + 0,
        fp8_weight_bytes=stack.fp8_weight_bytes * (job.precision == "fp8"),
        gathers=sharded[:, None] + 0,
        gathers_all=gathers_all(job, candidates)[:, None] + 0,
        always_two=int(stack.gathers_in_loss),
        always=keeps_gradients(job, candidates)[:, None] + 0,
        layers=np.array([len(layers) for layers in stages.layers])[stages.of_rank].sum(1),
        largest_layer=(params.stored.layer_dense + params.stored.layer_expert)[:, None],
    )
    workspace = stack.library_bytes(job.cluster.accelerator, experts=job.model.moe is not None)

    weights = _sharded(f, candidates, sharded, job.element_bytes, counts=_stored(f))
    if job.precision == "fp8":
        weights = weights + (f.P + f.Q - f.ends) * f.fp8_weight_bytes
    weights = weights * f.kept_weights
    if job.model.lora is not None:
        weights = weights + _frozen_shards(job, candidates, f)
    weights = f("weights", weights, _ZERO)
    if has_master or not stack.gathers_master:
        master_bytes = stack.master_bytes * has_master
        master = f("master", _sharded(f, candidates, candidates.zero >= 1, master_bytes, counts=_trained(f)), _ZERO)
    else:
        master = _shard_copies(candidates, f)
    of_gradient = stack.reduced_bytes if stack.accumulates_whole else stack.gradient_bytes
    shares = shares_gradients(job, candidates)
    gradients = _sharded(f, candidates, shares, of_gradient, counts=_trained(f)) * f.always
    gradients = f("gradients kept", gradients, _ZERO)
    kinds = {
        "weights": weights,
        "master": master,
        "gradients": _with_errors(job, candidates, stages, f, gradients),
        "optimizer": _optimizer(job, candidates, stages, f) + _averages(job, candidates, f),
        "gathered": _gathered(job, candidates, f),
        "buffers": messages(job, candidates, stages),
        "workspace": np.asarray(workspace),
    }
    ledger.note("workspace", "", workspace, "B", "of libraries; cost/stack.py")
    shape = (len(candidates), len(stages.of_rank))
    nothing = np.zeros(shape)
    if candidates.shared.offload_parameters == "cpu":
        ledger.note("shards on the host", "", np.zeros(1), "B", "master weights, kept weights, reduced gradients")
        kinds |= {"weights": np.where(sharded[:, None], 0.0, kinds["weights"]), "master": nothing}
        kinds["gradients"] = np.where(shares_gradients(job, candidates)[:, None], 0.0, kinds["gradients"])
    return {kind: np.broadcast_to(n_bytes, shape) for kind, n_bytes in kinds.items()}


def messages(job: Job, candidates: Candidates, stages: Stages) -> Floats:
    """Return the bytes of buffers for the messages of the pipeline: one in each direction, (n, 1), or one for each
    input and each gradient that a rank receives in a step, (n, R)."""
    buffers = np.full((len(candidates), 1), 2 * (candidates.pp > 1))
    if job.stack.receives_ahead:
        from_others = (stages.of_rank > 0).sum(1) + (stages.of_rank < len(stages.layers) - 1).sum(1)
        m = candidates.microbatches(job.global_batch)
        buffers = m[:, None] * from_others // len(candidates.shared.ways)
    tokens = candidates.tokens(job.seq_len) / candidates.token_shards
    f = Formulas(
        "B", messages=buffers, T_shard=tokens[:, None], h=job.model.d_model, e=job.element_bytes
    )  # fmt: skip
    return f("buffers", f.messages * f.T_shard * f.h * f.e)


def _shard_copies(candidates: Candidates, f: Formulas) -> Floats:
    """Return the bytes of the fp32 shards from which zero 1 and 2 gather the weights once a step. FSDP2 gathers them
    into separate tensors; a single rank's shard is the weight itself."""
    gathered = (candidates.zero == 1) | (candidates.zero == 2)
    _share(f, candidates, np.ones_like(gathered))
    f.add(beside=(gathered & (candidates.shards > 1))[:, None] + 0)
    f.add(experts_beside=(gathered & (candidates.expert_shards > 1))[:, None] + 0)
    P, Q = _trained(f)
    shards = f.beside * P / f.ranks + f.experts_beside * Q / f.expert_ranks
    return f("master", f.e * shards, "FSDP2 gathers a copy")


def _frozen_shards(job: Job, candidates: Candidates, f: Formulas) -> Floats:
    """Return the bytes of ZeRO-3's shards of the frozen base, in the type of the matmuls. The weights of other stages
    include the base."""
    gone = (candidates.zero == 3) & job.stack.gathers_master & (job.precision != "fp32")
    _share(f, candidates, gone)
    f.add(keeps_base=gone[:, None] + 0)
    P, Q = _stored(f)
    frozen = (P - f.A) / f.ranks + (Q - f.A_in_experts) / f.expert_ranks
    return f.e * f.keeps_base * frozen


def _gathered(job: Job, candidates: Candidates, f: Formulas) -> Floats:
    """Return the bytes of gathered parameters: outside of blocks, of the current block and of the next; or all, with
    one gather a step. With secondary ranks also a part of every layer, until its backward pass (not counted)."""
    blocks = f.always_two * np.minimum(f.layers, 2) * f.largest_layer + f.ends
    P, Q = _stored(f)
    gathered = f.e * f.gathers * np.maximum(f.gathers_all * (P + Q), np.minimum(blocks, P + Q))
    if candidates.shared.zero_secondary_ranks > 1:
        apart = candidates.ep * candidates.tp > 1
        of_dense = again_ranks(job, candidates)
        of_experts = np.where(apart, again_ranks(job, candidates, experts=True), of_dense)
        kept = [of_dense < candidates.shards, of_experts < np.where(apart, candidates.expert_shards, candidates.shards)]
        names = ("again_ranks", "again_expert_ranks", "parts", "expert_parts")
        for name, value in zip(names, (of_dense, of_experts, *kept), strict=True):
            f.add({name: value[:, None] + 0})
        of_dense_parts = f.parts * (P - f.ends) / f.again_ranks
        gathered = gathered + f.e * (of_dense_parts + f.expert_parts * Q / f.again_expert_ranks)
    return f("gathered kept", gathered)


def _with_errors(job: Job, candidates: Candidates, stages: Stages, f: Formulas, kept: Floats) -> Floats:
    """Return the gradients, and the tensors kept between steps for error feedback (`cost.compression`)."""
    if candidates.shared.compress_gradients not in ERROR_FEEDBACK:
        return kept
    compressed, _, columns, _ = compression.counts(job.model, stages, candidates)[:, :, stages.of_rank].sum(3)
    f.add(compressed=compressed)
    errors = f.compressed
    if rank := powersgd_rank(candidates.shared):
        f.add(r=rank, right_columns=columns)
        errors = errors + f.r * f.right_columns
    return f("gradients and errors", f.gradients_kept + 4 * errors, "arXiv 1905.13727; arXiv 1809.07599")


def optimizer_step(job: Job, candidates: Candidates, stages: Stages, params: Parameters) -> Floats:
    """Return the temporary buffers of the optimizer, in bytes, (n, R)."""
    f = _formulas(job, candidates, stages, params)
    return f("working", _sharded(f, candidates, candidates.zero >= 1, job.stack.step_bytes, counts=_trained(f)), _ZERO)


def _formulas(job: Job, candidates: Candidates, stages: Stages, params: Parameters) -> Formulas:
    """Return formulas with the parameters of each rank as inputs, (n, R): P dense ones, Q in experts. Of P, `ends` are
    in no layer. With adapters A and `A_in_experts` of them are trained; `hidden` are in trained hidden matrices."""
    with_gradients = params.trained
    dense, expert, ends, hidden, trained, trained_experts = (
        part[:, stages.of_rank].sum(2).astype(np.float64)
        for part in (
            params.dense,
            params.expert,
            params.ends,
            with_gradients.hidden,
            with_gradients.dense,
            with_gradients.expert,
        )
    )
    f = Formulas("B", P=dense, Q=expert, ends=ends, e=job.element_bytes, h=job.model.d_model, hidden=hidden)
    if params.of_trained is not None:
        f.add(A=trained, A_in_experts=trained_experts)
    if params.of_stored is not None:
        of_rank = (
            part[:, stages.of_rank].sum(2).astype(np.float64) for part in (params.stored.dense, params.stored.expert)
        )
        f.add(dict(zip(("P_stored", "Q_stored"), of_rank, strict=True)))
    return f


def _stored(f: Formulas) -> tuple[Floats, Floats]:
    """Return the symbols of dense parameters and of parameters in experts, with quantised matrices as the elements that
    take as many bytes."""
    return (f.P_stored, f.Q_stored) if hasattr(f, "P_stored") else (f.P, f.Q)


def _trained(f: Formulas) -> tuple[Floats, Floats]:
    """Return the symbols of the dense parameters and of the parameters in experts that are trained."""
    return (f.A, f.A_in_experts) if hasattr(f, "A") else (f.P, f.Q)


def _optimizer(job: Job, candidates: Candidates, stages: Stages, f: Formulas) -> Floats:
    """Return the bytes of optimizer states; matrices may have fewer states than other parameters."""
    if "cpu" in (candidates.shared.offload_optimizer, candidates.shared.offload_parameters):
        return f("optimizer", 0 * f.P, "in the memory of the host")
    if candidates.shared.offload_optimizer == "disk":
        f.add(chunk_bytes=OFFLOAD_CHUNK_BYTES)
        return f("optimizer", f.chunk_bytes, "a chunk; the others are on a disk")
    sharded, n_bytes = candidates.zero >= 1, job.n_optimizer_states * job.state_bytes
    if job.optimizer_kind.means is not None:
        return _means(job, candidates, stages, f)
    if job.optimizer_kind.in_blocks:
        return _in_blocks(job, candidates, stages, f)
    states = _sharded(f, candidates, sharded, n_bytes, counts=_trained(f))
    if job.n_matrix_states != job.n_optimizer_states:
        f.add(matrix_bytes=job.n_matrix_states * job.state_bytes)
        matrices = f.hidden / f.ranks + _trained(f)[1] / f.expert_ranks
        states = states - f.n_bytes * matrices + f.matrix_bytes * matrices
    return f("optimizer", states, _ZERO)


def _means(job: Job, candidates: Candidates, stages: Stages, f: Formulas) -> Floats:
    """Return the states of an optimizer with means over the rows and columns of a matrix. ZeRO shards rows, and so the
    means over each row; means over each column are on every rank. It shards whole experts, and both their means."""
    counts = parameters.means(job.model, stages, candidates.tp, candidates.ep)
    names = ("by_row", "by_column", "expert_means")
    f.add({name: count[:, stages.of_rank].sum(2) for name, count in zip(names, counts, strict=True)})
    _share(f, candidates, candidates.zero >= 1)
    f.add(state_bytes=job.state_bytes)
    means = f.by_row / f.ranks + f.by_column + f.expert_means / f.expert_ranks
    return f("optimizer", f.state_bytes * means, "arXiv 1804.04235")


def _in_blocks(job: Job, candidates: Candidates, stages: Stages, f: Formulas) -> Floats:
    """Return the states of an optimizer in blocks. States of large matrices are codes of a byte with a scale for each
    block of a row, others as usual. If tp shards a matrix's columns, every tp rank has all scales of its rows."""
    counts = parameters.in_blocks(job, stages, candidates.tp, candidates.ep)
    names = ("coded", "scales", "expert_coded", "expert_scales")
    f.add({name: count[:, stages.of_rank].sum(2) for name, count in zip(names, counts, strict=True)})
    _share(f, candidates, candidates.zero >= 1)
    f.add(states=job.n_optimizer_states, element=job.stack.state_bytes)
    P, Q = _trained(f)
    dense = (P - f.coded) * f.element + f.coded + f.scales * f.element
    expert = (Q - f.expert_coded) * f.element + f.expert_coded + f.expert_scales * f.element
    states = f.states * (dense / f.ranks + expert / f.expert_ranks)
    return f("optimizer", states, "arXiv 2110.02861, section 2")


_ZERO = "ZeRO, arXiv 1910.02054, section 5"


def _averages(job: Job, candidates: Candidates, f: Formulas) -> Floats:
    """Return the bytes of averages of the master weights, which are sharded like them."""
    if not job.averages or averages_on_host(job, candidates):
        return np.zeros((1, 1))
    n_bytes = job.averages * max(job.stack.master_bytes, job.stack.state_bytes)
    return f("averages", _sharded(f, candidates, candidates.zero >= 1, n_bytes, counts=_trained(f)), _ZERO)


def averages_on_host(job: Job, candidates: Candidates) -> bool:
    """Return whether averages of the weights are in the memory of the host."""
    return job.averages > 0 and (job.averages_on_host or candidates.shared.offload_parameters == "cpu")


def _sharded(
    f: Formulas, candidates: Candidates, shared: NDArray[np.bool_], n_bytes: float, counts: tuple[Floats, Floats]
) -> Floats:
    """Return `n_bytes` for each dense parameter and parameter of experts, whose numbers are `counts`; sharded for the
    candidates in `shared`."""
    _share(f, candidates, shared)
    f.add(n_bytes=n_bytes)
    P, Q = counts
    return f.n_bytes * (P / f.ranks + Q / f.expert_ranks)


def _share(f: Formulas, candidates: Candidates, shared: NDArray[np.bool_]) -> None:
    """Add the numbers of ranks over which dense parameters and experts are sharded: 1 if not `shared`."""
    f.add(ranks=np.where(shared, candidates.shards, 1)[:, None])
    f.add(expert_ranks=np.where(shared, candidates.expert_shards, 1)[:, None])


def stage_state_bytes(job: Job, candidates: Candidates, stages: Stages, params: Parameters) -> tuple[Floats, ...]:
    """Return the bytes of a stage that exist for a part of the step, each (n, S): its gradients while they accumulate,
    and once they are complete; the current block and the next one, as ZeRO-3 gathers them for a pass; and the last
    block, which is on its way while the backward pass of the head runs. A chunked loss runs that pass earlier; in a
    loss that copies logits, the copies are larger and are freed by then."""
    element_bytes = job.stack.gradient_bytes * ~keeps_gradients(job, candidates)[:, None]
    gradients = []
    for sharded in (shares_gradients(job, candidates), candidates.zero >= 1):
        ranks, expert_ranks = (
            np.where(sharded, over, 1)[:, None] for over in (candidates.shards, candidates.expert_shards)
        )
        gradients.append(element_bytes * (params.trained.dense / ranks + params.trained.expert / expert_ranks))
    if candidates.shared.offload_parameters == "cpu":
        # Shards go to the host once they are reduced: over replicas in the last micro-batch.
        waits = waits_for_replicas(candidates.shared) & (candidates.dp_replicate > 1)
        stays = ~shares_gradients(job, candidates) | waits
        gradients = [gradients[0] * stays[:, None], 0.0 * gradients[1]]
    largest = np.max([(dense + expert)[:, None] * (stages.layers_by_kind[block] > 0)
                      for block, (dense, expert) in params.stored.of_block.items()], axis=0)  # fmt: skip
    gathers = (candidates.zero == 3) & ~gathers_all(job, candidates) & (not job.stack.gathers_in_loss)
    two = np.minimum([len(layers) for layers in stages.layers], 2)
    gathered = job.element_bytes * gathers[:, None] * largest
    for_head = np.zeros_like(gathered)
    if job.stack.logits_together and not candidates.shared.loss_chunk_tokens:
        for_head[:, -1] = gathered[:, -1]
    return gradients[0], gradients[1], gathered * two, for_head
