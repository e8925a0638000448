"""shardwright report: what a run came to, as numbers, a picture of its curves, and one HTML page."""

import dataclasses
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from shardwright.cli.common import AsJson, console, print_json, say, verb
from shardwright.errors import InputError
from shardwright.report.curves import draw_curves
from shardwright.report.headline import Headline, headline, layout_in_words, model_in_words, percent
from shardwright.report.page import write_page
from shardwright.report.run import RunRecord, read_run
from shardwright.report.timeline import PipelineNumbers
from shardwright.run_folder import CURVES, PAGE, TIMELINE
from shardwright.schedule.draw import draw
from shardwright.schedule.trace import write_trace
from shardwright.units import format_bytes, format_count, format_seconds


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
    timeline: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.svg|json",
            help="the timeline of the pipeline alone, as a picture or for ui.perfetto.dev; "
            "RUN_DIR/timeline.svg if not given",
        ),
    ] = None,
    json: AsJson = False,
) -> None:
    """Show what a run came to: its numbers, its curves, and one page to keep or to send.

    The page needs no other file and no network; it can be made while the run goes on. Of a run with layout.pp it shows
    a step of the pipeline too, as planned and as measured.

    shardwright report runs/debug

    Exit codes: 0 written, 2 the folder is not one of a run, or a file cannot be written.
    """
    run = read_run(run_dir)
    page, curves = out or run.folder / PAGE, picture or run.folder / CURVES
    drawing = _place_of_timeline(run, timeline)
    draw_curves(run, curves)
    write_page(run, page)
    files = {"page": str(page), "picture": str(curves)}
    if run.pipeline is not None and drawing is not None:
        (draw if drawing.suffix.lower() == ".svg" else write_trace)(run.pipeline.timelines, drawing)
        files["timeline"] = str(drawing)
    told = headline(run)
    if json:
        print_json({**dataclasses.asdict(told), **files})
        return
    console.print(f"[bold]{escape(model_in_words(run))}, on {escape(layout_in_words(run.config.layout.layout()))}[/]")
    rows = {**_rows(told), **files}
    for name, value in rows.items():
        say(f"  {name:<14} {value}")


def _place_of_timeline(run: RunRecord, asked: Path | None) -> Path | None:
    """Where the timeline of the pipeline goes; None where there is none. Raises InputError if one is asked for then,
    and for another suffix than those of a picture and a trace."""
    if run.pipeline is not None:
        place = asked or run.folder / TIMELINE
        if place.suffix.lower() not in (".svg", ".json"):
            raise InputError(f"--timeline {place}: a picture is named *.svg, a trace *.json")
        return place
    if asked is not None:
        pp = run.config.layout.layout().pp
        why = "layout.pp is 1" if pp == 1 else f"no step has been recorded by all {pp} ranks of the pipeline yet"
        raise InputError(f"--timeline {asked}: {run.folder} has no timeline, as {why}; leave it out")
    return None


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
    if told.load_max_over_mean is not None and told.load_of_worst_layer is not None:
        rows["expert load"] = (
            f"{told.load_max_over_mean:.2f} x the mean at the busiest expert, {told.load_of_worst_layer:.2f} in the "
            f"worst layer"
        )
        if told.dropped_fraction is not None:
            rows["dropped"] = f"{percent(told.dropped_fraction)} of the pairs of a token and an expert"
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
    if told.pipeline is not None:
        rows["pipeline"] = _bubbles(told.pipeline)
    return rows


def _bubbles(told: PipelineNumbers) -> str:
    return (
        f"{told.schedule}: bubble {told.bubble_measured:.1%} measured, {told.bubble_planned:.1%} planned "
        f"(step {told.step:,}: {format_seconds(told.makespan_s)}, planned {format_seconds(told.makespan_planned_s)})"
    )
