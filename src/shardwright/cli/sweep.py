"""shardwright sweep: run a run file over a grid of values, and fit a power law of loss by FLOPs."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from shardwright.cli.common import (
    AsJson,
    Overrides,
    argument,
    error_console,
    fail,
    filled,
    option,
    output_problems,
    print_text,
    reading_verb,
    show,
    size_problems,
)
from shardwright.system.errors import InputError, ShardwrightError, WorkerError

if TYPE_CHECKING:
    from shardwright.training.sweep import SweepRun


@dataclass(frozen=True)
class SweepOptions:
    """Arguments and options of `sweep`."""

    run: Path = argument(..., "the run file", "RUN.toml")
    grid: list[str] | None = option(
        None, "a key of the run file with its values; may be repeated, for all combinations", "KEY=V,V,..."
    )
    out: Path | None = option(None, "for the runs, a folder each", "FOLDER")
    overrides: Overrides = None
    show_only: bool = option(False, "start nothing; show the results of the runs that ended", name="--show")
    on: str | None = option(None, "start nothing; write an array job of Slurm", "slurm")
    per_node: int = option(8, "with --on: most ranks of a machine, such as its GPUs", "N")
    cpus: int = option(8, "with --on: cores of a rank", "N")
    time: str = option("24:00:00", "with --on: longest time of one run", "HH:MM:SS")
    activate: str = option(
        "source .venv/bin/activate", "with --on: a shell line that makes shardwright available", "COMMAND"
    )
    draw: Path | None = option(None, "write the picture", "FILE.svg")
    html: Path | None = option(None, "write a page with table and picture", "FILE.html")
    json: AsJson = False


@reading_verb
def sweep(options: SweepOptions) -> None:
    """Train a run file with every combination of some values, one run after another, and compare the results.

    The table has the last loss and the FLOPs of each run. With three or more numbers of FLOPs, a power law
    L = a C^-b + c is fitted to the lowest loss of each. A sweep that was interrupted continues where it stopped when
    the same command is given again. --on slurm writes the run files and an array job instead, and --show reads the
    results afterwards.

    shardwright sweep run.toml --grid lr=1e-3,3e-3 --grid model.d_model=64,128 --out runs/sweep

    Exit codes: 0 all runs ended, 75 stopped by a signal, 2 the input cannot be used, 3 a run failed.
    """
    from shardwright.system.files import problem_above, write_whole
    from shardwright.training.sweep import best_by_flops, fit_power_law, parse_grid, sweep_runs
    from shardwright.training.sweep_view import sweep_document, sweep_svg

    problems = output_problems("--draw", options.draw, ".svg")
    problems += output_problems("--html", options.html, ".html")
    problems += ["--out is missing; give a folder for the runs"] * (options.out is None)
    problems += [] if options.out is None or (at_url := problem_above(options.out)) is None else [f"--out {at_url}"]
    problems += [f"--on {options.on}: valid: slurm, whose jobs have arrays"] * (options.on not in (None, "slurm"))
    problems += size_problems({"--per-node": options.per_node, "--cpus": options.cpus})
    if problems or options.out is None:
        raise InputError(*problems)
    runs = sweep_runs(options.run, options.overrides or (), parse_grid(options.grid or ()), options.out)
    if options.on is not None:
        _write_array(runs, options, options.out)
        return
    failed = [] if options.show_only else _train(runs)
    document = sweep_document(runs)
    drawn = [options.draw] if options.draw is not None and document.page_parts else []
    for path in drawn:
        write_whole(path, sweep_svg(runs, fit_power_law(best_by_flops(runs))).encode())
    show(document, options.json, options.html, *drawn)
    if failed:
        raise typer.Exit(WorkerError.exit_code)


def _train(runs: "Sequence[SweepRun]") -> list["SweepRun"]:
    """Train the runs that have not ended, and return the runs that failed. Exits with 75 if a signal stopped one.
    Raises InputError before the first starts if one of them cannot be started."""
    from shardwright.training.start import check_run, start

    problems: dict[str, None] = {}
    for run in runs:
        if not run.ended:
            try:
                check_run(run.config)
            except InputError as error:
                problems |= dict.fromkeys(error.problems)
    if problems:
        raise InputError(*problems)
    failed = []
    for number, run in enumerate(runs, start=1):
        if run.ended:
            error_console.print(f"run {number} of {len(runs)}: {run.in_words}: ended already", markup=False)
            continue
        error_console.print(f"run {number} of {len(runs)}: {run.in_words}", markup=False)
        try:
            stopped = start(run.config, quiet=True).stopped
        except ShardwrightError as error:
            fail(error)
            failed.append(run)
            continue
        if stopped:
            error_console.print("stopped; the same command continues from here")
            raise typer.Exit(os.EX_TEMPFAIL)
    return failed


def _write_array(runs: "Sequence[SweepRun]", options: SweepOptions, out: Path) -> None:
    """Write the run file of each run and the array job that trains them."""
    from shardwright.config import resolved_toml
    from shardwright.launching.jobs import JOB_FORMATS, LaunchJob, job_problems, ranks_of_node
    from shardwright.system.files import write_whole

    layouts = {run.config.layout.layout() for run in runs}
    sizes = sorted({layout.world_size for layout in layouts})
    if len(sizes) > 1:
        raise InputError(
            f"--on {options.on}: the runs have {' and '.join(map(str, sizes))} ranks, and all jobs of an array have "
            "the same machines; give a sweep for each number of ranks"
        )
    folder, job_file = out / "points", out / "sweep.sbatch"
    per_node = ranks_of_node(sizes[0], options.per_node)
    job = filled(
        LaunchJob, options, ("image", "claim", "mount", "accelerator"), name="sweep",
        nodes=sizes[0] // per_node, per_node=per_node, array=len(runs),
        gpus=runs[0].config.device != "cpu", run_file=str(folder.absolute()), overrides=(), grace_s=600, max_restarts=0,
    )  # fmt: skip
    if problems := list(job_problems(job, sizes[0], str(next(iter(layouts))))):
        raise InputError(*problems)
    folder.mkdir(parents=True, exist_ok=True)
    for number, run in enumerate(runs):
        write_whole(folder / f"{number}.toml", resolved_toml(run.config, absolute=True).encode())
    format = JOB_FORMATS["slurm"]
    write_whole(job_file, format.text(job).encode())
    print_text(f"{len(runs)} runs of {job.nodes} x {job.per_node} ranks -> {job_file}")
    print_text(f"  {format.submit.format(job_file)}")
    print_text(f"  then the same command with --show instead of --on {options.on}")
