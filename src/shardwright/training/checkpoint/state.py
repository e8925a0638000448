"""The training state under global tensor names that do not depend on the layout, and loading it."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor

from shardwright.model.lora_sizes import LoraSpec
from shardwright.model.modules import parameter_of
from shardwright.model.saved import spec_as_json, with_defaults
from shardwright.parallel.objects import gathered
from shardwright.system.errors import CheckpointError, DamagedError, WorkerError
from shardwright.system.processes import formatted
from shardwright.training.average import AVERAGE
from shardwright.training.checkpoint.manifest import (
    CheckpointManifest,
    DataRecord,
    read_manifest,
)
from shardwright.training.checkpoint.storage import SafetensorsReader
from shardwright.training.offload.states import StoredTensor
from shardwright.training.optimizer import named_state, stored_state
from shardwright.training.sources import past_problems
from shardwright.training.step import Trainer
from shardwright.training.weights import adapter_differences

COMPRESSION = "compression/"
"""Name prefix of the state of compressed gradients."""


def named_tensors(trainer: Trainer) -> dict[str, Tensor]:
    """Return all tensors of a checkpoint: `model/NAME`, `optimizer/KIND/NAME`, for averages of the weights
    `average/SLOT/NAME` and, for compressed gradients, `compression/KIND/NAME`. They are the training tensors; tensors
    of `stored_tensors` are on the meta device."""
    parameters = trainer.model.saved_parameters
    state = named_state(trainer.optimizer, parameters.items())
    kept = trainer.model.compression_state
    tensors = {f"model/{k}": v for k, v in parameters.items()} | {f"optimizer/{k}": v for k, v in state.items()}
    averages = {} if trainer.average is None else trainer.average.tensors
    tensors |= {f"{AVERAGE}{k}": v for k, v in averages.items()}
    return tensors | {f"{COMPRESSION}{k}": v for k, v in kept.items()}


def stored_tensors(trainer: Trainer) -> dict[str, StoredTensor]:
    """Return this rank's shards of the `named_tensors` that are on a disk."""
    stored = stored_state(trainer.optimizer, trainer.model.named_parameters.items())
    return {f"optimizer/{name}": tensor for name, tensor in stored.items()}


def checkpoint_bytes(trainer: Trainer) -> int:
    """Size of a checkpoint in bytes: each whole tensor once, over all ranks. Assumes that all pipeline stages have
    the same number of bytes per parameter."""
    local_bytes = sum(tensor.numel() * tensor.element_size() for tensor in named_tensors(trainer).values())
    n_local = sum(parameter.numel() for parameter in trainer.model.saved_parameters.values())
    spec = trainer.model.spec
    return local_bytes * (spec.n_parameters if spec.lora is None else spec.n_trained_parameters) // max(n_local, 1)


def load(folder: Path, trainer: Trainer, data: DataRecord | None) -> CheckpointManifest:
    """Load a checkpoint of any layout into this run's tensors and return its manifest. Every rank calls this.

    Raises on every rank. DamagedError: the checkpoint changed after it was written. Another CheckpointError: it is of
    another model or seed or, if `data` (of the manifest) is given, of other samples. After an error the tensors are
    undefined.
    """
    tensors = named_tensors(trainer)
    refusal = manifest = None
    try:
        manifest = read_manifest(folder)
        if problems := _differences(manifest, tensors, trainer, data):
            refusal = CheckpointError(*(f"{folder}: {problem}" for problem in [*problems, _A_NEW_RUN]))
    except CheckpointError as error:
        refusal = error
    raise_first(refusal)
    assert manifest is not None
    read_into(folder, manifest, tensors, stored_tensors(trainer))
    trainer.model.after_change()
    if trainer.scaler is not None and manifest.loss_scale is not None:
        trainer.scaler.resume(manifest.loss_scale)
    if trainer.spikes is not None and manifest.spikes is not None:
        trainer.spikes.resume(manifest.spikes)
    return manifest


def raise_first(error: CheckpointError | WorkerError | None) -> None:
    """On every rank, raise the error of the first rank that has one. A rank that continued would hang in a
    collective."""
    own = None if error is None else (type(error).__name__, str(error).splitlines())
    everyone = gathered(own, tuple[str, list[str]] | None)
    if first := next((failure for failure in everyone if failure is not None), None):
        name, lines = first
        if error is not None and first == own:
            raise error
        if name == WorkerError.__name__:
            raise WorkerError("\n".join(lines))
        raise (DamagedError if name == DamagedError.__name__ else CheckpointError)(*lines)


def together(
    act: Callable[[], object], as_error: Callable[[Exception], CheckpointError], rank: int | None = None
) -> None:
    """Run `act` on every rank, or on one rank, and raise an error of any rank on every rank. `as_error` converts
    OSError and SafetensorError."""
    error = None
    try:
        if rank is None or rank == dist.get_rank():
            act()
    except CheckpointError as caught:
        error = caught
    except (OSError, SafetensorError) as caught:
        error = as_error(caught)
    raise_first(error)


def read_into(
    folder: Path,
    manifest: CheckpointManifest,
    tensors: dict[str, Tensor],
    stored: Mapping[str, StoredTensor] | None = None,
) -> None:
    """Fill tensors, sharded or whole, from a checkpoint that contains at least their names. `stored`: this rank's
    shards on a disk. Each rank plans its reads from the manifest alone. Raises CheckpointError on every rank."""
    refusal: CheckpointError | WorkerError | None = None
    try:
        with torch.no_grad():
            SafetensorsReader(folder, manifest, tensors, stored or {}).read()
    except CheckpointError as error:
        refusal = error
    except (OSError, SafetensorError) as error:
        refusal = CheckpointError(f"reading {folder}: rank {dist.get_rank()}: {error}")
    except Exception as error:  # a bug; the other ranks wait for this rank
        what = f"reading {folder}: rank {dist.get_rank()}: {type(error).__name__}: {error}"
        refusal = WorkerError(f"{what}\n\n{formatted(error)}")
    raise_first(refusal)


def files_needed(folder: Path, manifest: CheckpointManifest, trainer: Trainer) -> set[str]:
    """Return the files of a checkpoint that this rank reads to load it, or an empty set if it is of another model."""
    tensors = named_tensors(trainer)
    shapes = {name: record.shape for name, record in manifest.tensors.items()}
    if any(shapes.get(name) != tuple(tensor.shape) for name, tensor in tensors.items()):
        return set()
    return SafetensorsReader(folder, manifest, tensors, {}).files


def _words(average: dict[str, Any] | None) -> str:
    return ", ".join(f"average.{key}={value!r}" for key, value in (average or {"kind": "none"}).items())


def _differences(
    manifest: CheckpointManifest, tensors: dict[str, Tensor], trainer: Trainer, data: DataRecord | None
) -> list[str]:
    """Return the reasons why a run cannot continue from a checkpoint. Types and shapes are never converted."""
    ours, theirs = spec_as_json(trainer.model.spec), with_defaults(manifest.model)
    adapters = None if theirs["lora"] is None else LoraSpec(**theirs["lora"])
    if differing_adapters := adapter_differences(adapters, trainer.model.spec):
        return differing_adapters
    problems = [
        f"it is of another model: {key}={saved!r}, and this run has {ours.get(key)!r}"
        for key, saved in theirs.items()
        if key not in ("dropout", "init_std", "max_seq_len", "lora") and saved != ours.get(key)
    ]
    base, lora = trainer.base, trainer.model.spec.lora
    if adapters is not None and lora is not None and adapters.base != lora.base:
        problems.append(
            f"its adapters were trained with lora.base={adapters.base!r}, and this run has {lora.base!r}; set "
            f"lora.base={adapters.base!r}"
        )
    if manifest.base is not None and base is not None and manifest.base.fingerprint != base.fingerprint:
        problems.append(
            f"it has adapters for the weights in {manifest.base.path}, and init.weights={base.path!r} of this run has "
            f"other weights; give the weights that it was trained with"
        )
    if problems:
        return problems
    if manifest.progress.seed != trainer.seed:
        problems.append(
            f"it was trained with seed={manifest.progress.seed} and this run has seed={trainer.seed}, so "
            f"samples would repeat; set seed={manifest.progress.seed}"
        )
    if data is not None:
        problems += _other_samples(manifest, data)
    differing = []
    average = None if trainer.average is None else trainer.average.section.identity
    if manifest.average != average:
        problems.append(
            f"its average of the weights has {_words(manifest.average)}, and the average of this run has "
            f"{_words(average)}; give the section [average] that it was trained with"
        )
        return problems
    for name in sorted(tensors.keys() | manifest.tensors.keys()):
        saved, tensor = manifest.tensors.get(name), tensors.get(name)
        if tensor is None and parameter_of(name) in trainer.model.held_on:
            continue  # on another pipeline stage
        if saved is None or tensor is None:
            differing.append(f"{name} is {'not in it' if saved is None else 'not in this run'}")
            continue
        dtype = str(tensor.dtype).removeprefix("torch.")
        if (saved.shape, saved.dtype) != (tuple(tensor.shape), dtype):
            differing.append(
                f"{name} is {saved.dtype} {list(saved.shape)}, and this run has {dtype} {list(tensor.shape)}; "
                f"nothing is converted in loading, so give the model, precision and optimizer.state_dtype it was "
                f"trained with"
            )
    if len(differing) > 3:
        differing = [*differing[:2], f"and {len(differing) - 2} more tensors differ"]
    return problems + differing


def _other_samples(manifest: CheckpointManifest, data: DataRecord) -> list[str]:
    """Return the reasons why the samples of `data` differ from the samples that a checkpoint was trained on."""
    saved = manifest.data
    if saved is None:
        return ["it holds weights that were imported, and no run has trained them"]
    problems = [
        f"it was trained on samples of {key}={was!r}, and this run cuts them with {key}={now!r}, so it cannot continue "
        f"with each sample once; give the data and sizes it was trained with"
        for key, was, now in (
            ("seq_len", saved["seq_len"], data["seq_len"]),
            ("sequences", saved["sequences"], data["sequences"]),
            ("order", saved.get("order", "all"), data.get("order", "all")),
        )
        if was != now
    ]
    return problems + past_problems(saved["mixture"], data["mixture"], manifest.progress.step)


_A_NEW_RUN = (
    "only the same run continues from a checkpoint; a new run with these weights, and with other data, sequences or "
    "optimizer, takes --set init.weights=PATH, a new --set out=... and no --resume"
)
