"""What every verb shares: how errors leave, and how answers are printed for machines."""

import functools
import json
import sys
from collections.abc import Callable, Iterable
from typing import Any

import typer
from rich.console import Console

from shardwright import extensions
from shardwright.errors import InputError, ShardwrightError

console = Console(highlight=False)
error_console = Console(stderr=True, highlight=False, soft_wrap=True)


def fail(error: ShardwrightError) -> None:
    """Print an error the way every verb does: one `error:` line a problem, on stderr, no traceback."""
    problems = error.problems if isinstance(error, InputError) else [str(error)]
    for problem in problems:
        error_console.print("[bold red]error:[/] ", end="")
        error_console.print(problem, markup=False)


def verb(function: Callable[..., None]) -> Callable[..., None]:
    """Make a function a verb: a ShardwrightError becomes a message and its exit code, never a traceback."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> None:
        try:
            function(*args, **kwargs)
        except ShardwrightError as error:
            fail(error)
            raise typer.Exit(error.exit_code) from None
        except KeyboardInterrupt:
            error_console.print("interrupted")
            raise typer.Exit(130) from None

    return run


def load_extensions(names: Iterable[str] | None) -> None:
    """`--extension`: import what registers schedules or models of a user's own, paths from the working folder."""
    extensions.load(map(extensions.resolve, names or ()))


def print_json(answer: Any) -> None:
    """The answer of a verb under `--json`: one JSON document on stdout."""
    sys.stdout.write(json.dumps(answer, indent=2) + "\n")
