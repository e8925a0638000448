"""The documents of `plan calibrate` and `plan explain-log`: training logs next to the predictions for their run."""

from collections.abc import Iterator, Sequence
from math import exp, inf
from typing import Any

import numpy as np

from shardwright.cost.machine import with_times
from shardwright.cost.step import step_time
from shardwright.planner.choice import PricedLayout
from shardwright.planner.headline import interval_s
from shardwright.planner.log_calibration import LogCalibration
from shardwright.readers.logs import FEWEST_STEPS, StepTimes, TrainingLog, joined_times
from shardwright.report.plan_view import job_note
from shardwright.system.units import format_seconds
from shardwright.view.document import NUMBER, Column, Fact, Facts, Note, Part, Section, Table, VerbDocument


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
        parts += [Note(text) for text in _remarks(result)]
    else:
        parts.append(
            Note(f"{_why_nothing(times, noise, result)}; nothing is changed or written", "no information", "bad")
        )
    data = {
        "system": system,
        "software": result.kind,
        "logs": [_log_json(log, each) for log, each in zip(logs, times, strict=True)],
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
    found = []
    for each, width in zip((job, changed), result.narrowings, strict=True):
        time = step_time(each, priced.candidates)
        low, high = interval_s(each, time, each.calibration, width if result.informs else result.narrowings[0])
        found.append((float(time.total_s[0]), (float(low[0]), float(high[0]))))
    return found


def _predicted(name: str, prediction: tuple[float, tuple[float, float]]) -> Fact:
    step_s, (low, high) = prediction
    return Fact(name, format_seconds(step_s), f"80 % interval: {format_seconds(low)} to {format_seconds(high)}")


def _constants(result: LogCalibration) -> Table:
    columns = [
        Column("constant"), *(Column(name, NUMBER) for name in ("share of the step", "before, 80 %", "after, 80 %"))
    ]  # fmt: skip
    rows = [
        (name, f"{share:.0%}", "{:.2f} to {:.2f}".format(*was), "{:.2f} to {:.2f}".format(*now))
        for name, was, now, share in result.intervals()
    ]
    return Table(columns, rows)


def _remarks(result: LogCalibration) -> Iterator[str]:
    rest = result.gap - result.explained
    if abs(rest) > abs(result.gap) / 2 and abs(result.gap) > 0.1:
        yield (
            f"the constants explain {exp(result.explained) - 1:+.1%} of a gap of {exp(result.gap) - 1:+.1%}; clusters "
            f"do not differ by the rest, see plan explain-log"
        )


def _why_nothing(times: Sequence[StepTimes], noise: float, result: LogCalibration) -> str:
    if noise == inf:
        n = min(each.n_steady for each in times)
        return f"{n} step times after the warm-up; {FEWEST_STEPS} or more are needed"
    before, after = result.narrowings
    return f"the step times vary by {noise:.0%}, and the interval would narrow by {1 - after / before:.0%} only"


def log_notes(logs: Sequence[TrainingLog], times: Sequence[StepTimes]) -> Iterator[Note]:
    """Yield one note for each log, and its remarks."""
    for log, each in zip(logs, times, strict=True):
        warm = f", after {each.warm} of warm-up" if each.warm else ""
        yield Note(
            f"{log.path}, a log of {log.kind}: {each.n_steady} step times{warm}, median "
            f"{format_seconds(each.median_s)}, they vary by {each.spread:.1%}"
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
