"""Bugs of experts that move between the ranks of ep between steps."""

from dataclasses import replace

from shardwright.config.average import AverageSection
from tests.mutation import Mutation
from tests.training.bugs.bug import EP, EXPERTS, AnyBug, Bug, UnitBug
from tests.training.test_placement import STAYS

_MOVING = replace(EP, place_experts_every=1)
_MIXTURE = {"moe": EXPERTS}
_PLACES, _MOE = "shardwright.parallel.placement:ExpertPlaces", "shardwright.parallel.expert:ExchangingMoE"


def _only(prefixes: str) -> Mutation:
    return Mutation(
        f"{_PLACES}._carry",
        "tensors[name].dim() and self._is_moved(name)",
        f"tensors[name].dim() and self._is_moved(name) and name.startswith({prefixes})",
    )


SHARD: dict[str, AnyBug] = {
    "rows are sent to the expert at the number of their expert's position": Bug(
        Mutation(f"{_MOE}.positions", "position_E[experts_NK]", "expert_E[experts_NK]"), [_MOVING], spec=_MIXTURE
    ),
    "an expert that moves within its rank is overwritten before it is read": Bug(
        Mutation(f"{_PLACES}._exchange", "tensor.slot(start).clone()", "tensor.slot(start)"), [_MOVING], spec=_MIXTURE
    ),
}
STALE: dict[str, AnyBug] = {
    "the counts of rows stay in the order of the model when experts move": Bug(
        Mutation(f"{_MOE}.positions", "given_E.index_select(0, expert_E)", "given_E"), [_MOVING], spec=_MIXTURE
    ),
    "optimizer states stay when their experts move": Bug(
        _only('("model/", "layers.", "average/")'), [_MOVING], spec=_MIXTURE
    ),
    "averages of the weights stay when their experts move": Bug(
        _only('("model/", "layers.", "optimizer/")'),
        [_MOVING],
        spec=_MIXTURE,
        average=AverageSection(kind="ema", every=1, decay=0.7),
    ),
    "a host that updates weights does not see that experts moved": Bug(
        Mutation(
            "shardwright.training.offload.on_host:_HostParameter.shard",
            "local_part(self.member.parameter).detach()",
            "local_part(self.member.parameter.detach())",
        ),
        [replace(_MOVING, offload_optimizer="cpu")],
        spec=_MIXTURE,
    ),
    "a run that rolls back keeps the order of experts that had moved": UnitBug(
        STAYS, "tests/training/test_placement.py:test_a_rollback_shows_the_bug", put_in_there=True
    ),
}
ORDER: dict[str, AnyBug] = {
    "an expert that stays on its rank moves within it": UnitBug(
        Mutation("shardwright.split.placement:_settled", "return tuple(settled)", "return after"),
        "tests/split/test_placement.py:test_experts_that_stay_on_their_rank_keep_their_positions",
    ),
}
