"""Files and modules of a user's own that register schedules, optimizers or families of models when they are imported.

A run file names them under `extensions`; verbs that take no run file have `--extension`. A process that starts others
has them load what it has loaded (`loaded`).
"""

import importlib
import importlib.util
import sys
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol, TypeVar

from shardwright.errors import ConfigError

_LOADED: list[str] = []


class Named(Protocol):
    """A row of a registry."""

    @property
    def name(self) -> str: ...


R = TypeVar("R", bound=Named)


def add(rows: dict[str, R], what: str, row: R) -> R:
    """Add a row to a registry; `what` it is, for the message. Raises ConfigError for a name that is taken."""
    if row.name in rows:
        raise ConfigError(f"{what} named {row.name!r} is registered already; choose another name")
    rows[row.name] = row
    return row


def resolve(name: str, folder: Path = Path()) -> str:
    """What is written down for an extension: a `.py` file by its absolute path, taken from `folder`; a module as it
    is."""
    return str((folder / name).resolve()) if name.endswith(".py") else name


def load(names: Iterable[str]) -> None:
    """Import each extension (`resolve`) that this process has not imported yet, in order.

    Raises ConfigError, with the place, for one that is not there or whose import fails.
    """
    for name in names:
        if name not in _LOADED:
            try:
                _import(name)
            except (Exception, SystemExit) as error:
                raise ConfigError(f"extension {name}: {_reason(name, error)}") from error
            _LOADED.append(name)


def load_named(table: dict[str, Any], folder: Path) -> list[str]:
    """Import the extensions of a run file, given as a table, before anything that they register is looked for; returns
    what is wrong with them. Their paths in the table become absolute, so that it means the same wherever it lies."""
    names = table.get("extensions", [])
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        return []  # the model of the run file says so
    table["extensions"] = [resolve(name, folder) for name in names]
    try:
        load(table["extensions"])
    except ConfigError as error:
        return error.problems
    return []


def loaded() -> tuple[str, ...]:
    """What this process has loaded, in order."""
    return tuple(_LOADED)


def _import(name: str) -> None:
    if not name.endswith(".py"):
        importlib.import_module(name)
        return
    # The same name in every process, so that what is pickled in one is found in another; and no other file's.
    module_name = f"{Path(name).stem}_{zlib.crc32(name.encode()):08x}"
    spec = importlib.util.spec_from_file_location(module_name, name)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[module_name]
        raise


def _reason(name: str, error: BaseException) -> str:
    if name.endswith(".py") and not Path(name).is_file():
        return "no such file"
    trace, line = error.__traceback__, ""
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == name:
            line = f", line {trace.tb_lineno}"
        trace = trace.tb_next
    return f"cannot be imported{line}: {type(error).__name__}: {error}"
