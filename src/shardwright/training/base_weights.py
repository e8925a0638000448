"""The frozen base weights of a run with adapters.

Checkpoints of the run contain the adapters alone, and name the base by folder and fingerprint; if a run is the base,
by its checkpoint. Several runs may have one base folder.
"""

from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist

from shardwright.config import RunConfig
from shardwright.parallel.boxes import local_box
from shardwright.parallel.model import ParallelModel
from shardwright.parallel.objects import gathered
from shardwright.runs.folder import CHECKPOINTS, published, run_of_checkpoint
from shardwright.system.errors import CheckpointError, InputError
from shardwright.system.files import real_path
from shardwright.training.checkpoint.manifest import BaseRecord, read_manifest
from shardwright.training.checkpoint.state import raise_first
from shardwright.training.weights import fill, open_weights, record_of_base


def base_record(config: RunConfig) -> BaseRecord | None:
    """Return the base of a run, or None without adapters. Every rank calls this; rank 0 reads the fingerprint.

    Raises CheckpointError on every rank if the weights cannot be read.
    """
    source, spec = config.init.weights, config.spec()
    if spec.lora is None or source is None:
        return None
    identity, error = ("", ""), None
    try:
        if dist.get_rank() == 0:
            record = record_of_base(open_weights(_resumed(config) or source), spec)
            identity = record.path, record.fingerprint
    except InputError as caught:
        error = CheckpointError(*caught.problems)
    raise_first(error)
    return BaseRecord(*gathered(identity, tuple[str, str])[0])


def _resumed(config: RunConfig) -> str | None:
    """Return the base of the checkpoint that a run resumes from, if it is a checkpoint of the run `init.weights`, which
    may have newer ones by now."""
    resume = config.checkpoint.resume
    saved = published(Path(config.out) / CHECKPOINTS) if resume == "auto" else [Path(resume)]
    for path in reversed(saved if resume != "no" else []):
        with suppress(CheckpointError):
            base = read_manifest(path).base
            run = None if base is None else run_of_checkpoint(Path(base.path))
            same = run is not None and real_path(run) == real_path(config.init.weights or "")
            return base.path if base is not None and same else None
    return None


@torch.no_grad()
def fill_base(model: ParallelModel, base: BaseRecord) -> None:
    """Fill this rank's frozen parameters, which no checkpoint of the run contains. Each rank reads only its own
    part."""
    frozen = {n: p for n, p in model.named_parameters.items() if n not in model.saved_parameters}
    weights = open_weights(base.path)
    fill(frozen.items(), model.spec, weights, local_box)
    model.after_change()
