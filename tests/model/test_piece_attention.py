"""Proves that attention in pieces is softmax(q k) v with windows, soft caps, sinks and documents, and its gradients."""

from itertools import product

import pytest
import torch
from torch import Tensor

from shardwright.model import blocks, pieces
from shardwright.model.documents import Documents
from shardwright.model.piece_attention import AttentionRule, piece_attention

B, T, H, K, C = 2, 29, 4, 2, 8
LENGTHS = (None, ((10, 19), (1, 3, 25)))


def reference(q: Tensor, k: Tensor, v: Tensor, rule: AttentionRule, documents: Documents | None) -> Tensor:
    """The formula, with every score in memory."""
    scores_BHTS = torch.einsum("bthc,bshc->bhts", q, k.repeat_interleave(H // K, 2)) / C**0.5
    if rule.softcap:
        scores_BHTS = rule.softcap * torch.tanh(scores_BHTS / rule.softcap)
    distance_TS = torch.arange(T)[:, None] - torch.arange(T)
    seen_BTS = (distance_TS >= 0).expand(B, T, T).clone()
    if rule.window and not rule.chunked:
        seen_BTS &= distance_TS < rule.window
    for seen_TS, lengths in zip(seen_BTS, ((T,),) * B if documents is None else documents.lengths, strict=True):
        numbers_T = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
        if rule.chunked:
            numbers_T = numbers_T * T + torch.cat([torch.arange(length) for length in lengths]) // rule.window
        seen_TS &= numbers_T[:, None] == numbers_T
    scores_BHTS = scores_BHTS.masked_fill(~seen_BTS[:, None], float("-inf"))
    if rule.sinks_H is not None:
        scores_BHTS = torch.cat((scores_BHTS, rule.sinks_H[:, None, None].expand(B, H, T, 1)), -1)
    return torch.einsum("bhts,bshc->bthc", scores_BHTS.softmax(-1)[..., :T], v.repeat_interleave(H // K, 2))


@pytest.mark.parametrize(("window", "chunked"), [(0, False), (1, False), (6, False), (T, False), (7, True)])
def test_outputs_and_gradients_are_those_of_the_formula(window: int, chunked: bool) -> None:
    outputs_and_gradients_are_those_of_the_formula(window, chunked)


def outputs_and_gradients_are_those_of_the_formula(window: int, chunked: bool = False) -> None:
    generator = torch.Generator().manual_seed(window)
    for softcap, sink, lengths in product((0.0, 2.0), (False, True), LENGTHS):
        q, k, v, do = (
            torch.randn(B, T, n, C, dtype=torch.float64, generator=generator, requires_grad=True) for n in (H, K, K, H)
        )
        sinks_H = torch.randn(H, dtype=torch.float64, generator=generator, requires_grad=True) if sink else None
        rule = AttentionRule(window, softcap, sinks_H, chunked)
        documents = None if lengths is None else Documents(lengths)
        inputs = [q, k, v, *([] if sinks_H is None else [sinks_H])]
        results = [
            (o, *torch.autograd.grad(o, inputs, do.detach()))
            for o in (piece_attention(q, k, v, documents, rule), reference(q, k, v, rule, documents))
        ]
        for found, expected in zip(*results, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)


def test_few_rows_at_a_time_change_nothing() -> None:
    few_rows_at_a_time_change_nothing()


def few_rows_at_a_time_change_nothing() -> None:
    """Masks are made, and scores computed, for some rows at a time, so that memory grows with the keys alone."""
    assert pieces.ROWS_TOGETHER > 3
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "ROWS_TOGETHER", 3)
        for window in (0, 6):
            outputs_and_gradients_are_those_of_the_formula(window)
