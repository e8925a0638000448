"""Computes the start and end of every action of a schedule if each starts as early as possible."""

from collections import deque
from collections.abc import Mapping, Sequence

from shardwright.schedule.actions import Op, Schedule


def play(
    schedule: Schedule, durations: Mapping[Op, Sequence[float]], comm: float = 0.0
) -> tuple[list[list[float]], list[list[float]]]:
    """Return starts and ends of the actions of every rank, from 0; after a deadlock there are fewer than actions.

    An action starts when the previous one on its rank has ended and its input is available: `comm` after the end of the
    action that computed it, if that ran on another rank. `durations`: of each op in every stage. The run time is linear
    in the number of actions. Raises ScheduleError for an action with a stage or micro-batch out of range.
    """
    needs, makes, n_results = schedule.numbered
    ended: list[float] = [-1.0] * n_results
    maker: list[int] = [0] * n_results
    waiting: dict[int, list[int]] = {}
    starts: list[list[float]] = [[] for _ in schedule.ranks]
    ends: list[list[float]] = [[] for _ in schedule.ranks]
    runnable = deque(range(schedule.n_ranks))
    while runnable:
        rank = runnable.popleft()
        my_starts, my_ends = starts[rank], ends[rank]
        clock = my_ends[-1] if my_ends else 0.0
        actions, my_needs, my_makes = schedule.ranks[rank], needs[rank], makes[rank]
        for position in range(len(my_ends), len(actions)):
            need = my_needs[position]
            if need >= 0:
                there = ended[need]
                if there < 0.0:
                    waiting.setdefault(need, []).append(rank)
                    break
                if maker[need] != rank:
                    there += comm
                if there > clock:
                    clock = there
            my_starts.append(clock)
            stage, op, _ = actions[position]
            clock += durations[op][stage]
            my_ends.append(clock)
            made = my_makes[position]
            ended[made] = clock
            maker[made] = rank
            if made in waiting:
                runnable.extend(waiting.pop(made))
    return starts, ends
