"""The run file that is kept in a run's folder and in its checkpoints: its text, and the changes since; no torch."""

import math
from collections.abc import Collection
from pathlib import Path
from typing import Any

from shardwright.config import RunConfig, as_toml, flat, load_kept, resolved_toml
from shardwright.config.settle import needs_memory, with_recomputation
from shardwright.runs.folder import RUN_FILE
from shardwright.system.errors import CheckpointError, InputError, without_secrets
from shardwright.system.files import inside, parse_toml, read_text, reason
from shardwright.training.optimizer import learning_rate


def changes_since(folder: Path, now_toml: str, besides: Collection[str] = ()) -> list[str]:
    """Return the keys of a run that differ from the run file kept in the folder of a run or of a checkpoint, such as
    `steps 100 to 200`. Empty if that file does not exist. `besides`: keys that may differ."""
    saved = inside(folder, RUN_FILE, CheckpointError)
    try:
        before = flat(parse_toml(read_text(saved)))
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{saved} cannot be read: {reason(error)}") from None
    after = flat(parse_toml(now_toml))
    allowed = {"checkpoint.resume", *besides}
    keys = [key for key in (before | after) if before.get(key) != after.get(key) and key not in allowed]
    return [f"{key} {_in_toml(before.get(key))} to {_in_toml(after.get(key))}" for key in keys]


def rate_change(checkpoint: Path, config: RunConfig, step: int) -> str | None:
    """Describe the change of the learning rate after `step` steps if a run resumes with another schedule than in the
    run file saved with its checkpoint. None if the rate is unchanged, or if that file cannot be read."""
    try:
        before = load_kept(checkpoint)
    except (OSError, InputError):
        return None
    then, now = (
        learning_rate(min(step, run.steps - 1), run.steps, run.optimizer.lr, run.lr_schedule, run.clock)
        for run in (before, config)
    )
    return None if math.isclose(then, now) else f"learning rate of step {step + 1}: {now:.3g}, and not {then:.3g}"


def _in_toml(value: Any) -> str:
    return "unset" if value is None else as_toml(value)


def kept_run_file(config: RunConfig) -> str:
    """Return the resolved run file that is written to `out` and into checkpoints, with secrets in URLs masked.

    `--resume` is not kept in it: a user who trains from the file must request it again.
    """
    if config.checkpoint.resume == "auto":
        checkpoint = config.checkpoint.model_copy(update={"resume": "no"})
        config = config.model_copy(update={"checkpoint": checkpoint})
    return without_secrets(resolved_toml(config, absolute=True))


def changes_of_run(config: RunConfig) -> list[str]:
    """Return the keys of a run that differ from the run file kept in its folder `out`, except `out` itself, because a
    folder can be moved. With `layout.recompute = "auto"`, the choice of the kept run counts as equal."""
    out = Path(config.out)
    if needs_memory(config) and (out / RUN_FILE).is_file():
        config = with_recomputation(config, *load_kept(out).layout.recomputation)
    return changes_since(out, kept_run_file(config), ("out",))
