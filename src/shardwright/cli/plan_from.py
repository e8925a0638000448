"""shardwright plan --from: read the configuration of another system, price it, and name its faster layouts."""

import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from shardwright.cli.common import console, error_console, print_text, show
from shardwright.cli.plan_asked import changed_cluster, no_peak
from shardwright.cli.plan_goal import check_goal, training_goal
from shardwright.cli.plan_model import find_model
from shardwright.cli.plan_options import FromOptions, PlanOptions, plan_option_problems
from shardwright.system.errors import InputError, LayoutError

if TYPE_CHECKING:
    from shardwright.config import RunConfig
    from shardwright.cost.hardware import Cluster
    from shardwright.cost.job import Job
    from shardwright.readers.foreign_run import ForeignRun

TAKEN = (
    *("from_", "model", "cluster", "global_batch", "seq_len", "link", "network", "hardware", "host_memory"),
    *("memory_margin", "top", "budget_tokens", "price", "operations", "write", "overwrite", "json"),
)
"""The options of `plan` that go with --from."""
SHOWN = 3
"""How many alternatives are shown with their options."""


def plan_from(options: PlanOptions) -> None:
    """Read the configuration, price its layout and print the fastest alternatives."""
    from shardwright.planner.choice import PricedLayout
    from shardwright.planner.search import limit_bytes
    from shardwright.readers.foreign_run import alternatives
    from shardwright.report.foreign_view import foreign_view
    from shardwright.system.control_groups import usable_cores

    _check(options)
    run, cluster, assumed = read_run(options.from_ or [], options)
    job = run.job(cluster)
    goal = training_goal(options, stages=run.described.stages)
    check_goal(goal, job)
    limit = limit_bytes(job, options.memory_margin)
    priced = PricedLayout.from_choice(job, run.choice)
    command = shlex.join(["shardwright", *sys.argv[1:]])
    text = None if options.write is None else run_file_text(run, job, command, options.budget_tokens)
    with error_console.status("evaluating the layouts of the system"):
        others = alternatives(run, job, options.memory_margin, min(options.top, SHOWN), usable_cores())
    if options.write is not None and text is not None:
        from shardwright.system.files import write_whole

        write_whole(options.write, text.encode("utf-8"))
    show(foreign_view(run, assumed, priced, limit, others, goal), options.json, None)
    if options.write is not None and not options.json:
        console.print()
        print_text(f"written to {options.write}")
    if not priced.fits(limit):
        raise typer.Exit(1)


def _check(options: PlanOptions) -> None:
    """Raise InputError for options that do not go with --from."""
    given = [field.name for field in fields(options) if getattr(options, field.name) != field.default]
    others = [
        "a run file" if name == "target" else f"--{name.replace('_', '-')}" for name in given if name not in TAKEN
    ]
    problems = plan_option_problems(options)
    if others:
        problems.insert(0, f"--from names the configuration that is planned; leave out {' and '.join(others)}")
    if problems:
        raise InputError(*problems)


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
    if cluster.accelerator.rates is not None:
        assumed.append(f"matmuls, attention and memory as fast as measured on {cluster.accelerator.name}")
    if problems := no_peak(cluster, run.described.precision):
        raise InputError(*problems)
    return run, cluster, assumed


def load_run(options: FromOptions, run_file: Path | None, overrides: Sequence[str], own: Sequence[str]) -> "RunConfig":
    """Return the run of `run_reader` with the changes of --set."""
    return run_reader(options, run_file, own)(overrides)


def run_reader(
    options: FromOptions, run_file: Path | None, own: Sequence[str] = ()
) -> Callable[[Sequence[str]], "RunConfig"]:
    """Return a function from the changes of --set to the run file, or to the configuration of --from as one, which is
    read once, here. `own`: options that the verb has without --from too. Both raise InputError with every problem."""
    from shardwright.config import load, parse
    from shardwright.system.files import parse_toml

    if not options.from_:
        if given := options.given(own):
            verb = "describes" if len(given) == 1 else "describe"
            raise InputError(f"{' and '.join(given)} {verb} a configuration of --from; for a run file use --set")
        if run_file is None:
            raise typer.BadParameter("name a run file, such as examples/debug.toml", param_hint="RUN_FILE")
        return partial(load, run_file)
    if run_file is not None:
        raise InputError(f"{run_file} and --from {options.from_[0]} are both configurations; leave one out")
    run, cluster, _ = read_run(options.from_, options.plan_options())
    text = run_file_text(run, run.job(cluster), shlex.join(["shardwright", *sys.argv[1:]]))
    error_console.print(
        f"{run.files[0]}, {run.system.name}: {run.choice}; plan --from shows the settings that were read", markup=False
    )
    return lambda overrides: parse(parse_toml(text), overrides, source=f"{run.files[0]}, as a run file")


def run_file_text(run: "ForeignRun", job: "Job", command: str, budget_tokens: float | None = None) -> str:
    """Return the run file of the layout, for this system's software. `budget_tokens`: of the whole run. Raises
    InputError if `train` cannot run it."""
    from shardwright.config import parse
    from shardwright.config.batch import BatchSection
    from shardwright.cost.stack import SHARDWRIGHT
    from shardwright.planner.run_file import DEFAULT_PRESET, STEPS, batch_keys, run_file
    from shardwright.split.rules import problems
    from shardwright.system.files import parse_toml

    if broken := list(problems(job.model, run.described.layout, job.seq_len)):
        raise LayoutError(*(f"{run.files[0]}: as a run file: {problem}" for problem in broken))
    own = replace(job, stack=SHARDWRIGHT)
    tokens, stages = budget_tokens, run.described.stages
    if stages and tokens is None:
        tokens = stages[-1].from_tokens + STEPS * job.tokens
    reached = [stage for stage in stages if tokens is None or stage.from_tokens < tokens]
    batch = batch_keys(own, run.choice, reached)
    steps = None if tokens is None else BatchSection(**batch).schedule.steps(tokens)
    text = run_file(own, DEFAULT_PRESET, run.choice, command, tokens, batch, steps)
    parse(parse_toml(text), source=f"{run.files[0]}, as a run file")
    return text
