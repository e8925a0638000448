"""Write docs/checkers.md and docs/checkers.svg from the results of benchmarks/checkers/run.py.

python -m benchmarks.checkers.page benchmarks/results/checkers-*.jsonl
"""

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

DOCS = Path(__file__).parents[2] / "docs"
CHECKS = {
    "curves": "losses of 50 steps, 1e-3",
    "parameters": "parameters after one step, 1e-4",
    "verify": "`shardwright verify`",
}
HEAD = """\
# Which checks see a silent bug

This page is made from `benchmarks/results/checkers-*.jsonl`. Do not edit it; run
`python -m benchmarks.checkers.page benchmarks/results/checkers-*.jsonl`.

Bugs that `verify` has to see are injected into Shardwright's code ([the list](mutations.md), which also has bugs that a
resume or a unit test shows). {n} are scored here: {samples}, in the order
that `tests/training/bugs/tables.py` had on the day of the results. The rule was chosen before the results were known.
Three checks compare each bug's first layout with one process of the same code, on a model and a batch of test size:

- curves: the losses of 50 steps of AdamW, or of the bug's optimizer, differ by more than 1e-3 of the loss;
- parameters: after one such step a parameter differs by more than 1e-4 of its norm;
- `shardwright verify` in the case in which the bug shows.

The bugs were written for `verify`, so its score is no estimate for unknown bugs. The other scores are the result: they
are the fraction of known bugs that the usual checks see.

| check | bugs seen | of |
| --- | --- | --- |
{scores}

![Bugs seen by each check](checkers.svg)

`python -m benchmarks.checkers.run --every 25` scores the bugs. Errors are the largest relative errors.

| family | bug | layout | type | curves | parameters | verify |
| --- | --- | --- | --- | --- | --- | --- |
"""


def main() -> None:
    plt.switch_backend("svg")
    plt.rcParams["svg.hashsalt"] = "checkers"  # the same file each time
    results: list[list[dict[str, Any]]] = [
        [json.loads(line) for line in Path(source).read_text().splitlines()] for source in sys.argv[1:]
    ]
    lines = [line for each in results for line in each]
    seen = {check: sum(line[check]["seen"] for line in lines) for check in CHECKS}
    head = HEAD.format(
        samples=" and ".join(f"every {first['every']}th of {first['of']}" for first, *_ in results),
        n=len(lines),
        scores="\n".join(f"| {words} | {seen[check]} | {len(lines)} |" for check, words in CHECKS.items()),
    )
    rows = [
        f"| {line['family']} | {line['bug']} | {line['layout']} | {line['dtype']} | "
        f"{' | '.join(_cell(line[check]) for check in CHECKS)} |\n"
        for line in lines
    ]
    (DOCS / "checkers.md").write_text(head + "".join(rows), encoding="utf-8")
    _draw(seen, len(lines))


def _cell(result: dict[str, Any]) -> str:
    error = "crash" if result["error"] is None else f"{result['error']:.0e}"
    return f"{'seen' if result['seen'] else 'missed'} ({error})"


def _draw(seen: dict[str, int], n: int) -> None:
    """Draw the fraction of the bugs that each check sees."""
    figure, axes = plt.subplots(figsize=(6, 2), layout="constrained")
    names = [*reversed([words.replace("`", "") for words in CHECKS.values()])]
    bars = axes.barh(names, [seen[check] / n for check in reversed(CHECKS)], color="#4269d0")
    axes.bar_label(bars, [f" {seen[check]} of {n}" for check in reversed(CHECKS)])
    axes.set_xlim(0, 1.15)
    axes.set_xlabel("fraction of injected bugs that the check sees")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(DOCS / "checkers.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
