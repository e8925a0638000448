"""The tokens of a sequence of several documents on each rank of cp, and the pairs of them that attend.

With attention within documents, a token's number of scores depends on where its document starts, so zig-zag chunks of
the sequence are not balanced. Each document is sharded over the ranks by itself (`balanced_spans`):

- A document with few scores is assigned to one rank, so no other rank needs its keys.
- A long document is sharded zig-zag over all ranks: rank r has chunks r and 2R-1-r of its 2R chunks (Llama 3, arXiv
  2407.21783, section 3.3.2, for each document instead of the sequence). Per-document sharding is from WLB-LLM, arXiv
  2503.17924, here without padding: chunks may differ by a token.

Every rank has S / R tokens of each sequence, in sequence order. The assignment depends only on the document lengths,
which every rank of cp knows. A rank's tokens of a document are consecutive among its own tokens, and a query needs a
prefix of another rank's keys: attention consists of causal squares within a rank and rectangles between two ranks.

Letters: S tokens of the sequence, R ranks of the ring.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import accumulate, groupby, pairwise

import numpy as np

from shardwright.layout.layout import Layout
from shardwright.model.pieces import AttentionPiece, chunk_lengths
from shardwright.model.spec import ModelSpec
from shardwright.split.sequence import ZIGZAG, cut, on_ring

Lengths = tuple[int, ...]
"""Tokens of each document of a sequence, in order; parts of documents that the sequence cuts count as documents."""

WHOLE = 8
"""A document is assigned to one rank if its scores are at most 1 / WHOLE of the mean scores of a rank."""


@dataclass(frozen=True)
class DocumentSpan:
    """Consecutive tokens of one document on a rank: positions `start` to `stop` - 1 in the sequence."""

    document: int
    start: int
    stop: int

    @property
    def tokens(self) -> int:
        """The number of tokens."""
        return self.stop - self.start


@dataclass(frozen=True)
class RingPlan:
    """The attention of a ring rank to a micro-batch. In step s it has the keys of ring rank (rank - s) mod R.

    `pieces[s]`: attention computed in step s; columns are indices into the received keys. `sends[s]`: own tokens whose
    keys rank (rank + s) mod R needs, in send order; empty for step 0 and if the two ranks share no document.
    `receives[s]`: number of tokens received in step s.
    """

    pieces: tuple[tuple[AttentionPiece, ...], ...]
    sends: tuple[tuple[slice, ...], ...]
    receives: tuple[int, ...]

    @property
    def pairs(self) -> tuple[int, ...]:
        """[step] -> number of scores computed."""
        return tuple(sum(piece.pairs for piece in pieces) for pieces in self.pieces)


def balances_documents(spec: ModelSpec, layout: Layout) -> bool:
    """Return whether each document is sharded over the ring by itself (`balanced_spans`), not chunks of the sequence.

    False for cp_method "ring", which is contiguous. False with an expert capacity: the tokens that it drops are counted
    over pieces of the sequence that are the same for all sequences (`parallel.routing`). False with linear attention,
    whose states pass between the same pieces of all sequences (`parallel.linear_attention`).
    """
    capacity = spec.moe is not None and spec.moe.capacity_factor > 0
    linear = spec.linear_attention is not None
    return layout.cp_ring > 1 and layout.cp_method in ZIGZAG and not capacity and not linear


@lru_cache(maxsize=1024)
def ring_tokens(lengths: Lengths, method: str, ring: int, deals: bool) -> tuple[tuple[DocumentSpan, ...], ...]:
    """Return [ring rank] -> its tokens of a sequence, in sequence order, by document."""
    if deals:
        return balanced_spans(lengths, ring)
    starts = [0, *accumulate(lengths)]
    result = []
    for rank in range(ring):
        spans = on_ring(method, starts[-1], ring, rank)
        pieces = [
            DocumentSpan(document, max(span.start, start), min(span.stop, stop))
            for span in spans
            for document, (start, stop) in enumerate(pairwise(starts))
        ]
        result.append(tuple(piece for piece in pieces if piece.tokens > 0))
    return tuple(result)


def spans_of_documents(layout: Layout, lengths: Lengths, rank: int, deals: bool) -> list[range]:
    """Return the sequence positions of the tokens of a rank of the world, in its order."""
    at = layout.coordinates(rank)
    local = ring_tokens(lengths, layout.cp_method, layout.cp_ring, deals)[at["cp_ring"]]
    tokens = sum(lengths) // layout.cp
    return list(cut([range(span.start, span.stop) for span in local], at["cp_ulysses"] * tokens, tokens))


def balanced_spans(lengths: Lengths, ring: int) -> tuple[tuple[DocumentSpan, ...], ...]:
    """Return [ring rank] -> its tokens, by document, with equal numbers of tokens and nearly equal numbers of scores.

    Documents are assigned longest first. A document with few scores is assigned to the rank with the fewest scores so
    far among the ranks with room for it. Any other document is sharded over all ranks in proportion to their room. The
    result is the same on every rank.
    """
    starts = [0, *accumulate(lengths)]
    assert starts[-1] % ring == 0, f"{starts[-1]} tokens are not divisible by a ring of {ring}"
    room, pairs = [starts[-1] // ring] * ring, [0] * ring
    most = sum(_triangle(length) for length in lengths) // (WHOLE * ring)
    per_rank: list[list[DocumentSpan]] = [[] for _ in range(ring)]
    for document in sorted(range(len(lengths)), key=lambda number: (-lengths[number], number)):
        length, start = lengths[document], starts[document]
        with_room = [rank for rank in range(ring) if room[rank] >= length]
        if with_room and _triangle(length) <= most:
            rank = min(with_room, key=lambda candidate: (pairs[candidate], candidate))
            shares = [length if receiver == rank else 0 for receiver in range(ring)]
        else:
            shares = _shares(length, room)
        for rank, chunks in enumerate(_zigzag(document, start, shares)):
            per_rank[rank] += chunks
            room[rank] -= shares[rank]
            pairs[rank] += sum(_triangle(chunk.stop - start) - _triangle(chunk.start - start) for chunk in chunks)
    return tuple(tuple(sorted(spans, key=lambda span: span.start)) for spans in per_rank)


def _shares(length: int, room: Sequence[int]) -> list[int]:
    """Return the tokens of a document for each rank: in proportion to room, the remainder to ranks with most room."""
    total = sum(room)
    shares = [length * tokens // total for tokens in room]
    by_room = sorted(range(len(room)), key=lambda rank: (shares[rank] - room[rank], rank))
    for rank in by_room[: length - sum(shares)]:
        shares[rank] += 1
    return shares


def _zigzag(document: int, start: int, shares: Sequence[int]) -> list[list[DocumentSpan]]:
    """Return [rank] -> an early and a late chunk of a document: early ones in rank order, late ones reversed."""
    late = [share // 2 for share in shares]
    sizes = [(rank, share - late[rank]) for rank, share in enumerate(shares)]
    sizes += [(rank, late[rank]) for rank in reversed(range(len(shares)))]
    chunks: list[list[DocumentSpan]] = [[] for _ in shares]
    for rank, size in sizes:
        if size:
            before = chunks[rank]
            if before and before[-1].stop == start:  # the last rank's early and late chunk are contiguous
                before[-1] = DocumentSpan(document, before[-1].start, start + size)
            else:
                before.append(DocumentSpan(document, start, start + size))
            start += size
    return chunks


@lru_cache(maxsize=256)
def plan(
    sequences: tuple[Lengths, ...],
    method: str,
    ring: int,
    rank: int,
    deals: bool,
    window: int = 0,
    chunked: bool = False,
) -> RingPlan:
    """Return the attention of a ring rank to a micro-batch of `sequences`, given by their document lengths; with a
    `window` a token attends to the last `window` tokens of its document only, itself included, or, if `chunked`, to its
    chunk of `window` tokens of the document."""
    pieces: list[list[AttentionPiece]] = [[] for _ in range(ring)]
    sends: list[list[slice]] = [[] for _ in range(ring)]
    receives = [0] * ring
    first = 0
    for lengths in sequences:
        per_rank = ring_tokens(lengths, method, ring, deals)
        if chunked:
            per_rank = tuple(tuple(_in_chunks(spans, lengths, window)) for spans in per_rank)
        places = [_places(spans) for spans in per_rank]
        local = places[rank]
        for step in range(ring):
            source, target = places[(rank - step) % ring], places[(rank + step) % ring]
            for document, (place, _) in local.items():
                between = partial(_between, window=0 if chunked or window >= lengths[document] else window)
                if step == 0:
                    own, _ = between(local[document], local[document])
                    pieces[0] += [piece.moved(first, first + place.start) for piece in own]
                    continue
                if document in source:
                    remote, needed = between(local[document], source[document])
                    pieces[step] += [piece.moved(first, receives[step]) for piece in remote]
                    receives[step] += sum(at.stop - at.start for at in needed)
                if document in target:
                    _, needed = between(target[document], local[document])
                    at = first + place.start
                    sends[step] += [slice(at + part.start, at + part.stop) for part in needed]
        first += sum(lengths) // ring
    return RingPlan(tuple(map(tuple, pieces)), tuple(tuple(_joined(slices)) for slices in sends), tuple(receives))


def _in_chunks(spans: Sequence[DocumentSpan], lengths: Lengths, chunk: int) -> Iterator[DocumentSpan]:
    """Yield the same tokens with the chunks of documents as documents: chunks attend to no other, and the tokens of a
    rank stay in their order."""
    starts = [0, *accumulate(lengths)]
    first = [0, *accumulate(len(chunk_lengths(length, chunk)) for length in lengths)]
    for span in spans:
        at = span.start
        while at < span.stop:
            number, offset = divmod(at - starts[span.document], chunk)
            stop = min(span.stop, at - offset + chunk)
            yield DocumentSpan(first[span.document] + number, at, stop)
            at = stop


_Places = dict[int, tuple[slice, list[DocumentSpan]]]
"""Document -> the slice of its tokens among a rank's tokens, and their positions in the sequence."""


def _places(spans: Sequence[DocumentSpan]) -> _Places:
    places, at = {}, 0
    for document, group in groupby(spans, key=lambda span: span.document):
        parts = list(group)
        tokens = sum(part.tokens for part in parts)
        places[document] = slice(at, at + tokens), parts
        at += tokens
    return places


def _between(
    queries: tuple[slice, list[DocumentSpan]], keys: tuple[slice, list[DocumentSpan]], window: int
) -> tuple[list[AttentionPiece], list[slice]]:
    """Return the pieces of one document between the queries of a rank and keys, its own or another rank's, and the keys
    that these need, as indices into the rank's keys of the document. Columns are indices into the needed keys."""
    if window:
        return _within_window(queries, keys, window)
    if queries == keys:
        rows, tokens = queries[0], queries[0].stop - queries[0].start
        return [AttentionPiece(rows, slice(0, tokens), causal=True)], [slice(0, tokens)]
    pieces, at = [], queries[0].start
    for n_keys, group in groupby(queries[1], key=lambda span: sum(k.tokens for k in keys[1] if k.start < span.start)):
        n_rows = sum(span.tokens for span in group)
        if n_keys:
            pieces.append(AttentionPiece(slice(at, at + n_rows), slice(0, n_keys)))
        at += n_rows
    return pieces, [pieces[-1].columns] if pieces else []


def _within_window(
    queries: tuple[slice, list[DocumentSpan]], keys: tuple[slice, list[DocumentSpan]], window: int
) -> tuple[list[AttentionPiece], list[slice]]:
    """Return the result of `_between` with a window: pieces of each span of queries with each span of keys at or before
    it, as far as the window reaches."""
    pieces: list[AttentionPiece] = []
    needed: list[slice] = []
    n_needed = at_keys = 0
    for k in keys[1]:
        firsts = [max(k.start, q.start - window + 1) for q in queries[1] if q.start >= k.start]
        first, at = min(firsts, default=k.stop), queries[0].start
        for q in queries[1]:
            # The last query that reads a key of the span is window - 1 tokens behind its last key.
            n_rows = min(q.tokens, k.stop + window - 1 - q.start) if q.start >= k.start else 0
            low = max(k.start, q.start - window + 1)
            if n_rows > 0 and low < k.stop:
                columns = slice(n_needed + low - first, n_needed + k.stop - first)
                rows = slice(at, at + n_rows)
                pieces.append(AttentionPiece(rows, columns, q == k, q.start - low, window))
            at += q.tokens
        if first < k.stop:
            needed.append(slice(at_keys + first - k.start, at_keys + k.tokens))
            n_needed += k.stop - first
        at_keys += k.tokens
    return pieces, needed


def _joined(places: Sequence[slice]) -> Iterator[slice]:
    """Yield the same positions, with adjacent slices merged."""
    for at, place in enumerate(places):
        if at and places[at - 1].stop == place.start:
            continue
        stop = place.stop
        for after in places[at + 1 :]:
            if after.start != stop:
                break
            stop = after.stop
        yield slice(place.start, stop)


def _triangle(n: int) -> int:
    """Return the number of scores of n tokens with a causal mask."""
    return n * (n + 1) // 2


def imbalance(sequences: Sequence[Lengths], method: str, ring: int, deals: bool) -> tuple[float, float]:
    """Return (total imbalance, step imbalance) of the scores: the slowest rank over the mean of all ranks.

    Each sequence is one micro-batch; the mean over sequences is weighted by their scores. The step imbalance sums the
    maximum over ranks of each ring step, as if all ranks synchronized after each step.
    """
    slowest = stepwise = mean = 0.0
    for lengths in sequences:
        pairs = [plan((lengths,), method, ring, rank, deals).pairs for rank in range(ring)]
        slowest += max(map(sum, pairs))
        stepwise += sum(map(max, zip(*pairs, strict=True)))
        mean += sum(map(sum, pairs)) / ring
    return slowest / mean, stepwise / mean


def attended_tokens(lengths: np.ndarray | Sequence[int]) -> float:
    """Return the mean length of a token's document, sum L^2 / sum L.

    Attention within documents has as many scores as attention over sequences of this length.
    """
    as_floats = np.asarray(lengths, dtype=np.float64)
    return float((as_floats**2).sum() / as_floats.sum())
