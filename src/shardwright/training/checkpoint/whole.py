"""The whole model of a checkpoint on one process, whatever the layout that trained it."""

from pathlib import Path

import torch

from shardwright.config import load as load_run_file
from shardwright.errors import CheckpointError
from shardwright.model.transformer import Transformer
from shardwright.run_folder import CHECKPOINTS, RUN_FILE, published
from shardwright.training.checkpoint.manifest import read_manifest
from shardwright.training.checkpoint.state import read_into


def newest_checkpoint(run_dir: Path) -> Path:
    """The newest checkpoint of a run. Raises CheckpointError if there is none."""
    saved = published(run_dir / CHECKPOINTS)
    if not saved:
        raise CheckpointError(
            f"{run_dir} has no checkpoint; train first: shardwright train RUN.toml --set out={run_dir}"
        )
    return saved[-1]


def restore(checkpoint: Path) -> Transformer:
    """The whole model of a checkpoint, on the CPU, in evaluation mode, in the type it was trained in.

    Raises CheckpointError for one that is not there or damaged.
    """
    manifest = read_manifest(checkpoint)
    with torch.device("meta"):
        model = Transformer(load_run_file(checkpoint / RUN_FILE).model.spec())
    dtype = manifest.tensors["model/embedding.weight"].dtype
    model = model.to(getattr(torch, dtype)).to_empty(device="cpu").eval()
    read_into(checkpoint, manifest, {f"model/{name}": p.data for name, p in model.named_parameters()})
    return model
