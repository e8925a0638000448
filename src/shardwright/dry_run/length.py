"""The part of a step that a dry run executes. No torch.

The number of micro-batches, and which actions represent the omitted ones; and one rank of each class of ranks with
equal memory and messages, with the axes along which the ranks of a process group differ.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from shardwright.config import RunConfig
from shardwright.layout.box import DENSE_AXES
from shardwright.layout.layout import Layout
from shardwright.schedule.actions import Action
from shardwright.schedule.messages import PairExchange, with_messages
from shardwright.split.stages import schedule_problems, step_schedule

_DIFFERENT = 3
"""Number of micro-batches of a step without a pipeline that can differ: first, middle and last."""
_PERIODS = 3
"""Number of equal periods of a pipeline that are run: one after the differing actions, one that represents the repeats,
and one after it, since the first and the last action of a stage differ from the others."""

_APART = 2**32
"""Offset between the numbers of micro-batches on the first and the second way through a pipeline (dualpipe)."""

Entry = Action | PairExchange


class ShortenedStep(NamedTuple):
    """A step in which only `n_run` of the micro-batches are run. `repeats`: for each rank of `pp`, the number of
    actions of the whole step that an action represents, if it is not 1. `n_actions`: actions that the rank runs."""

    n_run: int
    repeats: tuple[dict[str, int], ...]
    n_actions: tuple[int, ...]


def step_length(config: RunConfig) -> ShortenedStep:
    """Return the shortest step with the same memory and messages as the whole step.

    In a pipeline the lists of actions and exchanges of all ranks are compared. If the list of n micro-batches is a
    shorter list with its period inserted repeatedly, the program runs the same period repeatedly. Two schedules are run
    in full. afab has all micro-batches in flight at once, so each micro-batch adds to its peak. auto searches a
    schedule for one number of micro-batches, and finds a different schedule for another number.
    """
    layout, n = config.layout.layout(), config.accumulation
    if layout.pp == 1:
        n_run = min(n, _DIFFERENT)
        left_out = n - n_run
        return ShortenedStep(
            n_run, ({str(Action(0, op, 1)): 1 + left_out for op in ("F", "B") if left_out},), (2 * n_run,)
        )

    def lists(n_microbatches: int) -> list[list[Entry]]:
        return with_messages(step_schedule(config.spec(), layout, n_microbatches, config.batch.seq_len))

    def length(n_run: int, entries: Sequence[Sequence[Entry]], repeats: Sequence[dict[str, int]]) -> ShortenedStep:
        return ShortenedStep(
            n_run, tuple(repeats), tuple(sum(isinstance(entry, Action) for entry in of_rank) for of_rank in entries)
        )

    whole, n_ways = lists(n), len(layout.ways)
    if not layout.kind.searched:
        for n_run in range(layout.pp + _PERIODS, min(n, 8 * layout.n_stages + 8)):
            if schedule_problems(layout, n_run):
                continue
            part = lists(n_run)
            for period in sorted({1, 2, layout.pp, 2 * layout.pp}):
                if (n - n_run) % period or period % n_ways:
                    continue
                sizes = [size // n_ways for size in (n_run, n, period)]
                repeats = [_repeats(*pair, *sizes) for pair in zip(part, whole, strict=True)]
                if all(repeats):
                    return length(n_run, part, [repeated for repeated in repeats if repeated])
    return length(n, whole, [{} for _ in whole])


def _repeats(part: Sequence[Entry], whole: Sequence[Entry], n_run: int, n: int, period: int) -> dict[str, int] | None:
    """Return for each action of the repeated period the number of actions that it represents, or None if the whole list
    is not the shorter list with a period inserted. `n_run`, `n`, `period`: micro-batches of each way through the
    pipeline."""
    few, every = _by_way(part, n_run), _by_way(whole, n)
    left_out = n - n_run
    times = left_out // period
    inserted = len(every) - len(few)
    size, rest = divmod(inserted, times)
    if rest:
        return None
    for at in range(2 * size, len(few) - size + 1):
        # Compare three periods around the position, all inserted periods, and the entries before and after them.
        same = (
            isinstance(few[at - size], Action)  # exchanges count with the action before them
            and all(_later(few[i], period) == few[i + size] for i in range(at - 2 * size, at))
            and few[:at] == every[:at]
            and all(_later(every[i], period) == every[i + size] for i in range(at - size, at + inserted - size))
            and [_later(entry, left_out) for entry in few[at:]] == every[at + inserted :]
        )
        if same:
            return {str(entry): 1 + times for entry in part[at - size : at] if isinstance(entry, Action)}
    return None


def _by_way(entries: Sequence[Entry], n_of_way: int) -> list[Entry]:
    """Return entries with micro-batches numbered within their way; the second way starts at `_APART`."""
    return [_renumbered(entry, lambda at: at // n_of_way * _APART + at % n_of_way) for entry in entries]


def _later(entry: Entry, n: int) -> Entry:
    """Return the entry with micro-batch numbers increased by n."""
    return _renumbered(entry, lambda at: at + n)


def _renumbered(entry: Entry, number: Callable[[int], int]) -> Entry:
    if isinstance(entry, Action):
        return entry._replace(microbatch=number(entry.microbatch))
    return entry._replace(
        messages=tuple(message._replace(microbatch=number(message.microbatch)) for message in entry.messages)
    )


ALL_RANKS = 8
"""Maximum world size for which every rank is run."""


def one_of_each_class(layout: Layout, imbalance: float = 1.0) -> list[int]:
    """Return ranks in ascending order that cover every class: all ranks of a small world; otherwise every rank of `pp`
    at index 0 of the other axes, and at the first and last rank of `pp` also the last index along each other axis.

    The first shard is the largest, so index 0 needs the most memory. A rank of ep with another number of rows has one
    of these coordinates.
    """
    if layout.world_size <= ALL_RANKS:
        return list(range(layout.world_size))
    ranks = {layout.rank_at({"pp": pp}) for pp in range(layout.pp)}
    for axis in DENSE_AXES:
        degree = layout.degree(axis)
        if axis != "pp" and degree > 1:
            for pp in {0, layout.pp - 1}:
                ranks.add(layout.rank_at({"pp": pp, axis: degree - 1}))
    if layout.ep > 1 and imbalance != 1:
        ranks.add(layout.group_of(0, "ep")[-1])
    return sorted(ranks)


def axes_of(layout: Layout, ranks: tuple[int, ...], rank: int) -> str:
    """Return the axes along which the ranks of a process group differ: `tp`, `dp_shard x cp`, or `ep` if only that axis
    has this group; `one rank` for a single rank."""
    if len(ranks) == 1:
        return "one rank"
    first, last = layout.coordinates(ranks[0]), layout.coordinates(ranks[-1])
    # Groups are boxes, so their first and last rank differ along all of their axes.
    differ = [axis for axis in DENSE_AXES if first[axis] != last[axis]]
    if layout.ep > 1 and len(differ) > 1:
        for axes in (("ep",), ("expert_dp_shard",), ("dp_replicate", "expert_dp_shard")):
            if tuple(layout.group_of(rank, *axes)) == ranks:
                return " x ".join(axes)
    if layout.ep > 1 and tuple(layout.group_of(rank, "ep")) == ranks:
        whole = tuple(layout.group_of(rank, *differ))
        return f"{differ[0]} = ep" if whole == ranks else "ep"
    return " x ".join(differ)
