"""Bugs of what a checkpoint keeps of a fault that a run has handled, which show after a resume."""

from tests.training import test_resume_after_fault
from tests.training.bugs.bug import AnyBug, UnitBug

_SEEN = "tests/training/test_resume_after_fault.py:test_a_bug_is_seen"
RESUME: dict[str, AnyBug] = {
    name: UnitBug(mutation, _SEEN, put_in_there=True) for name, (_, mutation, _) in test_resume_after_fault.BUGS.items()
}
