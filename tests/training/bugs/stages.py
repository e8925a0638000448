"""Bugs of stages of the batch and of averages of the weights."""

from shardwright.config.average import AverageSection
from shardwright.verification.case import CaseStage
from tests.mutation import Mutation
from tests.training.bugs.bug import PP, ZERO_3, AnyBug, Bug, UnitBug

_AVERAGE = "shardwright.training.average:WeightAverage"
_EMA = AverageSection(kind="ema", decay=0.7)
_OF_AVERAGE = "tests/training/test_average.py"
_ON_HOST = "test_an_average_on_the_host_is_pinned_and_is_not_read_before_the_copy_has_ended"
_CUT = "tests/data/test_batches.py:test_stages_cut_the_samples_in_their_order_and_take_each_once"
_SHARD = "local_part(parameter.detach()).to(kept.device)"

STALE: dict[str, AnyBug] = {
    "a pipeline keeps the schedule of the first stage of the batch": Bug(
        Mutation(
            "shardwright.parallel.pipeline.runner:Pipeline._run",
            "key not in self._lists",
            "(key := next((each for each in self._lists if each[0] and key[0]), key)) not in self._lists",
        ),
        [PP],
        stages=(CaseStage(12, 4, 6), CaseStage(24, 4, 10), CaseStage(24, 4, 10)),
    ),
    "a step without targets has no part in the average of the weights": UnitBug(
        Mutation(
            "shardwright.training.step:Trainer.step",
            "self.average is not None",
            "self.average is not None and not self.lacks_targets",
        ),
        f"{_OF_AVERAGE}:test_a_step_that_changes_nothing_has_a_part_in_the_average",
    ),
    "the host reads weights for their average before their copy has ended": UnitBug(
        Mutation(
            f"{_AVERAGE}.update",
            "local_part(parameter.detach()).to(kept.device)",
            "local_part(parameter.detach()).to(kept.device, non_blocking=True)",
        ),
        f"{_OF_AVERAGE}:{_ON_HOST}",
    ),
    "an average on the host is kept on the device": UnitBug(
        Mutation("shardwright.training.average:_zeros", "not on_host or parameter.device.type == 'cpu'", "True"),
        f"{_OF_AVERAGE}:{_ON_HOST}",
    ),
    "the weights are not their own again after an evaluation of their average": UnitBug(
        Mutation(f"{_AVERAGE}.applied", "own.items()", "()"),
        f"{_OF_AVERAGE}:test_weights_are_their_own_again_after_their_average_was_applied",
    ),
}
SCALE: dict[str, AnyBug] = {
    "the decay of an average is applied once for each rank": Bug(
        Mutation(
            f"{_AVERAGE}.update",
            f"kept.lerp_({_SHARD}, weight)",
            f"kept.lerp_({_SHARD}, 1 - (1 - weight) ** torch.distributed.get_world_size())",
        ),
        [ZERO_3, PP],
        average=_EMA,
    ),
}
DTYPE: dict[str, AnyBug] = {
    "an average is of the bfloat16 weights instead of the master weights": Bug(
        Mutation(f"{_AVERAGE}.update", _SHARD, f"{_SHARD}.bfloat16().to(kept.dtype)"),
        [ZERO_3],
        average=_EMA,
    ),
}
ORDER: dict[str, AnyBug] = {
    "every sequence of a sample that is cut is the first": UnitBug(
        Mutation("shardwright.data.batches:Batches.__init__", "order(wholes) * cuts + pieces", "order(wholes) * cuts"),
        _CUT,
    ),
}
OFF_BY_ONE: dict[str, AnyBug] = {
    "a stage of the batch begins one step late": UnitBug(
        Mutation(
            "shardwright.config.batch:BatchSchedule.stage_at",
            "self.stages[bisect_right(self._begins, step) - 1]",
            "self.stages[max(0, bisect_right(self._begins, step - 1) - 1)]",
        ),
        _CUT,
    ),
}
RESUME: dict[str, AnyBug] = {
    "the average of the weights is not in checkpoints": UnitBug(
        Mutation(
            "shardwright.training.checkpoint.state:named_tensors",
            "{} if trainer.average is None else trainer.average.tensors",
            "{}",
        ),
        f"{_OF_AVERAGE}:check_an_average_is_in_checkpoints",
    ),
}
