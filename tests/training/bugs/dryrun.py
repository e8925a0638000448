"""Bugs of the dry run, which would report other bytes than a rank has, or let ranks pass that hang."""

from tests.mutation import Mutation
from tests.training.bugs.bug import UnitBug
from tests.training.worlds import OPTIMIZER

_RECORD = "tests/dryrun/test_record.py:"
_AGREEMENT = "tests/dryrun/test_agreement.py:"
_CALLS = "shardwright.dry_run.agreement:"

SCALE = {
    "the dry run counts micro-batches that it leaves out once": UnitBug(
        Mutation("tests.dryrun.test_record:traffic", "repeats.get(message.action, 1)", "1"),
        _RECORD + "test_messages_of_repeated_micro_batches_count_as_often",
    ),
    "the dry run adds a resized storage to what it had": UnitBug(
        Mutation("shardwright.dry_run.record:changes", "n_bytes - before", "n_bytes"),
        _RECORD + "test_a_storage_that_grows_and_shrinks_counts_what_it_has",
    ),
    "copies of gradients to the host are not reported": UnitBug(
        Mutation(
            "shardwright.training.offload.on_host:HostLink.fetch",
            "self.observer.transfer(TensorCopy(to_host=True, n_bytes=sum((x.nbytes for x in on_device))))",
            "pass",
        ),
        "tests/training/test_offload_host.py:"
        "test_states_and_the_update_are_on_the_host_and_a_step_copies_gradients_there_and_weights_back",
        (OPTIMIZER, 2**30),
    ),
    "activations that come back are reported as copies to the host": UnitBug(
        Mutation("shardwright.parallel.offload:ActivationsOnHost.copy_in", "False", "True"),
        "tests/training/test_offload_activations.py:"
        "test_a_tensor_that_several_operations_save_is_copied_once_and_weights_are_not",
    ),
    "rows of experts that are assumed are more than there are": UnitBug(
        Mutation("shardwright.dry_run.program:shares", "n_rows - first", "n_rows"),
        _RECORD + "test_assumed_rows_are_those_that_are_there",
    ),
}
ORDER = {
    "a rank that waits for a message is not seen to wait": UnitBug(
        Mutation(_CALLS + "_stuck_launches", "launches[rank].received[call.peer] > call.splits[0]", "True"),
        _AGREEMENT + "test_a_wait_before_the_receive_is_a_deadlock",
    ),
    "collectives of two groups may come in any order": UnitBug(
        Mutation(
            _CALLS + "_Launches.counterpart",
            "other_call.group == call.group and other_call.op not in (*PAIRED, WAIT)",
            "True",
        ),
        _AGREEMENT + "test_groups_in_another_order_are_a_deadlock",
    ),
    "calls that are launched alone do not wait for one another": UnitBug(
        Mutation(_CALLS + "_Launches.__init__", "numbered_call[0] if not numbered_call[1].launch else -1", "-1"),
        _AGREEMENT + "test_nccl_messages_in_both_directions_wait_for_one_another_unless_they_are_one_launch",
    ),
    "a message that has no receive is not seen": UnitBug(
        Mutation(
            _CALLS + "_pair_disagreements",
            "sent is None or received is None or sent.content[1:] != received.content[1:]",
            "sent and received and sent.content[1:] != received.content[1:]",
        ),
        _AGREEMENT + "test_a_disagreement_is_one_sentence_with_communicator_call_and_ranks",
    ),
}
