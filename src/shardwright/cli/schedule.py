"""shardwright schedule: simulate a pipeline schedule and show its costs."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from shardwright.cli.common import AsJson, option, output_problems, reading_verb, show, size_problems
from shardwright.cli.schedule_view import schedule_view, schedules_view
from shardwright.schedule.actions import Schedule
from shardwright.schedule.build import build, compare
from shardwright.schedule.draw import draw, planned
from shardwright.schedule.registry import find, names
from shardwright.schedule.simulate import KEPT_FOR_WEIGHT, Simulation, Times, simulate
from shardwright.schedule.table import read_table, write_table
from shardwright.schedule.trace import write_trace
from shardwright.schedule.validate import problems
from shardwright.system.errors import InputError, ScheduleError, collecting, nearest

SORTS: dict[str, Callable[[Simulation, float], float | str]] = {
    "bubble": lambda simulation, kept: simulation.bubble_rate,
    "makespan": lambda simulation, kept: simulation.makespan,
    "memory": lambda simulation, kept: max(simulation.peak_memory_shares(kept)),
    "name": lambda simulation, kept: simulation.schedule.name,
}
"""The quantity of each value of `--sort`; the second argument is `--kept-for-weight`."""


@dataclass(frozen=True)
class ScheduleOptions:
    """Arguments and options of `schedule`."""

    name: str | None = option(None, ", ".join(names()), "NAME", name="--schedule")
    pp: int | None = option(None, "ranks of the pipeline", "P")
    microbatches: int | None = option(None, "micro-batches of a step", "M")
    virtual_stages: int | None = option(None, "stages of a rank, where the schedule leaves that open", "V")
    times: str = option(
        "1,1,1",
        "time of a stage's forward pass, of the gradient of its input, of the gradients of its weights, in "
        "any one unit",
        "F,I,W",
    )
    comm: float = option(0.0, "time of a message between ranks, in the same unit", "C")
    limit: int | None = option(
        None, "auto only: the most that a rank may hold, in micro-batches in flight; 2 P if not given", "N"
    )
    kept_for_weight: float = option(
        KEPT_FOR_WEIGHT,
        "memory of a micro-batch between its I and its W, as a share (0 to 1) of the memory of one in flight",
        "X",
    )
    compare_all: bool = option(
        False, "all schedules side by side; --times are then the times with one stage a rank", name="--compare"
    )
    sort: str | None = option(None, f"with --compare, the rows in the order of: {', '.join(SORTS)}", "COLUMN")
    read: Path | None = option(None, "a schedule from PyTorch's compute-only CSV, instead of --schedule", "FILE.csv")
    csv: Path | None = option(None, "write the schedule as PyTorch's compute-only CSV", "FILE.csv")
    drawing: Path | None = option(None, "a picture; or a trace for ui.perfetto.dev", "FILE.svg|json", name="--draw")
    html: Path | None = option(None, "write one page with the picture", "FILE.html")
    json: AsJson = False


MOST_PASSES = 2**20
"""Most passes of a micro-batch through a stage in a schedule. The largest takes a minute and some GiB."""


@reading_verb
def schedule(options: ScheduleOptions) -> None:
    """Show the actions, bubble and memory of a pipeline schedule, without running it.

    The bubble is the share of time in which ranks are idle. A micro-batch is in flight on a rank from F to the end
    of I or B, and takes some memory until the end of W. Both are counted in micro-batches through a rank's share of
    the layers.

    shardwright schedule --schedule zb-h1 --pp 4 --microbatches 8

    shardwright schedule --compare --pp 8 --microbatches 24 --draw all.svg

    Exit codes: 0 shown, 2 the input cannot be used.
    """
    times, kept = _check(options), options.kept_for_weight
    refused: dict[str, str] = {}
    if options.compare_all:
        assert options.pp is not None
        assert options.microbatches is not None
        result = compare(
            options.pp, options.microbatches, options.virtual_stages, times, options.limit, kept_for_weight=kept
        )
        simulations, refused = result.simulations, result.refused
        if options.sort is not None:
            key = SORTS[options.sort]
            simulations = tuple(sorted(simulations, key=lambda simulation: key(simulation, kept)))
    else:
        simulations = (simulate(_schedule(options, times), times),)
    written = _write(simulations, options)
    view = schedules_view(simulations, refused, kept) if options.compare_all else schedule_view(simulations[0], kept)
    show(view, options.json, options.html, *written)


def _check(options: ScheduleOptions) -> Times:
    """Return the times of the actions. Raises InputError for options that are missing, are not valid together, or name
    a path that cannot be written."""
    problems = []
    choices = {"--schedule": options.name, "--compare": options.compare_all or None, "--read": options.read}
    given = [option for option, value in choices.items() if value is not None]
    if len(given) != 1:
        problems.append(
            f"{' and '.join(given) or 'no schedule'} given; give one of --schedule NAME, --compare, --read FILE.csv"
        )
    sizes = {"--pp": options.pp, "--microbatches": options.microbatches, "--virtual-stages": options.virtual_stages}
    if options.read is not None:
        problems += [f"{option} goes with --schedule; --read finds it in the file" for option, n in sizes.items() if n]
    needed = ("--pp", "--microbatches") if options.read is None else ()
    problems += size_problems({**sizes, "--limit": options.limit}, needed)
    if options.limit is not None and options.name in names() and not find(options.name).searched:
        searched = ", ".join(name for name in names() if find(name).searched)
        problems.append(
            f"--limit {options.limit} is for --schedule {searched}, which is built to keep it; leave it out"
        )
    passes = math.prod(n or 1 for n in sizes.values())
    if passes > MOST_PASSES:
        problems.append(
            f"{' x '.join(f'{option} {n}' for option, n in sizes.items() if n)} = {passes:,} micro-batches through a "
            f"stage, and at most {MOST_PASSES:,} are built one by one; shardwright plan prices larger pipelines"
        )
    if not 0 <= options.kept_for_weight <= 1:
        problems.append(f"--kept-for-weight {options.kept_for_weight:g}: a share is needed, 0 to 1")
    if options.sort is not None and options.sort not in SORTS:
        problems.append(f"--sort {options.sort}: there is no such column to sort by; {nearest(options.sort, SORTS)}")
    if options.sort is not None and not options.compare_all:
        problems.append("--sort goes with --compare, which has a row for each schedule; leave it out")
    if options.compare_all and options.csv is not None:
        problems.append("--csv holds one schedule and --compare shows all; name one with --schedule")
    problems += output_problems("--draw", options.drawing, ".svg", ".json")
    problems += output_problems("--csv", options.csv) + output_problems("--html", options.html, ".html")
    with collecting(problems):
        times = _times(options.times, options.comm)
    if problems:
        raise InputError(*problems)
    return times


def _times(text: str, comm: float) -> Times:
    """Return the times of `--times` and `--comm`. Raises InputError with every problem of both."""
    problems = []
    try:
        forward, backward_input, weight = times = [float(part) for part in text.split(",")]
    except ValueError:
        problems.append(f"--times {text}: three numbers are needed, F,I,W; for example --times 1,1,1")
    else:
        if not all(0 <= time < math.inf for time in times):
            problems.append(f"--times {text}: a time is a finite number, 0 or more")
        elif not sum(times):
            problems.append(f"--times {text}: at least one of them has to be more than 0")
    if not 0 <= comm < math.inf:
        problems.append(f"--comm {comm:g}: a time is a finite number, 0 or more")
    if problems:
        raise InputError(*problems)
    return Times(forward, backward_input, weight, comm)


def _schedule(options: ScheduleOptions, times: Times) -> Schedule:
    """Return the requested schedule. Raises InputError."""
    if options.read is not None:
        schedule = read_table(options.read)
    else:
        assert options.name is not None
        assert options.pp is not None
        assert options.microbatches is not None
        sizes = options.pp, options.microbatches, options.virtual_stages
        schedule = build(options.name, *sizes, times, options.limit, kept_for_weight=options.kept_for_weight)
    if broken := problems(schedule):
        raise ScheduleError(*(f"{options.read or options.name}: {problem}" for problem in broken))
    return schedule


def _write(simulations: Sequence[Simulation], options: ScheduleOptions) -> list[Path]:
    """Write the requested files and return their paths."""
    drawing, csv = options.drawing, options.csv
    if drawing is not None:
        timelines = [planned(simulation, options.kept_for_weight) for simulation in simulations]
        if drawing.suffix.lower() == ".svg":
            draw(timelines, drawing, curves=not options.compare_all)
        else:
            write_trace(timelines, drawing)
    if csv is not None:
        write_table(simulations[0].schedule, csv)
    return [path for path in (drawing, csv) if path is not None]
