"""What lies in the memory of a rank all through a step: weights, gradients, optimizer, and what goes with them.

With P elements of parameters on the rank, N ranks that share them (`Candidates.shards`, for experts `expert_shards`), e
bytes of a working weight, and of `Stack` g `gradient_bytes`, w `master_bytes` (none in fp32), m `moment_bytes`:

| zero | weights | gradients | master and moments |
| ---- | ------- | --------- | ------------------ |
| 0    | e P     | g P       | (w + m) P          |
| 1    | e P     | g P       | (w + m) P / N      |
| 2    | e P     | g P / N   | (w + m) P / N      |
| 3    | e P / N | g P / N   | (w + m) P / N      |

Source: ZeRO, arXiv 1910.02054, section 5, with 2, 2 and 12 bytes; Megatron-LM's distributed optimizer is stage 1 with
2, 4 and 12. Where a stack gathers from the master weights, zero 3 has no working weights but those gathered. Under a
pipeline that gathers once a step (`Layout.zero_pp_gather`) it holds whole weights and whole gradients until the end.
Ignored: padding of shards; the second copy of a tied matrix where first and last stage share a rank, which has no state
of an optimizer, counts as one that has.
"""

import numpy as np
from numpy.typing import NDArray

from shardwright.cost.job import Candidates, Floats, Job
from shardwright.cost.parameters import Parameters
from shardwright.cost.pipeline import Stages


def of_ranks(job: Job, of: Candidates, stages: Stages, held: Parameters) -> dict[str, Floats]:
    """Bytes by kind, each (n, R)."""
    stack, e = job.stack, job.element_bytes
    dense, expert = _on_ranks(stages, held)

    def spent(shared: NDArray[np.bool_], n_bytes: float) -> Floats:
        return n_bytes * _elements(of, stages, held, shared)

    has_master = job.precision != "fp32"
    sharded = of.zero == 3
    weights = spent(sharded, e)
    if job.precision == "fp8":
        ends = held.ends[:, stages.of_rank].sum(2)
        weights = weights + (dense + expert - ends) * stack.fp8_weight_bytes
    if stack.gathers_master and has_master:
        weights = np.where(sharded[:, None], 0.0, weights)
    tokens = of.tokens(job.seq_len) / of.token_shards
    # One message on its way in each direction.
    messages = (of.pp > 1) * 2 * tokens * job.model.d_model * e
    workspace = stack.workspace_bytes + (stack.expert_workspace_bytes if job.model.moe else 0.0)
    return {
        "weights": weights,
        "master": spent(of.zero >= 1, stack.master_bytes * has_master),
        "gradients": spent(shares_gradients(of), stack.gradient_bytes),
        "optimizer": spent(of.zero >= 1, stack.moment_bytes),
        "gathered": np.where(sharded[:, None], _gathered(of, stages, held, dense + expert) * e, 0.0),
        "buffers": np.broadcast_to(messages[:, None], dense.shape),
        "workspace": np.full(dense.shape, workspace),
    }


def optimizer_step(job: Job, of: Candidates, stages: Stages, held: Parameters) -> Floats:
    """Bytes that the update of the parameters takes on top of what it changes, (n, R)."""
    return job.stack.step_bytes * _elements(of, stages, held, of.zero >= 1)


def _on_ranks(stages: Stages, held: Parameters) -> tuple[Floats, Floats]:
    """Dense and expert parameters of each rank, (n, R)."""
    dense, expert = (part[:, stages.of_rank].sum(2).astype(np.float64) for part in (held.dense, held.expert))
    return dense, expert


def _elements(of: Candidates, stages: Stages, held: Parameters, shared: NDArray[np.bool_]) -> Floats:
    """Elements that a rank has of something for each parameter, which some candidates share out, (n, R)."""
    dense, expert = _on_ranks(stages, held)
    dense_ranks, expert_ranks = np.where(shared, of.shards, 1), np.where(shared, of.expert_shards, 1)
    found: Floats = dense / dense_ranks[:, None] + expert / expert_ranks[:, None]
    return found


def moving_gradients(job: Job, of: Candidates, held: Parameters) -> Floats:
    """Gradients on their way to the buffer where they add up, during the backward pass of a block, (n, S).

    Where gradients are shared out, those of a whole block, a copy of them on the way to their shards, and in the last
    stage those of the head, which wait for the end of the pass; else of one matrix at a time.
    """
    block = (held.layer_dense + held.layer_expert)[:, None] * (job.element_bytes + job.stack.reduced_bytes)
    shared = block + np.zeros(held.ends.shape)
    shared[:, -1] += held.head * job.element_bytes
    matrix = held.matrix[:, None] * job.stack.weight_gradient_bytes
    return np.where(shares_gradients(of)[:, None], shared, matrix)


def shares_gradients(of: Candidates) -> NDArray[np.bool_]:
    """Whether gradients add up in shards."""
    return (of.zero >= 2) & ~_holds_stage(of)


def _holds_stage(of: Candidates) -> NDArray[np.bool_]:
    """Whether ZeRO-3 gathers a stage once a step."""
    return (of.zero == 3) & (of.pp > 1) & (of.shared.zero_pp_gather == "step")


def _gathered(of: Candidates, stages: Stages, held: Parameters, whole: Floats) -> Floats:
    """Elements gathered at once under ZeRO-3, (n, R): a block and the next, and what is not in blocks, which serves
    both ends of a pass; or all."""
    layers = (stages.plain + stages.mixtures)[stages.of_rank].sum(1)
    blocks = np.minimum(layers, 2) * (held.layer_dense + held.layer_expert)[:, None]
    outside = held.ends[:, stages.of_rank].sum(2)
    found: Floats = np.where(_holds_stage(of)[:, None], whole, np.minimum(blocks + outside, whole))
    return found
