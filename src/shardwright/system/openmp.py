"""How long an idle OpenMP thread spins before it sleeps. OpenMP reads the setting when PyTorch is imported."""

import os

SPINS = 3000
"""Loop iterations that an idle thread spins before it sleeps, about 0.1 ms. Without spinning, a step of one process
with two threads takes 20 % longer. With OpenMP's default, a step takes twice as long on loaded cores."""
_SPINS = "GOMP_SPINCOUNT"


def brief_waiting() -> dict[str, str]:
    """Return the environment variables that make threads spin `SPINS` iterations; empty if they are already set."""
    return {} if {_SPINS, "OMP_WAIT_POLICY"} & {*os.environ} else {_SPINS: str(SPINS)}
