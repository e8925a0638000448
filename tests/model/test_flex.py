"""Proves the rules that FlexAttention computes, on its reference implementation, and the tables of its kernels."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.attention import flex_attention as pytorch
from torch.nn.attention.flex_attention import BlockMask

from shardwright.model import flex
from shardwright.model.documents import Documents
from shardwright.model.piece_attention import AttentionRule, piece_attention

B, T, H, K, C = 2, 29, 4, 2, 8
SOFTCAP = 0.7
CPU = torch.device("cpu")
LENGTHS = (None, ((10, 19), (1, 3, 25)))
MASKS = [(0, False), (1, False), (6, False), (T, False), (7, True)]


def test_outputs_and_gradients_are_those_of_attention_in_pieces() -> None:
    for window, chunked in MASKS:
        outputs_and_gradients_are_those_of_attention_in_pieces(window, chunked)


def outputs_and_gradients_are_those_of_attention_in_pieces(window: int = 6, chunked: bool = False) -> None:
    """PyTorch refuses gradients on CPUs, since its kernels there have none; its formulas have."""
    flex.kept_mask.cache_clear()  # a bug that is put in may have made masks
    generator = torch.Generator().manual_seed(window)
    rule = AttentionRule(window, SOFTCAP, chunked=chunked)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pytorch, "_validate_device", lambda *_: None)
        for lengths in LENGTHS:
            q, k, v, do = (
                torch.randn(B, T, n, C, dtype=torch.float64, generator=generator, requires_grad=True)
                for n in (H, K, K, H)
            )
            documents = None if lengths is None else Documents(lengths)
            kernel = pytorch.flex_attention
            o = flex.attend(q, k, v, documents, SOFTCAP, window, chunked=chunked, kernel=kernel)
            results = [
                (each, *torch.autograd.grad(each, (q, k, v), do.detach()))
                for each in (o, piece_attention(q, k, v, documents, rule))
            ]
            for result, expected in zip(*results, strict=True):
                torch.testing.assert_close(result, expected, rtol=1e-11, atol=1e-11)


@pytest.fixture(autouse=True)
def no_kept_masks() -> Iterator[None]:
    flex.kept_mask.cache_clear()
    yield
    flex.kept_mask.cache_clear()


def test_a_mask_is_made_once_and_can_be_saved_for_gradients_after_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    made, used = [], []

    def kernel(q: torch.Tensor, *_: torch.Tensor, block_mask: BlockMask, **options: Any) -> torch.Tensor:
        used.append(block_mask)
        return q

    block_mask = flex.block_mask
    monkeypatch.setattr(flex, "block_mask", lambda *given: made.append(given) or block_mask(*given))
    for lengths in ((10, 19), (1, 28)), ((9, 20), (1, 28)):
        for dtype in (torch.float32, torch.bfloat16):
            with torch.inference_mode(dtype == torch.float32):
                x = torch.randn(B, T, H, C, dtype=dtype)
                flex.attend(x, x, x, Documents(lengths), SOFTCAP, kernel=kernel)
    assert [lengths for lengths, *_ in made] == [(10, 19, 1, 28), (9, 20, 1, 28)]
    assert flex.kept_mask.cache_info()[:2] == (2, 2)
    assert used[0] is used[1]
    assert used[2] is used[3] is not used[0]
    assert not used[0].kv_indices.is_inference()


@pytest.mark.parametrize("lengths", [(700,), (128, 128, 256), (1, 130, 5, 300, 77)], ids=str)
def test_tables_name_every_square_with_a_score(lengths: tuple[int, ...]) -> None:
    tables_name_every_square_with_a_score(lengths)


def tables_name_every_square_with_a_score(lengths: tuple[int, ...]) -> None:
    n_tokens = sum(lengths)
    n_squares = -(-n_tokens // flex.SQUARE)
    documents_N = np.repeat(np.arange(len(lengths)), lengths)
    places_N = np.concatenate([np.arange(length) for length in lengths])
    distance_NN = np.arange(n_tokens)[:, None] - np.arange(n_tokens)
    for window, chunked in [
        (0, False),
        (1, False),
        (2, False),
        (100, False),
        (128, False),
        (300, False),
        (96, True),
        (256, True),
    ]:
        seen_NN = (distance_NN >= 0) & (documents_N[:, None] == documents_N)
        if chunked:
            seen_NN &= places_N[:, None] // window == places_N // window
        elif window:
            seen_NN &= distance_NN < window
        mask = flex.block_mask(lengths, window, chunked, CPU)
        at_NN = torch.from_numpy(np.indices((n_tokens, n_tokens)))
        assert torch.equal(mask.mask_mod(0, 0, *at_NN), torch.from_numpy(seen_NN))
        # Beyond the end there are no tokens, so the last square is masked in part if it has fewer.
        whole = np.zeros((n_squares, flex.SQUARE) * 2, dtype=bool).reshape((n_squares * flex.SQUARE,) * 2)
        whole[:n_tokens, :n_tokens] = seen_NN
        by_square = whole.reshape(n_squares, flex.SQUARE, n_squares, flex.SQUARE)
        some_SS, all_SS = by_square.any((1, 3)), by_square.all((1, 3))
        pairs = {
            "partial": ((mask.kv_num_blocks, mask.kv_indices), (mask.q_num_blocks, mask.q_indices)),
            "full": ((mask.full_kv_num_blocks, mask.full_kv_indices), (mask.full_q_num_blocks, mask.full_q_indices)),
        }
        named = {}
        for kind, (of_rows, of_columns) in pairs.items():
            named[kind] = named_squares(*of_rows)
            assert np.array_equal(named[kind], named_squares(*of_columns).T), kind
        assert np.array_equal(named["partial"] | named["full"], some_SS)
        assert not (named["partial"] & named["full"]).any()
        inner = n_tokens // flex.SQUARE  # rows of squares without an end
        assert np.array_equal(named["full"][:inner], all_SS[:inner])


def named_squares(n_S: torch.Tensor | None, columns_SS: torch.Tensor | None) -> np.ndarray:
    """The squares that a table names, (S, S)."""
    assert n_S is not None
    assert columns_SS is not None
    named_SS = np.zeros(columns_SS.shape[-2:], dtype=bool)
    for row, (n, columns) in enumerate(zip(n_S[0, 0].tolist(), columns_SS[0, 0].tolist(), strict=True)):
        assert sorted(columns) == list(range(len(columns)))
        named_SS[row, columns[:n]] = True
    return named_SS


@pytest.mark.prove
def test_the_compiled_kernel_of_cpus_has_the_outputs_of_attention_in_pieces() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 300, n, 32, generator=generator) for n in (4, 2, 2))
    documents = Documents(((300,), (30, 270)))
    with torch.no_grad():
        result = flex.attend(q, k, v, documents, SOFTCAP, 100)
        expected = piece_attention(q, k, v, documents, AttentionRule(100, SOFTCAP))
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)
