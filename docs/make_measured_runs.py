"""Fills the tables of columns of measured-runs.md, serving.md and plan-rl.md from the columns that the code reads.

python docs/make_measured_runs.py
"""

import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from shardwright.planner.run_columns import RunColumn, columns
from shardwright.rl.measured import STEPS
from shardwright.serving.measured import MEASUREMENTS_TABLE

PAGES: Mapping[str, tuple[Mapping[str, RunColumn], Sequence[str]]] = {
    "measured-runs": (columns(), ("id", "model_kind", "accelerator", "stack", "tp", "step_time_s")),
    "serving": (columns(MEASUREMENTS_TABLE.row), ("id",)),
    "plan-rl": (columns(STEPS.row), ("id",)),
}
"""The columns of each page, and the column with which each of the page's tables starts."""
NEEDED = {
    "always": "always",
    "usable": "if usable",
    "pp": "if `pp` is above 1",
    "experts": "with `experts`",
    "mla": "all five or none",
    "peak": "with `peak_mem_gib`",
    "": "",
}
_HEADER = re.compile(r"(?<=```text\n)id,.*\n")
_TABLE = re.compile(r"(\| column \| meaning \| valid .*\n\| --- .*\n)(?:\|.*\n)*")


def path_of(name: str) -> Path:
    """Return the file of a page."""
    return Path(__file__).with_name(f"{name}.md")


def page(name: str) -> str:
    """The page with fresh tables."""
    known, first = PAGES[name]
    names = list(known)
    ends = [names.index(column) for column in first] + [len(names)]
    parts = iter([names[start:end] for start, end in pairwise(ends)])
    text = _HEADER.sub(",".join(names) + "\n", path_of(name).read_text(encoding="utf-8"))
    return _TABLE.sub(lambda table: table[1] + "".join(_row(column, known[column]) for column in next(parts)), text)


def _row(name: str, column: RunColumn) -> str:
    needed = "optional column" if column.optional else NEEDED[column.needed]
    return f"| `{name}` | {column.help} | {column.rule} | {needed} |\n"


if __name__ == "__main__":
    for each in PAGES:
        path_of(each).write_text(page(each), encoding="utf-8")
        print(f"written to {path_of(each)}")
