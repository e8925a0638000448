"""The frozen base weights of a run with adapters.

Checkpoints of the run contain the adapters alone, and name the base by folder and fingerprint. Several runs may have
one base folder.
"""

import os

import torch
import torch.distributed as dist

from shardwright.config import RunConfig
from shardwright.parallel.boxes import local_box
from shardwright.parallel.model import ParallelModel
from shardwright.parallel.objects import gathered
from shardwright.system.errors import CheckpointError, InputError
from shardwright.training.checkpoint.manifest import BaseRecord
from shardwright.training.checkpoint.state import raise_first
from shardwright.training.weights import fill, fingerprint, frozen_names, open_weights


def base_record(config: RunConfig) -> BaseRecord | None:
    """Return the base of a run, or None without adapters. Every rank calls this; rank 0 reads the fingerprint.

    Raises CheckpointError on every rank if the weights cannot be read.
    """
    source, spec = config.init.weights, config.spec()
    if spec.lora is None or source is None:
        return None
    found, error = "", None
    try:
        found = fingerprint(open_weights(source), frozen_names(spec)) if dist.get_rank() == 0 else ""
    except InputError as caught:
        error = CheckpointError(*caught.problems)
    raise_first(error)
    return BaseRecord(os.path.abspath(source), gathered(found, str)[0])


@torch.no_grad()
def fill_base(model: ParallelModel, base: BaseRecord) -> None:
    """Fill this rank's frozen parameters, which no checkpoint of the run contains. Each rank reads only its own
    part."""
    frozen = [(n, p) for n, p in model.named_parameters.items() if n not in model.saved_parameters]
    fill(frozen, model.spec, open_weights(base.path), local_box)
    model.after_change()
