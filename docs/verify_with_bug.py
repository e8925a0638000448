"""Run `shardwright verify` on Shardwright with a known bug put into it, to see what it reports.

    python -m docs.verify_with_bug examples/debug.toml --set layout.tp=2 --steps 1

Run it in the root of the repository; it needs no test tools. The arguments are those of the verb. The bug is number 11
of those that tests/training/test_mutations.py injects: under sequence parallelism each rank of tp computes the
gradients of the norms from its own token shard, and the ranks do not sum them. Nothing crashes, and the loss of the
first step is right.
"""

import sys
from functools import partial

from tests.training.worlds import NO_SUM_OF_COPIES, train_mutated

from shardwright import verification
from shardwright.cli.main import app


def main() -> None:
    verification.Verifier = partial(verification.Verifier, partial(train_mutated, (NO_SUM_OF_COPIES,)))  # type: ignore[assignment, misc]
    app(["verify", *sys.argv[1:]])


if __name__ == "__main__":
    main()
