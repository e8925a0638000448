"""Bugs of durable copies of checkpoints: what passes for complete and is not, or is not there any more."""

from tests.mutation import Mutation
from tests.training.bugs.bug import AnyBug, UnitBug

DURABLE = "shardwright.training.checkpoint.durable"
SEEN = "tests/training/test_durable.py:test_a_bug_of_copies_is_seen"


def _bug(function: str, before: str, after: str) -> UnitBug:
    return UnitBug(Mutation(function, before, after), SEEN, put_in_there=True)


STALE: dict[str, AnyBug] = {
    "a durable copy is complete before all ranks have copied their part": _bug(
        f"{DURABLE}:copy",
        "confirmations(folder, step, world_size, wait, lambda text: text == of_this or None)",
        "confirmations(folder, step, 1, wait, lambda text: text == of_this or None)",
    ),
    "a durable copy is completed with parts of a checkpoint that was copied earlier": _bug(
        f"{DURABLE}:copy",
        "confirmations(folder, step, world_size, wait, lambda text: text == of_this or None)",
        "confirmations(folder, step, world_size, wait, lambda text: True)",
    ),
    "the manifest of a durable copy is copied with the other files": _bug(
        f"{DURABLE}:copy",
        "[path.name for path in checkpoint.iterdir() if path != manifest]",
        "[path.name for path in checkpoint.iterdir()]",
    ),
    "a part of a checkpoint is copied by no rank": _bug(
        f"{DURABLE}:part_of", "sorted(names)[rank::world_size]", "sorted(names)[rank::world_size + 1]"
    ),
    "a checkpoint is deleted while it is copied": _bug(
        "shardwright.training.checkpoint.store:CheckpointStore.delete_others",
        "step_of(path) != self._kept_step",
        "True",
    ),
    "a durable copy that is not complete is fetched": _bug(
        "shardwright.training.resuming:newest_first",
        "from_first(functools.partial(durable.is_complete, step), bool)",
        "True",
    ),
}
