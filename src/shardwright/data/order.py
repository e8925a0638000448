"""The order of samples: a keyed permutation, computed by index and never stored.

A Feistel network (Luby and Rackoff 1988) permutes the smallest power-of-four domain that contains range(n). An index
that lands outside of range(n) is mapped again until it lands inside (cycle walking, Black and Rogaway 2002), which
leaves a permutation of range(n). Any index costs the same, for any n, so a run over a billion samples starts at once,
and resumes from one integer. A handful of samples is sorted by hash instead: for these a network reaches too few of the
permutations, and walking takes many rounds.
"""

import hashlib
from dataclasses import dataclass

import numpy as np

ROUNDS = 8
HANDFUL = 64
LARGEST_N = 2**62


class Permutation:
    """A permutation of range(n) chosen by `key` (any integers); n from 1 to 2**62."""

    def __init__(self, n: int, key: tuple[int, ...]) -> None:
        assert 1 <= n <= LARGEST_N, n
        self.n = n
        self._sorted = np.argsort(keyed_fractions(key, np.arange(n)), kind="stable") if n <= HANDFUL else None
        self._half_bits = np.uint64(((n - 1).bit_length() + 1) // 2)
        self._half_mask = np.uint64((1 << int(self._half_bits)) - 1)
        digest = hashlib.blake2b(repr(key).encode(), digest_size=8 * ROUNDS).digest()
        self._round_keys = np.frombuffer(digest, dtype="<u8").astype(np.uint64)

    def __call__(self, indices: np.ndarray) -> np.ndarray:
        """Return the image of each of `indices` (integers in range(n), any shape); int64 of the same shape."""
        start = np.asarray(indices)
        assert start.size == 0 or (start.min() >= 0 and start.max() < self.n), "an index outside of range(n)"
        if self._sorted is not None:
            return self._sorted[start]
        places = self._shuffle_domain(start.astype(np.uint64).ravel())
        while (outside := np.flatnonzero(places >= self.n)).size:
            places[outside] = self._shuffle_domain(places[outside])
        return places.astype(np.int64).reshape(start.shape)

    def _shuffle_domain(self, x: np.ndarray) -> np.ndarray:
        left, right = x >> self._half_bits, x & self._half_mask
        for key in self._round_keys:
            left, right = right, left ^ (_mix(right ^ key) & self._half_mask)
        return (left << self._half_bits) | right


@dataclass(frozen=True)
class SampleOrder:
    """The order in which a run with `seed` sees the n samples of a source, epoch after epoch, each in its own order: a
    pure function of (seed, index of the source in the run, index in the source)."""

    seed: int
    n: int
    source: int = 0

    def __call__(self, global_index: np.ndarray) -> np.ndarray:
        """Return the sample in range(n) at each running index g >= 0: perm(seed, epoch, source)(g mod n), where
        epoch = g // n."""
        g = np.asarray(global_index, dtype=np.int64)
        epochs, positions = g // self.n, g % self.n
        samples = np.empty_like(positions)
        for epoch in np.unique(epochs):
            selected = epochs == epoch
            key = (self.seed, int(epoch), self.source)[: 3 if self.source else 2]
            samples[selected] = Permutation(self.n, key)(positions[selected])
        return samples

    ended = False
    """No sample is deleted."""

    def grow(self) -> None:
        """Do nothing: no samples are added."""

    @property
    def published(self) -> int:
        """All samples can be taken."""
        return LARGEST_N

    @property
    def numbers(self) -> int:
        """Return how many numbers the samples of this source have among the samples of all sources."""
        return self.n


def keyed_fractions(key: tuple[int, ...], indices: np.ndarray) -> np.ndarray:
    """Return a number in [0, 1) for each index, fixed by the key; used for choices by document number."""
    start = np.uint64(int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=8).digest(), "little"))
    mixed = _mix(_mix(np.atleast_1d(np.asarray(indices)).astype(np.uint64) ^ start))
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(x: np.ndarray) -> np.ndarray:
    """Apply the output function of SplitMix64 (Steele, Lea and Flood 2014): every bit depends on all."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
