"""User files and modules that register schedules, optimizers or model families when they are imported.

A run file lists them under `extensions`, and every verb that reads a run has `--extension`. Extensions are code, but a
folder that is only read is data. A run file's extensions are therefore imported only if the user starts that run file,
named the extensions, or trusted them before (`load_named` decides). A process that starts others has them load the
extensions that it has loaded (`loaded`).
"""

import contextlib
import hashlib
import importlib
import importlib.util
import os
import shlex
import sys
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol, TypeVar

from shardwright.system.errors import ConfigError
from shardwright.system.files import read_bytes, read_lines, real_path

_LOADED: list[str] = []


class NamedRow(Protocol):
    """A row of a registry."""

    @property
    def name(self) -> str: ...


R = TypeVar("R", bound=NamedRow)


def add(rows: dict[str, R], what: str, row: R) -> R:
    """Add a row to a registry. `what`: its kind, for the message. Raises ConfigError for a name that is taken."""
    if row.name in rows:
        raise ConfigError(f"{what} named {row.name!r} is registered already; choose another name")
    rows[row.name] = row
    return row


def resolve(name: str, folder: Path = Path()) -> str:
    """Return the form in which an extension is recorded: a `.py` file as an absolute path, relative to `folder`; a
    module unchanged. Raises ConfigError for a name that is neither."""
    if "\0" in name or not name.strip():
        raise ConfigError(f"extension {name!r}: a Python file (.py) or a module is needed")
    return str(real_path((folder / name).parent) / Path(name).name) if name.endswith(".py") else name


def load(names: Iterable[str]) -> None:
    """Import each extension (`resolve`) that this process has not imported yet, in order.

    Raises ConfigError, with the file and line, for an extension that does not exist or whose import fails.
    """
    for name in names:
        if name not in _LOADED:
            try:
                _import(name)
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # also SystemExit and a file's own subclasses of BaseException
                raise ConfigError(f"extension {name}: {_reason(name, error)}") from error
            _LOADED.append(name)


def load_trusted(names: Iterable[str]) -> None:
    """Import extensions that the user has named and record each file's path and content as trusted. Run files that name
    a trusted file may import it until it changes. Raises ConfigError as `load` does."""
    for name in map(resolve, names):
        load([name])
        _trust(name)


def load_named(table: dict[str, Any], folder: Path, started: bool) -> list[str]:
    """Import the extensions of a run file's `table`, before any name that they register is looked up, and return the
    problems found. Their paths in the table become absolute, so that they do not depend on the run file's folder.

    `started`: the user has started this run file, rather than only named a folder or file that is read. Raises
    ConfigError if the run file is only read and an extension is neither imported nor trusted, since that would run
    foreign code.
    """
    names = table.get("extensions", [])
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        return []  # the pydantic model of the run file reports it
    try:
        table["extensions"] = names = [resolve(name, folder) for name in names]
    except ConfigError as error:
        return error.problems
    if not started and (unknown := [name for name in names if name not in _LOADED and not _is_trusted(name)]):
        raise ConfigError(
            f"extensions={unknown} are not imported: a run file that is only read runs no code; look at them, and if "
            f"you trust them, add {shlex.join(word for name in unknown for word in ('--extension', name))} (in Python: "
            f"shardwright.extend), once: a file is remembered until it changes"
        )
    try:
        (load_trusted if started else load)(names)
    except ConfigError as error:
        return error.problems
    return []


def _trusted_file() -> Path:
    """Return the path of the file with the checksums of trusted extensions, one a line."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "shardwright" / "trusted-extensions"


def _fingerprint(name: str) -> str | None:
    """Return the checksum of an extension's path and content; None for a module, which Python finds by name."""
    if not name.endswith(".py"):
        return None
    try:
        return hashlib.sha256(os.fsencode(name) + b"\0" + read_bytes(Path(name))).hexdigest()
    except OSError:
        return None


def _is_trusted(name: str) -> bool:
    try:
        return _fingerprint(name) in list(read_lines(_trusted_file()))
    except (OSError, RuntimeError):  # no such file, or no home directory
        return False


def _trust(name: str) -> None:
    fingerprint = _fingerprint(name)
    if fingerprint is None or _is_trusted(name):
        return
    with contextlib.suppress(OSError, RuntimeError):  # a home that cannot be written: the user is asked again next time
        path = _trusted_file()
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with path.open("a") as file:
            file.write(fingerprint + "\n")


def loaded() -> tuple[str, ...]:
    """Return the extensions that this process has loaded, in order."""
    return tuple(_LOADED)


def _import(name: str) -> None:
    if not name.endswith(".py"):
        importlib.import_module(name)
        return
    read_bytes(Path(name))  # the import itself would wait for a pipe, and read a device without end
    spec = importlib.util.spec_from_file_location(module_name(name), name)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name(name)] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[module_name(name)]
        raise


def module_name(name: str) -> str:
    """Return the name in `sys.modules` of an extension that is a file: unique by file, and the same in every process,
    so that objects pickled in one process can be unpickled in another."""
    return f"{Path(name).stem}_{zlib.crc32(name.encode()):08x}"


def _reason(name: str, error: BaseException) -> str:
    if isinstance(error, FileNotFoundError) and error.filename == name:
        return "no such file"
    if isinstance(error, OSError) and error.filename == name:
        return f"cannot be read: {error.strerror}"
    trace, line = error.__traceback__, ""
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == name:
            line = f", line {trace.tb_lineno}"
        trace = trace.tb_next
    return f"cannot be imported{line}: {type(error).__name__}: {error}"
