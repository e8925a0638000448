"""The tokens of a sequence on each rank of cp, and the number of attention scores that the rank computes for them.

S tokens are sharded over a ring of R ranks, and the tokens of each ring rank over U Ulysses ranks. With a causal mask
later tokens attend to more keys, so the choice of tokens for each rank decides how evenly the work is distributed.

| method      | tokens of ring rank r                                     | source                                   |
| ----------- | --------------------------------------------------------- | ---------------------------------------- |
| `ring`      | the r-th of R equal parts                                 | Ring Attention, arXiv 2310.01889         |
| `zigzag`    | chunks r and 2R-1-r of 2R                                 | Llama 3, arXiv 2407.21783, section 3.3.2 |
| `allgather` | as `zigzag`                                               | the same                                 |
| `ulysses`   | everything (R = 1)                                        | DeepSpeed-Ulysses, arXiv 2309.14509      |
| `usp`       | as `zigzag`                                               | USP, arXiv 2405.07719                    |
| `striped`   | tokens r, r+R, r+2R, ... (only here, for the comparison)  | Striped Attention, arXiv 2311.09431      |
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import lcm

from shardwright.layout.keys import CP_METHODS
from shardwright.layout.layout import Layout
from shardwright.model.pieces import pairs_up_to

ZIGZAG = ("zigzag", "allgather", "usp")


def spans(method: str, seq_len: int, ring: int, ulysses: int, ring_rank: int, ulysses_rank: int) -> list[range]:
    """Return the positions of the tokens of a rank of cp, in the order in which the rank stores them.

    `ring` and `ulysses` are the degrees of the two axes of cp, 1 for an axis that a method does not have.
    """
    local = on_ring(method, seq_len, ring, ring_rank)
    tokens, left = divmod(seq_len // ring, ulysses)
    assert left == 0, f"{seq_len} tokens are not divisible by a ring of {ring} times {ulysses}"
    return list(cut(local, ulysses_rank * tokens, tokens))


def positions_of_rank(layout: Layout, seq_len: int, rank: int, *, token_shard: bool = False) -> list[range]:
    """Return the positions of the tokens of a rank of the world, in its order. `token_shard`: only the rank's token
    shard under sequence parallelism."""
    at = layout.coordinates(rank)
    local = spans(layout.cp_method, seq_len, layout.cp_ring, layout.cp_ulysses, at["cp_ring"], at["cp_ulysses"])
    if token_shard:
        shard_tokens = seq_len // (layout.cp * layout.tp)
        local = list(cut(local, at["tp"] * shard_tokens, shard_tokens))
    return local


@dataclass(frozen=True)
class SequencePieces:
    """The partition of a sequence into `n_pieces` equal parts. Every rank of cp holds whole parts.

    `of_ranks`: for each rank of cp, ring ranks first and their Ulysses ranks within, the numbers of its pieces in the
    order in which it stores them.
    """

    n_pieces: int
    of_ranks: tuple[tuple[int, ...], ...]

    @staticmethod
    def from_layout(layout: Layout) -> "SequencePieces":
        """Return the largest equal pieces for the method and degrees of cp."""
        ring, ulysses = layout.cp_ring, layout.cp_ulysses
        n_pieces = lcm(chunks_of_ring_rank(layout.cp_method) * ring if ring > 1 else 1, layout.cp)
        of_ranks = [
            spans(layout.cp_method, n_pieces, ring, ulysses, *divmod(rank, ulysses)) for rank in range(layout.cp)
        ]
        return SequencePieces(
            n_pieces, tuple(tuple(piece for span in of_rank for piece in span) for of_rank in of_ranks)
        )


def step_pairs(method: str, seq_len: int, ring: int) -> list[list[int]]:
    """Return [step][ring rank] -> (query, key) pairs computed. In step s, rank r has the keys of rank (r - s) mod
    `ring`.

    The slowest rank determines the time of a step, so the time of a method is the sum of each step's maximum.
    """
    per_rank = [on_ring(method, seq_len, ring, rank) for rank in range(ring)]
    return [
        [sum(_pairs(q, k) for q in per_rank[rank] for k in per_rank[(rank - step) % ring]) for rank in range(ring)]
        for step in range(ring)
    ]


def attention_pairs(method: str, seq_len: int, ring: int) -> list[int]:
    """Return [ring rank] -> the number of (query, key) pairs with key <= query; S (S + 1) / 2 over all ranks."""
    return [sum(steps) for steps in zip(*step_pairs(method, seq_len, ring), strict=True)]


def attention_flops(pairs: int, n_heads: int, head_dim: int) -> int:
    """Return the FLOPs of one layer's attention forward for one sequence: 4 C H pairs; backward is 2.5 times as many.

    C is the width of a head, H the heads (H / U on a Ulysses rank): a pair costs 2 C FLOPs in the matmul of the scores
    and 2 C in the matmul with the values. Backward has five such matmuls, two for the scores and three for gradients
    (FlashAttention-2, arXiv 2307.08691, section 3). Ignores the softmax, and pairs that a kernel computes and masks.
    """
    return 4 * head_dim * n_heads * pairs


def chunks_of_ring_rank(method: str) -> int:
    """Return the number of separate parts of a sequence on a ring rank."""
    return 2 if method in ZIGZAG else 1


def on_ring(method: str, seq_len: int, ring: int, rank: int) -> list[range]:
    """Return the positions of the tokens of a ring rank, before they are sharded over Ulysses ranks."""
    assert 0 <= rank < ring, f"rank {rank} of a ring of {ring}"
    if ring == 1:
        return [range(seq_len)]
    parts = chunks_of_ring_rank(method) * ring
    chunk, left = divmod(seq_len, parts)
    assert left == 0, f"{seq_len} tokens are not divisible into {parts} parts"
    if method in ZIGZAG:
        return [range(part * chunk, (part + 1) * chunk) for part in (rank, parts - 1 - rank)]
    if method == "striped":
        return [range(rank, seq_len, ring)]
    assert method in CP_METHODS, method
    return [range(rank * chunk, (rank + 1) * chunk)]


def cut(ranges: list[range], start: int, length: int) -> Iterator[range]:
    """Yield the tokens start, ..., start + length - 1 of `held`, as ranges."""
    for span in ranges:
        piece = span[max(0, start) : max(0, start + length)]
        if piece:
            yield piece
        start -= len(span)


def _pairs(queries: range, keys: range) -> int:
    """Return the number of (query, key) pairs with key <= query, for two ranges of the same stride."""
    assert queries.step == keys.step
    return pairs_up_to(len(queries), len(keys), (queries.start - keys.start) // keys.step)
