"""Bugs of a wrong shard: a rank takes the positions, rows, tokens or experts of another one."""

from tests.mutation import Mutation
from tests.training.bugs.bug import (
    APPLY,
    EP,
    EXCHANGE,
    EXPERTS,
    FEW_PLACES,
    ROUTER,
    SP,
    TENSOR,
    TP,
    TRAINER,
    ULYSSES,
    ZERO_3,
    ZIGZAG,
    AnyBug,
    Bug,
    UnitBug,
)

SHARD: dict[str, AnyBug] = {
    "tokens are dropped by the rank that holds them, not by their order": Bug(
        Mutation(
            f"{APPLY}:shard_routers",
            "[piece for span in local for piece in span]",
            "[n_pieces // 2 * dist.get_rank() + i for i in range(n_pieces // 2)]",
        ),
        [ZIGZAG],
        spec={"moe": FEW_PLACES},
    ),
    "14: rotary positions of the shard": Bug(
        Mutation(
            f"{TRAINER}._microbatches",
            "self._on_device(positions_T)",
            "torch.arange(len(positions_T))",
        ),
        [ZIGZAG, ULYSSES],
    ),
    "every shard begins with the values of the first": Bug(
        Mutation("shardwright.parallel.initialise:local_box", "(local, offsets)", "(local, (0,) * len(offsets))"),
        [ZERO_3],
    ),
    "experts of every rank begin with the values of the first": Bug(
        Mutation(
            "shardwright.parallel.initialise:local_box",
            "(local, offsets)",
            "(local, (0, *offsets[1:]) if tensor.dim() == 3 else offsets)",
        ),
        [EP],
        spec={"moe": EXPERTS},
    ),
    "a zigzag rank holds two chunks side by side": Bug(
        Mutation("shardwright.split.sequence:on_ring", "(rank, parts - 1 - rank)", "(2 * rank, 2 * rank + 1)"),
        [ZIGZAG],
    ),
    "experts are assigned to ranks round-robin": Bug(
        Mutation(
            f"{EXCHANGE}.__call__", "counts_E.view(self.group.size(), -1)", "counts_E.view(-1, self.group.size()).T"
        ),
        [EP],
        spec={"moe": EXPERTS},
        crashes=True,
    ),
    "learned positions are those of the first token shard": Bug(
        Mutation(
            f"{TENSOR}:_narrow_positions",
            "(axis.own_tokens(inputs[0]),)",
            "(inputs[0][: len(inputs[0]) // axis.group.size()],)",
        ),
        [SP],
        spec={"positions": "learned"},
    ),
    "drawn experts go by the position in the token shard": Bug(
        Mutation(
            "shardwright.parallel.routing:_narrow_positions",
            "own_tokens(inputs[2])",
            "torch.arange(len(own_tokens(inputs[2])))",
        ),
        [SP],
        dtype="bfloat16",
        spec={"moe": EXPERTS},
    ),
    "the capacity of experts is that of the own tokens": Bug(
        Mutation(f"{ROUTER}.keep", "experts_BTK.shape[1] // len(self.pieces) * self.n_pieces", "experts_BTK.shape[1]"),
        [ZIGZAG],
        spec={"moe": FEW_PLACES},
    ),
    "targets are those of another rank of cp": Bug(
        Mutation(f"{TRAINER}._microbatches", "targets_ABT[..., positions_T]", "targets_ABT[..., : len(positions_T)]"),
        [ZIGZAG, ULYSSES],
    ),
    "a token's row in a vocabulary shard is its id modulo the rows of the shard": Bug(
        Mutation(
            f"{TENSOR}:VocabularyEmbedding.forward",
            "(tokens_BT - self.rows.start).where(own_BT, 0)",
            "(tokens_BT % len(self.rows)).where(own_BT, 0)",
        ),
        [TP],
    ),
    "blocks of samples of data ranks overlap": UnitBug(
        Mutation(
            "shardwright.data.batches:Batches.__init__",
            "data_rank * n + np.arange(n)",
            "data_rank * stage.micro_batch + np.arange(n)",
        ),
        "tests/data/test_batches.py:test_what_a_step_trains_on_does_not_depend_on_the_ranks",
    ),
}
