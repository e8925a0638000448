"""Lengths of the answers of a step, and how they are packed into sequences for training.

An answer ends by itself or at the maximum, so its length is min(e^(mu + sigma z), maximum) with a standard normal z: a
log-normal distribution, cut off. Lengths of reasoning have such a tail (DAPO, arXiv 2503.14476, section 3.4; Kimi k1.5,
arXiv 2501.12599, section 2.6.2, which both handle answers that are cut off). Ignored: that the answers to one prompt
have similar lengths.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, log
from statistics import NormalDist

import numpy as np

from shardwright.cost.job import Floats
from shardwright.system.errors import InputError

SPREAD = 0.6
"""Standard deviation sigma of the logarithm of a length, if the 95th percentile is not given: assumed, not fitted."""
TAIL = 0.95
_WIDEST = NormalDist().inv_cdf(TAIL)
"""The sigma with the largest ratio of the 95th percentile to the mean, e^(sigma z - sigma^2 / 2) with z = sigma."""
_POINTS = 1000


@dataclass(frozen=True)
class AnswerLengths:
    """The distribution of the tokens of an answer: their `mean`, after the cut, and `maximum`; `spread`: sigma."""

    mean: float
    maximum: int
    spread: float = SPREAD

    @staticmethod
    def with_tail(mean: float, p95: float, maximum: int) -> "AnswerLengths":
        """Return the distribution with this mean and 95th percentile. Raises InputError if there is none."""
        low, high = 0.0, _WIDEST
        most = AnswerLengths(mean, maximum, high).percentile(TAIL)
        if not mean <= p95 <= most or p95 >= maximum:
            raise InputError(
                f"--output-p95 {p95:g}: with a mean of {mean:g} and a maximum of {maximum:,} tokens; valid: "
                f"{mean:g} to {min(most, maximum - 1):,.0f}, or leave it out"
            )
        for _ in range(40):
            middle = (low + high) / 2
            low, high = (low, middle) if AnswerLengths(mean, maximum, middle).percentile(TAIL) > p95 else (middle, high)
        return AnswerLengths(mean, maximum, (low + high) / 2)

    def percentile(self, share: float) -> float:
        """Return the length that `share` of the answers do not exceed."""
        return min(float(self.maximum), exp(self._location() + self.spread * NormalDist().inv_cdf(share)))

    @property
    def cut_share(self) -> float:
        """Return the share of answers that reach the maximum."""
        return 1 - NormalDist(self._location(), max(self.spread, 1e-9)).cdf(log(self.maximum))

    def _location(self) -> float:
        """Return mu, with which the mean after the cut is `mean`."""
        z = _normal(_POINTS)
        low, high = log(self.mean) - 3 * self.spread**2 - 1, log(self.maximum) + 12 * self.spread + 1
        for _ in range(60):
            middle = (low + high) / 2
            mean = np.minimum(np.exp(middle + self.spread * z), self.maximum).mean()
            low, high = (low, middle) if mean > self.mean else (middle, high)
        return (low + high) / 2

    def without_tail(self, n: int) -> "AnswerLengths | None":
        """Return the distribution if answers above the 95th percentile are cut, with a mean in whole tokens, as options
        of `plan rl` give it; None if they are cut already. `n`: answers from which the mean is taken."""
        tail = round(self.percentile(TAIL))
        maximum = tail + 1  # --output-p95 has to stay below it
        mean = round(float(np.minimum(self.lengths(n), maximum).mean()))
        if not 1 <= mean < tail or maximum >= self.maximum:
            return None
        if self.spread == SPREAD:
            return AnswerLengths(mean, maximum)
        try:
            return AnswerLengths.with_tail(mean, tail, maximum)
        except InputError:  # the rounded mean is too small for the widest distribution
            return None

    def lengths(self, n: int, seed: int = 0) -> list[int]:
        """Return the lengths of n answers in a random order: the quantiles at (i + 1/2) / n, each at least 1."""
        quantiles = np.minimum(np.exp(self._location() + self.spread * _normal(n)), self.maximum)
        shuffled = np.random.default_rng(seed).permutation(quantiles)
        return [max(1, round(float(length))) for length in shuffled]


def _normal(n: int) -> Floats:
    """Return the n quantiles of the standard normal distribution at (i + 1/2) / n."""
    return np.array([NormalDist().inv_cdf((i + 0.5) / n) for i in range(n)])


def packed(lengths: Sequence[int], seq_len: int) -> int:
    """Return the number of sequences of `seq_len` tokens into which texts are packed whole, the longest first, each
    into the fullest sequence with room (best-fit decreasing; Johnson, "Near-optimal bin packing algorithms", 1973)."""
    room: list[int] = []
    for length in sorted(lengths, reverse=True):
        at = bisect_left(room, length)
        left = seq_len - length if at == len(room) else room.pop(at) - length
        insort(room, left)
    return len(room)
