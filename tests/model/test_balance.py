"""Proves that what balances experts does: the losses have their published values and push where they should, the bias
moves towards an even load, and the load is measured as it says."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwright.model.balance import (
    LayerLoad,
    Tally,
    attach,
    aux_loss,
    entropy,
    max_over_mean,
    relative_load,
    update_bias,
    z_loss,
)
from shardwright.model.moe import Router, learn_from_load
from shardwright.model.presets import PRESETS
from shardwright.model.sections import MoESpec
from shardwright.model.transformer import Transformer

torch.set_num_threads(1)
MOE = MoESpec(n_experts=8, top_k=2, d_ffn=8)


@pytest.mark.parametrize("k", [1, 2, 8])
def test_the_balance_loss_is_one_where_load_and_scores_are_even(k: int) -> None:
    counts_BE = torch.full((3, 8), 5 * k)
    assert aux_loss(torch.full((3, 5, 8), 0.125), relative_load(counts_BE)).item() == pytest.approx(1)


def test_the_balance_loss_is_the_number_of_experts_where_one_has_everything() -> None:
    scores_BTE = torch.zeros(2, 5, 8)
    scores_BTE[..., 3] = 1
    assert aux_loss(scores_BTE, relative_load(scores_BTE.sum(1))).item() == pytest.approx(8)


def test_the_balance_loss_is_that_of_switch_transformers() -> None:
    """Equations 4 to 6, written out: N sum_i f_i P_i, for top-1 and each sequence as a batch."""
    scores_BTE = torch.randn(2, 7, 4, dtype=torch.float64).softmax(-1)
    best_BT = scores_BTE.argmax(-1)
    total = 0.0
    for scores_TE, best_T in zip(scores_BTE, best_BT, strict=True):
        for expert in range(4):
            total += 4 * (best_T == expert).double().mean().item() * scores_TE[:, expert].mean().item()
    counts_BE = torch.nn.functional.one_hot(best_BT, 4).sum(1)
    assert aux_loss(scores_BTE, relative_load(counts_BE)).item() == pytest.approx(total / 2, rel=1e-13)


def test_the_balance_loss_of_sigmoid_scores_is_that_of_deepseek_v3() -> None:
    """Equations 17 to 20, written out: scores are divided by their sum over all experts, and f_i counts K of E."""
    n_experts, k, n_tokens = 4, 2, 7
    scores_BTE = torch.randn(2, n_tokens, n_experts, generator=torch.Generator().manual_seed(0)).double().sigmoid()
    total = 0.0
    for scores_TE in scores_BTE.tolist():
        picked_T = [sorted(range(n_experts), key=lambda i, s=s_E: -s[i])[:k] for s_E in scores_TE]
        for expert in range(n_experts):
            f = n_experts / (k * n_tokens) * sum(expert in picked for picked in picked_T)
            total += f * sum(s_E[expert] / sum(s_E) for s_E in scores_TE) / n_tokens
    counts_BE = torch.nn.functional.one_hot(scores_BTE.topk(k).indices, n_experts).sum((1, 2))
    assert aux_loss(scores_BTE, relative_load(counts_BE)).item() == pytest.approx(total / 2, rel=1e-13)


def test_the_z_loss_is_that_of_st_moe() -> None:
    """Equation 5, written out."""
    logits_BTE = torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(0)).double()
    each = [math.log(sum(map(math.exp, logits_E))) ** 2 for logits_E in logits_BTE.flatten(0, 1).tolist()]
    assert z_loss(logits_BTE).item() == pytest.approx(sum(each) / len(each), rel=1e-13)


@pytest.mark.parametrize("scope", ["sequence", "batch"])
def test_the_balance_loss_takes_scores_from_the_busy_and_gives_them_to_the_idle(scope: str) -> None:
    torch.manual_seed(0)
    router = Router(replace(MOE, aux_loss=1.0, aux_scope=scope), 4)  # type: ignore[arg-type]
    with torch.no_grad():
        router.weight.normal_()
        router.weight[2] += torch.tensor([0.0, 0, 0, 2])
    x_BTD = torch.randn(2, 64, 4)
    x_BTD[..., 3] += 2
    routing = router(x_BTD)
    router.learn(routing.asked_BE.sum(0))
    routing = router(x_BTD)
    assert routing.asked_BE.sum(0).argmax() == 2
    (gradient_ED,) = torch.autograd.grad(routing.aux_loss, router.weight)
    moved = -(x_BTD.flatten(0, 1).mean(0) * gradient_ED).sum(-1)
    assert gradient_ED.norm() > 1e-3
    assert moved.argmin() == 2, "a step against the gradient lowers the busiest expert's logit most"


def test_the_balance_loss_of_a_batch_begins_even_and_then_follows_the_step_before() -> None:
    router = Router(replace(MOE, aux_loss=0.5, aux_scope="batch"), 4)
    with torch.no_grad():
        router.weight.normal_()
    x_BTD = torch.randn(2, 8, 4)
    first = router(x_BTD)
    assert first.aux_loss is not None
    assert first.aux_loss.item() == pytest.approx(0.5)
    router.learn(torch.tensor([16, 0, 0, 0, 0, 0, 0, 16]))
    second = router(x_BTD)
    assert second.aux_loss is not None
    means_E = (x_BTD @ router.weight.T).softmax(-1).mean((0, 1))
    assert second.aux_loss.item() == pytest.approx(0.5 * 4 * (means_E[0] + means_E[7]).item())


def test_the_z_loss_is_the_mean_squared_log_sum_exp() -> None:
    assert z_loss(torch.zeros(2, 3, 8)).item() == pytest.approx(math.log(8) ** 2)
    assert z_loss(torch.full((2, 3, 8), -math.log(8))).item() == pytest.approx(0, abs=1e-12)


def test_an_attached_loss_adds_its_gradient_and_leaves_the_other_alone() -> None:
    x, y = torch.tensor([3.0], requires_grad=True), torch.tensor([5.0], requires_grad=True)
    attached = attach(2 * y, x.square().sum())
    assert attached.item() == 10
    (7 * attached).backward()
    assert (x.grad, y.grad) == (torch.tensor([6.0]), torch.tensor([14.0]))


def test_the_bias_rises_below_the_mean_and_falls_above() -> None:
    bias_E = torch.zeros(4)
    update_bias(bias_E, torch.tensor([10, 30, 20, 20]), 0.001)
    assert torch.equal(bias_E, torch.tensor([0.001, -0.001, 0.0, 0.0]))
    update_bias(bias_E, torch.tensor([3, 3, 3, 2]), 0.001)  # a mean that is no whole number
    assert torch.allclose(bias_E, torch.tensor([0.0, -0.002, -0.001, 0.001]))


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_steps_of_the_bias_even_out_a_lopsided_load(score: str) -> None:
    torch.manual_seed(0)
    router = Router(replace(MOE, score=score, bias_rate=0.01), 16)  # type: ignore[arg-type]
    with torch.no_grad():
        router.weight.normal_(std=0.2)
        router.weight[:2] += 0.2
    loads = []
    for _ in range(100):
        counts_E = router(torch.randn(4, 64, 16) + 0.5).asked_BE.sum(0)
        loads.append(max_over_mean(counts_E).item())
        router.learn(counts_E)
    assert loads[0] > 2
    # 64 of 512 picks fall on an expert with a scatter of 7: the most of 8 is 1.4 scatters above.
    assert sum(loads[-10:]) / 10 < 1.3


def test_routers_follow_the_counts_of_their_layer() -> None:
    spec = replace(PRESETS["debug-moe"], n_layers=2)
    model = Transformer(spec)
    learn_from_load(model, {"1": torch.tensor([9, 1, 5, 5, 5, 5, 5, 5])})
    assert not model.get_parameter("layers.0.ffn.router.bias").any()
    assert spec.moe is not None
    moved_E = spec.moe.bias_rate * torch.tensor([-1.0, 1, 0, 0, 0, 0, 0, 0])
    assert torch.equal(model.get_parameter("layers.1.ffn.router.bias"), moved_E)


@given(st.lists(st.integers(0, 1000), min_size=2, max_size=20).filter(any))
def test_load_is_measured_between_even_and_one_expert_for_all(counts: list[int]) -> None:
    counts_E = torch.tensor(counts)
    assert 1 - 1e-6 <= max_over_mean(counts_E) <= len(counts) + 1e-6
    assert -1e-6 <= entropy(counts_E) <= 1 + 1e-6
    even, one = torch.full_like(counts_E, 7), torch.zeros_like(counts_E).index_fill(0, torch.tensor([0]), 7)
    assert (max_over_mean(even), max_over_mean(one)) == (1, len(counts))
    assert entropy(even).item() == pytest.approx(1)
    assert entropy(one).item() == 0


def test_the_load_of_a_micro_batch_counts_also_where_the_next_one_overwrites_it() -> None:
    tally = Tally()
    tally.copies = True  # as where blocks are replayed as CUDA graphs
    load = LayerLoad(torch.tensor([1, 2]), torch.tensor(3), torch.tensor(4.0), torch.tensor(5.0))
    for _ in range(2):
        tally.add(load)
        for each in load:
            each.mul_(10)
    taken = tally.take()
    assert taken is not None
    assert [each.tolist() for each in taken] == [[11, 22], 33, 44, 55]
