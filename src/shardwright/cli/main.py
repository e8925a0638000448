"""The `shardwright` command: gathers the verbs, and imports the one that is asked for."""

import functools
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

import shardwright

VERBS = {
    "quickstart": "Train a small model on real text found on this machine, and show what it learned.",
    "data": "Turn text into token shards for training, and look at what is in them.",
    "plan": "Find the fastest layout that fits, without a GPU, and say why.",
    "train": "Train a model as a run file says.",
    "verify": "Prove that a layout computes what one process computes.",
    "schedule": "Show what a pipeline schedule does and what it costs, without running it.",
    "report": "Show what a run came to: its numbers, its curves, and one page to keep or to send.",
    "sample": "Generate text with the newest checkpoint of a run, on one process.",
}
"""Every verb, a module of this package, with the first line of its help, so that listing them imports none of them."""


@functools.cache
def _command(name: str) -> Any:
    """A module holds an `app` where its verb has verbs of its own, else a function of the verb's name."""
    module = import_module(f"shardwright.cli.{name}")
    alone = typer.Typer(add_completion=False, rich_markup_mode="rich")
    if isinstance(inner := getattr(module, "app", None), typer.Typer):
        alone.add_typer(inner, name=name)
        group: Any = typer.main.get_command(alone)
        return group.commands[name]
    alone.command(name)(getattr(module, name))
    return typer.main.get_command(alone)


class _Commands(dict[str, Any]):
    """Name of a verb -> its command. The module of a verb is imported by `commands[name]`; `get` and `items` give its
    line of help alone."""

    def __getitem__(self, name: str) -> Any:
        return _command(name) if name in self else super().__getitem__(name)


class Verbs(TyperGroup):
    """The verbs, listed from `VERBS` and imported when they are run."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands = _Commands({name: TyperCommand(name, help=line) for name, line in VERBS.items()})

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, _, rest = super().resolve_command(ctx, args)
        assert name is not None
        return name, self.commands[name], rest


app = typer.Typer(
    cls=Verbs,
    name="shardwright",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"shardwright {shardwright.__version__}")
        raise typer.Exit


@app.callback()
def shardwright_(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="print the version and leave")
    ] = False,
) -> None:
    """Train large language models across many accelerators.

    shardwright quickstart        see a small model learn, in minutes, on any laptop
    """


def main() -> None:
    """Entry point of the installed command."""
    app()
