"""Proves that norms with an offset and activations are their formulas, in networks and in experts."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from shardwright.model.attention import _place
from shardwright.model.experts import Experts
from shardwright.model.feed_forward import FeedForward, swiglu_clamped
from shardwright.model.norm import OffsetRMSNorm
from shardwright.model.presets import PRESETS
from shardwright.model.rotary import query_temperature


def test_a_norm_with_an_offset_multiplies_by_1_plus_w() -> None:
    offset, plain = OffsetRMSNorm(8, eps=0.1).double(), nn.RMSNorm(8, eps=0.1).double()
    nn.init.normal_(offset.weight)
    plain.weight.data = 1 + offset.weight.data
    x_ND = torch.randn(5, 8, dtype=torch.float64, requires_grad=True)
    dy_ND = torch.randn(5, 8, dtype=torch.float64)
    found = torch.autograd.grad(offset(x_ND), (x_ND, offset.weight), dy_ND)
    expected = torch.autograd.grad(plain(x_ND), (x_ND, plain.weight), dy_ND)
    torch.testing.assert_close(offset(x_ND), plain(x_ND), rtol=1e-14, atol=1e-14)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-13, atol=1e-13)


def test_in_16_bits_an_offset_keeps_small_weights() -> None:
    norms = [OffsetRMSNorm(256, eps=1e-6) for _ in range(3)]
    for norm, weight in zip(norms, (2.0**-9, 2.0**-9, 0.0), strict=True):  # 1 + 2^-9 is 1 in bf16
        nn.init.constant_(norm.weight, weight)
    x_ND = torch.randn(4, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    narrow = norms[0].bfloat16()(x_ND)
    assert torch.equal(narrow, norms[1](x_ND.float()).bfloat16())
    assert not torch.equal(narrow, norms[2](x_ND.float()).bfloat16())


def _gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))


def _tanh(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def _clamped(gate: Tensor, up: Tensor) -> Tensor:
    gate = gate.where(gate < 7, torch.tensor(7.0, dtype=gate.dtype))
    return gate / (1 + torch.exp(-1.702 * gate)) * (up.clamp(-7, 7) + 1)


FORMULAS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "swiglu": lambda gate, up: gate * gate.sigmoid() * up,
    "swiglu_clamped": lambda gate, up: _clamped(gate, up),
    "geglu": lambda gate, up: _gelu(gate) * up,
    "geglu_tanh": lambda gate, up: _tanh(gate) * up,
    "gelu": lambda gate, up: _gelu(up),
    "gelu_tanh": lambda gate, up: _tanh(up),
    "relu2": lambda gate, up: up.clamp(min=0) ** 2,
}


def test_the_gradient_of_the_clamped_activation_is_that_of_autograd() -> None:
    gate, up = (8 * torch.randn(64, dtype=torch.float64) for _ in range(2))
    inputs = (gate.requires_grad_(), up.requires_grad_())
    assert (gate > 7).any()
    assert (up.abs() > 7).any()
    assert torch.autograd.gradcheck(swiglu_clamped, inputs, raise_exception=False)


@pytest.mark.parametrize("activation", FORMULAS)
def test_networks_are_their_formulas(activation: str) -> None:
    spec = replace(PRESETS["debug"], activation=activation, d_model=8, d_ffn=6)
    network, experts = FeedForward(spec, 6).double(), Experts(1, 8, 6, activation).double()
    matrices = {
        "up": torch.randn(6, 8).double(),
        "down": torch.randn(8, 6).double(),
        "gate": torch.randn(6, 8).double(),
    }
    for name in matrices if spec.gated else ("up", "down"):
        getattr(network, name).weight.data = matrices[name]
        getattr(experts, name).data = matrices[name].unsqueeze(0)
    x_BTD = 4 * torch.randn(2, 3, 8, dtype=torch.float64)  # some inner values are beyond 7
    inner_BTF = FORMULAS[activation](x_BTD @ matrices["gate"].T, x_BTD @ matrices["up"].T)
    expected_BTD = inner_BTF @ matrices["down"].T
    torch.testing.assert_close(network(x_BTD), expected_BTD, rtol=1e-12, atol=1e-12)
    y_RD = experts(x_BTD.flatten(0, 1), torch.tensor([6]))
    torch.testing.assert_close(y_RD, expected_BTD.flatten(0, 1), rtol=1e-12, atol=1e-12)


def test_in_16_bits_the_temperature_of_queries_is_not_rounded_before_the_product() -> None:
    """After transformers (Llama 4): the factor is in fp32, and the product is cast."""
    tempered = {"nope_interval": 2, "temperature_scale": 0.1, "temperature_interval": 8}
    spec = replace(PRESETS["debug"], attention_scale=0.0, **tempered)
    positions_T = torch.arange(4096)
    factor_T11 = query_temperature(spec, positions_T, torch.bfloat16)
    q_THC = torch.randn(4096, 2, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    factors = 1 + 0.1 * torch.log1p(((positions_T + 1) // 8).float())[:, None, None]
    expected_THC = (q_THC * factors).bfloat16()
    assert torch.equal(_place(q_THC, None, None, scale=factor_T11), expected_THC)
    assert not torch.equal(q_THC * factors.bfloat16(), expected_THC)
