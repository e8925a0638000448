"""The document of `schedule`: the timeline of a pipeline schedule, its bubble, its memory and its messages."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.text import Text

from shardwright.schedule.build import count_messages, resident_parameters
from shardwright.schedule.draw import ScheduleTimeline, ink_on, planned, shades, svg
from shardwright.schedule.simulate import Simulation
from shardwright.schedule.validate import problems
from shardwright.view.document import (
    FOUR_DIGITS,
    NUMBER,
    SHARE,
    WORDS,
    Code,
    Column,
    Note,
    Part,
    Picture,
    Quantity,
    Section,
    Table,
    VerbDocument,
)

COUNTED = Quantity("{:g}".format)
"""A number of micro-batches, which may be a fraction."""
READING = (
    "F is a forward pass, B a backward pass, I the gradient of the input and W the gradients of the weights. The "
    "number is the micro-batch. A curve shows the activations of its rank, in micro-batches in flight."
)
"""Caption of the picture on a page."""
TOO_LONG = "the timeline is too long for this screen; --draw FILE.svg draws it"


def schedule_view(simulation: Simulation, kept_for_weight: float) -> VerbDocument:
    """Return the document of one schedule."""
    schedule, times = simulation.schedule, simulation.times
    timeline = planned(simulation, kept_for_weight)
    parts: list[Part] = [
        Section(timeline.title),
        Note(
            f"a stage takes F {times.forward:g}, I {times.backward_input:g}, W {times.weight:g}; "
            f"B is I and W at once; a message takes {times.comm:g}"
        ),
        Picture(
            "timeline",
            "",
            lambda: svg([timeline]),
            READING,
            own_scale=True,
            text=lambda width: timeline_text(timeline, width) or Text(TOO_LONG),
        ),
        _ranks(simulation, kept_for_weight),
        Note(
            f"{_bubble_words(simulation)}; makespan {simulation.makespan:.4g}, "
            f"work of the busiest rank {max(simulation.work):.4g}"
        ),
        Note(f"{count_messages(schedule)} messages; parameters held: {resident_parameters(schedule):g}x"),
    ]
    if schedule.splits_backward:
        parts.append(Note(_memory_words(kept_for_weight)))
    return VerbDocument("Pipeline schedule", _data(simulation, kept_for_weight), parts)


def schedules_view(
    simulations: Sequence[Simulation], refused: Mapping[str, str], kept_for_weight: float
) -> VerbDocument:
    """Return the document of schedules of the same sizes. `refused`: name -> why a schedule is not possible."""
    data = {"schedules": [_data(simulation, kept_for_weight) for simulation in simulations], "refused": refused}
    parts = list(_comparison(simulations, kept_for_weight)) if simulations else []
    if refused:
        parts += [Section("not at these sizes"), Code("\n".join(refused.values()))]
    return VerbDocument("Pipeline schedules", data, parts)


def _comparison(simulations: Sequence[Simulation], kept_for_weight: float) -> Iterator[Part]:
    schedule = simulations[0].schedule
    yield Section(f"ranks: {schedule.n_ranks}, micro-batches: {schedule.n_microbatches}")
    yield Note("the same model in each: a stage of 1/n of the layers takes 1/n of the time")
    yield Note("in flight: micro-batches whose activations a rank holds, of its share of the layers")
    yield Note(_memory_words(kept_for_weight))
    rows = [
        (
            simulation.schedule.name,
            simulation.schedule.n_stages,
            f"{simulation.bubble_rate:.1%}{'*' if simulation.schedule.staggered else ' '}",
            simulation.makespan,
            max(simulation.peak_in_flight_shares),
            max(simulation.peak_memory_shares(kept_for_weight)),
            f"{resident_parameters(simulation.schedule):g}x",
            count_messages(simulation.schedule),
        )
        for simulation in simulations
    ]
    names = "schedule", "stages", "bubble", "makespan", "in flight", "memory", "weights", "messages"
    kinds = WORDS, NUMBER, NUMBER, FOUR_DIGITS, COUNTED, FOUR_DIGITS, NUMBER, NUMBER
    staggered = ", ".join(
        f"{simulation.schedule.name} {_bubble_of_makespan(simulation):.1%}"
        for simulation in simulations
        if simulation.schedule.staggered
    )
    rest = f"* between a rank's own first and last action; of the makespan: {staggered}" if staggered else ""
    yield Table([Column(*column) for column in zip(names, kinds, strict=True)], rows, rest)
    timelines = [planned(simulation, kept_for_weight) for simulation in simulations]
    yield Picture("timelines", "", lambda: svg(timelines, curves=False), "", own_scale=True)


def _ranks(simulation: Simulation, kept_for_weight: float) -> Table:
    """Return the table of the ranks of one schedule."""
    memory = simulation.peak_memory_shares(kept_for_weight)
    rows = [
        (
            str(rank),
            ", ".join(map(str, simulation.schedule.stages_of(rank))),
            spans[0][0],
            spans[-1][0],
            spans[0][1],
            spans[-1][2],
            simulation.bubble_rates[rank],
            simulation.peak_in_flight_shares[rank],
            memory[rank],
        )
        for rank, spans in enumerate(simulation.spans)
    ]
    names = "rank", "stages", "first", "last", "starts", "ends", "bubble", "in flight", "memory"
    kinds = WORDS, WORDS, WORDS, WORDS, FOUR_DIGITS, FOUR_DIGITS, SHARE, COUNTED, FOUR_DIGITS
    return Table([Column(*column) for column in zip(names, kinds, strict=True)], rows)


def _bubble_words(simulation: Simulation) -> str:
    rate = f"bubble {simulation.bubble_rate:.1%}"
    if not simulation.schedule.staggered:
        return rate
    return (
        f"{rate} between a rank's own first and last action (at most {simulation.cost:.4g} apart), "
        f"{_bubble_of_makespan(simulation):.1%} of the makespan"
    )


def _data(simulation: Simulation, kept_for_weight: float) -> dict[str, Any]:
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
        "resident_parameters": resident_parameters(schedule),
        "messages": count_messages(schedule),
        "problems": problems(schedule),
        "stages": [schedule.stages_of(rank) for rank in range(schedule.n_ranks)],
        "actions": [[str(action) for action in actions] for actions in schedule.ranks],
    }


def _bubble_of_makespan(simulation: Simulation) -> float:
    """Return the share of the makespan in which ranks are idle, also before their first and after their last action."""
    makespan, work = simulation.makespan, simulation.work
    return 1 - sum(work) / (len(work) * makespan) if makespan else 0.0


def _memory_words(kept_for_weight: float) -> str:
    return f"memory: micro-batches in flight, and {kept_for_weight:.4g} for each between its I and its W"


IDLE = "\N{MIDDLE DOT}"


def timeline_text(timeline: ScheduleTimeline, width: int) -> Text | None:
    """Return a line for each rank: op and micro-batch at the start of an action, as long as the action lasts, and a dot
    where the rank is idle. None if the shortest action has no room for its name in `width` characters."""
    actions = [span for spans in timeline.spans for span in spans if span[2] > span[1]]
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
