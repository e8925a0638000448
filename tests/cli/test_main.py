"""Proves that the command tells a usage error as it tells every other, wraps its help once, and completes words."""

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from shardwright.cli.main import app


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["verify"],
            "error: invalid value for RUN_FILE: name a run file, such as examples/debug.toml, or draw settings",
        ),
        (["generate"], "error: missing argument 'model' ("),
        (["sample", "runs/x"], "error: sample is called generate now; see shardwright generate --help ("),
        (["planx"], "error: no such command 'planx'"),
        (["data", "nope"], "error: no such command 'nope' ("),
        (["verify", "run.toml", "--sett", "steps=1"], "error: no such option: --sett"),
        (
            ["verify", "run.toml", "--zero-pp-gather", "step"],
            "error: no such option: --zero-pp-gather; a key of the run file is given as "
            "--set layout.zero_pp_gather=VALUE (",
        ),
        (
            ["train", "run.toml", "--parallelism.tensor_parallel_degree=2"],
            "error: no such option: --parallelism.tensor_parallel_degree; a key of the run file is given as "
            "--set layout.tp=VALUE (",
        ),
        (
            ["verify", "run.toml", "--layout", "tp=2"],
            "error: no such option: --layout; a key of the run file is given as --set layout.KEY=VALUE (",
        ),
        (["verify", "run.toml", "--steps", "0"], "error: invalid value for '--steps'"),
        (["train"], "error: invalid value for RUN_FILE: name a run file"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_usage_error_is_one_line_and_names_the_help(arguments: list[str], said: str):
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith(said)
    assert line.endswith(" --help)")


def test_the_command_alone_shows_its_help():
    result = CliRunner().invoke(app, [])
    assert "Usage" in result.output
    assert "error:" not in result.output


def commands(command: Any) -> Iterator[Any]:
    yield command
    for name in getattr(command, "commands", {}):
        yield from commands(command.commands[name])


def test_a_paragraph_of_help_is_wrapped_by_the_screen_alone():
    for command in commands(typer.main.get_command(app)):
        assert not [text for text in (command.help or "").split("\n\n") if "\n" in text], command.name


@pytest.mark.parametrize(
    ("words", "offered"), [("shardwright pl", "plan"), ("shardwright plan --gl", "--global-batch")]
)
def test_the_shell_completes_verbs_and_options(words: str, offered: str):
    code = "import sys; sys.argv = ['shardwright']; from shardwright.cli.main import main; main()"
    asked = {"_SHARDWRIGHT_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    result = subprocess.run([sys.executable, "-c", code], env=os.environ | asked, capture_output=True, text=True)
    assert result.stdout.split() == [offered]
