"""shardwright report: the results of one or several runs: numbers, a picture of the curves, and one HTML page."""

import dataclasses
from collections import Counter
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from shardwright.cli.common import AsJson, console, print_json, print_text, reading_verb
from shardwright.report.comparison import comparison_rows, draw_losses, write_comparison
from shardwright.report.curves import draw_curves
from shardwright.report.headline import headline, title_of
from shardwright.report.page import write_page
from shardwright.report.run_record import RunRecord, read_run
from shardwright.run_folder import CURVES, PAGE, TIMELINE
from shardwright.schedule.draw import draw
from shardwright.schedule.trace import write_trace
from shardwright.system.errors import InputError
from shardwright.system.units import format_seconds

COMPARISON = "comparison.html"


@reading_verb
def report(
    run_dirs: Annotated[
        list[Path], typer.Argument(metavar="RUN_DIR...", help="the folder of a run, finished or going on, or several")
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.html", help="the page; if not given, RUN_DIR/report.html, or comparison.html for several runs"
        ),
    ] = None,
    picture: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.png|svg",
            help="the curves alone; if not given, RUN_DIR/curves.png, or for several runs beside the page",
        ),
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
    """Show the results of a run: its numbers, its curves, and one HTML page.

    The page needs no other file and no network, and can be made while the run trains. For a run with layout.pp it also
    shows a step of the pipeline, as planned and as measured. For several runs it shows the losses in one picture and a
    table of the numbers.

    shardwright report runs/debug

    shardwright report runs/debug runs/slower --out comparison.html

    Exit codes: 0 written, 2 the folder is not one of a run, or a file cannot be written.
    """
    if len(run_dirs) > 1:
        _compare([read_run(each) for each in run_dirs], out or Path(COMPARISON), picture, timeline, json)
        return
    run = read_run(run_dirs[0])
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
    console.print(f"[bold]{escape(title_of(run))}[/]")
    rows = told.rows()
    if told.first_non_finite_step is not None:
        rows.append(("not finite", f"{told.first_non_finite_step:,}", "the first step with such a loss"))
    if (step := told.pipeline) is not None:
        bubbles = f"bubble {step.bubble_measured:.1%} measured, {step.bubble_planned:.1%} planned"
        seconds = f"{format_seconds(step.makespan_s)}, planned {format_seconds(step.makespan_planned_s)}"
        rows.append(("pipeline", f"{step.schedule}: {bubbles}", f"(step {step.step:,}: {seconds})"))
    if kinds := Counter(event.kind for event in run.faults):
        told_of = ", ".join(f"{n} {kind}" for kind, n in sorted(kinds.items()))
        last = run.faults[-1]
        rows.append(("events", told_of, f"(the last: {last.text.partition(chr(10))[0]})"))
    for name, value, remark in [*rows, *((name, path, "") for name, path in files.items())]:
        print_text(f"  {name:<18} {value:<8} {remark}".rstrip())


def _compare(runs: list[RunRecord], page: Path, picture: Path | None, timeline: Path | None, json: bool) -> None:
    """Write the page and the picture of several runs."""
    if timeline is not None:
        raise InputError(f"--timeline {timeline} is for one run, and {len(runs)} are given; leave it out")
    losses = picture or page.with_suffix(".png")
    draw_losses(runs, losses)
    write_comparison(runs, page)
    files = {"page": str(page), "picture": str(losses)}
    if json:
        told = [{"run": str(run.folder), **dataclasses.asdict(headline(run))} for run in runs]
        print_json({"runs": told, **files})
        return
    for row in comparison_rows(runs):
        name, *numbers = row.items()
        console.print(f"[bold]{escape(name[1])}[/]")
        for key, value in numbers:
            print_text(f"  {key:<18} {value}")
    for key, value in files.items():
        print_text(f"{key:<20} {value}")


def _place_of_timeline(run: RunRecord, asked: Path | None) -> Path | None:
    """Return the path of the pipeline's timeline, or None if there is no timeline. Raises InputError if a timeline is
    requested and there is none, and for a suffix that is neither a picture's nor a trace's."""
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
