"""Ranks that run lists with messages, on paper: with sends that wait for their receiver, and on streams like NCCL's."""

from collections import defaultdict, deque

from shardwright.schedule.actions import Action, Schedule
from shardwright.schedule.messages import PairExchange
from shardwright.schedule.simulate import Times

Lists = list[list[Action | PairExchange]]


def rendezvous(lists: Lists) -> list[str]:
    """What each rank stands at in the end if it waits at every exchange until the other rank has come to the same one;
    empty if all come to their ends."""
    at = [0] * len(lists)
    to_try = deque(range(len(lists)))
    while to_try:
        rank = to_try.popleft()
        while at[rank] < len(lists[rank]):
            here = lists[rank][at[rank]]
            if isinstance(here, PairExchange):
                peer = here.low + here.high - rank
                if at[peer] == len(lists[peer]) or lists[peer][at[peer]] != here:
                    break
                at[peer] += 1
                to_try.append(peer)
            at[rank] += 1
    return [f"rank {rank} at {entries[at[rank]]}" for rank, entries in enumerate(lists) if at[rank] < len(entries)]


def makespan_on_streams(schedule: Schedule, lists: Lists, times: Times) -> float:
    """When the last action ends where each pair of ranks has a stream of its own: an exchange takes `times.comm` from
    when the one before it on the stream is done and both ranks have computed what comes before it in their lists; an
    action waits for the one before it on its rank, and for the exchange that brings what it needs."""
    durations = times.times_by_stage(schedule.n_stages)
    clocks, at = [0.0] * len(lists), [0] * len(lists)
    posted: defaultdict[PairExchange, dict[int, float]] = defaultdict(dict)
    free: defaultdict[tuple[int, int], float] = defaultdict(float)
    arrived: dict[tuple[int, str, int], float] = {}
    while any(position < len(entries) for position, entries in zip(at, lists, strict=True)):
        before = sum(at)
        for rank, entries in enumerate(lists):
            while at[rank] < len(entries):
                here = entries[at[rank]]
                if isinstance(here, PairExchange):
                    posted[here][rank] = clocks[rank]
                    if len(posted[here]) == 2:  # both ranks post the exchanges of their pair in the same order
                        pair = here.low, here.high
                        free[pair] = max(free[pair], *posted[here].values()) + times.comm
                        arrived |= {message[:3]: free[pair] for message in here.messages}
                else:
                    needed = schedule.needs(here)
                    if needed is not None and schedule.place[needed] != rank:
                        need = here.stage, "F" if here.op == "F" else "B", here.microbatch
                        if need not in arrived:
                            break
                        clocks[rank] = max(clocks[rank], arrived[need])
                    clocks[rank] += durations[here.op][here.stage]
                at[rank] += 1
        assert sum(at) > before, "nothing can go on"
    return max(clocks)
