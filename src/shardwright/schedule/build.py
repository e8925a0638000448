"""Builds a schedule by its name, or lists the rules that ranks and micro-batches break."""

from dataclasses import replace
from typing import Any

from shardwright.schedule.actions import Schedule
from shardwright.schedule.registry import check_row, find, names
from shardwright.schedule.simulate import KEPT_FOR_WEIGHT, Times
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
