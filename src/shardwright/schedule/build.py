"""Builds a schedule by its name, lists the rules that ranks and micro-batches break, and compares all schedules on the
same pipeline and batch."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from shardwright.schedule.actions import Schedule
from shardwright.schedule.messages import sent_after
from shardwright.schedule.registry import check_row, find, names
from shardwright.schedule.simulate import KEPT_FOR_WEIGHT, PerStage, Simulation, Times, simulate
from shardwright.system.errors import ScheduleError


def build(
    name: str,
    n_ranks: int,
    n_microbatches: int,
    virtual_stages: int | None = None,
    times: Times | None = None,
    in_flight_limit: int | None = None,
    *,
    kept_for_weight: float = KEPT_FOR_WEIGHT,
) -> Schedule:
    """Return the schedule `name` (one of `registry.names`) for one step of n_microbatches on n_ranks ranks of `pp`.

    `virtual_stages`: stages of a rank, for schedules in which that number can be chosen; by default the schedule's own.
    `times`, `in_flight_limit` (maximum micro-batches in flight on a rank, by default 2 x n_ranks) and `kept_for_weight`
    (the fraction, 0 to 1, of a micro-batch in flight that one between I and W counts) are inputs of the search of
    "auto"; the other schedules do not depend on them.

    Raises ScheduleError with all `problems`.
    """
    broken = problems(name, n_ranks, n_microbatches, virtual_stages)
    if in_flight_limit is not None and in_flight_limit < 1:
        broken.append(f"in_flight_limit={in_flight_limit} microbatches in flight on a rank: valid: 1 or more")
    if broken:
        raise ScheduleError(*broken)
    kind = find(name)
    check_row(kind)
    chosen: dict[str, Any] = {}
    if kind.virtual_stages_tried:
        chosen["virtual_stages"] = kind.stages_per_rank(virtual_stages)
    if kind.searched:
        chosen |= {"times": times or Times(), "in_flight_limit": in_flight_limit, "kept_for_weight": kept_for_weight}
    return replace(kind.builder(n_ranks, n_microbatches, **chosen), name=name)


def problems(name: str, n_ranks: int, n_microbatches: int, virtual_stages: int | None = None) -> list[str]:
    """Return why a schedule cannot be built, one line for each broken rule; empty if it can."""
    try:
        kind = find(name)
    except ScheduleError as error:
        return error.problems
    virtual = kind.stages_per_rank(virtual_stages)
    sizes = {"pp": n_ranks, "microbatches": n_microbatches, "virtual_stages": virtual}
    broken = [f"{name}: {what}={value}: valid: 1 or more" for what, value in sizes.items() if value < 1]
    if virtual > 0 and virtual != kind.virtual_stages and not kind.virtual_stages_tried:
        free = ", ".join(other for other in names() if find(other).virtual_stages_tried)
        broken.append(
            f"{name}: virtual_stages={virtual}, but a rank holds {kind.virtual_stages} with this schedule; valid: "
            f"{kind.virtual_stages}, or another schedule: {free}"
        )
        virtual = kind.virtual_stages
    if min(n_ranks, n_microbatches, virtual) > 0:
        broken += [f"{name}: {problem}" for problem in kind.rules(n_ranks, n_microbatches, virtual)]
    return broken


@dataclass(frozen=True)
class Comparison:
    """`simulations`: of the schedules that can be built; `refused`: schedule -> the rules that it breaks."""

    simulations: tuple[Simulation, ...]
    refused: dict[str, str]


def compare(
    n_ranks: int,
    n_microbatches: int,
    virtual_stages: int | None = None,
    times: Times = Times(),  # noqa: B008  (frozen)
    in_flight_limit: int | None = None,
    among: Iterable[str] | None = None,
    *,
    kept_for_weight: float = KEPT_FOR_WEIGHT,
) -> Comparison:
    """Build and simulate every schedule for one model on `n_ranks` ranks.

    `times`: the times of a schedule with one stage a rank. With more stages than ranks a stage has fewer layers, so its
    times are scaled by n_ranks / n_stages, and the total work is the same. `comm` is a message of one micro-batch's
    activations between two layers, and is not scaled. `virtual_stages`: for schedules in which that number can be
    chosen; `in_flight_limit` and `kept_for_weight`: for searched schedules. `among`: names of schedules; all schedules
    unless given.
    """
    simulations, refused = [], {}
    for name in names() if among is None else among:
        try:
            stages = virtual_stages if find(name).virtual_stages_tried else None
            schedule = build(
                name, n_ranks, n_microbatches, stages, times, in_flight_limit, kept_for_weight=kept_for_weight
            )
            simulations.append(simulate(schedule, scaled(times, n_ranks / schedule.n_stages)))
        except ScheduleError as error:
            refused[name] = "; ".join(error.problems)
    return Comparison(tuple(simulations), refused)


def scaled(times: Times, factor: float) -> Times:
    """Return the times of stages with `factor` times as many layers; the time of a message is unchanged."""

    def scale(time: PerStage) -> PerStage:
        return tuple(stage_time * factor for stage_time in time) if isinstance(time, tuple) else time * factor

    return Times(scale(times.forward), scale(times.backward_input), scale(times.weight), times.comm)


def count_messages(schedule: Schedule) -> int:
    """Return the number of messages that all ranks send in a step."""
    return sum(sent_after(schedule, rank, action) is not None for rank, action in schedule.actions())


def resident_parameters(schedule: Schedule) -> float:
    """Parameters of the rank with the most, in units of 1 / n_ranks of the model: 2 in DualPipe, else 1."""
    most_stages = max(len(schedule.stages_of(rank)) for rank in range(schedule.n_ranks))
    return most_stages * schedule.n_ranks / schedule.n_stages
