"""shardwright train: run a run file, with local workers if it needs several ranks and no launcher started them."""

import os
from dataclasses import replace
from functools import partial
from pathlib import Path

import typer

from shardwright.cli.common import (
    AsJson,
    Overrides,
    argument,
    console,
    error_console,
    flag,
    option,
    print_json,
    print_text,
    progress,
    verb,
)
from shardwright.config import RunConfig, load
from shardwright.config.reference import keys
from shardwright.system.errors import InputError
from shardwright.system.units import GiB, format_bytes


@partial(verb, extends=True, hears_signals=True)
def train(
    run_file: Path | None = argument(None, "the run file, TOML; see examples/"),
    overrides: Overrides = None,
    resume: bool = flag(
        "continue from the last good checkpoint of this run, as --set checkpoint.resume=auto does; to continue "
        "from another run: --set checkpoint.resume=PATH"
    ),
    max_restarts: int = option(
        0,
        "after a rank was killed, failed or hung, start the ranks again from the newest whole checkpoint, at "
        "most this many times in all; for ranks that are started here",
        min=0,
    ),
    dryrun_first: bool = flag(
        "before the ranks start, run the fullest of them dry, and refuse a run that does not fit its memory"
    ),
    list_keys: bool = option(False, "list every key a run file can have, with its default, and leave", name="--keys"),
    json: AsJson = False,
) -> None:
    """Train a model as a run file says.

    The run file names the model, the data, the batch and the layout: the number of ranks, and how the model and the
    data are partitioned over them. If the layout needs several ranks, they are started here as local processes; under
    torchrun or srun this process is one of them.

    shardwright train examples/debug.toml --set layout.dp_shard=2 --set steps=50

    Ctrl-C (or SIGTERM, SIGHUP, SIGQUIT, SIGUSR1) finishes the step, saves a checkpoint and leaves; --resume continues
    from it, on the same number of ranks or another.

    Exit codes: 0 trained, 75 stopped by a signal and saved, 2 something in the run file or the data cannot be used,
    3 the run failed, 130 interrupted and not saved.
    """
    if list_keys:
        _print_keys(json)
        return
    if run_file is None:
        raise typer.BadParameter("name a run file, such as examples/debug.toml", param_hint="RUN_FILE")
    extra = ['checkpoint.resume="auto"'] if resume else []
    config = load(run_file, [*(overrides or []), *extra], started=True)
    from shardwright.training.start import start  # it imports torch, which takes longer than to refuse a run file

    if dryrun_first:
        _refuse_what_does_not_fit(config)
    ended = start(config, quiet=json, max_restarts=max_restarts)
    if json and ended.summary is not None:
        print_json({**ended.summary, "stopped": ended.stopped})
    if ended.stopped:
        raise typer.Exit(os.EX_TEMPFAIL)


def _refuse_what_does_not_fit(config: RunConfig) -> None:
    """Raise InputError if the run needs more memory than a rank has, with remedies, and under torchrun and srun, where
    every rank would do the dry run."""
    from shardwright.dry_run.run import dry_run, dry_run_settings, fullest_by_plan
    from shardwright.training.ranks import ProcessRank, pick_device, place_from_environment
    from shardwright.training.settle import memory_of

    if place_from_environment() is not None:
        raise InputError(
            "--dryrun-first goes with ranks that are started here; before torchrun or srun, run shardwright dryrun once"
        )
    device = pick_device(config.device, ProcessRank())
    memory_bytes = memory_of(device, config.layout.layout().world_size)
    if config.memory_gib is not None:
        memory_bytes = config.memory_gib * GiB
    how = dry_run_settings(memory_bytes, "gpu" if device.type == "cuda" else "cpu", steps=2, imbalance=1.0)
    with progress("running dry") as tell:
        result = dry_run(config, how, fullest_by_plan(config), tell=tell)
    needed = f"{format_bytes(result.needed_bytes(result.fullest))} of the {format_bytes(how.limit_bytes)}"
    if not result.fits:
        ways = [
            f"it fits with {remedy.change} ({format_bytes(remedy.needed_bytes)})" for remedy in result.remedies or ()
        ]
        raise InputError(
            f"rank {result.fullest.rank} needs {needed} that it may; " + ("; or ".join(ways) or "no change was found")
        )
    error_console.print(f"dry run: rank {result.fullest.rank} needs {needed} that it may")


def _print_keys(json: bool) -> None:
    listed = [replace(key, description=key.description.replace("`", "")) for key in keys()]
    if json:
        print_json([vars(key) for key in listed])
        return
    for key in listed:
        console.print(f"[bold]{key.path}[/]", end=" ", soft_wrap=True)
        default = key.default if key.default == "required" else f"default: {key.default}"
        print_text(f"({key.type}; {default}): {key.description}")
