"""Tables of published runs, read from a CSV of one of two kinds."""

import csv
from collections.abc import Mapping
from pathlib import Path

from shardwright.errors import InputError, nearest
from shardwright.plan import megatron_ci
from shardwright.plan.run import Run, Skipped
from shardwright.plan.run_cells import Unusable
from shardwright.plan.run_row import Row

NEEDED = ("source", "model", "layers", "hidden", "heads", "seq", "gpu", "n_gpus", "micro_batch", "global_batch")
MEASURED = ("step_time_s", "peak_mem_gib")


def read_runs(path: Path) -> list[Run | Skipped]:
    """Every row of a CSV, in order: of the columns of `plan/measured/README.md`, or of Megatron-LM's tests.

    Raises InputError for a file that cannot be read, has no rows, or lacks columns that no prediction can do without.
    """
    try:
        # Spreadsheets begin a file with a byte order mark.
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            columns = [name.strip() for name in reader.fieldnames or []]
            rows = [(reader.line_num, _cells(row)) for row in reader]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{path}: cannot be read as a CSV: {getattr(error, 'strerror', None) or error}") from None
    of_tests = set(megatron_ci.NEEDED) <= set(columns)
    if not of_tests:
        _check_columns(path, columns)
    if not rows:
        raise InputError(f"{path}: no rows below the header")
    return [megatron_ci.read_row(*row) if of_tests else read_row(*row) for row in rows]


def read_row(number: int, cells: Mapping[str, str]) -> Run | Skipped:
    """One row; `number`: its line in the file, the last one of a row that has several."""
    source, name = cells.get("source", ""), cells.get("model", "")
    reader = Row(cells)
    try:
        step_s, peak_gib = (reader.measured(column) for column in MEASURED)
        if step_s is None and peak_gib is None:
            raise Unusable("neither step_time_s nor peak_mem_gib is given")
        job, candidates = reader.read()
    except Unusable as unusable:
        return Skipped(number, source, name, str(unusable))
    except InputError as error:
        return Skipped(number, source, name, error.problems[0])
    return Run(
        row=number,
        source=source,
        name=name,
        job=job,
        candidates=candidates,
        measured_step_s=step_s,
        measured_peak_gib=peak_gib,
        assumed=tuple(reader.assumed),
        # torchtitan logs what its allocator has reserved, Megatron-LM what tensors take.
        peak_of="reserved" if job.stack.name.startswith("fsdp") else "allocated",
    )


def _check_columns(path: Path, columns: list[str]) -> None:
    """Raises InputError where no prediction could be made, or be compared."""
    missing = [name for name in NEEDED if name not in columns]
    for sign, plural in ((";", "semicolons"), ("\t", "tabs")):
        if missing and len(columns) == 1 and sign in columns[0]:
            raise InputError(f"{path}: its columns are separated by {plural}; valid: commas")
    if missing:
        hints = [f"{name} ({nearest(name, columns)})" if columns else name for name in missing]
        raise InputError(f"{path}: columns missing: {', '.join(hints)}")
    if not set(MEASURED) & set(columns):
        raise InputError(f"{path}: neither of the columns {' and '.join(MEASURED)}: there is nothing to compare with")


def _cells(row: Mapping[str, str | None]) -> dict[str, str]:
    """A line's cells; what it has beyond the header comes under None and is passed over."""
    return {key.strip(): (value or "").strip() for key, value in row.items() if key}
