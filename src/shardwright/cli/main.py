"""The `shardwright` command: lists the verbs, and imports only the verb that is run."""

import functools
import inspect
import keyword
import os
import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from typing import Annotated, Any

import typer
from rich.markup import escape
from typer.core import TyperCommand, TyperGroup

import shardwright
from shardwright.system.console import LossyStream, discard_output
from shardwright.system.control_groups import brief_waiting
from shardwright.system.errors import FullError, InputError, system_limit
from shardwright.system.signals import interrupts, raise_postponed_interrupt

_USAGE_ERROR: Any = typer.BadParameter.__base__
"""The error that click raises for an unknown word or option or an invalid value; typer does not export it."""

VERBS = {
    "quickstart": "Train a small model on real text of this machine, and show its loss and a text that it writes.",
    "data": "Turn text into token shards for training, and show their contents.",
    "plan": "Find the fastest layout that fits, without a GPU, and explain the choice.",
    "explore": "Plan a run in the browser: move sliders, and see memory, time, schedule and messages at once.",
    "measure": "Measure this machine, so that plan knows its rates.",
    "train": "Train a model as a run file says.",
    "sweep": "Train a run file with every combination of some values, one run after another, and compare the results.",
    "launch": "Write the job file of a run for Slurm, Kubernetes, SkyPilot or Ray.",
    "verify": "Prove that a layout computes the same losses, gradients and parameters as one process.",
    "mup-check": "Check a parametrisation: do activations change as much in wide models as in narrow ones?",
    "dryrun": "Run the real training program as any rank of any world, without a GPU, data or memory for the weights.",
    "schedule": "Show the actions, bubble and memory of a pipeline schedule, without running it.",
    "watch": "Show a run while it trains: loss, speed, memory, ranks, checkpoints and events.",
    "report": "Show the results of a run: its numbers, its curves, and one HTML page.",
    "generate": "Continue prompts with a run or a folder of transformers, on any layout.",
    "score": "Compute the log-probability of each text, or of each answer given its prompt, on any layout.",
    "eval": "Measure the perplexity of a run on its validation data, or of any model on prepared data.",
    "import": "Write the weights of a Hugging Face model as a folder that runs start with.",
    "export": "Write weights as a folder that transformers loads with AutoModelForCausalLM.from_pretrained.",
    "merge": "Write the weighted mean of the weights of several checkpoints of one model.",
    "convert": "Write a training checkpoint, weights and AdamW's states, in the format of another system.",
}
"""Every verb, a module of this package, and the first line of its help, so that listing verbs imports no module."""


OF_TWO_WORDS = (
    *("plan diff", "plan serve", "plan evaluate-serving", "plan rl", "plan evaluate-rl"),
    *("plan calibrate", "plan explain-log"),
)
"""Verbs of two words that have their own options and whose first word is also a verb. In the name of the module, an
underscore joins the words."""

RENAMED = {"sample": "generate"}
"""Old names of verbs -> current names."""


@functools.cache
def _command(name: str) -> Any:
    """Return the command of a verb. Its module contains an `app` if the verb has subcommands, otherwise a function with
    the verb's name. A name that is a Python keyword has a trailing underscore."""
    python = f"{name}_" if keyword.iskeyword(name) else re.sub("[ -]", "_", name)
    module = import_module(f"shardwright.cli.{python}")
    alone = typer.Typer(add_completion=False, rich_markup_mode="rich")
    if isinstance(inner := getattr(module, "app", None), typer.Typer):
        alone.add_typer(inner, name=name)
        group: Any = typer.main.get_command(alone)
        return _with_whole_paragraphs(group.commands[name])
    alone.command(name)(getattr(module, python))
    return _with_whole_paragraphs(typer.main.get_command(alone))


def _with_whole_paragraphs(command: Any) -> Any:
    """Return a command whose help is wrapped at the width of the screen, not at the docstring's line ends."""
    paragraphs = inspect.cleandoc(command.help or "").split("\n\n")
    command.help = escape("\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs))
    for parameter in command.params:
        if getattr(parameter, "help", None):
            parameter.help = escape(parameter.help)  # [model] is a section, not a style of the text
    for below in getattr(command, "commands", {}).values():
        _with_whole_paragraphs(below)
    return command


def _as_override(error: Any) -> str:
    """Return how to set an unknown option whose name is a key of the run file, otherwise an empty text."""
    takes_overrides = error.ctx is not None and any("--set" in parameter.opts for parameter in error.ctx.command.params)
    option = getattr(error, "option_name", None)
    if not takes_overrides or option is None:
        return ""
    from shardwright.config import RunConfig, keys_named
    from shardwright.system.synonyms import called_here

    name = option.removeprefix("--").replace("-", "_").split(".")[-1]
    keys = keys_named(name) or [key for key in called_here(name) or () if "=" not in key]
    sections = {key for key, field in RunConfig.model_fields.items() if hasattr(field.annotation, "model_fields")}
    options = [f"--set {key}{'.KEY' if key in sections else ''}=VALUE" for key in keys]
    return f"; a key of the run file is given as {' or '.join(options)}" if options else ""


class _Commands(dict[str, Any]):
    """Name of a verb -> its command. `commands[name]` imports the verb's module; `get` and `items` only give its line
    of help."""

    def __getitem__(self, name: str) -> Any:
        return _command(name) if name in self else super().__getitem__(name)


class Verbs(TyperGroup):
    """The group of verbs, listed from `VERBS` and imported when they are run."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands = _Commands({name: TyperCommand(name, help=line) for name, line in VERBS.items()})

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0] in RENAMED:
            ctx.fail(f"{args[0]} is called {RENAMED[args[0]]} now; see shardwright {RENAMED[args[0]]} --help")
        name: str | None
        try:
            if (two := " ".join(args[:2])) in OF_TWO_WORDS:
                name, command, rest = two, _command(two), args[2:]
            else:
                name, _, rest = super().resolve_command(ctx, args)
                assert name is not None
                command = self.commands[name]
            raise_postponed_interrupt()
            return name, command, rest
        except KeyboardInterrupt:  # a signal while the verb is imported
            LossyStream("stderr").write("interrupted\n")
            raise

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **more: Any,
    ) -> Any:
        """Run a verb. An unknown option or word is reported in the format of all errors (`common.fail`)."""
        run = functools.partial(super().main, args, prog_name, complete_var, False, windows_expand_args, **more)
        if not standalone_mode:
            return run()
        try:
            exit_code = run()
        except _USAGE_ERROR as error:
            if message := " ".join(error.format_message().split()).rstrip("."):  # empty if the help was shown
                from shardwright.cli.common import fail

                path = error.ctx.command_path if error.ctx else "shardwright"
                fail(InputError(f"{message[0].lower()}{message[1:]}{_as_override(error)} ({path} --help)"))
            sys.exit(InputError.exit_code)
        except typer.Abort:
            sys.exit(130)
        except (OSError, RuntimeError) as error:  # stdout on a full disk, or too few file descriptors
            if (limit := system_limit(error)) is None:
                raise
            from shardwright.cli.common import fail

            fail(FullError(limit))
            with suppress(OSError):
                discard_output(sys.stdout.fileno())
            sys.exit(FullError.exit_code)
        sys.exit(exit_code or 0)


app = typer.Typer(
    cls=Verbs,
    name="shardwright",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(requested: bool) -> None:
    if requested:
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
    os.environ.update(brief_waiting())  # this process computes too, while ranks need the cores
    with interrupts(last=True):  # while modules are imported too
        app()
