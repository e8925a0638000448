"""The order of samples of several sources: the source of each running sample, and its index in the source.

Both are pure functions of the running index, so a run over a mixture resumes from one integer, like a run over a single
folder, and every layout sees the same samples.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from shardwright.config.mixture import Mixture
from shardwright.data.order import SampleOrder
from shardwright.data.samples import Samples
from shardwright.data.shard_order import ShardOrder
from shardwright.data.shards import TokenSplit


@lru_cache(maxsize=32)
def interleaving(weights: tuple[int, ...]) -> np.ndarray:
    """Return the source of each of sum(weights) samples, after which the order of sources repeats; int64.

    Of the first n samples x_k are of source k, and |x_k - n w_k / W| <= 1 - 1 / (2K - 2), where W is the sum of the
    weights and K the number of positive weights (Tijdeman 1980, The chairman assignment problem, Discrete Math. 32):
    each sample comes from the source whose next sample is due soonest, among sources that would not get too many.
    """
    period, taking = sum(weights), [k for k, weight in enumerate(weights) if weight]
    if len(taking) == 1:
        return np.full(period, taking[0])
    parts = 2 * len(taking) - 2
    order, taken = np.empty(period, np.int64), [0] * len(weights)
    for n in range(1, period + 1):
        best, soonest = -1, 0
        for k in taking:
            behind = parts * (weights[k] * n - taken[k] * period)
            if behind >= period:  # it would not be ahead by more than 1 - 1 / parts of a sample
                until = (period * (parts - 1) - behind) // (parts * weights[k])  # samples that it can still wait
                if best < 0 or until < soonest:
                    best, soonest = k, until
        order[n - 1] = best
        taken[best] += 1
    return order


@lru_cache(maxsize=32)
def _counts_before(weights: tuple[int, ...]) -> np.ndarray:
    """Return the samples of each source before each place of the interleaving; int64 [sum(weights), sources]."""
    is_of = interleaving(weights)[:, None] == np.arange(len(weights))
    return np.cumsum(is_of, axis=0) - is_of


@dataclass(frozen=True)
class MixtureStage:
    """The samples from running index `from_sample` on, taken after `from_step` steps, in a ratio of `weights` by
    source."""

    from_step: int
    from_sample: int
    weights: tuple[int, ...]

    def counts(self, n: np.ndarray) -> np.ndarray:
        """Return the samples of each source among the stage's first `n` (integers, any shape); int64 [..., sources]."""
        before, n = _counts_before(self.weights), np.asarray(n, np.int64)
        return n[..., None] // len(before) * np.array(self.weights) + before[n % len(before)]

    def source_of(self, n: np.ndarray) -> np.ndarray:
        """Return the source of sample number `n` of the stage, from 0."""
        pattern = interleaving(self.weights)
        return pattern[n % len(pattern)]


def stages_of(
    mixtures: Sequence[Mixture],
    samples: Callable[[int, int], int],
    past: Sequence[MixtureStage] = (),
    step: int = 0,
    n_samples: int = 0,
) -> list[MixtureStage]:
    """Return the stages of a run that has taken `step` steps and `n_samples` samples, in the stages `past`. Later
    stages start at the first sample of their step, with `samples` (first, end) for the steps `first` to `end` - 1."""
    n_sources = len(mixtures[0].weights)
    begun = [replace(stage, weights=stage.weights + (0,) * (n_sources - len(stage.weights))) for stage in past]
    return begun + [
        MixtureStage(stage.from_step, n_samples + samples(step, stage.from_step), stage.weights)
        for stage in mixtures[len(past) :]
    ]


class MixtureOrder:
    """The order in which a run sees samples of several sources: a pure function of (orders of the sources, stages,
    index).

    Source k takes its samples in the order `orders[k]`, each once an epoch of that source, regardless of changes of the
    weights. `stages` start with one from sample 0.
    """

    def __init__(self, orders: Sequence[SampleOrder | ShardOrder], stages: Sequence[MixtureStage]) -> None:
        assert stages[0].from_sample == 0, stages
        self.orders, self.stages = tuple(orders), tuple(stages)
        self._begins = np.array([stage.from_sample for stage in stages])
        taken = [np.zeros(len(orders), np.int64)]
        for stage, end in zip(stages, self._begins[1:], strict=False):
            taken.append(taken[-1] + stage.counts(end - stage.from_sample))
        self._taken_before = taken

    @property
    def sizes(self) -> list[int]:
        """The number of samples of each source."""
        return [order.n for order in self.orders]

    def is_within(self, n_samples: int, published: Sequence[int] | None = None) -> bool:
        """Return whether the first `n_samples` of the run are among the first `published` samples of each source, by
        default the samples that this process can read."""
        most = [order.published for order in self.orders] if published is None else published
        return bool((self.taken(n_samples) <= np.array(most)).all())

    def taken(self, n_samples: int) -> np.ndarray:
        """Return the number of each source's samples among the run's first `n_samples`; int64 [sources]."""
        at = int(np.searchsorted(self._begins, n_samples, side="right")) - 1
        stage = self.stages[at]
        return self._taken_before[at] + stage.counts(np.array(n_samples - stage.from_sample))

    def epochs(self, n_samples: int) -> list[float]:
        """Return how often the first `n_samples` samples of the run went through each source."""
        return [float(taken / size) for taken, size in zip(self.taken(n_samples), self.sizes, strict=True)]

    def located(self, global_index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the source of each running index g >= 0, and the sample of that source; int64 of the same shape."""
        g = np.asarray(global_index, np.int64)
        sources, samples = np.empty_like(g), np.empty_like(g)
        at = np.searchsorted(self._begins, g, side="right") - 1
        for number in np.unique(at):
            selected, stage = at == number, self.stages[number]
            n = g[selected] - stage.from_sample
            sources[selected] = stage.source_of(n)
            counts = self._taken_before[number] + stage.counts(n)
            samples[selected] = np.take_along_axis(counts, sources[selected][:, None], axis=1)[:, 0]
        for source, order in enumerate(self.orders):
            selected = sources == source
            samples[selected] = order(samples[selected])
        return sources, samples

    def __call__(self, global_index: np.ndarray) -> np.ndarray:
        """Return the sample at each running index, as `MixedSamples` numbers them."""
        sources, samples = self.located(global_index)
        return np.concatenate([[0], np.cumsum([order.numbers for order in self.orders])])[sources] + samples


class MixedSamples:
    """The samples of several sources as one sequence of `Samples`, one source after another. `sizes`: how many samples
    of each source take part; by default all."""

    def __init__(self, sources: Sequence[Samples], sizes: Sequence[int] | None = None) -> None:
        self.sources, self.seq_len = tuple(sources), sources[0].seq_len
        self.sizes = [len(source) for source in sources] if sizes is None else list(sizes)
        self.padded = any(source.padded for source in sources)
        self.mirrored = any(source.mirrored for source in sources)
        self._ends = np.cumsum(self.sizes)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def located(self, i: int) -> tuple[Samples, int]:
        """Return the source that has sample i, and the sample's number there."""
        source = int(np.searchsorted(self._ends, i, side="right"))
        return self.sources[source], i - int(self._ends[source]) + self.sizes[source]

    def origin(self, i: int) -> tuple[TokenSplit, int]:
        source, inside = self.located(i)
        return source.origin(inside)

    def span(self, i: int) -> tuple[int, int]:
        source, inside = self.located(i)
        return source.span(inside)

    def read(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        source, inside = self.located(i)
        return source.read(inside)

    def documents(self, i: int) -> list[int]:
        source, inside = self.located(i)
        return source.documents(inside)

    def document_lengths(self) -> np.ndarray:
        return np.concatenate([source.document_lengths() for source in self.sources])
