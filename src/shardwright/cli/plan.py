"""shardwright plan: find the fastest layout that fits and explain it; evaluate such predictions."""

import json
import shlex
import sys
import time
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from shardwright.cli.common import error_console, print_text, reading_verb, show
from shardwright.cli.plan_asked import PlanRequest, choice_of_run, priced_of, read_request
from shardwright.cli.plan_options import PlanOptions
from shardwright.system.errors import InputError, LayoutError

if TYPE_CHECKING:
    from shardwright.config import RunConfig
    from shardwright.cost.job import Job
    from shardwright.planner.alternatives import Alternative
    from shardwright.planner.choice import Choice
    from shardwright.planner.search import Plan

EVALUATE = "evaluate"


@reading_verb
def plan(options: PlanOptions) -> None:
    """Find the fastest layout that fits, without a GPU, and explain the choice.

    Every valid layout of the cluster is evaluated: its memory from formulas, its time with its pipeline's schedule
    simulated. Among the layouts that tie with the fastest layout, the recommended layout has headroom in memory and
    the fewest axes and settings. The output shows its memory and step time by kind, the gain of the fastest layout, and
    how much slower other layouts are.

    shardwright plan --model llama-3.1-70b --cluster h100:64 --global-batch 1024 --seq-len 8192

    shardwright plan examples/llama-3.1-8b.toml --cluster h100:32 --write planned.toml

    shardwright plan --model llama-3.1-8b --cluster h100:8 --global-batch 128 --seq-len 8192 --compare link=h100-pcie

    shardwright plan --from train_gpt.sh --cluster h100:64

    shardwright plan evaluate runs.csv

    Modes with options of their own: plan diff --help, why one run file is slower than another; plan serve --help, how
    to serve a model; plan evaluate-serving --help; plan rl --help, the time of a step of GRPO; plan evaluate-rl --help;
    plan calibrate --help, narrow predictions by training logs; plan explain-log --help, a log next to its prediction.

    Exit codes: 0 found, 1 nothing fits or nothing could be compared, 2 the input cannot be used.
    """
    if options.target == EVALUATE:
        _evaluate(options)
        return
    if options.from_:
        from shardwright.cli.plan_from import plan_from

        plan_from(options)
        return
    request = read_request(options)
    if options.measured is not None:
        _compare_with_run(request, options)
    elif options.compare:
        from shardwright.cli.plan_compare import compare

        compare(request, options)
    elif request.explained is not None:
        _explain(request, options, request.explained)
    else:
        _search(request, options)


def _evaluate(options: PlanOptions) -> None:
    given = [field.name for field in fields(options) if getattr(options, field.name) != field.default]
    options_of = {name: f"--{name.strip('_').replace('_', '-')}" for name in given}
    if others := ", ".join(text for name, text in options_of.items() if name not in ("target", "runs", "json")):
        raise InputError(f"plan evaluate takes a table and --json alone; leave out {others}")
    from shardwright.planner.evaluate import MEASURED_RUNS, evaluate
    from shardwright.report.evaluation_view import evaluation_view

    result = evaluate(options.runs or MEASURED_RUNS)
    show(evaluation_view(result), options.json, None)
    if not result.rows:
        raise typer.Exit(1)


def _search(request: PlanRequest, options: PlanOptions) -> None:
    from shardwright.planner.alternatives import runners_up, well_known
    from shardwright.planner.batches import near_batches
    from shardwright.planner.document import plan_document
    from shardwright.planner.nearest import remedies
    from shardwright.planner.search import search
    from shardwright.report.plan_view import SearchedPlan, plan_view
    from shardwright.system.control_groups import usable_cores

    margin, processes = options.memory_margin, usable_cores()
    with error_console.status("evaluating every layout") as status:
        started = time.perf_counter()
        whole = result = search(
            request.job,
            memory_margin=margin,
            top=options.top,
            fixed=request.fixed,
            processes=processes,
            prefer=options.prefer,
        )
        if options.prefer == "cheapest":
            from shardwright.planner.batches import cheapest

            status.update("evaluating every layout of parts of the cluster")
            result = cheapest(whole, memory_margin=margin, top=options.top, processes=processes)
        took_s = time.perf_counter() - started
        status.update("looking at others")
        taken = result.recommended
        own = None if taken is None else _own(request, result)
        others = [] if taken is None else [*runners_up(result), *well_known(result)]
        batches = near_batches(result, margin, processes)
        instead = [] if taken is not None else remedies(request.job, options.memory_margin, request.fixed)
    data = None
    if options.json:  # its numbers with other loads of experts take time
        near = [{"global_batch": size.global_batch, "saved": size.saved} for size in batches]
        data = plan_document(result, whole, request.name, own, others, instead, request.goal) | {"near_batches": near}
    searched = SearchedPlan(result, whole, request.name, own, others, batches, instead, margin, request.goal, took_s)
    view = plan_view(searched, data)
    # The reader of the output may close it early (`| head`), so files are written before anything is printed.
    if taken is not None:
        _write(request, result.job, taken.choice, options)
    show(view, options.json, options.html)
    if taken is None:
        raise typer.Exit(1)
    _report_written(request, options)


def _own(request: PlanRequest, result: "Plan") -> "Alternative | None":
    """Return the layout of the run file, or None without a run file or if the layout is not valid for this cluster."""
    from shardwright.planner.alternatives import Alternative

    if request.config is None:
        return None
    choice = choice_of_run(request.config, result.job, result.limit_bytes)
    try:
        priced = priced_of(result.job, choice)
    except LayoutError as error:
        error_console.print(f"the layout of the run file: {error.problems[0]}", markup=False, soft_wrap=True)
        return None
    fits = priced.fits(result.limit_bytes)
    return Alternative("run file", priced if fits else None, (choice, priced.peak_bytes))


def _explain(request: PlanRequest, options: PlanOptions, choice: "Choice") -> None:
    from shardwright.planner.search import limit_bytes
    from shardwright.report.plan_view import explained_document

    try:
        priced = priced_of(request.job, choice)
    except LayoutError as error:
        raise LayoutError(*(f"--explain {choice}: {problem}" for problem in error.problems)) from None
    limit = limit_bytes(request.job, options.memory_margin)
    document = explained_document(priced, request.name, limit, request.goal)
    fits = priced.fits(limit)
    if fits:
        _write(request, request.job, choice, options)
    show(document, options.json, options.html)
    if not fits:
        if options.write is not None:
            error_console.print(f"not written to {options.write}: the layout does not fit", markup=False)
        raise typer.Exit(1)
    _report_written(request, options)


def _compare_with_run(request: PlanRequest, options: PlanOptions) -> None:
    """Print the run's medians next to the plan of its layout. Raises InputError if the run is of another run file."""
    from shardwright.config.settle import fullest_stage_config
    from shardwright.planner.document import job_document, layout_document
    from shardwright.planner.search import limit_bytes
    from shardwright.report.plan_measured import compare_run, measured_view, run_of

    assert options.measured is not None
    assert request.given is not None
    run = run_of(options.measured, request.given, str(options.target), request.job.cluster)
    limit = limit_bytes(request.job, options.memory_margin)
    priced = priced_of(request.job, choice_of_run(fullest_stage_config(run.config), request.job, limit))
    comparison = compare_run(run, priced)
    data = job_document(request.job, request.name, limit) | layout_document(priced, limit)
    data |= {"run": str(options.measured), "measured": comparison.as_json()}
    show(measured_view(comparison, priced, request.name, options.measured, data), options.json, options.html)


def _write(request: PlanRequest, job: "Job", choice: "Choice", options: PlanOptions) -> None:
    """Write the layout as a run file, with --write: the given run file with its layout and batch replaced, or a new
    file."""
    if options.write is None:
        return
    from shardwright.config.batch import BatchSection
    from shardwright.planner.run_file import batch_keys, run_file
    from shardwright.system.files import write_whole

    command = shlex.join(["shardwright", *sys.argv[1:]])
    stages = () if request.goal is None else request.goal.stages
    batch, tokens = batch_keys(job, choice, stages), options.budget_tokens
    if tokens is not None and "stages" in batch:
        batch["stages"] = [stage for stage in batch["stages"] if stage["from_tokens"] < tokens]
    steps = None if tokens is None else BatchSection(**batch).schedule.steps(tokens)
    if request.given is None:
        text = run_file(job, request.name, choice, command, tokens, batch, steps)
    else:
        text = _replanned(request.given, job, choice, {"batch": batch, "steps": steps}, options.write, command)
    write_whole(options.write, text.encode("utf-8"))


def _replanned(
    config: "RunConfig", job: "Job", choice: "Choice", planned: dict[str, Any], path: Path, command: str
) -> str:
    """Return the planned run file with this layout. `planned`: its `batch`, and its `steps` or None. Its run starts
    from step 0 in its own folder: `out` is a new folder next to the old one, named after the file, and
    checkpoint.resume is left out."""
    from shardwright.config import parse, resolved_toml
    from shardwright.planner.run_file import lora_keys, memory_gib, precision_keys

    layout = choice.settings()
    table = config.model_dump(exclude_unset=True)
    table["out"] = _new_out(config, path)
    table["memory_gib"] = memory_gib(job)
    if job.cluster.accelerator.is_cpu != (config.device == "cpu"):
        table["device"] = "auto"
    layout.pop("micro_batch")
    table |= {key: value for key, value in planned.items() if value is not None}
    table["layout"] = layout
    if job.model.lora != config.lora.spec:
        table["lora"] = lora_keys(job)
    if config.precision.planned != job.precision:
        table["precision"] = precision_keys(job)
    table["precision"] = table.get("precision", {}) | {"compile": job.compiled}
    table.get("checkpoint", {}).pop("resume", None)
    remark = (
        f"# Written by `{command}`.\n"
        f"# out is a new folder, so that the run in {json.dumps(config.out)} stays as it is; this run starts at step 0 "
        '(checkpoint.resume = "no").\n'
    )
    return remark + resolved_toml(parse(table, source=str(path)), absolute=True)


def _new_out(config: "RunConfig", path: Path) -> str:
    return f"{config.out.rstrip('/')}-{path.stem}"


def _report_written(request: PlanRequest, options: PlanOptions) -> None:
    if options.write is not None and not options.json:
        new = "" if request.config is None else f"; its out is a new folder, {_new_out(request.config, options.write)}"
        print_text(f"written to {options.write}{new}")
