"""Compares all schedules on the same pipeline and the same batch."""

from collections.abc import Iterable
from dataclasses import dataclass

from shardwright.schedule.actions import Schedule
from shardwright.schedule.build import build
from shardwright.schedule.messages import sent_after
from shardwright.schedule.registry import find, names
from shardwright.schedule.simulate import KEPT_FOR_WEIGHT, PerStage, Simulation, Times, simulate
from shardwright.system.errors import ScheduleError


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


def parameters_held(schedule: Schedule) -> float:
    """Parameters of the rank with the most, in units of 1 / n_ranks of the model: 2 in DualPipe, else 1."""
    most_stages = max(len(schedule.stages_of(rank)) for rank in range(schedule.n_ranks))
    return most_stages * schedule.n_ranks / schedule.n_stages
