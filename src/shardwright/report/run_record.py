"""A run read from its folder: the resolved run file, the logged records, the kept checkpoints and, with pipeline
parallelism, one step of the pipeline."""

import math
import shlex
from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from shardwright.config import RunConfig, load_kept
from shardwright.report.timeline import PipelineRecord, read_pipeline
from shardwright.report.words import layout_in_words
from shardwright.runs.folder import CHECKPOINTS, METRICS, RUN_FILE, published
from shardwright.runs.records import EvaluationRecord, EventRecord, StartRecord, TrainRecord, read_events, read_metrics
from shardwright.system.console import visible
from shardwright.system.errors import InputError
from shardwright.system.files import inside, read_text, real_path

_CONTENTS = f"a run folder, as `shardwright train` writes it, has {METRICS} and {RUN_FILE}"


@dataclass(frozen=True)
class RunSegment:
    """The steps of a run after `first_step`, up to `last_step`, on one layout and device. The world size is None if an
    older version of shardwright ran the steps and did not record it."""

    first_step: int
    last_step: int
    layout: str
    world_size: int | None
    train: tuple[TrainRecord, ...]

    @property
    def steps(self) -> str:
        return f"steps {self.first_step + 1:,} to {self.last_step:,}"


@dataclass(frozen=True)
class RunRecord:
    """The content of a run folder. `train` or `validation` has at least one record; all are in the order of steps.

    `starts`: one for each time the run started or resumed; none if an older version of shardwright ran it.
    `pipeline`: the newest step whose actions are recorded; None if there is no such step, or layout.pp is 1.
    """

    folder: Path
    config: RunConfig
    run_file: str
    train: tuple[TrainRecord, ...]
    validation: tuple[EvaluationRecord, ...]
    starts: tuple[StartRecord, ...]
    checkpoints: tuple[str, ...]
    pipeline: PipelineRecord | None
    events: tuple[EventRecord, ...] = ()

    @property
    def last_step(self) -> int:
        """Return the number of steps that are known to be done."""
        return self.losses[-1][0]

    @cached_property
    def losses(self) -> list[tuple[int, float]]:
        """Return step and loss of every train and validation record, in the order of steps."""
        records: list[TrainRecord | EvaluationRecord] = [*self.train, *self.validation]
        return sorted(((record.step, record.loss) for record in records), key=lambda pair: pair[0])

    @property
    def average_losses(self) -> list[tuple[int, float]]:
        """Return step and validation loss of the average of the weights, of each evaluation with a finite one."""
        pairs = ((record.step, record.average_loss) for record in self.validation)
        return [(step, loss) for step, loss in pairs if loss is not None and math.isfinite(loss)]

    @cached_property
    def segments(self) -> tuple[RunSegment, ...]:
        """Return the run's steps by layout and device, at least one segment. Starts on equal ones share a segment."""
        layout = self.config.layout.layout()
        if not self.starts:
            return (RunSegment(self.edges[0], self.last_step, layout_in_words(layout), layout.world_size, self.train),)
        changes = [
            start
            for earlier, start in zip((None, *self.starts), self.starts, strict=False)
            if earlier is None or (earlier.keys, earlier.device) != (start.keys, start.device)
        ]
        ends = [*(start.step for start in changes[1:]), max(self.last_step, changes[-1].step)]
        before = self.train_after(-1, changes[0].step)
        unknown = (RunSegment(self.edges[0], changes[0].step, "a layout that was not recorded", None, before),)
        return (unknown if before else ()) + tuple(
            RunSegment(
                start.step,
                end,
                start.layout,
                start.world_size,
                self.train_after(start.step, end),
            )
            for start, end in zip(changes, ends, strict=True)
        )

    def train_after(self, first_step: int, last_step: int) -> tuple[TrainRecord, ...]:
        """Return the train records after `first_step`, up to `last_step`."""
        return self.train[bisect_right(self._steps, first_step) : bisect_right(self._steps, last_step)]

    @cached_property
    def _steps(self) -> list[int]:
        return [record.step for record in self.train]

    def tokens(self, step: int) -> int:
        """Return the number of tokens that all ranks together read in the first `step` steps."""
        return self.config.batch.schedule.tokens(step)

    @property
    def faults(self) -> tuple[EventRecord, ...]:
        """Return the events that do not occur in every run."""
        return tuple(event for event in self.events if event.kind not in ("start", "save"))

    @cached_property
    def edges(self) -> tuple[int, ...]:
        """Return the steps between which the train records' times were measured: one more than there are records."""
        if not self.train:
            return (0,)
        first = self.train[0].step
        earlier = (record.step for record in self.validation if record.step < first)
        return (max(0, first - self.config.metrics.every, *earlier), *(record.step for record in self.train))

    @property
    def resume_command(self) -> str:
        """Return the command that continues the run."""
        return resume_command(self.folder, self.config, self.last_step)


def resume_command(folder: Path, config: RunConfig, last_step: int) -> str:
    """Return the command that continues the run in a folder; a run that has taken all its steps needs more of them."""
    words = ["shardwright", "train", str(folder / RUN_FILE), "--resume"]
    if real_path(folder) != real_path(config.out):
        words += ["--set", f"out={real_path(folder)}"]
    if last_step >= config.steps:
        words += ["--set", f"steps={2 * config.steps}"]
    return shlex.join(words)


def read_run(run_dir: str | Path) -> RunRecord:
    """Read the folder of a run, which may still be running.

    Raises InputError for a folder that is not one of a run or has no record yet, with the files that it contains, and
    for damaged records, except a last line that was cut short.
    """
    folder = Path(run_dir)
    check_folder(folder)
    records = sorted(read_metrics(inside(folder, METRICS)), key=lambda record: record.step)
    config = load_kept(folder)
    if all(isinstance(record, StartRecord) for record in records):
        raise InputError(
            f"{folder / METRICS} has no logged step yet: the run is, or was stopped, before its first logged step "
            f"(metrics.every={config.metrics.every}); wait for it, or continue with "
            f"`shardwright train {folder / RUN_FILE} --resume`"
        )
    return RunRecord(
        folder=folder,
        config=config,
        run_file=visible(read_text(inside(folder, RUN_FILE)).replace("\r\n", "\n")),
        train=tuple({record.step: record for record in records if isinstance(record, TrainRecord)}.values()),
        validation=tuple(record for record in records if isinstance(record, EvaluationRecord)),
        starts=tuple(record for record in records if isinstance(record, StartRecord)),
        checkpoints=tuple(path.name for path in published(folder / CHECKPOINTS)),
        pipeline=read_pipeline(folder, config),
        events=tuple(read_events(folder)),
    )


def check_folder(folder: Path) -> None:
    """Raise InputError for a folder that is not one of a run, with the files that it contains."""
    if not folder.exists():
        runs = [path.parent.name for path in sorted(folder.parent.glob(f"*/{METRICS}"))]
        nearby = f"runs in {folder.parent}: {_some(runs)}" if runs else f"there is no run in {folder.parent} either"
        raise InputError(f"{folder}: no such folder; {nearby}")
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
