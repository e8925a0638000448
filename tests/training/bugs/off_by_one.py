"""Bugs that are off by one: a row, a token, a micro-batch, a step."""

from tests.mutation import Mutation
from tests.training.bugs.bug import (
    ALLGATHER,
    CONTEXT,
    FEW_PLACES,
    LOSS,
    ONE,
    PP,
    ROUTER,
    SEQUENTIAL,
    TENSOR,
    TP,
    TRAINER,
    ZERO_0,
    ZERO_1,
    ZIGZAG,
    Bug,
)

OFF_BY_ONE: dict[str, Bug] = {
    "the first token of a vocabulary shard is nobody's target": Bug(
        Mutation(LOSS, "targets_N >= rows.start", "targets_N > rows.start"), [TP]
    ),
    "the first token of a vocabulary shard has no embedding": Bug(
        Mutation(
            f"{TENSOR}:VocabularyEmbedding.forward", "tokens_BT >= self.rows.start", "tokens_BT > self.rows.start"
        ),
        [TP],
    ),
    "the rows of vocabulary shards are rounded down": Bug(
        Mutation(f"{TENSOR}:vocabulary_rows", "-(-vocab_size // tp)", "vocab_size // tp"),
        [TP],
        also=(Mutation("shardwright.parallel.model:vocabulary_rows", "-(-vocab_size // tp)", "vocab_size // tp"),),
    ),
    "the last micro-batch of a step is left out": Bug(
        Mutation(
            f"{TRAINER}.forward_backward", "self._microbatches(batch, step)", "self._microbatches(batch, step)[:-1]"
        ),
        [ONE],
    ),
    "gradients are reduced one micro-batch early": Bug(
        Mutation(f"{SEQUENTIAL}.train", "microbatches[-1]", "microbatches[-2]"), [ZERO_0, ZERO_1]
    ),
    "an evaluation leaves out its last micro-batch": Bug(
        Mutation(
            f"{TRAINER}.evaluation_sums",
            "self.model.runner.evaluate(microbatches, losses)",
            "self.model.runner.evaluate(microbatches[:-1] or microbatches, losses)",
        ),
        [ONE],
    ),
    "a rank attends to one chunk more of the gathered keys": Bug(
        Mutation(f"{CONTEXT}:_halves", "2 * n - 2 - rank", "2 * n - 1 - rank"), [ALLGATHER]
    ),
    "an expert keeps one token less than its capacity": Bug(
        Mutation(
            f"{ROUTER}.keep",
            "places_BTE.gather(-1, experts_BTK) <= self.capacity(n_tokens, real)",
            "places_BTE.gather(-1, experts_BTK) < self.capacity(n_tokens, real)",
        ),
        [ZIGZAG],
        spec={"moe": FEW_PLACES},
    ),
    "dropout of a step is that of the step after it": Bug(
        Mutation(
            f"{TRAINER}._random_keys",
            "sample_keys(self.seed, step, self._on_device(sample_ids_B))",
            "sample_keys(self.seed, step + 1, self._on_device(sample_ids_B))",
        ),
        [ONE],
        spec={"dropout": 0.2},
    ),
    "a piece of a sequence counts its own tokens twice for the capacity": Bug(
        Mutation(f"{ROUTER}.places", "self.sum(counts_BPE).cumsum(1) - counts_BPE", "self.sum(counts_BPE).cumsum(1)"),
        [ZIGZAG],
        spec={"moe": FEW_PLACES},
    ),
    "the target of the last row of a vocabulary shard is left out": Bug(
        Mutation(LOSS, "targets_N < rows.stop", "targets_N < rows.stop - 1"), [TP]
    ),
    "the last layer of a stage is left out": Bug(
        Mutation("shardwright.parallel.apply:stage_layers", "range(begin, end)", "range(begin, end - 1)"),
        [PP],
        spec={"n_layers": 4},
    ),
}
