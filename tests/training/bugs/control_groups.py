"""Bugs of the memory that control groups allow: a limit that is not seen, or that of another group."""

from tests.mutation import Mutation
from tests.training.bugs.bug import UnitBug

_FILES, _TESTS = "shardwright.system.control_groups:_files", "tests/test_control_groups.py:"

SCALE = {
    "the limit of the group around the one of the process does not count": UnitBug(
        Mutation(_FILES, "(inner, *inner.parents)", "(inner,)"),
        _TESTS + "test_a_process_may_use_what_the_strictest_of_the_groups_around_it_allows",
    ),
    "the largest limit counts, not the least": UnitBug(
        Mutation(
            "shardwright.system.control_groups:memory_limit", "min(limits, default=None)", "max(limits, default=None)"
        ),
        _TESTS + "test_a_process_may_use_what_the_strictest_of_the_groups_around_it_allows",
    ),
    "limits of version 1 are looked for only where memory has a hierarchy alone": UnitBug(
        Mutation(_FILES, '"memory" in controllers.split(",")', 'controllers == "memory"'),
        _TESTS + "test_version_1_has_a_hierarchy_of_its_own_for_memory",
    ),
}
