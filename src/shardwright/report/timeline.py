"""One logged step of a pipeline: the timeline that its ranks measured, and the timeline that their schedule plans."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean, median

from shardwright.config import RunConfig
from shardwright.layout.layout import accumulation
from shardwright.runs.folder import timeline_path
from shardwright.runs.records import PipelineStep, read_pipeline_steps
from shardwright.schedule.actions import OPS, Action, Op, Schedule
from shardwright.schedule.draw import ScheduleTimeline
from shardwright.schedule.simulate import Simulation, Times, simulate
from shardwright.split.stages import KEPT_FOR_WEIGHT, step_schedule
from shardwright.system.units import format_seconds

Spans = list[tuple[Action, float, float]]
Typical = Callable[[Sequence[float]], float]

READING = (
    "Above is the schedule, with every action as long as its op and stage took on average in this step and messages "
    "that take no time; below is when the same actions ran. Both have the same work: a longer time below is exposed "
    "communication, waiting for other ranks, and actions that took longer than the mean of their op and stage."
)


@dataclass(frozen=True)
class RankNumbers:
    """Numbers of one rank of `pp` in the step.

    `peak_in_flight` is `Simulation.peak_in_flight_shares` of the rank. It holds for the measured step too: the rank ran
    its actions one by one in the order of the schedule, and their durations do not change the number in flight.
    """

    rank: int
    busy_s: float
    bubble_planned: float
    bubble_measured: float
    bubble_waiting: float
    peak_in_flight: float


@dataclass(frozen=True)
class PipelineNumbers:
    """A step of a pipeline in numbers.

    A bubble is (cost - busy) / cost, where cost is the makespan: from the first start of any rank to the last end of
    any. This also holds for schedules whose ranks start staggered, because ranks wait for one another before a step
    (for the gradient norm). `shardwright schedule` leaves out the time before a rank's own first action.

    `bubble_waiting` is the part of the measured bubble in which another rank has not yet computed the input of this
    rank's next action, or the rank has no action left; in the rest the input is being sent, or the rank starts late.

    The planned timeline is simulated with the mean times of this step, so that its total busy time is the measured one.
    With medians, a few long actions would make the measured bubble smaller than the planned one.

    `action_mean_s`, `action_median_s`: op -> seconds for each stage, 0 where the stage has no such action.
    `clocks_apart_s`: a lower bound of the difference between the ranks' clocks: the longest time by which an action
    seems to start before its input is computed.
    """

    step: int
    schedule: str
    n_stages: int
    n_microbatches: int
    bubble_planned: float
    bubble_measured: float
    bubble_waiting: float
    makespan_planned_s: float
    makespan_s: float
    clocks_apart_s: float
    ranks: tuple[RankNumbers, ...]
    action_mean_s: dict[str, tuple[float, ...]]
    action_median_s: dict[str, tuple[float, ...]]


@dataclass(frozen=True)
class PipelineRecord:
    """One step of a pipeline. `spans[r]`: rank r's actions with start and end, in ms after the first start of any."""

    step: int
    schedule: Schedule
    spans: tuple[Spans, ...]

    @property
    def timelines(self) -> list[ScheduleTimeline]:
        """Return the planned and the measured timeline, both in milliseconds."""
        facts = self.numbers
        name = f"{facts.schedule}, {len(self.spans)} ranks, {facts.n_microbatches} micro-batches"
        return [
            self._timeline(
                f"Planned: {name}",
                self._simulation.spans,
                f"bubble {facts.bubble_planned:.1%}, {format_seconds(facts.makespan_planned_s)}; an action takes the "
                f"measured mean of its op and stage, a message nothing",
            ),
            self._timeline(
                f"Measured: step {self.step:,}",
                self.spans,
                f"bubble {facts.bubble_measured:.1%}, {format_seconds(facts.makespan_s)}",
            ),
        ]

    @cached_property
    def numbers(self) -> PipelineNumbers:
        """Return the numbers of both timelines."""
        measured, planned = self._timeline("", self.spans), self._timeline("", self._simulation.spans)
        ranks = tuple(
            RankNumbers(
                rank,
                busy_s=sum(end - start for _, start, end in spans) / 1000,
                bubble_planned=planned.bubble(rank),
                bubble_measured=measured.bubble(rank),
                bubble_waiting=self._waiting_ms(spans, measured.end) / measured.end,
                peak_in_flight=self._simulation.peak_in_flight_shares[rank],
            )
            for rank, spans in enumerate(self.spans)
        )
        return PipelineNumbers(
            step=self.step,
            schedule=self.schedule.name,
            n_stages=self.schedule.n_stages,
            n_microbatches=self.schedule.n_microbatches,
            bubble_planned=sum(of_rank.bubble_planned for of_rank in ranks) / len(ranks),
            bubble_measured=sum(of_rank.bubble_measured for of_rank in ranks) / len(ranks),
            bubble_waiting=sum(of_rank.bubble_waiting for of_rank in ranks) / len(ranks),
            makespan_planned_s=planned.end / 1000,
            makespan_s=measured.end / 1000,
            clocks_apart_s=self._clocks_apart_ms() / 1000,
            ranks=ranks,
            action_mean_s=self._action_s(fmean),
            action_median_s=self._action_s(median),
        )

    def _timeline(self, title: str, spans: Sequence[Spans], note: str = "") -> ScheduleTimeline:
        return ScheduleTimeline(title, spans, self.schedule.n_stages, "ms", note, kept_for_weight=KEPT_FOR_WEIGHT)

    @cached_property
    def _lengths_ms(self) -> dict[tuple[Op, int], list[float]]:
        """Return (op, stage) -> the duration of each such action."""
        lengths: dict[tuple[Op, int], list[float]] = defaultdict(list)
        for spans in self.spans:
            for action, start, end in spans:
                lengths[action.op, action.stage].append(end - start)
        return dict(lengths)

    def _stage_durations_ms(self, op: Op, typical: Typical) -> tuple[float, ...]:
        return tuple(typical(self._lengths_ms.get((op, stage), [0.0])) for stage in range(self.schedule.n_stages))

    def _action_s(self, typical: Typical) -> dict[str, tuple[float, ...]]:
        used = {op for op, _ in self._lengths_ms}
        return {op: tuple(ms / 1000 for ms in self._stage_durations_ms(op, typical)) for op in OPS if op in used}

    @cached_property
    def _simulation(self) -> Simulation:
        durations = {op: self._stage_durations_ms(op, fmean) for op in OPS}
        times = _MeasuredTimes(
            forward=durations["F"], backward_input=durations["I"], weight=durations["W"], both=durations["B"]
        )
        return simulate(self.schedule, times)

    @cached_property
    def _made_ms(self) -> dict[tuple[int, int, bool], float]:
        """Return (stage, microbatch, forward) -> the time at which its output, or the input's gradient, was there."""
        return {
            (action.stage, action.microbatch, action.op == "F"): end
            for spans in self.spans
            for action, _, end in spans
            if action.op != "W"
        }

    def _ready_ms(self, action: Action) -> float:
        """Return the time at which another stage had computed the input of an action; 0 if it needs none."""
        needed = self.schedule.needs(action)
        return 0.0 if needed is None else self._made_ms[*needed, action.op == "F"]

    def _waiting_ms(self, spans: Spans, end_ms: float) -> float:
        """Return how long a rank had no input for its next action, or had no next action."""
        free_ms = waiting_ms = 0.0
        for action, start, end in spans:
            waiting_ms += max(0.0, min(self._ready_ms(action), start) - free_ms)
            free_ms = end
        return waiting_ms + end_ms - free_ms

    def _clocks_apart_ms(self) -> float:
        """Return the longest time by which an action starts before its input is computed; 0 if none does."""
        return max(0.0, *(self._ready_ms(action) - start for spans in self.spans for action, start, _ in spans))


@dataclass(frozen=True)
class _MeasuredTimes(Times):
    """Times of every op: `both` is the time of B, which need not be the time of I plus the time of W."""

    both: tuple[float, ...] = ()

    def times_by_stage(self, n_stages: int) -> dict[Op, tuple[float, ...]]:
        return {**super().times_by_stage(n_stages), "B": self.both}


def read_pipeline(folder: Path, config: RunConfig) -> PipelineRecord | None:
    """Return the newest step that all ranks of the pipeline have written, or None if there is no step or no pipeline.

    A step counts only if its ranks ran the schedule of the run file, at the same time: an earlier process may have left
    files. Raises InputError for a damaged line, unless it is a last line that was cut short.
    """
    layout = config.layout.layout()
    if layout.pp == 1:
        return None
    recorded = [
        {record.step: record for record in read_pipeline_steps(timeline_path(folder, r))} for r in range(layout.pp)
    ]
    steps = set.intersection(*map(set, recorded))
    if not steps:
        return None
    batches = config.batch.schedule
    for step in sorted(steps, reverse=True):
        stage = batches.stage_at(step - 1)
        n_microbatches = accumulation(stage.global_batch, stage.micro_batch, layout.data_ranks)
        schedule = step_schedule(config.spec(), layout, n_microbatches, batches.longest.seq_len)
        spans = [_spans(records[step], actions) for records, actions in zip(recorded, schedule.ranks, strict=True)]
        whole = [of_rank for of_rank in spans if of_rank is not None]
        if len(whole) == layout.pp and _at_once(whole):
            zero_s = min(of_rank[0][1] for of_rank in whole)
            in_ms = tuple([(a, 1000 * (s - zero_s), 1000 * (e - zero_s)) for a, s, e in of_rank] for of_rank in whole)
            return PipelineRecord(step, schedule, in_ms)
    return None


def _at_once(spans: Sequence[Spans]) -> bool:
    """Return whether spans can belong to one step: the last rank to start started before any rank finished."""
    return max(of_rank[0][1] for of_rank in spans) < min(of_rank[-1][2] for of_rank in spans)


def _spans(ran: PipelineStep, actions: Sequence[Action]) -> Spans | None:
    """Return when a rank ran `actions`, in seconds since the epoch, or None if it ran other actions."""
    if [name for name, _, _ in ran.actions] != list(map(str, actions)):
        return None
    times = ((ran.zero_s + start, ran.zero_s + end) for _, start, end in ran.actions)
    return [(action, *interval) for action, interval in zip(actions, times, strict=True)]
