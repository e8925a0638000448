"""shardwright train: run a run file, with local workers if it needs several and no one has started them."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from shardwright.cli.common import AsJson, Overrides, console, print_json, say, verb
from shardwright.config import load
from shardwright.reference import keys


@verb
def train(
    run_file: Annotated[Path | None, typer.Argument(help="the run file, TOML; see examples/")] = None,
    overrides: Overrides = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="go on from the last good checkpoint of this run, as --set checkpoint.resume=auto does; from that of "
            "another run: --set checkpoint.resume=PATH",
        ),
    ] = False,
    list_keys: Annotated[
        bool, typer.Option("--keys", help="list every key a run file can have, with its default, and leave")
    ] = False,
    json: AsJson = False,
) -> None:
    """Train a model as a run file says.

    The run file names the model, the data, the batch and the layout: the number of ranks, and how the model and the
    data are partitioned over them. If the layout needs several ranks, they are started here as local processes; under
    torchrun or srun this process is one of them.

    shardwright train examples/debug.toml --set layout.dp_shard=2 --set steps=50

    Ctrl-C (or SIGTERM, SIGHUP, SIGQUIT) finishes the step, saves a checkpoint and leaves; --resume continues from it,
    on the same number of ranks or another.

    Exit codes: 0 trained, 75 stopped by a signal and saved, 2 something in the run file or the data cannot be used,
    3 the run failed, 130 interrupted and not saved.
    """
    if list_keys:
        _print_keys(json)
        return
    if run_file is None:
        raise typer.BadParameter("name a run file, such as examples/debug.toml", param_hint="RUN_FILE")
    from shardwright.training.start import start

    extra = ['checkpoint.resume="auto"'] if resume else []
    ended = start(load(run_file, [*(overrides or []), *extra]), quiet=json)
    if json and ended.summary is not None:
        print_json({**ended.summary, "stopped": ended.stopped})
    if ended.stopped:
        raise typer.Exit(os.EX_TEMPFAIL)


def _print_keys(json: bool) -> None:
    listed = [replace(key, description=key.description.replace("`", "")) for key in keys()]
    if json:
        print_json([vars(key) for key in listed])
        return
    for key in listed:
        console.print(f"[bold]{key.path}[/]", end=" ", soft_wrap=True)
        default = key.default if key.default == "required" else f"default: {key.default}"
        say(f"({key.type}; {default}): {key.description}")
