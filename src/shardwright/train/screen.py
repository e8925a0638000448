"""What rank 0 shows while a run goes on: a live bar on a terminal, plain lines anywhere else, nothing elsewhere."""

import sys
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from shardwright.run_folder import Record
from shardwright.train.metrics import line


class Screen:
    """Records and remarks of a run, printed by rank 0 alone; `quiet` prints nothing."""

    def __init__(self, steps: int, first_step: int, rank: int, quiet: bool = False) -> None:
        self.steps = steps
        self._silent = rank != 0 or quiet
        self._console = Console(highlight=False, soft_wrap=True)
        self._progress: Progress | None = None
        if not self._silent and sys.stdout.isatty():
            self._progress = Progress(
                TextColumn("training"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[note]}"),
                console=self._console,
            )
            self._task = self._progress.add_task("training", total=steps, completed=first_step, note="")

    def __enter__(self) -> Self:
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._progress is not None:
            self._progress.stop()

    def show(self, record: Record) -> None:
        """One record as a line, above the bar where there is one."""
        self.say(line(record, self.steps))
        if self._progress is not None and record["kind"] == "train":
            self._progress.update(self._task, note=f"loss {record['loss']:.3f}")

    def advance(self, step: int) -> None:
        """`step` steps are done."""
        if self._progress is not None:
            self._progress.update(self._task, completed=step)

    def say(self, text: str) -> None:
        """A remark."""
        if self._silent:
            return
        if self._progress is not None:
            self._progress.console.print(text, markup=False)
        else:
            print(text, flush=True)
