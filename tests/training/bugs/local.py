"""Bugs of checkpoints on the hosts of a run: what is lost with a host, or passes for whole without it."""

from tests.mutation import Mutation
from tests.training.bugs.bug import AnyBug, UnitBug

LOCAL = "shardwright.training.checkpoint.local:LocalLevel"
SEEN = "tests/training/test_local.py:test_a_bug_of_local_checkpoints_is_seen"


def _bug(function: str, before: str, after: str) -> UnitBug:
    return UnitBug(Mutation(function, before, after), SEEN, put_in_there=True)


STALE: dict[str, AnyBug] = {
    "the copy of a rank's shards is on its own host": _bug(
        "shardwright.training.checkpoint.local:Hosts.keeper",
        "(self.host_of_rank[rank] + 1) % self.n",
        "self.host_of_rank[rank]",
    ),
    "a local checkpoint is taken for whole with files that no host has": _bug(
        f"{LOCAL}._is_whole",
        "{rank_of(name) for name in files} <= {rank for ranks in parts.values() for rank in ranks}",
        "True",
    ),
    "a host deletes a local checkpoint before the next one is on all hosts": _bug(
        f"{LOCAL}.__init__", "CheckpointStore(folder, KEPT)", "CheckpointStore(folder, 1)"
    ),
    "a local checkpoint is published though a copy of its shards failed": _bug(
        f"{LOCAL}.write",
        "self._exchanged(partial, problem) or problem",
        "self._exchanged(partial, problem) and problem",
    ),
    "parts of two different local checkpoints after as many steps are taken for one": _bug(
        f"{LOCAL}._listed", "hashlib.sha256(content).hexdigest()", "''"
    ),
    "local checkpoints are deleted at the end of a run that has not saved as much elsewhere": _bug(
        f"{LOCAL}.clear", "step_of(path) <= saved", "True"
    ),
}
