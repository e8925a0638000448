"""The order of the samples of a source whose shards may still be published: shard after shard, each permuted.

The samples of a shard come before the samples of the next shard, so the first samples of a run are the same whether
the source was complete or had only these shards when the run started.
"""

import numpy as np

from shardwright.data.order import LARGEST_N, Permutation
from shardwright.data.samples import SplitSamples

MOST_SAMPLES = 2**40
"""How many numbers the samples of a source have among the samples of all sources, however many are published."""


class ShardOrder:
    """The order in which a run with `seed` sees the samples of source number `source`: a pure function of (seed,
    source, published shards, index). A sample belongs to the shard that has its last token."""

    numbers = MOST_SAMPLES

    def __init__(self, seed: int, samples: SplitSamples, source: int = 0) -> None:
        self.seed, self.samples, self.source = seed, samples, source
        self._ends = np.array(samples.shard_ends(), np.int64)
        self._complete = samples.split.manifest.unfinished is None

    @property
    def n(self) -> int:
        """The samples of the shards that are published."""
        return int(self._ends[-1])

    @property
    def published(self) -> int:
        """The samples, counted over epochs, that can be taken: the first epoch until all are published, and if some
        are deleted."""
        return LARGEST_N if self._complete and not self.samples.split.n_deleted else self.n

    @property
    def ended(self) -> bool:
        """Return whether only one epoch can be taken, because shards are deleted and no other follows."""
        return self._complete and self.published == self.n

    def first_shard(self, position: int) -> int:
        """Return the first of the published shards that the samples from number `position` of this order on need."""
        if position >= self.n:  # of the next epoch, or of a shard that is not published, and may start in the last
            return 0 if self._complete else len(self._ends) - 1
        shard = int(np.searchsorted(self._ends, position, side="right"))
        first = int(self._ends[shard - 1]) if shard else 0
        return self.samples.split.shard_at(self.samples.span(first)[0])

    def grow(self) -> None:
        """Read the manifest again. Raises DataError."""
        if not self._complete:
            self.samples.split.grow()  # False if another order of the same split was first
            self._ends = np.array(self.samples.shard_ends(), np.int64)
            self._complete = self.samples.split.manifest.unfinished is None

    def __call__(self, global_index: np.ndarray) -> np.ndarray:
        """Return the sample at each running index g in [0, published)."""
        ends, g = self._ends, np.asarray(global_index, np.int64)
        epochs, positions = g // ends[-1], g % ends[-1]
        assert self._complete or not epochs.any(), (g.max(), ends[-1])
        samples = np.empty_like(positions)
        shards = np.searchsorted(ends, positions, side="right")
        for epoch, shard in np.unique(np.stack([epochs, shards], -1).reshape(-1, 2), axis=0):
            selected = (epochs == epoch) & (shards == shard)
            first = int(ends[shard - 1]) if shard else 0
            order = Permutation(int(ends[shard]) - first, (self.seed, int(epoch), self.source, int(shard)))
            samples[selected] = first + order(positions[selected] - first)
        return samples
