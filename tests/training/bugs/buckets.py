"""Bugs that show only where there are several buckets or chunks: all after the first are forgotten."""

from shardwright.layout.layout import Layout
from tests.mutation import Mutation
from tests.training.bugs.bug import ONE, PP, TP, TRAINER, ZERO_3, AnyBug, Bug

_REPLICAS = Layout(dp_replicate=2, dp_shard=2, zero=2, compress_gradients="int8")
_LOSSES = "((sum_N.log() - target_N) * counted_N)"

BUCKETS: dict[str, AnyBug] = {
    "compressed gradients after the first bucket are not summed over replicas": Bug(
        Mutation(
            "shardwright.parallel.compressed:OverReplicas.sum",
            "in_groups(gradients, lambda gradient: gradient.nbytes, REPLICA_BUCKET_BYTES)",
            "[next(in_groups(gradients, lambda gradient: gradient.nbytes, REPLICA_BUCKET_BYTES))]",
        ),
        [_REPLICAS],
    ),
    "Muon updates the first bucket of matrices of one kind alone": Bug(
        Mutation(
            "shardwright.parallel.whole_matrices:WholeMatrices._buckets",
            "in_groups(matrices, lambda matrix: matrix.n_bytes, BUCKET_BYTES)",
            "[next(in_groups(matrices, lambda matrix: matrix.n_bytes, BUCKET_BYTES))]",
        ),
        [TP, ZERO_3],
        optimizer="muon",
    ),
    "8-bit AdamW updates the first bucket alone": Bug(
        Mutation(
            "shardwright.training.optimizers.adamw_8bit:AdamW8bit._buckets",
            "in_groups(members, lambda member: member.n_bytes, BUCKET_BYTES)",
            "[next(in_groups(members, lambda member: member.n_bytes, BUCKET_BYTES))]",
        ),
        [ONE, ZERO_3],
        optimizer="adamw-8bit",
    ),
    "the reported loss of logits is that of the first tokens": Bug(
        Mutation(
            "shardwright.parallel.loss:cross_entropy",
            _LOSSES,
            f"({_LOSSES}).index_fill(0, torch.arange(n_together, len(logits_Nv)), 0)",
        ),
        [ONE, ZERO_3],
    ),
    "an evaluation has the loss of the last micro-batches that are evaluated together": Bug(
        Mutation(
            f"{TRAINER}.evaluation_sums",
            "sums[0] += self.model.runner.evaluate(microbatches, losses)",
            "sums[0] = self.model.runner.evaluate(microbatches, losses)",
        ),
        [ONE, PP, ZERO_3],
    ),
    "an evaluation is divided by the targets of the last micro-batches that are evaluated together": Bug(
        Mutation(
            f"{TRAINER}.evaluation_sums",
            "sums[1] += torch.stack(counts).sum(0)",
            "sums[1] = torch.stack(counts).sum(0)",
        ),
        [ONE, ZERO_3],
    ),
}
