"""Search for the best way to serve a model: closed forms price every layout and batch, and the best are simulated."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil, inf

import numpy as np

from shardwright.cost.hardware import Cluster
from shardwright.cost.job import Floats
from shardwright.model.spec import ModelSpec
from shardwright.planner.nearest import MOST_TIMES, more_accelerators, smallest_changes
from shardwright.serving import forms
from shardwright.serving.engines import USUAL, ServingEngine
from shardwright.serving.memory import ServingMemory, largest_batch, memory
from shardwright.serving.setting import Degrees, PassBatch, Serving, Settings
from shardwright.serving.simulate import PassTable, Scheduler, ServedTimes, ServingRequest, poisson, run, steady_loop
from shardwright.serving.work import period_s
from shardwright.split.rules import experts_divide, layers_divide
from shardwright.system.units import divisors

DENSEST_BATCHES = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28)


@dataclass(frozen=True)
class ServingLayout:
    """`replicas` instances, each with `degrees`, that share the users of a cluster."""

    degrees: Degrees
    replicas: int

    def __str__(self) -> str:
        return f"{self.replicas} x ({self.degrees})" if self.replicas > 1 else str(self.degrees)

    def as_json(self) -> dict[str, int]:
        """Return the layout as JSON."""
        return {"replicas": self.replicas, **self.degrees._asdict()}


def layouts(model: ModelSpec, cluster: Cluster) -> Iterator[ServingLayout]:
    """Yield every layout that fills the cluster.

    tp divides the heads and stays inside a node, where its all-reduces are fast; pp divides the layers into stages of
    at most one layer's difference; dp attention goes with experts, whose ep is 1 (all ranks share each expert), all
    ranks of a stage (whole experts), or the ranks of dp. On a measured processor, where `generate` runs, experts are
    whole.
    """
    for size in divisors(cluster.size):
        for tp in divisors(size):
            if tp > cluster.node_size or not layers_divide(model, tp):
                continue
            for dp in divisors(size // tp) if model.moe is not None else (1,):
                pp = size // (tp * dp)
                if pp > min(model.n_layers, 16):
                    continue
                for ep in sorted(_expert_degrees(model, tp, dp)):
                    if cluster.accelerator.on_host and model.moe is not None and ep != tp * dp:
                        continue
                    yield ServingLayout(Degrees(tp, pp, dp, ep), cluster.size // size)


def _expert_degrees(model: ModelSpec, tp: int, dp: int) -> set[int]:
    if model.moe is None:
        return {1}
    ranks = tp * dp
    return {
        ep
        for ep in (1, dp, ranks)
        if ranks % ep == 0 and experts_divide(model, ep) and model.moe.d_ffn % (ranks // ep) == 0
    }


def batches(most: int) -> list[int]:
    """Return the numbers of requests of an instance that are tried: every small number, then steps of 1/8."""
    sizes = [size for size in DENSEST_BATCHES if size <= most]
    step = 32.0
    while step <= most:
        sizes.append(int(step))
        step *= 2**0.25
    if most >= 1 and most not in sizes:
        sizes.append(most)
    return sizes


PERCENTILE = 95
"""Percentage of the simulated requests that have to keep the limits."""
SIMULATED = 24
"""Largest number of layouts and batches that are simulated to find the best ones."""
ITERATIONS = 3
"""Iterations for the number of prompts in a pass."""
LEAST_REQUESTS = 400
"""Fewest requests of a simulation, so that percentiles do not depend on a few requests."""


@dataclass(frozen=True)
class Speculation:
    """Speculative decoding: `drafted` tokens are proposed in each pass, each accepted with probability `acceptance`
    while those before it are; drafting one costs `draft_cost` of a pass."""

    drafted: int = 0
    acceptance: float = 0.0
    draft_cost: float = 0.0

    @property
    def drafting(self) -> float:
        """Return the time of a pass with its drafting, as a multiple of the pass alone."""
        return 1 + self.drafted * self.draft_cost

    @property
    def accepted(self) -> float:
        """Return the tokens of a pass, (1 - a^(k+1)) / (1 - a). Leviathan et al., arXiv 2211.17192, equation 1."""
        a, k = self.acceptance, self.drafted
        return float(k + 1) if a >= 1 else (1 - a ** (k + 1)) / (1 - a)


@dataclass(frozen=True, kw_only=True)
class ServingTask:
    """A model to serve and its load. `concurrency`: concurrent users of the whole cluster, or `rate_per_s`: requests
    that arrive per second; with neither, the load with the most tokens per second. `ttft_s`, `tpot_s`: limits, inf if
    there are none. `price_per_hour`: of one accelerator."""

    serving: Serving
    input_len: int
    output_len: int
    engine: ServingEngine = USUAL
    concurrency: int | None = None
    rate_per_s: float | None = None
    ttft_s: float = inf
    tpot_s: float = inf
    speculation: Speculation = Speculation()
    price_per_hour: float | None = None

    @property
    def usable_bytes(self) -> float:
        """Return the bytes of an accelerator that the engine uses at most."""
        return self.serving.cluster.accelerator.memory_bytes * self.engine.memory_share

    @property
    def length(self) -> int:
        """Return the tokens of a request at its end."""
        return self.input_len + self.output_len


@dataclass(frozen=True)
class ServingOption:
    """A layout with a batch limit for each instance, by closed forms: mean seconds, the cluster's tokens/s."""

    layout: ServingLayout
    batch: int
    ttft_s: float
    tpot_s: float
    tokens_per_s: float

    @property
    def per_accelerator(self) -> float:
        """Return output tokens per second of one accelerator."""
        return self.tokens_per_s / (self.layout.degrees.size * self.layout.replicas)


@dataclass(frozen=True)
class SimulatedServing:
    """A simulation. `served`: the latencies of its requests; `tokens_per_s`, `accelerators`: of the cluster."""

    served: ServedTimes
    tokens_per_s: float
    accelerators: int

    @property
    def per_accelerator(self) -> float:
        """Return output tokens per second of one accelerator."""
        return self.tokens_per_s / self.accelerators

    def ttft_s(self, percentile: float = 50) -> float:
        """Return a percentile of the seconds to the first token."""
        return self.served.first_s(percentile)

    def tpot_s(self, percentile: float = 50) -> float:
        """Return a percentile of the seconds of a further token; 0 if each request has one token only."""
        return self.served.further_s(percentile)

    def keeps(self, task: ServingTask) -> bool:
        """Return whether `PERCENTILE` of 100 requests keep the limits, and as many are served as arrive. If fewer are,
        each request waits longer than the request before it: the last tenth of the requests 7 times as long as the
        first quarter."""
        limited = self.ttft_s(PERCENTILE) <= task.ttft_s and self.tpot_s(PERCENTILE) <= task.tpot_s
        if task.rate_per_s is None or not limited:
            return limited
        ttft = self.served.ttft_s
        return bool(np.median(ttft[-(len(ttft) // 10) :]) <= 3 * np.median(ttft[: len(ttft) // 4]))


@dataclass(frozen=True)
class SimulatedOption(SimulatedServing):
    """The simulation of one instance of an option."""

    option: ServingOption

    @property
    def layout(self) -> ServingLayout:
        """Return the option's layout."""
        return self.option.layout

    @property
    def per_user(self) -> float:
        """Return the tokens per second that one user sees."""
        return 1 / self.tpot_s() if self.tpot_s() else 0.0

    def cost_per_million(self, task: ServingTask) -> float | None:
        """Return the price of a million output tokens."""
        if task.price_per_hour is None:
            return None
        return task.price_per_hour / 3600 / self.per_accelerator * 1e6


@dataclass(frozen=True)
class ServingPlan:
    """The result of a search. `best`: the best simulated option of each layout that keeps the limits, most tokens per
    second first. `missed`: simulated options that do not keep them. `options`: all options, by closed forms. `pareto`:
    the options that no other option beats both in tokens per second of an accelerator and of a user. `memory`: by
    layout, in the order of `layouts`."""

    task: ServingTask
    layouts: list[ServingLayout]
    memory: ServingMemory
    largest: Floats
    options: list[ServingOption]
    pareto: list[ServingOption]
    best: list[SimulatedOption]
    missed: list[SimulatedOption]
    n_settings: int


def search(task: ServingTask, top: int = 10) -> ServingPlan:
    """Price every layout and batch, simulate the most promising, and keep those within the limits."""
    every = list(layouts(task.serving.model, task.serving.cluster))
    settings = Settings.from_layouts([layout.degrees for layout in every])
    usage = memory(task.serving, settings, task.engine, task.length)
    largest = usage.batch(task.length, settings.dp)
    options = price(task, every, largest)
    best, missed = _simulated(task, options, usage, every, top)
    return ServingPlan(task, every, usage, largest, options, pareto(options), best, missed, len(options))


def price(task: ServingTask, every: Sequence[ServingLayout], largest: Floats) -> list[ServingOption]:
    """Price every layout with every batch that fits, as arrays."""
    pairs = [(at, batch) for at, layout in enumerate(every) for batch in _batches(task, layout, int(largest[at]))]
    if not pairs:
        return []
    at = np.array([pair[0] for pair in pairs])
    requests = np.array([pair[1] for pair in pairs], dtype=np.float64)
    settings = Settings.from_layouts([every[index].degrees for index in at])
    tpot, ttft = closed(task, settings, requests)
    replicas = np.array([every[index].replicas for index in at])
    each_s = ttft + (task.output_len - 1) * tpot
    rate = requests * task.output_len / each_s * replicas
    return [
        ServingOption(every[at[k]], int(requests[k]), float(ttft[k]), float(tpot[k]), float(rate[k]))
        for k in range(len(pairs))
    ]


def _batches(task: ServingTask, layout: ServingLayout, most: int) -> list[int]:
    limit = min(most, task.engine.max_batch * layout.degrees.dp)
    if task.concurrency is not None:
        per_replica = ceil(task.concurrency / layout.replicas)
        return [min(per_replica, limit)] if limit >= 1 else []
    return batches(limit)


def decoding_pass_s(task: ServingTask, settings: Settings, requests: Floats) -> Floats:
    """Return the seconds of a pass that decodes for `requests` of an instance, with the cost of drafting."""
    drafted = task.speculation.drafted
    context = forms.middle(task.input_len, task.output_len)
    batch = PassBatch(requests=requests, context=context, logits=requests * (1 + drafted), drafted=drafted)
    return period_s(task.serving, settings, batch) * task.speculation.drafting


def closed(task: ServingTask, settings: Settings, requests: Floats) -> tuple[Floats, Floats]:
    """Return the mean time of a token and to the first token, of a closed loop at `requests` of an instance.

    The prompts that a pass reads are the prompts that arrived during the last one: requests / output_len x the time of
    a pass / the time of a token, found by iteration. The first token takes half a pass that is under way, the pass that
    reads the prompt, and the way to the scheduler.
    """
    serving = task.serving
    context = forms.middle(task.input_len, task.output_len)
    pass_s = decoding_pass_s(task, settings, requests)
    prompts = np.ones_like(requests)
    most = np.maximum(1.0, np.minimum(task.engine.max_tokens / task.input_len, requests))
    for _ in range(ITERATIONS):
        prompt = forms.prompt_in_passing_s(serving, settings, requests, context, task.input_len, prompts)
        tpot = pass_s / task.speculation.accepted + (requests - 1) / task.output_len * prompt
        prompts = np.clip(requests / task.output_len * (pass_s + prompts * prompt) / tpot, 1.0, most)
    return tpot, pass_s / 2 + prompts * prompt + pass_s + serving.rates.arrive_s


def pareto(options: Sequence[ServingOption]) -> list[ServingOption]:
    """Return the options that no other beats both in tokens/s of an accelerator and of a user, fastest for a user
    first."""
    frontier: list[ServingOption] = []
    for candidate in sorted(options, key=lambda option: (option.tpot_s, -option.per_accelerator)):
        if not frontier or candidate.per_accelerator > frontier[-1].per_accelerator:
            frontier.append(candidate)
    return frontier


def _simulated(
    task: ServingTask, options: Sequence[ServingOption], usage: ServingMemory, every: Sequence[ServingLayout], top: int
) -> tuple[list[SimulatedOption], list[SimulatedOption]]:
    """Simulate the most promising options. Return the options that keep the limits, and the options that do not."""
    good: list[SimulatedOption] = []
    bad: list[SimulatedOption] = []
    tables: dict[Degrees, PassTable] = {}
    cache_tokens = dict(zip(every, usage.cache_tokens([layout.degrees.dp for layout in every]).tolist(), strict=True))
    for option in _promising(task, options)[: max(SIMULATED, top)]:
        table = tables.setdefault(option.layout.degrees, pass_table(task, option.layout.degrees))
        result = simulate(task, option, table, cache_tokens[option.layout])
        (good if result.keeps(task) else bad).append(result)
    good.sort(key=lambda result: result.tpot_s() if task.rate_per_s else -result.per_accelerator)
    first = {result.layout: result for result in reversed(good)}
    return [result for result in good if first[result.layout] is result][:top], bad


def _promising(task: ServingTask, options: Sequence[ServingOption]) -> list[ServingOption]:
    """Return the options worth a simulation: for each layout the options with the most tokens/s that keep the limits by
    closed forms, with a smaller batch in reserve; the best of all layouts first. If there is none, the nearest."""
    by_layout: dict[ServingLayout, list[ServingOption]] = {}
    for option in options:
        if keeps(task, option):
            by_layout.setdefault(option.layout, []).append(option)
    if not by_layout:
        nearest = sorted(options, key=lambda option: excess(task, option))
        return nearest[:SIMULATED]
    chosen = [
        (rank, candidate)
        for those in by_layout.values()
        for rank, candidate in enumerate(sorted(those, key=lambda option: _order(task, option))[:3])
    ]
    chosen.sort(key=lambda pair: (_order(task, pair[1]), pair[0]))
    return [candidate for _, candidate in chosen]


def _order(task: ServingTask, option: ServingOption) -> tuple[float, ...]:
    return best_first(task, option.per_accelerator, option.tpot_s, option.ttft_s)


def best_first(task: ServingTask, served_per_s: float, tpot_s: float, ttft_s: float) -> tuple[float, ...]:
    """Return a sort key: most tokens or requests per second first; at a given rate, which fixes them, least TPOT."""
    return (-served_per_s, tpot_s) if task.rate_per_s is None else (tpot_s, ttft_s)


def keeps(task: ServingTask, option: ServingOption) -> bool:
    """Return whether an option keeps the limits and the rate, by closed forms."""
    return excess(task, option) <= 1


def excess(task: ServingTask, option: ServingOption) -> float:
    """Return the factor by which an option misses the limits, or the arrival rate; at most 1 if it misses none."""
    need = 0.0 if task.rate_per_s is None else task.rate_per_s * task.output_len / option.tokens_per_s
    return max(option.ttft_s / task.ttft_s, option.tpot_s / task.tpot_s, need)


def pass_table(task: ServingTask, degrees: Degrees) -> PassTable:
    """Return the seconds of passes on a layout, including the cost of drafting."""
    return PassTable(task.serving, degrees, task.engine.max_tokens, task.speculation.drafted, task.speculation.drafting)


def simulate(task: ServingTask, option: ServingOption, table: PassTable, cache_tokens: float) -> SimulatedOption:
    """Simulate a stream of requests through one instance of an option."""
    limits = Scheduler(task.engine, option.batch, cache_tokens, task.speculation.accepted)
    if task.rate_per_s is None:
        users = option.batch if task.concurrency is None else ceil(task.concurrency / option.layout.replicas)
        served = steady_loop(table, limits, task.input_len, task.output_len, users, loop_rounds(users))
        rate = users * task.output_len / float(served.e2e_s.mean())
    else:
        arriving = task.rate_per_s / option.layout.replicas
        served = run(table, limits, arrivals(task, arriving, option.batch))
        rate = served.tokens_per_s
    return SimulatedOption(served, rate * option.layout.replicas, task.serving.cluster.size, option)


def loop_rounds(users: int) -> int:
    """Return the number of requests that each user of a simulated closed loop sends."""
    return max(3, min(100, LEAST_REQUESTS // users))


def arrivals(task: ServingTask, per_s: float, under_way: int) -> list[ServingRequest]:
    """Return requests that arrive at a rate, enough for a system that has `under_way` at a time."""
    n = LEAST_REQUESTS + 4 * under_way
    return poisson(per_s, [task.input_len] * n, [task.output_len] * n)


def smaller_need(task: ServingTask) -> list[str]:
    """Return changes after which weights and one request fit, if nothing fits. Each is tried."""
    chip = task.serving.cluster.accelerator
    # More ranks of a processor have no more memory together.
    kinds = [*([change] for change in _narrower(task.serving)), *([] if chip.on_host else [_larger(task.serving)])]
    return [words for words, _ in smallest_changes(kinds, lambda change: _fits(replace(task, serving=change[1])))]


def _narrower(serving: Serving) -> Iterator[tuple[str, Serving]]:
    """Yield fewer bits of weights, and of the cache."""
    known = serving.cluster.accelerator.flops_per_s
    if "bf16" in known and serving.precision == "fp32":
        yield "--precision bf16", replace(serving, precision="bf16", kv_precision="bf16")
    if "fp8" in known and serving.precision != "fp8":
        yield "--precision fp8", replace(serving, precision="fp8")
    if "fp8" in known and serving.kv_precision != "fp8":
        yield "--kv-precision fp8", replace(serving, kv_precision="fp8")


def _larger(serving: Serving) -> Iterator[tuple[str, Serving]]:
    """Yield more accelerators: two, four, eight, ... times the number."""
    cluster, times = serving.cluster, 2
    while times <= MOST_TIMES:
        size = cluster.size * times
        node = max(cluster.node_size, min(size, 8))
        larger = replace(cluster, size=size, node_size=node if size % node == 0 else cluster.node_size)
        yield more_accelerators(cluster, times), replace(serving, cluster=larger)
        times *= 2


def _fits(task: ServingTask) -> bool:
    every = list(layouts(task.serving.model, task.serving.cluster))
    settings = Settings.from_layouts([layout.degrees for layout in every])
    return bool(np.any(largest_batch(task.serving, settings, task.length, task.engine) >= 1))
