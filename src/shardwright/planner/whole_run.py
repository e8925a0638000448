"""The time and cost of a whole training run: steps, evaluations, checkpoints, interruptions and spare nodes.

Symbols: T_s seconds of steps and evaluations without interruptions; M mean seconds between interruptions of the whole
cluster; tau seconds of work between two checkpoints; delta seconds that training waits for a checkpoint; W seconds
until the checkpoint is complete after that, in the background; R seconds from an interruption to the next step.

    T = T_s M e^((R + W) / M) (e^((tau + delta) / M) - 1) / tau

Interruptions are a Poisson process, also during restarts. With W = 0 the equation is the complete model of Daly (Future
Generation Computer Systems 22, 2006). An asynchronous checkpoint protects the run W later, so an interval between two
interruptions loses W more; the exponential distribution makes this a factor e^(W / M). The shortest T has
tau = M (1 - e^-((tau + delta) / M)), whose first-order solution is sqrt(2 delta M) (Young, CACM 17, 1974).
Ignored: steps that become slower without a failure, and waiting for a node if more nodes fail than are spare.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil, exp, expm1, hypot, inf, log, sqrt

from shardwright.cost.hardware import Accelerator, accelerator
from shardwright.cost.job import Job
from shardwright.cost.step import estimate
from shardwright.planner.choice import Choice, PricedLayout
from shardwright.planner.error_summary import NORMAL_80
from shardwright.planner.operations import Operations
from shardwright.system.errors import InputError, LayoutError
from shardwright.system.units import format_seconds

DAY_S = 86400.0
PAUSE_S = 0.5
"""Seconds that all ranks need to start a checkpoint in memory: less than 0.5 s on 512 H100 (PyTorch blog, 2024,
"Reducing Model Checkpointing Times by Over 10x with PyTorch Distributed Asynchronous Checkpointing")."""
HARDWARE_SHARE = 0.78
"""Share of interruptions after which a node is repaired (Llama 3, arXiv 2407.21783, section 3.3.4)."""
RATE_FACTOR = 2.0
"""Factor between a cluster's rate of failures and the rate of its accelerator. Four of the five published rates of
docs/plan.md are within this factor."""
LATE = 0.026
"""Added to the upper half width of the interval (a logarithm): the 90 % quantile, over the nine sources of
`measured/whole_runs.csv`, of the logarithm by which the published days exceed the upper end without it. Production runs
have delays that no source lists. With each source left out of the quantile in turn, the interval contains eight of
the nine (`tests/planner/test_whole_run.py`)."""
ENOUGH_SPARES = 0.95
"""Share of time in which the nodes that are being repaired are at most the spare nodes."""
LARGEST_EXPONENT = 600.0
LARGEST_SLOWDOWN = 1000.0
"""Largest T / T_s of a run that is planned."""


@dataclass(frozen=True)
class PlannedStage:
    """The batch of the steps after `from_tokens` tokens: sequences of a step, and tokens of a sequence."""

    from_tokens: float
    global_batch: int
    seq_len: int


@dataclass(frozen=True)
class PricedStage:
    """A stage of a run on a layout: its number of steps, and the seconds of each."""

    stage: PlannedStage
    steps: float
    step_s: float

    @property
    def days(self) -> float:
        """Return the days of its steps."""
        return self.steps * self.step_s / DAY_S


def micro_batch_of(stage: PlannedStage, choice: Choice) -> int:
    """Return the micro-batch of a stage: the micro-batch of the layout, or the largest smaller one that divides."""
    per_rank = stage.global_batch // choice.layout.data_ranks
    return next((n for n in range(choice.micro_batch, 1, -1) if per_rank % n == 0), 1)


@dataclass(frozen=True)
class TrainingGoal:
    """`tokens` to train on; `prices` of an accelerator-hour by the name of the accelerator, or "" for all others;
    `stages`: the batches of the run in order, if they change."""

    tokens: float
    prices: Mapping[str, float] = field(default_factory=dict)
    operations: Operations = field(default_factory=Operations)
    stages: tuple[PlannedStage, ...] = ()

    def price(self, chip: Accelerator) -> float | None:
        """Return the price of an hour of an accelerator, None if it was not given."""
        return self.prices.get(chip.name, self.prices.get(""))


@dataclass(frozen=True)
class SavingTime:
    """One way to save checkpoints: the seconds that training waits (`pause_s`), that the rest takes in the background
    (`write_s`) and that a restart reads (`read_s`). `every_steps`: the best interval; `slowdown`: T / T_s with it."""

    save: str
    pause_s: float
    write_s: float
    read_s: float
    every_steps: int = 1
    slowdown: float = inf

    def waited_s(self, work_s: float) -> float:
        """Return delta. A checkpoint that is due waits until the one before it is complete."""
        return self.pause_s + max(0.0, self.write_s - work_s)

    def slowdown_at(self, work_s: float, down_s: float, between_s: float) -> float:
        """Return T / T_s with `work_s` of work between checkpoints, and `down_s` from a failure to the read."""
        late_s = down_s + self.read_s + self.write_s
        return slowdown(work_s, self.waited_s(work_s), late_s, between_s)


@dataclass(frozen=True)
class WholeRun:
    """The whole run. `parts_days` adds up to `days`. `goodput`: the share of time in steps that count. `saving`: the
    best interval of each way to save; `save`, `every_steps`: the way and interval of this run. `cost` and
    `cost_with_spares`: None without a price. `assumed`: the assumptions, as sentences."""

    tokens: float
    steps: float
    days: float
    interval_days: tuple[float, float]
    parts_days: dict[str, float]
    goodput: float
    accelerator_hours: float
    cost: float | None
    cost_with_spares: float | None
    interruptions: float
    hours_between: float
    checkpoint_bytes: float
    save: str
    every_steps: int
    every_s: float
    saving: tuple[SavingTime, ...]
    spare_nodes: int
    assumed: tuple[str, ...]
    stages: tuple[PricedStage, ...] = ()


class StageError(InputError):
    """A layout cannot run the batch of a stage."""


def whole_run_on(priced: PricedLayout, interval_s: tuple[float, float], goal: TrainingGoal) -> WholeRun:
    """Return `whole_run` on a layout, whose stages, if the goal has any, are priced one by one."""
    return whole_run(priced.job, priced.step_s, interval_s, goal, tuple(_priced_stages(priced, goal)))


def _priced_stages(priced: PricedLayout, goal: TrainingGoal) -> Iterator[PricedStage]:
    """Yield the stages that the tokens of the goal reach. Raises StageError for a batch that the layout cannot run."""
    ends = [*(stage.from_tokens for stage in goal.stages[1:]), goal.tokens]
    for stage, end in zip(goal.stages, ends, strict=False):
        tokens = min(end, goal.tokens) - stage.from_tokens
        if tokens <= 0:
            continue
        job, layout = replace(priced.job, global_batch=stage.global_batch, seq_len=stage.seq_len), priced.layout
        try:
            step_s = estimate(job, layout, micro_batch_of(stage, priced.choice)).step_s
        except LayoutError as error:
            what = f"the stage of {stage.global_batch:,} sequences of {stage.seq_len:,} tokens"
            raise StageError(*(f"{what} on {layout}: {problem}" for problem in error.problems)) from None
        yield PricedStage(stage, tokens / job.tokens, step_s)


def _mean_step(
    stages: Sequence[PricedStage], job_step_s: float, interval_s: tuple[float, float]
) -> tuple[float, float, tuple[float, float]]:
    """Return the number of steps of all stages, and their mean step time with its interval. `interval_s`: of a step of
    the job, `job_step_s`."""
    steps = sum(stage.steps for stage in stages)
    step_s = sum(stage.steps * stage.step_s for stage in stages) / steps
    return steps, step_s, (interval_s[0] * step_s / job_step_s, interval_s[1] * step_s / job_step_s)


def _check_slowdown(factor: float, every: int, step_s: float, best: SavingTime) -> None:
    """Raise InputError if a run takes too many times its work with a checkpoint each `every` steps."""
    if factor > LARGEST_SLOWDOWN:
        raise InputError(
            f"--operations save_every={every}: with a checkpoint each {format_seconds(every * step_s)} of work the run "
            f"takes more than {LARGEST_SLOWDOWN:,.0f} times its work; best: save_every={best.every_steps}"
        )


def whole_run(
    job: Job, step_s: float, interval_s: tuple[float, float], goal: TrainingGoal, stages: tuple[PricedStage, ...] = ()
) -> WholeRun:
    """Return the time and cost of training on the tokens of the goal. `interval_s`: 80 % interval of a step of the job.
    `stages`: the steps of the run, if their batch changes; all are as uncertain as a step of the job.

    The interval of the days combines three independent uncertainties: the step, the rate of failures (within
    `RATE_FACTOR`) and the Poisson number of failures; upwards `LATE` is added. Raises InputError if restarts or the
    interval between checkpoints make the run too slow.
    """
    operations, cluster = goal.operations, job.cluster
    between_s, ways, assumed = interruptions(job, operations)
    way, down_s = ways[operations.save], operations.down_s
    steps, evaluated_s = goal.tokens / job.tokens, step_s
    if stages:
        steps, step_s, interval_s = _mean_step(stages, step_s, interval_s)
    best = {name: _best_interval(method, down_s, step_s, steps, between_s) for name, method in ways.items()}
    every = min(operations.save_every or best[way.save].every_steps, max(1, ceil(steps)))
    evaluation_s = _evaluation_share(job, operations) * evaluated_s * steps + reference_s(job, evaluated_s)
    work_s = step_s * steps + evaluation_s
    whole_s = work_s * way.slowdown_at(every * step_s, down_s, between_s)
    _check_slowdown(whole_s / work_s, every, step_s, best[way.save])
    # A restart that is interrupted begins again: it takes M (e^(R / M) - 1) for each M of training.
    restarts_s = whole_s * -expm1(-(down_s + way.read_s) / between_s)
    saving_s = steps / every * way.waited_s(every * step_s)
    parts_s = {"steps": step_s * steps, "evaluation": evaluation_s, "saving": saving_s, "restarts": restarts_s}
    parts_s["lost work"] = max(0.0, whole_s - sum(parts_s.values()))

    def changed(by: float) -> float:  # log T with another rate of failures, relative to this T
        return log(work_s * way.slowdown_at(every * step_s, down_s, between_s / by) / whole_s)

    n, days = whole_s / between_s, whole_s / DAY_S
    # The standard deviation of a Poisson number n is sqrt(n). Nine of ten runs with n < 0.1 have no interruption.
    count = 0.0 if n < 0.1 else NORMAL_80 * (restarts_s + parts_s["lost work"]) / whole_s / sqrt(n)
    low = hypot(log(step_s / interval_s[0]), changed(1 / RATE_FACTOR), count)
    high = LATE + hypot(log(interval_s[1] / step_s), changed(RATE_FACTOR), count)
    hours, price = days * 24 * cluster.size, goal.price(cluster.accelerator)
    spares = spare_nodes(HARDWARE_SHARE * operations.repair_hours * 3600 / between_s)
    return WholeRun(
        tokens=goal.tokens,
        steps=steps,
        days=days,
        interval_days=(days * exp(-low), days * exp(high)),
        parts_days={name: seconds / DAY_S for name, seconds in parts_s.items()},
        goodput=step_s * steps / whole_s,
        accelerator_hours=hours,
        cost=None if price is None else hours * price,
        cost_with_spares=None if price is None else hours * price * (1 + spares / cluster.nodes),
        interruptions=n,
        hours_between=between_s / 3600,
        checkpoint_bytes=checkpoint_bytes(job),
        save=way.save,
        every_steps=every,
        every_s=every * step_s,
        saving=tuple(saving for saving in best.values() if saving.slowdown <= LARGEST_SLOWDOWN),
        spare_nodes=spares,
        assumed=(*assumed, *operations.assumed()),
        stages=stages,
    )


def interruptions(job: Job, operations: Operations) -> tuple[float, dict[str, SavingTime], list[str]]:
    """Return the mean seconds between interruptions, the ways to save checkpoints, and the assumptions of both.

    Raises InputError for a way to save that has no price, and if restarts alone make the run too slow.
    """
    cluster = job.cluster
    rate, assumed = _failures_per_day(job, operations)
    between_s = DAY_S / (rate * cluster.size)
    ways = {way.save: way for way in _ways_to_save(job, operations)}
    if operations.save not in ways:
        raise InputError(
            f"--operations save={operations.save}: {cluster.name} has a single node, or its accelerator has no "
            f"disk_gb_per_s; valid: {', '.join(ways)}"
        )
    way = ways[operations.save]
    late_s = operations.down_s + way.read_s + way.write_s
    if late_s > log(LARGEST_SLOWDOWN) * between_s:
        raise InputError(
            f"--operations: {cluster.name} is interrupted every {format_seconds(between_s)}, and a restart with its "
            f"checkpoint takes {format_seconds(late_s)}: the run takes more than {LARGEST_SLOWDOWN:,.0f} times as long "
            "as without; valid: smaller failures, detect_min or restart_min, or larger storage_gb_per_s"
        )
    return between_s, ways, assumed


def interval_of_work_s(pause_s: float, between_s: float) -> float:
    """Return the seconds of work between checkpoints that minimise the time of the run: the root of
    tau = M (1 - e^-((tau + delta) / M)), by Newton's method from Young's sqrt(2 delta M)."""
    pause = pause_s / between_s
    work = min(sqrt(2 * pause), 1.0)
    for _ in range(50):
        decay = exp(-(work + pause))
        work -= (work - 1 + decay) / (1 - decay)
    return work * between_s


def slowdown(work_s: float, pause_s: float, late_s: float, between_s: float) -> float:
    """Return T / T_s, for `work_s` = tau, `pause_s` = delta, `late_s` = R + W and `between_s` = M; inf if it is larger
    than floating-point numbers."""
    if (late_s + work_s + pause_s) / between_s > LARGEST_EXPONENT:
        return inf
    return between_s * exp(late_s / between_s) * expm1((work_s + pause_s) / between_s) / work_s


def spare_nodes(in_repair: float) -> int:
    """Return the fewest spare nodes k with P(N <= k) >= `ENOUGH_SPARES`; N, the nodes that are being repaired, has a
    Poisson distribution with this mean (repairs are independent of each other)."""
    if in_repair > 500:  # e^-x is too small; the normal distribution with the same mean and variance
        return ceil(in_repair + 1.645 * sqrt(in_repair))
    spares, term = 0, exp(-in_repair)
    total = term
    while total < ENOUGH_SPARES:
        spares += 1
        term *= in_repair / spares
        total += term
    return spares


def checkpoint_bytes(job: Job) -> float:
    """Return the bytes of a checkpoint: trained weights in fp32 and the states of the optimizer."""
    return job.model.n_trained_parameters * (4.0 + job.n_optimizer_states * job.state_bytes)


def _best_interval(way: SavingTime, down_s: float, step_s: float, steps: float, between_s: float) -> SavingTime:
    """Return the way with the best whole number of steps between checkpoints."""
    work_s = max(interval_of_work_s(way.pause_s, between_s), way.write_s)
    most = max(1, ceil(steps))
    tried = {min(most, max(1, n)) for n in (int(work_s / step_s), int(work_s / step_s) + 1)}
    least, every = min((way.slowdown_at(n * step_s, down_s, between_s), n) for n in tried)
    return replace(way, every_steps=every, slowdown=least)


def _ways_to_save(job: Job, operations: Operations) -> Iterator[SavingTime]:
    """Yield the ways to save that have a price: synchronous and asynchronous to storage that all nodes share, and to
    the disk of the node and of the next node."""
    chip, total = job.cluster.accelerator, checkpoint_bytes(job)
    own = total / job.cluster.size
    stored_s = total / (job.cluster.nodes * operations.storage_gb_per_s * 1e9)
    copy_s = PAUSE_S + (own / chip.host_bytes_per_s if chip.host_bytes_per_s else 0.0)
    yield SavingTime("sync", PAUSE_S + stored_s, 0.0, stored_s)
    yield SavingTime("async", copy_s, stored_s, stored_s)
    if chip.disk_bytes_per_s and job.cluster.nodes > 1:
        yield SavingTime("local", copy_s, 2 * own / chip.disk_bytes_per_s, own / chip.disk_bytes_per_s)


def reference_s(job: Job, step_s: float) -> float:
    """Return the seconds of the reference's forward pass over its sequences, before the first step of `step_s` seconds.
    Forward passes take a third of a step."""
    return step_s * job.reference_sequences / job.global_batch / 3


def _evaluation_share(job: Job, operations: Operations) -> float:
    """Return the seconds of evaluation in units of the seconds of training: forward passes take a third of a step."""
    if not operations.evaluate_every:
        return 0.0
    return operations.evaluate_samples / job.global_batch / 3 / operations.evaluate_every


def _failures_per_day(job: Job, operations: Operations) -> tuple[float, list[str]]:
    """Return the failures of an accelerator per day, and the assumption if no source has a rate for it: the rate of
    its die, else of H100."""
    if operations.failures is not None:
        return operations.failures / 1000, []
    chip = job.cluster.accelerator
    if chip.failures_per_day:
        return chip.failures_per_day, []
    known = accelerator(chip.die) if chip.die != chip.name else chip
    known = known if known.failures_per_day else accelerator("h100")
    return known.failures_per_day, [f"no published rate of failures for {chip.name}: the rate of {known.name}"]
