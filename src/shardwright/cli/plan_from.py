"""shardwright plan --from: read the configuration of another system, price it, and name its faster layouts."""

import shlex
import sys
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from shardwright.cli.common import console, error_console, print_json, print_table, print_text
from shardwright.cli.plan_asked import PlanOptions, changed_cluster, no_peak, wrong_options
from shardwright.cli.plan_model import find_model
from shardwright.system.errors import InputError, LayoutError
from shardwright.view.terminal import columns

if TYPE_CHECKING:
    from shardwright.cost.hardware import Cluster
    from shardwright.cost.job import Job
    from shardwright.planner.choice import PricedLayout
    from shardwright.readers.foreign_run import ForeignRun, Instead

TAKEN = (
    *("from_", "model", "cluster", "global_batch", "seq_len", "link", "network", "hardware", "host_memory"),
    *("memory_margin", "top", "budget_tokens", "write", "overwrite", "json"),
)
"""The options of `plan` that go with --from."""
SHOWN = 3
"""How many alternatives are shown with their options."""


def plan_from(options: PlanOptions) -> None:
    """Read the configuration, price its layout and print the fastest alternatives."""
    from shardwright.planner.choice import PricedLayout
    from shardwright.planner.search import limit_bytes
    from shardwright.readers.foreign_run import alternatives
    from shardwright.system.control_groups import usable_cores

    _check(options)
    run, cluster, assumed = read_run(options.from_ or [], options)
    job = run.job(cluster)
    limit = limit_bytes(job, options.memory_margin)
    priced = PricedLayout.from_choice(job, run.choice)
    text = None if options.write is None else run_file_text(run, job, shlex.join(["shardwright", *sys.argv[1:]]))
    with error_console.status("evaluating the layouts of the system"):
        others = alternatives(run, job, options.memory_margin, min(options.top, SHOWN), usable_cores())
    if options.write is not None and text is not None:
        from shardwright.system.files import write_whole

        write_whole(options.write, text.encode("utf-8"))
    if options.json:
        _print_json(run, job, priced, limit, others, assumed, options)
    else:
        _print(run, priced, limit, others, assumed, options)
    if not priced.fits(limit):
        raise typer.Exit(1)


def _check(options: PlanOptions) -> None:
    """Raise InputError for options that do not go with --from."""
    given = [each.name for each in fields(options) if getattr(options, each.name) != each.default]
    others = [
        "a run file" if name == "target" else f"--{name.replace('_', '-')}" for name in given if name not in TAKEN
    ]
    wrong = wrong_options(options)
    if others:
        wrong.insert(0, f"--from names the configuration that is planned; leave out {' and '.join(others)}")
    if wrong:
        raise InputError(*wrong)


def read_run(paths: Sequence[Path], options: PlanOptions) -> "tuple[ForeignRun, Cluster, list[str]]":
    """Return the configuration, its cluster, and the assumptions about the cluster. Raises InputError."""
    from shardwright.cost.hardware import cluster as named_cluster
    from shardwright.model.presets import resolve
    from shardwright.readers.foreign_run import DEFAULT_ACCELERATOR, Request, read_configuration

    text, size = options.cluster, None
    if text is not None and ":" in text:
        size = named_cluster(text, options.hardware).size
    model = None
    if options.model is not None:
        _, model = find_model(options.model, options.seq_len, lambda name: (name, resolve(name)))
    run = read_configuration(paths, Request(size, model, options.global_batch, options.seq_len))
    assumed = []
    if size is None:
        name = text or run.accelerator or DEFAULT_ACCELERATOR
        if text is None:
            why = "as the file is named" if run.accelerator else "since no file names an accelerator"
            assumed.append(f"{name}, {why}; --cluster says otherwise")
        text = f"{name}:{run.described.world_size}"
        node = run.described.node_size
        if node is not None and node < named_cluster(text, options.hardware).node_size <= 8:
            text += f"/{node}"
    assert text is not None
    cluster = changed_cluster(text, options, options.link, options.network)
    if problems := no_peak(cluster, run.described.precision):
        raise InputError(*problems)
    return run, cluster, assumed


def run_file_text(run: "ForeignRun", job: "Job", command: str) -> str:
    """Return the run file of the layout, for this system's software. Raises InputError if `train` cannot run it."""
    from shardwright.config import parse
    from shardwright.cost.stack import SHARDWRIGHT
    from shardwright.planner.run_file import DEFAULT_PRESET, run_file
    from shardwright.split.rules import problems
    from shardwright.system.files import parse_toml

    if broken := list(problems(job.model, run.described.layout, job.seq_len)):
        raise LayoutError(*(f"{run.files[0]}: as a run file: {problem}" for problem in broken))
    own = replace(job, stack=SHARDWRIGHT)
    text = run_file(own, DEFAULT_PRESET, run.choice, command)
    parse(parse_toml(text), source=f"{run.files[0]}, as a run file")
    return text


def _print(
    run: "ForeignRun",
    priced: "PricedLayout",
    limit: float,
    others: "Sequence[Instead]",
    assumed: Sequence[str],
    options: PlanOptions,
) -> None:
    from shardwright.report.plan_view import job_note, layout_parts
    from shardwright.view.document import VerbDocument
    from shardwright.view.terminal import print_document

    print_text(f"{run.system.name}: {', '.join(run.files)}")
    print_text(job_note(priced.job, "the model of the file").text)
    _print_read(run, [*run.assumed, *assumed])
    console.print()
    parts = [*layout_parts(priced, limit, options.budget_tokens)]
    print_document(VerbDocument(str(priced.choice), None, parts), console)
    _print_others(priced, others, limit)
    if options.write is not None:
        console.print()
        print_text(f"written to {options.write}")


def _print_read(run: "ForeignRun", assumed: Sequence[str]) -> None:
    """Print every option with its place: read, without counterpart, without effect; and the assumptions."""
    from shardwright.readers.foreign_run import options_by_fate
    from shardwright.readers.table import NO_COUNTERPART, NO_EFFECT, READ

    fates = options_by_fate(run.records)
    console.print("\n[bold]Read[/]")
    table = columns("option", "value", "line", "here", "note", left=5)
    for record in fates.get(READ, []):
        table.add_row(record.option, record.value, _line(record.where, run), record.key, record.note)
    print_table(table)
    if assumed or run.skipped:
        console.print("\n[bold]Assumed[/]")
        for text in [*assumed, *run.skipped]:
            print_text(f"  {text}")
    if missing := fates.get(NO_COUNTERPART, []):
        console.print("\n[bold]No counterpart here[/]")
        for record in missing:
            print_text(f"  {record.option} {record.value} ({record.where}): {record.note}")
    if silent := fates.get(NO_EFFECT, []):
        console.print("\n[bold]No effect on time and memory[/]")
        for note in dict.fromkeys(record.note for record in silent):
            named = ", ".join(f"{each.option} ({_line(each.where, run)})" for each in silent if each.note == note)
            print_text(f"  {note}: {named}")


def _line(where: str, run: "ForeignRun") -> str:
    """Return a place; with a single file, its line alone."""
    file, _, line = where.rpartition(":")
    return line if file in ("", run.files[0]) and len(run.files) == 1 else where


def _print_others(priced: "PricedLayout", others: "Sequence[Instead]", limit: float) -> None:
    from shardwright.planner.words import warnings
    from shardwright.system.units import format_bytes, format_seconds

    console.print()
    if not others:
        console.print(
            "no layout that the system can run fits; more accelerators, or other options than those of a layout"
        )
    for each in others:
        slower = each.priced.step_s / priced.step_s - 1
        beside = "faster" if slower < 0 else "slower"
        console.print(
            f"[bold]instead[/]: {format_seconds(each.priced.step_s)} a step, {abs(slower):.1%} {beside}, "
            f"{format_bytes(each.priced.peak_bytes)} of {format_bytes(limit)}",
            soft_wrap=True,
        )
        for option, before, after in each.changes:
            if before is not None:
                print_text(f"  - {_pasted(option, before)}")
            if after is not None:
                print_text(f"  + {_pasted(option, after)}")
        for warning in warnings(each.priced):
            print_text(f"  warning: {warning}")


def _pasted(option: str, value: str) -> str:
    """Return an option as it is written in a file: a switch of a command line has no value."""
    if not option.startswith("--"):
        return f"{option}{value}" if option.endswith((" = ", ": ", "=")) else f"{option} = {value}"
    return option if value == "true" else f"{option} {value}"


def _print_json(
    run: "ForeignRun",
    job: "Job",
    priced: "PricedLayout",
    limit: float,
    others: "Sequence[Instead]",
    assumed: Sequence[str],
    options: PlanOptions,
) -> None:
    from shardwright.planner.document import job_document, layout_document
    from shardwright.readers.foreign_run import as_document

    document = as_document(run)
    document["assumed"] += assumed
    document |= job_document(job, run.system.name, limit) | layout_document(priced, limit, options.budget_tokens)
    document["alternatives"] = [
        {
            "step_s": each.priced.step_s,
            "peak_bytes": each.priced.peak_bytes,
            "layout": each.priced.choice.settings(),
            "changes": [{"option": option, "from": before, "to": after} for option, before, after in each.changes],
        }
        for each in others
    ]
    print_json(document)
