"""Writers of records to files of the run: metrics.jsonl and TensorBoard's events."""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path

from shardwright.runs.folder import TENSORBOARD
from shardwright.runs.records import Record, whole_lines
from shardwright.system.errors import NO_ROOM, InputError, ShardwrightError, without_secrets
from shardwright.system.files import parse_json, write_whole
from shardwright.system.units import MiB
from shardwright.training.writers.writer import MetricsWriter, WriterKind, numbers_of


class JsonLines(MetricsWriter):
    """OUT/metrics.jsonl. A resumed run drops the lines of steps that it takes again. Lines that a full disk rejects
    are written together with the next line that fits."""

    def __init__(self, path: Path, resumed_step: int) -> None:
        self.path = path
        self._unwritten = b""
        self._file = self._open_from(resumed_step)

    def _open_from(self, step: int) -> FileIO:
        try:
            keep = [line for line in whole_lines(self.path) if _stays(parse_json(line), step)]
        except (ValueError, TypeError, KeyError) as error:
            raise InputError(f"{self.path} is damaged ({error}); mend or remove it, and resume again") from None
        if step == 0:  # a run from step 0 also evaluates before its first step
            keep = []
        write_whole(self.path, "".join(line + "\n" for line in keep).encode())
        return self.path.open("ab", buffering=0)

    def rewind(self, step: int) -> None:
        self.close()
        self._file = self._open_from(step)

    def write(self, record: Record) -> None:
        if not os.fstat(self._file.fileno()).st_nlink:
            raise ShardwrightError(
                f"{self.path} was deleted during the run, perhaps with its folder; the run ends, since "
                f"its next records would be lost"
            )
        self._unwritten += without_secrets(json.dumps(record)).encode() + b"\n"
        try:
            self._write()
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise

    def _write(self) -> None:
        try:
            while self._unwritten:
                self._unwritten = self._unwritten[self._file.write(self._unwritten) :]
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from None

    def close(self) -> None:
        with self._file:
            self._write()


def _stays(record: Record, resumed_step: int) -> bool:
    """Return whether a run that resumes after `resumed_step` steps keeps a record. It takes later steps again."""
    return bool(record["step"] < resumed_step + (record["kind"] != "run"))


class TensorBoard(MetricsWriter):
    """Events in OUT/tensorboard. After an error of the disk, the next record that fits starts a new file."""

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard.writer import SummaryWriter

        self._folder, self._begin = folder, lambda: SummaryWriter(str(folder))
        self._writer: SummaryWriter | None = self._begin()

    def write(self, record: Record) -> None:
        if self._writer is None and shutil.disk_usage(self._folder).free < MiB:
            return
        with self._reopened_after_error():
            self._writer = self._writer or self._begin()
            for key, value in numbers_of(record).items():
                self._writer.add_scalar(f"{record['kind']}/{key}", value, record["step"])

    @contextmanager
    def _reopened_after_error(self) -> Iterator[None]:
        try:
            yield
        except OSError:  # an error of the writer thread, which has then ended
            self._writer = None
            raise

    def close(self) -> None:
        if self._writer is not None:
            with self._reopened_after_error():
                self._writer.close()


TENSORBOARD_WRITER = WriterKind(
    "TensorBoard",
    key="tensorboard",
    package="tensorboard",
    make=lambda config, first_step: TensorBoard(Path(config.out) / TENSORBOARD),
)
