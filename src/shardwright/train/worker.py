"""One rank as a process of its own, as `launch.py` starts it.

    python -m shardwright.train.worker RUN.toml REPORT_DIR PARENT_PID [quiet]

What goes wrong is written to REPORT_DIR/rank-N.json, where the parent finds it; nothing is printed. A rank
whose work is done leaves REPORT_DIR/rank-N.done.
"""

import faulthandler
import json
import os
import sys
import threading
import time
import traceback
from pathlib import Path

from shardwright.errors import InputError, ShardwrightError

_LOST_PEER = (
    "connection closed",
    "connection reset",
    "connection refused",
    "broken pipe",
    "timed out",
    "socket",
    "gloo",
)


def report(error: BaseException, rank: int) -> dict[str, object]:
    """What a parent needs to tell the user of a worker's error: whose, what, where, and whether it came
    first."""
    from torch.distributed import DistError

    text = str(error)
    lost_peer = isinstance(error, DistError) or (
        isinstance(error, RuntimeError)
        and not isinstance(error, ShardwrightError)
        and any(sign in text.lower() for sign in _LOST_PEER)
    )
    return {
        "rank": rank,
        "time": time.time(),
        "kind": type(error).__name__,
        "problems": error.problems if isinstance(error, InputError) else [text],
        "exit_code": error.exit_code if isinstance(error, ShardwrightError) else 3,
        "expected": isinstance(error, ShardwrightError),
        "lost_peer": lost_peer,
        "traceback": traceback.format_exception(error),
    }


def _die_with_parent(parent: int) -> None:
    """A worker whose parent was killed has no one to end it: leave as soon as the parent is another
    process."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def main() -> None:
    """The process of one rank; the exit code is that of its error."""
    run_file, report_dir, parent = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    _die_with_parent(parent)
    faulthandler.enable()
    from shardwright.config import load
    from shardwright.train.loop import run
    from shardwright.train.ranks import place_from_environment

    place = place_from_environment()
    assert place is not None
    try:
        run(load(run_file), place, quiet="quiet" in sys.argv[4:])
        (report_dir / f"rank-{place.rank}.done").touch()
    except BaseException as error:
        told = report(error, place.rank)
        # Under its name only when whole: the parent reads it while this process may still be writing.
        fresh = report_dir / f"rank-{place.rank}.tmp"
        fresh.write_text(json.dumps(told))
        fresh.rename(report_dir / f"rank-{place.rank}.json")
        traceback.print_exception(error)
        sys.stdout.flush()
        sys.stderr.flush()
        # The other ranks may be waiting in a collective that this one never joins: no clean-up can succeed.
        os._exit(int(str(told["exit_code"])))


if __name__ == "__main__":
    main()
