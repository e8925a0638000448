"""What a rank holds of activations as it runs its actions.

From the start of its F to the end of its I or B a microbatch is **in flight**: all activations of a stage are held.
From the end of I to the end of W it **waits**: what W multiplies gradients with is still there, the rest is let go.
With M_B and M_W the bytes of a microbatch in the two states, a rank needs M_B (in flight + M_W / M_B waiting).
Source: Qi et al., arXiv 2401.10241, section 2.3 and table 1. Left out: parameters, buffers of messages, and what one
action needs while it runs.
"""

from collections.abc import Iterable
from typing import NamedTuple

from shardwright.schedule.actions import Action

KEPT_FOR_WEIGHT = 3 / 8
"""M_W / M_B, the share of a microbatch's activations that is kept from I to W, where nothing else is known.

The paper counts M_B = (34 h + 5 a s) s b and M_W = 32 h s b bytes a layer, for b sequences of s tokens, a heads and
d_model h: 32 / (34 + 5 a s / h), which is 0.37 for its smallest model (a = 24, s = 1024, h = 2304). The term with a is
the attention matrix. Fused attention does not store it, and the share is then near 1: 32 / 34.
"""


class Held(NamedTuple):
    """What a rank holds from `time` on: microbatches in flight and waiting, each in one stage."""

    time: float
    in_flight: int
    waiting: int

    def memory(self, kept_for_weight: float) -> float:
        """In units of a microbatch in flight; `kept_for_weight`: that of one that waits."""
        return self.in_flight + kept_for_weight * self.waiting


def held(spans: Iterable[tuple[Action, float, float]]) -> list[Held]:
    """How what a rank holds changes. `spans`: its actions in order, with start and end in any unit."""
    curve = []
    in_flight = waiting = 0
    for action, start, end in spans:
        if action.op == "F":
            in_flight += 1
        elif action.op == "W":
            waiting -= 1
        else:
            in_flight -= 1
            waiting += action.op == "I"
        curve.append(Held(start if action.op == "F" else end, in_flight, waiting))
    return curve
