"""Proves that with documents a model computes, in one packed sequence, what it computes for each document alone in a
sequence of its own: losses and gradients of every parameter, in float64."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from shardwright.model.documents import Documents
from shardwright.model.init import initialise
from shardwright.model.presets import PRESETS
from shardwright.model.sections import LatentAttentionSpec
from shardwright.model.spec import ModelSpec
from shardwright.model.transformer import Transformer
from shardwright.system.errors import InputError
from tests.marks import prove, rest_prove

DECODER = replace(PRESETS["debug"], n_layers=2, d_ffn=40, vocab_size=31, max_seq_len=24, init_std=0.3)
LATENT = LatentAttentionSpec(q_rank=10, kv_rank=12, nope_dim=8, rope_dim=4, v_dim=8)
MODELS = {
    "grouped heads": DECODER,
    "learned positions": replace(DECODER, positions="learned"),
    "latent attention": replace(DECODER, n_kv_heads=DECODER.n_heads, head_dim=8, latent_attention=LATENT),
}
LENGTHS = [[24], [1, 1, 7, 15], [12, 12], [23, 1]]


def model_of(spec: ModelSpec) -> Transformer:
    model = Transformer(spec).double()
    initialise(model, spec, 3)
    return model


def losses(model: Transformer, tokens_BT: Tensor, targets_BT: Tensor, **more: object) -> Tensor:
    logits_BTV = model(tokens_BT, **more)
    return F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten(), reduction="none").view(tokens_BT.shape)


def gradients(model: Transformer) -> dict[str, Tensor]:
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


@pytest.mark.parametrize("restart", rest_prove([True, False], True))
@pytest.mark.parametrize("spec", MODELS.values(), ids=MODELS)
def test_packed_documents_are_computed_as_each_alone(spec: ModelSpec, restart: bool) -> None:
    model, seq_len = model_of(spec), spec.max_seq_len
    draw = torch.Generator().manual_seed(1)
    tokens_BT, targets_BT = (torch.randint(spec.vocab_size, (len(LENGTHS), seq_len), generator=draw) for _ in range(2))
    weights_BT = torch.rand(tokens_BT.shape, generator=draw, dtype=torch.float64)
    documents = Documents.from_lengths(LENGTHS, seq_len, restart=restart)
    together_BT = losses(model, tokens_BT, targets_BT, documents=documents)
    (together_BT * weights_BT).sum().backward()
    found = gradients(model)

    for row, lengths in enumerate(LENGTHS):
        start = 0
        for length in lengths:
            at = slice(start, start + length)
            positions_T = torch.arange(length) + (0 if restart else start)
            alone_1T = losses(
                model, tokens_BT[row : row + 1, at], targets_BT[row : row + 1, at], positions_T=positions_T
            )
            (alone_1T[0] * weights_BT[row, at]).sum().backward()
            torch.testing.assert_close(together_BT[row, at], alone_1T[0], rtol=1e-12, atol=1e-12)
            start += length
    for name, exact in gradients(model).items():
        torch.testing.assert_close(
            found[name], exact, rtol=1e-10, atol=1e-11, msg=lambda text, name=name: f"{name}: {text}"
        )


def test_one_document_a_sequence_is_attention_over_the_sequence() -> None:
    model = model_of(DECODER)
    tokens_BT = torch.arange(48).view(2, 24) % DECODER.vocab_size
    torch.testing.assert_close(model(tokens_BT, documents=Documents.from_lengths([[24], [24]], 24)), model(tokens_BT))


@pytest.mark.parametrize("lengths", [[[3, 4]], [[8, 0]], [[9]]])
def test_lengths_that_are_not_those_of_the_sequence_are_refused(lengths: list[list[int]]) -> None:
    with pytest.raises(InputError, match="have to be the 8 of the sequence"):
        Documents.from_lengths(lengths, 8)


@prove
def test_a_compiled_block_is_compiled_once_for_all_documents() -> None:
    model, counter = model_of(DECODER), CompileCounterWithBackend("eager")
    for block in model.layers.values():
        block.compile(backend=counter)
    tokens_BT = torch.arange(24).view(1, 24) % DECODER.vocab_size
    frames = []
    for first in range(1, 12):  # more than dynamo compiles before it gives up
        documents = Documents.from_lengths([[first, 24 - first]], 24, restart=True)
        exact = model_of(DECODER)(tokens_BT, documents=documents)
        torch.testing.assert_close(model(tokens_BT, documents=documents), exact)
        frames.append(counter.frame_count)
    assert frames[1:] == frames[:-1], "compiled again for other documents"
