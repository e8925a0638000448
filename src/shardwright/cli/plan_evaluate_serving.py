"""shardwright plan evaluate-serving: compare predictions of serving with measurements."""

from dataclasses import dataclass
from pathlib import Path

import typer

from shardwright.cli.common import AsJson, argument, flag, show, verb


@dataclass(frozen=True)
class EvaluateServingOptions:
    """Arguments and options of `plan evaluate-serving`."""

    runs: Path | None = argument(
        None,
        "a table of measurements, with the columns of docs/serving.md; the tables of shardwright if not given",
        "TABLE.csv",
    )
    rows: bool = flag("print every row, not the errors by source alone")
    json: AsJson = False


@verb
def plan_evaluate_serving(options: EvaluateServingOptions) -> None:
    """Compare predictions of serving with published measurements.

    Every row of a table is predicted: static batches by closed forms, closed loops by a simulated scheduler, maximum
    load by the largest batch that fits. Printed are the errors by source, and those by constants that were fitted
    without it.

    shardwright plan evaluate-serving measurements.csv --json

    Exit codes: 0 compared, 1 nothing could be compared, 2 the table cannot be used.
    """
    from shardwright.report.evaluation_view import serving_evaluation_view
    from shardwright.serving.evaluate import MEASUREMENTS, evaluate

    result = evaluate(options.runs or MEASUREMENTS)
    show(serving_evaluation_view(result, options.rows), options.json, None)
    if not result.rows:
        raise typer.Exit(1)
