"""The pipeline of a run: what its ranks did in a logged step, and what their schedule says."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean, median

from shardwright.config import RunConfig
from shardwright.run_folder import PipelineStep, read_pipeline_steps, timeline_path
from shardwright.schedule.actions import OPS, Action, Op, Schedule
from shardwright.schedule.draw import ScheduleTimeline
from shardwright.schedule.simulate import Simulation, Times, simulate
from shardwright.split.stages import KEPT_FOR_WEIGHT, step_schedule
from shardwright.system.units import format_seconds

Spans = list[tuple[Action, float, float]]
Typical = Callable[[Sequence[float]], float]

READING = (
    "Above is the schedule, with every action as long as its op and stage took on average in this step and messages "
    "that take no time; below is when the same actions ran. Both have the same work: what is longer below is exposed "
    "communication, waiting for other ranks, and actions that took longer than the mean of their op and stage."
)


@dataclass(frozen=True)
class RankNumbers:
    """What a rank of `pp` did in the step.

    `peak_in_flight` is that of `Simulation.peak_in_flight_shares`: the rank ran its actions one after another in the
    order of the schedule, and how long they took does not change what is in flight between them.
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
    any. It is the same for schedules whose ranks begin staggered, since they wait for one another before a step (for
    the norm of the gradient); `shardwright schedule` leaves out what comes before a rank's own first action.

    `bubble_waiting` is the part of the measured bubble in which another rank has not yet computed the input of this
    rank's next action, or the rank has no action left; in the rest the input is being sent, or the rank starts late.

    The planned timeline is simulated with the mean times of this step, so that the ranks together are busy in it for as
    long as measured; with medians, a few long actions would make the measured bubble smaller than the planned one.

    `action_mean_s`, `action_median_s`: op -> of each stage, 0 where the stage has no such action.
    `clocks_apart_s`: by so much at least the clocks of the ranks differ, as an action was seen to start before what it
    needs was made.
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
    """One step of a pipeline. `spans[r]`: of rank r, each action with start and end, in ms from the first of all."""

    step: int
    schedule: Schedule
    spans: tuple[Spans, ...]

    @property
    def timelines(self) -> list[ScheduleTimeline]:
        """The planned one and the measured one, both in milliseconds."""
        told = self.numbers
        name = f"{told.schedule}, {len(self.spans)} ranks, {told.n_microbatches} micro-batches"
        return [
            self._timeline(
                f"Planned: {name}",
                self._simulation.spans,
                f"bubble {told.bubble_planned:.1%}, {format_seconds(told.makespan_planned_s)}; an action takes the "
                f"measured mean of its op and stage, a message nothing",
            ),
            self._timeline(
                f"Measured: step {self.step:,}",
                self.spans,
                f"bubble {told.bubble_measured:.1%}, {format_seconds(told.makespan_s)}",
            ),
        ]

    @cached_property
    def numbers(self) -> PipelineNumbers:
        """What the two timelines come to."""
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
            bubble_planned=sum(each.bubble_planned for each in ranks) / len(ranks),
            bubble_measured=sum(each.bubble_measured for each in ranks) / len(ranks),
            bubble_waiting=sum(each.bubble_waiting for each in ranks) / len(ranks),
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
        """(op, stage) -> how long each such action took."""
        lengths: dict[tuple[Op, int], list[float]] = defaultdict(list)
        for spans in self.spans:
            for action, start, end in spans:
                lengths[action.op, action.stage].append(end - start)
        return dict(lengths)

    def _of_stages(self, op: Op, typical: Typical) -> tuple[float, ...]:
        return tuple(typical(self._lengths_ms.get((op, stage), [0.0])) for stage in range(self.schedule.n_stages))

    def _action_s(self, typical: Typical) -> dict[str, tuple[float, ...]]:
        used = {op for op, _ in self._lengths_ms}
        return {op: tuple(ms / 1000 for ms in self._of_stages(op, typical)) for op in OPS if op in used}

    @cached_property
    def _simulation(self) -> Simulation:
        of = {op: self._of_stages(op, fmean) for op in OPS}
        times = _MeasuredTimes(forward=of["F"], backward_input=of["I"], weight=of["W"], both=of["B"])
        return simulate(self.schedule, times)

    @cached_property
    def _made_ms(self) -> dict[tuple[int, int, bool], float]:
        """(stage, microbatch, forward) -> when its output, or the gradient of its input, was there."""
        return {
            (action.stage, action.microbatch, action.op == "F"): end
            for spans in self.spans
            for action, _, end in spans
            if action.op != "W"
        }

    def _ready_ms(self, action: Action) -> float:
        """When what an action needs of another stage was made; 0 if it needs nothing."""
        needed = self.schedule.needs(action)
        return 0.0 if needed is None else self._made_ms[*needed, action.op == "F"]

    def _waiting_ms(self, spans: Spans, end_ms: float) -> float:
        """For how long the next action of a rank had nothing to work on, or there was no next one."""
        free_ms = waiting_ms = 0.0
        for action, start, end in spans:
            waiting_ms += max(0.0, min(self._ready_ms(action), start) - free_ms)
            free_ms = end
        return waiting_ms + end_ms - free_ms

    def _clocks_apart_ms(self) -> float:
        """By how much, at most, an action starts before what it needs is made; 0 if none does."""
        return max(0.0, *(self._ready_ms(action) - start for spans in self.spans for action, start, _ in spans))


@dataclass(frozen=True)
class _MeasuredTimes(Times):
    """Times of every op: `both` is that of B, which need not be that of I and W together."""

    both: tuple[float, ...] = ()

    def of_stages(self, n_stages: int) -> dict[Op, tuple[float, ...]]:
        return {**super().of_stages(n_stages), "B": self.both}


def read_pipeline(folder: Path, config: RunConfig) -> PipelineRecord | None:
    """The newest step that all ranks of the pipeline have written; None if there is none, or no pipeline.

    A step counts only if its ranks ran the schedule of the run file, and at the same time: files may be left of a
    process before the one that runs. Raises InputError for a line that is damaged, unless it was cut short at the end.
    """
    layout = config.layout.layout()
    if layout.pp == 1:
        return None
    recorded = [{each.step: each for each in read_pipeline_steps(timeline_path(folder, r))} for r in range(layout.pp)]
    steps = set.intersection(*map(set, recorded))
    if not steps:
        return None
    schedule = step_schedule(config.model.spec(), layout, config.accumulation, config.batch.seq_len)
    for step in sorted(steps, reverse=True):
        spans = [_spans(each[step], actions) for each, actions in zip(recorded, schedule.ranks, strict=True)]
        whole = [each for each in spans if each is not None]
        if len(whole) == layout.pp and _at_once(whole):
            zero_s = min(each[0][1] for each in whole)
            in_ms = tuple([(a, 1000 * (s - zero_s), 1000 * (e - zero_s)) for a, s, e in each] for each in whole)
            return PipelineRecord(step, schedule, in_ms)
    return None


def _at_once(spans: Sequence[Spans]) -> bool:
    """Whether these can be of one step: the last rank to start has started before the first to finish has finished."""
    return max(each[0][1] for each in spans) < min(each[-1][2] for each in spans)


def _spans(ran: PipelineStep, actions: Sequence[Action]) -> Spans | None:
    """When a rank ran `actions`, in seconds since the epoch; None if it ran others."""
    if [name for name, _, _ in ran.actions] != list(map(str, actions)):
        return None
    times = ((ran.zero_s + start, ran.zero_s + end) for _, start, end in ran.actions)
    return [(action, *each) for action, each in zip(actions, times, strict=True)]
