"""Bugs of the dry run, which would report other bytes than a rank has, or let ranks pass that hang."""

from tests.mutation import Mutation
from tests.training.bugs.bug import UnitBug

_RECORD = "tests/dryrun/test_record.py:"
_AGREEMENT = "tests/dryrun/test_agreement.py:"
_DEADLOCKS = "shardwright.dry_run.agreement:_deadlocks"

SCALE = {
    "the dry run counts micro-batches that it leaves out once": UnitBug(
        Mutation("tests.dryrun.test_record:traffic", "repeats.get(message.action, 1)", "1"),
        _RECORD + "test_messages_of_repeated_micro_batches_count_as_often",
    ),
    "the dry run adds a resized storage to what it had": UnitBug(
        Mutation("shardwright.dry_run.record:changes", "n_bytes - held", "n_bytes"),
        _RECORD + "test_a_storage_that_grows_and_shrinks_counts_what_it_has",
    ),
    "rows of experts that are assumed are more than there are": UnitBug(
        Mutation("shardwright.dry_run.program:shares", "n_rows - first", "n_rows"),
        _RECORD + "test_assumed_rows_are_those_that_are_there",
    ),
}
ORDER = {
    "a rank that waits for a message is not seen to wait": UnitBug(
        Mutation(_DEADLOCKS, "sent[message.peer, rank] > message.splits[0]", "True"),
        _AGREEMENT + "test_two_ranks_that_wait_for_one_another_are_a_deadlock",
    ),
    "collectives of two groups may come in any order": UnitBug(
        Mutation(_DEADLOCKS, "there[:3] == message[:3]", "True"),
        _AGREEMENT + "test_groups_in_another_order_are_a_deadlock",
    ),
}
