"""Copying checkpoints to `checkpoint.durable` during training: a thread of each rank copies its part."""

import time
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from shardwright.parallel.objects import gathered
from shardwright.run_folder import step_of
from shardwright.system.errors import CheckpointError
from shardwright.training.checkpoint.background import BackgroundThread
from shardwright.training.checkpoint.durable import DurableFolder, copy
from shardwright.training.checkpoint.store import CheckpointStore

_LOOK_S = 0.1
_LOOK_MOST_S = 2.0
_ARRIVES_IN_S = 120.0
"""How long rank 0 waits to see another rank's finished part: a network file system may cache a listing for a minute."""


@dataclass
class CompletedCopy:
    """A complete durable copy. `took_s`: seconds from its start."""

    url: str
    step: int
    took_s: float


class Copier:
    """The durable copies of a run. All ranks call every method together, except `news` and `abandon`."""

    def __init__(self, folder: DurableFolder, store: CheckpointStore, retries: int) -> None:
        self.folder, self.store = folder, store
        self.step = 0
        """Step of the copy in progress, or 0."""
        self._thread = BackgroundThread("durable copy", retries)
        self._news: list[CompletedCopy] = []

    @property
    def what(self) -> str:
        """A description of the copy in progress, for messages."""
        return f"the copy of the checkpoint after step {self.step}"

    def busy(self) -> bool:
        """Return whether any rank is still copying."""
        return any(gathered(self._thread.is_alive, bool))

    def begin(self, step: int) -> None:
        """Start to copy a checkpoint, even one still in progress. `settle` must have been called for the previous
        copy."""
        self.step = step
        self.store.keep(step)
        checkpoint, rank, world_size = self.store.path_of(step), dist.get_rank(), dist.get_world_size()

        def as_error(error: Exception) -> CheckpointError:
            what = error if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
            return CheckpointError(f"copying {checkpoint}: rank {rank}: {what}")

        self._thread.begin(lambda: self._beside(checkpoint, rank, world_size), as_error)

    def settle(self) -> None:
        """Wait until the copy in progress, if any, is complete. Raises CheckpointError on all ranks if it failed on
        any."""
        self.step = 0
        self._thread.settle()

    def news(self) -> list[CompletedCopy]:
        """Return the copies completed since the last call; empty on ranks other than 0."""
        told, self._news = self._news, []
        return told

    def abandon(self) -> None:
        """Stop the copy in progress, because other ranks may be gone or there is no checkpoint to copy."""
        self._thread.abandon()

    def _beside(self, checkpoint: Path, rank: int, world_size: int) -> None:
        """Background job: wait for the checkpoint to be published, then copy this rank's part."""
        thread, began_s = self._thread, time.monotonic()
        pause_s = _LOOK_S

        def wait() -> bool:
            nonlocal pause_s
            pause_s = min(1.5 * pause_s, _LOOK_MOST_S)
            ended_s = thread.others_ended_s
            if ended_s is not None and time.monotonic() > ended_s + _ARRIVES_IN_S:
                there = self.folder.url_of(step_of(checkpoint))
                raise CheckpointError(f"{there}: what other ranks have copied is not seen {_ARRIVES_IN_S:.0f} s later")
            return not thread.abandoned.wait(pause_s)

        try:
            while not checkpoint.is_dir():  # if saving is asynchronous, rank 0's thread publishes it later
                if not wait():
                    return
            done = thread.tried(lambda: copy(self.folder, checkpoint, rank, world_size, wait), CheckpointError)
            if done and rank == 0:
                step = step_of(checkpoint)
                self._news.append(CompletedCopy(self.folder.url_of(step), step, time.monotonic() - began_s))
        finally:
            if rank == 0:
                self.store.keep(0)
