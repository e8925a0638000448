"""The folder of a run, `out` in its run file: the names of its files, and how their records are written and read.

run.toml                    the run file with every default filled in
metrics.jsonl               a JSON object for each start (`StartRecord`), each logged step (`TrainRecord`), each
                            evaluation (`EvaluationRecord`) and each checkpoint (`CheckpointRecord`)
events.jsonl                a JSON object for each thing that happened besides steps (`EventRecord`)
timeline/rank-R.jsonl       of rank R of `pp`: a JSON object for each of its last few logged steps (`PipelineStep`)
checkpoints/step-00000100/  a checkpoint, there under this name when it is complete; see `train/checkpoint`
offload/                    empty: where files of the optimizer's states are, which have no names
logs/rank-R.log             stderr of rank R, where `shardwright train` started the ranks; after restart N of them
                            logs/restart-N/rank-R.log
tensorboard/                events, if the run file asks for them
report.html curves.png timeline.svg     what `shardwright report` writes unless it is given other places
.lock                       names the process that trains here
"""

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, Field, TypeAdapter, ValidationError

from shardwright.system.errors import InputError, without_secrets
from shardwright.system.files import (
    LOCK,
    complete_lines,
    decoded,
    open_regular,
    parse_json,
    problem_of_place,
    read_lines,
)

RUN_FILE, METRICS, CHECKPOINTS, LOGS, TENSORBOARD = "run.toml", "metrics.jsonl", "checkpoints", "logs", "tensorboard"
EVENTS = "events.jsonl"
OFFLOADED = "offload"
TIMELINES = "timeline"
MODEL_FILE = "model.toml"
"""In a folder that `shardwright import` wrote: the section [model] of its weights."""
RESOLVED = "# resolved by shardwright"
"""The first words of a run file that a run wrote."""
PAGE, CURVES, TIMELINE = "report.html", "curves.png", "timeline.svg"
RUN_NAMES = {RUN_FILE, METRICS, CHECKPOINTS, LOGS, TENSORBOARD, EVENTS, OFFLOADED, TIMELINES, LOCK}
"""Files and folders that training makes in the folder of a run."""
PHASES = ("data", "forward_backward", "optimizer")
"""Parts of the time of a step; a record has the seconds of each as PHASE_s."""
MOST_RANKS_LOGGED = 256
"""Ranks up to which a record has a number of each; of more of them the lines of a long run would fill a disk."""
_CHECKPOINT = re.compile(r"step-(\d{8,})")
_KIND_FIRST = re.compile(r'\{"kind": ?"(\w+)"')
READ_BYTES = 2**24
"""Bytes of a growing file that are read at once."""

Record = dict[str, Any]
Step = Annotated[int, Field(ge=0, lt=2**53)]
Amount = Annotated[float, Field(ge=-1e18, le=1e18, allow_inf_nan=False)]
"""Seconds, speeds and shares of a record: finite, so that sums and ticks of pictures are. A loss may be anything."""


def _nan_or_amount(value: float) -> float:
    if abs(value) > 1e18:
        raise ValueError("a number from -1e18 to 1e18, or NaN, is needed")
    return value


Load = Annotated[float, AfterValidator(_nan_or_amount)]
"""The load of experts: NaN in a step without a token that counts."""
T = TypeVar("T")


def wrong_kinds(out: Path) -> list[str]:
    """Return what is in a folder in the place of a file or folder of a run: of another kind, or a run file that no run
    wrote."""
    folders = [out / name for name in (CHECKPOINTS, LOGS, TENSORBOARD, TIMELINES)]
    files = [out / name for name in (RUN_FILE, METRICS, EVENTS, LOCK)]
    found = [f"{path} is a file, and a run keeps a folder there" for path in folders if path.is_file()]
    found += [f"{path} is a folder, and a run keeps a file there" for path in files if path.is_dir()]
    others = [path for path in files if os.path.lexists(path) and not path.is_dir()]
    found += [
        f"{path} is a device, a pipe or a link to elsewhere, and a run keeps a file there"
        for path in others
        if not path.is_file() or problem_of_place(path) is not None
    ]
    run_file = out / RUN_FILE
    if run_file.is_file() and not (out / METRICS).exists():
        with open_regular(run_file) as file:
            if file.read(len(RESOLVED)) != RESOLVED.encode():
                found.append(f"{run_file} was not written by a run, and this run would write its own run file over it")
    way_out = "move it away, or name another folder with --set out=..."
    return [f"{problem}; {way_out}" for problem in found]


def timeline_path(out: Path, rank: int) -> Path:
    """The file of rank `rank` of `pp`, of the run whose folder is `out`."""
    return out / TIMELINES / f"rank-{rank}.jsonl"


def checkpoint_name(step: int) -> str:
    """The name of the checkpoint after `step` steps."""
    return f"step-{step:08d}"


def step_of(checkpoint: Path) -> int:
    """Steps that were done when a complete checkpoint was saved."""
    match = _CHECKPOINT.fullmatch(checkpoint.name)
    assert match is not None, checkpoint
    return int(match[1])


def published(checkpoints: Path) -> list[Path]:
    """The complete checkpoints in OUT/checkpoints, the oldest first."""
    if not checkpoints.is_dir():
        return []
    steps = {path: match for path in checkpoints.iterdir() if (match := _CHECKPOINT.fullmatch(path.name))}
    return sorted(steps, key=lambda path: int(steps[path][1]))


def resumable(out: Path, local: str | None) -> list[Path]:
    """The complete checkpoints in OUT/checkpoints and in the folder `checkpoint.local` of this host, by their steps."""
    return sorted([*published(out / CHECKPOINTS), *(published(Path(local)) if local else [])], key=step_of)


@dataclass(frozen=True)
class StartRecord:
    """A `run` record: where, with what and on which layout a run began or went on, before it took steps after `step`.

    `layout` and `lr_schedule` are words for people, `keys` the keys of the layout; `device` is the name of rank 0's;
    `git_commit` is that of the working directory, if it is in a repository; `checkpoint` is what was loaded, if any.
    """

    step: Step
    layout: str
    keys: str
    lr_schedule: str
    world_size: Step
    host: str
    device: str
    torch: str
    shardwright: str
    git_commit: str | None = None
    checkpoint: str | None = None
    time: str | None = None


@dataclass(frozen=True, slots=True)
class TrainRecord:
    """A `train` record: loss, gradient norm and learning rate of one step; times and speeds are means over the steps
    since the record before, `memory_bytes` is the peak of rank 0. Of what has a default, `time` is when the
    record was written (None in files of older versions), `epochs` how often a mixture has gone through each of its
    sources, `mtp_loss` the mean loss of the modules of multi-token prediction without its weight, which
    `loss` does not contain, `loss_scale` that of the next step (fp16 alone) and `skipped_steps` how many steps of the
    run were skipped (an overflow in fp16, a spike). Of several ranks on CPUs, `slowest_rank` is the one that the others
    wait for longest, `slowest_costs_s` by how much its own time a step is above the median of its peers', `stragglers`
    the ranks that are too slow now, and `own_s_by_rank` the seconds a step that each rank takes for itself, without
    waiting for others (only up to 256 ranks). The rest is said of a model with experts alone."""

    step: Step
    loss: float
    grad_norm: float
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
    dropped_fraction: Load | None = None
    balance_loss: float | None = None
    z_loss: float | None = None
    expert_sent_bytes: Amount | None = None
    mtp_loss: float | None = None
    loss_scale: Amount | None = None
    skipped_steps: Step = 0
    epochs: dict[str, Amount] | None = None
    slowest_rank: int | None = None
    slowest_costs_s: Amount | None = None
    stragglers: tuple[int, ...] = ()
    own_s_by_rank: tuple[Amount, ...] = ()
    time: str | None = None


@dataclass(frozen=True)
class EvaluationRecord:
    """An `evaluation` record: the loss on the validation split after `step` steps. Of a mixture, `sources` has the loss
    on that of each source, and `loss` is their mean, weighted as that step was mixed. `mtp_loss` as in
    `TrainRecord`."""

    step: Step
    loss: float
    time: str | None = None
    sources: dict[str, float] | None = None
    mtp_loss: float | None = None


@dataclass(frozen=True)
class CheckpointRecord:
    """A `checkpoint` record: that after `step` steps was published, in OUT or, if `local`, on the hosts. `blocked_s`:
    how long training stood still for it; `took_s`: from its begin until it was published; `n_bytes`: of its tensors."""

    step: Step
    blocked_s: Amount
    took_s: Amount
    n_bytes: Step
    time: str | None = None
    local: bool = False


AnyRecord = StartRecord | TrainRecord | EvaluationRecord | CheckpointRecord
_KINDS: dict[str, type[AnyRecord]] = {
    "run": StartRecord,
    "train": TrainRecord,
    "evaluation": EvaluationRecord,
    "checkpoint": CheckpointRecord,
}
_READERS: dict[str, TypeAdapter[AnyRecord]] = {name: TypeAdapter(kind) for name, kind in _KINDS.items()}


def now() -> str:
    """The `time` of a record: UTC by ISO 8601, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def as_record(told: AnyRecord) -> Record:
    """What a line of metrics.jsonl says, `kind` first; a field that is at its default is left out."""
    [kind] = [name for name, each in _KINDS.items() if isinstance(told, each)]
    return {"kind": kind} | {
        each.name: getattr(told, each.name) for each in fields(told) if getattr(told, each.name) != each.default
    }


def read_metrics(path: Path) -> Iterator[AnyRecord]:
    """The records of metrics.jsonl; older versions wrote no time and no `StartRecord`.

    Raises InputError for a record that is damaged.
    """
    return metrics_of(whole_lines(path), path)


def metrics_of(lines: Iterable[str], path: Path, first: int = 1) -> Iterator[AnyRecord]:
    """The records of some lines of metrics.jsonl, of which the first has number `first`."""
    kinds = " or ".join(map(repr, _KINDS))
    way_out = f"a record is a JSON object of kind {kinds}"
    return _parsed(lines, path, first, _reader_of, "a record of a run", way_out)


def _reader_of(line: str) -> TypeAdapter[AnyRecord]:
    """The validator of a line of metrics.jsonl. `kind` is parsed alone where it comes first, as `as_record` writes it:
    parsing every line twice would take most of the time of a long file."""
    first = _KIND_FIRST.match(line)
    return _READERS[first[1] if first else parse_json(line)["kind"]]


@dataclass(frozen=True)
class PipelineStep:
    """When a rank of `pp` ran its actions in a logged step.

    `step`: optimizer steps done; `zero_s`: start of its first action, seconds since the epoch; `actions`: name (`0F3`),
    start and end of each in the order in which they ran, seconds since `zero_s`.
    """

    step: int
    rank: int
    zero_s: float
    actions: tuple[tuple[str, float, float], ...]

    def line(self) -> str:
        """As a line of the file."""
        return json.dumps(asdict(self), separators=(",", ":")) + "\n"


def read_pipeline_steps(path: Path) -> Iterator[PipelineStep]:
    """The steps in the file of one rank, if there is one. Raises InputError for a line that is damaged."""

    reader = TypeAdapter(PipelineStep)
    way_out = "remove the file, it is written anew at the next logged step"
    return _parsed(whole_lines(path), path, 1, lambda line: reader, "a step of a pipeline", way_out)


EventKind = Literal["start", "save", "skip", "rollback", "spike", "hang", "fault", "restart", "straggler"]


@dataclass(frozen=True)
class SamplePlace:
    """Where running sample `sample` of a run is in its data: `n_tokens` tokens from token `token` of `file` on, across
    the border of a shard. `documents`: the numbers of the first and the last document that it has tokens of, counted
    from 0 over all shards of the split; None where the index of the data has no documents."""

    sample: int
    file: str
    token: int
    n_tokens: int
    documents: tuple[int, int] | None

    def __str__(self) -> str:
        told = f"{self.file}, tokens {self.token} to {self.token + self.n_tokens - 1}"
        if self.documents is None:
            return told
        first, last = self.documents
        return f"{told}, {f'document {first}' if first == last else f'documents {first} to {last}'}"


@dataclass(frozen=True)
class EventRecord:
    """What happened to a run after `step` steps, in the words that it was told in; `rank`: the one it happened on, None
    for all. Kinds: start (of all ranks, new or resumed), save (of a checkpoint), skip (of the update of a spike),
    rollback (from a spike), spike (that stopped the run), hang, fault (a rank died or failed, or a device gave another
    result when a step was run again), restart (of the ranks after a fault; `rank` is the one at fault), straggler
    (`rank` computes longer than it should, or does not any more). `samples`: of skip, rollback and spike, those of the
    step that was not taken."""

    kind: EventKind
    step: Step
    text: str
    rank: int | None = None
    time: str = field(default_factory=now)
    samples: tuple[SamplePlace, ...] = ()


def append_event(out: Path, event: EventRecord) -> None:
    """Add an event to the file of the run in `out`; each line is one write, so that processes may add at once. A disk
    that is full or a folder that is gone must not be a second fault: then it is not written, nor is a part of it."""
    told = asdict(event)
    if not event.samples:
        del told["samples"]
    line = without_secrets(json.dumps(told)).encode() + b"\n"
    with suppress(OSError), (out / EVENTS).open("a+b", buffering=0) as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 1))
        if file.read(1) not in (b"", b"\n"):
            line = b"\n" + line  # after the part of a line of a process that was killed in its write
        written = file.write(line)
        # Where this is still the end: another process may have found space since.
        if written < len(line) and file.tell() == os.fstat(file.fileno()).st_size:
            file.truncate(file.tell() - written)


def read_events(out: Path) -> list[EventRecord]:
    """The events of a run, in order, if there are any. Raises InputError for a line that is damaged; one that ends
    early is passed over: its writer was killed."""
    return list(events_of(whole_lines(out / EVENTS), out / EVENTS))


def events_of(lines: Iterable[str], path: Path, first: int = 1) -> Iterator[EventRecord]:
    """The events of some lines of events.jsonl, of which the first has number `first`."""
    reader = TypeAdapter(EventRecord)
    way_out = "remove the line; the file is only read by people, `shardwright report` and `shardwright watch`"
    return _parsed(lines, path, first, lambda line: reader, "an event of a run", way_out, may_end_early=True)


def whole_lines(path: Path) -> Iterator[str]:
    """Yield the complete lines of a file, none if it is missing. What follows the last newline is an incomplete record:
    the process that writes it was killed, or is writing it now. Raises InputError for a file that cannot be read."""
    try:
        if path.is_file():
            yield from read_lines(path)
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None


class GrowingFile:
    """The lines of a file to which others are added; each is given once."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.begin()

    def begin(self) -> None:
        """Give all lines again."""
        self._at, self._file, self.n_lines = 0, -1, 0

    def new_lines(self) -> tuple[bool, list[str]]:
        """Return whether the file was replaced since the last call, as a run that goes back to a checkpoint does, and
        lines that have not been returned, without an incomplete last one: those of about `READ_BYTES` bytes. Call
        again until there are none. A missing file has none."""
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
            yield reader_of(line).validate_json(line, strict=True)
        except (ValueError, TypeError, KeyError) as error:
            told = f"{type(error).__name__}: {error}"
            if isinstance(error, ValidationError):
                wrong = error.errors()[0]
                told = f"{'.'.join(map(str, wrong['loc']))}: {wrong['msg']}"
            raise InputError(f"{path}, line {number} is not {what} ({told}): {line[:60]!r}; {way_out}") from None
