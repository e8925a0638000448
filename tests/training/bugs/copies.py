"""Bugs of the comparison of copies: what is the same is compared with itself, or is not compared."""

from tests.training import test_copies
from tests.training.bugs.bug import AnyBug, UnitBug

_SEEN = "tests/training/test_copies.py:test_a_bug_is_seen"

REDUCTION: dict[str, AnyBug] = {
    name: UnitBug(mutation, _SEEN, put_in_there=True) for name, (_, mutation) in test_copies.BUGS.items()
}
