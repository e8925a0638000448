"""Reading and writing of files that others may have made.

Reading is limited to regular files of a bounded size inside the folder that names them. Publishing is by rename: a file
or folder is written under a temporary name in the same directory and renamed when it is complete, so a reader sees a
complete file or none. `owner.py` locks a folder for one process.
"""

import contextlib
import csv
import errno
import io
import json
import math
import os
import re
import shutil
import socket
import stat
import sys
import tomllib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from shardwright.system.errors import NO_ROOM, FullError, InputError, system_limit
from shardwright.system.units import MiB, format_bytes

LONGEST_TEXT = 16 * MiB
"""Largest text file that is read whole, in bytes: a run file or a hardware table."""
LONGEST_TOKENIZER = 512 * MiB
"""Largest tokenizer.json that is read, in bytes. The largest published ones have 35 MB."""
LONGEST_LINE = 4 * MiB
"""Longest line of a record file, such as metrics.jsonl, in bytes."""
DEEPEST = 32
"""Maximum nesting depth of tables and lists in a TOML document."""
_MOST_DOTS = 1000
"""Maximum number of dots in a TOML key, far more than any valid key has."""
_STRING = re.compile(r"\"(?:[^\"\\]|\\.)*\"|'[^']*'")
# The folders that this process is writing. A pid in a folder's name may belong to an earlier process.
_in_use: set[Path] = set()
_AT_URL = re.compile(r"[A-Za-z][\w+.-]+:/")
"""The start of a URL, also after it became a path with one slash."""
_OF_RMTREE = 4
"""File descriptors that are kept to remove a folder in when there are no others."""
_pipes: dict[Path, int] = {}
"""Pipes that are open to be written to, and their file descriptors."""


def open_regular(path: Path) -> io.BufferedReader:
    """Open a regular file for reading. Raises OSError for a missing file and for any other file type, such as a pipe,
    which could block, or a device, which may have no end."""
    _require_regular(path, os.stat(path).st_mode)
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    file = open(descriptor, "rb")  # noqa: SIM115 - returned
    try:
        _require_regular(path, os.fstat(file.fileno()).st_mode)
    except OSError:
        file.close()
        raise
    return file


def _require_regular(path: Path, mode: int) -> None:
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "a device, a pipe or a socket, and no regular file", str(path))


def read_bytes(path: Path, most_bytes: int = LONGEST_TEXT) -> bytes:
    """Return the content of a regular file. Raises OSError as `open_regular` does, or if it is longer than
    `most_bytes`."""
    with open_regular(path) as file:
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise OSError(errno.E2BIG, f"longer than {format_bytes(most_bytes)}", str(path))
    return content


def read_text(path: Path) -> str:
    """Return the content of a UTF-8 text file without a byte order mark. Raises OSError as `read_bytes` does, and
    ValueError with the reason for a file that is not such text."""
    try:
        return read_bytes(path).decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 text (byte {error.start})") from None


def read_lines(path: Path) -> Iterator[str]:
    """Yield the complete lines of a record file. Raises OSError as `open_regular` and `complete_lines` do."""
    with open_regular(path) as file:
        for line in complete_lines(file, path):
            yield decoded(line)


def complete_lines(file: io.BufferedReader, path: Path, *, rest: bool = False) -> Iterator[bytes]:
    """Yield the lines of a file from its current position, with their newlines, and with `rest` the text after the last
    newline. Only a newline ends a line; JSON escapes newlines. Raises OSError for a line longer than `LONGEST_LINE`."""
    while (line := file.readline(LONGEST_LINE + 1)).endswith(b"\n"):
        yield line
    if len(line) > LONGEST_LINE:
        raise OSError(errno.E2BIG, f"a line is longer than {format_bytes(LONGEST_LINE)}", str(path))
    if rest and line:
        yield line


def decoded(line: bytes) -> str:
    """Return the text of a line without its newline."""
    return line.rstrip(b"\r\n").decode("utf-8", errors="replace")


def is_text(name: str) -> bool:
    """Return whether a string can be encoded as UTF-8. JSON may contain half of a surrogate pair, file names may
    not."""
    return not any("\ud800" <= character <= "\udfff" for character in name)


def real_path(path: str | Path) -> Path:
    """Return the absolute path without links. A link to itself stays as it is; `Path.resolve` raises RuntimeError."""
    return Path(os.path.realpath(path))


def inside(folder: Path, name: str, error: type[InputError] = InputError) -> Path:
    """Return the path of the file that a file in `folder` refers to as `name`.

    Raises `error` for a name that leads out of the folder: an absolute path, `..`, or a link to another folder. Links
    in a snapshot of the Hugging Face cache to the blobs of the same model are followed.
    """
    way_out = "only files of the folder itself are read; copy the file into it"
    parts = Path(name).parts
    if not parts or "\0" in name or not is_text(name) or Path(name).is_absolute() or ".." in parts:
        raise error(f"{folder}: {name!r} is no name of a file in this folder; {way_out}")
    root, target = real_path(folder), real_path(folder / name)
    roots = [root]
    if root.parent.name == "snapshots" and root.parent.parent.name.startswith("models--"):
        roots.append(root.parent.parent / "blobs")
    if not any(target.is_relative_to(top) for top in roots):
        raise error(f"{folder}: {name!r} is a link out of this folder, to {target}; {way_out}")
    return folder / name


def find_inside(folder: Path, name: str, error: type[InputError] = InputError) -> Path | None:
    """Return the path of the file `name` in `folder` as `inside` does, or None if there is no such file."""
    return inside(folder, name, error) if os.path.lexists(folder / name) else None


def parse_toml(text: str) -> dict[str, Any]:
    """Return a TOML document whose tables and lists are nested at most `DEEPEST` deep. Raises ValueError with the
    reason for an invalid document."""
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
        level = [value for values in inner for value in values if isinstance(value, dict | list)]
    if level:  # dotted keys reach any depth without recursion
        raise ValueError("tables or lists are nested too deeply")
    return table


def _has_long_key(line: str) -> bool:
    """Return whether a line of TOML has a dotted key of thousands of parts. The time of tomllib grows with the square
    of their number (30 s of CPU for 50,000)."""
    if line.count(".") <= _MOST_DOTS:
        return False
    return any(part.count(".") > _MOST_DOTS for part in re.split("[=,{}]", _STRING.sub("", line)))


def parse_json(text: str | bytes, finite: bool = False) -> Any:
    """Return a JSON document. `finite`: reject infinity and NaN, which Python reads although JSON does not have them.
    Raises ValueError with the reason for an invalid document."""
    text = text.removeprefix("\ufeff") if isinstance(text, str) else text.removeprefix(b"\xef\xbb\xbf")
    try:
        return json.loads(text, parse_constant=_refuse, parse_float=_finite) if finite else json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _refuse(number: str) -> None:
    raise ValueError(f"{number} is no number of JSON")


def _finite(number: str) -> float:
    value = float(number)
    if math.isinf(value):
        raise ValueError(f"{number} is too large for a number of 64 bits")
    return value


def read_csv(path: Path) -> list[tuple[int, list[str]]]:
    """Return the rows of a CSV file, each with its line number (the last line of a multi-line row). Raises OSError, and
    ValueError with the reason for an invalid file."""
    reader = csv.reader(io.StringIO(read_text(path), newline=""), strict=True)
    try:
        return [(reader.line_num, cells) for cells in reader]
    except csv.Error as error:
        raise ValueError(f"not a CSV file: {error}") from None


def reason(error: OSError | ValueError) -> str:
    """Return a short reason why a file cannot be read."""
    return (isinstance(error, OSError) and error.strerror) or str(error)


def url_problem(path: Path) -> str | None:
    """Return why a place to write cannot be used if it is a URL, which would be a folder `s3:` here; else None."""
    if _AT_URL.match(str(path)):
        return f"{path}: that is a URL, and files are written on this machine alone; name a path here, then copy it"
    return None


def problem_above(path: Path) -> str | None:
    """Return the problem of a path in a folder that is no folder, or of a URL, or None."""
    if (problem := url_problem(path)) is not None:
        return problem
    for parent in path.absolute().parents:
        if os.path.lexists(parent):
            if parent.is_dir():  # in this order: another rank may make the folder in between
                return None
            return f"{path} cannot be written: {parent} is a file and no folder; choose another place"
    return None


def suffix_problem(path: Path, *suffixes: str) -> str | None:
    """Return the problem of a file to write whose name has none of the suffixes; None if it has one."""
    if path.suffix.lower() in suffixes:
        return None
    return f"{path}: valid: a file named {' or '.join('*' + suffix for suffix in suffixes)}"


def problem_of_place(path: Path) -> str | None:
    """Return why `path` cannot be written, or None. A regular file is replaced; a character device, such as /dev/null,
    or a pipe is written to; a link is followed within its folder."""
    if (problem := problem_above(path)) is not None:
        return problem
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        mode = stat.S_IFREG  # absent, or a link to an absent file
    except OSError as error:
        return f"{path} cannot be written: {error.strerror}; choose another place"
    if stat.S_ISDIR(mode):
        return f"{path}: that is a folder; name a file in it"
    if stat.S_ISFIFO(mode):
        return _problem_of_pipe(path)
    if stat.S_ISCHR(mode):
        return None
    if not stat.S_ISREG(mode):
        return f"{path}: that is a disk or a socket; name a file"
    target = real_path(path)
    if path.is_symlink() and not target.is_relative_to(real_path(path.parent)):
        return f"{path}: that is a link out of its folder, to {target}, and is not followed; name {target} itself"
    return None


def _problem_of_pipe(path: Path) -> str | None:
    """Open a pipe for `write_whole`, and return why that is not possible, or None. The pipe stays open, because its
    reader would take closing it for the end of the file."""
    if path not in _pipes:
        try:
            _pipes[path] = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            if error.errno == errno.ENXIO:
                return f"{path}: no program reads this pipe; start one before, or choose another place"
            return f"{path} cannot be written: {error.strerror}; choose another place"
    return None


def write_whole(path: Path, content: bytes | Iterable[bytes], required: bool = True, durable: bool = False) -> None:
    """Write a file, from one or several parts, and replace an existing regular file. Raises InputError if the path
    cannot be written. On a full disk the existing file stays, and FullError is raised if the file is `required`.
    `durable`: return when file and folder are on disk."""
    parts = [content] if isinstance(content, bytes) else content
    if (problem := problem_of_place(path)) is not None:
        raise InputError(problem)
    special = path.exists() and not path.is_file()
    if path.is_symlink() and not special:
        path = real_path(path)
    fresh = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        if special:
            _write_through(path, parts)
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh.unlink(missing_ok=True)
        with fresh.open("xb") as file:
            file.writelines(parts)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(fresh, path)
        if durable:
            sync(path.parent)
    except OSError as error:
        if error.errno in NO_ROOM:
            if required:
                raise FullError(system_limit(OSError(error.errno, error.strerror, str(path)))) from None
            return
        raise InputError(f"{path} cannot be written: {error.strerror}; choose another place") from None
    finally:
        with contextlib.suppress(OSError):
            fresh.unlink(missing_ok=True)


def _write_through(path: Path, parts: Iterable[bytes]) -> None:
    """Write to a device or a pipe without replacing it."""
    flags = os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
    descriptor = _pipes.pop(path) if path in _pipes else os.open(path, flags)
    os.set_blocking(descriptor, True)
    with open(descriptor, "wb") as file:
        file.writelines(parts)


@contextlib.contextmanager
def new_folder(
    out: Path,
    check: Callable[[Path], None] = lambda out: None,
    error: type[InputError] = InputError,
    no_room_hint: str = "",
) -> Iterator[Path]:
    """Yield an empty folder next to `out`, `OUT.partial-<pid>-<host>`, that replaces `out` when the block ends and is
    deleted when the block raises.

    `check` raises if the existing `out` may not be replaced. It is called before the block and again before the rename.
    Partial folders that dead processes of this machine left are removed first. Raises `error` for a path that cannot be
    written, and FullError for a full disk, with `no_room_hint` at the end.
    """
    given, owner = out, f"{os.getpid()}-{socket.gethostname()}"
    out = Path(os.path.abspath(out))
    fresh = out.with_name(f"{out.name}.partial-{owner}")
    if fresh in _in_use:
        raise error(f"{out}: this process is already writing it")
    _in_use.add(fresh)
    spare: list[int] = []
    try:
        if out.is_symlink() or (out.exists() and not out.is_dir()):
            raise error(f"{out}: that is a link or a file, and is not replaced by a folder; name another place")
        if (problem := problem_above(given)) is not None:
            raise error(problem)
        out.parent.mkdir(parents=True, exist_ok=True)
        _clear_leftovers(out)
        check(out)
        fresh.mkdir()
        spare += [os.open(os.devnull, os.O_RDONLY) for _ in range(_OF_RMTREE)]
        yield fresh
        check(out)
        publish_folder(fresh, out, out.with_name(f"{out.name}.replaced-{owner}"))
    except OSError as cause:
        _close_all(spare)
        shutil.rmtree(fresh, ignore_errors=True)
        if cause.errno not in NO_ROOM:
            raise error(f"{out}: cannot be written: {cause.strerror or cause}") from cause
        free = format_bytes(shutil.disk_usage(out.parent).free)
        raise FullError(
            f"{out}: no room to write it ({cause.strerror}; {free} free now that the written part is gone again); "
            f"free some, or choose another --out{no_room_hint}"
        ) from cause
    finally:
        _close_all(spare)
        _in_use.discard(fresh)
        shutil.rmtree(fresh, ignore_errors=True)


def _close_all(descriptors: list[int]) -> None:
    while descriptors:
        os.close(descriptors.pop())


def publish_folder(fresh: Path, final: Path, aside: Path) -> None:
    """Rename the complete folder `fresh` to `final` after all its files are flushed to disk.

    An existing `final` is first renamed to `aside` and deleted last. If the process is killed in between, `aside`
    remains for `clear_leftover`.
    """
    for path in (*fresh.iterdir(), fresh):
        sync(path)
    replacing = final.exists()
    if replacing:
        final.rename(aside)
    try:
        fresh.rename(final)
    except OSError:
        if replacing:
            aside.rename(final)
        raise
    sync(final.parent)
    if replacing:
        remove(aside)


def remove(path: Path) -> None:
    """Delete a folder with its contents, or a file or link at the same path."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def clear_leftover(path: Path, replaced: Path | None = None) -> None:
    """Remove a folder that a killed process left. A folder that was renamed from `replaced` is renamed back if
    `replaced` is missing."""
    if replaced is not None and not replaced.exists():
        path.rename(replaced)
    else:
        shutil.rmtree(path, ignore_errors=True)


def _clear_leftovers(out: Path) -> None:
    name = re.compile(re.escape(out.name) + r"\.(partial|replaced)-(\d+)-" + re.escape(socket.gethostname()))
    for path in sorted(out.parent.iterdir()):
        match = name.fullmatch(path.name)
        if match is not None and not runs_here(int(match[2])):
            clear_leftover(path, out if match[1] == "replaced" else None)


def runs_here(pid: int) -> bool:
    """Return whether another process has this pid."""
    if pid == os.getpid():
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def sync(path: Path) -> None:
    """Flush a file or a folder to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
