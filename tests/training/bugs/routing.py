"""Bugs of routing that both sides of verify have, as they run the same router; a routing by hand does not."""

from tests.mutation import Mutation
from tests.training.bugs.bug import AnyBug, UnitBug

_BY_HAND = "tests/model/test_moe.py:test_a_layer_is_the_weighted_sum_of_its_experts"
_PICK = "shardwright.model.moe:Router.pick"


def _bug(function: str, before: str, after: str, way: str) -> UnitBug:
    return UnitBug(Mutation(function, before, after), _BY_HAND, (way, "swiglu"))


OFF_BY_ONE: dict[str, AnyBug] = {
    "the capacity of an expert is rounded down": _bug(
        "shardwright.model.sections:MoESpec.capacity",
        "ceil(self.exact_capacity(n_tokens))",
        "int(self.exact_capacity(n_tokens))",
        "capacity",
    ),
}
STALE: dict[str, AnyBug] = {
    "the selection bias picks experts and not their groups": _bug(
        _PICK,
        "ranked_BTGe.topk(counted)",
        "scores_BTE.unflatten(-1, (moe.n_groups, -1)).topk(counted)",
        "sigmoid, groups",
    ),
}
