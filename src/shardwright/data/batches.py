"""Batches of samples for one data rank, prefetched by a thread; one integer is the position in the data.

Running sample g (0, 1, 2, ... over the whole run) is the sample `order(g)`: `SampleOrder` for one source,
`MixtureOrder` for several. A step takes the next running samples, as many as `BatchSchedule` says, cut into shorter
sequences if its stage has them; data rank r takes the r-th contiguous block of the sequences. So a step's samples
depend on neither the number of ranks nor the step at which a run was resumed.

Letters of shapes: A accumulated micro-batches, B micro_batch, T seq_len.
"""

import itertools
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch

from shardwright.config.batch import BatchSchedule
from shardwright.data.samples import IGNORE, Samples, fetch_samples
from shardwright.layout.layout import accumulation
from shardwright.system.errors import DataError

PADDING_ID = -1
T = TypeVar("T")
READER = "shardwright-batches"
"""The name of the thread that reads ahead."""
POLL_S = 0.05
"""Pause before a batch whose samples cannot be read yet is tried again, in seconds."""

DocumentsAB = tuple[tuple[tuple[int, ...], ...], ...]
"""Tokens of the documents of each sequence of each micro-batch."""
ReferencesAB = tuple[tuple[tuple[float, ...], ...], ...]
References = Callable[[int], Sequence[float]]
"""The index of a sample -> the log-probability of each of its answers under the reference."""


@dataclass(frozen=True)
class Batch:
    """The samples of one data rank in one step.

    tokens_ABT and targets_ABT are int64; targets that do not count are IGNORE. sample_ids_AB: int64, the running
    (global) indices of the sequences, PADDING_ID for a row that only fills a micro-batch. n_targets: the number of
    targets that count in this batch, on this rank alone. documents_AB: the tokens of each document of each sequence,
    which add up to T; None if attention covers whole sequences. n_real_AB: the tokens of each sequence before its
    padding, int64; None if no sequence of the run has padding. references_AB: for pairs of answers, the log-probability
    under the reference of each document of each sequence that is an answer: all, or all but the last, which is padding.
    They come in pairs, the chosen answer first. weights_ABT: floats that multiply the loss of each target; None: 1.
    experts_ABTLK: the experts of tokens in each layer with experts, -1 where the router picks; None: it picks all.
    """

    tokens_ABT: torch.Tensor
    targets_ABT: torch.Tensor
    sample_ids_AB: torch.Tensor
    n_targets: int
    documents_AB: DocumentsAB | None = None
    n_real_AB: torch.Tensor | None = None
    references_AB: ReferencesAB | None = None
    weights_ABT: torch.Tensor | None = None
    experts_ABTLK: torch.Tensor | None = None

    @property
    def n_pairs(self) -> int:
        """The pairs of answers in this batch, on this rank alone."""
        return sum(len(values) // 2 for row in self.references_AB or () for values in row)

    @staticmethod
    def from_sequences(
        tokens_BT: torch.Tensor,
        targets_BT: torch.Tensor,
        ids_B: torch.Tensor,
        micro_batch: int,
        documents_B: Sequence[Sequence[int]] | None = None,
        n_real_B: torch.Tensor | None = None,
        references_B: Sequence[Sequence[float]] | None = None,
        weights_BT: torch.Tensor | None = None,
        experts_BTLK: torch.Tensor | None = None,
    ) -> "Batch":
        """Return a batch of the sequences of one data rank, in micro-batches that divide their number."""
        shape_AB = (len(ids_B) // micro_batch, micro_batch)
        return Batch(
            tokens_BT.reshape(*shape_AB, -1),
            targets_BT.reshape(*shape_AB, -1),
            ids_B.reshape(shape_AB),
            int((targets_BT != IGNORE).sum()),
            None if documents_B is None else _in_microbatches(documents_B, micro_batch),
            None if n_real_B is None else n_real_B.reshape(shape_AB),
            None if references_B is None else _in_microbatches(references_B, micro_batch),
            None if weights_BT is None else weights_BT.reshape(*shape_AB, -1),
            None if experts_BTLK is None else experts_BTLK.unflatten(0, shape_AB),
        )


class Batches:
    """An endless iterator of Batch, epoch after epoch, from step `start_step` and running sample `start_sample` on.
    `order` maps running samples to indices of samples of the longest sequences. `samples`: by number of tokens, the
    samples of the stages of `schedule`; shorter ones are the pieces of the longest, in order.

    Save `next_sample` and pass it as `start_sample` to resume, on any number of ranks, with any batch. `prefetch`
    batches are read ahead by a thread (0 reads in the caller); `close`, or leaving a `with` block, stops it. An error
    in the thread is raised by the `next` that would have returned that batch.

    `within_documents`: batches have the documents of their sequences, within which attention stays. `references`:
    batches have the references of pairs of answers. `left_out`: ranges of running samples that no batch has.
    `is_readable`: whether the running samples before an index can be read yet; a batch waits until its samples can.

    Raises LayoutError for a batch that does not divide. A token id of vocab_size or more, which only damaged or foreign
    data has, raises DataError from `next`.
    """

    def __init__(
        self,
        samples: Mapping[int, Samples],
        order: Callable[[np.ndarray], np.ndarray],
        *,
        schedule: BatchSchedule,
        data_rank: int,
        data_ranks: int,
        vocab_size: int,
        within_documents: bool = False,
        references: References | None = None,
        start_step: int = 0,
        start_sample: int = 0,
        left_out: Iterable[tuple[int, int]] = (),
        is_readable: Callable[[int], bool] = lambda end: True,
        prefetch: int = 2,
        pin_memory: bool = False,
    ) -> None:
        for stage in schedule.stages:
            accumulation(stage.global_batch, stage.micro_batch, data_ranks)
        assert 0 <= data_rank < data_ranks, (data_rank, data_ranks)
        assert min(start_step, start_sample, prefetch) >= 0, (start_step, start_sample, prefetch)
        self._schedule, self._start_step, self._step = schedule, start_step, start_step
        self._start_sample = start_sample
        self._left_out = skipped = merged(left_out)

        # Without `self`: the thread that runs it must not keep a dropped Batches alive.
        def read() -> Iterator[Batch | None]:
            for step in itertools.count(start_step):
                stage, first = schedule.stage_at(step), start_sample + schedule.samples(start_step, step)
                n, cuts = stage.global_batch // data_ranks, schedule.cuts(stage)
                wholes, pieces = np.divmod(data_rank * n + np.arange(n), cuts)
                wholes = _past(first + wholes, start_sample, skipped)
                while not is_readable(int(wholes.max()) + 1):
                    yield None
                shape_AB = (-1, stage.micro_batch)
                yield _read(
                    samples[stage.seq_len],
                    (wholes * cuts + pieces).reshape(shape_AB),
                    (order(wholes) * cuts + pieces).reshape(shape_AB),
                    vocab_size,
                    pin_memory,
                    within_documents,
                    references,
                )

        self._source = read()
        self._closed = False
        self._failure: Exception | None = None
        self._reader = _BatchReader(self._source, prefetch) if prefetch else None
        if self._reader is not None:
            # A Batches that is dropped without close must not leave its thread behind.
            weakref.finalize(self, self._reader.stop)

    @property
    def next_sample(self) -> int:
        """Running index of the first sample of the batch that `next` returns next, whether read ahead or not."""
        return self._after(0)

    def end_of(self, n_steps: int) -> int:
        """Return the running index after the last sample of the next `n_steps` batches, at least one."""
        return self._after(n_steps, 1) + 1

    def _after(self, n_steps: int, n_before: int = 0) -> int:
        """Return the running index of the first sample after the next `n_steps` batches, or `n_before` before it."""
        taken = self._schedule.samples(self._start_step, self._step + n_steps) - n_before
        return int(_past(np.array(self._start_sample + taken), self._start_sample, self._left_out))

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        assert not self._closed, "these batches are closed"
        if self._failure is None:
            try:
                batch = self._reader.take() if self._reader is not None else self._next()
            except Exception as error:
                self._failure = error
        if self._failure is not None:
            raise self._failure
        self._step += 1
        return batch

    def _next(self) -> Batch:
        while (batch := next(self._source)) is None:
            time.sleep(POLL_S)
        return batch

    def close(self) -> None:
        """Stop the thread; return when it has ended."""
        self._closed = True
        if self._reader is not None:
            self._reader.stop()

    def __enter__(self) -> "Batches":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def merged(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return ranges (first, one after the last) in order; ranges that touch or overlap are merged."""
    result: list[tuple[int, int]] = []
    for first, end in sorted(ranges):
        if result and first <= result[-1][1]:
            result[-1] = result[-1][0], max(end, result[-1][1])
        else:
            result.append((first, end))
    return result


def _past(ids: np.ndarray, start: int, left_out: Sequence[tuple[int, int]]) -> np.ndarray:
    """Return running indices (any shape, int64), counted from `start` as if nothing were left out, moved past the
    ranges that are left out."""
    for first, end in left_out:
        if end > start:
            begins = max(first, start)
            ids = np.where(ids >= begins, ids + (end - begins), ids)
    return ids


def evaluation_batches(
    samples: Samples,
    *,
    micro_batch: int,
    data_rank: int,
    data_ranks: int,
    vocab_size: int,
    within_documents: bool = False,
    references: References | None = None,
    max_samples: int | None = None,
) -> Iterator[Batch]:
    """Yield `max_samples` of a split (all if None), spread evenly over it, once each over all data ranks; A = 1.

    Every rank gets ceil(max_samples / (micro_batch * data_ranks)) batches, because a rank that skips a collective hangs
    the others; surplus rows are masked whole. Raises DataError as Batches does.
    """
    assert 0 <= data_rank < data_ranks, (data_rank, data_ranks)
    n = len(samples) if max_samples is None else min(max_samples, len(samples))
    for first in range(0, n, micro_batch * data_ranks):
        ids = first + data_rank * micro_batch + np.arange(micro_batch)
        indices_B = np.where(ids < n, ids * len(samples) // n, PADDING_ID)
        yield _read(samples, indices_B[None], indices_B[None], vocab_size, False, within_documents, references)


def _read(
    samples: Samples,
    ids_AB: np.ndarray,
    indices_AB: np.ndarray,
    vocab_size: int,
    pin_memory: bool,
    within_documents: bool,
    references: References | None,
) -> Batch:
    fetch_samples(samples, [int(i) for i in indices_AB.flat if i != PADDING_ID])
    shape = (*indices_AB.shape, samples.seq_len)
    tokens_ABT, targets_ABT = np.zeros(shape, np.int64), np.full(shape, IGNORE, np.int64)
    n_real_AB = np.zeros(indices_AB.shape, np.int64)
    documents: list[Sequence[int]] = []
    values: list[Sequence[float]] = []
    n_targets = 0
    for place in np.ndindex(indices_AB.shape):
        i = int(indices_AB[place])
        if within_documents:
            documents.append(samples.documents(i) if i != PADDING_ID else (samples.seq_len,))
        if references is not None:
            values.append(references(i) if i != PADDING_ID else ())
        if i == PADDING_ID:
            continue
        tokens, mask = samples.read(i)
        if tokens.max() >= vocab_size:
            raise _outside_vocabulary(samples, i, tokens, vocab_size)
        tokens_ABT[place] = tokens[:-1]
        targets_ABT[place][mask] = tokens[1:][mask]
        n_targets += int(mask.sum())
        if samples.padded:
            n_real_AB[place] = samples.span(i)[1] - 1

    def tensor(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).pin_memory() if pin_memory else torch.from_numpy(array)

    documents_AB = _in_microbatches(documents, shape[1]) if within_documents else None
    n_real = tensor(n_real_AB) if samples.padded else None
    of_answers = None if references is None else _in_microbatches(values, shape[1])
    ids = tensor(ids_AB.copy())
    return Batch(tensor(tokens_ABT), tensor(targets_ABT), ids, n_targets, documents_AB, n_real, of_answers)


def _in_microbatches(of_sequences: Sequence[Sequence[T]], micro_batch: int) -> tuple[tuple[tuple[T, ...], ...], ...]:
    whole = [tuple(values) for values in of_sequences]
    return tuple(tuple(whole[at : at + micro_batch]) for at in range(0, len(whole), micro_batch))


def _outside_vocabulary(samples: Samples, i: int, tokens: np.ndarray, vocab_size: int) -> DataError:
    at = int(np.argmax(tokens >= vocab_size))
    split, start = samples.origin(i)
    return DataError(
        f"{split.where(start + at)} is {tokens[at]}, outside of the vocabulary of {vocab_size} "
        f"(ids 0 to {vocab_size - 1}); check the data with "
        f"`shardwright data inspect {split.folder} --verify`"
    )


class _BatchReader:
    """One thread that keeps a bounded queue of batches full. It has no reference to the Batches that owns it."""

    def __init__(self, source: Iterator[Batch | None], ahead: int) -> None:
        self._queue: queue.Queue[Batch | Exception] = queue.Queue(ahead)
        self._stopping = threading.Event()
        self._thread = threading.Thread(
            target=_fill, args=(source, self._queue, self._stopping), name=READER, daemon=True
        )
        self._thread.start()

    def take(self) -> Batch:
        """Return the next batch, or raise the exception in its place."""
        taken = self._queue.get()
        if isinstance(taken, Exception):
            raise taken
        return taken

    def stop(self) -> None:
        self._stopping.set()
        # The thread may be waiting for room: after this it puts at most one more batch, for which there is room.
        while not self._queue.empty():
            self._queue.get_nowait()
        if self._thread is not threading.current_thread():
            self._thread.join()


def _fill(source: Iterator[Batch | None], out: "queue.Queue[Batch | Exception]", stopping: threading.Event) -> None:
    while not stopping.is_set():
        try:
            batch = next(source)
        except Exception as error:
            out.put(error)
            return
        if batch is None:
            stopping.wait(POLL_S)
        else:
            out.put(batch)
