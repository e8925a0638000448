"""Bugs of numbers that are shown and of losses that both sides of `verify` compute with the same code."""

from tests.mutation import Mutation
from tests.training.bugs.bug import AnyBug, UnitBug

_SPEED, _SPEED_TEST = (
    "tests.training.test_metrics:speed_numbers",
    "tests/training/test_metrics.py:test_the_speed_is_that_of_a_step_and_of_a_device",
)
_BALANCE, _FLOPS = "tests.model.test_balance:aux_loss", "tests.cost.test_matmuls:executed_flops"

SCALE: dict[str, AnyBug] = {
    "sigmoid scores of the balance loss are not normalised": UnitBug(
        Mutation(_BALANCE, "scores_BTE / scores_BTE.sum(-1, keepdim=True)", "scores_BTE"),
        "tests/model/test_balance.py:test_the_balance_loss_of_sigmoid_scores_is_that_of_deepseek_v3",
    ),
    "the FLOP/s of a device are those of all devices": UnitBug(
        Mutation(_SPEED, "tokens_per_s / world_size * flops_per_token", "tokens_per_s * flops_per_token"), _SPEED_TEST
    ),
    "every logged step counts the FLOPs of the longest stage": UnitBug(
        Mutation(
            "shardwright.training.numbers:LogNumbers._speed",
            "self.spec.train_flops_per_token(sources.attended_tokens(step, stage.seq_len))",
            "self.spec.train_flops_per_token(sources.attended_tokens(step, sources.schedule.longest.seq_len))",
        ),
        "tests/training/test_metrics.py:test_the_flops_of_logged_steps_are_those_of_their_stages",
    ),
    "the steps of a record have the tokens of the last one": UnitBug(
        Mutation(
            "shardwright.training.numbers:LogNumbers._speed",
            "sources.schedule.parts(step - n_steps, step)",
            "[(sources.schedule.stage_at(step), n_steps)]",
        ),
        "tests/training/test_metrics.py:test_the_flops_of_logged_steps_are_those_of_their_stages",
    ),
    "MFU is the TFLOP/s over the peak": UnitBug(
        Mutation(_SPEED, "flops_per_s / peak", "flops_per_s / 1e12 / peak"), _SPEED_TEST
    ),
    "the time of a step leaves out the optimizer": UnitBug(
        Mutation(
            _SPEED, "sum((phases_s[phase] for phase in PHASES))", "sum((phases_s[phase] for phase in PHASES[:2]))"
        ),
        _SPEED_TEST,
    ),
    "HFU has every layer where some recompute": UnitBug(
        Mutation(_FLOPS, "again != spec.n_blocks", "False"),
        "tests/cost/test_matmuls.py:check_recomputed_layers",
    ),
    "HFU has the layers that recompute on one stage": UnitBug(
        Mutation(_FLOPS, "sum(min(first, len(stage)) for stage in stage_layers)", "first"),
        "tests/cost/test_matmuls.py:check_recomputed_layers",
    ),
}
