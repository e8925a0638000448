"""Bugs of the search for ranks that hang: the wrong rank is named, or none, or one that is only slow."""

from tests.mutation import Mutation
from tests.parallel import test_point_to_point
from tests.training import test_hangs
from tests.training.bugs.bug import AnyBug, UnitBug

_TESTS = "tests/training/test_hangs.py"
_CHAIN = f"{_TESTS}:test_the_rank_that_never_joined_is_at_fault_and_not_those_that_wait_for_those_that_wait"
_JOINED = f"{_TESTS}:test_a_collective_that_a_rank_has_joined_is_not_held_against_it"
_MUTE = f"{_TESTS}:test_a_rank_that_cannot_answer_is_at_fault_before_all_others"
_MESSAGE = f"{_TESTS}:test_the_rank_that_has_not_sent_a_message_is_at_fault_and_the_message_named"
_FIRST = "gone or busy or [rank for rank in ranks if rank not in dumps]"

ORDER: dict[str, AnyBug] = {
    "of a hang those that wait are blamed": UnitBug(
        Mutation("tests.training.test_hangs:describe", "not dumps[rank].waits", "dumps[rank].waits"), _CHAIN
    ),
    "of a message that does not come its receiver is said not to have sent it": UnitBug(
        Mutation("shardwright.system.ranks_at:_to_begin", "rank == call.ranks[0]", "rank == call.ranks[1]"), _MESSAGE
    ),
    "a rank that runs is blamed before one that is stopped": UnitBug(
        Mutation("tests.training.test_hangs:describe", _FIRST, f"busy or {_FIRST}"), _MUTE
    ),
}
STALE: dict[str, AnyBug] = {
    name: UnitBug(mutation, f"tests/{test}", put_in_there=True)
    for test, bugs in (
        ("parallel/test_point_to_point.py:test_a_bug_is_seen", test_point_to_point.BUGS),
        ("training/test_hangs.py:test_an_action_that_is_not_named_is_seen", test_hangs.BUGS),
    )
    for name, mutation in bugs.items()
}
OFF_BY_ONE: dict[str, AnyBug] = {
    "a collective that a rank has joined counts as one that it never joined": UnitBug(
        Mutation(
            "shardwright.system.ranks_at:_missed",
            "joined.get(call.group, 0) < call.number",
            "joined.get(call.group, 0) <= call.number",
        ),
        _JOINED,
    ),
    "the last collective before that which hangs counts as not joined": UnitBug(
        Mutation(
            "shardwright.system.ranks_at:_missed",
            "joined.get(call.group, 0) < call.number",
            "joined.get(call.group, 0) < call.number - 1",
        ),
        _CHAIN,
    ),
}
