"""Proves that the chunked form of linear attention is its recurrent formula, in outputs, gradients and states."""

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from shardwright.layout.layout import Layout
from shardwright.model import linear_attention
from shardwright.model.documents import Documents
from shardwright.model.linear_attention import GatedDeltaNet, delta_chunks, scan, transition
from shardwright.model.linear_sizes import CHUNK, LinearAttentionSpec
from shardwright.model.presets import PRESETS
from shardwright.model.spec import ModelSpec
from shardwright.model.transformer import Transformer
from shardwright.split import rules

LINEAR = LinearAttentionSpec(n_k_heads=2, n_v_heads=4, k_dim=6, v_dim=5, conv_width=3, full_interval=2)


def spec_of(**changes: object) -> ModelSpec:
    small = replace(PRESETS["debug"], n_layers=2, linear_attention=LINEAR, max_seq_len=256)
    return replace(small, **changes)


def recurrent(net: GatedDeltaNet, x_BTD: Tensor, lengths: tuple[tuple[int, ...], ...]) -> Tensor:
    """Return the formula of Gated Delta Networks token by token, head by head, with the layout of Qwen3-Next."""
    groups, group, k, v = 2, 2, net.k_dim, net.v_dim
    rows = []
    for x_TD, row in zip(x_BTD, lengths, strict=True):
        of_row = []
        for document in x_TD.split(row):
            qkvz = (document @ net.qkvz.weight.T).reshape(len(document), groups, -1)
            ba = (document @ net.ba.weight.T).reshape(len(document), groups, -1)
            inputs = {"q": qkvz[:, :, :k], "k": qkvz[:, :, k : 2 * k], "v": qkvz[:, :, 2 * k : 2 * k + group * v]}
            gates = qkvz[:, :, 2 * k + group * v :].reshape(len(document), groups * group, v)
            filtered = {}
            for name, x in inputs.items():
                x, weight = x.flatten(1), getattr(net, f"{name}_conv").weight[:, 0]
                width = weight.shape[1]
                sums = [
                    sum(weight[:, width - 1 - ago] * x[t - ago] for ago in range(min(width, t + 1)))
                    for t in range(len(x))
                ]
                filtered[name] = torch.nn.functional.silu(torch.stack(sums)) if sums else x
            heads = [torch.zeros(k, v, dtype=x_BTD.dtype) for _ in range(groups * group)]
            for t in range(len(document)):
                outputs = []
                for head in range(groups * group):
                    g = head // group
                    q = filtered["q"][t].reshape(groups, k)[g]
                    key = filtered["k"][t].reshape(groups, k)[g]
                    q, key = q / (q @ q + 1e-6).sqrt() / k**0.5, key / (key @ key + 1e-6).sqrt()
                    value = filtered["v"][t].reshape(-1, v)[head]
                    beta = 1 / (1 + torch.exp(-ba[t, g, head % group]))
                    step = torch.log1p(torch.exp(ba[t, g, group + head % group] + net.dt_bias[head]))
                    state = heads[head] * torch.exp(-torch.exp(net.a_log[head]) * step)
                    state = state + beta * torch.outer(key, value - key @ state)
                    heads[head] = state
                    output, gate = q @ state, gates[t, head]
                    normed = output / (output.square().mean() + net.norm.eps).sqrt() * net.norm.weight
                    outputs.append(normed * gate / (1 + torch.exp(-gate)))
                of_row.append(torch.cat(outputs) @ net.out.weight.T)
        rows.append(torch.stack(of_row))
    return torch.stack(rows)


def net_of(spec: ModelSpec) -> GatedDeltaNet:
    torch.manual_seed(3)
    net = GatedDeltaNet(spec).double()
    for parameter in net.parameters():
        torch.nn.init.normal_(parameter, std=0.6)
    return net


@pytest.mark.parametrize("chunk", [4, 64])
@pytest.mark.parametrize("documents", [None, ((5, 6), (11,)), ((1, 1, 9), (4, 4, 3))])
def test_the_chunked_form_is_the_recurrent_formula(documents: tuple[tuple[int, ...], ...] | None, chunk: int) -> None:
    outputs_and_gradients_are_those_of_the_formula(documents, chunk)


def outputs_and_gradients_are_those_of_the_formula(documents: tuple[tuple[int, ...], ...] | None, chunk: int) -> None:
    net = net_of(spec_of())
    x_BTD = torch.randn(2, 11, net.qkvz.in_features, dtype=torch.float64, requires_grad=True)
    dy_BTD = torch.randn_like(x_BTD)
    packed = None if documents is None else Documents.from_lengths(documents, 11)
    wanted = [x_BTD, *net.parameters()]
    with patch.object(linear_attention, "CHUNK", chunk):
        y_BTD = net(x_BTD, None, packed)
        found = torch.autograd.grad(y_BTD, wanted, dy_BTD)
    expected_BTD = recurrent(net, x_BTD, documents or ((11,), (11,)))
    torch.testing.assert_close(y_BTD, expected_BTD, rtol=1e-10, atol=1e-10)
    for gradient, expected in zip(found, torch.autograd.grad(expected_BTD, wanted, dy_BTD), strict=True):
        torch.testing.assert_close(gradient, expected, rtol=1e-10, atol=1e-10)


def test_a_sequence_in_two_parts_is_the_whole_sequence() -> None:
    net = net_of(spec_of())
    x_BTD = torch.randn(2, 11, net.qkvz.in_features, dtype=torch.float64)
    with torch.no_grad():
        state, outputs = None, []
        for part_BTD in x_BTD.split((7, 1, 1, 2), 1):
            o_BTF, state = net.mix_from(state, None, net.qkvz(part_BTD), net.ba(part_BTD), *net.local_weights())
            outputs.append(net.out(o_BTF))
        torch.testing.assert_close(torch.cat(outputs, 1), net(x_BTD), rtol=1e-12, atol=1e-12)


def test_the_formulas_have_the_flops_of_the_scan_and_of_the_maps_of_states() -> None:
    q, k, v = (torch.randn(1, LINEAR.n_v_heads, 128, width) for width in (6, 6, 5))
    with FlopCounterMode(display=False) as counter:
        scan(delta_chunks(q, k, v, -torch.rand(1, 4, 128), torch.rand(1, 4, 128)))
    assert counter.get_total_flops() == 128 * LINEAR.scan_flops
    with FlopCounterMode(display=False) as counter:
        transition(delta_chunks(q, k, v, -torch.rand(1, 4, 128), torch.rand(1, 4, 128)))
    products_of_chunks = 2 * LINEAR.n_v_heads * CHUNK * 2 * 6
    assert counter.get_total_flops() == 128 * (LINEAR.map_flops + products_of_chunks)


def test_training_flops_are_three_times_those_counted_in_a_forward_pass() -> None:
    spec = spec_of(attention_gate=True, n_layers=3)
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        Transformer(spec)(torch.zeros(1, 128, dtype=torch.int64))
    assert counter.get_total_flops() * 3 == 128 * spec.train_flops_per_token(128)


def test_only_the_projections_are_saved_for_the_backward_pass() -> None:
    net = net_of(spec_of())
    saved: list[Tensor] = []

    def keep(x: Tensor) -> Tensor:
        saved.append(x)
        return x

    qkvz, ba = (torch.randn(1, 64, linear.out_features, requires_grad=True).double() for linear in (net.qkvz, net.ba))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        net.mix(qkvz, ba, net.local_weights(), None)
    numels = sum(x.numel() for x in saved if x.dim() == 3 and x.shape[1] == 64)
    assert numels == 64 * LINEAR.projected_width


def test_layers_are_linear_except_every_nth_layer() -> None:
    spec = spec_of(n_layers=5)
    assert [spec.is_linear(layer) for layer in range(5)] == [True, False, True, False, True]
    assert spec.n_parameters == sum(p.numel() for p in Transformer(spec).parameters())


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"linear_attention": replace(LINEAR, n_k_heads=3)}, "n_k_heads=3 does not divide"),
        ({"linear_attention": replace(LINEAR, full_interval=3)}, "full_interval=3 for 2 layers; valid: 0"),
        ({"linear_attention": replace(LINEAR, full_interval=1)}, "full_interval=1 for 2 layers"),
        ({"linear_attention": replace(LINEAR, k_dim=0)}, "linear_attention.k_dim=0 is not positive"),
        ({"window": 4}, "window is 4, leave it out"),
        ({"bias": True}, "linear_attention has no biases"),
    ],
)
def test_a_combination_that_is_not_supported_is_one_sentence(changes: dict[str, object], problem: str) -> None:
    problems = spec_of(**changes).problems()
    assert len(problems) == 1, problems
    assert problem in problems[0]


def test_tp_that_does_not_divide_the_key_heads_is_refused_with_the_reason() -> None:
    (tp,) = rules.problems(spec_of(), Layout(tp=4), 128)
    assert tp == (
        "layout.tp=4 does not divide 2 key heads (model.linear_attention.n_k_heads) (2 = 4*0 + 2); valid: 1, 2"
    )
    assert not rules.problems(spec_of(), Layout(tp=2), 128)
