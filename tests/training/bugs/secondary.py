"""Bugs of secondary shards: the part of another rank, of another step, rounded, of ranks in other nodes."""

from shardwright.layout.layout import Layout
from tests.mutation import Mutation
from tests.parallel.test_secondary import ON_RANKS
from tests.training.bugs.bug import AnyBug, Bug, UnitBug

_KEEP, _COST = "shardwright.parallel.secondary:_part", "shardwright.cost"
_PART = "whole_N.narrow(0, group.rank() * n, n).clone()"
_IN_NODES = [Layout(dp_shard=4, zero=3, zero_secondary_ranks=2)]
_PLANNED = "tests/cost/test_secondary.py:"

SHARD: dict[str, AnyBug] = {
    "every secondary rank keeps the first part of a layer": Bug(
        Mutation(_KEEP, _PART, "whole_N.narrow(0, 0, n).clone()"), _IN_NODES
    ),
    "secondary ranks keep the parts of one another": Bug(
        Mutation(_KEEP, _PART, "whole_N.narrow(0, (group.size() - 1 - group.rank()) * n, n).clone()"), _IN_NODES
    ),
    **{name: UnitBug(bug, "tests/parallel/test_secondary.py:test_ranks_show_the_bug", put_in_there=True)
       for name, bug in ON_RANKS.items()},
}  # fmt: skip
STALE: dict[str, AnyBug] = {
    "secondary shards are those of the first step, and not updated after the optimizer's": Bug(
        Mutation(
            "shardwright.system.torch_private:_keep_part",
            "set_secondary_shard(parameter, part_of(whole))",
            "set_secondary_shard(parameter, parameter.__dict__.setdefault('first', part_of(whole)))",
        ),
        _IN_NODES,
    ),
}
DTYPE: dict[str, AnyBug] = {
    "secondary shards are kept in bf16": Bug(
        Mutation(_KEEP, _PART, "whole_N.narrow(0, group.rank() * n, n).bfloat16().to(whole_N.dtype)"), _IN_NODES
    ),
}
SCALE: dict[str, AnyBug] = {
    "the plan gathers layers for the backward pass from all nodes": UnitBug(
        Mutation(
            f"{_COST}.data_messages:data_messages",
            "PricedMessage(name, all_gather, elements * e, group.again_ranks, group.stride, calls)",
            "PricedMessage(name, all_gather, elements * e, group.shards, group.stride, calls)",
        ),
        _PLANNED + "test_layers_are_gathered_for_the_backward_pass_at_the_speed_of_a_node",
    ),
    "the plan copies shards from the host though parts are on the device": UnitBug(
        Mutation(
            f"{_COST}.data_messages:over_link",
            "np.where(group.keeps_parts, 0.0, group.again / group.shards)",
            "group.again / group.shards",
        ),
        _PLANNED + "test_parts_are_on_the_device_so_that_shards_come_from_the_host_once_a_microbatch",
    ),
    "the plan forgets the memory of secondary shards": UnitBug(
        Mutation(f"{_COST}.states:_gathered", "candidates.shared.zero_secondary_ranks > 1", "False"),
        _PLANNED + "test_each_rank_keeps_its_part_of_every_layer_in_the_type_of_matmuls",
    ),
    "the plan has as many secondary ranks of experts as of other parameters": UnitBug(
        Mutation(f"{_COST}.rank_parameters:again_ranks", "ranks * candidates.tp // candidates.ep", "ranks"),
        _PLANNED + "test_experts_are_gathered_again_from_the_ranks_of_a_node_that_share_them_or_from_all",
        ("qwen3-30b-a3b", 2, 4),
    ),
}
