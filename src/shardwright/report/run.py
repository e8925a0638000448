"""A run as its folder tells it: the resolved run file, the logged records, the checkpoints that are kept, and where
there is a pipeline, a step of it."""

import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

from shardwright.config import RunConfig, load
from shardwright.errors import InputError
from shardwright.report.timeline import PipelineRecord, read_pipeline

METRICS = "metrics.jsonl"
RUN_FILE = "run.toml"
_CHECKPOINT = re.compile(r"step-\d{8,}")
_CONTENTS = f"a run folder, as `shardwright train` writes it, has {METRICS} and {RUN_FILE}"


@dataclass(frozen=True)
class Logged:
    """A `train` record: loss, gradient norm and rate of one step; times are means since the record before. What has a
    default is said of a model with experts alone."""

    step: int
    loss: float
    grad_norm: float
    lr: float
    tokens_per_s: float
    mfu: float | None
    memory_bytes: int
    step_s: float
    data_s: float
    forward_backward_s: float
    optimizer_s: float
    load_max_over_mean: float | None = None
    load_entropy: float | None = None
    load_by_layer: tuple[float, ...] = ()
    dropped_fraction: float | None = None
    balance_loss: float | None = None
    z_loss: float | None = None
    expert_sent_bytes: float | None = None


@dataclass(frozen=True)
class Evaluated:
    """An `evaluation` record: the loss on the validation split after `step` steps."""

    step: int
    loss: float


_KINDS: dict[str, type[Logged] | type[Evaluated]] = {"train": Logged, "evaluation": Evaluated}


@dataclass(frozen=True)
class RunRecord:
    """A run folder, read. It has one record at least, of either kind; both kinds are in the order of steps.

    `pipeline`: the newest step whose actions are recorded; None where there is none, or layout.pp is 1.
    """

    folder: Path
    config: RunConfig
    run_file: str
    train: tuple[Logged, ...]
    held_out: tuple[Evaluated, ...]
    checkpoints: tuple[str, ...]
    pipeline: PipelineRecord | None

    @property
    def last_step(self) -> int:
        """Steps that are known to be done."""
        return self.losses[-1][0]

    @property
    def losses(self) -> list[tuple[int, float]]:
        """Step and loss of every record of either kind, in the order of steps."""
        train = [(record.step, record.loss) for record in self.train]
        return sorted(train + [(record.step, record.loss) for record in self.held_out], key=lambda pair: pair[0])

    @property
    def tokens_per_step(self) -> int:
        """Tokens that all ranks together read in a step."""
        return self.config.batch.global_batch * self.config.batch.seq_len

    @property
    def edges(self) -> tuple[int, ...]:
        """Steps between which the train records' times were measured: one more than there are records."""
        if not self.train:
            return (0,)
        first = self.train[0].step
        earlier = (record.step for record in self.held_out if record.step < first)
        return (max(0, first - self.config.metrics.every, *earlier), *(record.step for record in self.train))

    @property
    def resume_command(self) -> str:
        """What to type to go on; a run that has taken all its steps needs more of them."""
        words = ["shardwright", "train", str(self.folder / RUN_FILE), "--resume"]
        if self.folder.resolve() != Path(self.config.out).resolve():
            words += ["--set", f"out={self.folder.resolve()}"]
        if self.last_step >= self.config.steps:
            words += ["--set", f"steps={2 * self.config.steps}"]
        return shlex.join(words)


def read_run(run_dir: str | Path) -> RunRecord:
    """Read the folder of a run, one that is still going on included.

    Raises InputError for a folder that is not one of a run or holds no record yet, naming what is there, and
    for records that are damaged anywhere but in a last line that was cut short.
    """
    folder = Path(run_dir)
    _check(folder)
    train: list[Logged] = []
    held_out: list[Evaluated] = []
    for record in _records(folder / METRICS):
        if isinstance(record, Logged):
            train.append(record)
        else:
            held_out.append(record)
    config = load(folder / RUN_FILE)
    if not train and not held_out:
        raise InputError(
            f"{folder / METRICS} has no whole line yet: the run is, or was stopped, before its first logged step "
            f"(metrics.every={config.metrics.every}); wait for it, or go on with "
            f"`shardwright train {folder / RUN_FILE} --resume`"
        )
    return RunRecord(
        folder=folder,
        config=config,
        run_file=(folder / RUN_FILE).read_text(encoding="utf-8"),
        train=tuple(sorted(train, key=lambda record: record.step)),
        held_out=tuple(sorted(held_out, key=lambda record: record.step)),
        checkpoints=tuple(_checkpoints(folder / "checkpoints")),
        pipeline=read_pipeline(folder, config),
    )


def _check(folder: Path) -> None:
    if not folder.exists():
        runs = [path.parent.name for path in sorted(folder.parent.glob(f"*/{METRICS}"))]
        there = f"runs in {folder.parent}: {_some(runs)}" if runs else f"there is no run in {folder.parent} either"
        raise InputError(f"{folder}: no such folder; {there}")
    if not folder.is_dir():
        raise InputError(f"{folder} is a file; give the folder of a run: {_CONTENTS}")
    missing = [name for name in (METRICS, RUN_FILE) if not (folder / name).is_file()]
    if missing:
        names = sorted(path.name + "/" * path.is_dir() for path in folder.iterdir())
        inside = [path.parent.name for path in sorted(folder.glob(f"*/{METRICS}"))]
        hint = f"; runs inside it: {_some(inside)}" if inside else ""
        raise InputError(
            f"{folder} has no {' and no '.join(missing)}; {_CONTENTS}; "
            f"this one has {_some(names) or 'nothing in it'}{hint}"
        )


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:8])
    return f"{shown} and {len(names) - 8} more" if len(names) > 8 else shown


def _records(path: Path) -> Iterator[Logged | Evaluated]:
    text = path.read_text(encoding="utf-8", errors="replace")
    # What follows the last newline was being written when the process was killed, or is being written now.
    for number, line in enumerate(text[: text.rfind("\n") + 1].splitlines(), start=1):
        try:
            values = json.loads(line)
            kind = _KINDS[values["kind"]]
            told = [field.name for field in fields(kind) if field.name in values or field.default is MISSING]
            yield kind(**{name: _value(values, name) for name in told})
        except (ValueError, TypeError, KeyError) as error:
            raise InputError(
                f"{path}, line {number} is not a record of a run ({type(error).__name__}: {error}): "
                f"{line[:60]!r}; a record is a JSON object of kind {' or '.join(map(repr, _KINDS))}"
            ) from None


def _value(values: dict[str, Any], name: str) -> Any:
    value = values[name]
    if isinstance(value, int | float) or (value is None and name == "mfu"):
        return value
    if name == "load_by_layer" and isinstance(value, list) and all(isinstance(each, int | float) for each in value):
        return tuple(value)
    raise TypeError(f"{name}={value!r} is not a number")


def _checkpoints(folder: Path) -> list[str]:
    """Names of published checkpoints, the oldest first; half-written ones have other names."""
    if not folder.is_dir():
        return []
    names = [path.name for path in folder.iterdir() if _CHECKPOINT.fullmatch(path.name)]
    return sorted(names, key=lambda name: int(name.removeprefix("step-")))
