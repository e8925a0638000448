"""One stream of requests through prefill instances and decode instances.

A request waits for an instance that reads prompts, in the order of arrival. It then waits until an instance for
decoding has a place for it, while its cache stays where it was made. Then its cache crosses, at the rate that the other
transfers under way leave on both links; then it decodes with the next pass. Its first token is shown when its cache has
arrived. Sources: the queues of DistServe (arXiv 2401.09670, section 4.3, where decoding instances pull) and of
Splitwise (arXiv 2311.18677). Ignored: that the transfer of one layer can overlap with the prefill of the next.
"""

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import ceil, inf, sqrt

import numpy as np

from shardwright.cost.job import Floats
from shardwright.serving.simulate import PassTable, Scheduler, ServedTimes, ServingRequest

Action = Callable[[], None]


@dataclass(frozen=True)
class InstancePool:
    """Equal instances with one role. The scheduler's `max_batch` is the number of requests that decode at a time, or of
    prompts in a pass. `transfer_s`: seconds to send the cache of a token through the instance's links alone."""

    table: PassTable
    instances: int
    scheduler: Scheduler
    transfer_s: float = 0.0


@dataclass(frozen=True)
class PoolTimes:
    """`served`: the times that users see. By request, (n,): seconds of its wait for prefill, and of the transfer of its
    cache."""

    served: ServedTimes
    queued_s: Floats
    transfer_s: Floats

    def after(self, n: int) -> "PoolTimes":
        """Return the times without the first n requests, which start on an empty system."""
        return PoolTimes(self.served.after(n), self.queued_s[n:], self.transfer_s[n:])


def run(
    readers: InstancePool,
    writers: InstancePool,
    requests: Sequence[ServingRequest],
    concurrency: int | None = None,
    latency_s: float = 0.0,
) -> PoolTimes:
    """Serve requests in the order of their arrival. With `concurrency`, at most this number is in the system, and the
    next request arrives when one has ended. `latency_s`: of a transfer, in addition to its bytes."""
    return _PoolSimulation(readers, writers, requests, concurrency, latency_s).crossed()


@dataclass
class _PrefillInstance:
    """A prefill instance. `held`: cached tokens of prompts that are read or wait to cross. `sending`: transfers."""

    reserved: float = 0.0
    busy: bool = False
    sending: int = 0


@dataclass
class _DecodeInstance:
    """A decode instance at the end of its last pass, which may be the pass under way. `taken`: requests that have a
    place. `held`: tokens of the cache that are reserved for them. `ends`: (pass of the last token, request). `version`:
    of the state; an event with an older version was scheduled before the state changed, and is ignored."""

    now: float = 0.0
    passes: int = 0
    cached: float = 0.0
    taken: int = 0
    reserved: float = 0.0
    receiving: int = 0
    version: int = 0
    ends: list[tuple[int, int]] = field(default_factory=list)


@dataclass
class _CacheTransfer:
    """A transfer of a cache. `left`: the share that is still to be sent, 1 at the start."""

    request: int
    reader: _PrefillInstance
    writer: _DecodeInstance
    left: float = 1.0


class _PoolSimulation:
    """The state of a simulation: events in the order of their times."""

    def __init__(
        self,
        readers: InstancePool,
        writers: InstancePool,
        requests: Sequence[ServingRequest],
        concurrency: int | None,
        latency_s: float,
    ) -> None:
        self.reading, self.writing, self.requests, self.latency_s = readers, writers, requests, latency_s
        self.readers = [_PrefillInstance() for _ in range(readers.instances)]
        self.writers = [_DecodeInstance() for _ in range(writers.instances)]
        self.events: list[tuple[float, int, Action]] = []
        self.n_events = 0
        self.waiting: deque[int] = deque()
        self.ready: deque[tuple[int, _PrefillInstance]] = deque()
        self.transfers: list[_CacheTransfer] = []
        self.crossing_since, self.crossing_version = 0.0, 0
        n = len(requests)
        self.arrived = [request.arrival_s for request in requests]
        self.began, self.first, self.last, self.left_s = ([0.0] * n for _ in range(4))
        self.later = deque(range(n))
        for _ in range(min(concurrency or n, n)):
            self._send(self.later.popleft(), 0.0)

    def crossed(self) -> PoolTimes:
        """Run to the last token."""
        while self.events:
            self.now, _, action = heapq.heappop(self.events)
            action()
        first, last, arrived = map(np.array, (self.first, self.last, self.arrived))
        out = np.array([request.output_len for request in self.requests])
        tpot = np.where(out > 1, (last - first) / np.maximum(out - 1, 1), np.nan)
        span = float(last.max() - arrived.min())
        served = ServedTimes(first - arrived, tpot, last - arrived, span, int(out.sum()))
        crossing = np.where(out > 1, first - np.array(self.left_s), 0.0)
        return PoolTimes(served, np.array(self.began) - arrived - self.reading.table.arrive_s, crossing)

    def _schedule(self, when: float, action: Action) -> None:
        self.n_events += 1
        heapq.heappush(self.events, (when, self.n_events, action))

    def _send(self, at: int, now: float) -> None:
        """Send a user's request. The scheduler receives it somewhat later."""
        self.arrived[at] = max(self.arrived[at], now)
        self._schedule(self.arrived[at] + self.reading.table.arrive_s, partial(self._arrive, at))

    def _arrive(self, at: int) -> None:
        self.waiting.append(at)
        self._schedule(self.now, self._read)  # after others that arrive at the same time

    def _read(self) -> None:
        """Start a pass on every idle instance, over the waiting prompts that have room in its cache."""
        for reader in self.readers:
            if not reader.busy and (taken := self._taken(reader)):
                reader.busy = True
                for at in taken:
                    self.began[at] = self.now
                seconds = self._prefill_s([self.requests[at].input_len for at in taken])
                self._schedule(self.now + seconds, partial(self._has_read, reader, taken))

    def _taken(self, reader: _PrefillInstance) -> list[int]:
        """Return the prompts of an instance's next pass."""
        limit, tokens = self.reading.scheduler, 0
        taken: list[int] = []
        while self.waiting and len(taken) < limit.max_batch:
            size = self.requests[self.waiting[0]].input_len
            full = reader.reserved + size > limit.cache_tokens and reader.reserved > 0
            if full or (taken and tokens + size > limit.engine.max_tokens):
                break
            taken.append(self.waiting.popleft())
            tokens += size
            reader.reserved += size
        return taken

    def _prefill_s(self, prompts: Sequence[int]) -> float:
        """Return the seconds of prompts in one pass, or of a prompt longer than a pass, in chunks."""
        table, most = self.reading.table, self.reading.scheduler.engine.max_tokens
        if len(prompts) > 1:
            return table.read_s(sum(prompts), sum(size * size / 2 for size in prompts), 0, 0.0, len(prompts))
        size = prompts[0]
        chunks = [(done, min(most, size - done)) for done in range(0, size, most)]
        return sum(table.read_s(chunk, chunk * (done + chunk / 2), 0, 0.0) for done, chunk in chunks)

    def _has_read(self, reader: _PrefillInstance, taken: Sequence[int]) -> None:
        reader.busy = False
        for at in taken:
            if self.requests[at].output_len == 1:
                reader.reserved -= self.requests[at].input_len
                self.first[at] = self.now
                self._end(at, self.now)
            else:
                self.ready.append((at, reader))
        self._pull()
        self._read()

    def _pull(self) -> None:
        """Give places for decoding to requests whose prompts were read, in their order, and start their transfers."""
        while self.ready:
            at, reader = self.ready[0]
            writer = min(self.writers, key=lambda candidate: candidate.taken)
            full = writer.reserved + self._reserved(at) > self.writing.scheduler.cache_tokens and writer.taken > 0
            if writer.taken >= self.writing.scheduler.max_batch or full:
                return
            self.ready.popleft()
            writer.taken += 1
            writer.reserved += self._reserved(at)
            self.left_s[at] = self.now
            self._schedule(self.now + self.latency_s, partial(self._cross, _CacheTransfer(at, reader, writer)))

    def _reserved(self, at: int) -> float:
        return self.requests[at].input_len + self.writing.scheduler.engine.reserved * self.requests[at].output_len

    def _cross(self, begun: _CacheTransfer) -> None:
        self._advance_transfers()
        self.transfers.append(begun)
        begun.reader.sending += 1
        begun.writer.receiving += 1
        self._foresee_transfer()

    def _rate(self, transfer: _CacheTransfer) -> float:
        """Return the rate of a transfer, as a share of the whole per second: its equal part of the slower link."""
        size = self.requests[transfer.request].input_len
        sends = self.reading.transfer_s * transfer.reader.sending
        receives = self.writing.transfer_s * transfer.writer.receiving
        return 1 / (size * max(sends, receives)) if max(sends, receives) > 0 else inf

    def _advance_transfers(self) -> None:
        passed = self.now - self.crossing_since
        for transfer in self.transfers:
            if passed > 0:
                transfer.left -= passed * self._rate(transfer)
        self.crossing_since = self.now

    def _foresee_transfer(self) -> None:
        self.crossing_version += 1
        version = self.crossing_version
        if self.transfers:
            ends, which = min(((max(t.left, 0.0) / self._rate(t), k) for k, t in enumerate(self.transfers)))
            arrived = self.transfers[which]
            self._schedule(self.now + ends, partial(self._has_crossed, arrived, version))

    def _has_crossed(self, transfer: _CacheTransfer, version: int) -> None:
        if version != self.crossing_version:
            return
        self._advance_transfers()
        self.transfers.remove(transfer)
        at, reader, writer = transfer.request, transfer.reader, transfer.writer
        reader.sending -= 1
        writer.receiving -= 1
        reader.reserved -= self.requests[at].input_len
        self.first[at] = self.now
        self._foresee_transfer()
        self._join(at, writer)
        self._read()

    def _join(self, at: int, writer: _DecodeInstance) -> None:
        """Let a request decode from the end of the pass under way."""
        if writer.ends:
            pass_s, grows = self._pass_s(writer)
            self._pass(writer, min(_passes(self.now - writer.now, pass_s, grows), writer.ends[0][0] - writer.passes))
        else:
            writer.now = max(writer.now, self.now)
        needed = ceil((self.requests[at].output_len - 1) / self.writing.scheduler.accepted)
        heapq.heappush(writer.ends, (writer.passes + needed, at))
        writer.cached += self.requests[at].input_len
        self._foresee_end(writer)

    def _pass_s(self, writer: _DecodeInstance) -> tuple[float, float]:
        """Return the seconds of an instance's next pass, and by how much each pass is longer than the previous one."""
        table, n = self.writing.table, len(writer.ends)
        return table.decode_s(n) + table.cached_s * writer.cached, table.cached_s * n * self.writing.scheduler.accepted

    def _pass(self, writer: _DecodeInstance, count: int) -> None:
        """Run `count` passes, and end the requests that get their last token in them."""
        pass_s, grows = self._pass_s(writer)
        writer.now += count * pass_s + grows * count * (count - 1) / 2
        writer.passes += count
        writer.cached += len(writer.ends) * count * self.writing.scheduler.accepted
        while writer.ends and writer.ends[0][0] <= writer.passes:
            at = heapq.heappop(writer.ends)[1]
            done = self.requests[at]
            writer.cached = max(writer.cached - (done.input_len + done.output_len - 1), 0.0)
            self._schedule(writer.now, partial(self._leave, at, writer))

    def _foresee_end(self, writer: _DecodeInstance) -> None:
        writer.version += 1
        version = writer.version
        if writer.ends:
            pass_s, grows = self._pass_s(writer)
            count = writer.ends[0][0] - writer.passes
            self._schedule(
                writer.now + count * pass_s + grows * count * (count - 1) / 2, partial(self._ends, writer, version)
            )

    def _ends(self, writer: _DecodeInstance, version: int) -> None:
        if version == writer.version:
            self._pass(writer, writer.ends[0][0] - writer.passes)
            self._foresee_end(writer)

    def _leave(self, at: int, writer: _DecodeInstance) -> None:
        writer.taken -= 1
        writer.reserved -= self._reserved(at)
        self._end(at, self.now)
        self._pull()

    def _end(self, at: int, now: float) -> None:
        self.last[at] = now
        if self.later:
            self._send(self.later.popleft(), now)


def _passes(seconds: float, pass_s: float, grows: float) -> int:
    """Return the least k with k each + grows k (k - 1) / 2 >= seconds: the passes that take at least `seconds`."""
    if seconds <= 0:
        return 0
    if grows * seconds < 1e-9 * pass_s * pass_s:
        return ceil(seconds / pass_s - 1e-9)
    half = pass_s - grows / 2
    return ceil((sqrt(half * half + 2 * grows * seconds) - half) / grows - 1e-9)
