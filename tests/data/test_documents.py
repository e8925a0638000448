"""Proves that the documents of a sample are those that were written, whatever cuts them, and go with their batch."""

import email
import tempfile
from functools import cache
from pathlib import Path

import numpy as np

from shardwright.config.batch import BatchSection
from shardwright.data.batches import Batches, evaluation_batches
from shardwright.data.mixture import MixedSamples
from shardwright.data.order import SampleOrder
from shardwright.data.prepare import prepare
from shardwright.data.samples import DocumentSamples, PackedSamples
from shardwright.data.shards import TokenSplit, open_split

SEQ_LEN = 96


@cache
def split() -> TokenSplit:
    """Documents of 1 to 200 tokens in several shards, one of them cut by the end of a shard."""
    folder = Path(tempfile.mkdtemp(prefix="shardwright-test-"))
    source = folder / "text"
    source.mkdir()
    lines = (Path(email.__file__).parent / "message.py").read_text().splitlines()
    for number in range(60):
        (source / f"{number:02}.txt").write_text("\n".join(lines[number * 3 : number * 3 + 1 + number % 5]) or "x")
    prepare(source, folder / "tokens", vocab_size=300, validation=0, shard_tokens=400)
    return open_split(folder / "tokens", "train")


def by_separators(tokens: np.ndarray, separator_id: int) -> list[int]:
    """Lengths of documents by the separators, which end them."""
    ends = np.flatnonzero(tokens == separator_id) + 1
    return np.diff([0, *ends[ends < len(tokens)], len(tokens)]).tolist()


def test_boundaries_are_those_of_the_documents_that_were_written() -> None:
    tokens = split()
    assert len(tokens.manifest.splits["train"].shards) > 2
    samples = PackedSamples(tokens, SEQ_LEN)
    found = [samples.documents(i) for i in range(len(samples))]
    assert found == [by_separators(samples.read(i)[0][:-1], tokens.separator_id) for i in range(len(samples))]
    assert max(map(len, found)) > 2
    order = SampleOrder(3, len(samples))
    for rank in range(2):
        batch = BatchSection(seq_len=SEQ_LEN, global_batch=8, micro_batch=2)
        options = {"schedule": batch.schedule, "vocab_size": 300, "prefetch": 0}
        batches = Batches({SEQ_LEN: samples}, order, data_rank=rank, data_ranks=2, within_documents=True, **options)  # type: ignore[arg-type]
        batch = next(batches)
        wanted = [[tuple(found[int(order(np.array(i)))]) for i in row] for row in batch.sample_ids_AB.tolist()]
        assert [list(row) for row in batch.documents_AB or ()] == wanted


def test_a_row_that_fills_a_micro_batch_of_an_evaluation_is_one_document() -> None:
    samples = PackedSamples(split(), SEQ_LEN)
    ranks = [
        list(
            evaluation_batches(
                samples,
                micro_batch=2,
                data_rank=rank,
                data_ranks=2,
                vocab_size=300,
                within_documents=True,
                max_samples=3,
            )
        )
        for rank in range(2)
    ]
    rows = [row for batches in ranks for batch in batches for row in (batch.documents_AB or ((),))[0]]
    assert all(sum(row) == SEQ_LEN for row in rows)
    assert rows[-1] == (SEQ_LEN,)


def test_without_documents_a_batch_has_none() -> None:
    samples = PackedSamples(split(), SEQ_LEN)
    batch = BatchSection(seq_len=SEQ_LEN, global_batch=2)
    options = {"schedule": batch.schedule, "vocab_size": 300, "prefetch": 0}
    order = SampleOrder(3, len(samples))
    batches = Batches({SEQ_LEN: samples}, order, data_rank=0, data_ranks=1, **options)  # type: ignore[arg-type]
    assert next(batches).documents_AB is None


def test_a_mixture_has_the_documents_of_its_sources() -> None:
    sources = [PackedSamples(split(), SEQ_LEN), DocumentSamples(split(), SEQ_LEN)]
    mixed = MixedSamples(sources)
    expected = [source.documents(i) for source in sources for i in range(len(source))]
    assert [mixed.documents(i) for i in range(len(mixed))] == expected


def test_padding_is_a_document_of_its_own() -> None:
    samples = DocumentSamples(split(), SEQ_LEN)
    for i in range(len(samples)):
        assert sum(samples.documents(i)) == SEQ_LEN
