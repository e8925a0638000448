"""Proves that a file or folder is whole or not there, and that a folder has one owner at a time."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from shardwright.errors import InputError
from shardwright.files import new_folder, sole_owner, write_whole

SECOND_OWNER = """
import sys, pathlib
from shardwright.errors import InputError
from shardwright.files import sole_owner
try:
    with sole_owner(pathlib.Path(sys.argv[1])):
        print("owned")
except InputError as error:
    print(error)
"""


def second_owner(folder: Path) -> str:
    command = [sys.executable, "-c", SECOND_OWNER, str(folder)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_a_folder_has_one_owner_who_is_named_to_the_second(tmp_path: Path):
    with sole_owner(tmp_path / "run"):
        assert "is in use by process" in second_owner(tmp_path / "run")
    assert second_owner(tmp_path / "run").strip() == "owned"


def test_a_file_is_replaced_whole(tmp_path: Path):
    write_whole(tmp_path / "new" / "file", b"first")
    write_whole(tmp_path / "new" / "file", b"second")
    assert (tmp_path / "new" / "file").read_bytes() == b"second"
    assert len(list((tmp_path / "new").iterdir())) == 1


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot be written"):
        write_whole(tmp_path / "file" / "below", b"")


def write_folder(out: Path, text: str, error: Exception | None = None) -> None:
    with new_folder(out) as folder:
        (folder / "file").write_text(text)
        if error is not None:
            raise error


def test_a_folder_replaces_another_when_its_block_ends_and_never_when_the_block_fails(tmp_path: Path):
    out = tmp_path / "out"
    write_folder(out, "first")
    with pytest.raises(KeyError):
        write_folder(out, "half", KeyError())
    assert (out / "file").read_text() == "first"
    write_folder(out, "second")
    assert (out / "file").read_text() == "second"
    assert os.listdir(tmp_path) == ["out"]


def test_a_folder_that_finds_no_room_is_gone_and_the_error_says_how_much_there_is(tmp_path: Path):
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with pytest.raises(InputError, match=r"no room to write it \(.*free now .* choose another --out"):
        write_folder(tmp_path / "out", "half", full)
    assert os.listdir(tmp_path) == []
