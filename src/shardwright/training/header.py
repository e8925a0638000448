"""The lines and the record of a run's start on rank 0: model, layout, data, device and versions."""

import platform
import subprocess
from pathlib import Path

import torch

from shardwright.config import RunConfig
from shardwright.config.batch import BatchStage
from shardwright.data.mixture import MixtureOrder
from shardwright.data.order import LARGEST_N
from shardwright.report.words import batch_in_words, layout_in_words, learning_rate_in_words, model_in_words
from shardwright.runs.folder import now
from shardwright.runs.records import StartRecord
from shardwright.system.units import format_count, percent
from shardwright.system.version import PACKAGE_VERSION
from shardwright.training.device import attention_kernels
from shardwright.training.sources import Sources

_GIT_TIMEOUT_S = 5.0


def header(
    config: RunConfig, sources: Sources, order: MixtureOrder, device: torch.device, first_step: int, first_sample: int
) -> list[str]:
    """Return the lines that describe a run before its first step. `first_step`, `first_sample`: completed steps and
    samples."""
    schedule, steps = config.batch.schedule, config.steps - first_step
    tokens = schedule.tokens(config.steps) - schedule.tokens(first_step)
    lines = _sources(config, sources, order, first_sample, first_sample + schedule.samples(first_step, config.steps))
    taken = f"{steps:,}" if not first_step else f"{steps:,}, from {first_step + 1:,} to {config.steps:,}"
    layout = config.layout.layout()
    recompute = f"; recompute {layout.recompute}" if layout.recomputes else ""
    kernels = attention_kernels(config, device)
    computed = config.precision.in_words + (f", attention {kernels}" if kernels else "")
    return [
        f"model   {model_in_words(config)}",
        f"layout  {layout_in_words(layout)}{recompute}; device {device_name(device)}, {computed}",
        f"update  {config.optimizer.name}, learning rate {config.optimizer.lr:g}: {learning_rate_in_words(config)}",
        *(
            f"batch   {_begins(stage)}{format_count(stage.tokens)} tokens a step: {words}"
            for stage, words in batch_in_words(config)
        ),
        f"steps   {taken}: {format_count(tokens)} tokens{'' if sources.mixed else f', {lines[0]}'}",
        *(lines if sources.mixed else []),
        *(f"note    {remark}" for remark in sources.remarks),
    ]


def _begins(stage: BatchStage) -> str:
    return f"after step {stage.from_step:,}: " if stage.from_step else ""


def _sources(
    config: RunConfig, sources: Sources, order: MixtureOrder, first_sample: int, last_sample: int
) -> list[str]:
    """Return the number of epochs of each source in the remaining steps, and for a mixture its shares in each stage."""
    before, after = order.epochs(first_sample), order.epochs(last_sample)
    sizes = [format_count(size * sources.train.seq_len) for size in order.sizes]
    shares = [
        ", then ".join(
            f"{percent(stage.weights[k] / sum(stage.weights))}"
            + (f" after step {stage.from_step:,}" if stage.from_step else "")
            for stage in order.stages
        )
        for k in range(len(order.sizes))
    ]
    return [
        (f"source  {name}: {share}; " if sources.mixed else "")
        + f"{now - then:.3g} epochs of the {size} tokens {'' if source.published == LARGEST_N else 'published so far '}"
        + f"in {folder}"
        for name, share, then, now, size, folder, source in zip(
            sources.names, shares, before, after, sizes, sources.folders, order.orders, strict=True
        )
    ]


def started(config: RunConfig, device: torch.device, step: int, checkpoint: Path | None) -> StartRecord:
    """Return the `run` record of this start."""
    layout = config.layout.layout()
    return StartRecord(
        step=step,
        layout=layout_in_words(layout),
        keys=str(layout),
        lr_schedule=learning_rate_in_words(config),
        world_size=layout.world_size,
        host=platform.node(),
        device=device_name(device),
        torch=torch.__version__,
        shardwright=PACKAGE_VERSION,
        git_commit=_git_commit(),
        checkpoint=None if checkpoint is None else str(checkpoint),
        time=now(),
    )


def device_name(device: torch.device) -> str:
    """Return the device's name, such as `NVIDIA H200`, or `cpu`."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _git_commit() -> str | None:
    command = ["git", "rev-parse", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_GIT_TIMEOUT_S)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None
