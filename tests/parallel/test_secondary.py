"""Proves of secondary shards what verify does not see: which ranks send, what is left in memory, what is refused."""

from functools import partial
from typing import Any

import pytest
import torch

from shardwright.layout.layout import Layout
from shardwright.parallel.data import Sharded
from shardwright.parallel.microbatch_runner import SequentialRunner
from shardwright.system.errors import LayoutError
from shardwright.system.torch_private import fsdp_parameters, secondary_shard_of
from shardwright.verification.case import Case
from shardwright.verification.rank import build_trainer, local_batch
from tests.distributed import run_ranks
from tests.mutation import Mutation, mutated
from tests.traffic import Link, TrafficByGroup
from tests.training.worlds import CASE, RATE

IN_NODES = Layout(dp_shard=4, zero=3, zero_secondary_ranks=2)
ON_RANKS = {
    "secondary ranks are in different nodes": Mutation(
        "shardwright.parallel.secondary:lines_of",
        "mesh.mesh.movedim(at, -1).reshape(-1, n // node_ranks, node_ranks)",
        "mesh.mesh.movedim(at, -1).reshape(-1, node_ranks, n // node_ranks).transpose(1, 2)",
    ),
    "secondary shards are never freed after an evaluation": Mutation(
        "shardwright.parallel.data:drop_secondary_shards", "set_secondary_shard(parameter, None)", "pass"
    ),
}
"""Changes of code that no number shows."""


def kept(trainer: Any) -> int:
    """Elements of secondary shards on this rank."""
    runner = trainer.model.runner
    assert isinstance(runner, SequentialRunner)
    assert isinstance(runner.engine, Sharded)
    parts = [secondary_shard_of(parameter) for group in runner.engine.groups for parameter in fsdp_parameters(group)]
    return sum(part.numel() for part in parts if part is not None)


def gathers(case: Case, bug: Mutation | None = None) -> tuple[set[Link], list[int]]:
    """The groups that gather in a step, and elements of secondary shards after it, and after an evaluation."""
    if bug is not None:
        with mutated(bug):
            return gathers(case)
    trainer = build_trainer(case, IN_NODES, "adamw")
    batch = local_batch(case, IN_NODES, torch.distributed.get_rank(), 0)
    with TrafficByGroup(torch.float64) as traffic:
        trainer.step(batch, 0, RATE)
    found = [kept(trainer)]
    trainer.evaluate([batch])
    found.append(kept(trainer))
    del trainer
    return {link for link in traffic.calls if link[0] == "all-gather"}, found


EXPECTED = {("all-gather", 4, 1), ("all-gather", 2, 1)}, [0, 0]


def test_layers_are_gathered_from_a_node_for_the_backward_pass_and_nothing_is_kept_after_it():
    assert run_ranks(gathers, 4, CASE) == [EXPECTED] * 4


@pytest.mark.prove
def test_ranks_show_the_bug():
    for name, bug in ON_RANKS.items():
        found = run_ranks(partial(gathers, bug=bug), 4, CASE)
        assert all(each != EXPECTED for each in found), name


@pytest.mark.parametrize(
    ("layout", "here", "valid"),
    [
        ({"dp_shard": 4, "zero_secondary_ranks": 3}, "dp_shard x cp = 4 x 1 = 4", "valid with 4: 2"),
        ({"dp_shard": 4, "zero_secondary_ranks": 4}, "dp_shard x cp = 4 x 1 = 4", "valid with 4: 2"),
        ({"dp_shard": 4, "zero": 2, "zero_secondary_ranks": 2}, "zero=2", "valid with 4: 2"),
        ({"dp_shard": 4, "pp": 2, "zero_secondary_ranks": 2}, "pp=2", "valid with 4: 2"),
        ({"tp": 2, "zero_secondary_ranks": 2}, "dp_shard x cp = 1 x 1 = 1", "or leave it out"),
    ],
)
def test_ranks_that_are_no_part_of_those_that_zero_3_shards_over_are_refused(layout: Any, here: str, valid: str):
    with pytest.raises(LayoutError) as refused:
        Layout(**layout)
    (problem,) = refused.value.problems
    assert problem.startswith(f"layout.zero_secondary_ranks={layout['zero_secondary_ranks']} needs zero=3, pp=1")
    assert here in problem
    assert valid in problem
