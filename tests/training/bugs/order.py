"""Bugs of a wrong order: layers, tokens, heads, rows or messages come in another order than they are read in."""

from tests.mutation import Mutation
from tests.training.bugs.bug import (
    ALLGATHER,
    APPLY,
    CONTEXT,
    DUALPIPE,
    EP,
    EXCHANGE,
    EXPERTS,
    FEW_PLACES,
    MODEL,
    ON_RING,
    PP,
    RING,
    ROUTER,
    SP,
    SP_EP,
    STAGE,
    STAGES,
    TENSOR,
    ULYSSES,
    ULYSSES_ROOM,
    ZB,
    ZIGZAG,
    AnyBug,
    Bug,
    UnitBug,
)

ORDER: dict[str, AnyBug] = {
    "rows come back from the experts in another order": Bug(
        Mutation(f"{EXCHANGE}.__call__", "order_S.argsort()", "order_S"),
        [EP, SP_EP],
        spec={"moe": EXPERTS},
    ),
    "gradients go back to the senders of other rows": Bug(
        Mutation(
            "shardwright.parallel.expert:_AwaitAllToAll.backward",
            "_start(grads[0], ctx.from_, ctx.to, ctx.exchange.group)",
            "_start(grads[0].flip(0), ctx.from_, ctx.to, ctx.exchange.group)",
        ),
        [EP],
        spec={"moe": EXPERTS},
    ),
    "a message carries the output of another microbatch": Bug(
        Mutation(
            f"{STAGE}._forward",
            "self.results[stage + 1, 'F', i] = output.detach()",
            "self.results[stage + 1, 'F', i] = (self.kept[min(self.kept)][1] if self.kept else output).detach()",
        ),
        [PP, ZB],
    ),
    "the early and the late half of a zigzag rank are swapped": Bug(
        Mutation(
            f"{RING}:_piece",
            "slice(tokens // 2), slice(tokens // 2, None)",
            "slice(tokens // 2, None), slice(tokens // 2)",
        ),
        [ZIGZAG],
    ),
    "layers of a stage are ordered as text": Bug(
        Mutation(
            f"{STAGES}:StageModel.__init__",
            "{str(i): whole.layers[str(i)] for i in layers}",
            "{name: whole.layers[name] for name in sorted(str(i) for i in layers)}",
        ),
        [PP],
        spec={"n_layers": 11},
    ),
    "layers are cut into stages in the order of their names": Bug(
        Mutation(
            f"{APPLY}:cut_stages",
            "StageModel(whole, number, own, len(layers))",
            "StageModel(whole, number, [int(name) for name in sorted(whole.layers)][slice(own.start, own.stop)], "
            "len(layers))",
        ),
        [PP],
        spec={"n_layers": 11},
    ),
    "attention merges blocks with each other's weights": Bug(
        Mutation(f"{RING}:merge", "block_lse_BHT - lse_BHT", "lse_BHT - block_lse_BHT"), [ZIGZAG, ON_RING]
    ),
    "attention merges gathered blocks with each other's weights": Bug(
        Mutation(f"{CONTEXT}:merge", "block_lse_BHT - lse_BHT", "lse_BHT - block_lse_BHT"), [ALLGATHER]
    ),
    "gathered token shards are interleaved": Bug(
        Mutation(
            f"{TENSOR}:start_gather_tokens",
            "gathered_nBtD.transpose(0, 1).flatten(1, 2)",
            "gathered_nBtD.permute(1, 2, 0, 3).flatten(1, 2)",
        ),
        [SP],
    ),
    "summed tokens are scattered to ranks round-robin": Bug(
        Mutation(
            f"{TENSOR}:start_sum_tokens",
            "x_BTD.unflatten(1, (n, -1)).transpose(0, 1).contiguous()",
            "x_BTD.unflatten(1, (-1, n)).permute(2, 0, 1, 3).contiguous()",
        ),
        [SP],
    ),
    "ulysses interleaves the tokens of its ranks": Bug(
        Mutation(
            f"{ULYSSES_ROOM}:_to_heads",
            "received_nBTWC.transpose(0, 1).flatten(1, 2)",
            "received_nBTWC.permute(1, 2, 0, 3, 4).flatten(1, 2)",
        ),
        [ULYSSES],
    ),
    "ulysses interleaves the heads of its ranks": Bug(
        Mutation(
            f"{ULYSSES_ROOM}:_to_tokens",
            "summed.permute(1, 2, 0, 3, 4).flatten(2, 3)",
            "summed.permute(1, 2, 3, 0, 4).flatten(2, 3)",
        ),
        [ULYSSES],
    ),
    "received rows are taken to be sorted by expert, then by sender": Bug(
        Mutation(
            "shardwright.parallel.expert:_expert_of_each",
            "torch.arange(e, device=arriving_ne.device).repeat(n)",
            "torch.arange(e, device=arriving_ne.device).repeat_interleave(n)",
        ),
        [EP],
        spec={"moe": EXPERTS},
    ),
    "copies on other ranks are summed before those on the same rank": Bug(
        Mutation(
            f"{MODEL}.complete_gradients",
            "self.tied.sum_on_rank()\n"
            "sum_replica_gradients(self.named_parameters, self.spec, self.layout, self.groups)\n"
            "self.tied.sum_over_ranks()",
            "self.tied.sum_over_ranks()\nself.tied.sum_on_rank()\n"
            "sum_replica_gradients(self.named_parameters, self.spec, self.layout, self.groups)",
        ),
        [DUALPIPE],
        spec={"tied_embedding": True},
    ),
    "gathered chunks of other ranks are not in the order of the sequence": Bug(
        Mutation(f"{CONTEXT}:_others", "early + late", "late + early"), [ALLGATHER]
    ),
    "places at an expert are counted from the end of the sequence": Bug(
        Mutation(
            f"{ROUTER}.places",
            "self.sum(counts_BPE).cumsum(1) - counts_BPE",
            "self.sum(counts_BPE).flip(1).cumsum(1).flip(1) - counts_BPE",
        ),
        [ZIGZAG],
        spec={"moe": FEW_PLACES},
    ),
    "the selection bias rises above the mean load": UnitBug(
        Mutation(
            "tests.model.test_balance:update_bias",
            "counts_E.sum() - counts_E * counts_E.numel()",
            "counts_E * counts_E.numel() - counts_E.sum()",
        ),
        "tests/model/test_balance.py:test_the_bias_rises_below_the_mean_and_falls_above",
    ),
}
