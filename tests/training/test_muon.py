"""Proves that Muon updates each logical matrix as one, by hand-written formulas and beside PyTorch's own, and that each
layout takes the same steps as one process: in float64, with raw gradients."""

from dataclasses import replace
from math import sqrt

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.config import OptimizerSection
from shardwright.config.optimizer import LrScaleSection
from shardwright.layout.layout import Layout
from shardwright.model.init import initialise
from shardwright.model.modules import rows
from shardwright.model.spec import ModelSpec
from shardwright.model.transformer import Transformer
from shardwright.optimizers import OPTIMIZERS
from shardwright.parallel import whole_matrices
from shardwright.training.optimizer import build_optimizer, named_state, set_learning_rate
from shardwright.training.optimizers.muon import orthogonal
from shardwright.verification import Verifier
from shardwright.verification.rank import build_trainer
from shardwright.verification.rank import local_batch as verified_batch
from tests.distributed import run_ranks
from tests.marks import prove, rest_prove
from tests.mutation import Mutation, mutated
from tests.training.bugs.bug import EVEN, EXPERTS, LATENT, LONG
from tests.training.checkpoints import logical as logical_states
from tests.training.worlds import CASE, SPEC, build

BESIDE = LrScaleSection(embedding=0.5, head=0.5, norm=0.5, bias=0.5, router=0.5)
MUON = OptimizerSection(name="muon", lr=0.03, weight_decay=0.1, lr_scale=BESIDE)
OTHER = {"momentum": 0.9, "update_rms": 0.3, "beta1": 0.8, "beta2": 0.9, "eps": 1e-6}
WITHOUT_DEFAULTS = MUON.model_copy(update=OTHER)
"""For the formulas: one that does not read an option would be right by chance where it has its default."""
SPECS = {
    "grouped heads": EVEN,
    "latent attention": replace(EVEN, n_kv_heads=4, latent_attention=LATENT),
    "experts": replace(EVEN, moe=EXPERTS),
}
LAYOUTS = {
    "zero 1": Layout(dp_shard=2, zero=1),
    "zero 3": Layout(dp_shard=2, zero=3),
    "zero 0": Layout(dp_replicate=2),
    "tp": Layout(tp=2),
    "tp, zero 3": Layout(tp=2, dp_shard=2, zero=3),
    "fewer kv heads than ranks": Layout(tp=4),
    "hybrid": Layout(dp_replicate=2, dp_shard=2, zero=2),
    "pp, tp": Layout(pp=2, tp=2, pp_schedule="1f1b"),
    "both ends on a rank": Layout(pp=2, dp_shard=2, zero=2, pp_schedule="zb-v"),
    "cp, zero 2": Layout(cp=2, dp_shard=2, zero=2),
}
EXPERT_LAYOUTS = {
    "ep": Layout(dp_shard=2, ep=2, zero=2),
    "tp, ep": Layout(tp=2, dp_shard=2, ep=2, zero=3),
}


def logical(name: str, matrix: Tensor, spec: ModelSpec) -> list[Tensor]:
    """The logical matrices of a parameter, as views of it, by its name alone."""
    if ".experts." in name:
        return list(matrix)
    heads, latent = spec.n_heads, spec.latent_attention
    if latent is not None and name.endswith(("q_up.weight", "kv_up.weight")):
        widths = (latent.nope_dim, latent.rope_dim if "q_up" in name else latent.v_dim)
        of_head = torch.arange(sum(widths)).repeat(heads)
        return [matrix[of_head < widths[0]], matrix[of_head >= widths[0]]]
    if latent is not None and name.endswith("kv_down.weight"):
        return [matrix[: latent.kv_rank], matrix[latent.kv_rank :]]
    return [matrix]


def by_hand(u: Tensor) -> Tensor:
    """Five iterations by the formula, on the matrix whose rows are the shorter side."""
    x = u if u.shape[0] <= u.shape[1] else u.T
    x = x / x.norm()
    for _ in range(5):
        x = 3.4445 * x - 4.7750 * (x @ x.T @ x) + 2.0315 * (x @ x.T @ x @ x.T @ x)
    return x if u.shape[0] <= u.shape[1] else x.T


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_each_logical_matrix_is_updated_by_itself(spec: ModelSpec) -> None:
    torch.manual_seed(0)
    model = Transformer(spec).double()
    initialise(model, spec, 0)
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = build_optimizer(parameters, spec, WITHOUT_DEFAULTS)
    set_learning_rate(optimizer, 0.03)
    before = {name: p.detach().clone() for name, p in parameters.items()}
    gradients = {name: torch.randn(2, *p.shape, dtype=p.dtype) for name, p in parameters.items()}
    for step in range(2):
        for name, p in parameters.items():
            p.grad = gradients[name][step].clone()
        optimizer.step()
    hidden = {name for name, row in rows(spec).items() if row.kind in ("matrix", "expert")}
    expected = {name: before[name] for name in before}
    others = [expected[name].requires_grad_() for name in parameters if name not in hidden]
    decays = [p.dim() >= 2 for p in others]
    groups = [
        {"params": [p for p, decay in zip(others, decays, strict=True) if decay is wanted], "weight_decay": value}
        for wanted, value in ((True, 0.1), (False, 0.0))
    ]
    adamw = torch.optim.AdamW(groups, lr=0.5 * 0.03, betas=(0.8, 0.9), eps=1e-6)
    for step in range(2):
        for name, p in expected.items():
            p.grad = gradients[name][step].clone() if name not in hidden else None
        adamw.step()
    for name in hidden:
        first, second = 0.1 * gradients[name][0], 0.9 * 0.1 * gradients[name][0] + 0.1 * gradients[name][1]
        weights = expected[name]
        for momentum, gradient in ((first, gradients[name][0]), (second, gradients[name][1])):
            weights = weights * (1 - 0.03 * 0.1)
            found = weights.clone()
            for part, of_weights, of_gradient in zip(
                logical(name, torch.arange(weights.numel()).view(weights.shape), spec),
                logical(name, weights, spec),
                logical(name, 0.9 * momentum + 0.1 * gradient, spec),
                strict=True,
            ):
                update = 0.3 * sqrt(max(of_weights.shape)) * by_hand(of_gradient)
                found.view(-1)[part.flatten()] = (of_weights - 0.03 * update).flatten()
            weights = found
        expected[name] = weights
        torch.testing.assert_close(named_state(optimizer, parameters.items())[f"momentum/{name}"], second)
    for name, p in parameters.items():
        torch.testing.assert_close(
            p.detach(), expected[name].detach(), rtol=1e-10, atol=1e-12, msg=lambda said, name=name: f"{name}: {said}"
        )


def test_a_step_is_about_that_of_pytorchs_muon() -> None:
    """Which multiplies in bf16: the directions agree to its digits."""
    torch.manual_seed(0)
    spec = replace(EVEN, n_layers=1)
    model = Transformer(spec)
    initialise(model, spec, 0)
    p = model.get_parameter("layers.0.ffn.up.weight")
    theirs = torch.nn.Parameter(p.detach().clone())
    gradient, before = torch.randn_like(p), p.detach().clone()
    optimizer = build_optimizer({"layers.0.ffn.up.weight": p}, spec, MUON)
    their_optimizer = torch.optim.Muon([theirs], lr=0.03, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    p.grad, theirs.grad = gradient.clone(), gradient.clone()
    optimizer.step()
    their_optimizer.step()
    ours, expected = p.detach() - before, theirs.detach() - before
    assert float((ours - expected).norm() / expected.norm()) < 0.02


def test_singular_values_come_near_one_whatever_they_were() -> None:
    torch.manual_seed(0)
    u, v = torch.linalg.qr(torch.randn(3, 20, 20).double())[0], torch.linalg.qr(torch.randn(3, 30, 20).double())[0]
    matrices = u * torch.logspace(0, -2, 20).double() @ v.mT
    for stack in (matrices, matrices.mT):
        values = torch.linalg.svdvals(orthogonal(stack))
        assert values.min() > 0.6
        assert values.max() < 1.25
        torch.testing.assert_close(orthogonal(stack[1]), orthogonal(stack)[1])
    assert not orthogonal(torch.zeros(4, 6)).any()


@pytest.mark.parametrize("name", rest_prove(LAYOUTS, "zero 3"))
def test_a_layout_takes_the_steps_of_one_process(verifier: Verifier, name: str) -> None:
    check(verifier, LAYOUTS[name], EVEN)


@prove
@pytest.mark.parametrize("name", EXPERT_LAYOUTS)
def test_experts_are_matrices_of_their_own_on_any_layout(verifier: Verifier, name: str) -> None:
    check(verifier, EXPERT_LAYOUTS[name], SPECS["experts"])


@prove
@pytest.mark.parametrize("name", ["tp, zero 3", "hybrid"])
def test_parts_of_latent_attention_are_matrices_on_any_layout(verifier: Verifier, name: str) -> None:
    check(verifier, LAYOUTS[name], SPECS["latent attention"])


def check(verifier: Verifier, layout: Layout, spec: ModelSpec) -> None:
    spec = replace(spec, n_layers=2 * layout.pp)
    case = replace(LONG, spec=spec, micro_batch=LONG.global_batch // (2 * layout.data_ranks), optimizer=MUON)
    report = verifier.parity(case, layout)
    assert report.equal, report.differing or report.worst
    assert report.worst_error < 1e-9, report.worst


def momentum(layout: Layout, spec: ModelSpec) -> dict[str, Tensor]:
    """Of every hidden matrix, whole, after three steps of a rank in float64."""
    case = replace(LONG, spec=spec, micro_batch=LONG.global_batch // (2 * layout.data_ranks), optimizer=MUON)
    trainer = build_trainer(case, layout, "muon")
    for step in range(3):
        trainer.forward_backward(verified_batch(case, layout, dist.get_rank(), step), step)
        trainer.update(MUON.lr)
    found = logical_states(trainer)
    return {name: each for name, each in found.items() if name.startswith("optimizer/momentum/")}


@pytest.mark.parametrize("name", rest_prove([*LAYOUTS, *EXPERT_LAYOUTS], "tp, zero 3"))
def test_momentum_is_that_of_one_process_to_1e_12(name: str) -> None:
    layout = (LAYOUTS | EXPERT_LAYOUTS)[name]
    spec = replace(SPECS["experts"] if name in EXPERT_LAYOUTS else EVEN, n_layers=2 * layout.pp)
    (expected,) = run_ranks(momentum, 1, Layout(), spec)
    of_ranks = run_ranks(momentum, layout.world_size, layout, spec)
    held = {key: each for found in of_ranks for key, each in found.items()}
    assert held.keys() == expected.keys()
    for found in of_ranks:
        for key, matrix in found.items():
            assert float((matrix - expected[key]).norm()) < 1e-12 * float(expected[key].norm()), key


def buckets_of_one(layout: Layout) -> list[int]:
    """Take a step with one matrix a bucket, so that as many as may are on their way; the places of the owners."""
    with mutated(Mutation("shardwright.parallel.whole_matrices:WholeMatrices._buckets", "BUCKET_BYTES", "0")):
        trainer = build(layout, torch.float64)
        optimizer = build_optimizer(trainer.model.named_parameters, SPEC, MUON)
        for p in trainer.model.named_parameters.values():
            p.grad = torch.ones_like(p)
        optimizer.step()
    return [place for matrix in optimizer._exchange.matrices for place in matrix.owner]  # type: ignore[attr-defined]


@prove
def test_several_buckets_are_on_their_way_and_owners_share_the_work() -> None:
    assert whole_matrices.IN_FLIGHT > 1
    owners = run_ranks(buckets_of_one, 4, Layout(tp=2, dp_shard=2, zero=3, sequence_parallel=False))
    assert owners[0] == owners[1] == owners[2] == owners[3]
    assert set(owners[0]) == {0, 1}


def test_hidden_matrices_have_one_state_and_all_else_two() -> None:
    kind, table = OPTIMIZERS["muon"], rows(EVEN)
    up, norm = table["layers.0.ffn.up.weight"], table["norm.weight"]
    assert kind.shapes(up, {}) == {"momentum": up.shape}
    assert not kind.counters_of(up)
    assert kind.shapes(norm, {}) == {"exp_avg": norm.shape, "exp_avg_sq": norm.shape}
    assert kind.counters_of(norm) == ("step",)
    assert CASE.optimizer.kind.shapes(up, {}).keys() == CASE.optimizer.kind.shapes(norm, {}).keys()
