"""Rows of the table of measured runs that comes with Shardwright, to be changed and written by tests."""

import csv
from pathlib import Path

from shardwright.planner.evaluate import MEASURED_RUNS


def published(name: str) -> dict[str, str]:
    """A row by its id."""
    with MEASURED_RUNS.open(newline="", encoding="utf-8") as file:
        return next(row for row in csv.DictReader(file) if row["id"] == name)


DENSE = published("korthikanti-t5-46c684")
"""GPT-22B on 8 A100 with tp 8."""
PIPED = published("korthikanti-t5-b74e17")
"""GPT-175B on 64 A100 with tp 8 and pp 8, three chunks a rank."""
EXPERTS = published("simumax-b200-99afc2")
"""DeepSeek-V3 cut to 4 layers on 8 B200 with pp 2 and ep 4."""


def write(path: Path, *rows: dict[str, str]) -> Path:
    """Write rows to a CSV, each with an id of its own."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(name for row in rows for name in row)))
        writer.writeheader()
        writer.writerows(row | {"id": f"row-{number}"} for number, row in enumerate(rows, start=2))
    return path
