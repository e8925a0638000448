"""Proves that the server that ranks are forked from can be reached whatever the temporary folder is called, and begins
with the environment that it needs."""

import multiprocessing
import os
import shutil
from multiprocessing import util
from pathlib import Path

import pytest

from shardwright import forks, openmp


def test_where_the_temporary_folder_has_a_long_name_the_socket_is_in_tmp(tmp_path: Path, monkeypatch):
    config = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    for folder in (tmp_path / "short", tmp_path / ("long" * 30)):
        folder.mkdir()
        monkeypatch.setitem(config, "tempdir", str(folder))
        there = Path(forks._temporary_folder())
        if folder.name == "short":
            assert there == folder
            continue
        assert there.parent == Path("/tmp")
        assert there.is_dir()
        assert util.get_temp_dir() == str(there)
        assert len(f"{there}/listener-12345678") <= forks.LONGEST_ADDRESS
        shutil.rmtree(there)


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
        assert forks._temporary_folder() == str(folder)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(f"{folder}/listener-12345678")


@pytest.mark.parametrize(
    ("given", "seen"),
    [
        ({}, str(openmp.SPINS)),
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
