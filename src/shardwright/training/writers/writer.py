"""The interface of a writer of records, its row in the table of writers, and how its failures are kept from the run."""

import importlib
import importlib.util
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

from shardwright.config import RunConfig
from shardwright.runs.records import Record
from shardwright.system.errors import without_secrets

QUEUED = 1024
"""Maximum number of records that wait for a service; a run logs far more slowly than a service answers."""
CLOSE_S = 10.0
"""How long the end of a run waits for a service to take the last records, in seconds."""
IMPORT_S = 120.0
"""How long the end of a short run waits for the import of a service's library, in seconds: on a busy machine MLflow's
takes longer than some runs."""


class StepSpan(NamedTuple):
    """A phase of step number `step`, counted from 1, on a rank: its name, start and end in seconds since the epoch.
    `evaluation` and `checkpoint` follow the step of their number."""

    step: int
    phase: str
    start_s: float
    end_s: float
    rank: int = 0


class MetricsWriter:
    """Writes the records of a run to one destination. A method that is not overridden does nothing."""

    def write(self, record: Record) -> None:
        """Write one record: `step`, `kind` (run, train, evaluation or checkpoint) and its values; None means
        unknown."""

    def trace(self, spans: Sequence[StepSpan]) -> None:
        """Write the phases of the steps since the last call. Called only if the writer's row has `traces`."""

    def rewind(self, step: int) -> None:
        """Discard records after `step` steps where possible, because the run takes those steps again."""

    def end(self, step: int) -> None:
        """Take note that the run ends without an error after `step` steps: fewer than its steps if it was asked to
        stop. Called before `close`, and not called if the run fails."""

    def close(self) -> None:
        """Flush and close. No record follows."""


@dataclass(frozen=True)
class WriterKind:
    """A row of the table of optional writers.

    `name`: in messages. `key`: the key of [metrics] that requests the writer. `package`: the Python package that it
    needs; `install`: what pip installs for it, if the name differs. `make`: opens the writer of a run after a number of
    steps. `problems`: what can be checked before the run starts. `remote`: `make` and the methods wait for a server, so
    a thread calls them. `traces`: the writer takes spans. `record_failure`: reports to the destination that the run has
    failed, without rank 0, which may have been killed.
    """

    name: str
    key: str
    package: str
    make: Callable[[RunConfig, int], MetricsWriter]
    install: str | None = None
    problems: Callable[[RunConfig], list[str]] = lambda config: []
    remote: bool = False
    traces: bool = False
    record_failure: Callable[[RunConfig], None] = lambda config: None

    def requested(self, config: RunConfig) -> bool:
        """Return whether a run file requests this writer."""
        return getattr(config.metrics, self.key) not in (None, False, "")

    def missing(self) -> str | None:
        """Return a problem with the command that mends it if the package is not installed, otherwise None."""
        try:
            installed = importlib.util.find_spec(self.package) is not None
        except (ModuleNotFoundError, ValueError):  # the parent of a dotted name; a package replaced by None
            installed = False
        if installed:
            return None
        return f"[metrics] asks for {self.name}, which is not installed: pip install {self.install or self.package}"


class OptionalWriter(MetricsWriter):
    """A writer whose failures do not end the run: records that it does not take are dropped, and the first failure is
    kept for `take_problem`.

    A remote writer is opened and called by a thread, so that a server that does not answer does not delay a step. It is
    opened again at each record until a server answers. Other writers are opened once.
    """

    def __init__(self, kind: WriterKind, config: RunConfig, first_step: int) -> None:
        self.kind = kind
        self._make = lambda: kind.make(config, first_step)
        self._writer: MetricsWriter | None = None
        self._problem: str | None = None
        self._failed = self._closing = False
        if kind.remote:
            self._queue: queue.Queue[Callable[[MetricsWriter], None] | None] = queue.Queue(QUEUED)
            self._imported = threading.Event()
            self._thread = threading.Thread(target=self._work, name=f"shardwright-{kind.key}", daemon=True)
            self._thread.start()
        else:
            self._attempt(lambda writer: None)

    def write(self, record: Record) -> None:
        self._do(lambda writer: writer.write(record))

    def trace(self, spans: Sequence[StepSpan]) -> None:
        self._do(lambda writer: writer.trace(spans))

    def rewind(self, step: int) -> None:
        self._do(lambda writer: writer.rewind(step))

    def end(self, step: int) -> None:
        self._do(lambda writer: writer.end(step))

    def close(self) -> None:
        self._closing = True
        if not self.kind.remote:
            self._do(lambda writer: writer.close())
            return
        self._imported.wait(IMPORT_S)
        try:
            self._queue.put(lambda writer: writer.close(), timeout=CLOSE_S)
            self._queue.put(None, timeout=CLOSE_S)
        except queue.Full:
            self._note("takes no more records")
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            self._note(f"has not answered for {CLOSE_S:g} s")

    def take_problem(self) -> str | None:
        """Return the first failure, once, as a sentence; None before it and afterwards."""
        problem, self._problem = self._problem, None
        return problem

    def _do(self, act: Callable[[MetricsWriter], None]) -> None:
        if not self.kind.remote:
            if self._writer is not None:
                self._attempt(act)
            return
        try:
            self._queue.put_nowait(act)
        except queue.Full:
            self._note(f"has not answered for {QUEUED} records")

    def _work(self) -> None:
        with suppress(Exception):  # the writer's constructor imports it again, and its error is reported
            importlib.import_module(self.kind.package)
        self._imported.set()
        while (act := self._queue.get()) is not None:
            if not (self._attempt(act) or not self._closing):
                return  # the server is away, and the run waits for this thread

    def _attempt(self, act: Callable[[MetricsWriter], None]) -> bool:
        """Return whether the writer, which is opened if needed, did `act`."""
        try:
            if self._writer is None:
                self._writer = self._make()
            act(self._writer)
        except (Exception, SystemExit) as error:  # libraries raise many types, and some end the process
            reason = " ".join(str(error).split())
            self._note(f"failed ({type(error).__name__}: {reason[:300]})" if reason else f"failed ({error!r})")
            return False
        return True

    def _note(self, what: str) -> None:
        if not self._failed:
            self._failed = True
            self._problem = without_secrets(
                f"metrics.{self.kind.key}: {self.kind.name} {what}; the run continues, {self.kind.name} may lack "
                f"records, which metrics.jsonl has, and later failures are not reported"
            )


def numbers_of(record: Record) -> dict[str, float]:
    """Return the single numbers of a record by name, and the numbers of a table as KEY/NAME; empty for a `run`
    record."""
    return {
        key if name is None else f"{key}/{name}": value
        for key, several in values_of(record)
        if not isinstance(record[key], list | tuple)
        for name, value in several.items()
        if key != "step"
    }


def values_of(record: Record) -> Iterator[tuple[str, dict[str | None, float]]]:
    """Yield each key of a record with its numbers: one, named None, or several, named after a source of data, a rank or
    a layer. Nothing for a `run` record."""
    if record["kind"] == "run":
        return
    for key, value in record.items():
        if isinstance(value, int | float):
            yield key, {None: value}
        elif isinstance(value, dict | list | tuple) and key != "tokens_by_expert":  # a table
            several = value if isinstance(value, dict) else dict(enumerate(value))
            yield key, {str(name): number for name, number in several.items() if isinstance(number, int | float)}
