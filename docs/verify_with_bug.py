"""Run `shardwright verify` on Shardwright with a bug put into it, to see what it says of one.

    python -m docs.verify_with_bug examples/debug.toml --set layout.tp=2 --steps 1

To be run in the root of the repository; the arguments are those of the verb. The bug is number 11 of those that
tests/training/test_mutations.py injects: under sequence parallelism the norms of a rank see its token shard alone, and
the parts of their gradients are not added up. Nothing crashes, and the loss of the first step is right.
"""

import sys
from functools import partial

from tests.training.test_mutations import BUGS
from tests.training.worlds import train_mutated

from shardwright import verify
from shardwright.cli.main import app

BUG = BUGS["11: gradients of norms on token shards are not summed"]


def main() -> None:
    verify.Verifier = partial(verify.Verifier, partial(train_mutated, (BUG.mutation,)))  # type: ignore[assignment, misc]
    app(["verify", *sys.argv[1:]])


if __name__ == "__main__":
    main()
