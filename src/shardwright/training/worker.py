"""One rank as a process of its own, as `launch.py` starts it.

    python -m shardwright.training.worker FD

FD is the descriptor of its connection to the launcher, which sends the run file and learns how the run ended.
"""

import faulthandler
import os
import sys
import tomllib
import traceback
from multiprocessing.connection import Connection

from shardwright.errors import ShardwrightError
from shardwright.processes import Link


def main() -> None:
    """The process of one rank; the exit code is that of its error."""
    link = Link(Connection(int(sys.argv[1])))
    faulthandler.enable()
    from shardwright.config import parse
    from shardwright.training.loop import run
    from shardwright.training.ranks import place_from_environment

    place = place_from_environment()
    assert place is not None
    try:
        run_toml, quiet = link.next_task()
        link.done(run(parse(tomllib.loads(run_toml)), place, quiet=quiet))
    except BaseException as error:
        traceback.print_exception(error)
        sys.stdout.flush()
        sys.stderr.flush()
        link.failed(error)
        # The other ranks may be waiting in a collective that this one never joins: no clean-up can succeed.
        os._exit(exit_code(error))


def exit_code(error: BaseException) -> int:
    """What a rank that fails leaves with."""
    return error.exit_code if isinstance(error, ShardwrightError) else ShardwrightError.exit_code


if __name__ == "__main__":
    main()
