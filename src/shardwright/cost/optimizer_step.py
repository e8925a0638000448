"""Seconds of the optimizer in a step, on the device, on the host or with a disk, of updates of whole matrices, and of
moves of experts between steps."""

from functools import cache

import numpy as np

from shardwright.cost.collectives import all_to_all, point_to_point
from shardwright.cost.job import Candidates, Floats, Ints, Job
from shardwright.cost.ledger import Formulas
from shardwright.cost.matmuls import reached_flops_per_s
from shardwright.cost.parameters import RankParameters
from shardwright.cost.passes import reached_bytes_per_s
from shardwright.model.modules import rows
from shardwright.model.row import flops_of_matrices
from shardwright.model.spec import ModelSpec
from shardwright.optimizers import OPTIMIZERS

PLACEMENT = "expert placement"
"""The part of the step time in which experts move between ranks."""


def optimizer_step(job: Job, candidates: Candidates, params: RankParameters) -> Floats:
    """Return the seconds of the optimizer, which is bound by memory bandwidth, and the fixed overhead of a step.

    For each parameter of the rank's shard, Adam in fp32 reads gradient (4 bytes), master weight (4) and moments (8) and
    writes weight and moments (12) and the working weight (2); the gradient norm reads the gradients before (4), and
    they are zeroed after (4): 38. Each optimizer state more or fewer than two adds or saves 8 bytes, and one that is
    stored in bf16 saves 4, in blocks of bytes 6; means of matrices are not counted as states. Further bytes that an
    optimizer reads and writes are `OptimizerKind.step_bytes`. The overhead is the overhead of the loss, the norm's
    all-reduce and the start of the next step. Whole matrices: `matrix_updates`. Ignored: the all-reduces of means
    and of the scales of blocks, and that small matrices are not in blocks.
    """
    stack, kind = job.stack, job.optimizer_kind
    n_states = 0 if kind.means is not None else job.n_optimizer_states
    of_states = n_states * 2 * job.state_bytes - 2 * 8 if job.narrow_states or kind.in_blocks else 8 * (n_states - 2)
    f = Formulas("s", P=params.trained_dense, Q=params.trained_experts)
    f.add(shards=np.where(candidates.zero > 0, candidates.shards, 1))
    f.add(expert_shards=np.where(candidates.zero > 0, candidates.expert_shards, 1))
    f.add(state_bytes=job.n_optimizer_states * job.state_bytes, step_s=stack.speed.step_s)
    changed, experts = f.P, f.Q
    if np.any(candidates.zero > 0):
        changed, experts = changed / f.shards, experts / f.expert_shards
    if np.any(params.trained_experts):
        changed = changed + experts
    where, sent = candidates.shared.offload_optimizer, candidates.shared.offload_parameters == "none"
    if where == "cpu" or not sent:
        on_host = _on_host(job, f, changed, sent=sent)
        return on_host if where == "cpu" else _on_disk(job, f, changed, on_host, sent=sent)
    f.add(optimizer_bytes=stack.speed.optimizer_bytes + kind.step_bytes + of_states)
    f.add(element_rate=reached_bytes_per_s(job))
    by_element = f("optimizer", f.optimizer_bytes * changed / f.element_rate + f.step_s)
    if where == "disk":
        return _on_disk(job, f, changed, by_element)
    if kind.matrix_state is None:
        return by_element
    f.add(updates_of_matrices=matrix_updates(job, candidates, params.hidden, params.trained_experts))
    return f("optimizer of all parameters", f.optimizer + f.updates_of_matrices)


def _on_disk(job: Job, f: Formulas, changed: Floats, update: Floats, sent: bool = True) -> Floats:
    """Return the seconds of the optimizer with states on a disk: all are read and written once a step, and `sent` to
    the device and back. `changed`: parameters of the rank; `update`: seconds of the update itself."""
    chip = job.cluster.accelerator
    f.add(
        optimizer=update,
        disk_rate=chip.disk_bytes_per_s,
        host_s=1 / chip.host_bytes_per_s if sent and chip.host_bytes_per_s else 0.0,
    )
    on_disk = 2 * f.state_bytes * changed * (1 / f.disk_rate + f.host_s)
    f("states on a disk", on_disk, "read and written once a step, not overlapped")
    return f("optimizer with states on a disk", f.optimizer + f.states_on_a_disk)


ON_DEVICE_BYTES = 16.0
"""Bytes moved on the device for a parameter that the host updates: its gradient is read for the norm and for the copy,
and zeroed, and its weight is written; 4 bytes each."""
SENT_BYTES = 4.0
"""Bytes of a gradient sent to the host, and of a weight sent to the device; both are in fp32."""


def _on_host(job: Job, f: Formulas, changed: Floats, sent: bool) -> Floats:
    """Return the seconds of the optimizer with states and update on the host (`training/offload/on_host.py`). Gradients
    of some parameters are copied to the host while others are updated and the weights of others are copied back, so the
    slowest of the three determines the time. An update reads gradient and weight, writes the weight, and reads and
    writes each state. Ignored: the first and the last bucket, which nothing overlaps with. Unless they are `sent`,
    gradients and weights are on the host before and after, and the norm reads the gradients there."""
    chip = job.cluster.accelerator
    f.add(sent_bytes=SENT_BYTES, host_rate=chip.host_bytes_per_s, host_memory_rate=chip.host_memory_bytes_per_s)
    f("link to the host", f.sent_bytes * changed / f.host_rate, "each direction; arXiv 2101.06840")
    moved = (f.constant(3) * 4 + 2 * f.state_bytes) * changed
    f("update on the host", moved / f.host_memory_rate, "bound by memory bandwidth")
    if not sent:
        seconds = f.update_on_the_host + 4 * changed / f.host_memory_rate + f.step_s
        return f("optimizer beside shards on the host", seconds)
    f.add(on_device_bytes=ON_DEVICE_BYTES, element_rate=reached_bytes_per_s(job))
    slower = np.maximum(f.link_to_the_host, f.update_on_the_host)
    return f("optimizer on the host", slower + f.on_device_bytes * changed / f.element_rate + f.step_s)


MATRIX_BYTES = 2
"""Bytes of an element of a matrix that is sent to its owner and back."""


def matrix_updates(job: Job, candidates: Candidates, hidden: Ints, experts: Ints) -> Floats:
    """Return the seconds a step in which whole hidden matrices are updated (Muon), beyond the element-wise part, (n,).
    `hidden`, `experts`: elements of hidden matrices on a rank of tp and ep before ZeRO.

    The owners of matrices are spread over all ranks with shards or replicas of them as DTensors: tp, the ranks of ZeRO,
    and with ZeRO 1 to 3 dp_replicate. Shards are sent to the owners and back by an all-to-all over the ranks of ZeRO,
    and one over tp, 2 bytes an element. The element-wise part is priced like Adam's: one moment less saves 8 bytes, and
    about as many are written and read for sending.

    Ignored: that owners cannot be balanced exactly, that one bucket is exchanged while another is computed, and the
    lower rates of small matmuls.
    """
    sharded = candidates.zero > 0
    replicas = np.where(sharded, candidates.world // (candidates.pp * candidates.tp * candidates.shards), 1)
    owners = np.where(sharded, candidates.shards, 1) * replicas * candidates.tp
    expert_owners = np.where(sharded, candidates.expert_shards, 1) * replicas * candidates.ep
    f = Formulas(
        "s", H=hidden, Q=experts, tp=candidates.tp, ep=candidates.ep, owners=owners, expert_owners=expert_owners,
        flops=_flops(job.model, job.optimizer, False), expert_flops=_flops(job.model, job.optimizer, True),
        matmul_rate=reached_flops_per_s(job, job.wide_precision),
    )  # fmt: skip
    updates = f.H * f.tp * f.flops / f.owners + f.Q * f.ep * f.expert_flops / f.expert_owners
    f("orthogonal matrices", updates / f.matmul_rate)
    shards = np.where(sharded, candidates.shards, 1)
    what = "shards of matrices to their owners, all-to-all"
    f.add(
        over_zero=all_to_all(job.cluster, hidden * MATRIX_BYTES / shards, shards, candidates.tp, what),
        over_tp=all_to_all(job.cluster, hidden * MATRIX_BYTES / shards, candidates.tp, 1, f"{what}, tp"),
    )
    return f("updates of matrices", f.orthogonal_matrices + 2 * (f.over_zero + f.over_tp))


@cache
def _flops(spec: ModelSpec, optimizer: str, of_experts: bool) -> float:
    """Return the FLOPs of the updates of all experts, or of all other hidden matrices, divided by their elements."""
    matrices = [row for row in rows(spec).values() if row.hidden and (row.kind == "expert") is of_experts]
    compute = OPTIMIZERS[optimizer].matrix_flops
    return sum(flops_of_matrices(row, compute) for row in matrices) / max(sum(row.numel for row in matrices), 1)


def expert_moves(job: Job, candidates: Candidates, params: RankParameters) -> Floats:
    """Return the seconds a step in which experts move between ranks of ep (`layout.place_experts_every`), (n,).

    After every N steps each of L layers sends S = k Q / (L E_rank) (w + s) bytes from the rank with the most
    leaving experts, one layer after another: L t(S) / N, with t the time of a message between two ranks of ep. Q:
    parameters in experts on a rank of ep; E_rank: its experts; w + s: bytes of the fp32 weight, its averages and its
    optimizer states; k: experts that a rank sends. ZeRO cuts an expert's matrices, or whole experts if its ranks divide
    E_rank (`parallel/data.py`); then a rank sends one whole expert or more.

    k is the number at the first placement, from the order of the model (`UnevenLoad.moved`); later placements of loads
    that change little send fewer. Nothing moves with even loads. Ignored: moves home for a checkpoint, copies inside
    the device and from the host, and that a rank sends to several ranks.
    """
    every, load, moe = candidates.shared.place_experts_every, job.expert_load, job.model.moe
    if not every or load is None or moe is None:
        return np.zeros(len(candidates))
    own, leaving = moe.n_experts // candidates.ep, load.moved(moe, candidates.ep)
    shards = np.where(candidates.zero > 0, candidates.expert_shards, 1)
    whole = np.where(own % shards, 0.0, np.minimum(leaving, 1))
    f = Formulas(
        "B", Q=params.trained_experts, moved_experts=np.maximum(leaving / shards, whole), own_experts=own,
        expert_layers=np.maximum(params.expert_blocks, 1), placed_every=every,
        all_states_bytes=(1 + job.averages) * job.stack.master_bytes + job.n_matrix_states * job.state_bytes,
    )  # fmt: skip
    of_an_expert = f.Q / (f.expert_layers * f.own_experts)
    n_bytes = f("experts that leave a rank, of a layer", f.moved_experts * of_an_expert * f.all_states_bytes)
    ep = np.where(leaving > 0, candidates.ep, 1)
    sent = point_to_point(job.cluster, n_bytes, ep, 1, "experts sent")
    f = Formulas("s", experts_sent=sent, expert_layers=np.maximum(params.expert_blocks, 1), placed_every=every)
    return f(PLACEMENT, f.expert_layers * f.experts_sent / f.placed_every, "layout.place_experts_every")
