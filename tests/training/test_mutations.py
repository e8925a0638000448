"""Proves that bugs which shipped elsewhere in silence do not pass here: put into our code, `verify` sees each; and on
healthy code, in the same layouts, it reports nothing.

Numbers are those of the list of known silent bugs. 18 is in tests/data, 22 to 24 in test_checkpoint*.py too.
To add one: a row of BUGS, with the code as it is, the code as the bug has it, and the layouts in which it shows.
"""

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest

from shardwright.layout import Layout
from shardwright.model.sections import LatentAttentionSpec, MoESpec
from shardwright.verification import Case, Verifier
from tests.marks import prove, rest_prove
from tests.mutation import Mutation, mutated
from tests.training.worlds import CASE, NO_SUM_OF_COPIES, SPEC, train_mutated

TRAINER, APPLY, DATA = "shardwright.training.step:Trainer", "shardwright.parallel.apply", "shardwright.parallel.data"
MODEL, EXCHANGE = "shardwright.parallel.model:ParallelModel", "shardwright.parallel.expert:Exchange"
NORMALISED = "self.loss_sum(logits_BTV, targets_BT) / n_targets"
ZERO_0, ZERO_1, ZERO_2, ZERO_3 = (
    Layout(dp_replicate=2),
    Layout(dp_shard=2, zero=1),
    Layout(dp_shard=2, zero=2),
    Layout(dp_shard=2, zero=3),
)
HYBRID = Layout(dp_replicate=2, dp_shard=2, zero=2)
TP, SP = Layout(tp=2, sequence_parallel=False), Layout(tp=2, sequence_parallel=True)
ZIGZAG, RING, ULYSSES = Layout(cp=2), Layout(cp=2, cp_method="ring"), Layout(cp=2, cp_method="ulysses")

STAGE, TIED = "shardwright.parallel.pipeline.runner:_Step", "shardwright.parallel.pipeline.tied:TiedParameters"
PP, ZB, ZB_V, DUALPIPE = (Layout(pp=2, pp_schedule=name) for name in ("1f1b", "zb-h1", "zb-v", "dualpipe"))

EP, EP_OF_4 = Layout(dp_shard=2, zero=2, ep=2), Layout(dp_shard=4, zero=1, ep=2)
SP_EP = Layout(tp=2, sequence_parallel=True, ep=2)
EXPERTS = MoESpec(n_experts=4, top_k=2, d_ffn=16, bias_rate=0.01, aux_loss=0.1, aux_scope="batch", z_loss=0.01)
ROUTER = "shardwright.parallel.routing:ShardedRouter"
LATENT = LatentAttentionSpec(q_rank=10, kv_rank=12, nope_dim=8, rope_dim=4, v_dim=8)
NORM = "shardwright.training.step:gradient_norm"

EVEN = replace(SPEC, n_heads=4, n_kv_heads=2, d_model=32)  # splits over two ranks of tp or cp
LONG = replace(CASE, spec=EVEN, seq_len=12)  # and so does the sequence


@dataclass(frozen=True)
class Bug:
    """A piece of code changed, and where it has to be seen; `spec` is what is changed of the model that is trained."""

    mutation: Mutation
    layouts: list[Layout]
    dtype: str = "float64"
    spec: dict[str, Any] = field(default_factory=dict)

    def case(self, layout: Layout) -> Case:
        """Three microbatches a step; four for DualPipe, which wants an even number."""
        base = CASE if layout.cp * layout.tp == 1 else LONG
        return replace(
            base,
            spec=replace(base.spec, **self.spec),
            micro_batch=base.global_batch // ((4 if layout == DUALPIPE else 3) * layout.data_ranks),
            dtype=self.dtype,
        )


BUGS = {
    "1: loss averaged per microbatch": Bug(
        Mutation(
            f"{TRAINER}.forward_backward",
            "self.loss_sum(logits_BTV, targets_BT) / n_targets",
            "self.loss_sum(logits_BTV, targets_BT) / (targets_BT != -100).sum() / 6",
        ),
        [ZERO_0, ZERO_1, ZERO_2, ZERO_3],
    ),
    "2: loss averaged per rank": Bug(
        Mutation(f"{TRAINER}.forward_backward", "self.model.sum_over_samples(n_targets)", "2 * n_targets"),
        [ZERO_0, ZERO_1, ZERO_2, ZERO_3],
    ),
    "3: loss averaged over the targets of the own tokens": Bug(
        Mutation(
            f"{TRAINER}.forward_backward",
            "self.loss_sum(logits_BTV, targets_BT) / n_targets",
            "self.loss_sum(logits_BTV, targets_BT) / (targets_BT != -100).sum().clamp(min=1) / 6",
        ),
        [ZIGZAG, RING, ULYSSES],
    ),
    "4: gradients of a pipeline too large by the number of microbatches": Bug(
        Mutation(
            f"{STAGE}._backward",
            "torch.autograd.backward(output, gradient)",
            "torch.autograd.backward(output * (len(self.microbatches) if model.last else 1), gradient)",
        ),
        [PP, ZB],
    ),
    "5: a stage forgets its gradients when the next microbatch comes": Bug(
        Mutation(
            f"{STAGE}._forward",
            "model(x, microbatch.positions_T, microbatch.random_keys_B)",
            "(model.zero_grad(), model(x, microbatch.positions_T, microbatch.random_keys_B))[1]",
        ),
        [PP, ZB],
    ),
    "6: the mean is taken again by FSDP": Bug(
        Mutation(f"{APPLY}:shard", "group.set_gradient_divide_factor(1.0)", "group.set_gradient_divide_factor(2.0)"),
        [ZERO_1, ZERO_2, ZERO_3],
    ),
    "6: the mean is taken again by the all-reduce": Bug(
        Mutation(
            f"{DATA}:Replicated._send",
            "dist.all_reduce(bucket, group=self.group, async_op=True)",
            "dist.all_reduce(bucket, op=dist.ReduceOp.AVG, group=self.group, async_op=True)",
        ),
        [ZERO_0, Layout(pp=2, dp_replicate=2, pp_schedule="zb-h1")],
    ),
    "6: only the outermost group is told to sum": Bug(
        Mutation(
            f"{APPLY}:shard",
            "for group in (root, *ordered):\n"
            "    group.set_force_sum_reduction_for_comms(True)\n    group.set_gradient_divide_factor(1.0)",
            "for group in (root,):\n"
            "    group.set_force_sum_reduction_for_comms(True)\n    group.set_gradient_divide_factor(1.0)",
        ),
        [ZERO_1, ZERO_2, ZERO_3],
    ),
    "7: gradients of experts are divided by the degree of ep": Bug(
        Mutation(
            f"{APPLY}:shard",
            "group.set_gradient_divide_factor(1.0)",
            "group.set_gradient_divide_factor(layout.ep if type(group).__name__ == 'FSDPExpertPart' else 1.0)",
        ),
        [EP, EP_OF_4, SP_EP],
        spec={"moe": EXPERTS},
    ),
    "7: gradients of experts are not summed over the ranks that share them": Bug(
        Mutation(
            f"{APPLY}:shard",
            "group_of(experts, expert_mesh, 'expert_', layout.regathers, dim=1 if few else 0)",
            "group_of(experts, mesh, '', layout.regathers, dim=1 if few else 0)",
        ),
        [Layout(tp=2, sequence_parallel=True)],
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
        [EP, EP_OF_4, SP_EP],
        spec={"moe": EXPERTS},
    ),
    "9: the norm is of the own stage": Bug(
        Mutation("shardwright.training.step:gradient_norm", "stages is not None", "False"),
        [PP, ZB],
    ),
    "9: what two stages hold counts twice": Bug(
        Mutation(
            "shardwright.training.step:gradient_norm",
            "torch.stack(torch._foreach_norm(gradients)).square().sum() / shared_by",
            "torch.stack(torch._foreach_norm(gradients)).square().sum()",
        ),
        [PP, DUALPIPE],
        spec={"tied_embedding": True},
    ),
    "10: the gradient of what every tp rank reads is not summed": Bug(
        Mutation(
            "shardwright.parallel.tensor:_ColumnProducts.backward",
            "summing.wait()",
            "(summing.wait(), _input_gradient(dys_BTF, weights))[1]",
        ),
        [TP],
    ),
    "10: the gradient of the key that all heads read is not summed": Bug(
        Mutation(
            "shardwright.parallel.tensor:_SharedByHeads.backward", "ctx.axis.start_sum(own_BTP).wait()", "own_BTP"
        ),
        [TP],
        spec={"n_kv_heads": 4, "latent_attention": LATENT},
    ),
    "10: the gradients of latent vectors' norms on token shards are not summed": Bug(
        Mutation(
            "shardwright.parallel.replicas:summed_over",
            "row.split == 'replicated' and layout.token_shards",
            "row.split == 'replicated' and 'latent_norm' not in row.name and layout.token_shards",
        ),
        [SP],
        spec={"n_kv_heads": 4, "latent_attention": LATENT},
    ),
    "10: the gradient of the router on token shards is not summed": Bug(
        Mutation(
            "shardwright.parallel.replicas:summed_over",
            "row.split == 'replicated' and layout.token_shards",
            "row.split == 'replicated' and 'router' not in row.name and layout.token_shards",
        ),
        [Layout(tp=2, sequence_parallel=True), SP_EP],
        spec={"moe": EXPERTS},
    ),
    "11: gradients of norms on token shards are not summed": Bug(NO_SUM_OF_COPIES, [SP]),
    "12: the balance losses are those of one rank": Bug(
        Mutation(f"{MODEL}.set_batch", "n_microbatches * ranks", "n_microbatches"),
        [ZERO_0, EP, SP_EP],
        spec={"moe": EXPERTS},
    ),
    "12: the balance losses are counted once for every token shard": Bug(
        Mutation(f"{MODEL}.set_batch", "layout.tp if layout.token_shards else 1", "1"),
        [SP_EP],
        spec={"moe": EXPERTS},
    ),
    "12: the balance losses are those of one microbatch": Bug(
        Mutation(f"{MODEL}.set_batch", "n_microbatches * ranks", "ranks"),
        [ZERO_0, Layout(pp=2, pp_schedule="zb-h1")],
        spec={"moe": EXPERTS},
    ),
    "12: the balance losses are dropped": Bug(
        Mutation("shardwright.model.moe:MoE.forward", "y_BTD = attach(y_BTD, loss)", "pass"),
        [EP, SP_EP],
        spec={"moe": EXPERTS},
    ),
    "12: the balance loss of a sequence goes by the load of the own tokens": Bug(
        Mutation(f"{ROUTER}.losses", "self.sum(asked_BE.clone())", "asked_BE"),
        [ZIGZAG, SP_EP],
        spec={"moe": replace(EXPERTS, aux_scope="sequence")},
    ),
    "tokens are dropped by their place among the own ones": Bug(
        Mutation(f"{ROUTER}.places", "places_BptE + before_BpE.unsqueeze(2)", "places_BptE"),
        [ZIGZAG, SP_EP],
        spec={"moe": replace(EXPERTS, capacity_factor=1.0)},
    ),
    "tokens are dropped by the rank that holds them, not by their order": Bug(
        Mutation(
            f"{APPLY}:shard_routers",
            "[piece for span in held for piece in span]",
            "[n_pieces // 2 * dist.get_rank() + i for i in range(n_pieces // 2)]",
        ),
        [ZIGZAG],
        spec={"moe": replace(EXPERTS, capacity_factor=1.0)},
    ),
    "13: attention's gradient from the keys of other ranks is left out": Bug(
        Mutation("shardwright.parallel.ring:RingAttention.backward", "dq_BHTC[:, :, rows] += dq_block", "pass"),
        [ZIGZAG, RING],
    ),
    "13: gradients of keys and values do not come home": Bug(
        Mutation("shardwright.parallel.ring:RingAttention.backward", "block is not None", "step == n"),
        [ZIGZAG, RING],
    ),
    "14: rotary positions of the shard": Bug(
        Mutation(
            f"{TRAINER}._microbatches",
            "positions_T.to(self.device, non_blocking=True)",
            "torch.arange(len(positions_T))",
        ),
        [ZIGZAG, RING, ULYSSES],
    ),
    "15: dropout is redrawn in the recomputation": Bug(
        Mutation(
            "shardwright.model.dropout:KeyedDropout.forward",
            "keep_mask(site_keys_B, positions_T, x_BTD.shape[-1], self.p)",
            "keep_mask(site_keys_B + (torch._C._current_graph_task_id() >= 0), positions_T, x_BTD.shape[-1], self.p)",
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
        Mutation("shardwright.parallel.tensor:TensorAxis.own_tokens", "self.group.rank()", "0"),
        [SP],
        spec={"dropout": 0.2},
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
    "17: the duplicate on the same rank is not updated": Bug(
        Mutation(f"{TIED}.update_duplicates", "local_part(second).copy_(local_part(first))", "pass"),
        [ZB_V],
        spec={"tied_embedding": True, "n_layers": 4},
    ),
    "20: gradients are reduced in bf16": Bug(
        Mutation(
            f"{APPLY}:shard",
            "MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=param_dtype, cast_forward_inputs=False)",
            "MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=compute_dtype, cast_forward_inputs=False)",
        ),
        [ZERO_1, ZERO_2, ZERO_3, HYBRID],
        dtype="bfloat16",
    ),
    "21: gradients of copied kv heads are not summed": Bug(
        NO_SUM_OF_COPIES, [TP, Layout(tp=4, sequence_parallel=False)], spec={"n_kv_heads": 1}
    ),
    "22: layers are numbered from the start of their stage": Bug(
        Mutation(
            "shardwright.parallel.pipeline.stage:StageModel.__init__",
            "{str(i): whole.layers[str(i)] for i in layers}",
            "{str(i - layers[0]): whole.layers[str(i)] for i in layers}",
        ),
        [PP],
    ),
    "25: with one data rank, nothing is reduced over cp": Bug(
        Mutation(f"{APPLY}:build_groups", "along('dp_replicate', 'dp_shard', 'cp')", "None"),
        [ZIGZAG, ULYSSES],
    ),
    "26: the last microbatch does not reshard": Bug(
        Mutation(f"{DATA}:Sharded._set", "last or self.regathers", "self.regathers"),
        [ZERO_1, ZERO_2, Layout(pp=2, dp_shard=2, zero=1), Layout(pp=2, dp_shard=2, zero=3, pp_schedule="zb-h1")],
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
    "rows come back from the experts in another order": Bug(
        Mutation(f"{EXCHANGE}.__call__", "order_S.argsort()", "order_S"),
        [EP, SP_EP],
        spec={"moe": EXPERTS},
    ),
    "gradients go back to the senders of other rows": Bug(
        Mutation(
            "shardwright.parallel.expert:_Arrived.backward",
            "_start(grads[0], ctx.from_, ctx.to, ctx.exchange.group)",
            "_start(grads[0].flip(0), ctx.from_, ctx.to, ctx.exchange.group)",
        ),
        [EP],
        spec={"moe": EXPERTS},
    ),
    "gradients of weights left for later are dropped for one microbatch": Bug(
        Mutation(
            f"{STAGE}._weight_gradients",
            "self.weights.pop((stage, i))()",
            "self.weights.pop((stage, i))() if i else None",
        ),
        [ZB, ZB_V],
        spec={"n_layers": 4},
    ),
    "gradients of experts left for later are kept of the first microbatch alone": Bug(
        Mutation("shardwright.model.matmul:weight_gradient", "add_to.add_(dweight_EFD)", "add_to"),
        [ZB],
        spec={"moe": EXPERTS},
    ),
    "a message carries the output of another microbatch": Bug(
        Mutation(
            f"{STAGE}._forward",
            "self.results[stage + 1, 'F', i] = output.detach()",
            "self.results[stage + 1, 'F', i] = self.kept[min(self.kept)][1].detach()",
        ),
        [PP, ZB],
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
}
SETTINGS = {(bug.case(layout), layout): None for bug in BUGS.values() for layout in bug.layouts}


@pytest.mark.parametrize("name", rest_prove(BUGS, "11: gradients of norms on token shards are not summed"))
def test_verify_sees_the_bug(name: str):
    bug = BUGS[name]
    with Verifier(partial(train_mutated, (bug.mutation,))) as verifier:
        for layout in bug.layouts:
            report = verifier.parity(bug.case(layout), layout)
            assert not report.equal, layout
            # Not by a hair: what is wrong is wrong by a hundred tolerances, or copies differ.
            assert report.differing or report.worst.excess > 100, (layout, report.worst)


@prove
@pytest.mark.parametrize(("case", "layout"), SETTINGS)
def test_verify_reports_nothing_on_healthy_code(case: Case, layout: Layout, verifier: Verifier):
    report = verifier.parity(case, layout)
    assert report.equal, report.differing or report.worst


def test_every_bug_can_still_be_put_in():
    for bug in BUGS.values():
        with mutated(bug.mutation):
            pass
