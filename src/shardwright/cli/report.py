"""shardwright report: the results of one or several runs: numbers, a picture of the curves, and one HTML page."""

from json import dumps
from pathlib import Path

from shardwright.cli.common import AsJson, argument, option, reading_verb, show
from shardwright.cost.expert_load import KEY
from shardwright.report.comparison_view import comparison_document, draw_losses
from shardwright.report.curves import draw_curves
from shardwright.report.run_record import RunRecord, read_run
from shardwright.report.run_view import run_document
from shardwright.report.traces import merge_traces
from shardwright.runs.folder import CURVES, EXPERT_LOAD, PAGE, TIMELINE
from shardwright.schedule.draw import draw
from shardwright.schedule.trace import write_trace
from shardwright.system.errors import InputError
from shardwright.system.files import problem_of_place, suffix_problem, write_whole

COMPARISON = "comparison.html"


@reading_verb
def report(
    run_dirs: list[Path] = argument(..., "the folder of a run, finished or still training, or several", "RUN_DIR..."),
    out: Path | None = option(
        None, "the page; if not given, RUN_DIR/report.html, or comparison.html for several runs", "FILE.html"
    ),
    picture: Path | None = option(
        None,
        "the curves alone; if not given, RUN_DIR/curves.png; for several runs the name of the page with .png",
        "FILE.png|svg",
    ),
    timeline: Path | None = option(
        None,
        "the timeline of the pipeline alone, as a picture or for ui.perfetto.dev; RUN_DIR/timeline.svg if not given",
        "FILE.svg|json",
    ),
    trace: Path | None = option(
        None, "the traces of all ranks that [profile] requested, merged into one file for ui.perfetto.dev", "FILE.json"
    ),
    json: AsJson = False,
) -> None:
    """Show the results of a run: its numbers, its curves, and one HTML page.

    The page needs no other file and no network, and can be made while the run trains. For a run with layout.pp it also
    shows a step of the pipeline, as planned and as measured. For several runs it shows the losses in one picture and a
    table of the numbers. For a run with experts it also writes the tokens of each expert in the last logged step to
    expert_load.json next to the page, which `plan --expert-load` reads.

    shardwright report runs/debug

    shardwright report runs/debug runs/slower --out comparison.html

    Exit codes: 0 written, 2 the folder is not one of a run, or a file cannot be written.
    """
    if len(run_dirs) > 1:
        for option, given in (("--timeline", timeline), ("--trace", trace)):
            if given is not None:
                raise InputError(f"{option} {given} is for one run, and {len(run_dirs)} are given; leave it out")
        _compare([read_run(folder) for folder in run_dirs], out or Path(COMPARISON), picture, json)
        return
    run = read_run(run_dirs[0])
    page, curves = out or run.folder / PAGE, picture or run.folder / CURVES
    drawing = _place_of_timeline(run, timeline)
    _check_places(page, curves, *filter(None, [drawing, trace]))
    if trace is not None:
        merge_traces(run.folder, trace)
    draw_curves(run, curves)
    files = {"page": page, "picture": curves}
    if run.pipeline is not None and drawing is not None:
        (draw if drawing.suffix.lower() == ".svg" else write_trace)(run.pipeline.timelines, drawing)
        files["timeline"] = drawing
    if trace is not None:
        files["trace"] = trace
    if (
        tokens := next((record.tokens_by_expert for record in reversed(run.train) if record.tokens_by_expert), None)
    ) is not None:
        files["expert_load"] = page.with_name(EXPERT_LOAD)
        write_whole(files["expert_load"], dumps({KEY: tokens}).encode())
    show(run_document(run, files), json, *files.values())


def _compare(runs: list[RunRecord], page: Path, picture: Path | None, json: bool) -> None:
    """Write the page and the picture of several runs."""
    losses = picture or page.with_suffix(".png")
    _check_places(page, losses)
    draw_losses(runs, losses)
    files = {"page": page, "picture": losses}
    show(comparison_document(runs, files), json, *files.values())


def _check_places(*paths: Path) -> None:
    """Raise InputError for files that cannot be written, before anything is drawn."""
    if problems := [problem for path in paths if (problem := problem_of_place(path)) is not None]:
        raise InputError(*problems)


def _place_of_timeline(run: RunRecord, requested: Path | None) -> Path | None:
    """Return the path of the pipeline's timeline, or None if there is no timeline. Raises InputError if a timeline is
    requested and there is none, and for a suffix that is neither a picture's nor a trace's."""
    if run.pipeline is not None:
        place = requested or run.folder / TIMELINE
        if (problem := suffix_problem(place, ".svg", ".json")) is not None:
            raise InputError(f"--timeline {problem}")
        return place
    if requested is not None:
        pp = run.config.layout.layout().pp
        why = "layout.pp is 1" if pp == 1 else f"no step has been recorded by all {pp} ranks of the pipeline yet"
        raise InputError(f"--timeline {requested}: {run.folder} has no timeline, as {why}; leave it out")
    return None
