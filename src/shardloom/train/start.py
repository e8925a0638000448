"""What `shardloom train` does: check everything that can be checked without workers, then run or start them."""

import json
import os
from pathlib import Path
from typing import Any

from shardloom.config import RunConfig, resolved_toml
from shardloom.data.shards import open_split
from shardloom.errors import CheckpointError, InputError
from shardloom.train.checkpoint.store import CheckpointStore
from shardloom.train.launch import launch
from shardloom.train.ranks import Place, place_from_environment


def start(config: RunConfig, quiet: bool = False) -> dict[str, Any] | None:
    """Train as a configuration says; where several ranks are needed and none are set up, start them here.

    Returns what the run came to (steps, losses, where things are), or None on a rank other than the first. Raises
    InputError before anything is written if something given cannot be used.
    """
    place = place_from_environment()
    layout = config.layout.layout()
    layout.check_world(layout.world_size if place is None else place.world_size)
    _check(config)
    out = Path(config.out)
    run_file = out / "run.toml"
    if place is None or place.rank == 0:
        _write(run_file, resolved_toml(config))
    if place is None and layout.world_size > 1:
        launch(run_file, layout.world_size, out / "logs", quiet)
    else:
        from shardloom.train.loop import run

        run(config, place or Place(), quiet)
    return summary(out) if place is None or place.rank == 0 else None


def _check(config: RunConfig) -> None:
    """Raises InputError for data that does not fit the model, and for a folder that already holds a run."""
    problems: list[str] = []
    try:
        train = open_split(config.data.path, "train")
        train.manifest.check_vocabulary(config.model.spec().vocab_size)
        if config.evaluation.samples:
            open_split(config.data.path, "validation")
    except InputError as error:
        problems += error.problems
    out = Path(config.out)
    published = CheckpointStore(out / "checkpoints").published()
    if config.checkpoint.resume == "no" and (published or (out / "metrics.jsonl").exists()):
        problems.append(
            f"{out} already holds a run"
            + (f", saved up to {published[-1].name}" if published else "")
            + "; add --resume to go on with it, or name another folder with --set out=..."
        )
    elif config.checkpoint.resume not in ("no", "auto") and not Path(config.checkpoint.resume).is_dir():
        raise CheckpointError(
            f"checkpoint.resume={config.checkpoint.resume!r} is not a folder; give 'auto', 'no' or the path of a "
            f"checkpoint such as {out}/checkpoints/step-00000100"
        )
    if problems:
        raise InputError(*problems)


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(".tmp")
    fresh.write_text(text, encoding="utf-8")
    os.replace(fresh, path)


def summary(out: Path) -> dict[str, Any]:
    """What a run's folder says it came to."""
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    train = [r for r in records if r["kind"] == "train"]
    held_out = [r for r in records if r["kind"] == "evaluation"]
    published = CheckpointStore(out / "checkpoints").published()
    return {
        "out": str(out),
        "steps": train[-1]["step"] if train else 0,
        "loss": train[-1]["loss"] if train else None,
        "first_held_out_loss": held_out[0]["loss"] if held_out else None,
        "held_out_loss": held_out[-1]["loss"] if held_out else None,
        "checkpoint": str(published[-1]) if published else None,
    }
