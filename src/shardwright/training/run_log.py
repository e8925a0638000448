"""The output of a run, written by rank 0: the screen (a live progress bar on a terminal, otherwise plain lines), the
metric writers, and events.jsonl."""

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, cast

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from shardwright.config import RunConfig
from shardwright.runs.records import AnyRecord, EventKind, EventRecord, Record, SamplePlace, append_event, as_record
from shardwright.system.console import LossyStream, PlainConsole, visible
from shardwright.system.errors import cleaning_up
from shardwright.system.units import format_bytes, format_count, format_seconds
from shardwright.training.writers.table import open_tracers, open_writers
from shardwright.training.writers.writer import MetricsWriter, OptionalWriter, StepSpan


class Screen(Progress, MetricsWriter):
    """Prints records and remarks of a run on rank 0; `quiet` prints nothing."""

    def __init__(self, steps: int, first_step: int, rank: int, quiet: bool = False) -> None:
        silent = rank != 0 or quiet
        super().__init__(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
            console=PlainConsole(
                file=cast(IO[str], LossyStream("stdout")), highlight=False, soft_wrap=True, emoji=False, quiet=silent
            ),
            disable=silent or not sys.stdout.isatty(),
        )
        self.steps = steps
        self._first_step, self._began_s = first_step, time.monotonic()
        self._bar = self.add_task("training", total=steps, completed=first_step, note="")

    def write(self, record: Record) -> None:
        """Print one record as a line, above the bar if there is one."""
        if record["kind"] not in ("train", "evaluation"):
            return
        text = line(record, self.steps)
        if record["kind"] == "train" and record["step"] < self.steps:
            text += f" | ETA {format_seconds(self._left_s(record['step']))}"
        self.say(text)
        if record["kind"] == "train":
            self.update(self._bar, note=f"loss {record['loss']:.3f}")

    def _left_s(self, step: int) -> float:
        """Return the seconds until the last step at the mean rate since the start, including evaluations and saves."""
        return (time.monotonic() - self._began_s) / (step - self._first_step) * (self.steps - step)

    def rewind(self, step: int) -> None:
        """Set the bar back to `step` steps."""
        self.show_step(step)

    def show_step(self, step: int) -> None:
        """Set the bar to `step` completed steps."""
        self.update(self._bar, completed=step)

    def say(self, text: str) -> None:
        """Print a remark."""
        self.console.print(text, markup=False)


class RunLog:
    """The screen and the files of one run. On ranks other than 0, each method does nothing, except that spans are sent
    with metrics.otlp_ranks="all"."""

    def __init__(self, config: RunConfig, rank: int, quiet: bool, first_step: int) -> None:
        self._out, self._rank = Path(config.out), rank
        self.screen = Screen(config.steps, first_step, rank, quiet)
        self._writers: list[MetricsWriter] = (
            [self.screen, *open_writers(config, first_step)] if rank == 0 else [*open_tracers(config, first_step)]
        )
        self._step = first_step
        """The step of the last record."""

    @property
    def writes(self) -> bool:
        """Return whether this rank writes."""
        return self._rank == 0

    @property
    def rank(self) -> int:
        """The rank that this log is of."""
        return self._rank

    def say(self, text: str) -> None:
        """Print a remark."""
        self.screen.say(text)

    def event(
        self, kind: EventKind, step: int, text: str, rank: int | None = None, samples: Sequence[SamplePlace] = ()
    ) -> None:
        """Append an event that every rank knows of to events.jsonl."""
        if self.writes:
            append_event(self._out, EventRecord(kind, step, text, rank, samples=tuple(samples)))

    def tell(
        self, kind: EventKind, step: int, text: str, rank: int | None = None, samples: Sequence[SamplePlace] = ()
    ) -> None:
        """Print an event and append it to events.jsonl."""
        self.say(text)
        self.event(kind, step, text, rank, samples)

    def write(self, record: AnyRecord, more: Record | None = None) -> None:
        """Write a record with every writer. `more`: user-defined numbers."""
        line = as_record(record) | (more or {})
        for writer in self._writers:
            writer.write(line)
        self._report_problems(line["step"])

    def rewind(self, step: int) -> None:
        """Discard the records after `step` steps in writers that can, because the run takes those steps again."""
        for writer in self._writers:
            writer.rewind(step)

    @property
    def traces(self) -> bool:
        """Return whether a writer takes spans."""
        return any(writer.kind.traces for writer in self._optional)

    def trace(self, spans: Sequence[StepSpan]) -> None:
        """Pass the phases of the last steps to every writer that takes spans."""
        for writer in self._optional:
            if writer.kind.traces:
                writer.trace(spans)

    def end(self, step: int) -> None:
        """Report to every writer that the run ends without an error after `step` steps."""
        for writer in self._writers:
            writer.end(step)

    def close(self) -> None:
        """Close every writer."""
        with cleaning_up(*(writer.close for writer in self._writers), lambda: self._report_problems(self._step)):
            pass

    @property
    def _optional(self) -> list[OptionalWriter]:
        return [writer for writer in self._writers if isinstance(writer, OptionalWriter)]

    def _report_problems(self, step: int) -> None:
        """Print the first failure of each optional writer after `step` steps."""
        self._step = step
        for writer in self._optional:
            if (problem := writer.take_problem()) is not None:
                self.tell("metrics", step, problem)
                if not self.writes:  # the log file of the rank
                    print(visible(problem), file=LossyStream("stderr"), flush=True)


def line(record: Record, steps: int) -> str:
    """Format a record as one line of text."""
    ahead = [f"mtp {record['mtp_loss']:.4f}"] if "mtp_loss" in record else []
    if "margin" in record:
        ahead += [f"margin {record['margin']:.4f}", f"accuracy {record['accuracy']:.1%}"]
    if record["kind"] == "evaluation":
        sources = [f"{name} {loss:.4f}" for name, loss in (record.get("sources") or {}).items()]
        loss = f"step {record['step']:>5}/{steps} | validation loss {record['loss']:.4f}"
        average = [f"of the average {record['average_loss']:.4f}"] if "average_loss" in record else []
        return " | ".join((loss, *average, *ahead, *([", ".join(sources)] if sources else [])))
    mfu = "n/a" if record["mfu"] is None else f"{record['mfu']:.1%}"
    load = (f"load {record['load_max_over_mean']:.2f}",) if "load_max_over_mean" in record else ()
    epochs = [f"{name} {done:.3g}" for name, done in (record.get("epochs") or {}).items()]
    scale = [f"loss scale {record['loss_scale']:g}"] if "loss_scale" in record else []
    slowest = []
    if "slowest_rank" in record:
        slowest = [f"rank {record['slowest_rank']} costs {format_seconds(max(record['slowest_costs_s'], 0.0))}"]
    return " | ".join(
        (
            f"step {record['step']:>5}/{steps}",
            f"loss {record['loss']:.4f}",
            *ahead,
            *load,
            *([f"epochs {', '.join(epochs)}"] if epochs else []),
            f"grad_norm {record['grad_norm']:.3g}",
            f"lr {record['lr']:.2e}",
            *scale,
            f"{format_count(record['tokens_per_s'])} tok/s, {format_count(record['tokens_per_s_per_device'])}/device",
            f"{record['tflops_per_s_per_device']:.3g} TFLOP/s, MFU {mfu}",
            format_bytes(record["memory_bytes"]),
            f"data {format_seconds(record['data_s'])}, fwd+bwd {format_seconds(record['forward_backward_s'])}, "
            f"opt {format_seconds(record['optimizer_s'])}",
            *slowest,
        )
    )
