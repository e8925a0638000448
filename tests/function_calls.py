"""The work of a function in a number that does not depend on the machine."""

import cProfile
from collections.abc import Callable


def calls(function: Callable[[], object]) -> int:
    """Function calls that it takes, those of numpy too. An EPYC of 2.6 GHz makes 4 million of Python's own a second."""
    profile = cProfile.Profile()
    profile.runcall(function)
    return sum(each.callcount for each in profile.getstats())
