"""Proves that SGD, Lion and Adafactor take the steps of their formulas, beside PyTorch's own where it has them; that
states in bf16 and rates by kind of parameter do what they say; and that each layout takes the steps of one process."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwright.config import OptimizerSection
from shardwright.config.optimizer import LrScaleSection, WeightDecaySection
from shardwright.layout.layout import Layout
from shardwright.model.init import initialise
from shardwright.model.modules import row_of
from shardwright.model.spec import ModelSpec
from shardwright.model.transformer import Transformer
from shardwright.training.checkpoint.manifest import TrainingProgress
from shardwright.training.checkpoint.saver import save
from shardwright.training.checkpoint.state import load
from shardwright.training.checkpoint.store import CheckpointStore
from shardwright.training.optimizer import build_optimizer, named_state, set_learning_rate
from shardwright.verification import Verifier
from shardwright.verification.rank import build_trainer
from tests.distributed import run_ranks
from tests.marks import prove, rest_prove
from tests.training.bugs.bug import EVEN, EXPERTS, LATENT, LONG
from tests.training.checkpoints import DATA, Logical, equal, take_step
from tests.training.checkpoints import logical as logical_states
from tests.training.test_muon import EXPERT_LAYOUTS, LAYOUTS, by_hand, logical
from tests.training.worlds import CASE, SEED

LR, DECAY = 0.03, 0.1
SPECS = {
    "biases, tied": replace(EVEN, bias=True, norm="layernorm", tied_embedding=True),
    "latent attention": replace(EVEN, n_kv_heads=4, latent_attention=LATENT),
    "experts": replace(EVEN, moe=EXPERTS),
}
KINDS = {"matrix": 0.5, "embedding": 2.0, "head": 0.25, "norm": 3.0, "bias": 0.75, "router": 0.1, "expert": 1.5}
DECAYS = {"matrix": 0.2, "embedding": 0.0, "norm": 0.3, "router": 0.4}


def section(name: str, **values: Any) -> OptimizerSection:
    return OptimizerSection(name=name, lr=LR, weight_decay=DECAY, **values)


RUNS = {
    "sgd": section("sgd", nesterov=True),
    "lion": section("lion"),
    "adafactor": section("adafactor"),
    "adamw-8bit": section("adamw-8bit", block_size=16, least_elements=48),
    "adamw, bf16 states": section("adamw", state_dtype="bf16"),
    "muon, bf16 states": section("muon", state_dtype="bf16"),
    "by kind": section("adamw", lr_scale=LrScaleSection(**KINDS), weight_decay_by_kind=WeightDecaySection(**DECAYS)),
}
BETA1, BETA2, EPS = 0.85, 0.97, 1e-6
_OTHER = {
    "sgd": {"momentum": 0.8},
    "lion": {"beta1": BETA1, "beta2": BETA2},
    "adafactor": {"decay_power": 0.7, "clip_threshold": 1.25, "least_rms": 2e-3},
    "adamw-8bit": {"beta1": BETA1, "beta2": BETA2, "eps": EPS},
    "by kind": {"beta1": BETA1, "beta2": BETA2, "eps": EPS},
}
WITHOUT_DEFAULTS = {name: RUNS[name].model_copy(update=options) for name, options in _OTHER.items()}
"""For the formulas: one that does not read an option would be right by chance where it has its default."""


STEPS = 3
By = Callable[[nn.Parameter, float, float], torch.optim.Optimizer]
"""(parameter, learning rate, weight decay) -> the optimizer that one of ours is compared with."""


def gradient_of(name: str, parameter: Tensor, step: int) -> Tensor:
    """Of the type of the parameter; zero for the first row of a matrix and the first element of a vector."""
    generator = torch.Generator().manual_seed(1000 * step + sum(map(ord, name)))
    drawn = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype) * 10.0 ** (step - 1)
    (drawn[..., :1, :] if drawn.dim() > 1 else drawn[:1]).zero_()
    return drawn


def whole_parameters(spec: ModelSpec) -> dict[str, nn.Parameter]:
    model = Transformer(spec).double()
    initialise(model, spec, 0)
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def trained(spec: ModelSpec, run: OptimizerSection) -> tuple[dict[str, nn.Parameter], torch.optim.Optimizer]:
    """The parameters of a model after some steps, by name, and the optimizer."""
    parameters = whole_parameters(spec)
    optimizer = build_optimizer(parameters, spec, run)
    for step in range(STEPS):
        set_learning_rate(optimizer, LR)
        for name, p in parameters.items():
            p.grad = gradient_of(name, p, step)
        optimizer.step()
    return parameters, optimizer


def trained_each(spec: ModelSpec, make: By, by_kind: bool, by_matrix: bool) -> dict[str, Tensor]:
    """The same by an optimizer for each parameter or, `by_matrix`, for each logical matrix."""
    found = {}
    for name, whole in whole_parameters(spec).items():
        kind = row_of(spec, name).kind
        decay = DECAY if whole.dim() > 1 else 0.0
        rate = LR * KINDS[kind] if by_kind else LR
        numbers, result = torch.arange(whole.numel()).view(whole.shape), whole.detach().clone()
        for index in logical(name, numbers, spec) if by_matrix else [numbers]:
            p = nn.Parameter(whole.detach().view(-1)[index])
            optimizer = make(p, rate, DECAYS.get(kind, decay) if by_kind else decay)
            for step in range(STEPS):
                p.grad = gradient_of(name, whole, step).view(-1)[index]
                optimizer.step()
            result.view(-1)[index] = p.detach()
        found[name] = result
    return found


class LionByHand(torch.optim.Optimizer):
    """The sign by comparisons."""

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        (group,) = self.param_groups
        (p,) = group["params"]
        m = self.state[p].get("m", torch.zeros_like(p))
        direction = BETA1 * m + (1 - BETA1) * p.grad
        sign = (direction > 0).double() - (direction < 0).double()
        p.data.copy_(p.data - group["lr"] * (sign + group["weight_decay"] * p.data))
        self.state[p]["m"] = BETA2 * m + (1 - BETA2) * p.grad


class SGDByHand(torch.optim.Optimizer):
    """With Nesterov momentum."""

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        (group,) = self.param_groups
        (p,) = group["params"]
        self.state[p]["m"] = m = 0.8 * self.state[p].get("m", 0.0) + p.grad
        p.data.copy_(p.data - group["lr"] * (group["weight_decay"] * p.data + 0.8 * m + p.grad))


def sgd_by_hand(p: nn.Parameter, lr: float, decay: float) -> torch.optim.Optimizer:
    return SGDByHand([p], {"lr": lr, "weight_decay": decay})


def lion_by_hand(p: nn.Parameter, lr: float, decay: float) -> torch.optim.Optimizer:
    return LionByHand([p], {"lr": lr, "weight_decay": decay})


def adafactor_of_pytorch(p: nn.Parameter, lr: float, decay: float) -> torch.optim.Optimizer:
    return torch.optim.Adafactor([p], lr=lr, weight_decay=decay, beta2_decay=-0.7, d=1.25, eps=(1e-15, 2e-3))


def adamw_of_pytorch(p: nn.Parameter, lr: float, decay: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p], lr=lr, weight_decay=decay, betas=(BETA1, BETA2), eps=EPS)


BY: dict[str, By] = {
    "sgd": sgd_by_hand,
    "lion": lion_by_hand,
    "adafactor": adafactor_of_pytorch,
    "by kind": adamw_of_pytorch,
}


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("run", BY)
def test_steps_are_those_of_the_formula(run: str, spec: str) -> None:
    """Each logical matrix by itself, where the update is not by element."""
    found, _ = trained(SPECS[spec], WITHOUT_DEFAULTS[run])
    expected = trained_each(SPECS[spec], BY[run], by_kind=run == "by kind", by_matrix=run == "adafactor")
    assert found.keys() == expected.keys()
    for name, p in found.items():
        torch.testing.assert_close(
            p.detach(), expected[name], rtol=1e-10, atol=1e-12, msg=lambda said, name=name: f"{name}: {said}"
        )


def test_states_in_bf16_are_rounded_after_the_step_has_used_them() -> None:
    """AdamW by hand, the moments rounded to the nearest bf16 number between steps."""
    found, optimizer = trained(EVEN, RUNS["adamw, bf16 states"])
    states = named_state(optimizer, found.items())
    for name, p in whole_parameters(EVEN).items():
        w, m, v = p.detach().clone(), torch.zeros_like(p), torch.zeros_like(p)
        for step in range(STEPS):
            g = gradient_of(name, p, step)
            m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g**2
            w *= 1 - LR * (DECAY if p.dim() > 1 else 0.0)
            w -= LR * (m / (1 - 0.9 ** (step + 1))) / ((v / (1 - 0.95 ** (step + 1))).sqrt() + 1e-8)
            m, v = m.bfloat16().double(), v.bfloat16().double()
        torch.testing.assert_close(found[name].detach(), w, rtol=1e-10, atol=1e-12)
        for kind, expected in (("exp_avg", m), ("exp_avg_sq", v)):
            assert states[f"{kind}/{name}"].dtype == torch.bfloat16
            assert torch.equal(states[f"{kind}/{name}"].double(), expected), (kind, name)


def test_momentum_in_bf16_is_rounded_after_the_direction_is_made() -> None:
    """Of Muon, on a matrix that is one logical matrix."""
    name = "layers.0.ffn.up.weight"
    found, optimizer = trained(EVEN, RUNS["muon, bf16 states"])
    w = whole_parameters(EVEN)[name].detach()
    m = torch.zeros_like(w)
    for step in range(STEPS):
        g = gradient_of(name, w, step)
        m = 0.95 * m + 0.05 * g
        w = (1 - LR * DECAY) * w - LR * 0.2 * max(w.shape) ** 0.5 * by_hand(0.95 * m + 0.05 * g)
        m = m.bfloat16().double()
    torch.testing.assert_close(found[name].detach(), w, rtol=1e-10, atol=1e-12)
    assert torch.equal(named_state(optimizer, found.items())[f"momentum/{name}"].double(), m)


def test_buckets_of_states_in_bf16_do_not_change_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    run = RUNS["adamw, bf16 states"]
    together, _ = trained(EVEN, run)
    monkeypatch.setattr("shardwright.training.on_shards.BUCKET_BYTES", 1)
    by_one, _ = trained(EVEN, run)
    assert all(torch.equal(p, by_one[name]) for name, p in together.items())


def hop(folder: Path, layout: Layout, step: int, run: OptimizerSection) -> tuple[Logical | None, Logical]:
    """Take up the checkpoint after `step` steps, if that is not 0, take one more and save it."""
    trainer = build_trainer(replace(CASE, spec=EVEN, dtype="float32", optimizer=run), layout, run.name)
    store, loaded = CheckpointStore(folder, keep_last=99), None
    if step:
        load(store.path_of(step), trainer, DATA)
        loaded = logical_states(trainer)
    take_step(trainer, layout, step)
    save(store, trainer, TrainingProgress(step + 1, 12 * (step + 1), SEED), DATA, "")
    return loaded, logical_states(trainer)


@prove
@pytest.mark.parametrize("run", ["adafactor", "adamw-8bit", "adamw, bf16 states"])
def test_states_are_taken_up_on_other_layouts_bit_for_bit(tmp_path: Path, run: str) -> None:
    """And a resume on the same layout goes on as if there had been no stop."""
    one, other = LAYOUTS["tp, zero 3"], LAYOUTS["zero 1"]
    ((_, saved), *_) = run_ranks(hop, one.world_size, tmp_path / "a", one, 0, RUNS[run])
    ((loaded, after), *_) = run_ranks(hop, other.world_size, tmp_path / "a", other, 1, RUNS[run])
    assert loaded is not None
    assert equal(loaded, saved)
    assert not equal(after, saved)
    ((again, same), *_) = run_ranks(hop, other.world_size, tmp_path / "a", other, 1, RUNS[run])
    assert again is not None
    assert equal(same, after)


OF_MATRICES = ("adafactor", "adamw-8bit")
"""Those whose update of an element depends on other elements; Muon's own tests are in test_muon.py."""
ON_LAYOUTS = [(name, run) for run in RUNS for name in (LAYOUTS if run in OF_MATRICES else ("tp, zero 3", "pp, tp"))]
OTHER_MODELS = [
    ("adafactor", "latent attention"),
    ("adafactor", "experts"),
    ("adamw-8bit", "biases, tied"),
    ("adamw-8bit", "experts"),
    ("muon, bf16 states", "experts"),
    ("by kind", "biases, tied"),
]


@pytest.mark.parametrize(("name", "run"), rest_prove(ON_LAYOUTS, ("zero 1", "adamw-8bit")))
def test_a_layout_takes_the_steps_of_one_process(verifier: Verifier, name: str, run: str) -> None:
    check(verifier, LAYOUTS[name], EVEN, RUNS[run])


@prove
@pytest.mark.parametrize(("run", "spec"), OTHER_MODELS)
def test_other_models_on_layouts_take_the_steps_of_one_process(verifier: Verifier, run: str, spec: str) -> None:
    layouts = EXPERT_LAYOUTS if spec == "experts" else {name: LAYOUTS[name] for name in ("tp, zero 3", "pp, tp")}
    for layout in layouts.values():
        check(verifier, layout, SPECS[spec], RUNS[run])


@pytest.mark.parametrize("run", rest_prove(("adafactor", "adamw-8bit", "muon, bf16 states"), "adafactor"))
def test_a_rank_without_a_shard_of_an_expert_takes_the_steps_of_the_others(verifier: Verifier, run: str) -> None:
    few = replace(EXPERTS, n_experts=2, top_k=1, n_groups=1, groups_per_token=1, normalise=False)
    check(verifier, Layout(dp_shard=3, zero=1), replace(EVEN, moe=few), RUNS[run])


def check(verifier: Verifier, layout: Layout, spec: ModelSpec, run: OptimizerSection) -> None:
    spec = replace(spec, n_layers=2 * layout.pp)
    case = replace(LONG, spec=spec, micro_batch=LONG.global_batch // (2 * layout.data_ranks), optimizer=run)
    report = verifier.parity(case, layout)
    assert report.equal, report.differing or report.worst
