"""The `shardloom` command: gathers the verbs."""

from typing import Annotated

import typer

import shardloom
from shardloom.cli import data
from shardloom.cli.quickstart import quickstart
from shardloom.cli.report import report
from shardloom.cli.sample import sample
from shardloom.cli.schedule import schedule
from shardloom.cli.train import train
from shardloom.cli.verify import verify

app = typer.Typer(
    name="shardloom",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(quickstart)
app.add_typer(data.app, name="data")
app.command()(train)
app.command()(verify)
app.command()(schedule)
app.command()(report)
app.command()(sample)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"shardloom {shardloom.__version__}")
        raise typer.Exit


@app.callback()
def shardloom_(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="print the version and leave")
    ] = False,
) -> None:
    """Train large language models across many accelerators.

    shardloom quickstart        see a small model learn, in minutes, on any laptop
    """


def main() -> None:
    """Entry point of the installed command."""
    app()
