"""Bugs of a missing, a double or a wrong reduction: what several ranks have a part of is not their sum."""

from dataclasses import replace

from shardwright.layout.layout import Layout
from tests.mutation import Mutation
from tests.training.bugs.bug import (
    APPLY,
    DATA,
    DUALPIPE,
    EP,
    EP_OF_4,
    EXPERTS,
    HYBRID,
    LATENT,
    LOSS,
    MODEL,
    NORM,
    ON_RING,
    PP,
    REDUCTIONS,
    RING,
    ROUTER,
    SP,
    SP_EP,
    TENSOR,
    TIED,
    TP,
    TRAINER,
    ULYSSES,
    ZB,
    ZB_V,
    ZERO_0,
    ZERO_1,
    ZERO_3,
    ZIGZAG,
    Bug,
)
from tests.training.worlds import NO_SUM_OF_COPIES

REDUCTION: dict[str, Bug] = {
    "6: only the outermost group is told to sum": Bug(
        Mutation(
            f"{APPLY}:shard",
            "over.size() > 1",
            "over.size() > 1 and module is model",
        ),
        [ZERO_1, ZERO_3],
    ),
    "7: gradients of experts are not summed over the ranks that share them": Bug(
        Mutation(
            f"{APPLY}:shard",
            "group_of(experts, expert_mesh, 'expert_', layout.regathers, dim=1 if few else 0)",
            "group_of(experts, mesh, '', layout.regathers, dim=1 if few else 0)",
        ),
        [SP],
        spec={"moe": EXPERTS},
    ),
    "8: the norm omits experts": Bug(
        Mutation(NORM, "groups.items()", "[(key, found) for key, found in groups.items() if 'ep' not in str(key[0])]"),
        [EP, SP_EP],
        spec={"moe": EXPERTS},
    ),
    "8: the norm is of the own experts": Bug(
        Mutation(
            NORM,
            "for axis in sharded:\n    dist.all_reduce(square, group=mesh.get_group(axis))",
            "for axis in [a for a in sharded if mesh.mesh_dim_names[a] != 'ep']:\n"
            "    dist.all_reduce(square, group=mesh.get_group(axis))",
        ),
        [EP_OF_4, SP_EP],
        spec={"moe": EXPERTS},
    ),
    "9: the norm is of the own stage": Bug(
        Mutation(NORM, "stages is not None", "False"),
        [PP, ZB],
    ),
    "10: the gradient of what every tp rank reads is not summed": Bug(
        Mutation(
            f"{TENSOR}:_ColumnProducts.backward",
            "summing.wait()",
            "(summing.wait(), _input_gradient(dys_BTF, weights, ctx.recipes))[1]",
        ),
        [TP],
    ),
    "10: the gradient of the key that all heads read is not summed": Bug(
        Mutation(f"{TENSOR}:_SharedByHeads.backward", "ctx.axis.start_sum(own_BTP).wait()", "own_BTP"),
        [TP],
        spec={"n_kv_heads": 4, "latent_attention": LATENT},
    ),
    "10: the gradients of latent vectors' norms on token shards are not summed": Bug(
        Mutation(
            f"{REDUCTIONS}:summed_over",
            "row.split == 'replicated' and layout.token_shards",
            "row.split == 'replicated' and 'latent_norm' not in row.name and layout.token_shards",
        ),
        [SP],
        spec={"n_kv_heads": 4, "latent_attention": LATENT},
    ),
    "10: the gradient of the router on token shards is not summed": Bug(
        Mutation(
            f"{REDUCTIONS}:summed_over",
            "row.split == 'replicated' and layout.token_shards",
            "row.split == 'replicated' and 'router' not in row.name and layout.token_shards",
        ),
        [SP, SP_EP],
        spec={"moe": EXPERTS},
    ),
    "11: gradients of norms on token shards are not summed": Bug(NO_SUM_OF_COPIES, [SP]),
    "12: the balance losses are dropped": Bug(
        Mutation("shardwright.parallel.routing:LossScale._scale", "loss * self.share", "loss.detach() * self.share"),
        [EP, SP_EP],
        spec={"moe": EXPERTS},
    ),
    "12: the balance loss of a sequence goes by the load of the own tokens": Bug(
        Mutation(f"{ROUTER}.losses", "self.sum(asked_BE.clone())", "asked_BE"),
        [ZIGZAG, SP_EP],
        spec={"moe": replace(EXPERTS, aux_scope="sequence")},
    ),
    "13: attention's gradient from the keys of other ranks is left out": Bug(
        Mutation(f"{RING}:RingAttention.backward", "dq_BHTC[:, :, rows] += dq_block", "pass"),
        [ZIGZAG, ON_RING],
    ),
    "13: gradients of keys and values do not come home": Bug(
        Mutation(f"{RING}:RingAttention.backward", "block is not None", "step == n"),
        [ZIGZAG, ON_RING],
    ),
    "17: gradients of copies on other stages are not summed": Bug(
        Mutation(f"{TIED}.sum_over_ranks", "sum_together(gradients, self._groups[ranks])", "pass"),
        [PP, DUALPIPE],
        spec={"tied_embedding": True},
    ),
    "17: the gradient of the copy on the same rank is not added": Bug(
        Mutation(f"{TIED}.sum_on_rank", "local_part(first.grad).add_(local_part(second.grad))", "pass"),
        [ZB_V],
        spec={"tied_embedding": True, "n_layers": 4},
    ),
    "21: gradients of copied kv heads are not summed": Bug(
        NO_SUM_OF_COPIES, [TP, Layout(tp=4, sequence_parallel=False)], spec={"n_kv_heads": 1}
    ),
    "25: with one data rank, nothing is reduced over cp": Bug(
        Mutation(f"{APPLY}:build_groups", "along('dp_replicate', 'dp_shard', 'cp')", "None"),
        [ZIGZAG, ULYSSES],
    ),
    "biases of routers go by the tokens of the own rank": Bug(
        Mutation(
            f"{MODEL}.learn_from_load", "(self.groups.tokens, shards, self.groups.pp)", "(shards, self.groups.pp)"
        ),
        [ZERO_0, EP],
        spec={"moe": EXPERTS},
    ),
    "biases of routers go by the tokens of the own shard": Bug(
        Mutation(
            f"{MODEL}.learn_from_load",
            "(self.groups.tokens, shards, self.groups.pp)",
            "(self.groups.tokens, self.groups.pp)",
        ),
        [SP_EP],
        spec={"moe": EXPERTS},
    ),
    "gradients are not reduced over replicas": Bug(
        Mutation(f"{APPLY}:shard", "replicas in (along.mesh_dim_names or ())", "False"),
        [HYBRID],
    ),
    "gradients are not reduced at all": Bug(
        Mutation(
            f"{DATA}:Replicated._send",
            "len(self._works) < len(self._buckets) and (not self._missing[len(self._works)])",
            "False and len(self._works) < len(self._buckets) and (not self._missing[len(self._works)])",
        ),
        [ZERO_0, Layout(pp=2, dp_replicate=2)],
    ),
    "the gradient of a row-parallel linear's bias is that of one token shard": Bug(
        Mutation(
            f"{REDUCTIONS}:summed_over",
            "row.split == 'replicated' and layout.token_shards",
            "row.split == 'replicated' and row.kind != 'bias' and layout.token_shards",
        ),
        [SP],
        spec={"bias": True},
    ),
    "gradients that every rank of tp has whole are summed": Bug(
        Mutation(
            f"{REDUCTIONS}:summed_over",
            "row.split == 'replicated' and layout.token_shards",
            "row.split == 'replicated'",
        ),
        [TP],
    ),
    "gradients of kv heads are summed over ranks with other heads": Bug(
        Mutation(
            f"{REDUCTIONS}:summed_over",
            "'tp_replicas' if kv_replicas(n_kv_heads, layout.tp) > 1 else None",
            "'tp' if kv_replicas(n_kv_heads, layout.tp) > 1 else None",
        ),
        [Layout(tp=4, sequence_parallel=False)],
    ),
    "gradients of the norms of heads are not summed": Bug(
        Mutation(f"{REDUCTIONS}:summed_over", "if row.split == 'per_head':\n    return 'tp'", "pass"),
        [TP],
        spec={"qk_norm": True},
    ),
    "the loss's sum of exponentials is that of the own vocabulary": Bug(
        Mutation(LOSS, "dist.all_reduce(sums_2N, group=group)", "dist.all_reduce(sums_2N[1], group=group)"),
        [TP],
    ),
    "every rank takes the largest logit of its own vocabulary from its logits": Bug(
        Mutation(LOSS, "dist.all_reduce(largest_N, dist.ReduceOp.MAX, group=group)", "pass"), [TP]
    ),
    "target tokens are counted once for every rank of cp": Bug(
        Mutation(
            f"{TRAINER}.forward_backward",
            "self.model.sum_over_samples(n_targets)",
            "self.model.sum_over_losses(n_targets)",
        ),
        [ZIGZAG, PP],
    ),
    "the loss is not summed over stages": Bug(
        Mutation(f"{MODEL}.sum_over_losses", "(self.groups.tokens, self.groups.pp)", "(self.groups.tokens,)"), [PP]
    ),
    "an evaluation is summed over ranks with other samples alone": Bug(
        Mutation(f"{TRAINER}.evaluation_sums", "self.model.sum_over_losses(sums)", "self.model.sum_over_samples(sums)"),
        [ZIGZAG, PP],
    ),
    "every stage counts the target tokens of an evaluation": Bug(
        Mutation(f"{TRAINER}.evaluation_sums", "self.model.counts_targets", "True"), [PP]
    ),
    "the gradient of the latent key on token shards is that of the own heads": Bug(
        Mutation(
            f"{TENSOR}:_SharedByHeads.backward",
            "ctx.axis.start_sum(own_BTP).wait()",
            "own_BTP.unflatten(1, (ctx.axis.group.size(), -1))[:, ctx.axis.group.rank()]",
        ),
        [SP],
        spec={"n_kv_heads": 4, "latent_attention": LATENT},
    ),
    "gradients are summed over replicas in every micro-batch but the last": Bug(
        Mutation(
            f"{DATA}:Sharded._set", "root.set_requires_all_reduce(last)", "root.set_requires_all_reduce(not last)"
        ),
        [HYBRID],
    ),
}
