"""Publishing by rename: a file or folder is written under a temporary name beside its place and renamed when it is
complete, so that a reader sees a complete one or none. Also locks a folder for one process at a time."""

import contextlib
import csv
import fcntl
import io
import json
import os
import re
import shutil
import socket
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from shardwright.errors import NO_ROOM, InputError
from shardwright.units import MiB, format_bytes

LONGEST_TEXT = 16 * MiB
"""The longest file that is read whole as text: a run file, a table of hardware."""
DEEPEST = 32
"""How deep tables and lists of a TOML document may be nested."""
_MOST_DOTS = 1000
"""In a key of a TOML document, which could be no valid one by far."""
_STRING = re.compile(r"\"(?:[^\"\\]|\\.)*\"|'[^']*'")
# The folders this process is writing. The pid in a folder's name alone may be that of an earlier process.
_in_use: set[Path] = set()


def read_text(path: Path) -> str:
    """A file of UTF-8 text. Raises OSError, and ValueError with a reason for what is no such text or is longer than
    `LONGEST_TEXT`, as a device can be."""
    with path.open("rb") as file:
        content = file.read(LONGEST_TEXT + 1)
    if len(content) > LONGEST_TEXT:
        raise ValueError(f"longer than {format_bytes(LONGEST_TEXT)}")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 text (byte {error.start})") from None


def parse_toml(text: str) -> dict[str, Any]:
    """A TOML document, whose tables and lists are nested at most `DEEPEST` deep. Raises ValueError with a reason for
    what is none."""
    if any(_has_long_key(line) for line in text.splitlines()):
        raise ValueError("tables or lists are nested too deeply")
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        raise
    except RecursionError:
        raise ValueError("tables or lists are nested too deeply") from None
    except ValueError:
        raise ValueError(f"an integer has more than {sys.get_int_max_str_digits()} digits") from None
    level: list[Any] = [table]
    for _ in range(DEEPEST):
        inner = (value.values() if isinstance(value, dict) else value for value in level)
        level = [each for values in inner for each in values if isinstance(each, dict | list)]
    if level:  # dotted keys reach any depth without recursion
        raise ValueError("tables or lists are nested too deeply")
    return table


def _has_long_key(line: str) -> bool:
    """Whether a line of TOML has a dotted key of thousands of parts: tomllib takes time by the square of their number,
    30 s of CPU for 50,000."""
    if line.count(".") <= _MOST_DOTS:
        return False
    return any(part.count(".") > _MOST_DOTS for part in re.split("[=,{}]", _STRING.sub("", line)))


def parse_json(text: str | bytes) -> Any:
    """A JSON document. Raises ValueError with a reason for what is none."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def read_csv(path: Path) -> list[tuple[int, list[str]]]:
    """The rows of a CSV file, each with its line (the last one of a row that has several). Raises OSError, and
    ValueError with a reason for what is no such file."""
    text = read_text(path).removeprefix("\ufeff")  # spreadsheets begin a file with a byte order mark
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        return [(reader.line_num, cells) for cells in reader]
    except csv.Error as error:
        raise ValueError(f"not a CSV file: {error}") from None


def reason(error: OSError | ValueError) -> str:
    """Why a file cannot be read, in a few words."""
    return (isinstance(error, OSError) and error.strerror) or str(error)


def write_whole(path: Path, content: bytes) -> None:
    """Write a file, in place of what is there. Raises InputError if the place cannot be written."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh.write_bytes(content)
        os.replace(fresh, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            fresh.unlink(missing_ok=True)
        raise InputError(f"{path} cannot be written: {error.strerror}; choose another place") from None


@contextlib.contextmanager
def new_folder(
    out: Path,
    check: Callable[[Path], None] = lambda out: None,
    error: type[InputError] = InputError,
    no_room_hint: str = "",
) -> Iterator[Path]:
    """An empty folder beside `out`, `OUT.partial-<pid>-<host>`, that replaces `out` when the block ends and is deleted
    when the block raises.

    `check` raises if what is at `out` may not be replaced. It is called before the block and again before the rename.
    What dead processes of this machine left of `out` is cleared first. Raises `error` for a place that cannot be
    written and for a full disk, there with `no_room_hint` at the end.
    """
    out, owner = Path(os.path.abspath(out)), f"{os.getpid()}-{socket.gethostname()}"
    fresh = out.with_name(f"{out.name}.partial-{owner}")
    if fresh in _in_use:
        raise error(f"{out}: this process is already writing it")
    _in_use.add(fresh)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        _clear_leftovers(out)
        check(out)
        fresh.mkdir()
        yield fresh
        check(out)
        publish_folder(fresh, out, out.with_name(f"{out.name}.replaced-{owner}"))
    except OSError as cause:
        shutil.rmtree(fresh, ignore_errors=True)
        if cause.errno not in NO_ROOM:
            raise error(f"{out}: cannot be written: {cause.strerror or cause}") from cause
        free = format_bytes(shutil.disk_usage(out.parent).free)
        raise error(
            f"{out}: no room to write it ({cause.strerror}; {free} free now that what was written is gone again); "
            f"free some, or choose another --out{no_room_hint}"
        ) from cause
    finally:
        _in_use.discard(fresh)
        shutil.rmtree(fresh, ignore_errors=True)


def publish_folder(fresh: Path, final: Path, aside: Path) -> None:
    """Rename the complete folder `fresh` to `final` once all its files are on disk.

    What is at `final` is first renamed to `aside` and deleted last. A process killed in between leaves it there, for
    `clear_leftover`.
    """
    for path in (*fresh.iterdir(), fresh):
        _sync(path)
    replacing = final.exists()
    if replacing:
        final.rename(aside)
    try:
        fresh.rename(final)
    except OSError:
        if replacing:
            aside.rename(final)
        raise
    _sync(final.parent)
    if replacing:
        remove(aside)


def remove(path: Path) -> None:
    """Delete a folder with what is in it, or a file or link that stands in the place of one."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def clear_leftover(path: Path, replaced: Path | None = None) -> None:
    """Remove a folder that a killed process left; one that was renamed from `replaced` goes back if that is missing."""
    if replaced is not None and not replaced.exists():
        path.rename(replaced)
    else:
        shutil.rmtree(path, ignore_errors=True)


def _clear_leftovers(out: Path) -> None:
    name = re.compile(re.escape(out.name) + r"\.(partial|replaced)-(\d+)-" + re.escape(socket.gethostname()))
    for path in sorted(out.parent.iterdir()):
        match = name.fullmatch(path.name)
        if match is not None and not _runs(int(match[2])):
            clear_leftover(path, out if match[1] == "replaced" else None)


def _runs(pid: int) -> bool:
    """Whether another process has this pid."""
    if pid == os.getpid():
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


LOCK = ".lock"


def problem_of_owner(folder: Path) -> str | None:
    """What is wrong with starting a run in a folder that another process owns (`sole_owner`); None if none does."""
    try:
        with (folder / LOCK).open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _used_by(folder)
    except OSError:
        pass  # no folder, or no locks
    return None


def owner_runs(folder: Path) -> bool | None:
    """Whether the process that owned a folder last (`sole_owner`) still runs; None where it was not one of this machine
    or is not known. The lock itself is not touched: a run that starts just then would find it taken."""
    try:
        owner = re.fullmatch(r"process (\d{1,9}) on (\S+)\n", (folder / LOCK).read_text(errors="replace"))
    except OSError:
        return None
    if owner is None or owner[2] != socket.gethostname():
        return None
    return _runs(int(owner[1]))


def _used_by(folder: Path) -> str:
    owner = (folder / LOCK).read_text().strip()
    return (
        f"{folder} is in use by {owner or 'another process'}; wait for it to end, or name another folder with "
        f"--set out=..."
    )


@contextlib.contextmanager
def sole_owner(folder: Path) -> Iterator[None]:
    """Own a folder, which is made if need be, for the length of the block; the end of the process gives it up too.

    Raises InputError, naming the process, if another one owns it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / LOCK).open("a+")
    except OSError as error:
        raise InputError(f"{folder} cannot be written: {error.strerror}; name another with --set out=...") from None
    with lock as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(_used_by(folder)) from None
        except OSError:
            pass  # a file system without locks: nothing is lost that was there before
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        yield
