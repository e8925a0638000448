"""Read a table of measured runs: a CSV with exactly the columns of `planner.run_columns`, or of another kind of row."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from shardwright.layout.layout import batch_divides
from shardwright.planner.measured_run import PredictableRun, SkippedRun, prepared
from shardwright.planner.run_columns import MeasuredRun, columns
from shardwright.schedule.named import ONE_F_ONE_B
from shardwright.split.rules import experts_problem
from shardwright.system.errors import InputError, nearest
from shardwright.system.files import read_csv, reason

LONGEST_QUOTE = 40
FEW = 3
"""Most missing columns that are explained one by one."""
Row = TypeVar("Row")


@dataclass(frozen=True)
class TableKind(Generic[Row]):
    """A kind of table. `row`: a dataclass whose fields are columns, with an `id`. `needed`: for a row and the text of
    its cells, whether each kind of needed column (`RunColumn.needed`) is needed. `contradictions`: between cells that
    are valid one by one. `page`: where the columns are described."""

    row: Callable[..., Row]
    needed: Callable[[Row, Mapping[str, str]], Mapping[str, bool]]
    contradictions: Callable[[Row], Iterator[str]]
    page: str


class ReadRow(NamedTuple, Generic[Row]):
    """A row of a table. `line`: its last line in the file; `cells`: the text of each column; `problems`: of its
    cells."""

    line: int
    row: Row
    cells: Mapping[str, str]
    problems: list[str]


def read_runs(path: Path) -> list[PredictableRun | SkippedRun]:
    """Return every row of a table, in order; a row that cannot be priced is a `SkippedRun`.

    Raises InputError with every problem of the file at once: an unknown or missing column, a cell that is not valid,
    and rows whose cells contradict each other.
    """
    return [prepared(line, row) for line, row in read_table(path, MEASURED)]


def read_table(path: Path, kind: TableKind[Row]) -> list[tuple[int, Row]]:
    """Return every row with its line in the file (its last line if it has several). Raises as `read_runs`."""
    return [(read.line, read.row) for read in read_rows(path, kind, strict=True)]


def read_rows(path: Path, kind: TableKind[Row], *, strict: bool = False) -> list[ReadRow[Row]]:
    """Return every row. Raises InputError for columns, widths of rows and ids that are not valid; if `strict`, also for
    the problems of cells."""
    try:
        lines = [(line, [cell.strip() for cell in cells]) for line, cells in read_csv(path) if any(cells)]
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read as a CSV: {reason(error)}") from None
    header = lines[0][1] if lines else []
    if header_problems := list(_header_problems(header, kind)):
        raise InputError(*(f"{path}: {problem}" for problem in header_problems))
    if len(lines) == 1:
        raise InputError(f"{path}: no rows below the header")
    rows: list[ReadRow[Row]] = []
    problems: list[str] = []
    lines_of_ids: dict[str, int] = {}
    for line, cells in lines[1:]:
        if len(cells) != len(header):
            problems.append(f"row {line}: {len(cells)} cells, and the header has {len(header)} columns")
            continue
        texts = dict.fromkeys(columns(kind.row), "") | dict(zip(header, cells, strict=True))
        row, reasons = _read(texts, kind)
        reasons = reasons or list(kind.contradictions(row))
        rows.append(ReadRow(line, row, texts, reasons))
        reasons = list(reasons) if strict else []
        if texts["id"] and (first := lines_of_ids.setdefault(texts["id"], line)) != line:
            reasons.append(f"id={_quoted(texts['id'])}: row {first} has the same; valid: one that no other row has")
        problems += (f"row {line}: {problem}" for problem in reasons)
    if problems:
        raise InputError(*(f"{path}, {problem}" for problem in problems))
    return rows


def _header_problems(header: list[str], kind: TableKind[Any]) -> Iterator[str]:
    known = columns(kind.row)
    for sign, plural in ((";", "semicolons"), ("\t", "tabs")):
        if len(header) == 1 and sign in header[0]:
            yield f"its columns are separated by {plural}; valid: commas"
            return
    for name in dict.fromkeys(header):
        if name not in known:
            hint = nearest(name, known)
            yield f"column {_quoted(name)!r} is not known" + (f"; {hint}" if hint.startswith("did") else "")
        elif header.count(name) > 1:
            yield f"column {name!r} is there {header.count(name)} times; valid: once"
    missing = [name for name, column in known.items() if name not in header and not column.optional]
    for name in missing[:FEW]:
        yield f"column {name!r} is missing; it is: {known[name].help}"
    if missing:
        rest = f"{len(missing) - FEW} more are missing: {', '.join(missing[FEW:])}; " if missing[FEW:] else ""
        yield (
            f"{rest}a table has all {len(known)} columns, with empty cells where a row need not say them; "
            f"{kind.page} says what each is"
        )


def _read(cells: Mapping[str, str], kind: TableKind[Row]) -> tuple[Row, list[str]]:
    """Read the cells of a row. Return the row, with None for each invalid cell, and the problems of its cells."""
    values: dict[str, Any] = dict.fromkeys(columns(kind.row))
    problems: list[str] = []
    for name, column in columns(kind.row).items():
        try:
            values[name] = column.read(cells[name])
        except ValueError as error:
            problems.append(f"{name}={_quoted(cells[name])!r}: {error}")
    row = kind.row(**values)
    when = kind.needed(row, cells)
    for name, column in columns(kind.row).items():
        if not cells[name] and when.get(column.needed):
            problems.append(f"{name} is empty, and this row needs it: {column.help}; valid: {column.rule}")
    return row, problems


def _needed(row: MeasuredRun, cells: Mapping[str, str]) -> dict[str, bool]:
    """Return which kinds of columns a row needs."""
    usable = row.usable == "yes"
    return {
        "always": True,
        "usable": usable,
        "experts": usable and row.experts is not None,
        "pp": usable and (row.pp or 1) > 1,
        "mla": usable and any(cells[name] for name, column in columns().items() if column.needed == "mla"),
        "peak": usable and row.peak_mem_gib is not None,
    }


def _contradictions(row: MeasuredRun) -> Iterator[str]:
    """Yield the contradictions between the cells of a row whose cells are valid one by one."""
    if row.usable == "no":
        if not row.why_not:
            yield "why_not is empty, and a row with usable='no' says there why it is not compared"
        return
    if row.model_kind != "decoder":
        yield f"model_kind={row.model_kind!r} with usable='yes'; valid: decoder, or usable='no'"
    if (row.tokens is None) != (row.days is None):
        yield f"tokens={row.tokens or ''} with days={row.days or ''}; valid: both, or none"
    if row.step_time_s is None and row.peak_mem_gib is None and row.days is None:
        yield "step_time_s, peak_mem_gib and days are empty; valid: one of them, or usable='no'"
    data_ranks = row.dp_replicate * row.dp_shard
    world = row.tp * row.pp * row.cp * data_ranks
    if world != row.accelerators:
        yield (
            f"tp {row.tp} x pp {row.pp} x cp {row.cp} x dp_replicate {row.dp_replicate} x dp_shard {row.dp_shard} = "
            f"{world}, not accelerators={row.accelerators}"
        )
    if not batch_divides(row.global_batch, row.micro_batch, data_ranks):
        product = f"micro_batch {row.micro_batch} x {data_ranks} data ranks"
        yield f"global_batch={row.global_batch} is not a multiple of {product}"
    if row.zero == 0 and row.dp_shard > 1:
        yield f"zero=0 shards nothing over dp_shard={row.dp_shard}; valid: dp_replicate={data_ranks}, dp_shard=1"
    if row.attention and row.flash is False:
        yield f"attention={row.attention} with flash=0; valid: flash=1, or an empty attention"
    if row.sp and row.tp == 1:
        yield "sp=1 with tp=1; valid: 0"
    if problem := experts_problem("ep", row.ep, row.experts or 0):
        yield problem
    etp, stage = row.etp or row.tp, row.tp * row.cp * data_ranks
    if row.experts is not None and stage % (row.ep * etp):
        yield f"ep={row.ep} x etp {etp} does not divide tp x cp x data ranks = {stage}"
    if row.pp == 1 and (row.virtual_stages > 1 or row.schedule != ONE_F_ONE_B.name):
        yield f"schedule={row.schedule}, virtual_stages={row.virtual_stages} with pp=1; valid: 1f1b, 1"


def _quoted(text: str) -> str:
    """Return a cell for use in a message, shortened if it is long."""
    return text if len(text) <= LONGEST_QUOTE else f"{text[: LONGEST_QUOTE - 4]}..."


MEASURED = TableKind(MeasuredRun, _needed, _contradictions, "docs/measured-runs.md")
