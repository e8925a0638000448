"""The multi-process helper of the tests: shardwright's own, from a server that has imported the tests' modules too."""

from shardwright.system.forks import context, preload
from shardwright.verification.ranks import run_ranks

__all__ = ["context", "run_ranks"]

preload("shardwright.verification.preload", "tests.preload")
