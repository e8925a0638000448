"""The multi-process helper of the tests: shardwright's own, from a server that has imported the tests' modules too."""

from shardwright.verify.ranks import context, run_ranks

__all__ = ["context", "run_ranks"]

context.set_forkserver_preload(["shardwright.verify.preload", "tests.preload"])
