"""Proves that training replays the choices of experts that generation records: on every layout the gradients equal one
process whose routers get the same experts, and a replay of a router's own choices changes nothing."""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from shardwright import Layout, Transformer, parallelize
from shardwright.model.init import initialise
from shardwright.model.moe import expert_layers
from shardwright.model.sections import MoESpec
from shardwright.parallel.boxes import gather_whole
from shardwright.system.errors import InputError
from tests.distributed import run_ranks
from tests.marks import prove, rest_prove
from tests.mutation import Mutation, mutated
from tests.training.worlds import SPEC

EXPERTS = replace(
    SPEC, n_layers=4, n_heads=4, n_kv_heads=2,
    moe=MoESpec(n_experts=4, top_k=2, d_ffn=16, bias_rate=0.0, first_dense=1, aux_loss=0.02),
)  # fmt: skip
SEED, N, T, LAYERS = 3, 4, 12, 3
LAYOUTS = [
    Layout(dp_shard=2, ep=2),
    Layout(tp=2, sequence_parallel=True, recompute="full"),
    Layout(tp=2, ep=2, sequence_parallel=True),
    Layout(pp=2, pp_schedule="zb-h1"),
    Layout(pp=2, virtual_stages=2, pp_schedule="interleaved-1f1b"),
    Layout(cp=2, cp_method="zigzag"),
    Layout(cp=2, dp_shard=2, zero=3),
]


class Replay(NamedTuple):
    loss: float
    values: list[list[float]]
    gradients: dict[str, Tensor]


def batch() -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, weights and experts: drawn, so that they differ from the routers'; some left to the router."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(SPEC.vocab_size, (N, T + 1), generator=generator)
    experts = torch.rand(N, T, LAYERS, 4, generator=generator).argsort(-1)[..., :2]
    experts[1, 3:5] = experts[2, 7, 1] = -1
    return tokens, torch.randn(N, T, generator=generator, dtype=torch.float64), experts


def on_layout(layout: Layout, mutations: tuple[Mutation, ...] = ()) -> Replay:
    with mutated(*mutations):
        model = parallelize(EXPERTS, layout, seq_len=T, seed=SEED, param_dtype=torch.float64, device="cpu")
        own = slice(model.data_rank, None, layout.data_ranks)
        tokens, weights, experts = (each[own] for each in batch())
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        values = model.log_probs(inputs, targets, micro_batch=1, experts=experts)
        loss = model.forward_backward(inputs, targets, weights=weights, micro_batch=1, experts=experts)
        gradients = {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}
        return Replay(loss.item(), values.tolist(), {name: gather_whole(each) for name, each in gradients.items()})


def plain() -> Replay:
    """One process: `pick` of each router returns the experts of its sequence."""
    model = Transformer(EXPERTS).double()
    initialise(model, EXPERTS, SEED)
    tokens, weights, experts = batch()
    for place, layer in enumerate(expert_layers(model).values()):
        own, given = layer.router.pick, experts[:, :, place]

        def pick(scores: Tensor, own: Callable[[Tensor], Tensor] = own, given: Tensor = given) -> Tensor:
            return torch.where(given >= 0, given, own(scores))

        layer.router.pick = pick  # type: ignore[method-assign,assignment]
    values = model.train()(tokens[:, :-1]).log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]
    total = -(values * weights).sum() / (N * T)
    total.backward()
    return Replay(
        total.item(),
        values.tolist(),
        {name: each.grad for name, each in model.named_parameters() if each.grad is not None},
    )


def difference(found: list[Replay], layout: Layout, right: Replay) -> float:
    worst = 0.0
    for rank, result in enumerate(found):
        own = slice(layout.data_rank(rank), None, layout.data_ranks)
        worst = max(worst, float((torch.tensor(result.values) - torch.tensor(right.values[own])).abs().max()))
        worst = max([worst, *(float((g - right.gradients[name]).abs().max()) for name, g in result.gradients.items())])
        worst = max(worst, abs(result.loss - right.loss))
    return worst


@pytest.fixture(scope="module")
def right() -> Replay:
    return plain()


@pytest.mark.parametrize("number", rest_prove(range(len(LAYOUTS)), 0))
def test_replayed_gradients_are_those_of_one_process_that_is_told_the_experts(number: int, right: Replay):
    layout = LAYOUTS[number]
    assert difference(run_ranks(on_layout, layout.world_size, layout), layout, right) < 1e-12


STEP = "shardwright.training.forward_backward"
CHOICES = "shardwright.model.expert_choices"
BUGS = {
    "a rank of tp replays the first shard of tokens": (
        Layout(tp=2, sequence_parallel=True),
        Mutation(f"{STEP}:ForwardBackward._replayed", "batch.experts_ABTLK[microbatches, :, own_T]",
                 "batch.experts_ABTLK[microbatches, :, : len(own_T)]"),
    ),
    "layers are shifted by the dense one": (
        Layout(),
        Mutation(f"{STEP}:replayed", "experts_BTLK[:, :, place]", "experts_BTLK[:, :, place - 1]"),
    ),
    "every micro-batch replays the first": (
        Layout(pp=2),
        Mutation(f"{STEP}:replayed", "[experts_BTLK[:, :, place] for experts_BTLK in experts_ABTLK]",
                 "[experts_ABTLK[0][:, :, place]] * len(experts_ABTLK)"),
    ),
    "recomputation picks again": (
        Layout(recompute="full"),
        Mutation("shardwright.model.moe:Router.forward",
                 "decided(lambda: self.choices.choose(lambda: self.pick(scores_BTE.detach())))",
                 "self.choices.choose(lambda: self.pick(scores_BTE.detach()))"),
    ),
    "the router's own choice is taken": (
        Layout(),
        Mutation(f"{CHOICES}:ExpertChoices.choose", "given_BTK.where(given_BTK != UNKNOWN, experts_BTK)",
                 "experts_BTK"),
    ),
}  # fmt: skip


@prove
@pytest.mark.parametrize("bug", BUGS)
def test_a_bug_of_the_replay_is_seen(bug: str, right: Replay):
    layout, mutation = BUGS[bug]
    assert difference(run_ranks(on_layout, layout.world_size, layout, (mutation,)), layout, right) > 1e-6


def own_choices(layout: Layout) -> list[float]:
    """Errors of replays of recorded choices: of the log-probabilities by the forward pass, which are equal in each bit,
    and, after an update, from a process that gets the same experts."""
    model = parallelize(EXPERTS, layout, seq_len=T, seed=SEED, param_dtype=torch.float64, device="cpu")
    prompts = [[1, 2, 3, 4], [5, 6, 7, 8], [9, 1, 2, 3], [7, 7, 1, 4]][model.data_rank :: layout.data_ranks]
    drawn = model.generate(prompts, T - 3, seed=1, batch_size=3, record_experts=True)
    tokens = torch.tensor([[*prompt, *each.tokens] for prompt, each in zip(prompts, drawn, strict=True)])
    experts = torch.stack([each.experts for each in drawn if each.experts is not None])
    assert experts.shape == (len(prompts), T, LAYERS, 2)
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    own = model.log_probs(inputs, targets, micro_batch=1)
    again = model.log_probs(inputs, targets, micro_batch=1, experts=experts)
    gradients = []
    for given in (None, experts):
        model.forward_backward(inputs, targets, micro_batch=1, experts=given)
        gradients.append({name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None})
    worst = max(float(gather_whole(each - gradients[1][name]).abs().max()) for name, each in gradients[0].items())
    return [float((own - again).abs().max()), worst]


@pytest.mark.parametrize("number", rest_prove(range(len(LAYOUTS)), 0))
def test_a_replay_of_the_choices_of_generation_changes_nothing_of_the_same_weights(number: int):
    layout = LAYOUTS[number]
    if layout.virtual_stages and layout.virtual_stages > 1:
        pytest.skip("generate runs one stage on each rank")
    assert all(max(errors) < 1e-12 for errors in run_ranks(own_choices, layout.world_size, layout))


def refusals() -> list[str]:
    said = []
    tokens, _, experts = batch()
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    moe = EXPERTS.moe
    assert moe is not None
    model = parallelize(EXPERTS, seq_len=T, device="cpu")
    dense = parallelize(SPEC, seq_len=T, device="cpu")
    drawn = parallelize(replace(EXPERTS, moe=replace(moe, force_balance=True)), seq_len=T, device="cpu")
    twice, partly = experts.clone(), experts.clone()
    twice[0, 0, 0], partly[0, 0, 0, 0] = 1, -1
    for call in (
        lambda: model.log_probs(inputs, targets, experts=experts[:, 1:]),
        lambda: model.log_probs(inputs, targets, experts=experts[:, :, 1:]),
        lambda: model.log_probs(inputs, targets, experts=experts.double()),
        lambda: model.log_probs(inputs, targets, experts=experts + 1),
        lambda: model.log_probs(inputs, targets, experts=twice),
        lambda: model.log_probs(inputs, targets, experts=partly),
        lambda: dense.generate([[1]], 3, record_experts=True),
        lambda: drawn.forward_backward(inputs, targets, experts=experts),
    ):
        with pytest.raises(InputError) as error:
            call()
        said.append(str(error.value))
    return said


def test_choices_that_cannot_be_replayed_are_refused():
    (said,) = run_ranks(refusals, 1)
    for text, words in zip(
        said,
        (
            "experts of shape (4, 11, 3, 2): (4, 12, layers with experts, top_k) is needed",
            "choices of 2 x 2 experts a token, and the model has 3 layers with experts and 2 experts of a token",
            "choices of type torch.float64: integers are needed",
            "a choice of expert 4; valid: 0 to 3, or -1: not replayed",
            "a token has one expert twice",
            "a token has -1 for some of its experts",
            "the model has no experts (model.moe)",
            "experts are drawn; set force_balance=False",
        ),
        strict=True,
    ):
        assert words in text
