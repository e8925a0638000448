"""Bugs of a wrong type: something is rounded to 16 bits that is to be summed or kept in 32."""

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
    NORM,
    ONE,
    PP,
    REDUCTIONS,
    SEQUENTIAL,
    SP,
    STAGE,
    TENSOR,
    TIED,
    TP,
    ZERO_0,
    ZERO_2,
    ZERO_3,
    ZIGZAG,
    AnyBug,
    Bug,
    UnitBug,
)

REDUCED_IN_BF16 = Mutation(
    f"{APPLY}:shard",
    "MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=param_dtype, cast_forward_inputs=False)",
    "MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=compute_dtype, cast_forward_inputs=False)",
)
DTYPE: dict[str, AnyBug] = {
    "20: gradients are reduced in bf16": Bug(
        REDUCED_IN_BF16,
        [ZERO_2, HYBRID],
        dtype="bfloat16",
    ),
    "gradients of experts are reduced in bf16": Bug(
        Mutation(
            f"{APPLY}:shard",
            "shards = f'{prefix}shards'",
            "shards = f'{prefix}shards'\n"
            "policy = MixedPrecisionPolicy(compute_dtype, compute_dtype if prefix else param_dtype, None, False)",
        ),
        [EP_OF_4],
        dtype="bfloat16",
        spec={"moe": EXPERTS},
    ),
    "gradients of a tied embedding are rounded to bf16 after their sum": Bug(
        Mutation(
            f"{TIED}.sum_over_ranks",
            "sum_together(gradients, self._groups[ranks])",
            "(sum_together(gradients, self._groups[ranks]), [each.copy_(each.bfloat16()) for each in gradients])",
        ),
        [PP],
        dtype="bfloat16",
        spec={"tied_embedding": True},
    ),
    "gradients of norms are rounded to bf16 before their sum": Bug(
        Mutation(
            f"{REDUCTIONS}:reduce_together",
            "torch.cat([tensor.flatten() for tensor in tensors])",
            "torch.cat([tensor.flatten() for tensor in tensors]).bfloat16()",
        ),
        [SP],
        dtype="bfloat16",
    ),
    "gradients of norms are rounded to bf16 after their sum": Bug(
        Mutation(
            f"{REDUCTIONS}:reduce_together",
            "tensor.copy_(reduced.view(tensor.shape))",
            "tensor.copy_(reduced.bfloat16().view(tensor.shape))",
        ),
        [SP],
        dtype="bfloat16",
    ),
    "gradients of kv heads are rounded to bf16 before their sum": Bug(
        Mutation(
            f"{REDUCTIONS}:reduce_together",
            "dist.all_reduce(flat, op=op, group=group)",
            "flat = flat.bfloat16()\ndist.all_reduce(flat, op=op, group=group)",
        ),
        [TP],
        dtype="bfloat16",
        spec={"n_kv_heads": 1},
    ),
    "gradients of kv heads are rounded to bf16 after their sum": Bug(
        Mutation(
            f"{REDUCTIONS}:reduce_together",
            "dist.all_reduce(flat, op=op, group=group)",
            "dist.all_reduce(flat, op=op, group=group)\nflat = flat.bfloat16()",
        ),
        [TP],
        dtype="bfloat16",
        spec={"n_kv_heads": 1},
    ),
    "gradients of replicas of a stage are rounded to bf16 before their sum": Bug(
        Mutation(
            f"{REDUCTIONS}:reduce_together",
            "torch.cat([tensor.flatten() for tensor in tensors])",
            "torch.cat([tensor.flatten() for tensor in tensors]).bfloat16()",
        ),
        [DUALPIPE],
        dtype="bfloat16",
    ),
    "gradients are reduced over cp in bf16, with one data rank": Bug(
        REDUCED_IN_BF16,
        [Layout(cp=2, zero=0), Layout(cp=2, zero=1), Layout(cp=2, zero=2), Layout(cp=2, zero=3)],
        dtype="bfloat16",
    ),
    "ZeRO 0 all-reduces gradients in bf16": Bug(
        Mutation(
            f"{DATA}:Replicated._send",
            "bucket = self._buckets[len(self._works)]",
            "bucket = self._buckets[len(self._works)]\nbucket.copy_(bucket.bfloat16())",
        ),
        [ZERO_0, ZIGZAG],
        dtype="float32",
    ),
    "gradients of micro-batches are added up in bf16": Bug(
        Mutation(
            f"{SEQUENTIAL}.train",
            "self.engine.after_gradients(split=False, last=last)",
            "self.engine.after_gradients(split=False, last=last)\n"
            "for each in self.model.parameters():\n"
            "    if each.grad is not None:\n"
            "        each.grad = each.grad.bfloat16().to(each.grad.dtype)",
        ),
        [ZERO_3],
        dtype="bfloat16",
    ),
    "gradients of micro-batches are added up in bf16 where one rank has copies of its weights": Bug(
        Mutation(
            "shardwright.parallel.data:MasterWeights._add_waiting",
            "master.grad.add_(gradient)",
            "master.grad.add_(gradient).copy_(master.grad.bfloat16())",
        ),
        [ONE],
        dtype="bfloat16",
    ),
    "gradients that wait to be converted are freed where a micro-batch ends": UnitBug(
        Mutation(
            "shardwright.parallel.data:MasterWeights.after_gradients", "self._add_waiting()", "self._waiting.clear()"
        ),
        "tests/parallel/test_data.py:test_the_gradients_of_copies_are_added_to_their_master_weights",
    ),
    "gradients of all micro-batches but the last are added up in bf16": Bug(
        Mutation(
            f"{SEQUENTIAL}.train",
            "self.engine.after_gradients(split=False, last=last)",
            "self.engine.after_gradients(split=False, last=last)\n"
            "for each in self.model.parameters():\n"
            "    if each.grad is not None and not last:\n"
            "        each.grad = each.grad.bfloat16().to(each.grad.dtype)",
        ),
        [ZERO_3],
        dtype="bfloat16",
    ),
    "the norm of the gradients is computed in bf16": Bug(
        Mutation(NORM, "foreach_norm(gradients)", "foreach_norm([each.bfloat16() for each in gradients])"),
        [ONE],
    ),
    "stages send their outputs in bf16": Bug(
        Mutation(
            f"{STAGE}._forward",
            "self.results[stage + 1, 'F', i] = output.detach()",
            "self.results[stage + 1, 'F', i] = output.detach().bfloat16().to(output.dtype)",
        ),
        [PP],
    ),
    "stages send gradients in bf16": Bug(
        Mutation(
            f"{STAGE}._backward",
            "self.results[stage - 1, 'B', i] = x.grad",
            "self.results[stage - 1, 'B', i] = x.grad.bfloat16().to(x.dtype)",
        ),
        [PP],
    ),
    "rows go to the experts of other ranks in bf16": Bug(
        Mutation(
            "shardwright.parallel.expert:_start", "rows.contiguous()", "rows.bfloat16().to(rows.dtype).contiguous()"
        ),
        [EP],
        spec={"moe": EXPERTS},
    ),
    "the partial sums of a row-parallel linear are added in bf16": Bug(
        Mutation(
            f"{TENSOR}:_row_product",
            "axis.start_sum(y_BTD if also_BTD is None else y_BTD.add_(also_BTD)).wait()",
            "axis.start_sum(y_BTD.bfloat16()).wait().to(x_BTF.dtype)",
        ),
        [TP],
    ),
    "the scores of a router are computed in bf16": UnitBug(
        Mutation(
            "shardwright.model.moe:Router.forward", "torch.promote_types(x_BTD.dtype, torch.float32)", "x_BTD.dtype"
        ),
        "tests/model/test_moe.py:test_scores_are_wide_whatever_the_weights_are",
    ),
}
