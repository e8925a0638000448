"""Bugs of numbers that are shown and of losses that both sides of `verify` compute with the same code."""

from tests.mutation import Mutation
from tests.training.bugs.bug import AnyBug, UnitBug

_BALANCE, _FLOPS = "tests.model.test_balance:aux_loss", "tests.cost.test_matmuls:executed_flops"

SCALE: dict[str, AnyBug] = {
    "sigmoid scores of the balance loss are not normalised": UnitBug(
        Mutation(_BALANCE, "scores_BTE / scores_BTE.sum(-1, keepdim=True)", "scores_BTE"),
        "tests/model/test_balance.py:test_the_balance_loss_of_sigmoid_scores_is_that_of_deepseek_v3",
    ),
    "HFU has every layer where some recompute": UnitBug(
        Mutation(_FLOPS, "again != spec.n_blocks", "False"),
        "tests/cost/test_matmuls.py:check_recomputed_layers",
    ),
    "HFU has the layers that recompute on one stage": UnitBug(
        Mutation(_FLOPS, "sum(min(first, len(stage)) for stage in held)", "first"),
        "tests/cost/test_matmuls.py:check_recomputed_layers",
    ),
}
