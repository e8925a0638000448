"""Proves that a file or folder is whole or not there, that nothing but a regular file is replaced or read, and that a
folder has one owner at a time."""

import errno
import fcntl
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from shardwright.runs.folder import LOCK, LOGS, METRICS, REFERENCE, misplaced_entries
from shardwright.system.errors import FullError, InputError, cleaning_up
from shardwright.system.files import (
    find_inside,
    inside,
    new_folder,
    open_regular,
    problem_of_place,
    read_lines,
    read_text,
    real_path,
    write_whole,
)
from shardwright.system.owner import sole_owner

SECOND_OWNER = """
import sys, pathlib
from shardwright.system.errors import InputError
from shardwright.system.owner import sole_owner
try:
    with sole_owner(pathlib.Path(sys.argv[1])):
        print("owned")
except InputError as error:
    print(error)
"""


KILLED_OWNER = """
import os, pathlib, sys, time
from shardwright.system.owner import sole_owner
with sole_owner(pathlib.Path(sys.argv[1])):
    if os.fork() == 0:
        time.sleep(2)
        os._exit(0)
    os.kill(os.getpid(), 9)
"""


def second_owner(folder: Path) -> str:
    command = [sys.executable, "-c", SECOND_OWNER, str(folder)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_a_folder_has_one_owner_who_is_named_to_the_second(tmp_path: Path):
    with sole_owner(tmp_path / "run"):
        assert "is in use by process" in second_owner(tmp_path / "run")
    assert second_owner(tmp_path / "run").strip() == "owned"


def test_a_folder_is_owned_once_the_processes_of_a_killed_owner_have_ended(tmp_path: Path):
    assert subprocess.run([sys.executable, "-c", KILLED_OWNER, str(tmp_path / "run")]).returncode == -9
    with pytest.raises(BlockingIOError), (tmp_path / "run" / ".lock").open() as file:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    with sole_owner(tmp_path / "run"):
        pass


def test_a_file_is_replaced_whole(tmp_path: Path):
    write_whole(tmp_path / "new" / "file", b"first")
    write_whole(tmp_path / "new" / "file", b"second")
    assert (tmp_path / "new" / "file").read_bytes() == b"second"
    assert len(list((tmp_path / "new").iterdir())) == 1


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot be written"):
        write_whole(tmp_path / "file" / "below", b"")


def null_device(folder: Path) -> Path:
    """A device like /dev/null, which a rename could replace; where only root may make one, /dev/null itself."""
    path = folder / "null"
    try:
        os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 3))
        path.write_bytes(b"")
    except OSError:
        return Path("/dev/null")
    return path


def test_a_device_and_a_pipe_are_written_to_and_stay_what_they_are(tmp_path: Path):
    device, pipe = null_device(tmp_path), tmp_path / "pipe"
    write_whole(device, b"page")
    assert device.is_char_device()
    os.mkfifo(pipe)
    with pytest.raises(InputError, match="no program reads this pipe"):
        write_whole(pipe, b"page")  # nobody reads it, and it does not wait for someone
    descriptor = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_whole(pipe, b"page")
    assert os.read(descriptor, 100) == b"page"
    os.close(descriptor)
    assert pipe.is_fifo()


def test_a_link_is_followed_within_its_folder_alone(tmp_path: Path):
    run, other = tmp_path / "run", tmp_path / "other"
    run.mkdir()
    other.write_text("mine")
    (run / "inside.html").symlink_to("report-1.html")
    (run / "outside.html").symlink_to("../other")
    write_whole(run / "inside.html", b"page")
    assert (run / "inside.html").is_symlink()
    assert (run / "report-1.html").read_bytes() == b"page"
    for path in (run / "outside.html", tmp_path / "run"):
        with pytest.raises(InputError, match=r"link out of its folder|that is a folder"):
            write_whole(path, b"page")
    assert other.read_text() == "mine"
    assert (run / "outside.html").is_symlink()
    (tmp_path / "linked").symlink_to("run")
    with pytest.raises(InputError, match="not replaced by a folder"):
        write_folder(tmp_path / "linked", "text")


def test_a_file_in_place_of_a_folder_above_is_named(tmp_path: Path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file" / "x", tmp_path / "file" / "below" / "x"):
        for write in (lambda path: write_whole(path, b"page"), lambda path: write_folder(path, "text")):
            with pytest.raises(InputError, match=f"{tmp_path / 'file'} is a file and no folder"):
                write(path)
    (tmp_path / "gone").symlink_to(tmp_path / "nowhere")
    with pytest.raises(InputError, match="gone is a file and no folder"):
        write_whole(tmp_path / "gone" / "x", b"page")


def all_lines(path: Path) -> list[str]:
    return list(read_lines(path))


def test_only_regular_files_are_read_and_lines_have_a_bound(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero"), tmp_path):
        for read in (open_regular, read_text, all_lines):
            with pytest.raises(OSError):
                read(path)
    (tmp_path / "lines").write_bytes(b"a\xe2\x80\xa8b\nc")
    assert all_lines(tmp_path / "lines") == ["a\u2028b"], "a line ends at a newline alone"
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(2**40)
    for read in (read_text, all_lines):
        with pytest.raises(OSError, match="longer than"):
            read(tmp_path / "sparse")
    (tmp_path / "marked").write_bytes(b"\xef\xbb\xbfa")
    assert read_text(tmp_path / "marked") == "a"


def test_a_name_that_leads_out_of_its_folder_is_refused(tmp_path: Path):
    folder = tmp_path / "models--a--b" / "snapshots" / "1"
    (folder / "below").mkdir(parents=True)
    (tmp_path / "secret").write_text("")
    (folder / "link").symlink_to(tmp_path / "secret")
    (folder / "up").symlink_to("..")
    for name in ("../x", "/etc/passwd", "link", "up/x", "a\0", "a\ud800", "", "below/../../x"):
        with pytest.raises(InputError, match=r"no name of a file in this folder|link out of this folder"):
            inside(folder, name)
    (folder.parent.parent / "blobs").mkdir()
    (folder.parent.parent / "blobs" / "sha").write_text("")
    (folder / "model.safetensors").symlink_to("../../blobs/sha")
    for name in ("model.safetensors", "below/x"):
        assert inside(folder, name) == folder / name


def test_a_file_that_may_be_missing_is_refused_if_it_is_a_link_out(tmp_path: Path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "secret").write_text("")
    assert find_inside(tmp_path / "folder", "name") is None
    (tmp_path / "folder" / "name").symlink_to(tmp_path / "secret")
    with pytest.raises(InputError, match="link out of this folder"):
        find_inside(tmp_path / "folder", "name")


def test_a_link_to_itself_is_a_path_like_every_other(tmp_path: Path):
    (tmp_path / "loop").symlink_to("loop")
    assert real_path(tmp_path / "loop").name == "loop"


def test_what_a_run_cannot_write_to_is_named_before_it_starts(tmp_path: Path):
    (tmp_path / LOCK).symlink_to("/etc/hostname")
    os.mkfifo(tmp_path / METRICS)
    os.mkfifo(tmp_path / REFERENCE)
    assert [each.split()[0] for each in misplaced_entries(tmp_path)] == [
        str(tmp_path / name) for name in (METRICS, REFERENCE, LOCK)
    ]
    (tmp_path / REFERENCE).unlink()
    (tmp_path / LOGS).mkdir()
    (tmp_path / LOGS / "rank-0.log").symlink_to("/etc/hostname")
    (tmp_path / LOGS / "rank-1.log").symlink_to("rank-2.log")
    assert "rank-0.log is a link to /etc/hostname" in misplaced_entries(tmp_path)[-1]
    assert len(misplaced_entries(tmp_path)) == 3


def test_clean_ups_are_all_done_and_hide_no_earlier_error():
    done: list[str] = []

    def fails(name: str) -> None:
        done.append(name)
        raise OSError(errno.ENOSPC, name)

    with pytest.raises(KeyError), cleaning_up(lambda: fails("a"), lambda: fails("b"), lambda: done.append("c")):
        raise KeyError
    with pytest.raises(OSError, match="a"), cleaning_up(lambda: fails("a"), lambda: fails("b")):
        pass
    with cleaning_up(lambda: done.append("d")):
        pass
    assert done == ["a", "b", "c", "a", "b", "d"]


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
    with pytest.raises(FullError, match=r"no room to write it \(.*free now .* choose another --out"):
        write_folder(tmp_path / "out", "half", full)
    assert os.listdir(tmp_path) == []


def test_a_pipe_is_opened_when_it_is_checked_and_its_reader_gets_the_content(tmp_path: Path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    assert problem_of_place(path) == f"{path}: no program reads this pipe; start one before, or choose another place"
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    assert problem_of_place(path) is None
    with pytest.raises(BlockingIOError):  # not the end of the file
        os.read(reader, 1)
    write_whole(path, b"whole")
    assert (os.read(reader, 9), os.read(reader, 9)) == (b"whole", b"")
    os.close(reader)
