"""The section [checkpoint] of the run file, and its rules."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from shardwright.config.sections import PATH, NotNegative, Positive, RunFileSection
from shardwright.layout.layout import Layout
from shardwright.system.remote import REMOTE


class CheckpointSection(RunFileSection):
    """When checkpoints are saved, and whether a run resumes from one."""

    every: NotNegative = Field(0, description="steps between checkpoints; 0: only at the end and when stopped")
    keep_last: Positive = Field(2, description="older checkpoints are deleted once a newer one is published")
    resume: str = Field(
        "no",
        json_schema_extra=PATH,
        description="no: start from step 0, refuse a folder that has a run; auto: continue from the last good "
        "checkpoint if there is one; or the path of a checkpoint, of this or another run",
    )
    async_mode: Literal["disabled", "async"] = Field(
        "disabled",
        description="async: steps wait only until their states are copied to memory of the host, kept for that, and a "
        "thread of each rank writes the copy during the next steps; disabled: steps wait until the checkpoint is "
        "published",
    )
    on_error: Literal["stop", "continue"] = Field(
        "stop",
        description="reaction of a run to a checkpoint that cannot be written: stop, or continue with a message and an "
        "event; the last checkpoint of a run always has to be written",
    )
    retries: Annotated[int, Field(ge=0, le=10)] = Field(
        2, description="times that a rank tries again to write or copy its shards, after 1 s, 2 s, 4 s and so on"
    )
    local: Annotated[str, Field(min_length=1)] | None = Field(
        None,
        json_schema_extra=PATH,
        description="a folder of each host (its disk, or /dev/shm) for checkpoints every local_every steps, written "
        "during training; every rank's shards are on its own host and on the next, so that a lost host loses none",
    )
    local_every: NotNegative = Field(0, description="steps between checkpoints in local")
    durable: Annotated[str, Field(min_length=1)] | None = Field(
        None,
        json_schema_extra=PATH,
        description="a second place for checkpoints, a folder or a URL of fsspec (s3://BUCKET/FOLDER, gs://, ...), to "
        "which they are copied during training; a run that finds no newer one in OUT resumes from there",
    )
    durable_every: NotNegative = Field(
        0,
        description="steps between checkpoints that are copied to durable, a multiple of every; 0: only the last one, "
        "at the end and when stopped",
    )
    durable_keep_last: NotNegative = Field(
        0, description="older copies are deleted once a newer one is complete; 0: all are kept"
    )


def checkpoint_problems(checkpoint: CheckpointSection, layout: Layout | None) -> Iterator[str]:
    """Yield the broken rules of checkpoints, their copies, and how a layout's states are saved."""
    yield from _durable_problems(checkpoint)
    yield from _local_problems(checkpoint)
    if layout is not None:
        yield from _saving_problems(checkpoint, layout)


def _durable_problems(checkpoint: CheckpointSection) -> Iterator[str]:
    every, durable_every = checkpoint.every, checkpoint.durable_every
    if checkpoint.durable is None:
        for name, value in (("durable_every", durable_every), ("durable_keep_last", checkpoint.durable_keep_last)):
            if value:
                yield f"checkpoint.{name}={value} is of the copies in checkpoint.durable; set that to a folder or a URL"
    elif durable_every and (not every or durable_every % every):
        why = (
            f"no multiple of checkpoint.every={every}" if every else "and checkpoint.every=0 saves none before the end"
        )
        yield (
            f"checkpoint.durable_every={durable_every} is {why}, and only a checkpoint that is saved can be copied; "
            f"valid: a multiple of checkpoint.every, or 0 for the last one alone"
        )


def _local_problems(checkpoint: CheckpointSection) -> Iterator[str]:
    local, every = checkpoint.local, checkpoint.local_every
    if local is None and every:
        yield f"checkpoint.local_every={every} is of checkpoints in checkpoint.local; set that to a folder of each host"
    elif local is not None and not every:
        yield f"checkpoint.local={local!r} is for checkpoints every local_every steps; set checkpoint.local_every, too"
    elif local is not None and REMOTE in local:
        yield f"checkpoint.local={local!r} is a URL; it is a folder of each host: checkpoint.durable takes URLs"
    elif every and checkpoint.every and every % checkpoint.every == 0:
        yield (
            f"checkpoint.local_every={every} is a multiple of checkpoint.every={checkpoint.every}, and a step that is "
            f"saved to OUT is not saved locally, too; save locally more often than to OUT"
        )


def _saving_problems(checkpoint: CheckpointSection, layout: Layout) -> Iterator[str]:
    if layout.offload_optimizer != "disk":
        return
    for name, value, given, remedy in (
        ("async_mode", checkpoint.async_mode, checkpoint.async_mode != "disabled", "set async_mode='disabled', or"),
        ("local", checkpoint.local, checkpoint.local is not None, "leave local out, or set"),
    ):
        if given:
            yield (
                f"checkpoint.{name}={value!r} copies the optimizer's states to memory, and "
                f"layout.offload_optimizer='disk' keeps them on a disk because memory is short; {remedy} "
                f"offload_optimizer to 'cpu' or 'none'"
            )
