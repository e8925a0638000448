"""Reads and writes a schedule as PyTorch's compute-only CSV.

It has a row for each rank and a cell for each action: `0F3` is F of stage 0 on micro-batch 3. Empty cells are idle
slots and are ignored. Two actions that PyTorch overlaps share a cell, `(0F8;7B0)OVERLAP_F_B`; they are read as one
after the other.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

from shardwright.schedule.actions import OPS, Action, Op, Schedule, make
from shardwright.system.errors import ScheduleError
from shardwright.system.files import read_csv, reason, write_whole

_ACTION = re.compile(r"([0-9]{1,7})([A-Z])([0-9]{1,7})")
_OVERLAPPED = re.compile(r"\((.*)\)OVERLAP_F_B")


def write_table(schedule: Schedule, path: str | Path) -> None:
    """Write the actions of every rank, without empty cells; an existing file is replaced.

    The file does not contain the name and `staggered`. Raises InputError if it cannot be written.
    """
    rows = (",".join(map(str, actions)) for actions in schedule.ranks)
    write_whole(Path(path), "".join(f"{row}\n" for row in rows).encode("utf-8"))


def read_table(path: str | Path) -> Schedule:
    """Return the schedule of a file, named after it; the highest stage and micro-batch of any cell give their numbers.

    `validate.problems` checks whether the schedule can be run. Raises ScheduleError, with every bad cell, for a file
    that is not such a table.
    """
    path = Path(path)
    try:
        rows = [row for _, row in read_csv(path)]
    except (OSError, ValueError) as error:
        raise ScheduleError(f"{path}: cannot be read as a schedule ({reason(error)})") from error
    errors: list[str] = []
    ranks = [list(_row(row, f"{path}, row {at + 1} (rank {at})", errors)) for at, row in enumerate(rows)]
    if not rows:
        errors.append(f"{path} is empty; valid: a row for each rank, with cells like 0F3")
    if errors:
        raise ScheduleError(*errors)
    actions = [action for rank in ranks for action in rank]
    n_stages = 1 + max(action.stage for action in actions)
    n_microbatches = 1 + max(action.microbatch for action in actions)
    return make(n_stages, n_microbatches, ranks, name=path.stem)


def _row(row: list[str], where: str, errors: list[str]) -> Iterator[Action]:
    """Yield the actions of a row; errors are appended to `errors`."""
    if not any(cell.strip() for cell in row):
        errors.append(f"{where} has no action; valid: cells like 0F3, at least one a rank")
    for column, cell in enumerate(row):
        text = cell.strip()
        overlapped = _OVERLAPPED.fullmatch(text)
        for part in overlapped[1].split(";") if overlapped else [text] if text else []:
            match = _ACTION.fullmatch(part.strip())
            if match and match[2] in OPS:
                op: Op = next(op for op in get_args(Op) if op == match[2])
                yield Action(int(match[1]), op, int(match[3]))
            else:
                errors.append(
                    f"{where}, column {column + 1}: {cell!r} is not an action; valid: stage, one of "
                    f"{', '.join(OPS)}, microbatch, like 0F3; (0F8;7B0)OVERLAP_F_B; empty"
                )
