"""How ranks publish a checkpoint together, without a collective during training: the same protocol for every target.

1. Each rank writes its part of the files and confirms it.
2. Rank 0 waits until all ranks have confirmed, then publishes. The manifest is written last.

target                                 a rank confirms with                  published by
OUT/checkpoints (`CheckpointStore`)    STEP.partial/written/rank-00001.json  renaming STEP.partial to STEP
checkpoint.durable (`DurableFolder`)   STEP/copied/rank-00001                writing STEP/manifest.json
checkpoint.local (`LocalLevel`)        a message, as hosts share no folder   renaming on each host, when rank 0 answers
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Protocol

from pydantic import TypeAdapter

from shardwright.system.errors import CheckpointError
from shardwright.training.checkpoint.manifest import ShardRecord

ShardRecords = Sequence[tuple[str, ShardRecord]]
"""Shards, each with the name of its tensor."""


class SharedTarget(Protocol):
    """A target that all ranks see."""

    def confirm(self, step: int, rank: int, text: str) -> None:
        """Record that a rank has written its part of the checkpoint after `step` steps."""

    def confirmed(self, step: int, rank: int) -> str | None:
        """Return the text of that rank's confirmation, or None if there is none yet."""


def confirmations(
    target: SharedTarget, step: int, world_size: int, wait: Callable[[], bool], accept: Callable[[str], bool]
) -> list[str] | None:
    """Return the text of each rank's confirmation once all have confirmed. `wait` pauses and returns whether to
    continue; if not, None is returned. `accept`: whether a text counts; it raises if that rank failed, also while
    lower ranks have not confirmed."""
    texts: dict[int, str] = {}
    while True:
        for rank in set(range(world_size)) - texts.keys():
            if (text := target.confirmed(step, rank)) is not None and accept(text):
                texts[rank] = text
        if len(texts) == world_size:
            return [texts[rank] for rank in range(world_size)]
        if not wait():
            return None


@dataclass(frozen=True)
class PartReport:
    """The confirmation of a rank that wrote shards: their records, or the error if they cannot be written."""

    records: ShardRecords = ()
    problem: str = ""

    def text(self) -> str:
        """Return the report as JSON."""
        return json.dumps(asdict(self))


_REPORT = TypeAdapter(PartReport)


def reported_records(texts: Sequence[str]) -> ShardRecords:
    """Return the records in the reports of all ranks. Raises CheckpointError with the first problem."""
    return [record for text in texts for record in _good_report(text).records]


def is_good_report(text: str) -> bool:
    """Return True. Raises CheckpointError with the problem of a report that has one."""
    return bool(_good_report(text))


def _good_report(text: str) -> PartReport:
    report = _REPORT.validate_json(text, strict=True)
    if report.problem:
        raise CheckpointError(report.problem)
    return report
