"""Saving and loading the state of training: every tensor under a global name, whatever the layout that holds it."""

import dataclasses
import errno
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from shardloom.errors import CheckpointError, ShardloomError
from shardloom.model.spec import ModelSpec
from shardloom.train.checkpoint.manifest import Manifest, Progress, TensorRecord, read_manifest
from shardloom.train.checkpoint.storage import SafetensorsReader, SafetensorsWriter
from shardloom.train.checkpoint.store import CheckpointStore
from shardloom.train.optimizer import named_state
from shardloom.train.step import Trainer


def named_tensors(trainer: Trainer) -> dict[str, Tensor]:
    """All that a checkpoint holds: `model/NAME` and `optimizer/KIND/NAME`, the very tensors that are trained."""
    parameters = trainer.model.named_parameters
    state = named_state(trainer.optimizer, parameters.items())
    return {f"model/{k}": v for k, v in parameters.items()} | {f"optimizer/{k}": v for k, v in state.items()}


def checkpoint_bytes(tensors: dict[str, Tensor]) -> int:
    """Bytes of whole tensors, each once, over all ranks."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def save(store: CheckpointStore, trainer: Trainer, progress: Progress, fingerprint: str, run_toml: str) -> Path:
    """Write and publish a checkpoint; every rank calls this, and it is there once this returns.

    Raises CheckpointError on every rank if any rank could not write; what was published before stays.
    """
    tensors = named_tensors(trainer)
    partial = store.partial_of(progress.step)

    def publish(records: dict[str, TensorRecord]) -> None:
        manifest = Manifest(
            progress=progress,
            model=dataclasses.asdict(trainer.model.module.spec),
            data_fingerprint=fingerprint,
            world_size=dist.get_world_size(),
            tensors=records,
        )
        manifest.write(partial)
        (partial / "run.toml").write_text(run_toml, encoding="utf-8")
        store.publish(progress.step)

    writer = SafetensorsWriter(
        partial,
        dist.get_rank(),
        prepare=lambda: store.begin(progress.step, checkpoint_bytes(tensors)),
        publish=publish,
    )
    try:
        dcp.save(dict(tensors), storage_writer=writer)
    except CheckpointException as error:
        if dist.get_rank() == 0:
            store.sweep()
        raise _first_cause(error, f"writing {partial}") from None
    return store.path_of(progress.step)


def load(folder: Path, trainer: Trainer, fingerprint: str | None) -> Progress:
    """Read a checkpoint, of any layout, into the tensors of this one; every rank calls this.

    Raises CheckpointError on every rank if the checkpoint is damaged, is of another model, or if `fingerprint` is
    given and it was trained on other data. The tensors may then hold anything.
    """
    manifest = read_manifest(folder)
    tensors = named_tensors(trainer)
    if problems := _differences(manifest, tensors, trainer.model.module.spec):
        raise CheckpointError(*(f"{folder}: {problem}" for problem in problems))
    if fingerprint is not None and manifest.data_fingerprint != fingerprint:
        raise CheckpointError(
            f"{folder} was trained on other data (fingerprint {manifest.data_fingerprint[:12]}, data.path has "
            f"{fingerprint[:12]}), so it cannot go on with each sample once; give the data it was trained on"
        )
    read_into(folder, manifest, tensors)
    return manifest.progress


def read_into(folder: Path, manifest: Manifest, tensors: dict[str, Tensor]) -> None:
    """Fill tensors, sharded or whole, from a checkpoint that holds at least their names."""
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*assuming the intent is to load in a single process.*")
        try:
            dcp.load(dict(tensors), storage_reader=SafetensorsReader(folder, manifest))
        except CheckpointException as error:
            raise _first_cause(error, f"reading {folder}") from None


def _differences(manifest: Manifest, tensors: dict[str, Tensor], spec: ModelSpec) -> list[str]:
    """Why a checkpoint is not of this model and optimizer; a wrong type or shape is never converted."""
    ours = dataclasses.asdict(spec)
    found = [
        f"it is of another model: {key}={saved!r}, and this run has {ours.get(key)!r}"
        for key, saved in manifest.model.items()
        if key not in ("dropout", "init_std", "max_seq_len") and saved != ours.get(key)
    ]
    if found:
        return found
    for name in sorted(tensors.keys() | manifest.tensors.keys()):
        saved, here = manifest.tensors.get(name), tensors.get(name)
        if saved is None or here is None:
            found.append(f"{name} is {'not in it' if saved is None else 'not in this run'}")
            continue
        dtype = str(here.dtype).removeprefix("torch.")
        if (saved.shape, saved.dtype) != (tuple(here.shape), dtype):
            found.append(
                f"{name} is {saved.dtype} {list(saved.shape)}, and this run has {dtype} {list(here.shape)}"
            )
    return found if len(found) < 5 else [*found[:4], f"and {len(found) - 4} more tensors differ"]


def _first_cause(error: CheckpointException, doing: str) -> ShardloomError:
    """The error of the first rank that failed, out of PyTorch's wrapping."""
    rank, (cause, _) = min(error.failures.items())
    if isinstance(cause, ShardloomError):
        return cause
    if isinstance(cause, OSError) and cause.errno == errno.ENOSPC or "No space left" in str(cause):
        return CheckpointError(f"{doing}: the disk is full; earlier checkpoints are untouched ({cause})")
    return CheckpointError(f"{doing}: rank {rank}: {type(cause).__name__}: {cause}")
