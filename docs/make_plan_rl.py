"""Fills the table of columns in docs/plan-rl.md from src/shardwright/rl/measured.py.

python docs/make_plan_rl.py
"""

import re
from pathlib import Path

from make_measured_runs import table_row

from shardwright.planner.run_columns import columns
from shardwright.rl.measured import STEPS

PAGE = Path(__file__).with_name("plan-rl.md")
_TABLE = re.compile(r"(\| column \|.*\n\| --- .*\n)(?:\|.*\n)*")


def page() -> str:
    """The page with a fresh table."""
    rows = "".join(table_row(name, column) for name, column in columns(STEPS.row).items())
    return _TABLE.sub(lambda table: table[1] + rows, PAGE.read_text(encoding="utf-8"))


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"written to {PAGE}")
