"""Bugs of checkpoints that are written beside training: what is written is not what was so when the step ended."""

from tests.mutation import Mutation
from tests.training.bugs.bug import AnyBug, UnitBug

SAVER = "shardwright.training.checkpoint.saver:Saver"
SNAPSHOT = "shardwright.training.checkpoint.saver:Snapshot"
SEEN = "tests/training/test_asynchronous.py:test_a_bug_of_saving_beside_training_is_seen"
SEEN_IN_STEPS = "tests/training/test_asynchronous.py:test_a_bug_of_copying_beside_a_step_is_seen"


def _bug(function: str, before: str, after: str, room: str = SAVER) -> UnitBug:
    return UnitBug(Mutation(f"{room}.{function}", before, after), SEEN, put_in_there=True)


IN_STEPS = {
    "a step changes weights before they are copied for a checkpoint": Mutation(
        "shardwright.training.step:Trainer.update", "self.announce_change()", "pass"
    ),
    "the copy for a checkpoint is done before it is made": Mutation(f"{SNAPSHOT}.begin", "self._made.clear()", "pass"),
    "what compressed gradients keep is copied for a checkpoint after a backward pass": Mutation(
        f"{SNAPSHOT}.begin", "not piece.name.startswith(COMPRESSION)", "True"
    ),
}
STALE: dict[str, AnyBug] = {
    "a checkpoint is written from the tensors that training goes on with": _bug(
        "make", "self._host[piece].copy_(view, non_blocking=True)", "self._host[piece] = view", SNAPSHOT
    ),
    "the optimizer's states are not copied for a checkpoint": _bug(
        "make",
        "self._later.items()",
        "[each for each in self._later.items() if each[0].name.startswith('model/')]",
        SNAPSHOT,
    ),
    "the window of spikes in a checkpoint is that of the time of writing": _bug(
        "_head", "copy.deepcopy(trainer.spikes.state)", "trainer.spikes.state"
    ),
    "the progress in a checkpoint is that of the time of writing": _bug(
        "_texts",
        "dataclasses.replace(save.head, tensors=records)",
        "dataclasses.replace(save.head, tensors=records, progress=dataclasses.replace(save.head.progress, "
        "samples=12 * int(next(iter(self.trainer.optimizer.state.values()))['step'])))",
    ),
    "a checkpoint is published before all ranks have written": _bug(
        "_publish",
        "confirmations(self.store, save.step, dist.get_world_size(), wait, good_report)",
        "confirmations(self.store, save.step, 1, wait, good_report)",
    ),
    **{name: UnitBug(mutation, SEEN_IN_STEPS, put_in_there=True) for name, mutation in IN_STEPS.items()},
    "a checkpoint is begun while the one before it is still written": _bug("save", "self.settle()", "pass"),
}
