"""Saving the training state, synchronously or in the background.

Synchronous: every rank writes its shards, rank 0 publishes the checkpoint, then training continues. Asynchronous:
training continues at once. A thread of each rank copies its shards to host memory and writes the copies; training waits
for the copying before it changes the tensors (`snapshot`). Rank 0's thread publishes when the records of all ranks have
arrived (CheckFreq, Mohan et al., FAST '21: separate snapshot and persist phases, at most one checkpoint in progress).

A thread makes the copy of the shards in host memory (`Snapshot`) while the next forward and backward passes read the
weights. Training waits for the copy before it changes any weight (DataStates-LLM, Maurya et al., HPDC '24: lazy
asynchronous multi-level checkpointing). The state of compressed gradients changes in a backward pass, so it is copied
at once."""

import copy
import dataclasses
import functools
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor

from shardwright.model.saved import spec_as_json
from shardwright.runs.folder import RUN_FILE, now
from shardwright.runs.records import CheckpointRecord
from shardwright.system.errors import CheckpointError, system_limit
from shardwright.training.checkpoint.background import BackgroundThread
from shardwright.training.checkpoint.local import LocalLevel
from shardwright.training.checkpoint.manifest import (
    CheckpointManifest,
    DataRecord,
    TrainingProgress,
    sha256_of_text,
)
from shardwright.training.checkpoint.parts import (
    PartReport,
    ShardRecords,
    all_records,
    confirmations,
    good_report,
)
from shardwright.training.checkpoint.plan import CheckpointPlan, TensorPiece, plan_of
from shardwright.training.checkpoint.shards import tensor_records, write_shards
from shardwright.training.checkpoint.state import COMPRESSION, checkpoint_bytes, named_tensors, stored_tensors, together
from shardwright.training.checkpoint.store import CheckpointStore
from shardwright.training.step import Trainer


class Snapshot:
    """A copy of a rank's pieces in host memory, which is reused for each checkpoint."""

    def __init__(self, plan: CheckpointPlan, device: torch.device) -> None:
        self._plan, self._device = plan, device
        self._host = {piece: _room(piece, pinned=device.type == "cuda") for piece in plan.pieces}
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._made = threading.Event()
        self._made.set()
        self._later: dict[TensorPiece, Tensor] = {}
        self._ready: Any = None
        self.waited_s = 0.0
        """Time that training has waited for `make` since `begin`, in seconds."""

    def begin(self, tensors: dict[str, Tensor]) -> None:
        """Register the tensors at their current values. Another thread must call `make` next, unconditionally."""
        views = {piece: piece.view(tensors) for piece in self._plan.pieces}
        self._later = {piece: view for piece, view in views.items() if not piece.name.startswith(COMPRESSION)}
        for piece in views.keys() - self._later.keys():
            self._host[piece].copy_(views[piece])
        if self._stream is not None:
            self._ready = torch.cuda.Event()
            self._ready.record(torch.cuda.current_stream(self._device))
        self.waited_s = 0.0
        self._made.clear()

    def make(self) -> Mapping[TensorPiece, Tensor]:
        """Copy the remaining tensors. Return the values at the time of `begin`."""
        try:
            with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
                if self._stream is not None:
                    self._stream.wait_event(self._ready)
                for piece, view in self._later.items():
                    self._host[piece].copy_(view, non_blocking=True)
                if self._stream is not None:
                    self._stream.synchronize()
            return self._host
        finally:
            self._later = {}
            self._made.set()

    def wait(self) -> None:
        """Wait until a pending `make` is done. Called before any tensor changes."""
        if not self._made.is_set():
            began_s = time.monotonic()
            self._made.wait()
            self.waited_s += time.monotonic() - began_s


def _room(piece: TensorPiece, pinned: bool) -> Tensor:
    return torch.zeros(piece.entry.shape, dtype=getattr(torch, piece.entry.dtype), pin_memory=pinned)


@dataclass
class _CheckpointInProgress:
    """A checkpoint that is being written. `ended_s`: time of publication on the monotonic clock. `begun_in_s`: how
    long training waited for the checkpoint, without its wait for `snapshot`, the background copy, if there is one."""

    head: CheckpointManifest
    run_toml: str
    began_s: float
    begun_in_s: float = 0.0
    snapshot: Snapshot | None = None
    ended_s: float | None = None
    reported: bool = False
    local: bool = False

    @property
    def blocked_s(self) -> float:
        """Time that training waited for this checkpoint, in seconds."""
        return self.begun_in_s + (0.0 if self.snapshot is None else self.snapshot.waited_s)

    @property
    def step(self) -> int:
        """Number of steps after which the checkpoint is saved."""
        return self.head.progress.step


class Saver:
    """Saves checkpoints of a run. All ranks call every method together, except `news` and `abandon`.

    Raises CheckpointError on every rank if any rank could not write. Checkpoints published before are kept.
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
        """The step of the checkpoint in progress, or 0."""
        return 0 if self._under_way is None else self._under_way.step

    def prepare(self) -> CheckpointPlan:
        """Plan which rank writes which pieces, and allocate the copies if saving is asynchronous or local."""
        if self._plan is None:
            self._plan = plan_of(named_tensors(self.trainer))
            if self.asynchronous or self.local is not None:
                self._snapshot = Snapshot(self._plan, self.trainer.device)
                self.trainer.call_before_change(self._snapshot.wait)
        return self._plan

    def save(self, progress: TrainingProgress, data: DataRecord, run_toml: str) -> Path:
        """Save a checkpoint, after waiting for the previous one. A synchronous save is published when this returns,
        an asynchronous one when `settle` returns."""
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
                    save.step, plan, lambda piece: s.read() if (s := stored.get(piece.name)) else piece.view(tensors)
                ),
            )
            self._together(partial, lambda: self._publish(save, plan), rank=0)
            save.begun_in_s = time.monotonic() - began_s
            self._took(save)
            return self.store.path_of(progress.step)
        self._begin_in_background(save, plan, tensors, self._in_background, partial)
        return self.store.path_of(progress.step)

    def save_locally(self, progress: TrainingProgress, data: DataRecord, run_toml: str) -> None:
        """Save a local checkpoint, after waiting for the previous checkpoint. It is published when `settle` returns."""
        assert self.local is not None
        self.settle()
        began_s = time.monotonic()
        save = _CheckpointInProgress(self._head(progress, data, run_toml), run_toml, began_s, local=True)
        partial = self.local.store.partial_of(progress.step)
        self._begin_in_background(save, self.prepare(), named_tensors(self.trainer), self._locally, partial)

    def settle(self) -> None:
        """Wait until the checkpoint in progress, if any, is published."""
        save, self._under_way = self._under_way, None
        self._thread.settle()
        if save is not None:
            self._took(save)

    def news(self) -> list[CheckpointRecord]:
        """Return the checkpoints published since the last call."""
        if (save := self._under_way) is not None and save.ended_s is not None:
            self._took(save)
        records, self._news = self._news, []
        return records

    def abandon(self) -> None:
        """Stop the checkpoint in progress without publishing it, because other ranks may be gone."""
        self._thread.abandon()

    def _head(self, progress: TrainingProgress, data: DataRecord, run_toml: str) -> CheckpointManifest:
        """Return the manifest without tensors. It copies the current states, which training changes during the
        write."""
        trainer = self.trainer
        return CheckpointManifest(
            progress=progress,
            model=spec_as_json(trainer.model.spec),
            data=data,
            world_size=dist.get_world_size(),
            tensors={},
            files={RUN_FILE: sha256_of_text(run_toml)},
            loss_scale=None if trainer.scaler is None else copy.deepcopy(trainer.scaler.state),
            spikes=None if trainer.spikes is None else copy.deepcopy(trainer.spikes.state),
            average=None if trainer.average is None else trainer.average.section.identity,
            base=trainer.base,
        )

    def _begin_in_background(
        self,
        save: _CheckpointInProgress,
        plan: CheckpointPlan,
        tensors: dict[str, Tensor],
        job: Callable[[_CheckpointInProgress, CheckpointPlan, Snapshot], None],
        partial: Path,
    ) -> None:
        """Start a background job on a copy of this rank's current pieces."""
        snapshot = save.snapshot = self._snapshot
        assert snapshot is not None
        snapshot.begin(tensors)
        self._under_way = save
        self._thread.begin(lambda: job(save, plan, snapshot), lambda error: as_checkpoint_error(error, partial))
        save.begun_in_s = time.monotonic() - save.began_s

    def _locally(self, save: _CheckpointInProgress, plan: CheckpointPlan, snapshot: Snapshot) -> None:
        """Background job: copy the pieces, write them on this host, and have another host keep a copy."""
        assert self.local is not None
        copies = snapshot.make()
        self.local.write(save.step, plan.pieces, copies.__getitem__, functools.partial(self._texts, save, plan))
        save.ended_s = time.monotonic()

    def _in_background(self, save: _CheckpointInProgress, plan: CheckpointPlan, snapshot: Snapshot) -> None:
        """Background job: copy the pieces, write them, publish the checkpoint."""
        partial = self.store.partial_of(save.step)
        try:
            self._written(save.step, plan, snapshot.make().__getitem__)
            if dist.get_rank() == 0:
                self._publish(save, plan)
        except Exception as error:
            with suppress(OSError):  # if this fails, too, rank 0 waits until it abandons the checkpoint
                report = PartReport(problem=str(as_checkpoint_error(error, partial)))
                self.store.confirm(save.step, dist.get_rank(), report.text())
            if dist.get_rank() == 0:
                self.store.sweep()
            raise
        save.ended_s = time.monotonic()

    def _begin(self, step: int) -> None:
        self.store.begin(step, checkpoint_bytes(self.trainer))

    def _written(self, step: int, plan: CheckpointPlan, take: Callable[[TensorPiece], Tensor]) -> None:
        """Write this rank's shards and confirm it, with retries on disk errors. Raises OSError if every attempt
        fails."""
        partial, rank = self.store.partial_of(step), dist.get_rank()

        def write() -> None:
            _require_seen(partial)
            self.store.confirm(step, rank, PartReport(write_shards(partial, rank, plan.pieces, take)).text())

        self._thread.tried(write, OSError)

    def _publish(self, save: _CheckpointInProgress, plan: CheckpointPlan) -> None:
        """Rank 0: publish the checkpoint once all ranks have written."""
        wait = self._thread.pauses(self.store.partial_of(save.step))
        reports = confirmations(self.store, save.step, dist.get_world_size(), wait, good_report)
        if reports is not None:
            self.store.complete(save.step, *self._texts(save, plan, all_records(reports)))

    def _texts(self, save: _CheckpointInProgress, plan: CheckpointPlan, shards: ShardRecords) -> list[str]:
        """Return the manifest and the run file of a checkpoint. `shards`: the records of the shards of all ranks."""
        records = tensor_records(plan.tensors, shards)
        return [dataclasses.replace(save.head, tensors=records).text(), save.run_toml]

    def _together(self, partial: Path, act: Callable[[], None], rank: int | None = None) -> None:
        """Run `act` on every rank, or on one rank. Raises an error of any rank on every rank."""
        try:
            together(act, lambda error: as_checkpoint_error(error, partial), rank)
        except CheckpointError:
            if dist.get_rank() == 0:
                self.store.sweep()
            raise

    def _took(self, save: _CheckpointInProgress) -> None:
        """Record the cost of a checkpoint, once."""
        if not save.reported:
            took_s = (save.ended_s or time.monotonic()) - save.began_s
            n_bytes = checkpoint_bytes(self.trainer)
            self._news.append(CheckpointRecord(save.step, save.blocked_s, took_s, n_bytes, now(), save.local))
            save.reported = True


def save(store: CheckpointStore, trainer: Trainer, progress: TrainingProgress, data: DataRecord, run_toml: str) -> Path:
    """Write a checkpoint, which is published on return; every rank calls this. Raises as `Saver`."""
    return Saver(store, trainer).save(progress, data, run_toml)


def as_checkpoint_error(error: Exception, partial: Path) -> CheckpointError:
    """Convert an error during the write of a checkpoint to a CheckpointError that names the rank."""
    if isinstance(error, CheckpointError):
        return error
    doing = f"writing {partial} (earlier checkpoints are untouched)"
    whole = str(error) if isinstance(error, OSError | SafetensorError) else f"{type(error).__name__}: {error}"
    what = system_limit(error) or whole
    return CheckpointError(f"{doing}: rank {dist.get_rank()}: {what}")


def _require_seen(partial: Path) -> None:
    if not partial.is_dir():
        raise CheckpointError(
            f"{partial}, which rank 0 has made, cannot be seen from {socket.gethostname()}; `out` must be on a file "
            f"system that all machines of the run share"
        )
