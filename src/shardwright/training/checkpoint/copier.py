"""Copying checkpoints to `checkpoint.durable` beside training: a thread of each rank copies its part."""

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
"""From when a rank has copied its part until rank 0 sees it: a network file system keeps a listing for a minute."""


@dataclass
class CompletedCopy:
    """A copy of a checkpoint that is complete. `took_s`: from its begin."""

    url: str
    step: int
    took_s: float


class Copier:
    """The durable copies of a run; every method but `news` and `abandon` is called by all ranks together."""

    def __init__(self, folder: DurableFolder, store: CheckpointStore, retries: int) -> None:
        self.folder, self.store = folder, store
        self.step = 0
        """That of the copy that is under way; 0 if none is."""
        self._thread = BackgroundThread("durable copy", retries)
        self._news: list[CompletedCopy] = []

    @property
    def what(self) -> str:
        """The copy that is under way, in words."""
        return f"the copy of the checkpoint after step {self.step}"

    def busy(self) -> bool:
        """Whether any rank still copies."""
        return any(gathered(self._thread.is_alive, bool))

    def begin(self, step: int) -> None:
        """Begin to copy a checkpoint, which may be under way itself. The one before has to be settled."""
        self.step = step
        self.store.keep(step)
        checkpoint, rank, world_size = self.store.path_of(step), dist.get_rank(), dist.get_world_size()

        def as_error(error: Exception) -> CheckpointError:
            what = error if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
            return CheckpointError(f"copying {checkpoint}: rank {rank}: {what}")

        self._thread.begin(lambda: self._beside(checkpoint, rank, world_size), as_error)

    def settle(self) -> None:
        """Wait until the copy that is under way, if any, is complete. Raises CheckpointError, on every rank, where it
        failed on any."""
        self.step = 0
        self._thread.settle()

    def news(self) -> list[CompletedCopy]:
        """What has been completed since the last call; on rank 0 alone."""
        told, self._news = self._news, []
        return told

    def abandon(self) -> None:
        """Leave what is under way: other ranks may be gone, or there is no checkpoint to copy."""
        self._thread.abandon()

    def _beside(self, checkpoint: Path, rank: int, world_size: int) -> None:
        """The job of the thread."""
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
            while not checkpoint.is_dir():  # published by the thread of rank 0, where saving is asynchronous
                if not wait():
                    return
            done = thread.tried(lambda: copy(self.folder, checkpoint, rank, world_size, wait), CheckpointError)
            if done and rank == 0:
                step = step_of(checkpoint)
                self._news.append(CompletedCopy(self.folder.url_of(step), step, time.monotonic() - began_s))
        finally:
            if rank == 0:
                self.store.keep(0)
