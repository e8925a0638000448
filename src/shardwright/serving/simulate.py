"""Simulation of a stream of requests through an engine's scheduler, pass by pass, for the latencies of its users.

Continuous batching: a request joins the batch when there is room, and leaves it with its last token. Its prompt is read
in the pass in which others decode (`mixed`), in chunks of at most `max_tokens` tokens a pass, or in passes of its own
before any request decodes further. Passes between two events, with the same requests, are computed at once.
"""

import heapq
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from shardwright.cost.job import Floats
from shardwright.serving import host
from shardwright.serving.engines import ServingEngine
from shardwright.serving.setting import Degrees, PassBatch, Serving, Settings
from shardwright.serving.work import period_s


class PassTable:
    """Seconds of a pass of one layout, as a table over its tokens, so that a simulation can look up millions of passes.

    `drafted`: additional tokens that are verified for a request. `dearer`: factor on the time of passes that decode.

    A pass takes F(tokens) + A x cached tokens of its requests + B x pairs of tokens in its prompts: weights and
    activations depend on the number of tokens alone, attention is linear in the tokens that it reads.
    """

    def __init__(
        self, serving: Serving, degrees: Degrees, max_tokens: int, drafted: float = 0.0, dearer: float = 1.0
    ) -> None:
        rates, model = serving.rates, serving.model
        self.least_s = float(
            np.max(model.n_layers * rates.launch_s + model.n_expert_layers * rates.expert_launch_s + rates.pass_s)
        )
        serving = replace(serving, rates=replace(rates, launch_s=0.0, expert_launch_s=0.0))
        grid = np.unique(np.round(np.geomspace(1, max(2, 2 * max_tokens), 72)))
        settings = Settings.from_layouts([degrees])
        decode = PassBatch(requests=grid, logits=grid * (1 + drafted), drafted=drafted)
        self._tokens: list[float] = grid.tolist()
        self._decode: list[float] = _row(period_s(serving, settings, decode) * dearer, grid)
        self._prompt: list[float] = _row(period_s(serving, settings, PassBatch(prompt=grid, logits=1.0)), grid)
        self.request_s = float(np.max(rates.request_s))
        self.prompt_s = host.prompt_s(serving) if serving.on_host else 0.0
        self.arrive_s = float(np.max(serving.rates.arrive_s))
        far, one = 1e5, np.ones(1)
        near = PassBatch(requests=one, logits=one, drafted=drafted)
        away = PassBatch(requests=one, logits=one, drafted=drafted, context=far)
        self.cached_s = float((period_s(serving, settings, away) - period_s(serving, settings, near))[0]) / far
        attended = host.TYPICAL if serving.on_host else far
        read, pairs = PassBatch(prompt=one, logits=one), PassBatch(prompt=one, logits=one, attended=attended)
        self.pair_s = float((period_s(serving, settings, pairs) - period_s(serving, settings, read))[0]) / attended

    def decode_s(self, requests: int) -> float:
        """Return the seconds of a pass in which requests without any cached token decode."""
        return _between(self._tokens, self._decode, requests)

    def read_s(self, tokens: float, pairs: float, requests: int, cached: float, prompts: int = 1) -> float:
        """Return the seconds of a pass of `tokens`: `requests` decode with `cached` tokens, and the other tokens belong
        to `prompts` with `pairs` of tokens; at least the time that the host takes to start its kernels."""
        computing = _between(self._tokens, self._prompt, tokens) + self.pair_s * pairs + self.cached_s * cached
        computing += self.prompt_s * (prompts - 1)
        return max(computing, self.least_s) + self.request_s * requests


def _row(seconds: Floats, grid: Floats) -> list[float]:
    return [float(value) for value in np.broadcast_to(seconds, grid.shape)]


def _between(xs: list[float], ys: list[float], x: float) -> float:
    """Interpolate linearly between the points; extrapolate from the last two."""
    at = min(max(bisect_right(xs, x), 1), len(xs) - 1)
    x0, y0 = xs[at - 1], ys[at - 1]
    return y0 + (x - x0) * (ys[at] - y0) / (xs[at] - x0)


@dataclass(frozen=True)
class Scheduler:
    """The scheduler of an engine with `max_batch` concurrent requests and `cache_tokens` of the whole instance.
    `accepted`: tokens of a request in a pass, above 1 with speculative decoding."""

    engine: ServingEngine
    max_batch: int
    cache_tokens: float
    accepted: float = 1.0


@dataclass(frozen=True)
class ServingRequest:
    """A request. `arrival_s`: time of arrival. The lengths are tokens in and out."""

    arrival_s: float
    input_len: int
    output_len: int


@dataclass(frozen=True)
class ServedTimes:
    """Latencies by request, (n,): seconds to the first token, mean seconds of a further token (nan if there is none),
    seconds to the last. `span_s`: from the first arrival to the last token. `output_tokens`: of all requests."""

    ttft_s: Floats
    tpot_s: Floats
    e2e_s: Floats
    span_s: float
    output_tokens: int

    def after(self, n: int) -> "ServedTimes":
        """Return the times without the first n requests, which start on an empty system."""
        return replace(self, ttft_s=self.ttft_s[n:], tpot_s=self.tpot_s[n:], e2e_s=self.e2e_s[n:])

    @property
    def tokens_per_s(self) -> float:
        """Return output tokens per second."""
        return self.output_tokens / self.span_s

    def first_s(self, percentile: float) -> float:
        """Return a percentile of the seconds to the first token."""
        return float(np.percentile(self.ttft_s, percentile))

    def further_s(self, percentile: float) -> float:
        """Return a percentile of the seconds of a further token; 0 if each request has one token only."""
        finite = self.tpot_s[~np.isnan(self.tpot_s)]
        return float(np.percentile(finite, percentile)) if len(finite) else 0.0


def lengths(stated: int, shortest: float, n: int, seed: int = 0) -> list[int]:
    """Draw the lengths of n requests uniformly from `shortest` x stated to stated."""
    if shortest >= 1:
        return [stated] * n
    low = max(1, round(stated * shortest))
    return [int(length) for length in np.random.default_rng(seed).integers(low, stated + 1, n)]


def steady_loop(
    table: "PassTable", scheduler: "Scheduler", input_len: int, output_len: int, users: int, rounds: int
) -> ServedTimes:
    """Simulate a closed loop of equal requests whose users are evenly spread over its time: each starts somewhere in an
    answer, and these first requests are not counted."""
    parts = np.random.default_rng(3).integers(1, output_len + 1, users)
    outputs = [*map(int, parts), *[output_len] * (users * (rounds - 1))]
    return run(table, scheduler, closed_loop([input_len] * len(outputs), outputs), users).after(users)


def closed_loop(inputs: Sequence[int], outputs: Sequence[int]) -> list[ServingRequest]:
    """Return the requests of a closed loop; `run` with a `concurrency` starts each as another one ends."""
    return [ServingRequest(0.0, read, out) for read, out in zip(inputs, outputs, strict=True)]


def poisson(per_s: float, inputs: Sequence[int], outputs: Sequence[int], seed: int = 1) -> list[ServingRequest]:
    """Return requests that arrive independently of one another, `per_s` per second on average."""
    times = np.cumsum(np.random.default_rng(seed).exponential(1 / per_s, len(inputs)))
    return [ServingRequest(float(at), read, out) for at, read, out in zip(times, inputs, outputs, strict=True)]


def run(
    table: PassTable, scheduler: Scheduler, requests: Sequence[ServingRequest], concurrency: int | None = None
) -> ServedTimes:
    """Serve requests in the order of their arrival. With `concurrency`, at most this number is in the system, and the
    next request arrives when one has ended."""
    return _InstanceSimulation(table, scheduler, requests, concurrency).served()


class _InstanceSimulation:
    """The state of a simulation. Times are counted in passes (`passes`) for requests that decode, since all of them
    advance by one pass together."""

    def __init__(
        self, table: PassTable, scheduler: Scheduler, requests: Sequence[ServingRequest], concurrency: int | None
    ) -> None:
        self.table, self.scheduler, self.engine, self.requests = table, scheduler, scheduler.engine, requests
        self.arrived = [request.arrival_s for request in requests]
        self.first, self.last = [0.0] * len(requests), [0.0] * len(requests)
        self.later = deque(range(len(requests)))
        self.coming: list[tuple[float, int]] = []
        self.waiting: deque[int] = deque()
        self.reading: deque[list[int]] = deque()
        self.ends: list[tuple[int, int]] = []
        self.now = requests[0].arrival_s if requests else 0.0
        self.passes, self.cached, self.reserved = 0, 0.0, 0.0
        self.held_since: int | None = None
        """The pass since which prompts wait for more prompts."""
        for _ in range(min(concurrency or len(requests), len(requests))):
            self._send(self.later.popleft(), 0.0)

    def served(self) -> ServedTimes:
        """Run to the last token."""
        while self.coming or self.waiting or self.reading or self.ends:
            while self.coming and self.coming[0][0] <= self.now:
                self.waiting.append(heapq.heappop(self.coming)[1])
            self._admit()
            if self.reading and not self._holds():
                self._read()
            elif self.ends:
                self._decode()
            else:
                self.now = self.coming[0][0]
        first, last, arrived = map(np.array, (self.first, self.last, self.arrived))
        out = np.array([request.output_len for request in self.requests])
        tpot = np.where(out > 1, (last - first) / np.maximum(out - 1, 1), np.nan)
        span = float(last.max() - arrived.min())
        return ServedTimes(first - arrived, tpot, last - arrived, span, int(out.sum()))

    def _send(self, at: int, now: float) -> None:
        """Send a user's request. The scheduler receives it somewhat later."""
        self.arrived[at] = max(self.arrived[at], now)
        heapq.heappush(self.coming, (self.arrived[at] + self.table.arrive_s, at))

    def _admit(self) -> None:
        limit = self.scheduler
        while self.waiting and len(self.ends) + len(self.reading) < limit.max_batch:
            at = self.waiting[0]
            needed = self._reserved(at)
            if self.reserved + needed > limit.cache_tokens and (self.ends or self.reading):
                return
            self.reserved += needed
            self.reading.append([self.waiting.popleft(), 0])

    def _reserved(self, at: int) -> float:
        """Return the cache tokens that are reserved when a request is admitted."""
        return self.requests[at].input_len + self.engine.reserved * self.requests[at].output_len

    def _chunks(self, decoding: int) -> list[int]:
        """Return the tokens of each prompt that the next pass reads, in order, while `decoding` requests decode."""
        room = max(1, self.engine.max_tokens - decoding)
        chunks: list[int] = []
        for at, done in self.reading:
            left = self.requests[at].input_len - done
            if room <= 0 or (chunks and left > room and not self.engine.chunked):
                break
            chunks.append(min(left, room) if self.engine.chunked else left)
            room -= chunks[-1]
        return chunks

    def _holds(self) -> bool:
        """Return whether the prompts that could be read wait for more prompts, while other requests decode."""
        engine = self.engine
        if engine.hold_passes and self.ends and not self.reading[0][1] and len(self.reading) < engine.hold_prompts:
            decoding, enough = len(self.ends), engine.hold_share * engine.max_tokens
            since = self.passes if self.held_since is None else self.held_since
            if self.passes < since + engine.hold_passes and sum(self._chunks(decoding)) + decoding < enough:
                self.held_since = since
                return True
        self.held_since = None
        return False

    def _read(self) -> None:
        """Run one pass that reads prompts. If passes are mixed, the requests of the batch decode in it."""
        decoding = len(self.ends) if self.engine.mixed else 0
        tokens, pairs, ready = 0, 0.0, []
        for chunk in self._chunks(decoding):
            at, done = self.reading[0]
            tokens += chunk
            pairs += chunk * (done + chunk / 2)
            self.reading[0][1] += chunk
            if done + chunk == self.requests[at].input_len:
                ready.append(self.reading.popleft()[0])
        cached = self.cached if decoding else 0.0
        self.now += self.table.read_s(tokens + decoding, pairs, decoding, cached, max(len(ready), 1))
        if decoding:
            self._advance(1)
        for at in ready:
            self.first[at] = self.now
            self.cached += self.requests[at].input_len
            if self.requests[at].output_len == 1:
                self._end(at)
            else:
                needed = -(-(self.requests[at].output_len - 1) // self.scheduler.accepted)
                heapq.heappush(self.ends, (self.passes + int(needed), at))

    def _decode(self) -> None:
        """Run passes up to the next end of a request, or the next arrival."""
        n, count = len(self.ends), self.ends[0][0] - self.passes
        if self.held_since is not None:
            count = min(count, self.held_since + self.engine.hold_passes - self.passes)
        pass_s = self.table.decode_s(n) + self.table.cached_s * self.cached
        grows = self.table.cached_s * n * self.scheduler.accepted
        if self.coming and len(self.ends) < self.scheduler.max_batch:
            wait = self.coming[0][0] - self.now
            count = min(count, max(1, -int(-wait // (pass_s + grows * min(count, wait / pass_s) / 2))))
        self.now += count * pass_s + grows * count * (count - 1) / 2
        self._advance(count)

    def _advance(self, count: int) -> None:
        self.passes += count
        self.cached += len(self.ends) * count * self.scheduler.accepted
        while self.ends and self.ends[0][0] <= self.passes:
            self._end(heapq.heappop(self.ends)[1])

    def _end(self, at: int) -> None:
        self.last[at] = self.now
        done = self.requests[at]
        self.reserved -= self._reserved(at)
        self.cached -= done.input_len + done.output_len - 1 if done.output_len > 1 else done.input_len
        self.cached = max(self.cached, 0.0)
        if self.later:
            self._send(self.later.popleft(), self.now)
