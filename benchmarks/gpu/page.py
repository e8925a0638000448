"""Make the page of a run of the GPU plan: benchmarks/results/gpu-DATE.md, planned next to measured.

    python benchmarks/gpu/page.py FOLDER [--out FILE.md]

FOLDER has the part-N.jsonl that plan.py has written. The plan is that of one H100 with 80 GB.
"""

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "results"
GIB = 2**30
COLUMNS = (
    "step",
    "result",
    "tokens/s",
    "planned",
    "MFU",
    "peak GiB",
    "planned",
    "reserved GiB",
    "planned",
    "loss",
    "s",
)
PARTS = {
    1: "every CUDA feature once, on a model of 0.3M parameters",
    2: "SmolLM2-1.7B, sequences of 4,096 tokens, and the same model in a loop written by hand (`torch-*`)",
    3: "this GPU measured and planned; offloads, 32k tokens, experts, generation",
}

Record = dict[str, Any]


def read(folder: Path) -> dict[int, tuple[Record, list[Record]]]:
    """Of each part its machine, and the last line of each of its steps."""
    parts = {}
    for number in PARTS:
        path = folder / f"part-{number}.jsonl"
        if path.exists():
            lines = [json.loads(line) for line in path.read_text().splitlines()]
            steps = {line["step"]: line for line in lines if "step" in line}
            parts[number] = [line for line in lines if "part" in line][-1], list(steps.values())
    return parts


def row(record: Record) -> list[str]:
    """The cells of a step."""
    gib = [
        number(None if (n_bytes := record.get(name)) is None else n_bytes / GIB, ".2f")
        for name in ("allocated_bytes", "planned_allocated_bytes", "reserved_bytes", "planned_reserved_bytes")
    ]
    speed = [number(record.get(name), ",.0f") for name in ("tokens_per_s", "planned_tokens_per_s")]
    loss = " to ".join(number(each, ".3f") for each in record.get("loss") or ())
    return [
        record["step"],
        outcome(record),
        *speed,
        number(record.get("mfu"), ".1%"),
        *gib,
        loss,
        str(record.get("s", "")),
    ]


def outcome(record: Record) -> str:
    """ok, or why not."""
    if "skipped" in record:
        return f"skipped: {record['skipped']}"
    return "ok" if record["exit"] == 0 else f"**{record['exit']}**"


def number(value: float | None, form: str) -> str:
    """A number in a cell; nothing where it is not known."""
    return "" if value is None else format(value, form)


def table(rows: Iterable[list[str]]) -> str:
    """A table in Markdown."""
    lines = [COLUMNS, ["---", "---", *["---:"] * (len(COLUMNS) - 2)], *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def page(parts: dict[int, tuple[Record, list[Record]]]) -> str:
    """The whole page."""
    machine = next(iter(parts.values()))[0]
    about = f"{machine.get('device', 'no device')}, {machine['date']}, torch {machine.get('torch', 'unknown')}"
    text = [f"# One {about}", "", "`python benchmarks/gpu/plan.py 1|2|3`, then `python benchmarks/gpu/page.py FOLDER`."]
    if machine["mock"]:
        text += ["", "**A rehearsal on the mock: no kernel ran, and no number but those of memory means anything.**"]
    for number_, (_, steps) in parts.items():
        text += ["", f"## Part {number_}: {PARTS[number_]}", "", table(map(row, steps))]
    return "\n".join([*text, ""])


def main() -> None:
    """Write the page and say where."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path, metavar="FILE.md")
    options = parser.parse_args()
    parts = read(options.folder)
    if not parts:
        parser.error(f"{options.folder} has no part-1.jsonl, part-2.jsonl or part-3.jsonl; plan.py writes them")
    out = options.out or RESULTS / f"gpu-{next(iter(parts.values()))[0]['date']}.md"
    out.write_text(page(parts))
    print(out)


if __name__ == "__main__":
    main()
