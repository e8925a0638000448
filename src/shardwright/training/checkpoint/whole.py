"""Loads the whole model of a checkpoint in one process, independent of the layout of the training run."""

from pathlib import Path

import torch

from shardwright.model.transformer import Transformer
from shardwright.runs.folder import CHECKPOINTS, published
from shardwright.system.errors import CheckpointError
from shardwright.training.weights import fill, weights_of_checkpoint


def newest_checkpoint(run_dir: Path) -> Path:
    """Return the newest checkpoint of a run. Raises CheckpointError if there is none."""
    saved = published(run_dir / CHECKPOINTS)
    if not saved:
        raise CheckpointError(
            f"{run_dir} has no checkpoint; train first: shardwright train RUN.toml --set out={run_dir}"
        )
    return saved[-1]


def restore(checkpoint: Path) -> Transformer:
    """Return the whole model of a checkpoint, on the CPU, in evaluation mode, in its training type.

    Raises CheckpointError if the checkpoint is missing or damaged.
    """
    weights = weights_of_checkpoint(checkpoint)
    with torch.device("meta"):
        model = Transformer(weights.spec).to(getattr(torch, weights.dtypes["embedding.weight"]))
    model = model.to_empty(device="cpu").eval()
    fill(model.named_parameters(), weights.spec, weights)
    return model
