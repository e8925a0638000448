"""Proves that a mixture gives every source its share at any point, and each sample of a source once an epoch of it."""

import itertools
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.config.batch import BatchSection
from shardwright.config.mixture import Mixture, whole_weights
from shardwright.data import mixture
from shardwright.data.batches import Batches
from shardwright.data.mixture import MixedSamples, MixtureOrder, MixtureStage, interleaving
from shardwright.data.order import SampleOrder
from tests.data.test_batches import Numbered

WEIGHTS = st.lists(st.integers(0, 40), min_size=1, max_size=7).filter(any).map(lambda found: whole_weights(found))
STAGES = st.lists(st.tuples(st.integers(1, 60), st.tuples(*[st.integers(0, 9)] * 3).filter(any)), max_size=3)
WEB, CODE = 7, 3


def test_of_ten_samples_at_seven_to_three_seven_are_of_the_first_source() -> None:
    assert interleaving((7, 3)).tolist() == [0, 1, 0, 0, 0, 1, 0, 0, 1, 0]


@given(WEIGHTS)
def test_at_any_point_each_source_is_within_one_sample_of_its_share(weights: tuple[int, ...]) -> None:
    period, order = sum(weights), interleaving(weights)
    taking = sum(weight > 0 for weight in weights)
    for source, weight in enumerate(weights):
        for n, count in enumerate(np.cumsum(order == source), start=1):
            off = abs(Fraction(int(count)) - Fraction(n * weight, period))
            assert off <= (1 - Fraction(1, 2 * taking - 2) if taking > 1 else 0)


def test_ratios_are_those_of_the_decimals_that_are_written() -> None:
    assert whole_weights([0.7, 0.3]) == (7, 3)
    assert whole_weights([1, 0.5, 0.25]) == (4, 2, 1)
    assert whole_weights([0.1, 0.2, 0]) == (1, 2, 0)
    assert whole_weights([3]) == (1,)


def mixture_order(seed: int, sizes: Sequence[int], stages: list[MixtureStage]) -> MixtureOrder:
    return MixtureOrder([SampleOrder(seed, size, source) for source, size in enumerate(sizes)], stages)


def order_of(begin: tuple[int, ...], later: list[tuple[int, tuple[int, ...]]], seed: int = 5) -> MixtureOrder:
    """Sources of 11, 5 and 17 samples; `later`: (samples of the stage before, weights)."""
    stages, at = [MixtureStage(0, 0, begin)], 0
    for length, weights in later:
        at += length
        stages.append(MixtureStage(at, at, weights))
    return mixture_order(seed, [11, 5, 17][: len(begin)], stages)


@settings(max_examples=60, deadline=None)
@given(st.tuples(*[st.integers(0, 9)] * 3).filter(any), STAGES, st.integers(0, 200))
def test_each_sample_of_a_source_is_seen_once_an_epoch_across_stages(begin, later, n: int) -> None:
    order = order_of(begin, later)
    sources, samples = order.located(np.arange(n))
    for source, size in enumerate(order.sizes):
        mine = samples[sources == source]
        assert len(mine) == order.taken(n)[source]
        for epoch in range(len(mine) // size):
            assert sorted(mine[epoch * size : (epoch + 1) * size]) == list(range(size))
        assert mine.tolist() == SampleOrder(5, size, source)(np.arange(len(mine))).tolist()


@settings(max_examples=60, deadline=None)
@given(st.tuples(*[st.integers(0, 9)] * 3).filter(any), STAGES, st.integers(0, 300), st.integers(1, 40))
def test_any_slice_of_a_mixture_is_the_slice_of_the_whole(begin, later, start: int, length: int) -> None:
    order = order_of(begin, later)
    whole = order(np.arange(start + length))
    assert np.array_equal(order(np.arange(start, start + length)), whole[start:])
    assert np.array_equal(order(np.array([[start]])), whole[start : start + 1, None])
    assert np.array_equal(order_of(begin, later)(np.arange(start + length)), whole)


@settings(max_examples=60, deadline=None)
@given(st.tuples(*[st.integers(0, 9)] * 3).filter(any), STAGES)
def test_in_each_stage_each_source_is_within_one_sample_of_its_share(begin, later) -> None:
    order = order_of(begin, later)
    ends = [*(stage.from_sample for stage in order.stages[1:]), order.stages[-1].from_sample + 100]
    for stage, end in zip(order.stages, ends, strict=True):
        for n in range(stage.from_sample, end + 1):
            taken = order.taken(n) - order.taken(stage.from_sample)
            share = (n - stage.from_sample) * np.array(stage.weights) / sum(stage.weights)
            assert (np.abs(taken - share) < 1).all()


def test_one_source_of_a_mixture_is_in_the_order_of_a_run_over_it_alone() -> None:
    alone = SampleOrder(9, 11)(np.arange(50))
    assert mixture_order(9, [11], [MixtureStage(0, 0, (1,))])(np.arange(50)).tolist() == alone.tolist()
    sources, samples = order_of((2, 1, 0), [], seed=9).located(np.arange(75))
    assert samples[sources == 0].tolist() == alone.tolist()


def test_sources_of_equal_size_are_in_orders_of_their_own() -> None:
    orders = [SampleOrder(1, 100, source)(np.arange(100)) for source in range(3)]
    assert all((a != b).sum() > 80 for a, b in itertools.pairwise(orders))


class Part(Numbered):
    """Samples of a source: sample i is the token `first` + i, five times over."""

    def __init__(self, first: int, n: int) -> None:
        super().__init__(n)
        self.first = first

    def read(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        tokens, mask = super().read(i)
        return tokens + self.first, mask


SIZES = (30, 8, 50)
MIXTURES = [Mixture(0, (WEB, CODE, 0)), Mixture(4, (2, 3, 5))]
Stay = tuple[int, int, int]  # steps, global_batch, data ranks


def mixed() -> MixedSamples:
    return MixedSamples([Part(1000 * source, n) for source, n in enumerate(SIZES)])


def seen(stays: list[Stay]) -> list[list[int]]:
    """Of each step of a run of those stays the samples of all ranks, each stay resumed from what the one before it
    left in its checkpoint: steps, samples, and the stages that had begun."""
    found: list[list[int]] = []
    step = position = 0
    past: list[MixtureStage] = []
    for steps, global_batch, ranks in stays:
        batch = BatchSection(seq_len=mixed().seq_len, global_batch=global_batch)
        stages = mixture.stages_of(MIXTURES, batch.schedule.samples, past, step, position)
        order = mixture_order(7, SIZES, stages)
        rows: list[list[int]] = [[] for _ in range(steps)]
        after = position
        for rank in range(ranks):
            with Batches(
                {mixed().seq_len: mixed()},
                order,
                schedule=batch.schedule,
                data_rank=rank,
                data_ranks=ranks,
                vocab_size=5000,
                start_sample=position,
                prefetch=0,
            ) as batches:
                for row in rows:
                    row += next(batches).tokens_ABT[:, :, 0].flatten().tolist()
                after = batches.next_sample
        found += rows
        step, position = step + steps, after
        past = [stage for stage in stages if stage.from_step < step]
    return found


def test_a_resume_on_other_ranks_takes_the_samples_of_a_run_that_never_stopped() -> None:
    alone = seen([(12, 8, 1)])
    for stays in ([(12, 8, 4)], [(3, 8, 2), (9, 8, 1)], [(4, 8, 8), (1, 8, 4), (7, 8, 2)], [(5, 8, 2), (7, 8, 8)]):
        assert seen(stays) == alone


def test_a_run_with_a_stage_keeps_the_shares_of_each_step_and_the_epochs_of_each_source() -> None:
    rows = seen([(12, 10, 1)])
    for step, row in enumerate(rows, start=1):
        shares = Counter(token // 1000 for token in row)
        expected = {0: 7, 1: 3} if step <= 4 else {0: 2, 1: 3, 2: 5}
        assert shares == expected, f"step {step}"
    for source, size in enumerate(SIZES):
        taken = [token % 1000 for row in rows for token in row if token // 1000 == source]
        epochs = [taken[start : start + size] for start in range(0, len(taken), size)]
        assert all(len(set(epoch)) == len(epoch) for epoch in epochs)
        whole = [epoch for epoch in epochs if len(epoch) == size]
        assert all(one != other for one, other in itertools.pairwise(whole)), "an epoch has the order before"


def test_three_sources_are_within_one_sample_of_their_shares_at_any_point() -> None:
    order = mixture_order(0, (10, 10, 10), [MixtureStage(0, 0, (50, 30, 20))])
    sources, _ = order.located(np.arange(1000))
    for source, share in enumerate((0.5, 0.3, 0.2)):
        counts = np.cumsum(sources == source)
        assert (np.abs(counts - share * np.arange(1, 1001)) < 1).all()


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 6), st.just(8), st.sampled_from([1, 2, 4])), min_size=1, max_size=4))
def test_any_stays_on_any_ranks_take_the_same_samples(stays: list[Stay]) -> None:
    assert seen(stays) == seen([(sum(steps for steps, _, _ in stays), 8, 1)])


def test_a_stage_begins_at_its_step_when_the_batch_is_larger_after_a_resume() -> None:
    rows = seen([(2, 10, 1), (6, 20, 2)])
    assert [len(row) for row in rows] == [10, 10, 20, 20, 20, 20, 20, 20]
    assert [any(token // 1000 == 2 for token in row) for row in rows] == [False] * 4 + [True] * 4


def test_samples_of_a_mixture_are_those_of_its_sources() -> None:
    samples = mixed()
    assert len(samples) == sum(SIZES)
    for i, (source, inside) in {0: (0, 0), 29: (0, 29), 30: (1, 0), 37: (1, 7), 38: (2, 0), 87: (2, 49)}.items():
        assert samples.read(i)[0][0] == 1000 * source + inside
