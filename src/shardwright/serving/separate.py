"""Prefill and decode on separate accelerators (disaggregated serving).

Some instances read prompts only, others decode only, and the cache of a prompt crosses from the first to the second.
No user waits for another's prompt between two tokens. Splits of the cluster are ordered by closed forms, and one stream
of requests through both pools is simulated for the most promising ones (`serving.pools`). Sources: Patel et al.,
Splitwise (arXiv 2311.18677), Zhong et al., DistServe (arXiv 2401.09670).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil, inf

import numpy as np
from numpy.typing import ArrayLike

from shardwright.cost.job import Floats
from shardwright.serving import forms
from shardwright.serving.memory import largest_batch, memory
from shardwright.serving.pools import InstancePool, PoolTimes, run
from shardwright.serving.search import (
    ServingLayout,
    ServingTask,
    SimulatedServing,
    arrivals,
    batches,
    best_first,
    decoding_pass_s,
    loop_rounds,
    pass_table,
)
from shardwright.serving.setting import Degrees, Settings
from shardwright.serving.simulate import PassTable, Scheduler, ServingRequest, closed_loop
from shardwright.serving.work import cache_token_bytes

SIMULATED = 10
"""Largest number of splits of a cluster that are simulated."""
LOADS = (1.0, 0.9, 0.8, 0.7, 0.6, 0.4)
"""Shares of the requests that a split can have under way. If neither their number nor their rate is given, the largest
share that keeps the limits is taken."""


@dataclass(frozen=True)
class PrefillDecodeSplit:
    """`readers` instances of `prefill` and `writers` of `decode`; each decode instance has at most `batch` requests. By
    closed forms: seconds to the first token, of a further one, of the transfer of a prompt's cache; `per_s`: the most
    requests per second."""

    prefill: Degrees
    readers: int
    decode: Degrees
    writers: int
    batch: int
    ttft_s: float
    tpot_s: float
    transfer_s: float
    per_s: float

    def under_way(self, task: ServingTask, per_s: float) -> int:
        """Return the mean number of requests in the system at this arrival rate, by Little's law."""
        return max(1, ceil(per_s * (self.ttft_s + task.output_len * self.tpot_s)))


@dataclass(frozen=True)
class SimulatedSplit(SimulatedServing):
    """The simulation of a split. The time to the first token: wait for prefill, prefill, wait for a place, transfer.
    `requests`: concurrent requests, None if they arrive at a rate."""

    split: PrefillDecodeSplit
    crossed: PoolTimes
    requests: int | None


def separate(task: ServingTask, every: Sequence[ServingLayout]) -> SimulatedSplit | None:
    """Return the split of the cluster with the most tokens per second within the limits, or at a given rate with the
    least time of a token; None if there is none."""
    results = [result for split in _promising(task, every) if (result := _best_load(task, split)) is not None]
    if task.rate_per_s is not None:
        return min(results, key=lambda result: (result.tpot_s(), result.ttft_s()), default=None)
    return max(results, key=lambda result: result.tokens_per_s, default=None)


def _best_load(task: ServingTask, split: PrefillDecodeSplit) -> SimulatedSplit | None:
    """Simulate a split with the requested load, or with the largest load within the limits; None if there is none."""
    fixed = task.rate_per_s is not None or task.concurrency is not None
    for part in (1.0,) if fixed else LOADS:
        users = None if task.rate_per_s is not None else task.concurrency or split.under_way(task, part * split.per_s)
        result = simulated(task, split, users)
        if result.keeps(task):
            return result
    return None


def simulated(task: ServingTask, split: PrefillDecodeSplit, users: int | None) -> SimulatedSplit:
    """Simulate a stream of requests through a split: `users` at a time, or if None, at the rate of the task."""
    readers, writers = _pools(task, split)
    latency_s = task.serving.cluster.across.latency_s
    if users is not None:
        loop = _loop(task, split, users, loop_rounds(users))
        crossed = run(readers, writers, loop, users, latency_s).after(users)
        rate = users * task.output_len / float(crossed.served.e2e_s.mean())
    else:
        assert task.rate_per_s is not None
        requests = arrivals(task, task.rate_per_s, split.under_way(task, task.rate_per_s))
        crossed = run(readers, writers, requests, None, latency_s)
        rate = crossed.served.tokens_per_s
    return SimulatedSplit(crossed.served, rate, task.serving.cluster.size, split, crossed, users)


def _loop(task: ServingTask, split: PrefillDecodeSplit, users: int, rounds: int) -> list[ServingRequest]:
    """Return a closed loop whose users start independently of one another, within the time from one request of a user
    to the next. If all started at once, they would wait for prefill together forever."""
    around_s = max(split.ttft_s + task.output_len * split.tpot_s, users / split.per_s)
    begin = np.sort(np.random.default_rng(3).uniform(0.0, around_s, users))
    first = [ServingRequest(float(at), task.input_len, task.output_len) for at in begin]
    n = users * (rounds - 1)
    return [*first, *closed_loop([task.input_len] * n, [task.output_len] * n)]


def _pools(task: ServingTask, split: PrefillDecodeSplit) -> tuple[InstancePool, InstancePool]:
    """Return the pools of prefill and of decode instances of a split."""
    engine, pools = task.engine, []
    for degrees in (split.prefill, split.decode):
        settings = Settings.from_layouts([degrees])
        usage = memory(task.serving, settings, engine, task.length)
        pools.append((float(np.max(usage.cache_tokens(degrees.dp))), float(token_transfer_s(task, settings)[0])))
    (read_room, sends_s), (write_room, receives_s) = pools
    reads = PassTable(task.serving, split.prefill, engine.max_tokens)
    most = engine.max_batch * split.prefill.dp
    writes = Scheduler(engine, split.batch, write_room, task.speculation.accepted)
    return (
        InstancePool(reads, split.readers, Scheduler(engine, most, read_room), sends_s),
        InstancePool(pass_table(task, split.decode), split.writers, writes, receives_s),
    )


def _promising(task: ServingTask, every: Sequence[ServingLayout]) -> list[PrefillDecodeSplit]:
    """Return the splits that keep the limits by closed forms, the best for each pair of layouts: with the most requests
    per second, or at a given rate with the least time of a token."""
    degrees = list(dict.fromkeys(layout.degrees for layout in every))
    best: dict[tuple[Degrees, Degrees], PrefillDecodeSplit] = {}
    for split in _splits(task, degrees):
        pair = split.prefill, split.decode
        if pair not in best or _order(task, split) < _order(task, best[pair]):
            best[pair] = split
    return sorted(best.values(), key=lambda candidate: _order(task, candidate))[:SIMULATED]


def _order(task: ServingTask, split: PrefillDecodeSplit) -> tuple[float, ...]:
    return best_first(task, split.per_s, split.tpot_s, split.ttft_s)


def _splits(task: ServingTask, degrees: Sequence[Degrees]) -> Iterator[PrefillDecodeSplit]:
    """Yield every pair of layouts and batch, with the numbers of instances that suit them best. At a given rate, the
    batch determines the time of a token, and the limit is the largest batch that keeps the limit of that time, for
    requests that arrive in close succession."""
    writers, total = _writers(task, degrees), task.serving.cluster.size
    largest = {decode: batch for decode, batch, _, _ in writers}  # they are in ascending order
    for prefill, read_s, sends_s in _readers(task, degrees):
        for decode, batch, tpot, receives_s in writers:
            if prefill.size + decode.size > total:
                continue
            numbers = np.arange(1, (total - decode.size) // prefill.size + 1)
            others = (total - numbers * prefill.size) // decode.size
            reads, writes = numbers / read_s, others * batch / (task.output_len * tpot)
            way, per_s = max(sends_s, receives_s), np.minimum(reads, writes)
            if task.rate_per_s is None:
                first = np.full(len(numbers), read_s + way)
                if task.concurrency is not None:
                    per_s = np.minimum(per_s, task.concurrency / (read_s + way + task.output_len * tpot))
                cost = -per_s
            else:
                first = read_s + way + waiting_s(task.rate_per_s, read_s, numbers)
                cost = np.where(per_s > task.rate_per_s, first, inf)
            at = int(np.argmin(cost))
            if cost[at] < inf and first[at] <= task.ttft_s:
                limit = batch if task.rate_per_s is None else largest[decode]
                yield PrefillDecodeSplit(
                    prefill, int(numbers[at]), decode, int(others[at]), limit, float(first[at]), tpot, way,
                    float(per_s[at]),
                )  # fmt: skip


def waiting_s(per_s: float, each_s: float, instances: ArrayLike) -> Floats:
    """Return the mean waiting time in seconds before equal instances that serve one request at a time, each in
    `each_s`, if requests arrive independently of one another; infinite if they arrive faster than they are served.

    M/D/c by Sakasegawa (1977), rho^(sqrt(2 (c + 1)) - 1) / (c (1 - rho)) x each_s / 2; exact for one instance.
    """
    c = np.asarray(instances, dtype=np.float64)
    load = per_s * each_s / c
    with np.errstate(divide="ignore", invalid="ignore"):
        waits_s = load ** (np.sqrt(2 * (c + 1)) - 1) / (c * (1 - load)) * each_s / 2
    return np.where(load < 1, waits_s, inf)


def _readers(task: ServingTask, degrees: Sequence[Degrees]) -> list[tuple[Degrees, float, float]]:
    """Return the layouts with room for weights and a prompt, with the seconds of a prompt and of sending its cache."""
    settings = Settings.from_layouts(degrees)
    engine = replace(task.engine, max_tokens=max(task.engine.max_tokens, task.input_len))
    usage = memory(task.serving, settings, engine, task.input_len)
    fits = usage.cache_tokens(settings.dp) >= task.input_len
    read = np.broadcast_to(forms.prefill_s(task.serving, settings, 1.0, task.input_len), fits.shape)
    way = transfer_s(task, settings)
    return [(degrees[k], float(read[k]), float(way[k])) for k in np.flatnonzero(fits).tolist()]


def transfer_s(task: ServingTask, settings: Settings) -> Floats:
    """Return the seconds to send the cache of a prompt over the network, without other transfers."""
    return np.asarray(token_transfer_s(task, settings) * task.input_len + task.serving.cluster.across.latency_s)


def token_transfer_s(task: ServingTask, settings: Settings) -> Floats:
    """Return the seconds to send the cache of a token through the links of an instance: each of its ranks sends, or
    receives, its own part."""
    model = task.serving.model
    layers = np.ceil((model.n_layers - model.n_linear_layers) / settings.pp)  # states do not grow with tokens
    return np.asarray(layers * cache_token_bytes(task.serving, settings.tp) / task.serving.cluster.across.bytes_per_s)


def _writers(task: ServingTask, degrees: Sequence[Degrees]) -> list[tuple[Degrees, int, float, float]]:
    """Return the layouts and batches that keep the limit of a further token, with the seconds of a further token and of
    receiving the cache of a prompt."""
    settings = Settings.from_layouts(degrees)
    most = largest_batch(task.serving, settings, task.length, task.engine)
    pairs = [
        (at, batch)
        for at, layout in enumerate(degrees)
        for batch in batches(min(int(most[at]), task.engine.max_batch * layout.dp))
    ]
    if not pairs:
        return []
    at = np.array([pair[0] for pair in pairs])
    requests = np.array([pair[1] for pair in pairs], dtype=np.float64)
    pass_s = decoding_pass_s(task, Settings.from_layouts([degrees[k] for k in at]), requests)
    tpot = pass_s / task.speculation.accepted
    way = transfer_s(task, settings)
    return [
        (degrees[at[k]], int(requests[k]), float(tpot[k]), float(way[at[k]]))
        for k in range(len(pairs))
        if tpot[k] <= task.tpot_s
    ]
