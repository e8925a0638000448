"""Proves that the command tells a usage error as it tells every other, wraps its help once, and completes words."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib.machinery import ExtensionFileLoader, ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from shardwright.cli.common import filled, verb
from shardwright.cli.main import OF_TWO_WORDS, app
from shardwright.system import signals
from shardwright.system.files import new_folder
from shardwright.system.signals import STOPPING
from tests.cli.imports import help_imports_nothing_heavy
from tests.marks import rest_prove


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["verify"],
            "error: invalid value for RUN_FILE: name a run file, such as examples/debug.toml (shardwright verify",
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


@pytest.mark.parametrize("number", STOPPING)
def test_a_signal_ends_a_verb_as_ctrl_c_does_and_nothing_is_left_of_what_it_wrote(tmp_path: Path, number: int):
    @verb
    def write() -> None:
        with new_folder(tmp_path / "out") as fresh:
            (fresh / "part").write_text("half of it")
            os.kill(os.getpid(), number)
            raise AssertionError("it goes on")

    before = signal.getsignal(number)
    with pytest.raises(typer.Exit) as ended:
        write()
    assert (ended.value.exit_code, list(tmp_path.iterdir()), signal.getsignal(number)) == (130, [], before)


SIGNAL_IN_AN_IMPORT = """
import os, sys
class Sends:
    def find_spec(self, name, path=None, target=None):
        if name == "shardwright.config":
            os.kill(os.getpid(), int(sys.argv.pop()))
sys.meta_path.insert(0, Sends())
from shardwright.cli.main import main
main()
"""


@pytest.mark.parametrize("number", rest_prove(STOPPING, signal.SIGTERM))
def test_a_signal_while_a_verb_is_imported_ends_it_in_one_word(number: int):
    command = [sys.executable, "-c", SIGNAL_IN_AN_IMPORT, "train", "no.toml", str(number)]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr.strip()) == (130, "", "interrupted")


def test_a_signal_while_c_code_imports_a_module_ends_the_verb_after_the_import(monkeypatch: pytest.MonkeyPatch):
    """PyTorch's C code imports numpy and ignores the error; half of numpy then fails in other imports."""

    class Extension(ExtensionFileLoader):
        def create_module(self, spec: ModuleSpec) -> ModuleType:
            os.kill(os.getpid(), signal.SIGTERM)
            return ModuleType("whole")

    monkeypatch.setattr(signals, "_POLL_S", 0.01)
    imported = []

    @verb
    def imports() -> None:
        imported.append(Extension("whole", "").create_module(ModuleSpec("whole", None)))
        while True:
            time.sleep(0.01)

    with pytest.raises(typer.Exit) as ended:
        imports()
    assert (ended.value.exit_code, len(imported)) == (130, 1)
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)


def test_an_interrupt_that_a_library_swallows_is_raised_again_but_not_in_the_cleanup(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(signals, "_AGAIN_S", 0.02)
    cleaned = []

    @verb
    def swallow() -> None:
        try:
            with suppress(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGTERM)
            while True:
                time.sleep(0.01)
        finally:
            for _ in range(10):
                time.sleep(0.01)
            cleaned.append(True)

    with pytest.raises(typer.Exit) as ended:
        swallow()
    assert (ended.value.exit_code, cleaned) == (130, [True])


@pytest.mark.parametrize("code", [0, 1, None, "a text"])
def test_a_verb_that_is_left_by_system_exit_has_failed(code: object, capsys: pytest.CaptureFixture[str]):
    @verb
    def leave() -> None:
        sys.exit(code)  # type: ignore[arg-type]

    with pytest.raises(typer.Exit) as ended:
        leave()
    assert ended.value.exit_code == 3
    assert f"error: the command was ended by SystemExit({code!r}) at {__file__}:" in capsys.readouterr().err


def test_a_tilde_that_the_shell_leaves_is_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    got = []

    @verb
    def take(out: Path, name: str) -> None:
        got.extend((out, name))

    take(out=Path("~/a"), name="~/b")
    assert got == [tmp_path / "a", "~/b"]


def test_help_imports_nothing_heavy():
    help_imports_nothing_heavy(["", "plan", *OF_TWO_WORDS, "measure", "launch", "explore"])


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


@dataclass(frozen=True)
class Asked:
    model: str
    steps: int = 3
    device: str = "auto"


def test_a_field_of_a_request_without_its_option_is_an_error():
    options = SimpleNamespace(model="debug", device="cpu", json=True)
    assert filled(Asked, options, steps=5) == Asked("debug", 5, "cpu")
    assert filled(Asked, options, ("steps",)) == Asked("debug", 3, "cpu")
    with pytest.raises(AssertionError, match=r"fields without an option \['steps'\], not \[\]"):
        filled(Asked, options)
    with pytest.raises(AssertionError, match=r"without an option \['steps'\], not \['device', 'steps'\]"):
        filled(Asked, options, ("steps", "device"))
