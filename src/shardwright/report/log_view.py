"""The documents of `plan calibrate` and `plan explain-log`: training logs next to the predictions for their run."""

from collections.abc import Iterator, Sequence
from math import exp, inf
from typing import Any

import numpy as np

from shardwright.cost.machine import with_times
from shardwright.cost.step import step_time
from shardwright.planner.choice import PricedLayout
from shardwright.planner.error_summary import COVERED_SHARE, INTERVAL, bounds_in_words
from shardwright.planner.headline import headline, interval_s
from shardwright.planner.log_calibration import LogCalibration
from shardwright.readers.logs import FEWEST_STEPS, StepTimes, TrainingLog, joined_times
from shardwright.report.log_gap import SlowSteps, likely_causes, slow_steps
from shardwright.report.plan_view import job_note
from shardwright.system.units import format_seconds
from shardwright.view.document import NUMBER, SECONDS, Column, Fact, Facts, Note, Part, Section, Table, VerbDocument

ONE_NUMBER = (
    "A log has one number, its step time. Its gap is assigned to constants by their shares of the step, and by how "
    "much clusters differ in them; a profile of one step confirms or refutes it."
)


def calibration_view(
    system: str, priced: PricedLayout, logs: Sequence[TrainingLog], times: Sequence[StepTimes], result: LogCalibration
) -> VerbDocument:
    """Return the document of a calibration by logs of one run."""
    step_s, noise = joined_times(times)
    before, after = _predictions(priced, result)
    parts: list[Part] = [job_note(priced.job, system), *log_notes(logs, times), Section("Step time")]
    parts.append(
        Facts([Fact("measured", format_seconds(step_s)), _predicted("before", before), _predicted("after", after)])
    )
    if result.informs:
        parts.append(Section("Constants, as times relative to the packaged ones"))
        parts.append(_constants(result))
        if result.surprises:
            parts.append(Note(_surprise(result)))
    else:
        parts.append(
            Note(f"{_why_nothing(times, noise, result)}; nothing is changed or written", "no information", "bad")
        )
    data = {
        "system": system,
        "software": result.kind,
        "logs": [_log_json(log, timing) for log, timing in zip(logs, times, strict=True)],
        "measured_s": step_s,
        "informative": result.informs,
        "before": {"step_s": before[0], "interval_s": before[1]},
        "after": {"step_s": after[0], "interval_s": after[1]},
        "constants": [
            {"name": name, "before": was, "after": now, "share_of_step": share}
            for name, was, now, share in result.intervals()
        ],
    }
    return VerbDocument("A cluster calibrated by training logs", data, parts)


def _predictions(priced: PricedLayout, result: LogCalibration) -> list[tuple[float, tuple[float, float]]]:
    """Return step time and 80 % interval before and after the log; the same twice if it is uninformative."""
    job, (before, after) = priced.job, result.means
    changed = with_times(job, np.exp(after - before)) if result.informs else job
    predictions = []
    for variant, width in zip((job, changed), result.narrowings, strict=True):
        time = step_time(variant, priced.candidates)
        low, high = interval_s(variant, time, variant.calibration, width if result.informs else result.narrowings[0])
        predictions.append((float(time.total_s[0]), (float(low[0]), float(high[0]))))
    return predictions


def _predicted(name: str, prediction: tuple[float, tuple[float, float]]) -> Fact:
    step_s, interval = prediction
    return Fact(name, format_seconds(step_s), f"{INTERVAL}: {bounds_in_words(interval)}")


def _constants(result: LogCalibration) -> Table:
    names = "share of the step", f"before, {COVERED_SHARE}", f"after, {COVERED_SHARE}"
    columns = [Column("constant"), *(Column(name, NUMBER) for name in names)]
    rows = [
        (name, f"{share:.0%}", *(bounds_in_words(times, "{:.2f}".format) for times in (was, now)))
        for name, was, now, share in result.intervals()
    ]
    return Table(columns, rows)


def _why_nothing(times: Sequence[StepTimes], noise: float, result: LogCalibration) -> str:
    if noise == inf:
        n = min(timing.n_steady for timing in times)
        return f"{n} step times after the warm-up; {FEWEST_STEPS} or more are needed"
    if result.surprises:
        return _surprise(result)
    before, after = result.narrowings
    return f"the step times vary by {noise:.0%}, and the interval would narrow by {1 - after / before:.0%} only"


def _surprise(result: LogCalibration) -> str:
    return (
        f"the measured step is {exp(result.gap):.2f} times the predicted one, and the constants of clusters do not "
        "differ enough for that; see plan explain-log"
    )


def log_notes(logs: Sequence[TrainingLog], times: Sequence[StepTimes]) -> Iterator[Note]:
    """Yield one note for each log, and its remarks."""
    for log, timing in zip(logs, times, strict=True):
        warm = f", after {timing.warm} of warm-up" if timing.warm else ""
        yield Note(
            f"{log.path}, a log of {log.kind}: {timing.n_steady} step times{warm}, median "
            f"{format_seconds(timing.median_s)}, they vary by {timing.spread:.1%}"
        )
        yield from (Note(f"  {remark}") for remark in log.remarks)


def _log_json(log: TrainingLog, times: StepTimes) -> dict[str, Any]:
    return {
        "file": str(log.path),
        "kind": log.kind,
        "steps": times.n_steady,
        "warm_up": times.warm,
        "median_s": times.median_s,
        "spread": times.spread,
        "remarks": list(log.remarks),
    }


def explained_log_view(
    system: str, priced: PricedLayout, log: TrainingLog, times: StepTimes, result: LogCalibration
) -> VerbDocument:
    """Return the document of one log: measured next to predicted, its slow steps, and the likely causes of a gap."""
    planned, measured_s = headline(priced), times.median_s
    ratio = planned.step_s / measured_s
    low, high = planned.interval_s
    groups = slow_steps(times)
    causes = likely_causes(log, times, result, priced.step_s)
    shares = {"full": planned.mfu_full, "causal": planned.mfu_causal}
    mfu = {name: {"measured": share * ratio, "predicted": share} for name, share in shares.items()}
    verdict = _verdict(measured_s, planned.interval_s)
    parts: list[Part] = [
        job_note(priced.job, system),
        *log_notes([log], [times]),
        Section("Measured and predicted"),
        Facts(
            [
                Fact("measured step", format_seconds(measured_s), f"median; mean {format_seconds(times.mean_s)}"),
                _predicted("predicted step", (planned.step_s, (low, high))),
                *(
                    Fact(f"MFU, {name}", f"{values['measured']:.1%}", f"{values['predicted']:.1%} predicted")
                    for name, values in mfu.items()
                ),
            ]
        ),
        Note(verdict),
        Section("Slow steps"),
        _slow_table(groups) if groups else Note("none"),
        Section("Most likely causes"),
        *(Note(f"{_signed(cause.per_step_s)} a step: {cause.evidence}", cause.name, "strong") for cause in causes),
        *([Note(ONE_NUMBER, tone="quiet")] if causes else [Note("no gap to explain")]),
    ]
    data = {
        "system": system,
        "log": _log_json(log, times),
        "measured_s": measured_s,
        "mean_s": times.mean_s,
        "predicted_s": planned.step_s,
        "interval_s": planned.interval_s,
        "mfu": mfu,
        "verdict": verdict,
        "slow_steps": [vars(group) for group in groups],
        "causes": [vars(cause) for cause in causes],
    }
    return VerbDocument(f"{log.path}: measured and predicted", data, parts)


def _verdict(measured_s: float, interval_s: tuple[float, float]) -> str:
    low, high = interval_s
    if low <= measured_s <= high:
        return f"the median step is inside the {INTERVAL}: the run is as fast as expected"
    bound, words = (high, "slower than its end") if measured_s > high else (low, "faster than its start")
    return f"the median step is outside the {INTERVAL}, {abs(measured_s / bound - 1):.1%} {words}"


def _slow_table(groups: Sequence[SlowSteps]) -> Table:
    columns = [
        Column("steps"), Column("count", NUMBER), Column("every", NUMBER), Column("extra time", SECONDS),
        Column("for each step of the log", SECONDS),
    ]  # fmt: skip
    rows = [(group.kind, len(group.steps), group.period, group.extra_s, group.per_step_s) for group in groups]
    return Table(columns, rows)


def _signed(seconds: float) -> str:
    return f"{'+' if seconds >= 0 else '-'}{format_seconds(abs(seconds))}"
