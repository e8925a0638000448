"""Bugs of a stale value: something of an earlier step or micro-batch is kept, used again or forgotten."""

from shardwright.layout.layout import Layout
from tests.model.test_moe import BALANCED
from tests.mutation import Mutation
from tests.training.bugs.bug import (
    DATA,
    EXPERTS,
    MODEL,
    ONE,
    PP,
    STAGE,
    STEP,
    TIED,
    TP,
    TRAINER,
    ZB,
    ZB_V,
    ZERO_0,
    ZERO_1,
    AnyBug,
    Bug,
    UnitBug,
)

STALE: dict[str, AnyBug] = {
    "5: a stage forgets its gradients when the next microbatch comes": Bug(
        Mutation(
            f"{STAGE}._forward",
            "model(x, *microbatch.read_by_model)",
            "(model.zero_grad(), model(x, *microbatch.read_by_model))[1]",
        ),
        [PP, ZB],
    ),
    "17: the duplicate on the same rank is not updated": Bug(
        Mutation(f"{TIED}.update_duplicates", "local_part(second).copy_(local_part(first))", "pass"),
        [ZB_V],
        spec={"tied_embedding": True, "n_layers": 4},
    ),
    "26: the last microbatch does not reshard": Bug(
        Mutation(f"{DATA}:Sharded._set", "last or self.regathers", "self.regathers"),
        [ZERO_1, Layout(pp=2, dp_shard=2, zero=3, pp_schedule="zb-h1")],
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
    "gradients of the step before are kept": Bug(
        Mutation(f"{STEP}:Trainer.update", "self.model.forget_gradients()", "pass"), [ZERO_0]
    ),
    "gradients of duplicates of the step before are kept": Bug(
        Mutation(
            f"{MODEL}.forget_gradients",
            "(*self.named_parameters.values(), *self.plain_parameters.values(), *self.tied.duplicates)",
            "(*self.named_parameters.values(), *self.plain_parameters.values())",
        ),
        [ZB_V],
        spec={"tied_embedding": True, "n_layers": 4},
    ),
    "gradients of the tensors that a rank of tp computes with are kept": Bug(
        Mutation(
            f"{MODEL}.forget_gradients",
            "(*self.named_parameters.values(), *self.plain_parameters.values(), *self.tied.duplicates)",
            "(*self.named_parameters.values(), *self.tied.duplicates)",
        ),
        [TP],
    ),
    "only the first group of parameters follows the learning rate": Bug(
        Mutation(f"{STEP}:set_learning_rate", "optimizer.param_groups", "optimizer.param_groups[:1]"), [ONE]
    ),
    "a step has the learning rate of the one before": Bug(
        Mutation(
            f"{STEP}:Trainer.update",
            "set_learning_rate(self.optimizer, rate)\nself.optimizer.step()",
            "self.optimizer.step()\nset_learning_rate(self.optimizer, rate)",
        ),
        [ONE],
    ),
    "biases of routers stay as they began": Bug(
        Mutation(f"{STEP}:Trainer.update", "self.model.learn_from_load(update=taken)", "pass"),
        [ONE],
        spec={"moe": EXPERTS},
    ),
    "dropout is that of the first step in every step": Bug(
        Mutation(f"{TRAINER}.forward_backward", "self._microbatches(batch, step)", "self._microbatches(batch, 0)"),
        [ONE],
        spec={"dropout": 0.2},
    ),
    "dropout stays off after an evaluation": Bug(
        Mutation(f"{TRAINER}.forward_backward", "self.model.train()", "pass"), [ONE], spec={"dropout": 0.2}
    ),
    "an evaluation has dropout": Bug(
        Mutation(f"{TRAINER}.evaluation_sums", "self.model.train(False)", "self.model.train(True)"),
        [ONE],
        spec={"dropout": 0.2},
        also=(
            Mutation(f"{TRAINER}.evaluation_sums", "self._microbatches(batch, None)", "self._microbatches(batch, 0)"),
        ),
    ),
    "the scale of the balance losses is that of the step before": Bug(
        Mutation(
            f"{TRAINER}.forward_backward",
            "self.model.set_batch(len(batch.tokens_ABT), self.loss_scale)\n"
            "loss_part = self.model.runner.train(self._microbatches(batch, step), self._loss(batch, n_targets))",
            "loss_part = self.model.runner.train(self._microbatches(batch, step), self._loss(batch, n_targets))\n"
            "self.model.set_batch(len(batch.tokens_ABT), self.loss_scale)",
        ),
        [ONE],
        spec={"moe": EXPERTS},
    ),
    "the load of experts is never reset": UnitBug(
        Mutation("shardwright.model.balance:Tally.take", "load, self._load = self._load, None", "load = self._load"),
        "tests/model/test_moe.py:test_any_dealing_of_sequences_into_microbatches_gives_the_same_gradient",
        (BALANCED,),
    ),
    "a replayed CUDA graph overwrites the load of experts": UnitBug(
        Mutation("shardwright.model.balance:Tally.add", "part.clone()", "part"),
        "tests/model/test_balance.py:test_the_load_of_a_micro_batch_counts_also_where_the_next_one_overwrites_it",
    ),
}
