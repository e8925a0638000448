"""What rank 0 prints and records of a run as it starts: what is trained, how, where and with which versions."""

import platform
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import torch

import shardwright
from shardwright.config import RunConfig, as_toml, flat
from shardwright.data.samples import Samples
from shardwright.report.words import batch_in_words, layout_in_words, learning_rate_in_words, model_in_words
from shardwright.run_folder import Started, now
from shardwright.units import format_count

_GIT_TIMEOUT_S = 5.0


def header(config: RunConfig, samples: Samples, device: torch.device, first_step: int) -> list[str]:
    """The lines that say what a run does, before its first step. `first_step`: steps that are done already."""
    batch, steps = config.batch, config.steps - first_step
    tokens_per_step = batch.global_batch * batch.seq_len
    epochs = steps * batch.global_batch / len(samples)
    taken = f"{steps:,}" if not first_step else f"{steps:,}, from {first_step + 1:,} to {config.steps:,}"
    return [
        f"model   {model_in_words(config)}",
        f"layout  {layout_in_words(config.layout.layout())}; device {device_name(device)}, {config.precision.compute}",
        f"batch   {format_count(tokens_per_step)} tokens a step: {batch_in_words(config)}",
        f"steps   {taken}: {format_count(steps * tokens_per_step)} tokens, {epochs:.3g} epochs of the "
        f"{format_count(len(samples) * batch.seq_len)} tokens in {config.data.path}",
    ]


def started(config: RunConfig, device: torch.device, step: int, checkpoint: Path | None) -> Started:
    """The `run` record of this start."""
    layout = config.layout.layout()
    return Started(
        step=step,
        layout=layout_in_words(layout),
        keys=str(layout),
        lr_schedule=learning_rate_in_words(config),
        world_size=layout.world_size,
        host=platform.node(),
        device=device_name(device),
        torch=torch.__version__,
        shardwright=shardwright.__version__,
        git_commit=_git_commit(),
        checkpoint=None if checkpoint is None else str(checkpoint),
        time=now(),
    )


def device_name(device: torch.device) -> str:
    """`NVIDIA H200`, or `cpu`."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _git_commit() -> str | None:
    command = ["git", "rev-parse", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_GIT_TIMEOUT_S)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None


def changes_since(saved: Path, now_toml: str) -> list[str]:
    """The keys of a run that differ from those of the run file saved with the checkpoint it goes on from, as
    `steps 100 to 200`; none where that file is not there."""
    try:
        before = flat(tomllib.loads(saved.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return []
    after = flat(tomllib.loads(now_toml))
    keys = [key for key in (before | after) if before.get(key) != after.get(key) and key != "checkpoint.resume"]
    return [f"{key} {_said(before.get(key))} to {_said(after.get(key))}" for key in keys]


def _said(value: Any) -> str:
    return "unset" if value is None else as_toml(value)
