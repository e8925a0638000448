"""Step times in the logs of Megatron-LM, torchtitan, DeepSpeed, Hugging Face Trainer and MLPerf, in metrics.jsonl of
Shardwright, and in a CSV of steps and seconds. A log is read line by line; nothing in it is executed.
"""

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from shardwright.cost.job import Job
from shardwright.runs.records import TrainRecord, read_metrics
from shardwright.system.errors import InputError
from shardwright.system.files import complete_lines, decoded, open_regular, parse_json, reason

SUPPORTED = (
    "logs of Megatron-LM (elapsed time per iteration), torchtitan (tps), DeepSpeed (CurrSamplesPerSec), Hugging Face "
    "Trainer (its progress bar, s/it), MLPerf (:::MLLOG), metrics.jsonl of Shardwright, and a CSV of step,seconds"
)
_NUMBER = r"([0-9]*\.?[0-9]+(?:[eE][-+]?[0-9]{1,2})?)"
_WHOLE = re.compile(r"[0-9]{1,15}")
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
VALID = 1e-9, 1e12
"""Least and most seconds, and samples or tokens in a second, of a step."""


@dataclass(frozen=True)
class LoggedStep:
    """A line with a step time. `tokens_per_s`: of one accelerator, `samples_per_s`: of all, where the log has a speed
    instead of seconds; `data_s`: seconds in which the step waited for data, if the log has them."""

    step: int
    line: int
    seconds: float = 0.0
    tokens_per_s: float = 0.0
    samples_per_s: float = 0.0
    data_s: float | None = None
    global_batch: int | None = None

    def step_s(self, job: Job) -> float:
        """Return the seconds of the step; a speed is converted by the batch of the job."""
        if self.tokens_per_s:
            return job.tokens / job.cluster.size / self.tokens_per_s
        return job.global_batch / self.samples_per_s if self.samples_per_s else self.seconds


@dataclass(frozen=True)
class LogFormat:
    """A kind of log. `mark`: a pattern that every line with a step matches; `read`: the step of such a line, or None
    if the line lacks it; `systems`: of the configurations that the log can belong to."""

    name: str
    mark: re.Pattern[str]
    read: Callable[[str, int], LoggedStep | None]
    systems: tuple[str, ...]


def _number(pattern: str, line: str) -> float | None:
    match = re.search(pattern + _NUMBER, line)
    return None if match is None else float(match[1])


def _whole(pattern: str, line: str) -> int | None:
    match = re.search(pattern + rf"({_WHOLE.pattern})\b", line)
    return None if match is None else int(match[1])


def _megatron(line: str, at: int) -> LoggedStep | None:
    step, ms = _whole(r"iteration\s+", line), _number(r"elapsed time per iteration \(ms\):\s*", line)
    batch = _whole(r"global batch size:\s*", line)
    if step is None or ms is None:
        return None
    return LoggedStep(step, at, ms / 1e3, global_batch=batch)


def _torchtitan(line: str, at: int) -> LoggedStep | None:
    step, speed = _whole(r"step:\s*", line), _number(r"tps:\s*", line.replace(",", ""))
    return None if step is None or speed is None else LoggedStep(step, at, tokens_per_s=speed)


def _deepspeed(line: str, at: int) -> LoggedStep | None:
    step, speed = _whole(r"global_step=", line), _number(r"CurrSamplesPerSec=", line)
    return None if step is None or speed is None else LoggedStep(step, at, samples_per_s=speed)


_BAR = re.compile(rf"({_WHOLE.pattern})/(\d+) \[[0-9:]+<[0-9:?]+,\s*{_NUMBER}(s/it|it/s)")


def _trainer(line: str, at: int) -> LoggedStep | None:
    bar = _BAR.search(line)
    if bar is None or not float(bar[3]):
        return None
    return LoggedStep(int(bar[1]), at, float(bar[3]) if bar[4] == "s/it" else 1 / float(bar[3]))


def _is_amount(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and 0 <= value < VALID[1])


def _mlperf(line: str, at: int) -> LoggedStep | None:
    try:
        event = parse_json(line.partition(":::MLLOG")[2], finite=True)
    except ValueError:
        return None
    if not isinstance(event, dict):
        return None
    value, metadata = event.get("value"), event.get("metadata") or {}
    if event.get("key") != "tracked_stats" or not isinstance(value, dict) or not isinstance(metadata, dict):
        return None
    step = metadata.get("step")
    seconds, speed = value.get("train_step_time"), value.get("throughput")
    if not isinstance(step, int) or not all(_is_amount(value) for value in (seconds, speed)):
        return None
    if seconds:
        return LoggedStep(step, at, float(seconds))
    return LoggedStep(step, at, samples_per_s=float(speed)) if speed else None


FORMATS = (
    LogFormat("Megatron-LM", re.compile(r"elapsed time per iteration"), _megatron, ("megatron",)),
    LogFormat("torchtitan", re.compile(r"\btps:"), _torchtitan, ("torchtitan",)),
    LogFormat("DeepSpeed", re.compile(r"CurrSamplesPerSec="), _deepspeed, ("hugging face", "megatron", "deepspeed")),
    LogFormat("Hugging Face Trainer", _BAR, _trainer, ("hugging face", "deepspeed")),
    LogFormat("MLPerf", re.compile(r":::MLLOG.*tracked_stats"), _mlperf, ()),
)
"""Every kind of log with lines of its own; `systems` empty: of any configuration."""


@dataclass(frozen=True)
class TrainingLog:
    """A log. `steps`: in the order of the file, each step once, the last time that it was logged; `remarks`: about
    lines that were not used."""

    path: Path
    kind: str
    steps: tuple[LoggedStep, ...]
    remarks: tuple[str, ...] = ()


def read_log(path: Path, system: str) -> TrainingLog:
    """Read a log of a run of `system`. Raises InputError for a file without step times, with the supported kinds, and
    for a log of another system, with the line that shows it."""
    try:
        if path.name.endswith(".jsonl"):
            steps = [_own_step(at, record) for at, record in enumerate(read_metrics(path), 1)]
            return _log(path, "Shardwright", [step for step in steps if step is not None], [])
        if path.suffix.lower() == ".csv":
            return _log(path, "CSV", _csv_steps(path), [])
        return _log(path, *_text_steps(path, system))
    except (OSError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{path}: cannot be read: {reason(error)}") from None


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the lines of a log with their numbers, without colours, also a last one that is not complete."""
    with open_regular(path) as file:
        for at, line in enumerate(complete_lines(file, path, rest=True), 1):
            yield at, _COLOUR.sub("", decoded(line))


def _own_step(at: int, record: Any) -> LoggedStep | None:
    if not isinstance(record, TrainRecord):
        return None
    return LoggedStep(record.step, at, record.step_s, data_s=record.data_s)


def _csv_steps(path: Path) -> list[LoggedStep]:
    """Return the rows of two numbers; a first line without numbers is the header."""
    steps = []
    for at, line in _lines(path):
        cells = [cell.strip() for cell in line.split(",")]
        try:
            if len(cells) != 2:
                raise ValueError
            steps.append(LoggedStep(int(cells[0]), at, float(cells[1])))
        except ValueError:
            if at > 1 and line.strip():
                problem = f"{path}:{at}: {line.strip()[:60]!r}: a step and its seconds are needed, such as 12,3.45"
                raise InputError(problem) from None
    return steps


def _text_steps(path: Path, system: str) -> tuple[str, list[LoggedStep], list[str]]:
    parts: dict[str, list[tuple[int, str]]] = {form.name: [] for form in FORMATS}
    n_lines = 0
    for n_lines, line in _lines(path):
        for part in line.split("\r"):  # a progress bar is overwritten on a terminal; a file has all its states
            for form in FORMATS:
                if form.mark.search(part):
                    parts[form.name].append((n_lines, part))
    kind = max(FORMATS, key=lambda row: len(parts[row.name]))
    if not parts[kind.name]:
        raise InputError(f"{path}: no step times in {n_lines} lines; supported: {SUPPORTED}")
    steps, unread = [], []
    for at, part in parts[kind.name]:
        step = kind.read(part, at)
        steps += [] if step is None else [step]
        unread += [at] if step is None else []
    if kind.systems and not any(name in system.lower() for name in kind.systems):
        first = steps[0].line if steps else unread[0]
        raise InputError(
            f"{path}:{first}: this is a log of {kind.name}, and --from is a configuration of {system}; give the "
            f"configuration of the run, or a CSV of step,seconds"
        )
    remarks = [f"{path}:{at}: the line is cut off or has no step time; left out" for at in unread[:3]]
    return kind.name, steps, remarks


def _log(path: Path, kind: str, steps: Sequence[LoggedStep], remarks: Sequence[str]) -> TrainingLog:
    """Return a log with each step once. Raises InputError if no step has a time."""
    valid = {}
    remarks = list(remarks)
    for step in steps:
        speeds = step.seconds, step.tokens_per_s, step.samples_per_s
        if all(value == 0 or VALID[0] < value < VALID[1] for value in speeds) and any(speeds):
            valid[step.step] = step
        else:
            remarks.append(f"{path}:{step.line}: step {step.step} has no valid time; left out")
    if not valid:
        raise InputError(f"{path}: no line has a step with its time; supported: {SUPPORTED}", *remarks[:3])
    return TrainingLog(path, kind, tuple(valid.values()), tuple(remarks[:5]))


def batch_problems(log: TrainingLog, job: Job) -> Iterator[str]:
    """Yield the contradiction between the batch of a log and the batch of the configuration."""
    for step in log.steps:
        if step.global_batch not in (None, job.global_batch):
            yield (
                f"{log.path}:{step.line}: global batch size {step.global_batch}, and the configuration has "
                f"{job.global_batch}; give the configuration of this run, or --global-batch {step.global_batch}"
            )
            return


@dataclass(frozen=True)
class StepTimes:
    """The step times of logs of one run. `warm`: number of first records that are left out as warm-up; `spread`:
    relative interquartile range of the others, in standard deviations of a normal distribution."""

    steps: tuple[int, ...]
    seconds: tuple[float, ...]
    warm: int
    spread: float

    @property
    def median_s(self) -> float:
        """Return the median of the steps after the warm-up."""
        return median(self.seconds[self.warm :])

    @property
    def mean_s(self) -> float:
        """Return the mean of all steps, with the warm-up."""
        return fmean(self.seconds)

    @property
    def n_steady(self) -> int:
        """Return the number of records after the warm-up."""
        return len(self.seconds) - self.warm


SLOW = 1.1
"""A step is slow if it takes this many times the median."""
MOST_WARM = 10
"""Most records that are left out as warm-up, and at most a quarter of the log."""


def step_times(log: TrainingLog, job: Job) -> StepTimes:
    """Return the step times of a log, with its warm-up: the first records that are slow."""
    seconds = [step.step_s(job) for step in log.steps]
    whole, warm = median(seconds), 0
    while warm < min(MOST_WARM, len(seconds) // 4) and seconds[warm] > SLOW * whole:
        warm += 1
    steady = sorted(seconds[warm:])
    quarter = len(steady) // 4
    spread = (steady[-1 - quarter] - steady[quarter]) / 1.349 / median(steady)
    return StepTimes(tuple(step.step for step in log.steps), tuple(seconds), warm, spread)


FEWEST_STEPS = 5
"""Fewest records after the warm-up that determine anything."""


def joined_times(times: Sequence[StepTimes]) -> tuple[float, float]:
    """Return the step time of equal runs, and the standard deviation of its logarithm: the spread of their steps, which
    the cost model does not explain, and infinity if a log has fewer than `FEWEST_STEPS` steps after its warm-up."""
    noise = [run_times.spread if run_times.n_steady >= FEWEST_STEPS else math.inf for run_times in times]
    return math.exp(fmean(math.log(run_times.median_s) for run_times in times)), max(noise)
