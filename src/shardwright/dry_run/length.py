"""How many micro-batches of a step a dry run takes, and which actions stand for the others. No torch."""

from collections.abc import Sequence
from typing import NamedTuple

from shardwright.config import RunConfig
from shardwright.schedule.actions import Action
from shardwright.schedule.messages import Exchange, with_messages
from shardwright.split.stages import schedule_problems, step_schedule

_DIFFERENT = 3
"""Micro-batches of a step without a pipeline that can differ: the first, one between, and the last."""
_PERIODS = 3
"""Equal periods of a pipeline that are run: one that follows what differs, the one that is repeated, and one after it,
since the first and the last action of a stage differ from the others."""

Entry = Action | Exchange


class Length(NamedTuple):
    """`n_run` of the micro-batches are run. `repeats`: for each rank of `pp`, how many actions of the whole step an
    action of the shortened step stands for, where it is not 1; `n_actions`: how many actions the rank runs."""

    n_run: int
    repeats: tuple[dict[str, int], ...]
    n_actions: tuple[int, ...]


def step_length(config: RunConfig) -> Length:
    """The shortest step whose memory and messages are those of the whole step.

    In a pipeline the lists of actions and exchanges of all ranks are compared: if the list of n micro-batches is the
    list of fewer with its period inserted again and again, the program runs the same period again and again. Three
    schedules are run whole. afab has all micro-batches in flight at once, so each one more adds to its peak. dualpipe
    starts the second half of the micro-batches at the other end, so the number of each of these depends on how many
    there are. auto searches a schedule for one number of micro-batches, and for another one finds another.
    """
    layout, n = config.layout.layout(), config.accumulation
    if layout.pp == 1:
        n_run = min(n, _DIFFERENT)
        left_out = n - n_run
        return Length(n_run, ({str(Action(0, op, 1)): 1 + left_out for op in ("F", "B") if left_out},), (2 * n_run,))

    def lists(n_microbatches: int) -> list[list[Entry]]:
        return with_messages(step_schedule(config.model.spec(), layout, n_microbatches, config.batch.seq_len))

    def length(n_run: int, entries: Sequence[Sequence[Entry]], repeats: Sequence[dict[str, int]]) -> Length:
        return Length(
            n_run, tuple(repeats), tuple(sum(isinstance(entry, Action) for entry in of_rank) for of_rank in entries)
        )

    whole = lists(n)
    if not layout.kind.searched:
        for n_run in range(layout.pp + _PERIODS, min(n, 8 * layout.n_stages + 8)):
            if schedule_problems(layout, n_run):
                continue
            part = lists(n_run)
            for period in sorted({1, 2, layout.pp, 2 * layout.pp}):
                repeats = [_repeats(*pair, n - n_run, period) for pair in zip(part, whole, strict=True)]
                if all(repeats):
                    return length(n_run, part, [each for each in repeats if each])
    return length(n, whole, [{} for _ in whole])


def _repeats(part: Sequence[Entry], whole: Sequence[Entry], left_out: int, period: int) -> dict[str, int] | None:
    """By action of the repeated period, how many actions it stands for; None if the whole list is not the shorter one
    with a period of `period` micro-batches inserted."""
    if left_out % period:
        return None
    times = left_out // period
    inserted = len(whole) - len(part)
    size, rest = divmod(inserted, times)
    if rest:
        return None
    for at in range(2 * size, len(part) - size + 1):
        # Three periods around the place, all of those that are inserted, and what comes before and after them.
        same = (
            isinstance(part[at - size], Action)  # exchanges count with the action before them
            and all(_later(part[i], period) == part[i + size] for i in range(at - 2 * size, at))
            and part[:at] == whole[:at]
            and all(_later(whole[i], period) == whole[i + size] for i in range(at - size, at + inserted - size))
            and [_later(each, left_out) for each in part[at:]] == whole[at + inserted :]
        )
        if same:
            return {str(each): 1 + times for each in part[at - size : at] if isinstance(each, Action)}
    return None


def _later(entry: Entry, n: int) -> Entry:
    """The same entry with micro-batches whose numbers are higher by n."""
    if isinstance(entry, Action):
        return entry._replace(microbatch=entry.microbatch + n)
    messages = tuple(each._replace(microbatch=each.microbatch + n) for each in entry.messages)
    return entry._replace(messages=messages)
