"""Saving the state of training, while it stands still or beside it.

Synchronous: every rank writes its shards, rank 0 publishes, and then training goes on. Asynchronous: training goes on
at once; a thread of each rank copies its shards into memory of the host, which training waits for before it changes
them (`snapshot`), and writes the copies, and that of rank 0 publishes when the records of all are there (CheckFreq,
Mohan et al., FAST '21: snapshot and persist are separate phases, and at most one checkpoint is under way).
"""

import copy
import dataclasses
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor

from shardwright.run_folder import RUN_FILE, CheckpointRecord, now
from shardwright.system.errors import CheckpointError
from shardwright.training.checkpoint.background import BackgroundThread
from shardwright.training.checkpoint.local import LocalLevel
from shardwright.training.checkpoint.manifest import (
    CheckpointManifest,
    DataRecord,
    ShardRecord,
    TensorRecord,
    TrainingProgress,
    sha256_of_text,
)
from shardwright.training.checkpoint.plan import CheckpointPlan, TensorPiece, plan_of
from shardwright.training.checkpoint.shards import gathered, tell_failure, tensor_records, write_shards
from shardwright.training.checkpoint.snapshot import Snapshot
from shardwright.training.checkpoint.state import checkpoint_bytes, named_tensors, stored_tensors, together
from shardwright.training.checkpoint.store import CheckpointStore
from shardwright.training.step import Trainer


@dataclass
class _CheckpointInProgress:
    """A checkpoint that is being written. `ended_s`: on the monotonic clock, when it was published; `begun_in_s`: how
    long training has waited for it, but for `snapshot`, the copy that is made beside it, if there is one."""

    head: CheckpointManifest
    run_toml: str
    began_s: float
    begun_in_s: float = 0.0
    snapshot: Snapshot | None = None
    ended_s: float | None = None
    told: bool = False
    local: bool = False

    @property
    def blocked_s(self) -> float:
        """How long training has waited for it."""
        return self.begun_in_s + (0.0 if self.snapshot is None else self.snapshot.waited_s)

    @property
    def step(self) -> int:
        """Steps that it is after."""
        return self.head.progress.step


class Saver:
    """Saves checkpoints of a run; every method but `news` and `abandon` is called by all ranks together.

    Raises CheckpointError on every rank if any could not write; what was published before stays.
    """

    def __init__(
        self,
        store: CheckpointStore,
        trainer: Trainer,
        asynchronous: bool = False,
        retries: int = 0,
        local: LocalLevel | None = None,
    ) -> None:
        self.store, self.trainer = store, trainer
        self.asynchronous, self.local = asynchronous, local
        self._plan: CheckpointPlan | None = None
        self._snapshot: Snapshot | None = None
        self._under_way: _CheckpointInProgress | None = None
        self._thread = BackgroundThread("checkpoint", retries)
        self._news: list[CheckpointRecord] = []

    @property
    def step(self) -> int:
        """The step of the checkpoint that is under way; 0 if none is."""
        return 0 if self._under_way is None else self._under_way.step

    def prepare(self) -> CheckpointPlan:
        """Plan who writes what, and where saving is beside training take the memory for the copies."""
        if self._plan is None:
            self._plan = plan_of(named_tensors(self.trainer))
            if self.asynchronous or self.local is not None:
                self._snapshot = Snapshot(self._plan, self.trainer.device)
                self.trainer.call_before_change(self._snapshot.wait)
        return self._plan

    def save(self, progress: TrainingProgress, data: DataRecord, run_toml: str) -> Path:
        """Save a checkpoint after the one before it, if that is still under way. It is published once this returns, or
        where saving is asynchronous once `settle` does."""
        self.settle()
        began_s = time.monotonic()
        plan, partial = self.prepare(), self.store.partial_of(progress.step)
        save = _CheckpointInProgress(self._head(progress, data, run_toml), run_toml, began_s)
        self._together(partial, lambda: self._begin(progress.step), rank=0)
        tensors = named_tensors(self.trainer)
        if not self.asynchronous:
            stored = stored_tensors(self.trainer)
            self._together(
                partial,
                lambda: self._written(
                    partial, plan, lambda piece: s.read() if (s := stored.get(piece.name)) else piece.view(tensors)
                ),
            )
            self._together(partial, lambda: self._publish(save, plan), rank=0)
            save.begun_in_s = time.monotonic() - began_s
            self._took(save)
            return self.store.path_of(progress.step)
        self._begin_beside(save, plan, tensors, self._beside, partial)
        return self.store.path_of(progress.step)

    def save_locally(self, progress: TrainingProgress, data: DataRecord, run_toml: str) -> None:
        """Save a checkpoint on the hosts, after the one before it; it is published once `settle` returns."""
        assert self.local is not None
        self.settle()
        began_s = time.monotonic()
        save = _CheckpointInProgress(self._head(progress, data, run_toml), run_toml, began_s, local=True)
        partial = self.local.store.partial_of(progress.step)
        self._begin_beside(save, self.prepare(), named_tensors(self.trainer), self._locally, partial)

    def settle(self) -> None:
        """Wait until the checkpoint that is under way, if any, is published."""
        save, self._under_way = self._under_way, None
        self._thread.settle()
        if save is not None:
            self._took(save)

    def news(self) -> list[CheckpointRecord]:
        """What has been published since the last call."""
        if (save := self._under_way) is not None and save.ended_s is not None:
            self._took(save)
        told, self._news = self._news, []
        return told

    def abandon(self) -> None:
        """Leave what is under way: other ranks may be gone."""
        self._thread.abandon()

    def _head(self, progress: TrainingProgress, data: DataRecord, run_toml: str) -> CheckpointManifest:
        """The manifest without tensors, of what is so now: training changes its own states while they are written."""
        trainer = self.trainer
        return CheckpointManifest(
            progress=progress,
            model=dataclasses.asdict(trainer.model.spec),
            data=data,
            world_size=dist.get_world_size(),
            tensors={},
            files={RUN_FILE: sha256_of_text(run_toml)},
            loss_scale=None if trainer.scaler is None else copy.deepcopy(trainer.scaler.state),
            spikes=None if trainer.spikes is None else copy.deepcopy(trainer.spikes.state),
        )

    def _begin_beside(
        self,
        save: _CheckpointInProgress,
        plan: CheckpointPlan,
        tensors: dict[str, Tensor],
        job: Callable[[_CheckpointInProgress, CheckpointPlan, Snapshot], None],
        partial: Path,
    ) -> None:
        """Begin a job of the thread with a copy of the pieces of this rank, as they are now."""
        snapshot = save.snapshot = self._snapshot
        assert snapshot is not None
        snapshot.begin(tensors)
        self._under_way = save
        self._thread.begin(lambda: job(save, plan, snapshot), lambda error: as_checkpoint_error(error, partial))
        save.begun_in_s = time.monotonic() - save.began_s

    def _locally(self, save: _CheckpointInProgress, plan: CheckpointPlan, snapshot: Snapshot) -> None:
        """The job of the thread: make the copies, write them to this host, and have another keep them."""
        assert self.local is not None
        copies = snapshot.make()

        def rest(shards: Sequence[tuple[str, ShardRecord]]) -> list[str]:
            return [dataclasses.replace(save.head, tensors=tensor_records(plan, shards)).text(), save.run_toml]

        self.local.write(save.step, plan.pieces, copies.__getitem__, rest)
        save.ended_s = time.monotonic()

    def _beside(self, save: _CheckpointInProgress, plan: CheckpointPlan, snapshot: Snapshot) -> None:
        """The job of the thread: make the copies, write them, publish."""
        partial = self.store.partial_of(save.step)
        try:
            self._written(partial, plan, snapshot.make().__getitem__)
            if dist.get_rank() == 0:
                self._publish(save, plan)
        except Exception as error:
            tell_failure(partial, dist.get_rank(), str(as_checkpoint_error(error, partial)))
            if dist.get_rank() == 0:
                self.store.sweep()
            raise
        save.ended_s = time.monotonic()

    def _begin(self, step: int) -> None:
        self.store.begin(step, checkpoint_bytes(self.trainer))

    def _written(self, partial: Path, plan: CheckpointPlan, take: Callable[[TensorPiece], Tensor]) -> None:
        """Write the shards of this rank, again where the disk has failed. Raises OSError where it fails each time."""

        def write() -> None:
            _require_seen(partial)
            write_shards(partial, dist.get_rank(), plan.pieces, take)

        self._thread.tried(write, OSError)

    def _publish(self, save: _CheckpointInProgress, plan: CheckpointPlan) -> None:
        """Rank 0: give the checkpoint its name, once all ranks have written."""
        partial = self.store.partial_of(save.step)
        shards = gathered(partial, dist.get_world_size(), self._thread.abandoned.is_set)
        if shards is None:
            return
        records: dict[str, TensorRecord] = tensor_records(plan, shards)
        dataclasses.replace(save.head, tensors=records).write(partial)
        (partial / RUN_FILE).write_text(save.run_toml, encoding="utf-8")
        self.store.publish(save.step)

    def _together(self, partial: Path, act: Callable[[], None], rank: int | None = None) -> None:
        """Do something on every rank, or on one; raises on every rank what any has met."""
        try:
            together(act, lambda error: as_checkpoint_error(error, partial), rank)
        except CheckpointError:
            if dist.get_rank() == 0:
                self.store.sweep()
            raise

    def _took(self, save: _CheckpointInProgress) -> None:
        """Note what a checkpoint has cost, once."""
        if not save.told:
            took_s = (save.ended_s or time.monotonic()) - save.began_s
            n_bytes = checkpoint_bytes(self.trainer)
            self._news.append(CheckpointRecord(save.step, save.blocked_s, took_s, n_bytes, now(), save.local))
            save.told = True


def save(store: CheckpointStore, trainer: Trainer, progress: TrainingProgress, data: DataRecord, run_toml: str) -> Path:
    """Write and publish a checkpoint; every rank calls this, and it is there once this returns. Raises as `Saver`."""
    return Saver(store, trainer).save(progress, data, run_toml)


def as_checkpoint_error(error: Exception, partial: Path) -> CheckpointError:
    """What went wrong as a checkpoint was written, with the rank it went wrong on."""
    if isinstance(error, CheckpointError):
        return error
    doing = f"writing {partial} (earlier checkpoints are untouched)"
    if "No space left" in str(error):
        return CheckpointError(f"{doing}: the disk is full; free some of it, or choose another `out` ({error})")
    what = str(error) if isinstance(error, OSError | SafetensorError) else f"{type(error).__name__}: {error}"
    return CheckpointError(f"{doing}: rank {dist.get_rank()}: {what}")


def _require_seen(partial: Path) -> None:
    if not partial.is_dir():
        raise CheckpointError(
            f"{partial}, which rank 0 has made, cannot be seen from {socket.gethostname()}; `out` must be on a file "
            f"system that all machines of the run share"
        )
