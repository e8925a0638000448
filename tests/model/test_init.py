"""Proves that a model starts from the same bits however its parameters are cut, with the right variances."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.model.init import initial_values, initialise
from shardwright.model.modules import row_of
from shardwright.model.presets import PRESETS
from shardwright.model.sections import MoESpec
from shardwright.model.spec import ModelSpec
from shardwright.model.transformer import Transformer

torch.set_num_threads(1)
SPEC = replace(PRESETS["debug"], qk_norm=True, bias=True)
EXPERTS = replace(
    PRESETS["debug-moe"],
    moe=MoESpec(n_experts=8, top_k=2, d_ffn=24, n_shared=1, first_dense=1, aux_loss=0.1, aux_scope="batch"),
)


def test_the_shard_of_a_parameter_is_that_part_of_the_initialised_model() -> None:
    model = Transformer(SPEC)
    initialise(model, SPEC, seed=5)
    name = "layers.2.ffn.down.weight"
    shard = initial_values(SPEC, 5, name, (64, 176), (32, 0), (32, 176), torch.float32)
    assert torch.equal(shard, model.get_parameter(name)[32:])


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_any_cut_of_any_parameter_gives_the_bits_of_the_whole(data: st.DataObject) -> None:
    spec = data.draw(st.sampled_from([SPEC, EXPERTS]))
    with torch.device("meta"):
        shapes = {name: tuple(p.shape) for name, p in Transformer(spec).named_parameters()}
    name = data.draw(st.sampled_from(sorted(shapes)))
    shape = shapes[name]
    dim = data.draw(st.integers(0, len(shape) - 1))
    origin = [0] * len(shape)
    whole = initial_values(spec, 1, name, shape, origin, shape, torch.float32)
    cuts = sorted(data.draw(st.lists(st.integers(0, shape[dim]), max_size=4)))
    parts = []
    for start, end in zip([0, *cuts], [*cuts, shape[dim]], strict=True):
        offsets, size = [0] * len(shape), list(shape)
        offsets[dim], size[dim] = start, end - start
        parts.append(initial_values(spec, 1, name, shape, offsets, size, torch.float32))
    assert torch.equal(torch.cat(parts, dim), whole)


def test_an_expert_starts_like_a_network_whoever_holds_it() -> None:
    model = Transformer(EXPERTS)
    initialise(model, EXPERTS, seed=5)
    name = "layers.2.ffn.experts.down"
    held = initial_values(EXPERTS, 5, name, (8, 64, 24), (6, 0, 0), (2, 64, 24), torch.float32)
    assert torch.equal(held, model.get_parameter(name)[6:])
    assert torch.equal(model.get_parameter("layers.2.ffn.router.load"), torch.ones(8))


@pytest.mark.parametrize("preset", [PRESETS["debug"], PRESETS["gpt2"], EXPERTS], ids=["debug", "gpt2", "experts"])
def test_variances_are_those_of_gpt2(preset: ModelSpec) -> None:
    spec = replace(preset, n_layers=4, vocab_size=512, max_seq_len=256, init_std=0.03)
    model = Transformer(spec)
    initialise(model, spec, seed=0)
    for name, p in model.named_parameters():
        if p.dim() == 1:
            assert torch.equal(p, torch.full_like(p, 0.0 if name.endswith("bias") else 1.0))
            assert row_of(spec, name).std == 0
            continue
        residual = name.endswith(("attention.o.weight", "ffn.down.weight", "shared.down.weight", "experts.down"))
        std = 0.03 / math.sqrt(8) if residual else 0.03
        assert row_of(spec, name).std == std
        # the standard deviation of n normal values scatters by 1 / sqrt(2 n)
        assert abs(p.std().item() / std - 1) < 5 / math.sqrt(2 * p.numel())


def test_seeds_layers_and_parameters_differ() -> None:
    models = [Transformer(SPEC) for _ in range(3)]
    for model, seed in zip(models, (0, 0, 1), strict=True):
        initialise(model, SPEC, seed)
    states = [model.state_dict() for model in models]
    matrices = [name for name, value in states[0].items() if value.dim() == 2]
    assert all(torch.equal(states[0][name], states[1][name]) for name in matrices)
    assert not any(torch.equal(states[0][name], states[2][name]) for name in matrices)
    first_values = {states[0][name][0, 0].item() for name in matrices}
    assert len(first_values) == len(matrices)


def test_a_fresh_model_predicts_all_tokens_alike() -> None:
    model = Transformer(PRESETS["debug"])
    initialise(model, PRESETS["debug"], seed=0)
    tokens_BT = torch.arange(128).view(2, 64)
    loss = torch.nn.functional.cross_entropy(model(tokens_BT).flatten(0, 1), tokens_BT.flatten())
    assert loss.item() == pytest.approx(math.log(512), rel=0.01)
