"""shardwright plan: which layout fits, which is fastest, and why; and how good such predictions are."""

import shlex
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardwright.cli.common import console, error_console, load_extensions, print_json, verb
from shardwright.cli.plan_asked import PRECISIONS, Asked, ask, check
from shardwright.errors import InputError, LayoutError

if TYPE_CHECKING:
    from shardwright.cost.job import Job
    from shardwright.plan.alternatives import Alternative
    from shardwright.plan.choice import Choice
    from shardwright.plan.search import Plan, Priced

EVALUATE = "evaluate"


@verb
def plan(
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="RUN.toml|evaluate",
            help="a run file, whose model, batch and precision are taken; or the word evaluate, to compare predictions "
            "with the measured runs of a table",
            show_default=False,
        ),
    ] = None,
    runs: Annotated[
        Path | None,
        typer.Argument(
            metavar="RUNS.csv",
            help="evaluate only: a table of measured runs; those that come with shardwright if not given",
            show_default=False,
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option(metavar="NAME", help="a preset, such as llama-3.1-70b", show_default=False)
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(
            metavar="NAME:COUNT",
            help="accelerators and how many, such as h100:64; h100:64/4@800Gb: 4 a node, 800 Gbit/s each to the others",
            show_default=False,
        ),
    ] = None,
    global_batch: Annotated[
        int | None, typer.Option(metavar="N", help="sequences of a step, over all ranks", show_default=False)
    ] = None,
    seq_len: Annotated[int | None, typer.Option(metavar="N", help="tokens of a sequence", show_default=False)] = None,
    precision: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help=f"of the products: {', '.join(PRECISIONS)}; bf16 if not given", show_default=False
        ),
    ] = None,
    hardware: Annotated[
        Path | None,
        typer.Option(metavar="FILE.toml", help="your accelerators, networks and clusters", show_default=False),
    ] = None,
    memory_margin: Annotated[
        float, typer.Option(metavar="X", help="share of the accelerator's memory to keep free")
    ] = 0.1,
    top: Annotated[int, typer.Option(metavar="N", help="how many of the best layouts to list")] = 10,
    explain: Annotated[
        str | None,
        typer.Option(
            metavar="LAYOUT",
            help="instead of searching, show every formula for this layout, such as "
            "tp=8,pp=4,dp_shard=2,zero=1,micro_batch=1; keys of a run file's layout section",
            show_default=False,
        ),
    ] = None,
    budget_tokens: Annotated[
        float | None,
        typer.Option(metavar="N", help="tokens of the whole run, such as 15e12: adds days and accelerator-hours"),
    ] = None,
    write: Annotated[
        Path | None,
        typer.Option(metavar="FILE.toml", help="write the layout as a run file for train and verify"),
    ] = None,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE.html", help="write one page with pictures", show_default=False)
    ] = None,
    extension: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE.py",
            help="a Python file or module that registers schedules or models of your own; may be repeated",
            show_default=False,
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="print one JSON document, and nothing else")] = False,
) -> None:
    """Find the fastest layout that fits, without a GPU, and say why.

    Every valid layout of the cluster is evaluated: its memory from formulas, its time with its pipeline's schedule
    simulated. Printed are the best, where its memory and its time go, and what others lose against it.

    shardwright plan --model llama-3.1-70b --cluster h100:64 --global-batch 1024 --seq-len 8192

    shardwright plan examples/llama-3.1-8b.toml --cluster h100:32 --write planned.toml

    shardwright plan evaluate runs.csv

    Exit codes: 0 found, 1 nothing fits or nothing could be compared, 2 the input cannot be used.
    """
    load_extensions(extension)
    if target == EVALUATE:
        others = {
            "--model": model, "--cluster": cluster, "--global-batch": global_batch, "--seq-len": seq_len,
            "--precision": precision, "--hardware": hardware, "--explain": explain, "--budget-tokens": budget_tokens,
            "--write": write, "--html": html,
        }  # fmt: skip
        given = [option for option, value in others.items() if value is not None]
        if given:
            raise InputError(f"plan evaluate takes a table and --json alone; leave out {', '.join(given)}")
        _evaluate(runs, json)
        return
    asked = ask(target, runs, model, cluster, global_batch, seq_len, precision, hardware)
    if write is not None and target is not None and write.resolve() == Path(target).resolve():
        raise InputError(f"--write {write}: that is the run file that is read; name another")
    check(asked.job, memory_margin, top, explain, budget_tokens, write, html)
    if explain is not None:
        _explain(asked, explain, memory_margin, budget_tokens, write, json)
    else:
        _search(asked, memory_margin, top, budget_tokens, write, html, json)


def _evaluate(runs: Path | None, json: bool) -> None:
    from shardwright.plan.evaluate import MEASURED_RUNS, evaluate, report_lines

    found = evaluate(runs or MEASURED_RUNS)
    if json:
        print_json(found.as_json())
    else:
        if runs is None:
            console.print(f"{MEASURED_RUNS.name}, the published runs that come with shardwright", soft_wrap=True)
        for line in report_lines(found):
            console.print(line, markup=False, soft_wrap=True)
    if not found.rows:
        raise typer.Exit(1)


def _search(
    asked: Asked,
    memory_margin: float,
    top: int,
    budget_tokens: float | None,
    write: Path | None,
    html: Path | None,
    json: bool,
) -> None:
    from shardwright.cli import plan_text
    from shardwright.plan.alternatives import runners_up, well_known
    from shardwright.plan.document import plan_document
    from shardwright.plan.nearest import remedies
    from shardwright.plan.search import search

    with error_console.status("evaluating every layout") as status:
        started = time.perf_counter()
        found = search(asked.job, memory_margin=memory_margin, top=top)
        took_s = time.perf_counter() - started
        status.update("looking at others")
        others = [*_own(asked, found), *runners_up(found), *well_known(found)] if found.best else []
        instead = [] if found.best else remedies(asked.job, memory_margin)
    if not json:
        plan_text.print_job(asked.job, asked.name)
    if json:
        print_json(plan_document(found, asked.name, others, instead, budget_tokens))
    elif found.best:
        plan_text.print_plan(found, others, memory_margin, budget_tokens, took_s)
    else:
        plan_text.print_nothing_fits(found, memory_margin, instead)
    if not found.best:
        raise typer.Exit(1)
    written = []
    if write is not None:
        _write(asked, found.best[0].choice, write, budget_tokens)
        written.append(write)
    if html is not None:
        _page(found, asked.name, others, budget_tokens, html)
        written.append(html)
    _say(written, json)


def _own(asked: Asked, found: "Plan") -> list["Alternative"]:
    """The layout of the run file, where it is one for this cluster and not the best."""
    from shardwright.plan.alternatives import Alternative
    from shardwright.plan.choice import Choice

    if asked.config is None:
        return []
    choice = Choice(asked.config.layout.layout(), asked.config.batch.micro_batch)
    try:
        priced = _priced(asked.job, choice)
    except LayoutError:
        return []
    if choice == found.best[0].choice:
        return []
    fits = priced.peak_bytes <= found.limit_bytes
    return [Alternative("as in the run file", priced if fits else None, (choice, priced.peak_bytes))]


def _explain(
    asked: Asked, text: str, memory_margin: float, budget_tokens: float | None, write: Path | None, json: bool
) -> None:
    from shardwright.cli import plan_text
    from shardwright.plan.choice import read
    from shardwright.plan.document import job_document, layout_document
    from shardwright.plan.explain import explain
    from shardwright.plan.search import limit_bytes

    choice = read(text)
    try:
        priced = _priced(asked.job, choice)
    except LayoutError as error:
        raise LayoutError(*(f"--explain {choice}: {problem}" for problem in error.problems)) from None
    limit = limit_bytes(asked.job, memory_margin)
    lines = explain(priced)
    if json:
        document = job_document(asked.job, asked.name, limit) | layout_document(priced, limit, budget_tokens)
        print_json(document | {"formulas": [vars(line) for line in lines]})
    else:
        plan_text.print_job(asked.job, asked.name)
        console.print()
        plan_text.print_layout(priced, limit, budget_tokens)
        plan_text.print_explained(lines)
    if priced.peak_bytes > limit:
        if write is not None:
            error_console.print(f"not written to {write}: the layout does not fit", markup=False)
        raise typer.Exit(1)
    if write is not None:
        _write(asked, choice, write, budget_tokens)
        _say([write], json)


def _priced(job: "Job", choice: "Choice") -> "Priced":
    """Raises LayoutError with everything that keeps the layout from running this job on this cluster, or from being
    priced."""
    from shardwright.cost.estimate import estimate
    from shardwright.plan.search import Priced

    estimate(job, choice.layout, choice.micro_batch)
    return Priced.of(job, choice)


def _write(asked: Asked, choice: "Choice", path: Path, budget_tokens: float | None) -> None:
    """The layout as a run file: the one that was given, with its layout and batch replaced, or a new one."""
    from shardwright.files import write_whole
    from shardwright.plan.run_file import run_file

    job = asked.job
    if asked.config is None:
        command = shlex.join(["shardwright", *sys.argv[1:]])
        text = run_file(job, asked.name, choice, command, budget_tokens)
    else:
        from shardwright.config import parse, resolved_toml

        layout = choice.settings()
        table = asked.config.model_dump(exclude_unset=True)
        table["batch"] |= {"seq_len": job.seq_len, "global_batch": job.global_batch}
        table["batch"]["micro_batch"] = layout.pop("micro_batch")
        table["layout"] = layout
        table["precision"] = table.get("precision", {}) | {"compute": job.precision}
        text = resolved_toml(parse(table, source=str(path)))
    write_whole(path, text.encode("utf-8"))


def _page(found: "Plan", name: str, others: list[Any], budget_tokens: float | None, path: Path) -> None:
    from shardwright.report.plan_page import write_page

    write_page(found, name, others, budget_tokens, path)


def _say(written: list[Path], json: bool) -> None:
    if not json:
        console.print()
        for path in written:
            console.print(f"written to {path}", markup=False, soft_wrap=True)
