"""shardwright schedule: simulate a pipeline schedule and show its costs.

A timeline as lines of text, for screens that are wide enough.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from shardwright.cli.common import (
    AsJson,
    console,
    print_json,
    print_table,
    print_text,
    reading_verb,
    wrong_place,
    wrong_sizes,
)
from shardwright.schedule.actions import Schedule
from shardwright.schedule.build import build, compare, count_messages, parameters_held
from shardwright.schedule.draw import ScheduleTimeline, draw, ink_on, planned, shades
from shardwright.schedule.registry import find, names
from shardwright.schedule.simulate import KEPT_FOR_WEIGHT, Simulation, Times, simulate
from shardwright.schedule.table import read_table, write_table
from shardwright.schedule.trace import write_trace
from shardwright.schedule.validate import problems
from shardwright.system.errors import InputError, ScheduleError, nearest
from shardwright.view.terminal import columns

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

    name: Annotated[str | None, typer.Option("--schedule", metavar="NAME", help=", ".join(names()))] = None
    pp: Annotated[int | None, typer.Option(metavar="P", help="ranks of the pipeline")] = None
    microbatches: Annotated[int | None, typer.Option(metavar="M", help="micro-batches of a step")] = None
    virtual_stages: Annotated[
        int | None, typer.Option(metavar="V", help="stages of a rank, where the schedule leaves that open")
    ] = None
    times: Annotated[
        str,
        typer.Option(
            metavar="F,I,W",
            help="time of a stage's forward pass, of the gradient of its input, of the gradients of its weights, in "
            "any one unit",
        ),
    ] = "1,1,1"
    comm: Annotated[float, typer.Option(metavar="C", help="time of a message between ranks, in the same unit")] = 0.0
    limit: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="auto only: the most that a rank may hold, in micro-batches in flight; 2 P if not given"
        ),
    ] = None
    kept_for_weight: Annotated[
        float,
        typer.Option(
            metavar="X",
            help="memory of a micro-batch between its I and its W, as a share (0 to 1) of that of one in flight",
        ),
    ] = KEPT_FOR_WEIGHT
    compare_all: Annotated[
        bool, typer.Option("--compare", help="all schedules side by side; --times are then those of one stage a rank")
    ] = False
    sort: Annotated[
        str | None,
        typer.Option(metavar="COLUMN", help=f"with --compare, the rows in the order of: {', '.join(SORTS)}"),
    ] = None
    read: Annotated[
        Path | None,
        typer.Option(metavar="FILE.csv", help="a schedule from PyTorch's compute-only CSV, in place of --schedule"),
    ] = None
    csv: Annotated[
        Path | None, typer.Option(metavar="FILE.csv", help="write the schedule as PyTorch's compute-only CSV")
    ] = None
    drawing: Annotated[
        Path | None, typer.Option("--draw", metavar="FILE.svg|json", help="a picture; or a trace for ui.perfetto.dev")
    ] = None
    json: AsJson = False


MOST_PASSES = 2**20
"""Most passes of a micro-batch through a stage in a schedule. The largest takes a minute and some GiB."""


@reading_verb
def schedule(options: ScheduleOptions) -> None:
    """Show what a pipeline schedule does and what it costs, without running it.

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
        found = compare(
            options.pp, options.microbatches, options.virtual_stages, times, options.limit, kept_for_weight=kept
        )
        simulations, refused = found.simulations, found.refused
        if options.sort is not None:
            key = SORTS[options.sort]
            simulations = tuple(sorted(simulations, key=lambda each: key(each, kept)))
    else:
        simulations = (simulate(_schedule(options, times), times),)
    written = _write(simulations, options)
    if options.json:
        documents = [_document(simulation, kept) for simulation in simulations]
        print_json({"schedules": documents, "refused": refused} if options.compare_all else documents[0])
        return
    if options.compare_all:
        _print_all(simulations, refused, kept)
    else:
        _print(simulations[0], kept)
    for path in written:
        print_text(f"written to {path}")


def _check(options: ScheduleOptions) -> Times:
    """Return the times of the actions. Raises InputError for options that are missing, are not valid together, or name
    a path that cannot be written."""
    wrong = []
    asked = {"--schedule": options.name, "--compare": options.compare_all or None, "--read": options.read}
    given = [option for option, value in asked.items() if value is not None]
    if len(given) != 1:
        wrong.append(
            f"{' and '.join(given) or 'no schedule'} given; give one of --schedule NAME, --compare, --read FILE.csv"
        )
    sizes = {"--pp": options.pp, "--microbatches": options.microbatches, "--virtual-stages": options.virtual_stages}
    if options.read is not None:
        wrong += [f"{option} goes with --schedule; --read finds it in the file" for option, n in sizes.items() if n]
    needed = ("--pp", "--microbatches") if options.read is None else ()
    wrong += wrong_sizes({**sizes, "--limit": options.limit}, needed)
    if options.limit is not None and options.name in names() and not find(options.name).searched:
        searched = ", ".join(each for each in names() if find(each).searched)
        wrong.append(f"--limit {options.limit} is for --schedule {searched}, which is built to keep it; leave it out")
    passes = math.prod(n or 1 for n in sizes.values())
    if passes > MOST_PASSES:
        wrong.append(
            f"{' x '.join(f'{option} {n}' for option, n in sizes.items() if n)} = {passes:,} micro-batches through a "
            f"stage, and at most {MOST_PASSES:,} are built one by one; shardwright plan prices larger pipelines"
        )
    if not 0 <= options.kept_for_weight <= 1:
        wrong.append(f"--kept-for-weight {options.kept_for_weight:g}: a share is needed, 0 to 1")
    if options.sort is not None and options.sort not in SORTS:
        wrong.append(f"--sort {options.sort}: there is no such column to sort by; {nearest(options.sort, SORTS)}")
    if options.sort is not None and not options.compare_all:
        wrong.append("--sort goes with --compare, which has a row for each schedule; leave it out")
    if options.compare_all and options.csv is not None:
        wrong.append("--csv holds one schedule and --compare shows all; name one with --schedule")
    wrong += wrong_place("--draw", options.drawing, {".svg": "a picture is named", ".json": "a trace"})
    wrong += wrong_place("--csv", options.csv)
    try:
        times = _times(options.times, options.comm)
    except InputError as error:
        wrong += error.problems
    if wrong:
        raise InputError(*wrong)
    return times


def _times(text: str, comm: float) -> Times:
    """Return the times of `--times` and `--comm`. Raises InputError with every problem of both."""
    wrong = []
    try:
        forward, backward_input, weight = times = [float(part) for part in text.split(",")]
    except ValueError:
        wrong.append(f"--times {text}: three numbers are needed, F,I,W; for example --times 1,1,1")
    else:
        if not all(0 <= time < math.inf for time in times):
            wrong.append(f"--times {text}: a time is a finite number, 0 or more")
        elif not sum(times):
            wrong.append(f"--times {text}: at least one of them has to be more than 0")
    if not 0 <= comm < math.inf:
        wrong.append(f"--comm {comm:g}: a time is a finite number, 0 or more")
    if wrong:
        raise InputError(*wrong)
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
    if wrong := problems(schedule):
        raise ScheduleError(*(f"{options.read or options.name}: {problem}" for problem in wrong))
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


def _document(simulation: Simulation, kept_for_weight: float) -> dict[str, Any]:
    """Return all numbers of a schedule as a JSON object."""
    schedule = simulation.schedule
    return {
        "schedule": schedule.name,
        "n_ranks": schedule.n_ranks,
        "n_stages": schedule.n_stages,
        "n_microbatches": schedule.n_microbatches,
        "times": dataclasses.asdict(simulation.times),
        "makespan": simulation.makespan,
        "cost": simulation.cost,
        "work": simulation.work,
        "bubble_rate": simulation.bubble_rate,
        "bubble_rates": simulation.bubble_rates,
        "peak_in_flight": simulation.peak_in_flight,
        "peak_in_flight_shares": simulation.peak_in_flight_shares,
        "peak_waiting": simulation.peak_waiting,
        "kept_for_weight": kept_for_weight,
        "peak_memory": simulation.peak_memory(kept_for_weight),
        "peak_memory_shares": simulation.peak_memory_shares(kept_for_weight),
        "parameters_held": parameters_held(schedule),
        "messages": count_messages(schedule),
        "problems": problems(schedule),
        "stages": [schedule.stages_of(rank) for rank in range(schedule.n_ranks)],
        "actions": [[str(action) for action in actions] for actions in schedule.ranks],
    }


def _print(simulation: Simulation, kept_for_weight: float) -> None:
    schedule, times = simulation.schedule, simulation.times
    timeline = planned(simulation, kept_for_weight)
    console.print(f"[bold]{timeline.title}[/]")
    console.print(
        f"a stage takes F {times.forward:g}, I {times.backward_input:g}, W {times.weight:g}; "
        f"B is I and W at once; a message takes {times.comm:g}"
    )
    console.print()
    text = timeline_text(timeline, console.width)
    if text is not None:
        console.print(text, no_wrap=True)
        console.print()
    table = columns("rank", "stages", "first", "last", "starts", "ends", "bubble", "in flight", "memory", left=4)
    memory = simulation.peak_memory_shares(kept_for_weight)
    for rank, spans in enumerate(simulation.spans):
        table.add_row(
            str(rank),
            ", ".join(map(str, schedule.stages_of(rank))),
            str(spans[0][0]),
            str(spans[-1][0]),
            f"{spans[0][1]:.4g}",
            f"{spans[-1][2]:.4g}",
            f"{simulation.bubble_rates[rank]:.1%}",
            f"{simulation.peak_in_flight_shares[rank]:g}",
            f"{memory[rank]:.4g}",
        )
    console.print(table)
    console.print()
    if schedule.staggered:
        bubble = (
            f"[bold]bubble {simulation.bubble_rate:.1%}[/] between a rank's own first and last action (at most "
            f"{simulation.cost:.4g} apart), [bold]{_bubble_of_makespan(simulation):.1%} of the makespan[/]"
        )
    else:
        bubble = f"[bold]bubble {simulation.bubble_rate:.1%}[/]"
    console.print(
        f"{bubble}; makespan {simulation.makespan:.4g}, work of the busiest rank {max(simulation.work):.4g}",
        soft_wrap=True,
    )
    console.print(f"{count_messages(schedule)} messages; parameters held: {_times_share(parameters_held(schedule))}")
    if schedule.splits_backward:
        console.print(_memory_words(kept_for_weight))
    if text is None:
        console.print("the timeline is too long for this screen; --draw FILE.svg draws it")


def _print_all(simulations: Sequence[Simulation], refused: dict[str, str], kept_for_weight: float) -> None:
    if simulations:
        schedule = simulations[0].schedule
        console.print(f"[bold]ranks: {schedule.n_ranks}, micro-batches: {schedule.n_microbatches}[/]")
        console.print("the same model in each: a stage of 1/n of the layers takes 1/n of the time")
        console.print("in flight: micro-batches whose activations a rank holds, of its share of the layers")
        console.print(_memory_words(kept_for_weight))
        console.print()
        names = "schedule", "stages", "bubble", "makespan", "in flight", "memory", "weights", "messages"
        table = columns(*names, left=1)
        for simulation in simulations:
            schedule = simulation.schedule
            table.add_row(
                schedule.name,
                str(schedule.n_stages),
                f"{simulation.bubble_rate:.1%}{'*' if schedule.staggered else ' '}",
                f"{simulation.makespan:.4g}",
                f"{max(simulation.peak_in_flight_shares):g}",
                f"{max(simulation.peak_memory_shares(kept_for_weight)):.4g}",
                _times_share(parameters_held(schedule)),
                str(count_messages(schedule)),
            )
        print_table(table)
        if staggered := [each for each in simulations if each.schedule.staggered]:
            rates = ", ".join(f"{each.schedule.name} {_bubble_of_makespan(each):.1%}" for each in staggered)
            console.print()
            print_text(f"* between a rank's own first and last action; of the makespan: {rates}")
    if refused:
        console.print("\nnot at these sizes:")
        for reason in refused.values():
            print_text(f"  {reason}")


def _bubble_of_makespan(simulation: Simulation) -> float:
    """Return the share of the makespan in which ranks are idle, also before their first and after their last action."""
    makespan, work = simulation.makespan, simulation.work
    return 1 - sum(work) / (len(work) * makespan) if makespan else 0.0


def _memory_words(kept_for_weight: float) -> str:
    return f"memory: micro-batches in flight, and {kept_for_weight:.4g} for each between its I and its W"


def _times_share(parameters: float) -> str:
    return f"{parameters:g}x"


IDLE = "\N{MIDDLE DOT}"


def timeline_text(timeline: ScheduleTimeline, width: int) -> Text | None:
    """Return a line for each rank: op and micro-batch at the start of an action, as long as the action lasts, and a dot
    where the rank is idle. None if the shortest action has no room for its name in `width` characters."""
    actions = [each for spans in timeline.spans for each in spans if each[2] > each[1]]
    if not actions:
        return None
    margin = len(f"rank {len(timeline.spans) - 1} ")
    longest_name = max(len(f"{action.op}{action.microbatch}") for action, _, _ in actions)
    scale = longest_name / min(end - start for _, start, end in actions)
    if margin + timeline.end * scale > width:
        return None
    shade_of = shades(timeline)
    text = Text(no_wrap=True)
    for rank, spans in enumerate(timeline.spans):
        text.append(f"rank {rank} ".ljust(margin), "dim")
        at = 0
        for action, start, end in spans:
            first, last = round(start * scale), round(end * scale)
            if last == first:
                continue
            text.append(IDLE * (first - at), "dim")
            colour = shade_of(rank, action)
            text.append(f"{action.op}{action.microbatch}".ljust(last - first), f"{ink_on(colour)} on {colour}")
            at = last
        text.append(IDLE * (round(timeline.end * scale) - at) + "\n", "dim")
    text.right_crop(1)
    return text
