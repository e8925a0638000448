"""Proves that ZeRO shards experts along features only if the shards divide every size, also the rank of adapters."""

from dataclasses import replace

import pytest

from shardwright.layout.layout import Layout
from shardwright.model.lora_sizes import LoraSpec
from shardwright.model.presets import resolve
from shardwright.model.spec import ModelSpec
from shardwright.planner.space import _degrees
from shardwright.split.rules import problems
from shardwright.verification.cut_case import cut_spec

LAYOUT = Layout(dp_shard=8, zero=3, ep=2)
"""Two experts on two ranks: ZeRO shards one expert over 4 ranks."""


def adapted(rank: int, *targets: str) -> ModelSpec:
    spec = resolve("debug-moe")
    assert spec.moe is not None
    return replace(spec, moe=replace(spec.moe, n_experts=2, top_k=2), lora=LoraSpec(rank=rank, targets=targets))


@pytest.mark.parametrize(("rank", "target", "fits"), [(4, "experts", True), (6, "experts", False), (6, "q", True)])
def test_rules_planner_and_reduced_cases_have_one_answer_for_a_rank(rank: int, target: str, fits: bool):
    spec = adapted(rank, target)
    for model in (spec, cut_spec(spec, LAYOUT.world_size)):
        assert model.lora is not None
        said = problems(model, LAYOUT, 64)
        assert len(said) == (not fits), said
        end = f"nor lora.rank={model.lora.rank}; choose a larger ep or another rank"
        assert all(problem.endswith(end) for problem in said), said
    columns = _degrees(spec, 8, 64, "zigzag")
    names = ("tp", "cp", "dp_shard", "zero", "ep")
    assert ((1, 1, 8, 3, 2) in set(zip(*(columns[name].tolist() for name in names), strict=True))) == fits
