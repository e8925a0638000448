"""The protocol by which ranks publish a checkpoint together, without a collective during training, to any target.

1. Each rank writes its part of the files and confirms it.
2. Rank 0 waits until all ranks have confirmed, then publishes. The manifest is written last.

target                                 a rank confirms with                  published by
OUT/checkpoints (`CheckpointStore`)    STEP.partial/written/rank-00001.json  renaming STEP.partial to STEP
checkpoint.durable (`DurableFolder`)   STEP/copied/rank-00001                writing STEP/manifest.json
checkpoint.local (`LocalLevel`)        a message, as hosts share no folder   renaming on each host, when rank 0 answers
"""

import json
from collections.abc import Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import asdict, dataclass
from typing import Protocol, TypeVar

from pydantic import TypeAdapter

from shardwright.system.errors import CheckpointError
from shardwright.training.checkpoint.manifest import ShardRecord

T = TypeVar("T")
ShardRecords = Sequence[tuple[str, ShardRecord]]
"""Shards, each with the name of its tensor."""


class SharedTarget(Protocol):
    """A target that all ranks see."""

    def confirm(self, step: int, rank: int, text: str) -> None:
        """Record that a rank has written its part of the checkpoint after `step` steps."""

    def confirmed(self, step: int, ranks: AbstractSet[int]) -> dict[int, str]:
        """Return rank -> text of its confirmation, for some or all of `ranks` that have confirmed; empty if the target
        sees none yet."""


def confirmations(
    target: SharedTarget, step: int, world_size: int, wait: Callable[[], bool], read: Callable[[str], T | None]
) -> list[T] | None:
    """Return each rank's confirmation once all have confirmed. `wait` pauses and returns whether to continue; if not,
    None is returned. `read`: returns a confirmation from its text, or None for a text that does not count; it raises if
    that rank failed, also while lower ranks have not confirmed."""
    result: dict[int, T] = {}
    while waiting := set(range(world_size)) - result.keys():
        texts = target.confirmed(step, waiting)
        fresh = {rank: confirmation for rank, text in texts.items() if (confirmation := read(text)) is not None}
        if not fresh and not wait():
            return None
        result |= fresh
    return [result[rank] for rank in range(world_size)]


@dataclass(frozen=True)
class PartReport:
    """The confirmation of a rank that wrote shards: their records, or the error if they cannot be written."""

    records: ShardRecords = ()
    problem: str = ""

    def text(self) -> str:
        """Return the report as JSON."""
        return json.dumps(asdict(self))


_REPORT = TypeAdapter(PartReport)


def good_report(text: str) -> PartReport:
    """Return a report from its text. Raises CheckpointError with its problem, if it has one."""
    report = _REPORT.validate_json(text, strict=True)
    if report.problem:
        raise CheckpointError(report.problem)
    return report


def all_records(reports: Iterable[PartReport]) -> ShardRecords:
    """Return the records in the reports of all ranks."""
    return [record for report in reports for record in report.records]
