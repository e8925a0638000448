"""Bugs of optimizer states in the memory of the host: what is copied late, to another place, or not at all."""

from dataclasses import replace

from tests.mutation import Mutation
from tests.training.bugs.bug import ONE, TP, ZERO_1, ZERO_3, AnyBug, Bug, ResumeBug, UnitBug
from tests.training.worlds import OPTIMIZER

_ON_HOST = "shardwright.training.offload.on_host"
_ONE, _TP, _ZERO_1, _ZERO_3 = (replace(layout, offload_optimizer="cpu") for layout in (ONE, TP, ZERO_1, ZERO_3))

STALE: dict[str, AnyBug] = {
    "weights that the host has updated are not sent to the device": Bug(
        Mutation(
            f"{_ON_HOST}:OptimizerOnHost.step",
            "self.link.send([parameter.shard for parameter in bucket], [parameter.weights for parameter in bucket])",
            "pass",
        ),
        [_ONE, _ZERO_3],
    ),
    "the host updates its copy of the weights from before something wrote them": UnitBug(
        Mutation(f"{_ON_HOST}:_version", "return storage_id(storage), tensor_version(shard)", "return 0, 0"),
        "tests/training/test_offload_host.py:"
        "test_states_and_the_update_are_on_the_host_and_a_step_copies_gradients_there_and_weights_back",
        (OPTIMIZER, 2**30),
    ),
    "gradients of a bucket arrive in the buffer that the host reads": Bug(
        Mutation(f"{_ON_HOST}:OptimizerOnHost._fetch", "self.buffers[number % BUFFERS]", "self.buffers[0]"), [_ONE, _TP]
    ),
}
SHARD: dict[str, AnyBug] = {
    "gradients of a bucket lie over each other on the host": Bug(
        Mutation(f"{_ON_HOST}:OptimizerOnHost._fetch", "at += _room(weights)", "pass"), [_ZERO_1]
    ),
    "states on the host are not those that a checkpoint holds": ResumeBug(
        Mutation(
            f"{_ON_HOST}:_as_of", "as_part_on_host(value, parameter)", "as_part_on_host(value.clone(), parameter)"
        ),
        (_ZERO_3, _ZERO_3),
    ),
}
OFF_BY_ONE: dict[str, AnyBug] = {
    "the last bucket of gradients is not fetched": Bug(
        Mutation(
            f"{_ON_HOST}:OptimizerOnHost._fetch",
            "number < len(self.buckets)",
            "number < len(self.buckets) - 1",
        ),
        [_ONE, _ZERO_3],
    ),
}
