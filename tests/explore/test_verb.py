"""Proves that `shardwright explore` starts where it is told to, or says why it cannot."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from shardwright.cli.explore import _state_of_run
from shardwright.cli.main import app
from shardwright.explore.state import parse, query_of
from tests.cli.imports import help_imports_nothing_heavy
from tests.cli.plans import EXAMPLES


def explore(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["explore", "--no-browser", *map(str, arguments)], env={"COLUMNS": "300"})


def test_help_imports_nothing_heavy():
    help_imports_nothing_heavy(["explore", "--help"])


def test_a_port_in_use_and_an_unknown_host_are_named():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        result = explore("--port", taken.getsockname()[1])
    assert result.exit_code == 2
    assert "address already in use; choose another --port, or 0 for any free one" in result.output
    for host in ("no-such-host.invalid", "203.0.113.77"):
        result = explore("--host", host, "--port", 0)
        assert result.exit_code == 2
        assert f"--host {host}" in result.output
        assert "Traceback" not in result.output
    assert explore("--port", 70000).exit_code == 2


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "out"),
        ("[layout]\ntp = 'x'", "layout.tp"),
        ("\x00", "run.toml"),
    ],
)
def test_a_broken_run_file_has_its_problems_listed(text: str, problem: str, tmp_path: Path):
    path = tmp_path / "run.toml"
    path.write_text(text)
    result = explore(path)
    assert result.exit_code == 2
    assert problem in result.output
    assert "Traceback" not in result.output
    assert "--cluster h100:8 goes with RUN.toml" in explore("--cluster", "h100:8").output
    assert explore(tmp_path / "none.toml").exit_code == 2


def test_a_run_file_is_where_the_sliders_start():
    state = _state_of_run(EXAMPLES / "llama-3.1-8b.toml", "h100:32", None)
    assert (state.model, state.job.cluster.size) == ("llama-3.1-8b", 32)
    assert parse(query_of(state)).state == state


def test_the_server_starts_without_torch():
    code = (
        "import sys, threading; from shardwright.explore.server import ExplorerServer\n"
        "from shardwright.explore.page import Explorer; from shardwright.cli.explore import serve_model\n"
        "with ExplorerServer(('127.0.0.1', 0), Explorer(), serve_model): Explorer().home('count=8&pp=2')\n"
        "assert not {'torch', 'matplotlib'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=120)
