"""Memory of gradients that are not in their buffer yet, and whether that buffer is sharded or exists for a whole step.

Notation of cost/states.py.
"""

import numpy as np
from numpy.typing import NDArray

from shardwright.cost.job import Candidates, Floats, Ints, Job
from shardwright.cost.ledger import Formulas
from shardwright.cost.parameters import Parameters
from shardwright.cost.pipeline import Stages
from shardwright.layout.keys import ERROR_FEEDBACK


def keeps_gradients(job: Job, candidates: Candidates) -> NDArray[np.bool_]:
    """Return whether gradients have memory for the whole step: in a stack whose buffers exist for the step, or, without
    FSDP, in buckets that are all-reduced (parallel/data.py)."""
    if job.stack.keeps_gradients or candidates.shared.compress_gradients in ERROR_FEEDBACK:
        return np.full(len(candidates), True)
    on_host = candidates.shared.offload_parameters == "cpu"
    bucketed = (candidates.zero == 0) | ((candidates.shards == 1) & (not on_host))
    return bucketed & (candidates.gradient_ranks > 1) & (job.precision == "fp32")


def shares_gradients(job: Job, candidates: Candidates) -> NDArray[np.bool_]:
    """Return whether gradients are accumulated in shards."""
    return (candidates.zero >= 2) & ~gathers_all(job, candidates) & job.stack.reduces_each_microbatch(candidates.pp)


def uses_fsdp(job: Job, candidates: Candidates) -> NDArray[np.bool_]:
    """Return whether FSDP is used: as `parallel.data.needs_sharding`, and for experts that are sharded separately."""
    on_host = candidates.shared.offload_parameters != "none"
    shards = (candidates.zero > 0) & (candidates.shards > 1)
    alone = (candidates.world == 1) & (candidates.zero < 3)
    casts = (job.element_bytes < 4) & ~alone
    apart = (candidates.ep * candidates.tp > 1) & (job.model.moe is not None)
    return np.asarray(shards | casts | apart | on_host)


def gathers_all(job: Job, candidates: Candidates) -> NDArray[np.bool_]:
    """Return whether ZeRO-3 has a whole stage of a pipeline gathered at once: with one gather a step, or because each
    backward pass leaves the layers that it gathers (`Stack.reduces_after_pipelines`)."""
    frees = candidates.shared.zero_pp_gather == "microbatch" and not job.stack.reduces_after_pipelines
    return (candidates.zero == 3) & (candidates.pp > 1) & (not frees)


def moving_gradients(
    job: Job,
    candidates: Candidates,
    stages: Stages,
    params: Parameters,
    kept: Floats,
    working: Floats,
    of_any_step: bool = False,
) -> Floats:
    """Return the bytes of gradients that are not yet accumulated in their buffer, during the backward pass of a block,
    (n, S). `kept`, `working`, (n,): of a block, the activations that it frees, and its temporary buffers.
    `of_any_step`: the least of all data axes and numbers of micro-batches, without `head_gradient`.

    If gradients are sharded, this is the maximum over three moments, in addition to the activations of all blocks and
    these buffers: (1) the first block runs; (2) the second block runs, the first has freed its activations, and its
    gradients are being reduced; (3) the first is done, and has all its gradients, the buffer of their reduce-scatter,
    and no temporary buffers. With experts, whose gradients are reduced separately, all of this at once. The last stage
    also has the gradient of the head, which is reduced at the end of the pass. If gradients are not sharded: the
    gradient of one matrix at a time, and the gradient of a head that waits for the embedding of the same stage, in the
    type of the matmuls: a tied head's, and FSDP's in 16 bits, which it accumulates as one group. On one rank without
    FSDP2, with one micro-batch a step, the accumulated gradients of the running block and of a tied head do not exist
    yet.
    Ignored with activations on the host: their copies take some 0.8 of a layer more than is counted for them.
    """
    params = params.trained
    stack, layer = job.stack, params.layer_dense + params.layer_expert
    f = Formulas(
        "B", e=job.element_bytes, largest_layer=layer, largest_matmul=params.matrix, reduced_bytes=stack.reduced_bytes,
        weight_gradient_bytes=weight_gradient_bytes(job), kept_by_a_block=kept, working_of_a_block=working,
        several=stages.several, head=params.head,
    )  # fmt: skip
    shared = shares_gradients(job, candidates)[:, None]
    result = np.zeros(params.ends.shape)
    matrix = f("gradient of a matmul", f.weight_gradient_bytes * f.largest_matmul)
    if np.any(shared):
        name, of_layer = "gradients of a layer", (f.e + f.reduced_bytes) * f.largest_layer
        if not np.any(params.layer_expert):
            reduced = f.several * np.maximum(f.reduced_bytes * f.largest_layer - f.kept_by_a_block, 0)
            done = of_layer - f.kept_by_a_block - f.working_of_a_block
            name, of_layer = "gradients beside a layer", np.maximum(f.gradient_of_a_matmul + reduced, done)
        result += f(name, of_layer)[:, None]
        result[:, -1] = f(f"{name} and the head", f[name] + f.e * f.head, "last stage")
    if stack.keeps_gradients:
        return np.where(shared, result, matrix[:, None])
    alone = (candidates.world == 1) & ~uses_fsdp(job, candidates) & ~keeps_gradients(job, candidates)
    on_device = candidates.shared.offload_activations == "none"
    alone &= on_device
    tied_head = params.head * (_is_tied(job, stages) and on_device)
    if of_any_step:
        least = matrix + tied_head * min(0.0, weight_gradient_bytes(job) - stack.gradient_bytes)
        return np.where(shared, result, least[:, None])
    f.add(
        gradient_bytes=stack.gradient_bytes, tied_head=tied_head, alone=alone + 0,
        first_pass=(candidates.microbatches(job.global_batch) == 1) * (1 - keeps_gradients(job, candidates)),
        untied_head=_untied_head(job, candidates, stages, params, candidates.microbatches(job.global_batch)),
    )  # fmt: skip
    not_yet = f.first_pass * f.gradient_bytes * (f.alone * f.largest_layer + f.tied_head)
    of_head = f.weight_gradient_bytes * f.tied_head
    own = f("gradients beside those of other layers", f.gradient_of_a_matmul + of_head + f.untied_head - not_yet)
    return np.where(shared, result, own[:, None])


def head_gradient(job: Job, candidates: Candidates, stages: Stages, params: Parameters, microbatches: Ints) -> Floats:
    """Return the bytes by which `moving_gradients` of candidates exceeds the least of any step, (n,). They are of more
    than one rank. `microbatches`, (n,): of a step."""
    stack, n_bytes = job.stack, weight_gradient_bytes(job)
    if stack.keeps_gradients or candidates.shared.offload_activations != "none":
        return np.zeros(len(candidates))
    if not _is_tied(job, stages):
        return _untied_head(job, candidates, stages, params.trained, microbatches)
    absent = (microbatches == 1) & ~keeps_gradients(job, candidates)
    above_least = n_bytes - absent * stack.gradient_bytes - min(0.0, n_bytes - stack.gradient_bytes)
    return np.where(shares_gradients(job, candidates), 0.0, params.trained.head * above_least)


def _untied_head(job: Job, candidates: Candidates, stages: Stages, params: Parameters, microbatches: Ints) -> Floats:
    """Return the bytes that the gradient of a head that is not tied adds while it waits for the embedding's, (n,).
    `params`: the trained ones. With one micro-batch a step, its accumulated gradient, or shard, does not exist yet."""
    if _is_tied(job, stages) or len(stages.layers) > 1 or job.element_bytes >= job.stack.reduced_bytes:
        return np.zeros(len(candidates))
    waits = uses_fsdp(job, candidates) & ~shares_gradients(job, candidates)
    ranks = np.where(candidates.zero >= 1, candidates.shards, 1)
    later = (microbatches == 1) * job.stack.gradient_bytes / ranks
    return waits * params.head * np.maximum(0.0, weight_gradient_bytes(job) - later)


def embedding_gradient(
    job: Job, candidates: Candidates, stages: Stages, params: Parameters, microbatches: Ints
) -> Floats:
    """Return the bytes that the gradient of the embedding adds before it is accumulated, (n,). `microbatches`, (n,): of
    a step; from 3 on the result is the same.

    A head in the same stage has a gradient, too. If it is tied to the embedding, autograd adds both into a third
    tensor; FSDP accumulates or reduces both after the pass, as one group. The result is the maximum over two moments:
    (1) the last gradient is computed, while FSDP reduces the gradients of a layer; (2) FSDP reduces the gradients of
    the group: it frees the group's weights, copies the gradients into one buffer, and then frees them, the last one
    later (torch 2.13, `foreach_reduce`). In the last micro-batch the weights of layers are freed. The accumulated
    gradients do not contain the group's yet: with one micro-batch a step, or two if ZeRO 1 shards them after the second
    or ZeRO 2 frees the weights in it.
    """
    stack, once = job.stack, job.stack.gradient_bytes * (1 - keeps_gradients(job, candidates))
    if stack.keeps_gradients:
        return np.zeros(len(candidates))
    m, shared, of_weight = microbatches, shares_gradients(job, candidates), weight_gradient_bytes(job)
    late = (candidates.zero >= 1) & (candidates.shards > 1) & ~shared
    ranks = np.where(shared | late, candidates.shards, 1)
    absent = np.where(m == 1, 1 / ranks, 0.0)
    absent = np.where(m == 2, late + (shared & (candidates.zero == 2)) / candidates.shards, absent)
    fsdp = uses_fsdp(job, candidates) & (not candidates.kind.splits_backward)
    reduces = fsdp & (shared | (m == 1))
    # The gradients of replicas are summed in the type of the reduction, and divided into a third tensor, at the end.
    divided = fsdp & ~shared & ~late & (candidates.gradient_ranks > 1)
    tied, head, ends = _is_tied(job, stages), params.trained.head, params.trained.ends[:, 0]
    layer = params.trained.layer_dense + params.trained.layer_expert
    of_layers = (params.dense + params.expert - params.ends)[:, 0]
    waiting = len(stages.layers) == 1 and not tied
    tensors = 3 if tied else 1 + waiting * (reduces | (fsdp & (job.element_bytes < stack.reduced_bytes)))
    freed = (m == 1) & (candidates.zero < 3) & reduces
    in_fsdp = (reduces & ~divided) * stack.reduced_bytes * layer - freed * job.element_bytes * of_layers
    computed = head * tensors * of_weight + in_fsdp - absent * once * np.where(reduces, ends, head)
    if job.element_bytes < stack.reduced_bytes:  # widened when they are accumulated, one at a time
        computed = np.maximum(computed, (fsdp & ~shared & (m > 1)) * of_weight * head)
    # Gradients in their buffer, and after it the result, or the quotient and the sum.
    before = np.where(reduces, of_weight, once)
    after = np.where(divided, 2 * ends * stack.reduced_bytes, ends * stack.reduced_bytes / ranks)
    after = after + (ranks > 1) * (not tied) * before * head
    freed_then = freed | (fsdp & ~shared)
    weights = freed_then * of_layers + (freed_then | (candidates.zero == 3)) * params.ends[:, 0]
    absent_then = np.where(reduces, absent, 1.0)
    reduced = ends * stack.reduced_bytes + np.maximum(before * ends, after) - absent_then * once * ends
    reduced = reduced - job.element_bytes * weights
    dense, expert = params.trained.dense[:, 0] - ends, params.trained.expert[:, 0]
    in_shards = dense * (1 - 1 / ranks) + expert * (1 - 1 / candidates.expert_shards)
    reduced = reduced - (late & (m > 1)) * once * in_shards
    return np.maximum(0.0, np.maximum(computed, np.where(fsdp, reduced, 0.0)))


def _is_tied(job: Job, stages: Stages) -> bool:
    """Return whether one stage has the embedding and a head that is tied to it."""
    return job.model.tied_embedding and len(stages.layers) == 1


def weight_gradient_bytes(job: Job) -> float:
    """Return the bytes of an element of the weight gradient of one matmul."""
    return job.stack.weight_gradient_bytes * job.element_bytes / 2
