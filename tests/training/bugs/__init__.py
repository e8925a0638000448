"""Known bugs in families, each put into our own code by tests/training/test_mutations.py; docs/mutations.md lists them.

Numbers are those of the list of known silent bugs. 18 is in tests/data. To add one: a row in the module of its family,
with the code as it is, the code as the bug has it, and where it shows.
"""

from collections.abc import Mapping

from tests.training.bugs import (
    chunked_loss,
    compression,
    data,
    documents,
    dtype,
    elsewhere,
    generation,
    hugging_face,
    mask,
    mtp,
    muon,
    off_by_one,
    optimizers,
    order,
    recompute,
    reduction,
    resume,
    scale,
    shard,
    stale,
)
from tests.training.bugs.bug import AnyBug, Bug, ResumeBug, UnitBug

FAMILIES: dict[str, Mapping[str, AnyBug]] = {
    "wrong scale": scale.BUGS
    | elsewhere.SCALE
    | generation.SCALE
    | data.SHARE
    | muon.SCALE
    | mtp.SCALE
    | optimizers.SCALE,
    "missing or double reduction": reduction.BUGS
    | elsewhere.REDUCTION
    | mtp.REDUCTION
    | optimizers.REDUCTION
    | compression.REDUCTION,
    "wrong shard": shard.BUGS
    | elsewhere.SHARD
    | generation.SHARD
    | muon.SHARD
    | mtp.SHARD
    | optimizers.SHARD
    | compression.SHARD,
    "wrong order": order.BUGS | elsewhere.ORDER | generation.ORDER | data.ORDER | muon.ORDER | mtp.ORDER,
    "stale value": stale.BUGS | elsewhere.STALE | generation.STALE | muon.STALE | optimizers.STALE | compression.STALE,
    "wrong dtype": dtype.BUGS | optimizers.DTYPE | compression.DTYPE,
    "wrong mask": mask.BUGS | mtp.MASK | generation.MASK | data.MASK | documents.BUGS,
    "off by one": off_by_one.BUGS | mtp.OFF_BY_ONE | generation.OFF_BY_ONE | data.OFF_BY_ONE,
    "wrong recomputation": recompute.BUGS,
    "wrong chunks of the loss": chunked_loss.BUGS,
    "wrong weights from files": hugging_face.BUGS,
    "lost on resume": resume.BUGS | elsewhere.RESUME | data.RESUME | compression.RESUME,
}
ALL: dict[str, AnyBug] = {name: bug for bugs in FAMILIES.values() for name, bug in bugs.items()}

__all__ = ["ALL", "FAMILIES", "AnyBug", "Bug", "ResumeBug", "UnitBug"]
