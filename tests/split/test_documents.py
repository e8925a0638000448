"""Proves that documents are dealt over a ring so that ranks have equally many tokens and nearly as many scores, and
that the plans of all ranks together compute every pair of a query and a token up to it of its document exactly once."""

from collections import Counter
from itertools import accumulate, chain, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.model.pieces import causal_pieces
from shardwright.split.documents import AttentionPiece, Lengths, balanced_spans, imbalance, plan, ring_tokens


@st.composite
def packed(draw: st.DrawFn) -> tuple[int, list[Lengths]]:
    """A ring and up to three sequences of one length with any documents."""
    ring = draw(st.integers(1, 5))
    seq_len = 2 * ring * draw(st.integers(1, 8))
    ends = st.sets(st.integers(1, seq_len - 1), max_size=seq_len - 1)
    sequences = draw(st.lists(ends, min_size=1, max_size=3))
    return ring, [tuple(b - a for a, b in pairwise([0, *sorted(each), seq_len])) for each in sequences]


METHODS = [("ring", False), ("zigzag", False), ("zigzag", True)]


@given(packed())
@settings(max_examples=40, deadline=None)
def test_dealing_partitions_every_document_over_ranks_with_equally_many_tokens(case: tuple[int, list[Lengths]]) -> None:
    ring, sequences = case
    for lengths in sequences:
        held = balanced_spans(lengths, ring)
        assert {sum(each.tokens for each in rank) for rank in held} == {sum(lengths) // ring}
        starts = [0, *accumulate(lengths)]
        for rank in held:
            assert [each.start for each in rank] == sorted(each.start for each in rank)
            assert all(starts[e.document] <= e.start < e.stop <= starts[e.document + 1] for e in rank)
        places = Counter(p for rank in held for each in rank for p in range(each.start, each.stop))
        assert places == Counter(range(sum(lengths)))


def pairs_of(piece: AttentionPiece) -> list[tuple[int, int]]:
    """The pairs of a query and a key that a piece computes; every query has one."""
    found = [
        [
            (piece.rows.start + i, piece.columns.start + j)
            for j in range(piece.n_columns)
            if not (piece.causal and j > i + piece.shift) and not (piece.window and j <= i + piece.shift - piece.window)
        ]
        for i in range(piece.n_rows)
    ]
    assert all(found)
    pairs = list(chain(*found))
    assert len(pairs) == piece.pairs
    return pairs


@pytest.mark.parametrize(("method", "deals"), METHODS)
@given(case=packed(), window=st.sampled_from((0, 1, 2, 5, 17, 1000)), chunked=st.booleans())
@settings(max_examples=60, deadline=None)
def test_every_pair_of_a_document_and_of_a_window_or_chunk_is_computed_once_and_no_other(
    method: str, deals: bool, case: tuple[int, list[Lengths]], window: int, chunked: bool
) -> None:
    ring, sequences = case
    chunked = chunked and window > 0
    plans = [plan(tuple(sequences), method, ring, rank, deals, window, chunked) for rank in range(ring)]
    # (sequence, position) of each place of each rank
    places = [
        [
            (row, p)
            for row, lengths in enumerate(sequences)
            for each in ring_tokens(lengths, method, ring, deals)[rank]
            for p in range(each.start, each.stop)
        ]
        for rank in range(ring)
    ]
    found = Counter()
    for rank, mine in enumerate(plans):
        for step in range(ring):
            source = (rank - step) % ring
            keys = places[rank]
            if step:
                keys = [places[source][p] for at in plans[source].sends[step] for p in range(at.start, at.stop)]
                assert len(keys) == mine.receives[step]
                assert {
                    k for piece in mine.pieces[step] for k in range(piece.columns.start, piece.columns.stop)
                } == set(range(len(keys))), "a key is sent that nobody reads"
            found.update((places[rank][q], keys[k]) for piece in mine.pieces[step] for q, k in pairs_of(piece))
    wanted = Counter()
    for row, lengths in enumerate(sequences):
        for start, stop in pairwise([0, *accumulate(lengths)]):
            for q in range(start, stop):
                first = max(start, q + 1 - window if window else 0)
                first = q - (q - start) % window if chunked else first
                wanted.update(((row, q), (row, k)) for k in range(first, q + 1))
    assert found == wanted


@given(case=packed(), window=st.sampled_from((0, 1, 3, 8)), n_rows=st.integers(1, 6))
@settings(max_examples=40, deadline=None)
def test_a_cut_piece_computes_the_same_pairs(case: tuple[int, list[Lengths]], window: int, n_rows: int) -> None:
    ring, sequences = case
    pieces = [*causal_pieces(tuple(sequences), window)]
    pieces += [piece for step in plan(tuple(sequences), "zigzag", ring, 0, True, window).pieces for piece in step]
    for piece in pieces:
        parts = list(piece.cut(n_rows))
        assert sorted(pair for part in parts for pair in pairs_of(part)) == sorted(pairs_of(piece))
        assert all(part.n_rows <= n_rows for part in parts)


@pytest.mark.parametrize(
    ("method", "steps"), [("ring", (1, 0, 0, 0, 0, 0, 0)), ("zigzag", (1, 0, 0, 0, 0, 0, 1)), ("allgather", None)]
)
def test_steps_of_a_ring_outside_of_the_window_are_neither_sent_nor_computed(
    method: str, steps: tuple[int, ...] | None
) -> None:
    """A window shorter than a chunk reaches only the chunk before: with `ring` that of the rank before; with zig-zag
    chunks also that of the rank after, for the late chunk."""
    of_ranks = [plan(((160,),), method, 8, rank, False, 5) for rank in range(8)]
    for rank, at in enumerate(of_ranks):
        sent = [sum(part.stop - part.start for part in parts) for parts in at.sends[1:]]
        assert sum(at.receives) <= 2 * 4, "window - 1 keys for each of at most two chunks"
        assert all(
            (received == 0) == (pairs == 0) for received, pairs in zip(at.receives[1:], at.pairs[1:], strict=True)
        )
        if steps is not None and 0 < rank < 7:
            assert [tokens > 0 for tokens in at.receives[1:]] == [bool(step) for step in steps]
            assert [tokens // 4 for tokens in sent] == list(steps)


@pytest.mark.parametrize("method", ["ring", "zigzag", "allgather"])
def test_steps_of_a_ring_outside_of_the_chunk_are_neither_sent_nor_computed(method: str) -> None:
    """Chunks of 40 tokens: of 8 ranks with 20 tokens each, two share a chunk; zig-zag pieces have 10 tokens, so that
    four ranks share the chunk of an early piece, and four that of a late one."""
    of_ranks = [plan(((160,),), method, 8, rank, False, 40, True) for rank in range(8)]
    received = [[tokens for tokens in at.receives if tokens] for at in of_ranks]
    assert [len(tokens) for tokens in received] == ([0, 1] * 4 if method == "ring" else [3] * 8)
    for at in of_ranks:
        assert all((got == 0) == (pairs == 0) for got, pairs in zip(at.receives[1:], at.pairs[1:], strict=True))
    assert sum(sum(at.pairs) for at in of_ranks) == 4 * 40 * 41 // 2
    aligned = [plan(((160,),), "ring", 8, rank, False, 20, True) for rank in range(8)]
    assert not any(sum(at.receives) for at in aligned), "a chunk for each rank"


def long_sequences() -> list[Lengths]:
    """Sequences of 16,384 tokens with documents from tens to thousands of tokens, made without a random generator."""
    found = []
    for first in range(1, 9):
        lengths, at = [], first
        while sum(lengths) < 16_384:
            at = at * 7919 % 10_007
            lengths.append(min(20 + at * at // 15_000, 16_384 - sum(lengths)))
        found.append(tuple(lengths))
    return found


@pytest.mark.parametrize("ring", [2, 4, 8, 16])
def test_dealt_documents_are_balanced_where_zigzag_chunks_are_not(ring: int) -> None:
    sequences = long_sequences()
    of_sums, of_steps = imbalance(sequences, "zigzag", ring, deals=True)
    assert max(of_sums, of_steps) < 1.05
    assert all(imbalance([each], "zigzag", ring, deals=True)[0] < 1.1 for each in sequences)
    assert imbalance(sequences, "zigzag", ring, deals=False)[0] > 1.1


def test_a_short_document_stays_on_one_rank_and_a_long_one_is_on_all() -> None:
    held = balanced_spans((100, *[10] * 10), 2)
    ranks = [{each.document for each in rank} for rank in held]
    assert ranks[0] & ranks[1] == {0}


def test_ranks_without_a_common_document_exchange_nothing() -> None:
    for rank in range(4):
        found = plan(((8, 8, 8, 8),), "ring", 4, rank, False)
        assert found.receives == (0, 0, 0, 0)
        assert not any(found.sends)
        assert found.pairs == (36, 0, 0, 0)
