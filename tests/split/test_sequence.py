"""Proves that the tokens of a sequence are dealt out once each, and who has how much attention to compute."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.layout.keys import CP_METHODS
from shardwright.layout.layout import Layout
from shardwright.split.rules import sequence_cuts
from shardwright.split.sequence import attention_flops, attention_pairs, positions_of_rank, spans, step_pairs

degrees = st.integers(1, 6)


def positions(method: str, seq_len: int, ring: int, ulysses: int, ring_rank: int, ulysses_rank: int) -> list[int]:
    return [p for span in spans(method, seq_len, ring, ulysses, ring_rank, ulysses_rank) for p in span]


def test_zigzag_gives_each_rank_an_early_and_a_late_chunk():
    assert spans("zigzag", 16, 2, 1, 0, 0) == [range(4), range(12, 16)]
    assert spans("zigzag", 16, 2, 1, 1, 0) == [range(4, 8), range(8, 12)]
    assert spans("allgather", 16, 2, 1, 1, 0) == [range(4, 8), range(8, 12)]


def test_the_other_methods_by_example():
    assert spans("ring", 16, 2, 1, 1, 0) == [range(8, 16)]
    assert spans("ulysses", 16, 1, 2, 0, 1) == [range(8, 16)]
    assert spans("usp", 16, 2, 2, 0, 0) == [range(4)]
    assert spans("usp", 16, 2, 2, 0, 1) == [range(12, 16)]
    assert spans("usp", 24, 2, 4, 1, 1) == [range(9, 12)]
    assert spans("usp", 36, 2, 3, 0, 1) == [range(6, 9), range(27, 30)]  # across both chunks
    assert spans("striped", 8, 2, 1, 1, 0) == [range(1, 8, 2)]


@given(st.sampled_from(CP_METHODS), degrees, degrees, st.integers(1, 4))
def test_every_position_is_held_once_in_causal_order_and_by_all_equally(
    method: str, ring: int, ulysses: int, size: int
):
    ring = 1 if method == "ulysses" else ring
    ulysses = ulysses if method in ("ulysses", "usp") else 1
    seq_len = 2 * ring * ulysses * size
    held = [positions(method, seq_len, ring, ulysses, r, u) for r in range(ring) for u in range(ulysses)]
    assert sorted(p for tokens in held for p in tokens) == list(range(seq_len))
    for tokens in held:
        assert tokens == sorted(tokens)
        assert len(tokens) == seq_len // (ring * ulysses)


@given(degrees, degrees, st.integers(1, 4))
def test_ulysses_ranks_put_together_hold_what_a_zigzag_rank_holds(ring: int, ulysses: int, size: int):
    seq_len = 2 * ring * ulysses * size
    for r in range(ring):
        together = [p for u in range(ulysses) for p in positions("usp", seq_len, ring, ulysses, r, u)]
        assert together == positions("zigzag", seq_len, ring, 1, r, 0)


@given(st.sampled_from(CP_METHODS), st.integers(1, 4), st.integers(2, 5), st.integers(1, 5), st.integers(1, 3))
def test_token_shards_are_whole_pieces_of_a_sequence_cut_as_often_as_its_length_says(
    method: str, ring: int, ulysses: int, tp: int, size: int
):
    cp, inner = {"usp": (ring * ulysses, ulysses), "ulysses": (ulysses, 1)}.get(method, (ring, 1))
    layout = Layout(cp=cp, tp=tp, cp_method=method, ulysses_degree=inner, sequence_parallel=True)
    n_pieces = sequence_cuts(layout)
    held = [positions_of_rank(layout, n_pieces, rank, token_shard=True) for rank in range(layout.world_size)]
    assert sorted(piece for spans in held for span in spans for piece in span) == list(range(n_pieces))
    for rank, pieces in enumerate(held):
        tokens = positions_of_rank(layout, size * n_pieces, rank, token_shard=True)
        in_pieces = [range(size * piece, size * (piece + 1)) for span in pieces for piece in span]
        assert [t for span in tokens for t in span] == [t for piece in in_pieces for t in piece]


@given(st.sampled_from([*CP_METHODS, "striped"]), degrees, st.integers(1, 4))
def test_pairs_of_each_step_are_those_counted_one_by_one(method: str, ring: int, size: int):
    ring = 1 if method == "ulysses" else ring
    seq_len = 2 * ring * size
    held = [positions(method, seq_len, ring, 1, r, 0) for r in range(ring)]
    for step, pairs in enumerate(step_pairs(method, seq_len, ring)):
        for rank, count in enumerate(pairs):
            assert count == sum(k <= q for q in held[rank] for k in held[(rank - step) % ring])


@given(st.sampled_from(["zigzag", "allgather", "usp"]), st.integers(1, 64), st.integers(1, 5000))
def test_zigzag_is_balanced_over_ranks_and_in_every_step_within_one_block(method: str, ring: int, chunk: int):
    seq_len = 2 * ring * chunk
    pairs = attention_pairs(method, seq_len, ring)
    assert sum(pairs) == seq_len * (seq_len + 1) // 2
    assert max(pairs) - min(pairs) <= chunk * chunk
    for step in step_pairs(method, seq_len, ring):
        assert max(step) - min(step) <= chunk * chunk


@pytest.mark.parametrize("ring", [2, 4, 8, 64])
def test_contiguous_is_not_balanced_the_last_rank_computes_nearly_twice_the_mean(ring: int):
    seq_len = 1024 * ring
    pairs = attention_pairs("ring", seq_len, ring)
    assert sum(pairs) == seq_len * (seq_len + 1) // 2
    assert pairs == sorted(pairs)
    assert max(pairs) / (sum(pairs) / ring) == pytest.approx((2 * ring - 1) / ring, rel=1e-3)
    # The balance by which zig-zag is judged above would say so.
    assert max(pairs) - min(pairs) > (seq_len // (2 * ring)) ** 2


@pytest.mark.parametrize("ring", [2, 4, 8, 64])
def test_a_ring_of_contiguous_tokens_takes_nearly_twice_as_long_as_zigzag_and_striped_as_long(ring: int):
    seq_len = 1024 * ring

    def waited_for(method: str) -> int:
        return sum(max(step) for step in step_pairs(method, seq_len, ring))

    assert waited_for("ring") / waited_for("zigzag") == pytest.approx((2 * ring - 1) / ring, rel=1e-2)
    assert waited_for("striped") / waited_for("zigzag") == pytest.approx(1, rel=1e-2)


def test_flops_of_a_sequence_do_not_depend_on_how_it_is_dealt_out():
    whole = attention_flops(64 * 65 // 2, n_heads=8, head_dim=32)
    assert whole == 2 * 2 * 32 * 8 * (64 * 65 // 2)  # two products of 2 C FLOPs, for each pair and head
    for method in ("ring", "zigzag", "striped"):
        assert sum(attention_flops(pairs, 8, 32) for pairs in attention_pairs(method, 64, 4)) == whole
