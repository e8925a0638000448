"""Bugs of the restarts after a fault, and of runs that go on with fewer ranks."""

from tests.mutation import Mutation
from tests.training.bugs.bug import AnyBug, UnitBug

_TESTS = "tests/training/test_restarts.py"
_NEWEST = f"{_TESTS}:test_ranks_start_again_from_the_newest_checkpoint_until_the_restarts_are_used_up"
_PLACE = f"{_TESTS}:test_a_place_with_two_faults_in_a_row_is_used_no_more"
_DP = f"{_TESTS}:test_a_layout_shrinks_along_dp_alone"
_GROWS = f"{_TESTS}:lost_places_are_tried_again"
_SPARE = f"{_TESTS}:test_a_spare_takes_the_place_of_the_one_at_fault_which_is_then_the_last_spare"
_RESTARTS = "shardwright.training.resilience.restarts:Restarts"
_SHRUNK = "shardwright.config.settle"

RESUME: dict[str, AnyBug] = {
    "after a fault a run begins anew though it has checkpoints": UnitBug(
        Mutation(f"{_RESTARTS}._event", '"auto" if newest is not None else resume_at_first', "resume_at_first"), _NEWEST
    ),
    "after a fault the oldest checkpoint is told as the one that the run goes on from": UnitBug(
        Mutation(f"{_RESTARTS}._event", "saved[-1]", "saved[0]"), _NEWEST
    ),
    "after a fault a run goes on with a smaller layout than it has to": UnitBug(
        Mutation(f"{_SHRUNK}:_degrees", "(pair[0] * pair[1], pair[1])", "(-pair[0] * pair[1], pair[1])"), _DP
    ),
}
STALE: dict[str, AnyBug] = {
    "a run that grows again keeps the layout of fewer ranks": UnitBug(
        Mutation(
            f"{_RESTARTS}.grow", "Attempt(self.config, self._usable)", "Attempt(self.attempt.config, self._usable)"
        ),
        _GROWS,
    ),
    "a place is tried again as often as at first, however often that failed": UnitBug(
        Mutation(f"{_RESTARTS}.grow", "self._grow_after_s *= 2", "pass"), _GROWS
    ),
    "a spare place that was at fault is the first to be used again": UnitBug(
        Mutation(f"{_RESTARTS}._use_spare", "self._spares.append(place)", "self._spares.insert(1, place)"), _SPARE
    ),
    "a spare takes the places of all ranks": UnitBug(
        Mutation(f"{_RESTARTS}._use_spare", "used == place", "True"), _SPARE
    ),
}
OFF_BY_ONE: dict[str, AnyBug] = {
    "one restart more than was allowed": UnitBug(
        Mutation(f"{_RESTARTS}.after", "self.used == self.allowed", "self.used > self.allowed"), _NEWEST
    ),
    "a place is given up after one fault": UnitBug(
        Mutation(f"{_RESTARTS}._use_places", "len(self._faulty) < FAULTS_IN_A_ROW", "len(self._faulty) < 1"), _PLACE
    ),
    "faults of different places count as those of one": UnitBug(
        Mutation(f"{_RESTARTS}._use_places", "faulty == place", "faulty is not None"), _PLACE
    ),
}
SHARD: dict[str, AnyBug] = {
    "ranks that are left take the places of the first, the broken one among them": UnitBug(
        Mutation(
            f"{_RESTARTS}._use_places",
            "left[: config.layout.layout().world_size]",
            "self.attempt.places[: config.layout.layout().world_size]",
        ),
        _PLACE,
    ),
    "a smaller layout has fewer ranks of ep": UnitBug(
        Mutation("tests.training.test_restarts:shrunk", "smaller.ep != layout.ep", "smaller.ep > layout.ep"), _DP
    ),
}
