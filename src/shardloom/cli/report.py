"""shardloom report: what a run came to, as numbers, a picture of its curves, and one HTML page."""

import dataclasses
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from shardloom.cli.common import console, print_json, verb
from shardloom.report.curves import draw_curves
from shardloom.report.headline import Headline, headline, layout_in_words, model_in_words, percent
from shardloom.report.page import write_page
from shardloom.report.run import read_run
from shardloom.units import format_bytes, format_count, format_seconds


@verb
def report(
    run_dir: Annotated[
        Path, typer.Argument(metavar="RUN_DIR", help="the folder of a run, finished or going on", show_default=False)
    ],
    out: Annotated[
        Path | None, typer.Option(metavar="FILE.html", help="the page; RUN_DIR/report.html if not given")
    ] = None,
    picture: Annotated[
        Path | None,
        typer.Option(metavar="FILE.png|svg", help="the curves alone; RUN_DIR/curves.png if not given"),
    ] = None,
    json: Annotated[
        bool, typer.Option("--json", help="print the numbers as one JSON document, and nothing else")
    ] = False,
) -> None:
    """Show what a run came to: its numbers, its curves, and one page to keep or to send.

    The page needs no other file and no network; it can be made while the run goes on.

    shardloom report runs/debug

    Exit codes: 0 written, 2 the folder is not one of a run, or a file cannot be written.
    """
    run = read_run(run_dir)
    page, curves = out or run.folder / "report.html", picture or run.folder / "curves.png"
    draw_curves(run, curves)
    write_page(run, page)
    told = headline(run)
    if json:
        print_json({**dataclasses.asdict(told), "page": str(page), "picture": str(curves)})
        return
    console.print(f"[bold]{escape(model_in_words(run))}, on {escape(layout_in_words(run.config.layout.layout()))}[/]")
    rows = {**_rows(told), "page": str(page), "picture": str(curves)}
    for name, value in rows.items():
        console.print(f"  {name:<14} {value}", markup=False, soft_wrap=True)


def _rows(told: Headline) -> dict[str, str]:
    """The headline numbers as text, those that are known."""
    rows = {
        "steps": f"{told.steps:,} of {told.planned_steps:,}, {format_count(told.tokens)} tokens",
    }
    if told.first_non_finite_step is not None:
        rows["not finite"] = f"the loss at step {told.first_non_finite_step:,}"
    if told.held_out_loss is not None and told.first_held_out_loss is not None:
        rows["held-out loss"] = f"{told.first_held_out_loss:.4f} -> {told.held_out_loss:.4f}"
    if told.train_loss is not None:
        rows["training loss"] = f"{told.train_loss:.4f}"
    if told.median_tokens_per_s is not None:
        mfu = "n/a" if told.median_mfu is None else f"{told.median_mfu:.1%}"
        rows["speed"] = f"{format_count(told.median_tokens_per_s)} tokens/s (median), MFU {mfu}"
    if told.peak_memory_bytes is not None:
        rows["peak memory"] = f"{format_bytes(told.peak_memory_bytes)} on rank 0"
    if told.training_s is not None and told.time_share is not None:
        share = {phase: percent(value) for phase, value in told.time_share.items()}
        rows["time in steps"] = (
            f"{format_seconds(told.training_s)}: data {share['data']}, forward + backward "
            f"{share['forward_backward']}, optimizer {share['optimizer']}"
        )
    return rows
