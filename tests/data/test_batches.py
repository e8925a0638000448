"""Proves that a run sees every sample once an epoch, however it is dealt and resumed, and reads ahead safely.

The check of silent bug 18 (samples repeated or skipped on resume or a changed world) is `once_an_epoch`; the
bugs are injected here, and the same check must catch each.
"""

import gc
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.config.batch import BatchSection, BatchStageSection
from shardwright.data.batches import Batches, evaluation_batches
from shardwright.data.order import SampleOrder
from shardwright.data.samples import IGNORE, DocumentSamples, PackedSamples
from shardwright.data.shards import TokenSplit, open_split
from shardwright.system.errors import DataError, InputError, LayoutError
from tests.data.conftest import as_version_1


class Here:
    """A split whose tokens are on this disk."""

    mirrored = False


class Numbered:
    """n samples; sample i is the token i, five times over."""

    seq_len, padded, mirrored = 4, False, False

    def __init__(self, n: int, fails_at: int = -1) -> None:
        self.n, self.fails_at, self.reads = n, fails_at, 0

    def __len__(self) -> int:
        return self.n

    def origin(self, i: int) -> tuple[Here, int]:
        return Here(), i * 4

    def span(self, i: int) -> tuple[int, int]:
        return i * 4, 5

    def read(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        self.reads += 1
        if i == self.fails_at:
            raise FileNotFoundError("the disk went away")
        return np.full(5, i, np.int64), np.arange(4) < 4 - i % 3


def batches(samples: Any, global_batch: int = 4, micro_batch: int = 2, **options: Any) -> Batches:
    defaults: dict[str, Any] = {"data_rank": 0, "data_ranks": 1, "vocab_size": 2**16}
    order = SampleOrder(options.pop("seed", 0), len(samples))
    batch = BatchSection(seq_len=4, global_batch=global_batch, micro_batch=micro_batch)
    return Batches({4: samples}, order=order, schedule=batch.schedule, **defaults | options)


def test_a_batch_is_accumulated_microbatches_of_inputs_and_targets() -> None:
    with batches(Numbered(100), global_batch=6) as loader:
        batch = next(loader)
    assert batch.tokens_ABT.shape == batch.targets_ABT.shape == (3, 2, 4)
    assert batch.tokens_ABT.dtype == batch.targets_ABT.dtype == batch.sample_ids_AB.dtype == torch.int64
    assert batch.sample_ids_AB.tolist() == [[0, 1], [2, 3], [4, 5]]
    assert batch.n_targets == int((batch.targets_ABT != IGNORE).sum())
    counted = batch.targets_ABT != IGNORE
    assert torch.equal(batch.tokens_ABT[counted], batch.targets_ABT[counted])


def test_targets_are_the_tokens_that_follow(train: TokenSplit) -> None:
    samples = PackedSamples(train, 64)
    with batches(samples, global_batch=2, micro_batch=1, seed=5) as loader:
        batch = next(loader)
    for a, i in enumerate(SampleOrder(5, len(samples))(np.arange(2))):
        assert batch.tokens_ABT[a, 0].tolist() == train.tokens(int(i) * 64, 64).tolist()
        assert batch.targets_ABT[a, 0].tolist() == train.tokens(int(i) * 64 + 1, 64).tolist()


# Silent bug 18.

Stay = tuple[int, int, int]  # steps, global_batch in units of 4 samples, data ranks


def samples_seen(stays: list[Stay], n: int, prefetch: int = 2) -> Counter[int]:
    """How often each of n samples is trained on by a run of those stays, each resumed where one stopped."""
    seen: Counter[int] = Counter()
    position = 0
    for steps, quarter_batch, ranks in stays:
        resumed_at = position
        for rank in range(ranks):
            with batches(
                Numbered(n),
                global_batch=4 * quarter_batch,
                micro_batch=1,
                data_rank=rank,
                data_ranks=ranks,
                start_sample=resumed_at,
                prefetch=prefetch,
            ) as loader:
                for _ in range(steps):
                    seen.update(next(loader).tokens_ABT[:, :, 0].flatten().tolist())
                position = loader.next_sample
    return seen


def once_an_epoch(stays: list[Stay], n: int, **options: Any) -> bool:
    """Whether the run saw each of n samples total/n times, one more for a rest."""
    total = sum(steps * 4 * quarter_batch for steps, quarter_batch, _ in stays)
    seen = samples_seen(stays, n, **options)
    return seen.total() == total and {seen[i] for i in range(n)} <= {total // n, -(-total // n)}


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(1, 3), st.sampled_from([1, 2, 4])), min_size=1, max_size=4),
    st.integers(1, 50),
    st.integers(0, 3),
)
def test_every_sample_is_seen_once_an_epoch_over_resumes_and_changed_ranks(
    stays: list[Stay], n: int, prefetch: int
) -> None:
    assert once_an_epoch(stays, n, prefetch=prefetch)


RUN: list[Stay] = [(2, 1, 1), (1, 2, 4), (3, 1, 2)]


def resume_after_what_was_read_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    read_ahead = property(lambda self: self._start_sample + self._schedule.samples(self._start_step, self._step + 2))
    monkeypatch.setattr(Batches, "next_sample", read_ahead)


def resume_one_step_back(monkeypatch: pytest.MonkeyPatch) -> None:
    one_back = property(lambda self: self._start_sample + self._schedule.samples(self._start_step, self._step - 1))
    monkeypatch.setattr(Batches, "next_sample", one_back)


def read_with(monkeypatch: pytest.MonkeyPatch, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Let Batches read as if it had been given other arguments; `next_sample` stays right."""
    true = Batches.__init__

    def wrong(self: Batches, samples: Any, **given: Any) -> None:
        true(self, samples, **given | change(given))
        self._start_sample = given.get("start_sample", 0)

    monkeypatch.setattr(Batches, "__init__", wrong)


def order_seeded_by_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    def seed_by_rank(given: dict[str, Any]) -> dict[str, Any]:
        return {"order": replace(given["order"], seed=given["order"].seed + given["data_rank"])}

    read_with(monkeypatch, seed_by_rank)


def every_rank_reads_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    read_with(monkeypatch, lambda given: {"data_rank": 0})


def order_starts_again_on_resume(monkeypatch: pytest.MonkeyPatch) -> None:
    read_with(monkeypatch, lambda given: {"start_sample": 0})


@pytest.mark.parametrize(
    "bug",
    [
        resume_after_what_was_read_ahead,
        resume_one_step_back,
        order_seeded_by_rank,
        every_rank_reads_the_same,
        order_starts_again_on_resume,
    ],
)
def test_silent_bug_18_is_caught(monkeypatch: pytest.MonkeyPatch, bug: Callable[[pytest.MonkeyPatch], None]) -> None:
    total = sum(steps * 4 * quarter_batch for steps, quarter_batch, _ in RUN)
    assert once_an_epoch(RUN, total)
    bug(monkeypatch)
    assert not once_an_epoch(RUN, total)


def test_what_a_step_trains_on_does_not_depend_on_the_ranks() -> None:
    steps = []
    for ranks, micro_batch in [(1, 8), (1, 2), (2, 4), (4, 1), (8, 1)]:
        ids = []
        for rank in range(ranks):
            with batches(Numbered(20), 8, micro_batch, data_rank=rank, data_ranks=ranks, seed=3) as loader:
                ids += [next(loader), next(loader)][1].tokens_ABT[:, :, 0].flatten().tolist()
        steps.append(ids)
    assert all(ids == steps[0] for ids in steps)


@pytest.mark.parametrize("prefetch", [0, 1, 5])
def test_batches_read_ahead_do_not_count_as_seen(prefetch: int) -> None:
    with batches(Numbered(100), start_sample=40, prefetch=prefetch) as loader:
        assert loader.next_sample == 40
        next(loader)
        time.sleep(0.05)
        assert loader.next_sample == 44
        assert next(loader).sample_ids_AB.flatten().tolist() == [44, 45, 46, 47]


# Stages.


class Places:
    """n samples of `seq_len` tokens of one text of the tokens 0, 1, 2, ..."""

    def __init__(self, n: int, seq_len: int) -> None:
        self.n, self.seq_len, self.padded, self.mirrored = n, seq_len, False, False

    def origin(self, i: int) -> tuple[Here, int]:
        return Here(), i * self.seq_len

    def read(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        return i * self.seq_len + np.arange(self.seq_len + 1), np.ones(self.seq_len, bool)


STAGES = [
    BatchStageSection(from_step=2, global_batch=8),
    BatchStageSection(from_tokens=88.0, seq_len=8, global_batch=2, micro_batch=1),
    BatchStageSection(from_step=9, seq_len=16),
    BatchStageSection(from_step=11, seq_len=2, global_batch=16, micro_batch=4),
]
RAMP = BatchSection(seq_len=4, global_batch=4, micro_batch=2, stages=STAGES).schedule
ORDER = SampleOrder(7, 40)


def steps_of(begin: int, end: int, ranks: int, first: int, left_out: Sequence[tuple[int, int]] = ()) -> Any:
    """The tokens of each step of all ranks in turn, and the sample after the last."""
    seen: list[list[list[int]]] = [[] for _ in range(begin, end)]
    for rank in range(ranks):
        samples: Any = {seq_len: Places(40 * 16 // seq_len, seq_len) for seq_len in (2, 4, 8, 16)}
        options: Any = {"data_rank": rank, "data_ranks": ranks, "vocab_size": 10**4, "left_out": left_out}
        with Batches(samples, ORDER, schedule=RAMP, start_step=begin, start_sample=first, **options) as loader:
            for step in seen:
                step += next(loader).tokens_ABT.flatten(0, 1).tolist()
            after = loader.next_sample
    return seen, after


def test_stages_cut_the_samples_in_their_order_and_take_each_once() -> None:
    """The reference cuts the tokens of all samples, in their order, by hand."""
    assert [(stage.from_step, stage.tokens_before) for stage in RAMP.stages] == [
        (0, 0), (2, 32), (4, 96), (9, 176), (11, 240),
    ]  # fmt: skip
    sizes = [(4, 4)] * 2 + [(8, 4)] * 2 + [(2, 8)] * 5 + [(2, 16)] * 2 + [(16, 2)] * 3
    text = [16 * int(sample) + at for sample in ORDER(np.arange(30)) for at in range(16)]
    seen, after = steps_of(0, len(sizes), 1, 0)
    for (n, seq_len), step in zip(sizes, seen, strict=True):
        assert step == [text[at * seq_len : (at + 1) * seq_len] for at in range(n)]
        text = text[n * seq_len :]
    assert 16 * (30 - after) == len(text)
    for stop in (1, 2, 3, 4, 6, 10, 11):  # within stages and at their first steps
        before, position = steps_of(0, stop, 2, 0)
        resumed, end = steps_of(stop, len(sizes), 1 + stop % 2, position)
        assert before + resumed == seen
        assert end == after


def test_samples_that_a_rollback_over_a_boundary_leaves_out_are_in_no_step_and_all_others_are() -> None:
    whole, _ = steps_of(0, 8, 1, 0)
    begin = RAMP.samples(0, 3)
    left_out = [(RAMP.samples(0, 4), RAMP.samples(0, 5))]
    resumed, _ = steps_of(3, 7, 2, begin, left_out)
    assert resumed == whole[3:4] + whole[5:8]


def test_a_step_of_a_stage_that_does_not_divide_over_the_ranks_is_refused() -> None:
    with pytest.raises(LayoutError, match="2"):
        steps_of(0, 1, 4, 0)


# The thread.


def reading_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "shardwright-batches"]


def test_at_most_prefetch_batches_are_read_ahead() -> None:
    samples = Numbered(1000)
    with batches(samples, prefetch=3):
        # Three in the queue and one in the thread's hand; then none for as long as nobody takes one.
        while samples.reads < 4 * (3 + 1):
            time.sleep(0.01)
        time.sleep(0.1)
        assert samples.reads == 4 * (3 + 1)


def test_closing_stops_the_thread_and_so_does_forgetting() -> None:
    assert not reading_threads()
    loader = batches(Numbered(1000))
    assert len(reading_threads()) == 1
    next(loader)
    time.sleep(0.02)
    loader.close()
    loader.close()
    assert not reading_threads()
    loader = batches(Numbered(1000))
    del loader
    gc.collect()
    assert not reading_threads()


@pytest.mark.parametrize("prefetch", [0, 2])
def test_an_error_while_reading_ahead_is_raised_as_it_is_in_its_turn(prefetch: int) -> None:
    order = SampleOrder(0, 100)(np.arange(100))
    with batches(Numbered(100, fails_at=int(order[9])), prefetch=prefetch) as loader:
        next(loader)
        next(loader)
        for _ in range(2):
            with pytest.raises(FileNotFoundError, match="the disk went away"):
                next(loader)
        assert loader.next_sample == 8
    assert not reading_threads()


# Bad input.


def test_a_batch_that_does_not_divide_shows_the_arithmetic() -> None:
    with pytest.raises(InputError) as caught:
        batches(Numbered(10), global_batch=10, micro_batch=4, data_ranks=2)
    assert "(10 = 8*1 + 2); nearest: 8 or 16" in str(caught.value)
    assert not reading_threads()


def test_an_id_outside_of_the_vocabulary_names_shard_place_and_value(prepared: Path, tmp_path: Path) -> None:
    copy = as_version_1(Path(shutil.copytree(prepared, tmp_path / "copy")))  # else the checksum of the block is wrong
    with open(copy / "train-00001.bin", "r+b") as file:
        file.seek(2 * 7)
        file.write((9999).to_bytes(2, "little"))
    split = open_split(copy, "train")
    message = r"train-00001\.bin, token 7 of it is 9999, outside of the vocabulary of 512 \(ids 0 to 511\)"
    for samples in (PackedSamples(split, 128), DocumentSamples(split, 128)):
        n = len(samples)
        with batches(samples, n, 1, vocab_size=512) as loader, pytest.raises(DataError, match=message):
            next(loader)
        with pytest.raises(DataError, match=message):
            list(evaluation_batches(samples, micro_batch=4, data_rank=0, data_ranks=1, vocab_size=512))


# Evaluation.


@given(st.integers(1, 40), st.integers(1, 5), st.integers(1, 5), st.none() | st.integers(1, 50))
def test_evaluation_sees_each_sample_once_in_equally_many_batches_on_every_rank(
    n: int, micro_batch: int, ranks: int, max_samples: int | None
) -> None:
    per_rank = [
        list(
            evaluation_batches(
                Numbered(n),  # type: ignore[arg-type]
                micro_batch=micro_batch,
                data_rank=rank,
                data_ranks=ranks,
                max_samples=max_samples,
                vocab_size=2**16,
            )
        )
        for rank in range(ranks)
    ]
    assert len({len(rank_batches) for rank_batches in per_rank}) == 1
    seen: list[int] = []
    for batch in (batch for rank_batches in per_rank for batch in rank_batches):
        assert batch.tokens_ABT.shape == (1, micro_batch, 4)
        padding = batch.sample_ids_AB == -1
        assert (batch.targets_ABT[padding] == IGNORE).all()
        assert batch.n_targets == int((batch.targets_ABT != IGNORE).sum())
        assert torch.equal(batch.tokens_ABT[..., 0][~padding], batch.sample_ids_AB[~padding])
        seen += batch.sample_ids_AB[~padding].tolist()
    wanted = n if max_samples is None else min(n, max_samples)
    assert len(seen) == len(set(seen)) == wanted
    # Spread over the split: no two neighbours are farther apart than the even spacing, rounded up.
    assert max(np.diff([*sorted(seen), n])) <= -(-n // wanted)
    assert min(seen) == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_pinned_batches_reach_the_device() -> None:
    with batches(Numbered(100), pin_memory=True) as loader:
        batch = next(loader)
    assert batch.tokens_ABT.is_pinned()
    assert torch.equal(batch.tokens_ABT.to("cuda", non_blocking=True).cpu(), batch.tokens_ABT)
