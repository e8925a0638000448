"""Fills the tables of columns in docs/measured-runs.md from src/shardwright/planner/run_columns.py.

python docs/make_measured_runs.py
"""

import re
from itertools import pairwise
from pathlib import Path

from shardwright.planner.run_columns import RunColumn, columns

PAGE = Path(__file__).with_name("measured-runs.md")
FIRST = ("id", "model_kind", "accelerator", "stack", "tp", "step_time_s")
"""The column that begins each of the page's tables."""
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
_TABLE = re.compile(r"(\| column \|.*\n\| --- .*\n)(?:\|.*\n)*")


def page() -> str:
    """The page with fresh tables."""
    names = list(columns())
    ends = [names.index(name) for name in FIRST] + [len(names)]
    parts = iter([names[begin:end] for begin, end in pairwise(ends)])
    text = _HEADER.sub(",".join(names) + "\n", PAGE.read_text(encoding="utf-8"))
    return _TABLE.sub(lambda table: table[1] + "".join(table_row(name, columns()[name]) for name in next(parts)), text)


def table_row(name: str, column: RunColumn) -> str:
    """Return the row of a column in a table of a page."""
    return f"| `{name}` | {column.help} | {column.rule} | {NEEDED[column.needed]} |\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"written to {PAGE}")
