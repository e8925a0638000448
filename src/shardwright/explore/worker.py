"""Searches in processes of their own, whose progress is polled; a search that no page polls ends."""

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from threading import Lock, Timer
from typing import Any

from shardwright.planner.search import begin_worker
from shardwright.system.errors import InputError

MOST = 2
"""Most searches at a time."""
UNPOLLED_S = 10.0
"""Time after the last poll after which a search ends, because its page is gone."""
LONGEST_S = 600.0
_CONTEXT = get_context("spawn")

Progress = Callable[[int, int], None]
Work = Callable[..., str]


@dataclass
class PageSearch:
    """A search: its process, the pipe from it, and its latest report. `result`: HTML, or None until it is done."""

    process: BaseProcess
    pipe: Connection
    started_s: float = field(default_factory=time.monotonic)
    polled_s: float = field(default_factory=time.monotonic)
    done: int = 0
    total: int = 0
    result: str | None = None
    problems: list[str] = field(default_factory=list)

    def receive(self) -> None:
        """Read the reports of the process."""
        try:
            while self.pipe.poll():
                kind, *values = self.pipe.recv()
                if kind == "progress":
                    self.done, self.total = values
                elif kind == "result":
                    self.result = values[0]
                else:
                    self.problems = list(values)
        except (EOFError, OSError):
            if self.result is None and not self.problems:
                self.problems = ["the process of the search has ended before its result; start the search again"]

    @property
    def running(self) -> bool:
        """Return whether neither a result nor a problem has arrived."""
        return self.result is None and not self.problems

    def end(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.join(5)
        self.pipe.close()


class PageSearches:
    """All searches of a server, by an id that cannot be guessed."""

    def __init__(self) -> None:
        self._searches: dict[str, PageSearch] = {}
        self._lock = Lock()

    def start(self, work: Work, *arguments: Any) -> str:
        """Start a search and return its id. `work(progress, *arguments)` returns HTML; it is pickled. Raises InputError
        if as many searches as possible are running."""
        with self._lock:
            self._end_unpolled()
            if sum(search.running for search in self._searches.values()) >= MOST:
                raise InputError(f"{MOST} searches are running, which is the most at a time; wait, or cancel one")
            ours, theirs = _CONTEXT.Pipe(duplex=False)
            # Not a daemon, because the search of a large cluster starts processes; begin_worker ends it with this one.
            process = _CONTEXT.Process(target=run, args=(theirs, work, arguments))
            process.start()
            theirs.close()
            name = secrets.token_urlsafe(16)
            self._searches[name] = PageSearch(process, ours)
        self._watch()
        return name

    def poll(self, name: str) -> dict[str, Any] | None:
        """Return the state of a search for its page; None if there is no such search."""
        with self._lock:
            search = self._searches.get(name)
            if search is None:
                return None
            search.polled_s = time.monotonic()
            search.receive()
            if not search.running:
                self._remove(name)
            return {"done": search.done, "of": search.total, "result": search.result, "problems": search.problems}

    def cancel(self, name: str) -> None:
        """End a search, if it is there."""
        with self._lock:
            self._remove(name)

    def close(self) -> None:
        """End all searches."""
        with self._lock:
            for name in [*self._searches]:
                self._remove(name)

    def _remove(self, name: str) -> None:
        if (search := self._searches.pop(name, None)) is not None:
            search.end()

    def _end_unpolled(self) -> None:
        now = time.monotonic()
        for name, search in [*self._searches.items()]:
            if now - search.polled_s > UNPOLLED_S or now - search.started_s > LONGEST_S:
                self._remove(name)

    def _watch(self) -> None:
        """End searches that no page polls, until there are no searches."""
        with self._lock:
            self._end_unpolled()
            if not self._searches:
                return
        timer = Timer(UNPOLLED_S / 4, self._watch)
        timer.daemon = True
        timer.start()


def run(pipe: Connection, work: Work, arguments: tuple[Any, ...]) -> None:
    """Run a search in this process, and send its progress and its result."""
    begin_worker()
    try:
        pipe.send(("result", work(lambda done, total: pipe.send(("progress", done, total)), *arguments)))
    except InputError as error:
        pipe.send(("problems", *error.problems))
    except Exception as error:
        pipe.send(("problems", f"the search failed: {type(error).__name__}: {error}"))
