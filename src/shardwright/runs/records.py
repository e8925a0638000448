"""The lines of metrics.jsonl, events.jsonl and timelines: a class for each kind of record, written and read here."""

import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, Field, TypeAdapter, ValidationError

from shardwright.runs.folder import EVENTS, METRICS, now
from shardwright.system.console import visible, visible_line
from shardwright.system.errors import InputError, without_secrets
from shardwright.system.files import (
    complete_lines,
    decoded,
    inside,
    open_regular,
    parse_json,
    read_lines,
)

_KIND_FIRST = re.compile(r'\{"kind": ?"(\w+)"')
_LARGEST_FP32 = 3.4028235e38
READ_BYTES = 2**24
"""Number of bytes of a growing file that are read at once."""
Record = dict[str, Any]
Step = Annotated[int, Field(ge=0, lt=2**53)]
TrainedStep = Annotated[int, Field(ge=1, lt=2**53)]
Amount = Annotated[float, Field(ge=-1e18, le=1e18, allow_inf_nan=False)]
"""Seconds, speeds and fractions of a record: finite, so that sums and the ticks of plots are finite. A loss may be
anything."""


def _nan_or_amount(value: float) -> float:
    if abs(value) > 1e18:
        raise ValueError("a number from -1e18 to 1e18, or NaN, is needed")
    return value


def _within_fp32(value: float) -> float:
    return value if math.isnan(value) or abs(value) <= _LARGEST_FP32 else math.copysign(math.inf, value)


def _date_or_none(time: str | None) -> str | None:
    try:
        return time if time is None or datetime.fromisoformat(time).astimezone(UTC) else None
    except (ValueError, OverflowError):
        return None


Load = Annotated[float, AfterValidator(_nan_or_amount)]
"""The load of experts; NaN in a step without a target token."""
Loss = Annotated[float, AfterValidator(_within_fp32)]
"""A loss or norm of a record: any value. A finite value beyond fp32 is infinite, so that plots have a scale."""
Time = Annotated[str | None, AfterValidator(_date_or_none)]
"""The time of a record; None if it is no date in the years 1 to 9999 of UTC."""
Line = Annotated[str, AfterValidator(visible_line)]
"""A name, or a text of one line, that is shown next to others."""
EventKind = Literal[
    "start", "save", "skip", "rollback", "spike", "hang", "fault", "restart", "straggler", "metrics", "placement"
]
T = TypeVar("T")


@dataclass(frozen=True)
class StartRecord:
    """A `run` record: where, with which software and on which layout a run started or resumed, before the steps after
    `step`.

    `layout` and `lr_schedule`: text for people. `keys`: the keys of the layout. `device`: the device name of rank 0.
    `git_commit`: commit of the working directory, if it is in a repository. `checkpoint`: the loaded checkpoint, if
    any.
    """

    step: Step
    layout: Line
    keys: Line
    lr_schedule: Line
    world_size: Step
    host: Line
    device: Line
    torch: Line
    shardwright: Line
    git_commit: Line | None = None
    checkpoint: Line | None = None
    time: Time = None


@dataclass(frozen=True, slots=True)
class TrainRecord:
    """A `train` record: loss, gradient norm and learning rate of one step. Times and speeds are means over the steps
    since the previous record; `memory_bytes` is the peak of rank 0.

    Fields with a default: `time`: when the record was written (None in files of older versions). `epochs`: passes of a
    mixture over each source. `mtp_loss`: mean loss of the multi-token prediction modules without its weight; `loss`
    does not contain it. `margin`, `accuracy`, `chosen_reward`, `rejected_reward`: means over the pairs of a step, in
    preference training. `loss_scale`: for the next step (fp16 only). `skipped_steps`: skipped steps of the run (an
    overflow in fp16, a spike).
    With several ranks on CPUs: `slowest_rank`: the rank that the others wait for longest. `slowest_costs_s`: its own
    time of a step above the median of its peers. `stragglers`: ranks that are too slow now. `own_s_by_rank`: seconds a
    step of each rank without waiting for others (up to 256 ranks). The other fields are only for models with experts.
    """

    step: TrainedStep
    loss: Loss
    grad_norm: Loss
    lr: Amount
    target_tokens: int
    tokens_per_s: Amount
    tokens_per_s_per_device: Amount
    tflops_per_s_per_device: Amount
    mfu: Amount | None
    memory_bytes: Step
    step_s: Amount
    data_s: Amount
    forward_backward_s: Amount
    optimizer_s: Amount
    load_max_over_mean: Load | None = None
    load_entropy: Load | None = None
    load_by_layer: tuple[Load, ...] = ()
    tokens_by_expert: tuple[tuple[Step, ...], ...] = ()
    router_similarity_by_layer: tuple[float, ...] = ()
    dropped_fraction: Load | None = None
    balance_loss: float | None = None
    z_loss: float | None = None
    expert_sent_bytes: Amount | None = None
    mtp_loss: Loss | None = None
    margin: Loss | None = None
    accuracy: Amount | None = None
    chosen_reward: Loss | None = None
    rejected_reward: Loss | None = None
    loss_scale: Amount | None = None
    skipped_steps: Step = 0
    epochs: dict[Line, Amount] | None = None
    slowest_rank: int | None = None
    slowest_costs_s: Amount | None = None
    stragglers: tuple[int, ...] = ()
    own_s_by_rank: tuple[Amount, ...] = ()
    time: Time = None


@dataclass(frozen=True)
class EvaluationRecord:
    """An `evaluation` record: the loss on the validation split after `step` steps. For a mixture, `sources` has the
    loss on each source's validation split, and `loss` is their mean, weighted by the mixture of that step. `mtp_loss`
    as in `TrainRecord`. `average_loss`: the loss of the average of the weights (`[average]`). `margin` to
    `rejected_reward`: of a run on pairs, means over the pairs of the split. For each layer with
    experts: `expert_similarity_by_layer`: the largest cosine of two experts' weights; `most_similar_experts`: these
    two."""

    step: Step
    loss: Loss
    time: Time = None
    sources: dict[Line, Loss] | None = None
    mtp_loss: Loss | None = None
    average_loss: Loss | None = None
    margin: Loss | None = None
    accuracy: Amount | None = None
    chosen_reward: Loss | None = None
    rejected_reward: Loss | None = None
    expert_similarity_by_layer: tuple[float, ...] = ()
    most_similar_experts: tuple[tuple[Step, Step], ...] = ()


@dataclass(frozen=True)
class CheckpointRecord:
    """A `checkpoint` record: the checkpoint after `step` steps was published, in OUT or, if `local`, on the hosts.
    `blocked_s`: time that training was blocked. `took_s`: time from start to publication. `n_bytes`: bytes of its
    tensors."""

    step: Step
    blocked_s: Amount
    took_s: Amount
    n_bytes: Step
    time: Time = None
    local: bool = False


AnyRecord = StartRecord | TrainRecord | EvaluationRecord | CheckpointRecord
_KINDS: dict[str, type[AnyRecord]] = {
    "run": StartRecord,
    "train": TrainRecord,
    "evaluation": EvaluationRecord,
    "checkpoint": CheckpointRecord,
}


_READERS: dict[str, TypeAdapter[AnyRecord]] = {name: TypeAdapter(kind) for name, kind in _KINDS.items()}


def as_record(record: AnyRecord) -> Record:
    """Return a record as the dict of its line in metrics.jsonl, `kind` first, without fields at their default."""
    [kind] = [name for name, record_class in _KINDS.items() if isinstance(record, record_class)]
    return {"kind": kind} | {
        f.name: getattr(record, f.name) for f in fields(record) if getattr(record, f.name) != f.default
    }


def read_metrics(path: Path) -> Iterator[AnyRecord]:
    """Yield the records of metrics.jsonl. Older versions wrote no time and no `StartRecord`.

    Raises InputError for a damaged record.
    """
    return metrics_of(whole_lines(path), path)


def lacks_evaluation(out: Path, step: int) -> bool:
    """Return whether the run in `out` logged step `step` without an evaluation after it."""
    lines = (line for line in whole_lines(out / METRICS) if f'"step": {step}' in line)
    records = (record for record in map(parse_json, lines) if record["step"] == step)
    kinds = {record["kind"] for record in records}
    return "train" in kinds and "evaluation" not in kinds


def metrics_of(lines: Iterable[str], path: Path, first: int = 1) -> Iterator[AnyRecord]:
    """Yield the records of some lines of metrics.jsonl. `first`: the line number of the first line."""
    kinds = " or ".join(map(repr, _KINDS))
    way_out = f"a record is a JSON object of kind {kinds}"
    return _parsed(lines, path, first, _reader_of, "a record of a run", way_out)


def _reader_of(line: str) -> TypeAdapter[AnyRecord]:
    """Return the validator of a line of metrics.jsonl. If `kind` comes first, as `as_record` writes it, only `kind` is
    parsed, since parsing every line twice would take most of the time of a long file."""
    first = _KIND_FIRST.match(line)
    return _READERS[first[1] if first else parse_json(line)["kind"]]


@dataclass(frozen=True)
class PipelineStep:
    """The times of a `pp` rank's actions in a logged step.

    `step`: optimizer steps done; `zero_s`: start of its first action, seconds since the epoch; `actions`: name (`0F3`),
    start and end of each action in execution order, seconds since `zero_s`.
    """

    step: int
    rank: int
    zero_s: float
    actions: tuple[tuple[str, float, float], ...]

    def line(self) -> str:
        """Return the line of the file."""
        return json.dumps(asdict(self), separators=(",", ":")) + "\n"


def read_pipeline_steps(path: Path) -> Iterator[PipelineStep]:
    """Return the steps in the file of one rank, none without a file. Raises InputError for a damaged line."""

    reader = TypeAdapter(PipelineStep)
    way_out = "remove the file, it is written again at the next logged step"
    return _parsed(whole_lines(path), path, 1, lambda line: reader, "a step of a pipeline", way_out)


@dataclass(frozen=True)
class SamplePlace:
    """The position of sample `sample` of a run in its data: `n_tokens` tokens from token `token` of `file`, continuing
    in the next shard if needed. `documents`: the numbers of its first and last document, counted from 0 over all shards
    of the split; None if the index of the data has no documents."""

    sample: int
    file: Line
    token: int
    n_tokens: int
    documents: tuple[int, int] | None

    def __str__(self) -> str:
        text = f"{self.file}, tokens {self.token} to {self.token + self.n_tokens - 1}"
        if self.documents is None:
            return text
        first, last = self.documents
        return f"{text}, {f'document {first}' if first == last else f'documents {first} to {last}'}"


@dataclass(frozen=True)
class EventRecord:
    """An event of a run after `step` steps, with its message; `rank`: the affected rank, None for all.

    Kinds: start (of all ranks, new or resumed), save (of a checkpoint), skip (of the update of a spike), rollback (from
    a spike), spike (that stopped the run), hang, fault (a rank died or failed, or a device gave another result when a
    step was repeated), restart (of the ranks after a fault; `rank` is at fault), straggler (`rank` computes longer than
    it should, or no longer does), metrics (a writer of [metrics] failed, and the run continues), placement (of experts
    on ranks of ep). `samples`: for skip, rollback and spike, the samples of the step that was not taken.
    """

    kind: EventKind
    step: Step
    text: str
    rank: int | None = None
    time: str = field(default_factory=now)
    samples: tuple[SamplePlace, ...] = ()


def append_event(out: Path, event: EventRecord) -> None:
    """Append an event to the file of the run in `out`. Each line is one write, so that several processes may append at
    once. On a full disk or without the folder the event is dropped, with no partial line, so that it does not cause a
    second fault."""
    entry = asdict(event)
    if not event.samples:
        del entry["samples"]
    line = without_secrets(json.dumps(entry)).encode() + b"\n"
    with suppress(OSError), (out / EVENTS).open("a+b", buffering=0) as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 1))
        if file.read(1) not in (b"", b"\n"):
            line = b"\n" + line  # after the partial line of a process that was killed in its write
        written = file.write(line)
        # Only while this is still the end: another process may have found space since.
        if written < len(line) and file.tell() == os.fstat(file.fileno()).st_size:
            file.truncate(file.tell() - written)


def read_events(out: Path) -> list[EventRecord]:
    """Return the events of a run, in order. Raises InputError for a damaged line. An incomplete last line is skipped,
    because its writer was killed."""
    return list(events_of(whole_lines(inside(out, EVENTS)), out / EVENTS))


def events_of(lines: Iterable[str], path: Path, first: int = 1) -> Iterator[EventRecord]:
    """Return the events of some lines of events.jsonl. `first`: the line number of the first line."""
    reader = TypeAdapter(EventRecord)
    way_out = "remove the line; the file is only read by people, `shardwright report` and `shardwright watch`"
    return _parsed(lines, path, first, lambda line: reader, "an event of a run", way_out, may_end_early=True)


def whole_lines(path: Path) -> Iterator[str]:
    """Yield the complete lines of a file, none if it is missing. Text after the last newline is an incomplete record:
    its writer was killed, or is writing it now. Raises InputError for a file that cannot be read."""
    try:
        if path.is_file():
            yield from read_lines(path)
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None


class GrowingFile:
    """A file to which other processes append lines; each line is returned once."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.begin()

    def begin(self) -> None:
        """Start again at the first line."""
        self._at, self._file, self.n_lines = 0, -1, 0

    def new_lines(self) -> tuple[bool, list[str]]:
        """Return whether the file was replaced since the last call, as after a rollback to a checkpoint, and about
        `READ_BYTES` bytes of new complete lines. Call again until no lines are returned. Missing files have none."""
        lines: list[str] = []
        n_bytes = 0
        try:
            with open_regular(self.path) as file:
                status = os.fstat(file.fileno())
                anew = status.st_ino != self._file or status.st_size < self._at
                if anew:
                    self.begin()
                self._file = status.st_ino
                file.seek(self._at)
                for line in complete_lines(file, self.path):
                    lines.append(decoded(line))
                    n_bytes += len(line)
                    if n_bytes >= READ_BYTES:
                        break
        except FileNotFoundError:
            anew = self._file != -1
            self.begin()
        self._at += n_bytes
        self.n_lines += len(lines)
        return anew, lines


def _with_visible_texts(line: str) -> str:
    """Return a line of JSON whose texts can be shown in a terminal, a page and a picture (`visible`)."""
    if "\\" not in line and ":/" not in line and visible(line) == line:
        return line
    return json.dumps(_visible_texts(parse_json(line)))


def _visible_texts(value: Any) -> Any:
    match value:
        case str():
            return visible(value)
        case dict():
            return {visible(key): _visible_texts(inner) for key, inner in value.items()}
        case list():
            return [_visible_texts(inner) for inner in value]
    return value


def _parsed(
    lines: Iterable[str],
    path: Path,
    first: int,
    reader_of: Callable[[str], TypeAdapter[T]],
    what: str,
    way_out: str,
    may_end_early: bool = False,
) -> Iterator[T]:
    for number, line in enumerate(lines, start=first):
        if may_end_early and not line.endswith("}"):
            continue
        try:
            yield reader_of(line).validate_json(_with_visible_texts(line), strict=True)
        except (ValueError, TypeError, KeyError) as error:
            reason = f"{type(error).__name__}: {error}"
            if isinstance(error, ValidationError):
                details = error.errors()[0]
                reason = f"{'.'.join(map(str, details['loc']))}: {details['msg']}"
            raise InputError(f"{path}, line {number} is not {what} ({reason}): {line[:60]!r}; {way_out}") from None
