"""Reports the progress of the ranks of a comparison or a dry run, counted from the files that they write."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from shardwright.system.units import format_seconds

Tell = Callable[[str], None]

_EVERY_S = 1.0


@contextmanager
def report_progress(
    tell: Tell, what: str, count: Callable[[], int], total: int, unit: str = "records"
) -> Iterator[None]:
    """Call `tell` each second within a context, with the number of the run's `total` records that `count` returns, and
    about how long the others take."""
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
