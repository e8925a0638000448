"""shardwright plan evaluate-rl: compare predictions of steps of GRPO with published ones."""

from dataclasses import dataclass
from pathlib import Path

import typer

from shardwright.cli.common import AsJson, argument, show, verb


@dataclass(frozen=True)
class EvaluateRLOptions:
    """Arguments and options of `plan evaluate-rl`."""

    steps: Path | None = argument(None, "published steps; if not given, shardwright's own table", "TABLE.csv")
    json: AsJson = False


@verb
def plan_evaluate_rl(options: EvaluateRLOptions) -> None:
    """Compare predicted times of whole steps of GRPO with published ones, by row and by group of rows.

    The parts of a predicted step are printed too. The published steps have no times of parts to compare them with.

    shardwright plan evaluate-rl --json

    Exit codes: 0 compared, 1 nothing could be compared, 2 the table cannot be used.
    """
    from shardwright.report.evaluation_view import rl_evaluation_view
    from shardwright.rl.measured import PUBLISHED, evaluate

    result = evaluate(options.steps or PUBLISHED)
    show(rl_evaluation_view(result), options.json, None)
    if not result.rows:
        raise typer.Exit(1)
