"""Proves that `shardwright explore` starts where it is told to, or says why it cannot."""

import os
import signal
import socket
import subprocess
import sys
import time
import webbrowser
from pathlib import Path
from threading import Event

import pytest
from typer.testing import CliRunner, Result

from shardwright.cli.explore import _open_browser, _state_of_run
from shardwright.cli.main import app
from shardwright.explore.learn.site import MARKER
from shardwright.explore.server import ExplorerServer
from shardwright.explore.state import parse, query_of
from shardwright.system import signals
from tests.cli.plans import EXAMPLES


def explore(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["explore", "--no-browser", *map(str, arguments)], env={"COLUMNS": "300"})


def test_a_port_in_use_and_an_unknown_host_are_named():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        result = explore("--port", taken.getsockname()[1])
    assert result.exit_code == 2
    assert "address already in use; choose another --port, or 0 for any free one" in result.output
    for host in ("no-such-host.invalid", "203.0.113.77", "é..b"):
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


def test_documents_of_a_run_file_are_priced_and_keys_that_the_page_does_not_hold_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path = tmp_path / "run.toml"
    text = (
        "out = 'x'\nsteps = 1\n[data]\npath = '{}'\nattention = 'document'\n[batch]\nseq_len = 128\nglobal_batch = 8\n"
    )
    path.write_text(text.format(tmp_path / "none"))
    state = _state_of_run(path, "h100:1", None, 100.25)
    assert state.job.document_tokens == 100.25
    assert capsys.readouterr().err == ""
    refused = explore(path, "--cluster", "h100:1")
    assert refused.exit_code == 2
    assert "give the mean length of a document by --document-tokens" in refused.output
    assert "goes with RUN.toml" in explore("--document-tokens", 100).output
    path.write_text(text.format(tmp_path / "none") + "[optimizer]\nname = 'adamw-8bit'\nblock_size = 512\n")
    _state_of_run(path, "h100:1", None, 100.25)
    assert f"{path}: the page leaves out optimizer.block_size\n" in capsys.readouterr().err


def test_a_hardware_file_that_cannot_be_read_is_named(tmp_path: Path):
    broken = tmp_path / "broken.toml"
    broken.write_text("[clusters]\nx = 1")
    for file in (tmp_path / "none.toml", broken):
        result = explore("--hardware", file)
        assert result.exit_code == 2
        assert str(file) in result.output
        assert "Traceback" not in result.output


def test_the_pages_are_served_while_a_browser_of_the_terminal_runs(monkeypatch: pytest.MonkeyPatch):
    opened, ended = Event(), Event()

    def open_browser(where: str) -> bool:
        opened.set()
        return ended.wait(60)

    def serve_forever(server: ExplorerServer) -> None:
        assert opened.wait(60)
        assert not ended.is_set()
        raise KeyboardInterrupt

    monkeypatch.setattr(webbrowser, "open", open_browser)
    monkeypatch.setattr(ExplorerServer, "serve_forever", serve_forever)
    try:
        assert CliRunner().invoke(app, ["explore", "--port", "0"]).exit_code == 0
    finally:
        ended.set()


def test_ctrl_c_ends_it_normally_and_once(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(signals, "_AGAIN_S", 0.02)
    closed = []

    def close(server: ExplorerServer) -> None:
        for _ in range(10):
            time.sleep(0.01)
        close_server(server)
        closed.append(True)

    close_server = ExplorerServer.server_close
    monkeypatch.setattr(ExplorerServer, "server_close", close)
    monkeypatch.setattr(ExplorerServer, "serve_forever", lambda server: os.kill(os.getpid(), signal.SIGTERM))
    assert (explore("--port", 0).exit_code, closed) == (0, [True])


def test_a_machine_without_a_browser_is_told_the_address(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def fail(where: str) -> bool:
        raise webbrowser.Error("could not locate runnable browser")

    for way in (fail, lambda where: False):
        monkeypatch.setattr(webbrowser, "open", way)
        _open_browser("http://127.0.0.1:8200/")
        assert capsys.readouterr().err == "no browser was found; open http://127.0.0.1:8200/ in one\n"


def test_a_static_site_replaces_only_a_site(tmp_path: Path):
    file = tmp_path / "file"
    file.write_text("kept")
    for place, problem in ((file, "is a file and no folder"), (tmp_path, "other files, such as file")):
        result = explore("--static", place)
        assert result.exit_code == 2
        assert str(place) in result.output
        assert problem in result.output
        assert result.output.count("\n") == 1
    assert [each.name for each in tmp_path.iterdir()] == ["file"]
    assert file.read_text() == "kept"


def test_a_folder_with_the_names_of_a_site_is_replaced_only_if_a_site_is_in_it(tmp_path: Path):
    site, mine = tmp_path / "site", tmp_path / "mine"
    site.mkdir()
    mine.mkdir()
    (site / "plan-1").symlink_to(mine)
    result = explore("--static", site)
    assert (result.exit_code, "plan-1 is not of a site that" in result.output) == (2, True)
    (site / "index.html").write_text("<title>mine</title>")
    result = explore("--static", site)
    assert (result.exit_code, "index.html is not of a site that" in result.output) == (2, True)
    (site / "index.html").write_bytes(b"\xff")
    result = explore("--static", site)
    assert (result.exit_code, "index.html cannot be read: not UTF-8" in result.output) == (2, True)
    (site / "index.html").write_text(MARKER)
    result = explore("--static", site)
    assert (result.exit_code, "'plan-1' is a link out of this folder" in result.output) == (2, True)
    assert not [*mine.iterdir()]


def test_the_server_starts_without_torch():
    code = (
        "import sys, threading; from shardwright.explore.server import ExplorerServer\n"
        "from shardwright.explore.page import Explorer; from shardwright.cli.explore import serve_model\n"
        "with ExplorerServer(('127.0.0.1', 0), Explorer(), serve_model): Explorer().home('count=8&pp=2')\n"
        "assert not {'torch', 'matplotlib'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=120)
