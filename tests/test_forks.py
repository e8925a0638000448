"""Proves that the server that ranks are forked from can be reached whatever the temporary folder is called, and begins
with the environment that it needs."""

import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from multiprocessing import util
from pathlib import Path

import pytest

from shardwright.system import control_groups, forks
from tests.marks import prove


def test_where_the_temporary_folder_has_a_long_name_the_socket_is_in_tmp(tmp_path: Path, monkeypatch):
    config = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    for folder in (tmp_path / "short", tmp_path / ("long" * 30)):
        folder.mkdir()
        monkeypatch.setitem(config, "tempdir", str(folder))
        there = Path(forks._folder_of_socket())
        if folder.name == "short":
            assert there == folder
            continue
        assert there.parent == Path("/tmp")
        assert there.is_dir()
        assert util.get_temp_dir() == str(there)
        assert len(f"{there}/listener-12345678") <= forks.LONGEST_ADDRESS
        shutil.rmtree(there)


HAS_A_FOLDER = (
    "import sys; from shardwright.system import forks; print(forks.temporary_folder(), flush=True); sys.stdin.read()"
)


def test_the_temporary_folder_of_a_killed_process_is_removed_by_the_next_one_and_that_of_a_live_one_is_not(tmp_path):
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    processes = []
    for _ in range(3):
        processes.append(
            subprocess.Popen(
                [sys.executable, "-c", HAS_A_FOLDER],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        )
        folder = Path(processes[-1].stdout.readline().strip())
        (folder / "gradients").write_text("large")
        if len(processes) == 1:
            processes[0].kill()
            processes[0].communicate()
            assert folder.is_dir()
    assert len(list(tmp_path.iterdir())) == 2
    for process in processes[1:]:
        process.communicate()  # which ends its stdin, and so the process
    assert list(tmp_path.iterdir()) == []


FORKS = "from shardwright.system import forks; process = forks.fork(abs, 1); process.join(); print(process.exitcode)"
SPREADS = "from shardwright.planner.search import spread; print(spread(abs, [-1, -2], 2))"


PRELOADS = """
from shardwright.system import forks
from of_the_script import exit_with_1_if_preloaded

forks.preload("of_the_script")
process = forks.fork(exit_with_1_if_preloaded)
process.join()
print(process.exitcode)
"""
OF_THE_SCRIPT = """
import os, sys

imported_by = os.getpid()

def exit_with_1_if_preloaded():
    sys.exit(imported_by == os.getppid())
"""


def test_the_server_imports_modules_from_the_folders_of_this_process(tmp_path: Path):
    (script := tmp_path / "script.py").write_text(PRELOADS)
    (tmp_path / "of_the_script.py").write_text(OF_THE_SCRIPT)
    (folder := tmp_path / "elsewhere").mkdir()
    done = subprocess.run([sys.executable, str(script)], cwd=folder, capture_output=True, text=True)
    assert done.stdout == "1\n", done.stderr


ENDS_ITS_GROUP = """
import os, signal, sys

signal.signal(signal.SIGTERM, lambda number, frame: print("asked", flush=True))
from shardwright.system import forks

forks.preload("ends_a_group")
process = forks.fork(abs, 1)
process.join()
print(process.exitcode)
"""


def test_a_signal_to_the_group_of_a_process_does_not_end_the_server_while_it_imports(tmp_path: Path):
    (script := tmp_path / "script.py").write_text(ENDS_ITS_GROUP)
    (tmp_path / "ends_a_group.py").write_text("import os, signal\nos.killpg(os.getpgid(os.getppid()), signal.SIGTERM)")
    command = [sys.executable, str(script)]
    done = subprocess.run(command, capture_output=True, text=True, start_new_session=True)
    assert done.stdout == "asked\n0\n", done.stderr


@pytest.mark.parametrize(("program", "printed"), [(FORKS, "0"), (SPREADS, "[1, 2]")])
def test_processes_import_no_module_of_the_current_folder(program: str, printed: str, tmp_path: Path):
    (script := tmp_path / "script.py").write_text(program)
    (folder := tmp_path / "strangers").mkdir()
    for name in ("signal", "threading", "numpy", "concurrent"):
        (folder / f"{name}.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'a').write(__name__)")
    done = subprocess.run([sys.executable, str(script)], cwd=folder, capture_output=True, text=True)
    assert done.stdout == f"{printed}\n", done.stderr
    assert not (tmp_path / "executed").exists()


@prove
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_verify_that_is_ended_by_a_signal_leaves_nothing_in_the_temporary_folder(number, tmp_path):
    command = [sys.executable, "-m", "shardwright", "verify", "examples/debug.toml", "--steps", "50"]
    environment = os.environ | {"TMPDIR": str(tmp_path), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path.parent / "inductor")}
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        while not list(tmp_path.rglob("gradient*")):
            assert process.poll() is None
            time.sleep(0.02)
        process.send_signal(number)
    until = time.monotonic() + 30
    while list(tmp_path.iterdir()):  # the server removes them, after the ranks have ended
        assert time.monotonic() < until, list(tmp_path.rglob("*"))
        time.sleep(0.02)


@pytest.mark.parametrize("name", ["a", "b" * 90])
def test_an_address_of_the_length_that_is_let_through_can_be_bound(name: str, monkeypatch):
    import socket
    import tempfile

    config = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    with tempfile.TemporaryDirectory(dir="/tmp") as top:
        folder = Path(top) / name
        folder = Path(str(folder)[: forks.LONGEST_ADDRESS - len("/listener-12345678")])
        folder.mkdir()
        monkeypatch.setitem(config, "tempdir", str(folder))
        assert forks._folder_of_socket() == str(folder)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(f"{folder}/listener-12345678")


@pytest.mark.parametrize(
    ("given", "seen"),
    [
        ({}, str(control_groups.SPINS)),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, None),
        ({"GOMP_SPINCOUNT": "7"}, "7"),
    ],
)
def test_openmp_threads_wait_as_the_user_says_or_briefly(given: dict[str, str], seen: str | None, monkeypatch):
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    before = dict(os.environ)
    with forks.undisturbed():
        assert os.environ.get("GOMP_SPINCOUNT") == seen
    assert dict(os.environ) == before
