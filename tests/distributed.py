"""The multi-process helper of the tests: shardwright's own, from a server that has imported the tests' modules too."""

from shardwright.verification.ranks import context, run_ranks

__all__ = ["context", "run_ranks"]

context.set_forkserver_preload(["shardwright.verification.preload", "tests.preload"])
