"""Score three checks of a distributed training run on bugs that are injected into Shardwright, one JSON line each.

    python -m benchmarks.checkers.run --every 25 >> benchmarks/results/checkers.jsonl

The bugs are those that `shardwright verify` has to see (tests/training/bugs), without the ones that crash: every 25th
of them, in the order of tests/training/bugs/tables.py, beginning with number `--first`. A line has the bug, the number
of bugs that it was taken from, its first layout, and for each check the largest error and whether the check sees the
bug:

curves: the losses of 50 steps of the run's optimizer differ from those of one process by more than 1e-3.
parameters: after one step of the run's optimizer a parameter differs by more than 1e-4 of its norm.
verify: `shardwright verify` in the case in which the bug shows is not equal.

Both sides of a comparison run the code with the bug, as two runs of one program do.
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

from tests.training.bugs.bug import Bug
from tests.training.bugs.tables import FAMILIES
from tests.training.worlds import train_alone_mutated, train_mutated

from shardwright.system.errors import ShardwrightError
from shardwright.verification import Case, Report, Verifier

STEPS = 50
LIMITS = {"curves": 1e-3, "parameters": 1e-4}
"""The relative error from which each check sees a bug; for `verify` each number has its own tolerance."""


def bugs() -> list[tuple[str, str, Bug]]:
    """Return family, name and bug of all bugs that a number shows."""
    return [
        (family, name, bug)
        for family, table in FAMILIES.items()
        for name, bug in table.items()
        if isinstance(bug, Bug) and not bug.crashes
    ]


def scores(bug: Bug) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the name of each check, with its largest error and whether it sees the bug."""
    layout = bug.layouts[0]
    case = bug.case(layout)
    trainings = {"curves": (replace(case, steps=STEPS), "loss"), "parameters": (replace(case, steps=1), "parameter")}
    reference = partial(train_alone_mutated, bug.mutations)
    with (
        patch("shardwright.verification.verifier.train_alone", reference),
        Verifier(partial(train_mutated, bug.mutations), timeout_s=240) as verifier,
    ):
        for check, (training, kind) in trainings.items():
            try:
                error = _largest(verifier.parity(training, layout), case, kind)
            except ShardwrightError as crash:
                yield check, {"error": None, "seen": True, "crash": str(crash).splitlines()[0]}
                continue
            yield check, {"error": error, "seen": not error <= LIMITS[check]}  # NaN is seen
        report = verifier.outcome(case, layout)
        yield "verify", {"error": max((row.error for row in report.rows), default=None), "seen": not report.equal}


def _largest(report: Report, case: Case, kind: str) -> float:
    """Return the largest relative error of a kind of results in the training with the run's optimizer."""
    return max(
        row.error for row in report.rows if row.quantity.kind == kind and row.quantity.training == case.trainings[-1]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--every", type=int, default=25, metavar="K", help="[default: %(default)s]")
    parser.add_argument("--first", type=int, default=0, metavar="N", help="[default: %(default)s]")
    given = parser.parse_args()
    every_bug = bugs()
    for family, name, bug in every_bug[given.first :: given.every]:
        line = {
            "family": family,
            "bug": name,
            "every": given.every,
            "of": len(every_bug),
            "layout": str(bug.layouts[0]),
            "dtype": bug.dtype,
            **dict(scores(bug)),
        }
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
