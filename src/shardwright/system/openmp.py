"""How long a thread of OpenMP waits awake for another one, which OpenMP reads as PyTorch is imported."""

import os

SPINS = 3000
"""Turns of the loop in which a thread waits before it sleeps, some 0.1 ms. Without waiting a step of one process with
two threads takes a fifth longer; as long as OpenMP has them wait it takes twice as long where other programs load the
cores."""
_SPINS = "GOMP_SPINCOUNT"


def brief_waiting() -> dict[str, str]:
    """What the environment lacks for threads to wait `SPINS` turns; nothing where it says how they wait."""
    return {} if {_SPINS, "OMP_WAIT_POLICY"} & {*os.environ} else {_SPINS: str(SPINS)}
