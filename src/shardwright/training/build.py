"""Builds the model and the trainer of a run file on this rank."""

from collections.abc import Callable
from pathlib import Path

import torch

from shardwright.config import RunConfig
from shardwright.parallel.apply import Fill, apply
from shardwright.parallel.expert import ReadCounts, read_counts
from shardwright.parallel.initialise import materialise
from shardwright.parallel.model import ParallelModel
from shardwright.runs.folder import OFFLOADED
from shardwright.training.average import WeightAverage
from shardwright.training.checkpoint.manifest import BaseRecord
from shardwright.training.device import DTYPES
from shardwright.training.loss_scale import loss_scaler
from shardwright.training.offload.scratch import OffloadFile, scratch_file
from shardwright.training.offload.states import Where, states_location
from shardwright.training.optimizer import build_optimizer
from shardwright.training.resilience.spikes import SpikeGuard
from shardwright.training.step import Trainer


def build_model(
    config: RunConfig,
    device: torch.device,
    *,
    compiled: bool,
    fill: Fill = materialise,
    read: ReadCounts = read_counts,
) -> ParallelModel:
    """Return this rank's part of a run's model; every rank calls this. `compiled`, `fill`, `read`: as in `apply`."""
    compute = DTYPES[config.precision.compute]
    return apply(
        config.spec(),
        config.layout.layout(),
        device,
        seed=config.seed,
        param_dtype=torch.promote_types(compute, torch.float32),
        compute_dtype=compute,
        compile_blocks=compiled,
        cuda_graphs=compiled and config.precision.cuda_graphs,
        seq_len=config.batch.schedule.longest.seq_len,
        fp8=config.precision.fp8_settings,
        fill=fill,
        read=read,
    )


def build_trainer(
    config: RunConfig,
    model: ParallelModel,
    device: torch.device,
    *,
    compiled: bool,
    opened: Callable[[Path, int], OffloadFile] = scratch_file,
    spikes: SpikeGuard | None = None,
    base: BaseRecord | None = None,
) -> Trainer:
    """Return the trainer of a run. `compiled`: whether the loss is compiled. `opened`: as for
    `training.offload.states.Disk`. `spikes`, `base`: as for `Trainer`."""
    where = states_of(config, opened)
    return Trainer(
        model,
        build_optimizer(model.named_parameters, model.spec, config.optimizer, where, model.observers),
        device=device,
        seed=config.seed,
        clip_norm=config.optimizer.clip_norm,
        compile_loss=compiled,
        restart_positions=config.data.positions == "document",
        scaler=loss_scaler(config.precision),
        preference=config.preference,
        spikes=spikes,
        average=None if config.average.kind == "none" else WeightAverage(model, config.average, config.steps),
        base=base,
    )


def states_of(config: RunConfig, opened: Callable[[Path, int], OffloadFile] = scratch_file) -> Where:
    """Return the location of the optimizer states of a run."""
    folder = Path(config.offload_path or Path(config.out) / OFFLOADED)
    return states_location(config.layout.layout(), folder, opened=opened)
