"""Reports how far the ranks of a comparison or a dry run are, counted from the files that they write."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from shardwright.units import format_seconds

Tell = Callable[[str], None]

_EVERY_S = 1.0


@contextmanager
def told(tell: Tell, what: str, count: Callable[[], int], total: int, unit: str = "records") -> Iterator[None]:
    """While inside, call `tell` each second with how many of the `total` records of a run `count` finds, and about how
    long the others take."""
    ended = threading.Event()

    def watch() -> None:
        began_s = time.monotonic()
        while not ended.wait(_EVERY_S):
            done = min(count(), total)
            left_s = (time.monotonic() - began_s) / max(done, 1) * (total - done)
            left = f", about {format_seconds(left_s)} left" if done else ""
            tell(f"{what}: {done:,} of {total:,} {unit}{left}")

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
