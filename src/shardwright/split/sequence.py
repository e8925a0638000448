"""Which tokens of a sequence a context rank holds, and how much attention that leaves it to compute.

S tokens are dealt to a ring of R ranks, and what a rank of the ring holds is cut among U Ulysses ranks. A causal
token attends to those before it, so later tokens are dearer, and how they are dealt decides who waits for whom.

| method      | a ring rank r holds                                       | from                                     |
| ----------- | --------------------------------------------------------- | ---------------------------------------- |
| `ring`      | the r-th of R equal parts                                 | Ring Attention, arXiv 2310.01889         |
| `zigzag`    | chunks r and 2R-1-r of 2R                                 | Llama 3, arXiv 2407.21783, section 3.3.2 |
| `allgather` | as `zigzag`                                               | the same                                 |
| `ulysses`   | everything (R = 1)                                        | DeepSpeed-Ulysses, arXiv 2309.14509      |
| `usp`       | as `zigzag`                                               | USP, arXiv 2405.07719                    |
| `striped`   | tokens r, r+R, r+2R, ... (only here, for the comparison)  | Striped Attention, arXiv 2311.09431      |
"""

from collections.abc import Iterator

from shardwright.layout import CP_METHODS, Layout

ZIGZAG = ("zigzag", "allgather", "usp")


def spans(method: str, seq_len: int, ring: int, ulysses: int, ring_rank: int, ulysses_rank: int) -> list[range]:
    """The positions of the tokens that a context rank holds, in the order in which it holds them.

    `ring` and `ulysses` are the degrees of the two axes of a context group, 1 for an axis that a method lacks.
    """
    held = _on_ring(method, seq_len, ring, ring_rank)
    tokens, left = divmod(seq_len // ring, ulysses)
    assert left == 0, f"{seq_len} tokens do not divide by a ring of {ring} times {ulysses}"
    return list(_cut(held, ulysses_rank * tokens, tokens))


def held_by(layout: Layout, seq_len: int, rank: int, *, token_shard: bool = False) -> list[range]:
    """The positions of the tokens that a rank of the world holds, in its order; with `token_shard` those of its share
    of them under sequence parallelism."""
    at = layout.coordinates(rank)
    held = spans(layout.cp_method, seq_len, layout.cp_ring, layout.cp_ulysses, at["cp_ring"], at["cp_ulysses"])
    if token_shard:
        share = seq_len // (layout.cp * layout.tp)
        held = list(_cut(held, at["tp"] * share, share))
    return held


def step_pairs(method: str, seq_len: int, ring: int) -> list[list[int]]:
    """[step][ring rank] -> (query, key) pairs computed: in step s, rank r has the keys of rank (r - s) mod `ring`.

    A step of a ring lasts as long as its slowest rank, so a method is as fast as the sum of each step's maximum.
    """
    held = [_on_ring(method, seq_len, ring, rank) for rank in range(ring)]
    return [
        [sum(_pairs(q, k) for q in held[rank] for k in held[(rank - step) % ring]) for rank in range(ring)]
        for step in range(ring)
    ]


def attention_pairs(method: str, seq_len: int, ring: int) -> list[int]:
    """[ring rank] -> (query, key) pairs with key <= query that it computes; S (S + 1) / 2 over all ranks."""
    return [sum(steps) for steps in zip(*step_pairs(method, seq_len, ring), strict=True)]


def attention_flops(pairs: int, n_heads: int, head_dim: int) -> int:
    """FLOPs of one layer's attention forward for one sequence: 4 C H pairs; backward is 2.5 times that.

    C is the width of a head, H the heads (H / U on a Ulysses rank): a pair costs a product of 2 C FLOPs for the
    score and one for the value. Backward has five such products, two of scores and three of gradients
    (FlashAttention-2, arXiv 2307.08691, section 3). Ignores the softmax, and pairs that a kernel computes and masks.
    """
    return 4 * head_dim * n_heads * pairs


def _on_ring(method: str, seq_len: int, ring: int, rank: int) -> list[range]:
    """What a ring rank holds, before it is cut among Ulysses ranks."""
    assert 0 <= rank < ring, f"rank {rank} of a ring of {ring}"
    if ring == 1:
        return [range(seq_len)]
    parts = 2 * ring if method in ZIGZAG else ring
    chunk, left = divmod(seq_len, parts)
    assert left == 0, f"{seq_len} tokens do not divide into {parts} parts"
    if method in ZIGZAG:
        return [range(part * chunk, (part + 1) * chunk) for part in (rank, parts - 1 - rank)]
    if method == "striped":
        return [range(rank, seq_len, ring)]
    assert method in CP_METHODS, method
    return [range(rank * chunk, (rank + 1) * chunk)]


def _cut(held: list[range], start: int, length: int) -> Iterator[range]:
    """The tokens start, ..., start + length - 1 of those held, as ranges."""
    for span in held:
        piece = span[max(0, start) : max(0, start + length)]
        if piece:
            yield piece
        start -= len(span)


def _pairs(queries: range, keys: range) -> int:
    """(query, key) pairs with key <= query of two ranges of one stride.

    The sum over queries i = 0, 1, ... of min(max(i + c, 0), K), with K keys, c of which would be at or before the
    first query if they went on for ever on either side.
    """
    assert queries.step == keys.step
    c = (queries.start - keys.start) // keys.step + 1

    def up_to(x: int) -> int:
        """min(0, K) + min(1, K) + ... + min(x, K)"""
        below = max(0, min(x, len(keys)))
        return below * (below + 1) // 2 + max(0, x - len(keys)) * len(keys)

    return up_to(c + len(queries) - 1) - up_to(c - 1)
