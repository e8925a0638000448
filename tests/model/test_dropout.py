"""Proves that dropout is keyed: a function of sample, place in the network, global position and feature, the
same for any microbatch or slice of the sequence, and an identity when it should be."""

from dataclasses import replace

import torch

from shardwright.model import random
from shardwright.model.dropout import KeyedDropout
from shardwright.model.presets import PRESETS
from shardwright.model.transformer import Transformer

torch.set_num_threads(1)
SPEC = replace(PRESETS["debug"], dropout=0.2)


def test_dropped_elements_are_zero_and_the_mean_is_kept() -> None:
    x_BTD = torch.ones(8, 128, 64)
    y_BTD = KeyedDropout(0.25)(x_BTD, torch.arange(8), torch.arange(128))
    assert torch.equal(y_BTD.unique(), torch.tensor([0, 1 / 0.75]))
    # 65,536 elements of standard deviation 0.58
    assert abs(y_BTD.mean() - 1) < 4 * 0.58 / 256


def test_nothing_is_dropped_in_evaluation_without_keys_or_at_probability_zero() -> None:
    x_BTD, keys_B, positions_T = torch.randn(2, 3, 8), torch.arange(2), torch.arange(3)
    assert KeyedDropout(0.5)(x_BTD, None, positions_T) is x_BTD
    assert KeyedDropout(0.5).eval()(x_BTD, keys_B, positions_T) is x_BTD
    assert KeyedDropout(0.0)(x_BTD, keys_B, positions_T) is x_BTD


def test_the_gradient_passes_where_the_value_did() -> None:
    x_BTD = torch.randn(2, 16, 32, dtype=torch.float64, requires_grad=True)
    y_BTD = KeyedDropout(0.5)(x_BTD, torch.arange(2), torch.arange(16))
    y_BTD.sum().backward()
    assert x_BTD.grad is not None
    assert torch.equal(x_BTD.grad, (y_BTD != 0) * 2.0)


def test_part_of_a_sequence_is_dropped_as_in_the_whole() -> None:
    dropout, x_BTD, keys_B = KeyedDropout(0.3), torch.randn(3, 20, 30), torch.tensor([4, 5, 6])
    whole_BTD = dropout(x_BTD, keys_B, torch.arange(20))
    places_T = torch.tensor([3, 2, 17, 0])
    assert torch.equal(dropout(x_BTD[1:, places_T], keys_B[1:], places_T), whole_BTD[1:, places_T])


def test_a_sample_is_dropped_alike_in_every_microbatch() -> None:
    model = Transformer(SPEC).double()
    tokens_BT = torch.arange(4 * 32).view(4, 32)
    keys_B = random.sample_keys(1, 7, torch.tensor([10, 11, 12, 13]))
    together_BTV = model(tokens_BT, None, keys_B)
    apart_BTV = torch.cat([model(tokens_BT[i : i + 1], None, keys_B[i : i + 1]) for i in range(4)])
    # masks are equal to the bit; matmuls of other sizes may sum in another order
    assert torch.allclose(together_BTV, apart_BTV, rtol=0, atol=1e-13)


def test_steps_and_samples_are_dropped_differently_and_evaluation_not_at_all() -> None:
    model = Transformer(SPEC).double()
    tokens_BT = torch.arange(32).expand(2, 32)
    ids_B = torch.tensor([0, 1])
    first_BTV, second_BTV = (model(tokens_BT, None, random.sample_keys(0, step, ids_B)) for step in (0, 1))
    assert not torch.allclose(first_BTV, second_BTV)
    assert not torch.allclose(first_BTV[0], first_BTV[1])
    plain_BTV = model(tokens_BT)
    assert torch.equal(model.eval()(tokens_BT, None, random.sample_keys(0, 0, ids_B)), plain_BTV)


def test_every_place_of_the_network_has_its_own_mask() -> None:
    """Every dropout of a forward pass sees other keys: one for the embedding, two a layer."""
    model, seen = Transformer(SPEC), []
    for module in model.modules():
        if isinstance(module, KeyedDropout):
            module.register_forward_pre_hook(lambda _, args: seen.append(tuple(args[1].tolist())))
    model(torch.zeros(1, 4, dtype=torch.long), None, torch.tensor([9]))
    assert len(seen) == len(set(seen)) == 1 + 2 * SPEC.n_layers
