"""Time of an optimizer that updates hidden matrices as whole matrices (Muon), beyond that of its element-wise part.

The owners of matrices are spread over all ranks that hold shards or replicas of them as DTensors: tp, the ranks of
ZeRO, and with ZeRO 1 to 3 dp_replicate. Shards go to the owners and back by an all-to-all over the ranks of ZeRO, and
one over tp, 2 bytes an element. The element-wise part is priced as that of Adam: a moment less saves 8 bytes, and
about as many are written and read for what is sent.

Ignored: that owners cannot be balanced exactly, that one bucket is exchanged while another is computed, and the lower
rates of small matmuls.
"""

from functools import cache

import numpy as np

from shardwright.cost.collectives import all_to_all
from shardwright.cost.job import Candidates, Floats, Ints, Job
from shardwright.cost.ledger import Formulas
from shardwright.cost.matmuls import reached_flops_per_s
from shardwright.model.modules import flops_of_matrices, rows
from shardwright.model.spec import ModelSpec
from shardwright.optimizers import OPTIMIZERS

SENT_BYTES = 2


def matrix_updates(job: Job, candidates: Candidates, hidden: Ints, experts: Ints) -> Floats:
    """Seconds a step, (n,); `hidden`, `experts`: elements of hidden matrices on a rank of tp and ep before ZeRO."""
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
        over_zero=all_to_all(job.cluster, hidden * SENT_BYTES / shards, shards, candidates.tp, what),
        over_tp=all_to_all(job.cluster, hidden * SENT_BYTES / shards, candidates.tp, 1, f"{what}, tp"),
    )
    return f("updates of matrices", f.orthogonal_matrices + 2 * (f.over_zero + f.over_tp))


@cache
def _flops(spec: ModelSpec, optimizer: str, of_experts: bool) -> float:
    """FLOPs of the updates of all experts, or of all other hidden matrices, divided by their elements."""
    found = [row for row in rows(spec).values() if row.hidden and (row.kind == "expert") is of_experts]
    compute = OPTIMIZERS[optimizer].matrix_flops
    return sum(flops_of_matrices(row, compute) for row in found) / max(sum(row.numel for row in found), 1)
