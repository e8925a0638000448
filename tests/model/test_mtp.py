"""Proves modules of multi-token prediction (`model.transformer`) against their equations, written by hand."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from shardwright.model.init import initialise
from shardwright.model.modules import layer_rows, rows
from shardwright.model.presets import resolve
from shardwright.model.rotary import rotary_table
from shardwright.model.transformer import Transformer
from tests.training.worlds import SPEC

DEEP = replace(SPEC, mtp_modules=2)


def small_model() -> tuple[Transformer, dict[str, Tensor]]:
    """A model with two modules and random norms, and its parameters by name."""
    model = Transformer(DEEP).double()
    initialise(model, DEEP, seed=3)
    generator = torch.Generator().manual_seed(0)
    parameters = {name: parameter.data for name, parameter in model.named_parameters()}
    for name, values in parameters.items():
        if "norm" in name:
            values.copy_(1 + 0.3 * torch.randn(values.shape, generator=generator))
    return model, parameters


def test_logits_are_those_of_the_equations():
    model, of = small_model()
    tokens_BT = torch.randint(DEEP.vocab_size, (2, 9), generator=torch.Generator().manual_seed(1))
    ahead_KBT = torch.stack([tokens_BT.roll(-1, 1), tokens_BT.roll(-2, 1)])
    next_BTV, *ahead = model(tokens_BT, ahead_KBT=ahead_KBT)
    assert torch.equal(next_BTV, model(tokens_BT))

    def norm(name: str, x: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + DEEP.norm_eps).sqrt() * of[f"{name}.weight"]

    positions_T = torch.arange(9)
    rotary = rotary_table(DEEP, positions_T, torch.float64)
    x_BTD = of["embedding.weight"][tokens_BT]
    for number in range(2):
        x_BTD = model.layers[str(number)](x_BTD, positions_T, rotary)
    for number, read_BT, logits_BTV in zip((2, 3), ahead_KBT, ahead, strict=True):
        here = f"layers.{number}"
        embedded = norm(f"{here}.embedding_norm", of["embedding.weight"][read_BT])
        both = torch.cat([embedded, norm(f"{here}.hidden_norm", x_BTD)], -1)
        block = model.layers[str(number)].block
        assert isinstance(block, torch.nn.Module)
        x_BTD = block(F.linear(both, of[f"{here}.projection.weight"]), positions_T, rotary)
        expected_BTV = F.linear(norm(f"{here}.norm", x_BTD), of["head.weight"])
        torch.testing.assert_close(logits_BTV, expected_BTV, rtol=1e-12, atol=1e-12)


def test_every_parameter_of_a_module_has_its_row():
    _, of = small_model()
    assert {name: tuple(values.shape) for name, values in of.items()} == {
        name: row.shape for name, row in rows(DEEP).items()
    }


def test_the_module_of_deepseek_v3_has_11_6_billion_parameters():
    """A layer of 11.5 billion, as its README counts it, and the projection; embedding and head are shared."""
    without = resolve("deepseek-v3")
    with_module = replace(without, mtp_modules=1)
    h = without.d_model
    block = sum(row.numel for row in layer_rows(without, without.n_layers - 1))
    assert round(block / 1e9, 1) == 11.5
    assert with_module.n_parameters - without.n_parameters == block + 2 * h * h + 3 * h
    met = with_module.n_matmul_parameters - without.n_matmul_parameters
    assert met == without.layer_matmul_parameters(60) + 2 * h * h + without.vocab_size * h


def test_each_module_has_the_flops_of_a_layer_its_projection_and_its_logits():
    without, seq_len = resolve("deepseek-v3"), 4096
    for n_modules in (1, 2):
        spec = replace(without, mtp_modules=n_modules)
        for causal in (False, True):
            whole = without.train_flops_per_token(seq_len, causal=causal)
            attention = (whole - 6 * without.n_matmul_parameters) / without.n_layers
            projection, logits = 2 * without.d_model**2, without.vocab_size * without.d_model
            matmuls = 6 * (without.layer_matmul_parameters(without.n_layers - 1) + projection + logits)
            flops = spec.train_flops_per_token(seq_len, causal=causal) - whole
            assert flops == pytest.approx(n_modules * (attention + matmuls), rel=1e-12)


def test_the_module_of_deepseek_v3_has_4_percent_of_its_flops():
    """As NVIDIA's published TFLOP/s with and without it differ (planner/measured/runs.csv)."""
    without = resolve("deepseek-v3")
    for causal in (False, True):
        with_module = replace(without, mtp_modules=1).train_flops_per_token(4096, causal=causal)
        assert round(with_module / without.train_flops_per_token(4096, causal=causal), 2) == 1.04


def test_a_negative_number_of_modules_and_a_weight_of_zero_are_refused():
    problems = replace(SPEC, mtp_modules=-1, mtp_weight=0.0).problems()
    assert [problem.partition("=")[0] for problem in problems] == ["mtp_modules", "mtp_weight"]
