"""Bugs of a wrong mask: of targets, of attention, of dropout, of the capacity of experts."""

from shardwright.layout.layout import Layout
from tests.mutation import Mutation
from tests.training.bugs.bug import (
    ALLGATHER,
    CONTEXT,
    FEW_PLACES,
    LOSS,
    ON_RING,
    ONE,
    PP,
    RING,
    ROUTER,
    SP,
    SP_EP,
    TENSOR,
    TP,
    TRAINER,
    ZIGZAG,
    AnyBug,
    Bug,
    UnitBug,
)

MASK: dict[str, AnyBug] = {
    "tokens are dropped by their place among the own ones": Bug(
        Mutation(f"{ROUTER}.places", "places_BptE + before_BpE.unsqueeze(2)", "places_BptE"),
        [ZIGZAG, SP_EP],
        spec={"moe": FEW_PLACES},
    ),
    "15: dropout is redrawn in the recomputation": Bug(
        Mutation(
            "shardwright.model.dropout:drop",
            "keep_mask(site_keys_B, positions_T, x_BTD.shape[-1], p, first)",
            "keep_mask(site_keys_B + (torch._C._current_graph_task_id() >= 0), positions_T, x_BTD.shape[-1], p, first)",
        ),
        [Layout(recompute="full"), Layout(dp_shard=2, zero=3, recompute="full")],
        spec={"dropout": 0.2},
    ),
    "16: different dropout on copies": Bug(
        Mutation(f"{TRAINER}._random_keys", "self.seed", "torch.distributed.get_rank()"),
        [TP],
        spec={"dropout": 0.2},
    ),
    "16: the same dropout on every token shard": Bug(
        Mutation(f"{TENSOR}:TensorAxis.own_tokens", "self.group.rank()", "0"),
        [SP],
        spec={"dropout": 0.2},
    ),
    "masked targets have the gradient of a softmax": Bug(
        Mutation(LOSS, "factor * counted_N[:, None]", "factor * torch.ones_like(counted_N)[:, None]"), [TP]
    ),
    "masked targets count in the loss": Bug(
        Mutation(LOSS, "(sum_N.log() - target_N) * counted_N", "sum_N.log() - target_N"),
        [TP],
    ),
    "an evaluation is divided by the number of all tokens": Bug(
        Mutation(
            f"{TRAINER}._n_losses",
            "(microbatch.targets_BT != IGNORE).sum((-2, -1))",
            "torch.tensor(microbatch.targets_BT.numel())",
        ),
        [ONE],
    ),
    "the own keys of a ring are not masked": Bug(
        Mutation(f"{RING}:_piece", "(ALL, ALL, True)", "(ALL, ALL, False)"), [ON_RING]
    ),
    "a zigzag rank attends to the late keys of an earlier rank": Bug(
        Mutation(f"{RING}:_piece", "(ALL, early, False)", "(ALL, ALL, False)"), [ZIGZAG]
    ),
    "late queries leave out the late keys of a later rank": Bug(
        Mutation(f"{RING}:_piece", "(late, ALL, False)", "(late, early, False)"), [ZIGZAG]
    ),
    "a ring attends to later ranks instead of earlier ones": Bug(
        Mutation(
            f"{RING}:_piece",
            "(ALL, ALL, False) if source < rank else None",
            "(ALL, ALL, False) if source > rank else None",
        ),
        [ON_RING],
    ),
    "gathered keys are masked as the own ones are": Bug(
        Mutation(
            f"{CONTEXT}:GatherAttention.forward",
            "attend(q_BHTC[:, :, rows], k_BKSC[:, :, columns], v_BKSC[:, :, columns], False)",
            "attend(q_BHTC[:, :, rows], k_BKSC[:, :, columns], v_BKSC[:, :, columns], True)",
        ),
        [ALLGATHER],
    ),
    "dropout goes by the place in the micro-batch": Bug(
        Mutation(
            f"{TRAINER}._random_keys",
            "self._on_device(sample_ids_B)",
            "torch.arange(len(sample_ids_B))",
        ),
        [ONE],
        spec={"dropout": 0.2},
    ),
    "dropout of a stage counts layers from its first": Bug(
        Mutation(
            "shardwright.model.transformer:Transformer.run_layers",
            "layer_site_keys(random_keys_B, int(name))",
            "layer_site_keys(random_keys_B, list(self.layers).index(name))",
        ),
        [PP],
        spec={"dropout": 0.2},
    ),
    "the capacity counts the experts of a token instead of the tokens of an expert": UnitBug(
        Mutation(
            "shardwright.model.moe:Router.keep",
            "picked(experts_BTK, self.moe.n_experts).cumsum(1, dtype=torch.int32)",
            "picked(experts_BTK, self.moe.n_experts).cumsum(2, dtype=torch.int32)",
        ),
        "tests/model/test_moe.py:test_a_capacity_drops_the_later_tokens_of_each_sequence",
    ),
    "dropout goes by the place in the tensor": UnitBug(
        Mutation(
            "shardwright.model.dropout:drop",
            "keep_mask(site_keys_B, positions_T, x_BTD.shape[-1], p, first)",
            "keep_mask(site_keys_B, torch.arange(len(positions_T)), x_BTD.shape[-1], p, first)",
        ),
        "tests/model/test_dropout.py:test_part_of_a_sequence_is_dropped_as_in_the_whole",
    ),
    "an evaluation is filled up with the last sample": UnitBug(
        Mutation(
            "tests.data.test_batches:evaluation_batches",
            "np.where(ids < n, ids * len(samples) // n, PADDING_ID)",
            "np.minimum(ids, n - 1) * len(samples) // n",
        ),
        "tests/data/test_batches.py:test_evaluation_sees_each_sample_once_in_equally_many_batches_on_every_rank",
    ),
}
