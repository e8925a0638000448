"""The lines and the record of a run's start on rank 0: model, layout, data, device and versions."""

import math
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

from shardwright.config import RunConfig, as_toml, flat, load_kept, resolved_toml
from shardwright.config.batch import BatchStage
from shardwright.data.mixture import MixtureOrder
from shardwright.report.words import batch_in_words, layout_in_words, learning_rate_in_words, model_in_words
from shardwright.run_folder import RUN_FILE, StartRecord, now
from shardwright.system.errors import CheckpointError, InputError, without_secrets
from shardwright.system.files import inside, parse_toml, read_text, reason
from shardwright.system.units import format_count, percent
from shardwright.system.version import PACKAGE_VERSION
from shardwright.training.device import attention_kernels
from shardwright.training.schedule import learning_rate
from shardwright.training.sources import Sources

_GIT_TIMEOUT_S = 5.0


def header(
    config: RunConfig, sources: Sources, order: MixtureOrder, device: torch.device, first_step: int, first_sample: int
) -> list[str]:
    """Return the lines that describe a run before its first step. `first_step`, `first_sample`: completed steps and
    samples."""
    schedule, steps = config.batch.schedule, config.steps - first_step
    tokens = schedule.tokens(config.steps) - schedule.tokens(first_step)
    told = _sources(config, sources, order, first_sample, first_sample + schedule.samples(first_step, config.steps))
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
        f"steps   {taken}: {format_count(tokens)} tokens{'' if sources.mixed else f', {told[0]}'}",
        *(told if sources.mixed else []),
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
        + f"{now - then:.3g} epochs of the {size} tokens in {folder}"
        for name, share, then, now, size, folder in zip(
            sources.names, shares, before, after, sizes, sources.folders, strict=True
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


def changes_since(checkpoint: Path, now_toml: str) -> list[str]:
    """Return the keys of a run that differ from the run file saved with the resumed checkpoint, such as `steps 100
    to 200`. Empty if that file does not exist."""
    saved = inside(checkpoint, RUN_FILE, CheckpointError)
    try:
        before = flat(parse_toml(read_text(saved)))
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{saved} cannot be read: {reason(error)}") from None
    after = flat(parse_toml(now_toml))
    keys = [key for key in (before | after) if before.get(key) != after.get(key) and key != "checkpoint.resume"]
    return [f"{key} {_said(before.get(key))} to {_said(after.get(key))}" for key in keys]


def rate_change(checkpoint: Path, config: RunConfig, step: int) -> str | None:
    """Describe the change of the learning rate after `step` steps if a run resumes with another schedule than in the
    run file saved with its checkpoint. None if the rate is unchanged, or if that file cannot be read."""
    try:
        before = load_kept(checkpoint)
    except (OSError, InputError):
        return None
    then, now = (
        learning_rate(min(step, each.steps - 1), each.steps, each.optimizer.lr, each.lr_schedule, each.clock)
        for each in (before, config)
    )
    return None if math.isclose(then, now) else f"learning rate of step {step + 1}: {now:.3g}, and not {then:.3g}"


def _said(value: Any) -> str:
    return "unset" if value is None else as_toml(value)


def kept_run_file(config: RunConfig) -> str:
    """Return the resolved run file that is written to `out` and into checkpoints, with secrets in URLs masked.

    `--resume` is not kept in it: a user who trains from the file must request it again.
    """
    if config.checkpoint.resume == "auto":
        checkpoint = config.checkpoint.model_copy(update={"resume": "no"})
        config = config.model_copy(update={"checkpoint": checkpoint})
    return without_secrets(resolved_toml(config, absolute=True))
