"""Activation memory of a rank while it runs its actions.

From the start of its F to the end of its I or B a micro-batch is **in flight**: the rank keeps all its activations.
From the end of I to the end of W it is **waiting**: the rank keeps the operands of the weight gradients and frees the
rest. With M_B and M_W the bytes of a micro-batch in the two states, a rank needs M_B (in flight + M_W / M_B waiting).
Source: Qi et al., arXiv 2401.10241, section 2.3 and table 1. Ignored: parameters, message buffers, and temporary
buffers of an action.
"""

from collections.abc import Iterable
from typing import NamedTuple

from shardwright.schedule.actions import Action

KEPT_FOR_WEIGHT = 3 / 8
"""M_W / M_B, the fraction of a micro-batch's activations that is kept from I to W; the default of a pipeline without a
model.

The paper counts M_B = (34 h + 5 a s) s b and M_W = 32 h s b bytes a layer, for b sequences of s tokens, a heads and
d_model h: 32 / (34 + 5 a s / h), which is 0.37 for its smallest model (a = 24, s = 1024, h = 2304). The term with a is
the attention matrix. Fused attention does not store it, and the fraction is then near 1: 32 / 34.
"""


class MicrobatchCounts(NamedTuple):
    """A rank's numbers of micro-batches in flight and waiting from `time` on; each is counted for one stage."""

    time: float
    in_flight: int
    waiting: int

    def memory(self, kept_for_weight: float) -> float:
        """Return activation memory in units of one micro-batch in flight; a waiting one counts `kept_for_weight`."""
        return self.in_flight + kept_for_weight * self.waiting


def count_microbatches(spans: Iterable[tuple[Action, float, float]]) -> list[MicrobatchCounts]:
    """Return the counts of a rank after each change. `spans`: its actions in order, with start and end in any unit."""
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
        curve.append(MicrobatchCounts(start if action.op == "F" else end, in_flight, waiting))
    return curve
