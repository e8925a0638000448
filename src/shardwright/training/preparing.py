"""The background processes of a run that publish the shards of its sources: `shardwright data prepare --publish`."""

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from shardwright.config import RunConfig
from shardwright.config.mixture import sources_of
from shardwright.data.publication import TRAINED
from shardwright.data.token_manifest import MANIFEST, DataManifest
from shardwright.runs.folder import LOGS
from shardwright.system.errors import DataError
from shardwright.system.files import read_bytes, write_whole
from shardwright.system.owner import problem_of_owner

POLL_S = 0.2
MOST_RESTARTS = 3
"""How often a prepare that was killed is started again before it has published another shard."""


@contextmanager
def preparing(config: RunConfig, starts: bool, say: Callable[[str], None]) -> Iterator[None]:
    """Publish the sources of a run that have `prepare`, during the block, which starts when each has a shard.

    `starts`: whether this process starts the prepares; otherwise it waits for another rank's. `say`: prints a remark. A
    prepare that was killed is started again. Prepares that still run are ended after the block; the next run
    continues them. Raises DataError with the reason of a prepare that fails before its first shard, and if no shard is
    published within `data.wait_s`. `prepare_failure` returns the reason of a later failure.
    """
    with ExitStack() as stack:
        logs, kept = Path(config.out) / LOGS, []
        if config.data.keep_gib is not None:
            kept = ["--keep-gib", str(config.data.keep_gib)]
        running = [
            stack.enter_context(
                _Prepare(source.prepare + kept, Path(source.path), logs / f"prepare-{number}.log", starts)
            )
            for number, source in enumerate(sources_of(config.data))
            if source.prepare
        ]
        for prepare in running:
            prepare.wait_for_shard(say, config.data.wait_s)
        yield


def prepare_failure(out: Path) -> str | None:
    """Return why a prepare of the run in the folder `out` failed, or None. Every process of the run can call it."""
    failures = sorted((out / LOGS).glob("prepare-*.failed"))
    return "; ".join(read_bytes(path).decode(errors="replace") for path in failures) or None


class _Prepare:
    """The prepare of one source, watched by a thread."""

    def __init__(self, arguments: list[str], out: Path, log: Path, starts: bool) -> None:
        self._command = [sys.executable, "-m", "shardwright", "data", "prepare", *arguments]
        self._command += ["--out", str(out), "--publish"]
        self._out, self._log, self._starts = out, log, starts
        self._failed = log.with_suffix(".failed")
        self._ending = threading.Event()
        self._lock = threading.Lock()
        """Held while a process is started or ended, so that none is started after the end of the block."""
        self._process: subprocess.Popen[bytes] | None = None
        self._thread: threading.Thread | None = None

    def __enter__(self) -> "_Prepare":
        if self._starts:
            self._log.parent.mkdir(parents=True, exist_ok=True)
            self._failed.unlink(missing_ok=True)
            self._log.unlink(missing_ok=True)
            (self._out / TRAINED).unlink(missing_ok=True)  # of an earlier run: this one may need more shards
            self._thread = threading.Thread(target=self._watch, name="shardwright-prepare", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._ending.set()
            if self._process is not None:
                with suppress(ProcessLookupError):
                    self._process.terminate()
        if self._thread is not None:
            self._thread.join()

    def wait_for_shard(self, say: Callable[[str], None], wait_s: float) -> None:
        """Return when a shard is published. Raises DataError if the prepare fails before, or after `wait_s` seconds in
        which this process has none running."""
        end_s = time.monotonic() + wait_s
        if not self._has_shard():
            say(f"waiting for the first shard of {self._out}: {self._log}")
        while not self._has_shard():
            if self._failed.exists():
                raise DataError(read_bytes(self._failed).decode(errors="replace"))
            if self._process is not None and self._process.poll() is None:  # watched: it publishes, or it fails
                end_s = time.monotonic() + wait_s
            if time.monotonic() >= end_s:
                owner = problem_of_owner(self._out)
                raise DataError(
                    f"{self._out} has no shard after data.wait_s={wait_s:g} s{f': {owner}' if owner else ''}; see "
                    f"{self._log}, or raise data.wait_s"
                )
            time.sleep(POLL_S)

    def _start(self) -> bool:
        """Start the prepare, unless the block has ended. Return whether it was started."""
        with self._lock:
            if self._ending.is_set():
                return False
            with self._log.open("ab") as log:
                self._process = subprocess.Popen(self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
            return True

    def _watch(self) -> None:
        # Another prepare, perhaps of a run that was killed, may still write the folder.
        while problem_of_owner(self._out) is not None:
            if self._ending.wait(POLL_S):
                return
        if self._complete():
            return
        restarts, published = 0, self._n_shards()
        while self._start():
            assert self._process is not None
            if (code := self._process.wait()) == 0 or self._ending.is_set():
                return
            restarts = 0 if self._n_shards() > published else restarts + 1
            published = self._n_shards()
            if code > 0 or restarts > MOST_RESTARTS:
                ended = f"was killed by signal {-code} {restarts} times" if code < 0 else f"ended with code {code}"
                reason = f"`data prepare` of {self._out} {ended}: {self._last_words()}"
                write_whole(self._failed, reason.encode())
                return

    def _last_words(self) -> str:
        lines = read_bytes(self._log).decode(errors="replace").strip().splitlines()
        return " ".join(lines[-3:]).removeprefix("error: ") if lines else "it printed nothing"

    def _n_shards(self) -> int:
        return len(DataManifest.read(self._out, check_files=False).splits["train"].shards) if self._has_shard() else 0

    def _has_shard(self) -> bool:
        return (self._out / MANIFEST).exists()

    def _complete(self) -> bool:
        return self._has_shard() and DataManifest.read(self._out, check_files=False).unfinished is None
