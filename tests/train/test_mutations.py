"""Proves that bugs which shipped elsewhere in silence do not pass here: put into our code, `verify` sees each; and on
healthy code, in the same layouts, it reports nothing.

Numbers are those of the list of known silent bugs. 18 is in tests/data, 22 to 24 in test_checkpoint*.py too.
To add one: a row of BUGS, with the line as it is, the line as the bug has it, and the layouts in which it shows.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest

from shardwright.layout import Layout
from shardwright.model.sections import LatentAttentionSpec, MoESpec
from shardwright.verify import Case, Verifier
from tests.mutation import Mutation, mutated
from tests.train.worlds import CASE, SPEC, train_mutated

TRAINER, APPLY, DATA = "shardwright.train.step:Trainer", "shardwright.parallel.apply", "shardwright.parallel.data"
MODEL, EXCHANGE = "shardwright.parallel.model:ParallelModel", "shardwright.parallel.expert:Exchange"
NORMALISED = "self.loss_sum(logits_BTV, targets_BT) / n_targets"
ZERO_0, ZERO_1, ZERO_2, ZERO_3 = (
    Layout(dp_replicate=2),
    Layout(dp_shard=2, zero=1),
    Layout(dp_shard=2, zero=2),
    Layout(dp_shard=2, zero=3),
)
NO_SUM_OF_COPIES: Mutation = (
    "shardwright.parallel.model",
    "sum_copies",
    "if parts and group is not None:",
    "if False:",
)
HYBRID = Layout(dp_replicate=2, dp_shard=2, zero=2)
TP, SP = Layout(tp=2, sequence_parallel=False), Layout(tp=2, sequence_parallel=True)
ZIGZAG, RING, ULYSSES = Layout(cp=2), Layout(cp=2, cp_method="ring"), Layout(cp=2, cp_method="ulysses")

STAGE, TIED = "shardwright.parallel.pipeline.runner:_Step", "shardwright.parallel.pipeline.tied:TiedParameters"
PP, ZB, ZB_V, DUALPIPE = (Layout(pp=2, schedule=name) for name in ("1f1b", "zb-h1", "zb-v", "dualpipe"))

EP, EP_OF_4 = Layout(dp_shard=2, zero=2, ep=2), Layout(dp_shard=4, zero=1, ep=2)
SP_EP = Layout(tp=2, sequence_parallel=True, ep=2)
EXPERTS = MoESpec(n_experts=4, top_k=2, d_ffn=16, bias_rate=0.01, aux_loss=0.1, aux_scope="batch", z_loss=0.01)
ROUTER = "shardwright.parallel.routing:ShardedRouter"
LATENT = LatentAttentionSpec(q_rank=10, kv_rank=12, nope_dim=8, rope_dim=4, v_dim=8)
NORM = ("shardwright.train.step", "gradient_norm")

EVEN = replace(SPEC, n_heads=4, n_kv_heads=2, d_model=32)  # splits over two ranks of tp or cp
LONG = replace(CASE, spec=EVEN, seq_len=12)  # and so does the sequence


@dataclass(frozen=True)
class Bug:
    """A line changed, and where it has to be seen; `spec` is what is changed of the model that is trained."""

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
        (TRAINER, "forward_backward", NORMALISED, NORMALISED.replace("n_targets", "(targets_BT != -100).sum() / 6")),
        [ZERO_0, ZERO_1, ZERO_2, ZERO_3],
    ),
    "2: loss averaged per rank": Bug(
        (TRAINER, "forward_backward", "self.model.sum_over_samples(n_targets)", "(2 * n_targets)"),
        [ZERO_0, ZERO_1, ZERO_2, ZERO_3],
    ),
    "3: loss averaged over the targets of the own tokens": Bug(
        (TRAINER, "forward_backward", NORMALISED,
         NORMALISED.replace("n_targets", "(targets_BT != -100).sum().clamp(min=1) / 6")),
        [ZIGZAG, RING, ULYSSES],
    ),
    "4: gradients of a pipeline too large by the number of microbatches": Bug(
        (STAGE, "_backward", "torch.autograd.backward(output,",
         "torch.autograd.backward(output * (len(self.microbatches) if model.last else 1),"),
        [PP, ZB],
    ),
    "5: a stage forgets its gradients when the next microbatch comes": Bug(
        (STAGE, "_forward", "with self.timeline", "model.zero_grad()\n    with self.timeline"),
        [PP, ZB],
    ),
    "6: the mean is taken again by FSDP": Bug(
        (APPLY, "shard", "set_gradient_divide_factor(1.0)", "set_gradient_divide_factor(2.0)"),
        [ZERO_1, ZERO_2, ZERO_3],
    ),
    "6: the mean is taken again by the all-reduce": Bug(
        (DATA + ":Replicated", "_send", "all_reduce(bucket,", "all_reduce(bucket, op=dist.ReduceOp.AVG,"),
        [ZERO_0, Layout(pp=2, dp_replicate=2, schedule="zb-h1")],
    ),
    "6: only the outermost group is told to sum": Bug(
        (APPLY, "shard", "for group in (root, *ordered):", "for group in (root,):"),
        [ZERO_1, ZERO_2, ZERO_3],
    ),
    "7: gradients of experts are divided by the degree of ep": Bug(
        (APPLY, "shard", "set_gradient_divide_factor(1.0)",
         "set_gradient_divide_factor(layout.ep if type(group).__name__ == 'FSDPExpertPart' else 1.0)"),
        [EP, EP_OF_4, SP_EP],
        spec={"moe": EXPERTS},
    ),
    "7: gradients of experts are not summed over the ranks that share them": Bug(
        (APPLY, "shard", 'group_of(experts, expert_mesh, "expert_",', 'group_of(experts, mesh, "",'),
        [Layout(tp=2, sequence_parallel=True)],
        spec={"moe": EXPERTS},
    ),
    "8: the norm omits experts": Bug(
        (*NORM, "groups.items():", "[(key, found) for key, found in groups.items() if 'ep' not in str(key[0])]:"),
        [EP, SP_EP],
        spec={"moe": EXPERTS},
    ),
    "8: the norm is of the own experts": Bug(
        (*NORM, "for axis in sharded:", "for axis in [a for a in sharded if mesh.mesh_dim_names[a] != 'ep']:"),
        [EP, EP_OF_4, SP_EP],
        spec={"moe": EXPERTS},
    ),
    "9: the norm is of the own stage": Bug(
        ("shardwright.train.step", "gradient_norm", "if stages is not None:", "if False:"),
        [PP, ZB],
    ),
    "9: what two stages hold counts twice": Bug(
        ("shardwright.train.step", "gradient_norm", ".sum() / shared_by", ".sum()"),
        [PP, DUALPIPE],
        spec={"tied_embedding": True},
    ),
    "10: the gradient of what every tp rank reads is not summed": Bug(
        ("shardwright.parallel.tensor:_ColumnProducts", "backward",
         "return summing.wait(), None,", "return (summing.wait(), _input_gradient(dys_BTF, weights))[1], None,"),
        [TP],
    ),
    "10: the gradient of the key that all heads read is not summed": Bug(
        ("shardwright.parallel.tensor:_SharedByHeads", "backward", "ctx.axis.start_sum(own_BTP).wait()", "own_BTP"),
        [TP],
        spec={"n_kv_heads": 4, "latent_attention": LATENT},
    ),
    "10: the gradients of latent vectors' norms on token shards are not summed": Bug(
        ("shardwright.parallel.copies", "summed_over", 'if row.split == "replicated"',
         'if row.split == "replicated" and "latent_norm" not in row.name'),
        [SP],
        spec={"n_kv_heads": 4, "latent_attention": LATENT},
    ),
    "10: the gradient of the router on token shards is not summed": Bug(
        ("shardwright.parallel.copies", "summed_over", 'if row.split == "replicated"',
         'if row.split == "replicated" and "router" not in row.name'),
        [Layout(tp=2, sequence_parallel=True), SP_EP],
        spec={"moe": EXPERTS},
    ),
    "11: gradients of norms on token shards are not summed": Bug(NO_SUM_OF_COPIES, [SP]),
    "12: the balance losses are those of one rank": Bug(
        (MODEL, "set_batch", "1 / (n_microbatches * ranks)", "1 / n_microbatches"),
        [ZERO_0, EP, SP_EP],
        spec={"moe": EXPERTS},
    ),
    "12: the balance losses are counted once for every token shard": Bug(
        (MODEL, "set_batch", "(layout.tp if layout.token_shards else 1)", "1"),
        [SP_EP],
        spec={"moe": EXPERTS},
    ),
    "12: the balance losses are those of one microbatch": Bug(
        (MODEL, "set_batch", "n_microbatches * ranks", "ranks"),
        [ZERO_0, Layout(pp=2, schedule="zb-h1")],
        spec={"moe": EXPERTS},
    ),
    "12: the balance losses are dropped": Bug(
        ("shardwright.model.moe:MoE", "forward", "y_BTD = attach(y_BTD, loss)", "pass"),
        [EP, SP_EP],
        spec={"moe": EXPERTS},
    ),
    "12: the balance loss of a sequence goes by the load of the own tokens": Bug(
        (ROUTER, "losses", "self.sum(asked_BE.clone())", "asked_BE"),
        [ZIGZAG, SP_EP],
        spec={"moe": replace(EXPERTS, aux_scope="sequence")},
    ),
    "tokens are dropped by their place among the own ones": Bug(
        (ROUTER, "places", "places_BptE + before_BpE.unsqueeze(2)", "places_BptE"),
        [ZIGZAG, SP_EP],
        spec={"moe": replace(EXPERTS, capacity_factor=1.0)},
    ),
    "tokens are dropped by the rank that holds them, not by their order": Bug(
        (APPLY, "shard_routers", "piece for span in held for piece in span",
         "n_pieces // 2 * dist.get_rank() + i for i in range(n_pieces // 2)"),
        [ZIGZAG],
        spec={"moe": replace(EXPERTS, capacity_factor=1.0)},
    ),
    "13: attention's gradient from the keys of other ranks is left out": Bug(
        ("shardwright.parallel.ring:RingAttention", "backward", "dq_BHTC[:, :, rows] += dq_block", "pass"),
        [ZIGZAG, RING],
    ),
    "13: gradients of keys and values do not come home": Bug(
        ("shardwright.parallel.ring:RingAttention", "backward", "if block is not None:", "if step == n:"),
        [ZIGZAG, RING],
    ),
    "14: rotary positions of the shard": Bug(
        (TRAINER, "_microbatches", "positions_T = positions_T.to(self.device, non_blocking=True)",
         "positions_T = torch.arange(len(positions_T))"),
        [ZIGZAG, RING, ULYSSES],
    ),
    "15: dropout is redrawn in the recomputation": Bug(
        ("shardwright.model.dropout:KeyedDropout", "forward",
         "keep_mask(site_keys_B,", "keep_mask(site_keys_B + (torch._C._current_graph_task_id() >= 0),"),
        [Layout(recompute="full"), Layout(dp_shard=2, zero=3, recompute="full")],
        spec={"dropout": 0.2},
    ),
    "16: different dropout on copies": Bug(
        (TRAINER, "_dropout_keys", "sample_keys(self.seed,", "sample_keys(torch.distributed.get_rank(),"),
        [TP],
        spec={"dropout": 0.2},
    ),
    "16: the same dropout on every token shard": Bug(
        ("shardwright.parallel.tensor:TensorAxis", "own_tokens", "[self.group.rank()]", "[0]"),
        [SP],
        spec={"dropout": 0.2},
    ),
    "17: gradients of copies on other stages are not summed": Bug(
        (TIED, "sum_over_ranks", "sum_together(gradients, self._groups[ranks])", "pass"),
        [PP, DUALPIPE],
        spec={"tied_embedding": True},
    ),
    "17: the gradient of the copy on the same rank is not added": Bug(
        (TIED, "sum_on_rank", "local_part(first.grad).add_(local_part(second.grad))", "pass"),
        [ZB_V],
        spec={"tied_embedding": True, "n_layers": 4},
    ),
    "17: the copy on the same rank does not follow": Bug(
        (TIED, "follow", "local_part(second).copy_(local_part(first))", "pass"),
        [ZB_V],
        spec={"tied_embedding": True, "n_layers": 4},
    ),
    "20: gradients are reduced in bf16": Bug(
        (APPLY, "shard", "reduce_dtype=param_dtype", "reduce_dtype=compute_dtype"),
        [ZERO_1, ZERO_2, ZERO_3, HYBRID],
        dtype="bfloat16",
    ),
    "21: gradients of copied kv heads are not summed": Bug(
        NO_SUM_OF_COPIES, [TP, Layout(tp=4, sequence_parallel=False)], spec={"n_kv_heads": 1}
    ),
    "22: layers are numbered from the start of their stage": Bug(
        ("shardwright.parallel.pipeline.stage:StageModel", "__init__", "{str(i): whole", "{str(i - layers[0]): whole"),
        [PP],
    ),
    "25: with one data rank, nothing is reduced over cp": Bug(
        (APPLY, "build_groups", 'tokens=along("dp_replicate", "dp_shard", "cp")', "tokens=None"),
        [ZIGZAG, ULYSSES],
    ),
    "26: the last microbatch does not reshard": Bug(
        (DATA + ":Sharded", "_set", "last or self.regathers", "self.regathers"),
        [ZERO_1, ZERO_2, Layout(pp=2, dp_shard=2, zero=1), Layout(pp=2, dp_shard=2, zero=3, schedule="zb-h1")],
    ),
    "biases of routers go by the tokens of the own rank": Bug(
        (MODEL, "learn_from_load", "for group in (self.groups.tokens, shards,", "for group in (shards,"),
        [ZERO_0, EP],
        spec={"moe": EXPERTS},
    ),
    "biases of routers go by the tokens of the own shard": Bug(
        (MODEL, "learn_from_load", "(self.groups.tokens, shards, self", "(self.groups.tokens, self"),
        [SP_EP],
        spec={"moe": EXPERTS},
    ),
    "rows come back from the experts in another order": Bug(
        (EXCHANGE, "__call__", "out_SD.index_select(0, order_S.argsort())", "out_SD.index_select(0, order_S)"),
        [EP, SP_EP],
        spec={"moe": EXPERTS},
    ),
    "gradients go back to the senders of other rows": Bug(
        ("shardwright.parallel.expert:_Arrived", "backward", "_start(grads[0], ", "_start(grads[0].flip(0), "),
        [EP],
        spec={"moe": EXPERTS},
    ),
    "gradients of weights left for later are dropped for one microbatch": Bug(
        (STAGE, "_weight_gradients", "self.weights.pop((stage, i))()",
         "self.weights.pop((stage, i))() if i else None"),
        [ZB, ZB_V],
        spec={"n_layers": 4},
    ),
    "gradients of experts left for later are kept of the first microbatch alone": Bug(
        ("shardwright.model.matmul", "weight_gradient", "add_to.add_(dweight_EFD)", "add_to"),
        [ZB],
        spec={"moe": EXPERTS},
    ),
    "a message carries the output of another microbatch": Bug(
        (STAGE, "_forward", "i] = output.detach()", "i] = self.kept[min(self.kept)][1].detach()"),
        [PP, ZB],
    ),
    "gradients are not reduced over replicas": Bug(
        (APPLY, "shard", "replicated = replicas in (along.mesh_dim_names or ())", "replicated = False"),
        [HYBRID],
    ),
    "gradients are not reduced at all": Bug(
        (DATA + ":Replicated", "_send", "while len(self._works)", "while False and len(self._works)"),
        [ZERO_0, Layout(pp=2, dp_replicate=2)],
    ),
}  # fmt: skip
SETTINGS = {(bug.case(layout), layout): None for bug in BUGS.values() for layout in bug.layouts}


@pytest.fixture(scope="module")
def healthy() -> Iterator[Verifier]:
    with Verifier() as verifier:
        yield verifier


@pytest.mark.parametrize("name", BUGS)
def test_verify_sees_the_bug(name: str):
    bug = BUGS[name]
    with Verifier(partial(train_mutated, (bug.mutation,))) as verifier:
        for layout in bug.layouts:
            report = verifier.parity(bug.case(layout), layout)
            assert not report.equal, layout
            # Not by a hair: what is wrong is wrong by a hundred tolerances, or copies differ.
            assert report.differing or report.worst.excess > 100, (layout, report.worst)


@pytest.mark.parametrize(("case", "layout"), SETTINGS)
def test_verify_reports_nothing_on_healthy_code(case: Case, layout: Layout, healthy: Verifier):
    report = healthy.parity(case, layout)
    assert report.equal, report.differing or report.worst


def test_a_mutation_that_finds_nothing_to_change_says_so():
    with (
        pytest.raises(AssertionError, match="holds 0 of"),
        mutated((APPLY, "shard", "no such line", "")),
    ):
        pass
