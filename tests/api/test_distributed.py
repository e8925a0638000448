"""Proves that a loop of one's own around `parallelize` trains as a plain PyTorch loop on one process does."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from shardwright import Layout, Transformer, parallelize
from shardwright.model.init import initialise
from shardwright.model.sections import MoESpec
from shardwright.model.spec import ModelSpec
from shardwright.system.errors import InputError, LayoutError
from tests.distributed import run_ranks
from tests.marks import prove, rest_prove
from tests.mutation import Mutation, mutated
from tests.training.worlds import SPEC

DEEP = replace(SPEC, n_layers=4, n_heads=4, n_kv_heads=2, tied_embedding=True)
EXPERTS = replace(SPEC, n_layers=2, moe=MoESpec(n_experts=4, top_k=2, d_ffn=16, bias_rate=0.1))
SEED, RATE, STEPS, SEQUENCES, T = 3, 5e-3, 3, 8, 12
LAYOUTS = [
    Layout(),
    Layout(dp_replicate=2),
    Layout(dp_shard=2, zero=1),
    Layout(dp_shard=2, zero=3),
    Layout(tp=2),
    Layout(cp=2),
    Layout(pp=2, pp_schedule="zb-v"),
    Layout(pp=2, dp_replicate=2),
    Layout(dp_shard=2, tp=2),
]


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Tokens and targets of a global batch; some targets do not count."""
    generator = torch.Generator().manual_seed(step)
    tokens, targets = torch.randint(SPEC.vocab_size, (2, SEQUENCES, T), generator=generator)
    return tokens, targets.masked_fill(torch.rand(SEQUENCES, T, generator=generator) < 0.3, -100)


Trained = tuple[list[float], list[float], dict[str, Tensor]]


def plain(spec: ModelSpec) -> Trained:
    """Losses, gradient norms and parameters of a loop in plain PyTorch."""
    model = Transformer(spec).double()
    initialise(model, spec, SEED)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
    losses, norms = [], []
    for step in range(STEPS):
        tokens, targets = batch(step)
        loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), ignore_index=-100)
        optimizer.zero_grad()
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
        losses.append(loss.item())
    tokens, targets = batch(99)
    with torch.no_grad():
        losses.append(F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), ignore_index=-100).item())
    return losses, norms, dict(model.named_parameters())


def own_loop(spec: ModelSpec, layout: Layout, mutations: tuple[Mutation, ...] = (), given: bool = False) -> Trained:
    """The same with `parallelize`, on the mesh of a layout."""
    with mutated(*mutations):
        model = parallelize(_given(spec) if given else spec, layout, seq_len=T, seed=SEED, param_dtype=torch.float64)
        optimizer = torch.optim.AdamW(model.parameter_groups(weight_decay=0.0), lr=RATE)
        block = SEQUENCES // layout.data_ranks
        mine = slice(model.data_rank * block, (model.data_rank + 1) * block)
        losses, norms = [], []
        for step in range(STEPS):
            tokens, targets = (each[mine] for each in batch(step))
            losses.append(model.forward_backward(tokens, targets, micro_batch=2).item())
            norms.append(model.clip_grad_norm(0.5).item())
            optimizer.step()
            optimizer.zero_grad()  # not needed, and does no harm
        losses.append(model.evaluate(*(each[mine] for each in batch(99)), micro_batch=2).item())
        return losses, norms, model.full_state_dict()


def _given(spec: ModelSpec) -> Transformer:
    model = Transformer(spec).double()
    initialise(model, spec, SEED)
    return model


def difference(found: Trained, expected: Trained) -> float:
    """The largest of all."""
    assert found[2].keys() == expected[2].keys()
    numbers = [
        abs(a - b) for one, other in zip(found[:2], expected[:2], strict=True) for a, b in zip(one, other, strict=True)
    ]
    return max([*numbers, *((found[2][name] - expected[2][name]).abs().max().item() for name in found[2])])


@pytest.fixture(scope="module")
def expected() -> Trained:
    return plain(DEEP)


@pytest.mark.parametrize("layout", rest_prove(LAYOUTS, LAYOUTS[4]), ids=str)
def test_an_own_loop_trains_as_plain_pytorch_does(layout: Layout, expected: Trained):
    for found in run_ranks(own_loop, layout.world_size, DEEP, layout):
        assert difference(found, expected) < 1e-12


@pytest.mark.prove
@pytest.mark.parametrize("layout", [Layout(dp_shard=2, tp=2)], ids=str)
def test_the_values_of_a_model_that_is_given_are_taken(layout: Layout, expected: Trained):
    for found in run_ranks(own_loop, layout.world_size, DEEP, layout, (), True):
        assert difference(found, expected) < 1e-12


def test_biases_of_routers_learn(expected: Trained):
    """Each step of the loop moves them, under every layout alike."""
    (one,) = run_ranks(own_loop, 1, EXPERTS, Layout())
    for layout in (Layout(dp_shard=2, ep=2), Layout(pp=2)):
        for found in run_ranks(own_loop, 2, EXPERTS, layout):
            assert difference(found, one) < 1e-12
    biases = [value for name, value in one[2].items() if name.endswith("router.bias")]
    assert biases
    assert all(bias.abs().max() > 0 for bias in biases)


BUGS = {
    "gradients that were let go are not put back into the buckets": (
        Layout(dp_replicate=2),
        Mutation("shardwright.parallel.data:Replicated.before_backward", "parameter.grad is None", "False"),
    ),
    "the second copy of a tied embedding keeps its old values": (
        Layout(pp=2, pp_schedule="zb-v"),
        Mutation("shardwright.parallel.model:ParallelModel.after_change", "self.tied.update_duplicates()", "pass"),
    ),
    "gradients of the step before are kept": (
        Layout(tp=2),
        Mutation(
            "shardwright.api.distributed:DistributedModel.forward_backward", "self._model.forget_gradients()", "pass"
        ),
    ),
    "the norm counts an embedding once for each rank of pp that holds it": (
        Layout(pp=2),
        Mutation(
            "shardwright.training.forward_backward:ForwardBackward.clip",
            "self.model.holders",
            "None",
        ),
    ),
}


@prove
@pytest.mark.parametrize("bug", BUGS)
def test_a_bug_is_seen(bug: str, expected: Trained):
    layout, mutation = BUGS[bug]
    found = run_ranks(own_loop, layout.world_size, DEEP, layout, (mutation,))[0]
    assert difference(found, expected) > 1e-6


def refusals(layout: Layout) -> list[str]:
    """What is said of calls that cannot be."""
    said = []
    model = parallelize(DEEP, layout, seq_len=T)
    tokens, targets = batch(0)
    for call in (
        lambda: model.forward_backward(tokens, targets[:, :-1]),
        lambda: model.forward_backward(tokens, targets, micro_batch=3),
        lambda: model.forward_backward(tokens.repeat(1, 9), targets.repeat(1, 9)),
        lambda: parallelize(DEEP, Layout(tp=3)),
        lambda: parallelize(DEEP, Layout(dp_shard=8)),
        lambda: parallelize("lama"),
        lambda: parallelize(DEEP, Layout(dp_shard=2, offload_optimizer="disk")),
    ):
        with pytest.raises((InputError, LayoutError)) as error:
            call()
        said.append(str(error.value))
    return said


def test_what_cannot_be_is_refused_with_the_number_the_rule_and_the_way_out():
    (said, _) = run_ranks(refusals, 2, Layout(dp_shard=2))
    for text, parts in zip(
        said,
        [
            ("(8, 12)", "(8, 11)"),
            ("micro_batch=3 does not divide the 8 sequences",),
            ("108 tokens", "max_seq_len=16"),
            ("tp=3",),
            ("needs 8 ranks", "2 processes were started"),
            ("'lama'", "llama"),
            ("layout.offload_optimizer='disk'", "leave it out"),
        ],
        strict=True,
    ):
        assert all(part in text for part in parts), text
