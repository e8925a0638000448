"""Copying checkpoints to `checkpoint.durable` beside training: a thread of each rank copies its part."""

import threading
import time
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from shardwright.errors import CheckpointError
from shardwright.parallel.objects import gathered
from shardwright.run_folder import step_of
from shardwright.training.checkpoint.durable import DurableFolder, copy
from shardwright.training.checkpoint.saver import RETRY_AFTER_S
from shardwright.training.checkpoint.state import raise_first
from shardwright.training.checkpoint.store import CheckpointStore

_LOOK_S = 0.1
_LOOK_MOST_S = 2.0
_ARRIVES_IN_S = 120.0
"""From when a rank has copied its part until rank 0 sees it: a network file system keeps a listing for a minute."""


@dataclass
class Copied:
    """A copy of a checkpoint that is complete. `took_s`: from its begin."""

    url: str
    step: int
    took_s: float


class Copier:
    """The durable copies of a run; every method but `news` and `abandon` is called by all ranks together."""

    def __init__(self, folder: DurableFolder, store: CheckpointStore, retries: int) -> None:
        self.folder, self.store, self.retries = folder, store, retries
        self.step = 0
        """That of the copy that is under way; 0 if none is."""
        self._thread: threading.Thread | None = None
        self._abandoned = threading.Event()
        self._error: CheckpointError | None = None
        self._until_s: float | None = None
        """On the monotonic clock, when the parts of the other ranks have to be seen; None while they still copy."""
        self._news: list[Copied] = []

    @property
    def what(self) -> str:
        """The copy that is under way, in words."""
        return f"the copy of the checkpoint after step {self.step}"

    def busy(self) -> bool:
        """Whether any rank still copies."""
        here = self._thread is not None and self._thread.is_alive()
        return any(gathered(here, bool))

    def begin(self, step: int) -> None:
        """Begin to copy a checkpoint, which may be under way itself. The one before has to be settled."""
        self.step, self.store.held = step, step
        self._abandoned.clear()
        arguments = self.store.path_of(step), dist.get_rank(), dist.get_world_size()
        self._thread = threading.Thread(target=self._beside, args=arguments, name="durable copy", daemon=True)
        self._thread.start()

    def settle(self) -> None:
        """Wait until the copy that is under way, if any, is complete. Raises CheckpointError, on every rank, where it
        failed on any."""
        thread, first = self._thread, dist.get_rank() == 0
        if thread is None:
            return
        self._thread, self.step = None, 0
        if not first:
            thread.join()
        try:
            raise_first(None if first else self._error)
        except CheckpointError:
            self._abandoned.set()  # the notes that rank 0 waits for will not come
            raise
        finally:
            self._until_s = time.monotonic() + _ARRIVES_IN_S
            thread.join()
            self._until_s = None
            error, self._error = self._error, None
        raise_first(error)

    def news(self) -> list[Copied]:
        """What has been completed since the last call; on rank 0 alone."""
        told, self._news = self._news, []
        return told

    def abandon(self) -> None:
        """Leave what is under way: other ranks may be gone, or there is no checkpoint to copy."""
        self._abandoned.set()
        if self._thread is not None:
            self._thread.join(timeout=10)

    def _beside(self, checkpoint: Path, rank: int, world_size: int) -> None:
        """The thread. What goes wrong is kept for `settle`."""
        began_s = time.monotonic()
        pause_s = _LOOK_S

        def wait() -> bool:
            nonlocal pause_s
            pause_s = min(1.5 * pause_s, _LOOK_MOST_S)
            if self._until_s is not None and time.monotonic() > self._until_s:
                there = self.folder.url_of(step_of(checkpoint))
                raise CheckpointError(f"{there}: what other ranks have copied is not seen {_ARRIVES_IN_S:.0f} s later")
            return not self._abandoned.wait(pause_s)

        try:
            while not checkpoint.is_dir():  # published by the thread of rank 0, where saving is asynchronous
                if not wait():
                    return
            for left in reversed(range(self.retries + 1)):
                try:
                    done = copy(self.folder, checkpoint, rank, world_size, wait)
                    break
                except CheckpointError:
                    if not left or self._abandoned.wait(RETRY_AFTER_S * 2 ** (self.retries - left)):
                        raise
            if done and rank == 0:
                step = step_of(checkpoint)
                self._news.append(Copied(self.folder.url_of(step), step, time.monotonic() - began_s))
        except CheckpointError as error:
            self._error = CheckpointError(f"copying {checkpoint}: rank {rank}: {error}")
        except Exception as error:  # a thread has no one to raise it to
            self._error = CheckpointError(f"copying {checkpoint}: rank {rank}: {type(error).__name__}: {error}")
        if rank == 0:
            self.store.held = 0
