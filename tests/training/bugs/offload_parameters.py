"""Bugs of shards of parameters in the memory of the host: what is on the other side, and what the plan forgets of it.

Ranks start without a change that a test has put into its own process, so the bugs of `ON_RANKS` are put in by the ranks
of tests/training/test_offload_parameters.py.
"""

from tests.mutation import Mutation
from tests.training.bugs.bug import APPLY, UnitBug

_TESTS = "tests/training/test_offload_parameters.py:"
_HERE = "tests.training.test_offload_parameters"
_PLACES, _BESIDE = "trained parameters are on the host and nothing else is", "the optimizer updates them where they are"
_ALONE = "one rank has its parameters and gradients on the host and the same bits"
_COST = "shardwright.cost"
_PLANNED = (
    "tests/cost/test_offload.py:"
    "test_with_shards_on_the_host_only_what_is_gathered_is_on_the_device_and_the_link_is_part_of_each_gather"
)
_LESS = (
    "tests/cost/test_offload.py:"
    "test_reduced_gradients_leave_the_device_with_every_zero_stage_and_what_is_not_reduced_stays"
)

ON_RANKS: dict[str, tuple[str, Mutation]] = {
    "tensors that are not trained go to the host with the shards": (
        _PLACES,
        Mutation(f"{_HERE}:allocate", "shards_on if isinstance(tensor, DTensor) else device", "shards_on"),
    ),
    "shards on the host are gathered without a copy to the device": (
        _PLACES,
        Mutation(
            f"{APPLY}:shard", "CPUOffloadPolicy(pin_memory=pins(torch.device(mesh.device_type)))", "OffloadPolicy()"
        ),
    ),
    "shards that are on the host are copied once more to be updated": (
        _BESIDE,
        Mutation(
            "shardwright.verification.rank:states_location",
            'layout.offload_optimizer == "cpu" and layout.offload_parameters == "none"',
            'layout.offload_optimizer == "cpu"',
        ),
    ),
    "on one rank shards are on the host, and nothing copies them to the device": (
        _ALONE,
        Mutation(
            "shardwright.parallel.apply:needs_sharding",
            "shards or casts or layout.offload_parameters != 'none'",
            "shards or casts",
        ),
    ),
}
"""By name what a bug breaks, and its change of code."""

SHARD = {
    name: UnitBug(bug, _TESTS + "test_ranks_show_the_bug", put_in_there=True) for name, (_, bug) in ON_RANKS.items()
}
SCALE = {
    "the plan leaves master weights of shards on the host on the device": UnitBug(
        Mutation(
            f"{_COST}.states:rank_state_bytes",
            "{'weights': np.where(sharded[:, None], 0.0, kinds['weights']), 'master': nothing}",
            "{'weights': np.where(sharded[:, None], 0.0, kinds['weights'])}",
        ),
        _PLANNED,
    ),
    "the plan leaves reduced gradients on the device until the update": UnitBug(
        Mutation(
            f"{_COST}.states:stage_state_bytes",
            "gradients = [gradients[0] * stays[:, None], 0.0 * gradients[1]]",
            "gradients = [gradients[0] * stays[:, None], gradients[1]]",
        ),
        _LESS,
        (2, 1),
    ),
    "the plan sends gradients to the host before they are reduced": UnitBug(
        Mutation(
            f"{_COST}.states:stage_state_bytes",
            "~shares_gradients(job, candidates) | waits",
            "waits & (candidates.zero > 0)",
        ),
        _LESS,
        (1, 1),
    ),
    "the plan keeps no gathered weights of zero 1 and 2": UnitBug(
        Mutation(f"{_COST}.states:rank_state_bytes", "np.where(sharded[:, None], 0.0, kinds['weights'])", "nothing"),
        _LESS,
        (2, 1),
    ),
    "the plan copies gradients of replicas to the host before they are summed": UnitBug(
        Mutation(
            f"{_COST}.data_messages:over_link",
            "waits_for_replicas(layout) & (group.reduce_ranks > group.shards)",
            "np.zeros(len(group.count), dtype=bool)",
        ),
        _LESS,
        (2, 2),
    ),
    "the plan copies shards of layers that are gathered again for nothing": UnitBug(
        Mutation(
            f"{_COST}.data_parallel:_DataParallelTraffic.sent",
            "what != SUMMED",
            "what not in (SUMMED, GATHERED_AGAIN)",
        ),
        _PLANNED,
    ),
    "the plan copies shards of all ranks from the host for each gather": UnitBug(
        Mutation(
            f"{_COST}.data_messages:over_link",
            "np.where(copied, count / group.shards, 0.0)",
            "np.where(copied, group.count, 0.0)",
        ),
        _PLANNED,
    ),
}
