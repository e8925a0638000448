"""Proves that a mixture of experts is the sum it says: against every expert run on every token, in float64; that its
router keeps its promises for any scores; that a capacity holds; and that it runs compiled and recomputed."""

import math
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

from shardwright.model.matmul import linear, rows_of_experts
from shardwright.model.moe import MoE, Router, expert_layers, take_load
from shardwright.model.presets import PRESETS
from shardwright.model.sections import MoESpec
from shardwright.model.spec import ModelSpec
from shardwright.model.transformer import Transformer
from shardwright.parallel.routing import LossScale

torch.set_num_threads(1)
MOE = MoESpec(n_experts=6, top_k=2, d_ffn=10)


def spec_of(moe: MoESpec, **changes: Any) -> ModelSpec:
    spec = replace(PRESETS["debug"], d_model=12, n_heads=2, n_kv_heads=2, head_dim=6, n_layers=2, vocab_size=40)
    return replace(spec, moe=moe, **changes)


def layer_of(moe: MoESpec, dtype: torch.dtype = torch.float64, **changes: Any) -> MoE:
    torch.manual_seed(0)
    layer = MoE(spec_of(moe, **changes)).to(dtype)
    with torch.no_grad():
        for p in layer.parameters():
            p.normal_(std=0.5)
    return layer


def picked_by_hand(moe: MoESpec, scores_E: list[float], bias_E: list[float]) -> list[int]:
    """The experts of a token: the best of the best groups, which go by their best or, of sigmoid scores, two best."""
    ranked = [score + bias for score, bias in zip(scores_E, bias_E, strict=True)]
    size = moe.n_experts // moe.n_groups
    groups = [sorted(ranked[at : at + size], reverse=True) for at in range(0, moe.n_experts, size)]
    best = sorted(range(moe.n_groups), key=lambda i: -sum(groups[i][: 1 if moe.score == "softmax" else 2]))
    open_ones = [i for i in range(moe.n_experts) if i // size in best[: moe.groups_per_token]]
    return sorted(open_ones, key=lambda i: -ranked[i])[: moe.top_k]


def losses_by_hand(moe: MoESpec, scores_BTE: Tensor, logits_BTE: Tensor, picked_BTE: Tensor, load: Any) -> Tensor:
    """The balance loss E sum_i f_i P_i of each sequence, or with the load E f_i of the step before, and the z-loss."""
    share_BTE = scores_BTE / scores_BTE.sum(-1, keepdim=True)
    aux = torch.zeros((), dtype=scores_BTE.dtype)
    for share_TE, picked_TE in zip(share_BTE, picked_BTE, strict=True):
        for i in range(moe.n_experts):
            f = moe.n_experts * picked_TE[:, i].sum() / picked_TE.sum() if load is None else load[i]
            aux = aux + f * share_TE[:, i].mean() / len(share_BTE)
    return moe.aux_loss * aux + moe.z_loss * logits_BTE.exp().sum(-1).log().square().mean()


def dense(layer: MoE, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
    """The same sum with every expert run on every token, and the losses of its router; none of its code is used."""
    router, experts, moe = layer.router, layer.experts, layer.router.moe
    logits_BTE = x_BTD @ router.weight.T
    scores_BTE = logits_BTE.softmax(-1) if moe.score == "softmax" else logits_BTE.sigmoid()
    picked_BTE, bias_E = torch.zeros_like(scores_BTE), [0.0] * moe.n_experts
    if router.bias is not None:
        bias_E = router.bias.tolist()
    for b, t in product(*map(range, x_BTD.shape[:2])):
        picked_BTE[b, t, picked_by_hand(moe, scores_BTE[b, t].tolist(), bias_E)] = 1.0
    weights_BTE = scores_BTE * picked_BTE
    if moe.normalise:
        weights_BTE = weights_BTE / weights_BTE.sum(-1, keepdim=True)
    if moe.capacity_factor:
        room = math.ceil(moe.capacity_factor * x_BTD.shape[1] * moe.top_k / moe.n_experts)
        weights_BTE = weights_BTE * (picked_BTE.cumsum(1) <= room)
    y_BTD = torch.zeros_like(x_BTD)
    for expert in range(moe.n_experts):
        in_BTD = x_BTD * moe.weight_scale * weights_BTE[..., expert, None] if moe.scale_input else x_BTD
        up_BTF = in_BTD @ experts.up[expert].T
        if experts.gate is None:
            inner_BTF = F.gelu(up_BTF, approximate="tanh")
        else:
            inner_BTF = F.silu(in_BTD @ experts.gate[expert].T) * up_BTF
        weight_BT1 = (
            picked_BTE[..., expert, None] if moe.scale_input else moe.weight_scale * weights_BTE[..., expert, None]
        )
        y_BTD = y_BTD + weight_BT1 * (inner_BTF @ experts.down[expert].T)
    if layer.shared is not None:
        y_BTD = y_BTD + layer.shared(x_BTD)
    return y_BTD, losses_by_hand(moe, scores_BTE, logits_BTE, picked_BTE, router.load)


WAYS = {
    "softmax": MOE,
    "top-1": replace(MOE, top_k=1, normalise=False),
    "all experts": replace(MOE, top_k=6),
    "sigmoid, groups": replace(MOE, score="sigmoid", n_groups=3, groups_per_token=2, weight_scale=2.5),
    "softmax, groups": replace(MOE, top_k=3, n_groups=2, groups_per_token=1),
    "shared": replace(MOE, n_shared=2, normalise=False),
    "scaled inputs": replace(MOE, scale_input=True, score="sigmoid", normalise=False, weight_scale=1.7),
    "scaled inputs, capacity": replace(MOE, scale_input=True, capacity_factor=0.7),
    "capacity": replace(MOE, capacity_factor=0.7),
    "aux of a sequence": replace(MOE, aux_loss=0.5),
    "aux of a batch": replace(MOE, aux_loss=0.5, aux_scope="batch"),
    "aux of sigmoid": replace(MOE, aux_loss=0.5, score="sigmoid", z_loss=0.3),
}


@pytest.mark.parametrize("activation", ["swiglu", "gelu_tanh"])
@pytest.mark.parametrize("way", WAYS)
def test_a_layer_is_the_weighted_sum_of_its_experts(way: str, activation: str) -> None:
    layer = layer_of(WAYS[way], activation=activation)
    x_BTD, dy_BTD = torch.randn(2, 3, 16, 12, dtype=torch.float64).unbind(0)
    found = []
    for whole in (True, False):
        x_BTD = x_BTD.detach().requires_grad_()
        layer.zero_grad()
        if whole:
            y_BTD, loss = dense(layer, x_BTD)
            ((y_BTD * dy_BTD).sum() + loss).backward()
        else:
            y_BTD = layer(x_BTD)
            y_BTD.backward(dy_BTD)
        gradients = {name: p.grad for name, p in layer.named_parameters() if p.requires_grad}
        found.append({"y": y_BTD.detach(), "x": x_BTD.grad} | gradients)
    # Sums of some hundred terms in another order.
    for name, expected in found[0].items():
        assert expected is not None
        assert (found[1][name] - expected).abs().max() <= 1e-13 * max(1, expected.abs().max()), name


def test_rows_of_dropped_tokens_have_no_bias():
    """Their outputs and gradients are not defined, so that one of NaN would be the bias's for all tokens."""
    bias_EF = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    x_RD, weight_EFD = torch.randn(7, 5, dtype=torch.float64), torch.randn(3, 4, 5, dtype=torch.float64)
    counts_E = torch.tensor([2, 0, 3])  # the last two rows belong to no expert
    assert torch.equal(rows_of_experts(bias_EF, counts_E, 7)[5:], torch.zeros(2, 4, dtype=torch.float64))
    dy_RF = torch.ones(7, 4, dtype=torch.float64).index_fill_(0, torch.tensor([5, 6]), torch.nan)
    linear(x_RD, weight_EFD, bias_EF, counts_E).backward(dy_RF)
    assert torch.equal(bias_EF.grad, counts_E.double()[:, None].expand(3, 4))


@pytest.mark.parametrize("way", ["softmax", "sigmoid, groups", "shared"])
def test_one_expert_may_get_every_token_and_others_none(way: str) -> None:
    layer = layer_of(replace(WAYS[way], top_k=1, normalise=False))
    with torch.no_grad():
        assert layer.router.bias is not None
        layer.router.bias.copy_(torch.tensor([0.0, 0, 0, 100, 0, 0]))
    x_BTD = torch.randn(2, 8, 12, dtype=torch.float64, requires_grad=True)
    y_BTD = layer(x_BTD)
    assert torch.allclose(y_BTD, dense(layer, x_BTD)[0], rtol=0, atol=1e-13)
    y_BTD.square().sum().backward()
    assert layer.last_load is not None
    assert layer.last_load.counts_E.tolist() == [0, 0, 0, 16, 0, 0]
    for matrix in (layer.experts.gate, layer.experts.up, layer.experts.down):
        assert matrix is not None
        assert matrix.grad is not None
        assert [bool(gradient.any()) for gradient in matrix.grad] == [False, False, False, True, False, False]


@st.composite
def routed(draw: st.DrawFn) -> tuple[Router, Tensor]:
    groups, size = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    open_groups = draw(st.integers(1, groups))
    moe = replace(
        MOE,
        n_experts=groups * size,
        top_k=draw(st.integers(1, min(8, open_groups * size))),
        n_groups=groups,
        groups_per_token=open_groups,
        score=draw(st.sampled_from(["softmax", "sigmoid"])),
        normalise=draw(st.booleans()),
        capacity_factor=draw(st.sampled_from([0.0, 0.5, 1.0, 2.0])),
    )
    torch.manual_seed(draw(st.integers(0, 1000)))
    router = Router(moe, 5)
    with torch.no_grad():
        router.weight.normal_(std=draw(st.sampled_from([0.0, 0.1, 3.0])))
        assert router.bias is not None
        router.bias.normal_()
    return router, torch.randn(2, draw(st.integers(1, 9)), 5)


@settings(max_examples=100, deadline=None)
@given(routed())
def test_a_router_keeps_its_promises(given_: tuple[Router, Tensor]) -> None:
    router, x_BTD = given_
    moe, routing = router.moe, router(x_BTD)
    picked = routing.experts_BTK.sort(-1).values
    assert ((picked >= 0) & (picked < moe.n_experts)).all()
    assert (picked.diff(dim=-1) > 0).all(), "an expert was picked twice"
    groups = routing.experts_BTK // (moe.n_experts // moe.n_groups)
    assert all(len(set(token.tolist())) <= moe.groups_per_token for token in groups.flatten(0, 1))
    assert (routing.weights_BTK >= 0).all()
    assert routing.asked_BE.sum() == routing.experts_BTK.numel()
    if moe.capacity_factor:
        given_BE = torch.stack(
            [picks[kept].bincount(minlength=moe.n_experts) for picks, kept in zip(routing[0], routing[2], strict=True)]
        )
        capacity = moe.capacity(x_BTD.shape[1])
        assert torch.equal(given_BE, routing.asked_BE.clamp(max=capacity)), "kept tokens are not as many as fit"
        assert torch.equal(given_BE.sum(0), routing.given_E)
        assert not routing.weights_BTK[~routing.kept_BTK].any()
    else:
        assert torch.equal(routing.given_E, routing.asked_BE.sum(0))
        if moe.normalise:
            router.moe = replace(moe, normalise=False)
            sums_BT = router(x_BTD).weights_BTK.sum(-1)
            # The bias may pick experts with scores near 1e-20, which the router adds so that no sum is 0.
            assert torch.allclose(routing.weights_BTK.sum(-1), sums_BT / (sums_BT + 1e-20))
            assert torch.allclose(routing.weights_BTK.sum(-1)[sums_BT > 1e-14], torch.ones(()))


def test_the_bias_picks_and_does_not_weigh() -> None:
    layer = layer_of(replace(MOE, score="sigmoid", normalise=False))
    x_BTD, router = torch.randn(1, 9, 12, dtype=torch.float64), layer.router
    assert router.bias is not None
    router.bias.data = torch.tensor([-9.0, -9, 5, -9, 7, -9], dtype=torch.float64)
    routing = router(x_BTD)
    assert torch.equal(routing.experts_BTK, torch.tensor([4, 2]).expand(1, 9, 2))
    assert torch.equal(routing.weights_BTK, (x_BTD @ router.weight.T).sigmoid()[..., [4, 2]])


@pytest.mark.parametrize(("score", "best"), [("softmax", 0), ("sigmoid", 1)])
def test_groups_go_by_their_best_expert_or_by_their_two_best(score: Any, best: int) -> None:
    """Group 0 has the best expert, group 1 the best two."""
    router = Router(replace(MOE, score=score, n_experts=4, n_groups=2, bias_rate=0.0), 1)
    scores_BTE = torch.tensor([[[0.9, 0.1, 0.6, 0.7]]])
    assert set((router.pick(scores_BTE) // 2).flatten().tolist()) == {best}


def test_drawn_experts_are_a_function_of_key_and_position_and_their_weights_of_the_scores() -> None:
    router = layer_of(replace(MOE, force_balance=True)).router
    x_BTD, keys_B, positions_T = torch.randn(3, 500, 12, dtype=torch.float64), torch.arange(3), torch.arange(500)
    drawn, other = router(x_BTD, keys_B, positions_T), router(x_BTD.flip(1), keys_B, positions_T)
    assert torch.equal(drawn.experts_BTK, other.experts_BTK)
    part = router(x_BTD[1:, 100:], keys_B[1:], positions_T[100:])
    assert torch.equal(part.experts_BTK, drawn.experts_BTK[1:, 100:])
    scores_BTE = F.linear(x_BTD, router.weight).softmax(-1)
    picked_BTK = scores_BTE.gather(-1, drawn.experts_BTK)
    torch.testing.assert_close(drawn.weights_BTK, picked_BTK / picked_BTK.sum(-1, keepdim=True))
    assert drawn.experts_BTK[..., 0].ne(drawn.experts_BTK[..., 1]).all()
    # 1500 tokens x 2 of 6 experts: 500 each, with a standard deviation of 18.
    assert (drawn.given_E - 500).abs().max() < 5 * 18
    assert not torch.equal(router(x_BTD).experts_BTK, drawn.experts_BTK)


def test_scores_are_wide_whatever_the_weights_are() -> None:
    for dtype, wide in (
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ):
        assert Router(MOE, 12).to(dtype)(torch.randn(1, 4, 12, dtype=dtype)).weights_BTK.dtype == wide


def test_a_capacity_drops_the_later_tokens_of_each_sequence() -> None:
    experts_BTK = torch.tensor([[[0, 1], [0, 2], [0, 1], [1, 0]], [[3, 0], [0, 3], [3, 2], [2, 3]]])
    kept = [[[1, 1], [1, 1], [0, 1], [0, 0]], [[1, 1], [1, 1], [0, 1], [1, 0]]]
    router = Router(replace(MOE, n_experts=4, top_k=2, capacity_factor=1.0), 12)
    assert router.moe.capacity(4) == 2
    assert torch.equal(router.keep(experts_BTK), torch.tensor(kept).bool())


def test_the_residual_of_a_dropped_token_passes() -> None:
    layer = layer_of(replace(MOE, capacity_factor=0.5))
    with torch.no_grad():
        assert layer.router.bias is not None
        layer.router.bias.copy_(torch.tensor([0.0, 50, 50, 0, 0, 0]))
    y_BTD = layer(torch.randn(2, 12, 12, dtype=torch.float64))
    assert layer.last_load is not None
    room = 2  # ceil(0.5 * 12 * 2 / 6)
    assert layer.last_load.dropped == 2 * (2 * 12 - 2 * room)
    assert y_BTD[:, :room].all()
    assert not y_BTD[:, room:].any()


def random_batch(spec: ModelSpec, n: int = 4) -> Tensor:
    return torch.randint(spec.vocab_size, (n, 24), generator=torch.Generator().manual_seed(3))


def model_of(spec: ModelSpec, dtype: torch.dtype = torch.float64) -> Transformer:
    torch.manual_seed(0)
    model = Transformer(spec).to(dtype)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.normal_(std=0.3).add_(1.0 if name.endswith(("norm.weight", "load")) else 0.0)
    return model


def learn_from(model: Transformer, tokens_BT: Tensor, loss_scale: float = 1.0) -> None:
    logits_BTV = model(tokens_BT)
    (loss_scale * F.cross_entropy(logits_BTV.flatten(0, 1), tokens_BT.roll(-1, 1).flatten())).backward()


BALANCED = replace(MOE, aux_loss=0.2, z_loss=0.1)


@pytest.mark.parametrize("moe", [BALANCED, replace(BALANCED, aux_scope="batch"), replace(MOE, capacity_factor=1.0)])
def test_any_dealing_of_sequences_into_microbatches_gives_the_same_gradient(moe: MoESpec) -> None:
    spec = spec_of(moe)
    model, tokens_BT = model_of(spec), random_batch(spec)
    found, scale = [], LossScale([model])
    for parts in ([[0, 1, 2, 3]], [[0, 2], [1, 3]], [[3], [1], [0], [2]]):
        model.zero_grad()
        scale.share = 1 / len(parts)
        for part in parts:
            learn_from(model, tokens_BT[part], 1 / len(parts))
        loads = take_load(model)
        assert take_load(model) == {}
        found.append(({n: p.grad for n, p in model.named_parameters() if p.requires_grad}, loads))
    assert set(found[0][1]) == {"0", "1"}
    for gradients, loads in found[1:]:
        for name, expected in found[0][0].items():
            assert expected is not None
            assert (gradients[name] - expected).abs().max() <= 1e-13 * max(1.0, expected.abs().max()), name
        for layer, load in loads.items():
            whole = found[0][1][layer]
            assert torch.equal(load.counts_E, whole.counts_E)
            assert load.counts_E.sum() == tokens_BT.numel() * moe.top_k
            assert load.dropped == whole.dropped
            assert load.aux_loss.item() == pytest.approx(whole.aux_loss.item(), rel=1e-13)
            assert load.z_loss.item() == pytest.approx(whole.z_loss.item(), rel=1e-13)


def test_a_block_that_runs_again_in_the_backward_pass_counts_once() -> None:
    spec = spec_of(BALANCED)
    found = []
    for recompute in (False, True):
        model = model_of(spec)
        if recompute:
            for block in model.layers.values():
                block.forward = partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False)
        learn_from(model, random_batch(spec))
        found.append(({n: p.grad for n, p in model.named_parameters() if p.requires_grad}, take_load(model)["1"]))
    (plain, load), (again, load_again) = found
    assert all(torch.equal(plain[name], again[name]) for name in plain)  # type: ignore[arg-type]
    assert all(torch.equal(a, b) for a, b in zip(load, load_again, strict=True))


def test_what_is_only_evaluated_is_not_counted() -> None:
    spec = spec_of(BALANCED)
    model, tokens_BT = model_of(spec), random_batch(spec)
    with torch.no_grad():
        model(tokens_BT)
    learn_from(model.eval(), tokens_BT)
    assert take_load(model) == {}


@pytest.mark.prove
def test_a_block_with_experts_compiles_without_graph_breaks() -> None:
    torch._dynamo.reset()
    spec = spec_of(replace(BALANCED, n_shared=1, first_dense=1, capacity_factor=1.0), n_layers=4)
    model, tokens_BT = model_of(spec, torch.float32), random_batch(spec)
    learn_from(model, tokens_BT)
    expected, load = {n: p.grad for n, p in model.named_parameters() if p.requires_grad}, take_load(model)
    model.zero_grad()
    counter = CompileCounterWithBackend("aot_eager")
    for block in model.layers.values():
        block.compile(fullgraph=True, backend=counter)
    learn_from(model, tokens_BT)
    assert counter.frame_count == 2  # one with experts, one without
    for name, gradient in expected.items():
        assert gradient is not None
        assert torch.allclose(model.get_parameter(name).grad, gradient, rtol=1e-4, atol=1e-6), name  # type: ignore[arg-type]
    assert all(torch.equal(load[at].counts_E, now.counts_E) for at, now in take_load(model).items())
    torch._dynamo.reset()


def test_layers_with_experts_come_after_the_dense_ones_and_have_global_names() -> None:
    model = Transformer(spec_of(replace(MOE, first_dense=1, n_shared=1, aux_loss=0.1, aux_scope="batch")))
    assert list(expert_layers(model)) == ["1"]
    names = [name.removeprefix("layers.") for name, _ in model.named_parameters() if ".ffn." in name]
    shared = [f"1.ffn.shared.{matrix}.weight" for matrix in ("gate", "up", "down")]
    router = ["1.ffn.router.weight", "1.ffn.router.bias", "1.ffn.router.load"]
    stacked = [f"1.ffn.experts.{matrix}" for matrix in ("gate", "up", "down")]
    assert names == [f"0.ffn.{matrix}.weight" for matrix in ("gate", "up", "down")] + router + stacked + shared
    assert not list(model.buffers())
