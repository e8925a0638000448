"""Bugs of checkpoints that are written beside training: what is written is not what was so when the step ended."""

from tests.mutation import Mutation
from tests.training.bugs.bug import AnyBug, UnitBug

SAVER = "shardwright.training.checkpoint.saver:Saver"
SEEN = "tests/training/test_asynchronous.py:test_a_bug_of_saving_beside_training_is_seen"


def _bug(function: str, before: str, after: str) -> UnitBug:
    return UnitBug(Mutation(f"{SAVER}.{function}", before, after), SEEN, put_in_there=True)


STALE: dict[str, AnyBug] = {
    "a checkpoint is written from the tensors that training goes on with": _bug(
        "_copied", "host.copy_(piece.of(tensors), non_blocking=True)", "piece.of(tensors)"
    ),
    "the optimizer's states are not copied for a checkpoint": _bug(
        "_copied",
        "zip(plan.pieces, self._host, strict=True)",
        "[(p, h) for p, h in zip(plan.pieces, self._host, strict=True) if p.name.startswith('model/') "
        "or copies.update({p: h})]",
    ),
    "the window of spikes in a checkpoint is that of the time of writing": _bug(
        "_head", "copy.deepcopy(trainer.spikes.state)", "trainer.spikes.state"
    ),
    "the progress in a checkpoint is that of the time of writing": _bug(
        "_publish",
        "dataclasses.replace(save.head, tensors=records)",
        "dataclasses.replace(save.head, tensors=records, progress=dataclasses.replace(save.head.progress, "
        "samples=12 * int(next(iter(self.trainer.optimizer.state.values()))['step'])))",
    ),
    "a checkpoint is published before all ranks have written": _bug(
        "_publish",
        "gathered(partial, dist.get_world_size(), self._thread.abandoned.is_set)",
        "gathered(partial, 1, self._thread.abandoned.is_set)",
    ),
    "a checkpoint is begun while the one before it is still written": _bug("save", "self.settle()", "pass"),
}
