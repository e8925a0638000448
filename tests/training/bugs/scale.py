"""Bugs of a wrong scale: a loss, a gradient or a norm that is divided by, or counted, too often or too seldom."""

from shardwright.layout.layout import Layout
from tests.mutation import Mutation
from tests.training.bugs.bug import (
    APPLY,
    DATA,
    DUALPIPE,
    EP_OF_4,
    EXPERTS,
    HYBRID,
    MODEL,
    NORM,
    ONE,
    PASSES,
    PP,
    SP_EP,
    STAGE,
    TENSOR,
    TP,
    TRAINER,
    ULYSSES,
    ULYSSES_ROOM,
    ZB,
    ZERO_0,
    ZERO_1,
    ZERO_2,
    ZERO_3,
    ZIGZAG,
    AnyBug,
    Bug,
    UnitBug,
)

SCALE: dict[str, AnyBug] = {
    "the gradient of a norm's input is too large by the root mean square": UnitBug(
        Mutation("shardwright.model.norm:_RMSNormFunction.backward", "r_N1.square()", "r_N1"),
        "tests/model/test_norm.py:test_the_norm_and_its_gradients_are_those_of_pytorch",
    ),
    "1: loss averaged per microbatch": Bug(
        Mutation(
            f"{TRAINER}._loss",
            "self.loss_sum(logits_BTV, targets_BT, factor) * factor",
            "self.loss_sum(logits_BTV, targets_BT) / (targets_BT != -100).sum() / 6",
        ),
        [ZERO_0, ZERO_2],
    ),
    "2: loss averaged per rank": Bug(
        Mutation(f"{TRAINER}.forward_backward", "self.model.sum_over_samples(n_targets)", "2 * n_targets"),
        [ZERO_0, ZERO_2],
    ),
    "3: loss averaged over the targets of the own tokens": Bug(
        Mutation(
            f"{TRAINER}._loss",
            "self.loss_sum(logits_BTV, targets_BT, factor) * factor",
            "self.loss_sum(logits_BTV, targets_BT) / (targets_BT != -100).sum().clamp(min=1) / 6",
        ),
        [ZIGZAG, ULYSSES],
    ),
    "4: gradients of a pipeline too large by the number of microbatches": Bug(
        Mutation(
            f"{STAGE}._backward",
            "torch.autograd.backward(output, gradient)",
            "torch.autograd.backward(output * (len(self.microbatches) if model.last else 1), gradient)",
        ),
        [PP, ZB],
    ),
    "6: the mean is taken again by FSDP": Bug(
        Mutation(f"{APPLY}:shard", "group.set_gradient_divide_factor(1.0)", "group.set_gradient_divide_factor(2.0)"),
        [ZERO_1, ZERO_3],
    ),
    "6: the mean is taken again by the all-reduce": Bug(
        Mutation(
            f"{DATA}:Replicated._send",
            "self.start_sum(bucket, self.group)",
            "StartedCollective(dist.all_reduce(bucket, op=dist.ReduceOp.AVG, group=self.group, async_op=True),"
            " lambda: bucket)",
        ),
        [ZERO_0, Layout(pp=2, dp_replicate=2, pp_schedule="zb-h1")],
    ),
    "7: gradients of experts are divided by the degree of ep": Bug(
        Mutation(
            f"{APPLY}:shard",
            "if over.size() > 1:\n    group.set_gradient_divide_factor(1.0)",
            "group.set_gradient_divide_factor(layout.ep if type(group).__name__ == 'FSDPExpertPart' else 1.0)",
        ),
        [EP_OF_4, SP_EP],
        spec={"moe": EXPERTS},
    ),
    "9: what two stages hold counts twice": Bug(
        Mutation(
            NORM,
            "norms.square().sum() / shared_by",
            "norms.square().sum()",
        ),
        [PP, DUALPIPE],
        spec={"tied_embedding": True},
    ),
    "12: the balance losses are those of one rank": Bug(
        Mutation(f"{MODEL}.set_batch", "n_microbatches * ranks", "n_microbatches"),
        [ZERO_0, SP_EP],
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
    "clipping happens only above a limit of 5": Bug(
        Mutation(f"{PASSES}:ForwardBackward.clip", "0 < max_norm < math.inf", "5 < max_norm < math.inf"),
        [ONE],
    ),
    "clipping never happens above a limit of 5": Bug(
        Mutation(f"{PASSES}:ForwardBackward.clip", "0 < max_norm < math.inf", "0 < max_norm <= 5"), [ONE]
    ),
    "small gradients are scaled up to the limit": Bug(
        Mutation(
            f"{PASSES}:clip_gradients",
            "(max_norm / (norm + 1e-6)).clamp(max=1.0)",
            "max_norm / (norm + 1e-6)",
        ),
        [ONE],
    ),
    "each rank clips by the norm of its own shards": Bug(
        Mutation(f"{PASSES}:clip_gradients", "norm + 1e-6", "torch.stack(foreach_norm(gradients)).norm() + 1e-6"),
        [ZERO_2, TP],
    ),
    "the norm counts every replica": Bug(
        Mutation(
            NORM,
            "tuple(i for i, place in enumerate(gradient.placements) if not place.is_replicate())",
            "tuple(range(len(gradient.placements)))",
        ),
        [HYBRID],
    ),
    "the loss is averaged over masked targets too": Bug(
        Mutation(
            f"{TRAINER}.forward_backward",
            "torch.full((), batch.n_targets, dtype=torch.int64, device=self.device)",
            "torch.full((), batch.targets_ABT.numel(), dtype=torch.int64, device=self.device)",
        ),
        [ZERO_0],
    ),
    "the balance losses are counted once for every rank of cp": Bug(
        Mutation(
            f"{MODEL}.set_batch",
            "layout.data_ranks * layout.cp * (layout.tp if layout.token_shards else 1)",
            "layout.data_ranks * (layout.tp if layout.token_shards else 1)",
        ),
        [ZIGZAG],
        spec={"moe": EXPERTS},
    ),
    "every rank of tp adds the bias of a row-parallel linear": Bug(
        Mutation(f"{TENSOR}:RowLinear.forward", "y_BTD + self.bias", "y_BTD + self.axis.group.size() * self.bias"),
        [TP],
        spec={"bias": True},
    ),
    "an evaluation is the mean of the ranks' means": Bug(
        Mutation(
            f"{TRAINER}.evaluation_sums",
            "self.model.sum_over_losses(sums)",
            "sums = torch.stack((sums[0] / sums[1].clamp(min=1), torch.ones_like(sums[1])))\n"
            "self.model.sum_over_losses(sums)",
        ),
        [ZERO_0],
    ),
    "gradients of kv heads that several ranks of ulysses hold are averaged": Bug(
        Mutation(
            f"{ULYSSES_ROOM}:_to_tokens",
            "x_nBTwC.unflatten(0, (-1, replicas)).sum(1)",
            "x_nBTwC.unflatten(0, (-1, replicas)).mean(1)",
        ),
        [ULYSSES],
        spec={"n_kv_heads": 1},
    ),
    "the balance loss is the sum over sequences": UnitBug(
        Mutation(
            "tests.model.test_balance:aux_loss",
            "(relative_load.to(means_BE.dtype) * means_BE).sum(-1).mean()",
            "(relative_load.to(means_BE.dtype) * means_BE).sum()",
        ),
        "tests/model/test_balance.py:test_the_balance_loss_is_that_of_switch_transformers",
    ),
    "dropout does not scale what it keeps": UnitBug(
        Mutation("shardwright.model.dropout:drop", "1 / keep_probability(p)", "1.0"),
        "tests/model/test_dropout.py:test_dropped_elements_are_zero_and_the_mean_is_kept",
    ),
    "weights of experts are divided by the scores of all experts": UnitBug(
        Mutation(
            "shardwright.model.moe:Router.forward",
            "weights_BTK.sum(-1, keepdim=True) + 1e-20",
            "scores_BTE.sum(-1, keepdim=True) + 1e-20",
        ),
        "tests/model/test_moe.py:test_a_layer_is_the_weighted_sum_of_its_experts",
        ("softmax", "swiglu"),
    ),
    "the selection bias of a router changes the weights too": UnitBug(
        Mutation(
            "shardwright.model.moe:Router.forward",
            "scores_BTE.gather(-1, experts_BTK)",
            "(scores_BTE if self.bias is None else scores_BTE + self.bias).gather(-1, experts_BTK)",
        ),
        "tests/model/test_moe.py:test_the_bias_picks_and_does_not_weigh",
    ),
}
