"""Which tokens of a sequence of several documents each rank of cp holds, and which of them attend to which.

With attention within documents the number of scores of a token depends on where its document begins, so zig-zag chunks
of the sequence are not balanced. Each document is sharded over the ranks by itself (`dealt`):

- A document whose scores are few is given to one rank: no other rank needs its keys.
- A long document is sharded zig-zag over all ranks: rank r holds chunks r and 2R-1-r of its 2R chunks (Llama 3, arXiv
  2407.21783, section 3.3.2, for each document instead of the sequence; per-document sharding is that of WLB-LLM, arXiv
  2503.17924, here without padding: chunks may differ by a token).

Every rank holds S / R tokens of each sequence, in the order of the sequence, and all follows from the lengths of the
documents, which every rank of cp knows. So a rank's tokens of a document are consecutive among its own, and of the keys
of another rank a query needs a first part: attention is causal squares within a rank and rectangles between two ranks.

Letters: S tokens of the sequence, R ranks of the ring.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, groupby, pairwise

from shardwright.layout.layout import Layout
from shardwright.model.spec import ModelSpec
from shardwright.split.sequence import ZIGZAG, cut, on_ring

Lengths = tuple[int, ...]
"""Tokens of each document of a sequence, in order; the parts of documents that the sequence cuts are documents too."""

WHOLE = 8
"""A document is given to one rank where its scores are at most this part of the mean of a rank's."""


@dataclass(frozen=True)
class DocumentSpan:
    """Consecutive tokens of one document that a rank holds: positions `start` to `stop` - 1 in the sequence."""

    document: int
    start: int
    stop: int

    @property
    def tokens(self) -> int:
        """How many."""
        return self.stop - self.start


@dataclass(frozen=True)
class AttentionPiece:
    """Queries `rows` of a rank attend to keys `columns` of a block: all to all, or causally where the two are the same
    tokens. Both are places among the tokens of all sequences of a micro-batch, one sequence after another."""

    rows: slice
    columns: slice
    causal: bool = False

    @property
    def pairs(self) -> int:
        """The number of scores that are not masked."""
        n_rows, n_columns = self.rows.stop - self.rows.start, self.columns.stop - self.columns.start
        return n_rows * (n_rows + 1) // 2 if self.causal else n_rows * n_columns


@dataclass(frozen=True)
class RingPlan:
    """The attention of a rank of a ring to a micro-batch: in step s it has the keys of ring rank (rank - s) mod R.

    `pieces[s]`: what is computed in step s; columns are places among the keys that have come. `sends[s]`: the own
    tokens whose keys rank (rank + s) mod R needs, in the order in which they are sent; empty for step 0 and where the
    two ranks have no document in common. `receives[s]`: how many tokens come in step s.
    """

    pieces: tuple[tuple[AttentionPiece, ...], ...]
    sends: tuple[tuple[slice, ...], ...]
    receives: tuple[int, ...]

    @property
    def pairs(self) -> tuple[int, ...]:
        """[step] -> scores that are computed."""
        return tuple(sum(piece.pairs for piece in pieces) for pieces in self.pieces)


def deals_documents(spec: ModelSpec, layout: Layout) -> bool:
    """Whether each document is dealt over the ring on its own (`dealt`), instead of chunks of the sequence.

    Not with cp_method "ring", which is contiguous, and not with a capacity of experts: which tokens it drops is counted
    over pieces of the sequence that are the same for all sequences (`parallel.routing`).
    """
    capacity = spec.moe is not None and spec.moe.capacity_factor > 0
    return layout.cp_ring > 1 and layout.cp_method in ZIGZAG and not capacity


@lru_cache(maxsize=1024)
def held_tokens(lengths: Lengths, method: str, ring: int, deals: bool) -> tuple[tuple[DocumentSpan, ...], ...]:
    """[ring rank] -> the tokens of a sequence that it holds, in the order of the sequence, by document."""
    if deals:
        return dealt(lengths, ring)
    starts = [0, *accumulate(lengths)]
    found = []
    for rank in range(ring):
        spans = on_ring(method, starts[-1], ring, rank)
        pieces = [
            DocumentSpan(document, max(span.start, start), min(span.stop, stop))
            for span in spans
            for document, (start, stop) in enumerate(pairwise(starts))
        ]
        found.append(tuple(piece for piece in pieces if piece.tokens > 0))
    return tuple(found)


def spans_of_documents(layout: Layout, lengths: Lengths, rank: int, deals: bool) -> list[range]:
    """The positions of the tokens of a sequence that a rank of the world holds, in its order."""
    at = layout.coordinates(rank)
    held = held_tokens(lengths, layout.cp_method, layout.cp_ring, deals)[at["cp_ring"]]
    tokens = sum(lengths) // layout.cp
    return list(cut([range(each.start, each.stop) for each in held], at["cp_ulysses"] * tokens, tokens))


def dealt(lengths: Lengths, ring: int) -> tuple[tuple[DocumentSpan, ...], ...]:
    """[ring rank] -> its tokens, by document, such that ranks have equally many tokens and nearly as many scores.

    Documents are dealt in the order of their length, the longest first. One with few scores goes whole to the rank that
    has the fewest scores so far, of those with room for it; any other is sharded over all ranks in proportion to the
    room that they have. Every rank computes the same.
    """
    starts = [0, *accumulate(lengths)]
    assert starts[-1] % ring == 0, f"{starts[-1]} tokens are not divisible by a ring of {ring}"
    room, pairs = [starts[-1] // ring] * ring, [0] * ring
    most = sum(_triangle(length) for length in lengths) // (WHOLE * ring)
    found: list[list[DocumentSpan]] = [[] for _ in range(ring)]
    for document in sorted(range(len(lengths)), key=lambda each: (-lengths[each], each)):
        length, start = lengths[document], starts[document]
        with_room = [rank for rank in range(ring) if room[rank] >= length]
        if with_room and _triangle(length) <= most:
            rank = min(with_room, key=lambda each: (pairs[each], each))
            shares = [length if each == rank else 0 for each in range(ring)]
        else:
            shares = _shares(length, room)
        for rank, chunks in enumerate(_zigzag(document, start, shares)):
            found[rank] += chunks
            room[rank] -= shares[rank]
            pairs[rank] += sum(_triangle(each.stop - start) - _triangle(each.start - start) for each in chunks)
    return tuple(tuple(sorted(each, key=lambda held: held.start)) for each in found)


def _shares(length: int, room: Sequence[int]) -> list[int]:
    """How many tokens of a document each rank takes: in proportion to its room, the rest to those with most left."""
    total = sum(room)
    shares = [length * each // total for each in room]
    by_room = sorted(range(len(room)), key=lambda rank: (shares[rank] - room[rank], rank))
    for rank in by_room[: length - sum(shares)]:
        shares[rank] += 1
    return shares


def _zigzag(document: int, start: int, shares: Sequence[int]) -> list[list[DocumentSpan]]:
    """[rank] -> an early and a late chunk of a document: early ones in the order of ranks, late ones in the reverse."""
    late = [share // 2 for share in shares]
    sizes = [(rank, share - late[rank]) for rank, share in enumerate(shares)]
    sizes += [(rank, late[rank]) for rank in reversed(range(len(shares)))]
    chunks: list[list[DocumentSpan]] = [[] for _ in shares]
    for rank, size in sizes:
        if size:
            before = chunks[rank]
            if before and before[-1].stop == start:  # the last rank's early and late chunk are one
                before[-1] = DocumentSpan(document, before[-1].start, start + size)
            else:
                before.append(DocumentSpan(document, start, start + size))
            start += size
    return chunks


@lru_cache(maxsize=256)
def plan(sequences: tuple[Lengths, ...], method: str, ring: int, rank: int, deals: bool) -> RingPlan:
    """The attention of a ring rank to a micro-batch of so many sequences with documents of these lengths."""
    pieces: list[list[AttentionPiece]] = [[] for _ in range(ring)]
    sends: list[list[slice]] = [[] for _ in range(ring)]
    receives = [0] * ring
    first = 0
    for lengths in sequences:
        held = held_tokens(lengths, method, ring, deals)
        places = [_places(each) for each in held]
        mine = places[rank]
        for step in range(ring):
            if step == 0:
                pieces[0] += [
                    _moved(AttentionPiece(place, place, causal=True), first, first) for place, _ in mine.values()
                ]
                continue
            theirs, later = places[(rank - step) % ring], places[(rank + step) % ring]
            for document in mine:
                if document in theirs:
                    found, needed = _between(mine[document], theirs[document])
                    pieces[step] += [_moved(piece, first, receives[step]) for piece in found]
                    receives[step] += needed
                if document in later:
                    _, needed = _between(later[document], mine[document])
                    at = first + mine[document][0].start
                    sends[step] += [slice(at, at + needed)] if needed else []
        first += sum(lengths) // ring
    return RingPlan(tuple(map(tuple, pieces)), tuple(tuple(_joined(each)) for each in sends), tuple(receives))


_Places = dict[int, tuple[slice, list[DocumentSpan]]]
"""Document -> the places of its tokens among those of a rank, and where they are in the sequence."""


def _places(held: Sequence[DocumentSpan]) -> _Places:
    found, at = {}, 0
    for document, group in groupby(held, key=lambda each: each.document):
        parts = list(group)
        tokens = sum(part.tokens for part in parts)
        found[document] = slice(at, at + tokens), parts
        at += tokens
    return found


def _between(
    queries: tuple[slice, list[DocumentSpan]], keys: tuple[slice, list[DocumentSpan]]
) -> tuple[list[AttentionPiece], int]:
    """The pieces of one document between the queries of a rank and the keys of another, with columns that begin at 0,
    and how many of its first keys the queries need."""
    pieces, at = [], queries[0].start
    for n_keys, group in groupby(queries[1], key=lambda each: sum(k.tokens for k in keys[1] if k.start < each.start)):
        rows = sum(each.tokens for each in group)
        if n_keys:
            pieces.append(AttentionPiece(slice(at, at + rows), slice(0, n_keys)))
        at += rows
    return pieces, pieces[-1].columns.stop if pieces else 0


def _moved(piece: AttentionPiece, rows: int, columns: int) -> AttentionPiece:
    return AttentionPiece(
        slice(piece.rows.start + rows, piece.rows.stop + rows),
        slice(piece.columns.start + columns, piece.columns.stop + columns),
        piece.causal,
    )


def _joined(places: Sequence[slice]) -> Iterator[slice]:
    """The same places, those that follow one another as one slice."""
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
    """The scores of n tokens with a causal mask."""
    return n * (n + 1) // 2


def imbalance(sequences: Sequence[Lengths], method: str, ring: int, deals: bool) -> tuple[float, float]:
    """(of the sums, of the steps): the slowest rank's scores over the mean of all ranks, for each sequence as one
    micro-batch; the mean over sequences is weighted by their scores.

    Of the steps: the sum over the ring's steps of the maximum over ranks, as if all waited for each other after each.
    """
    slowest = stepwise = mean = 0.0
    for lengths in sequences:
        pairs = [plan((lengths,), method, ring, rank, deals).pairs for rank in range(ring)]
        slowest += max(map(sum, pairs))
        stepwise += sum(map(max, zip(*pairs, strict=True)))
        mean += sum(map(sum, pairs)) / ring
    return slowest / mean, stepwise / mean
