"""How far the ranks of a comparison are, told from the files that they have written."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from shardwright.units import format_seconds

Tell = Callable[[str], None]

_EVERY_S = 1.0


@contextmanager
def told(tell: Tell, what: str, folder: Path, total: int) -> Iterator[None]:
    """While inside, call `tell` each second with how many of the `total` records of a run are written to `folder`, and
    about how long the others take."""
    ended = threading.Event()

    def watch() -> None:
        began_s = time.monotonic()
        while not ended.wait(_EVERY_S):
            done = len(list(folder.glob("*-0-0.safetensors")))  # the first file of rank 0 of each record
            left_s = (time.monotonic() - began_s) / max(done, 1) * (total - done)
            left = f", about {format_seconds(left_s)} left" if done else ""
            tell(f"{what}: {done} of {total} records{left}")

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
