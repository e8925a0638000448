"""Proves that a model of a user's loop generates, scores and weights the losses of tokens as plain PyTorch does, on
every layout; that generation changes nothing of training; and that the reward of examples/grpo.py rises."""

import importlib.util
import textwrap
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from shardwright import Layout, Transformer, parallelize
from shardwright.generation.sampling import DRAWN, Sampling, draw
from shardwright.model.init import initialise
from shardwright.model.sections import MoESpec
from shardwright.model.spec import ModelSpec
from shardwright.parallel.boxes import gather_whole
from shardwright.system.errors import InputError, WorkerError
from tests.distributed import run_ranks
from tests.marks import prove, rest_prove
from tests.mutation import Mutation, mutated
from tests.training.worlds import SPEC

EXAMPLE = Path(__file__).parents[2] / "examples" / "grpo.py"
DEEP = replace(SPEC, n_layers=4, n_heads=4, n_kv_heads=2)
EXPERTS = replace(SPEC, n_layers=2, moe=MoESpec(n_experts=4, top_k=2, d_ffn=16, bias_rate=0.0))
SEED, N_PROMPTS, LENGTH, N_NEW = 3, 4, 5, 8
LAYOUTS = [
    Layout(tp=2, sequence_parallel=True),
    Layout(dp_replicate=2),
    Layout(dp_shard=2, zero=3),
    Layout(cp=2),
    Layout(pp=2),
    Layout(dp_shard=2, tp=2, recompute="full"),
    Layout(pp=2, dp_shard=2, zero=2),
]


class PolicyStep(NamedTuple):
    """The drawn tokens with their log-probabilities in the order of the prompts, the log-probabilities of the same
    tokens by the forward pass of training, and the loss and gradients of weighted tokens."""

    tokens: list[list[int]]
    drawn: list[list[float]]
    scored: list[list[float]]
    loss: float
    gradients: dict[str, Tensor]


def prompts() -> Tensor:
    return torch.randint(SPEC.vocab_size, (N_PROMPTS, LENGTH), generator=torch.Generator().manual_seed(1))


def weights() -> Tensor:
    return torch.randn(N_PROMPTS, LENGTH + N_NEW - 1, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def on_layout(spec: ModelSpec, layout: Layout, mutations: tuple[Mutation, ...] = ()) -> PolicyStep:
    """The results of a layout, on a rank that generates twice."""
    with mutated(*mutations):
        model = parallelize(spec, layout, seq_len=12, seed=SEED, param_dtype=torch.float64, device="cpu")
        own = slice(model.data_rank, None, layout.data_ranks)
        asked = prompts()[own].tolist()
        model.generate(asked[:1], 3)
        found = model.generate(asked, N_NEW, temperature=0.7, seed=5, batch_size=2)
        tokens = torch.tensor([[*prompt, *each.tokens] for prompt, each in zip(asked, found, strict=True)])
        targets = tokens[:, 1:].clone()
        targets[:, : LENGTH - 1] = -100
        scored = model.log_probs(tokens[:, :-1], targets, micro_batch=1)
        loss = model.forward_backward(tokens[:, :-1], targets, weights=weights()[own], micro_batch=1)
        gradients = {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}
        whole = {name: gather_whole(each) for name, each in gradients.items()}
        return PolicyStep(
            [list(each.tokens) for each in found],
            [list(each.log_probs) for each in found],
            scored[:, LENGTH - 1 :].tolist(),
            loss.item(),
            whole,
        )


def plain(spec: ModelSpec) -> PolicyStep:
    """The same in plain PyTorch on one process, by a full forward pass for each token."""
    model = Transformer(spec).double()
    initialise(model, spec, SEED)
    model.eval()
    tokens, drawn = prompts(), []
    sampling = Sampling(0.7, seed=5)
    for position in range(LENGTH, LENGTH + N_NEW):
        with torch.no_grad():
            logits = model(tokens)[:, -1]
        uniform = sampling.uniform(range(N_PROMPTS), [position] * N_PROMPTS)[:, DRAWN]
        new = draw((logits / 0.7).softmax(-1), uniform)
        drawn.append(logits.log_softmax(-1).gather(1, new[:, None]))
        tokens = torch.cat([tokens, new[:, None]], 1)
    targets = tokens[:, 1:]
    log_probs = model(tokens[:, :-1]).log_softmax(-1).gather(-1, targets[..., None])[..., 0][:, LENGTH - 1 :]
    loss = -(log_probs * weights()[:, LENGTH - 1 :]).sum() / log_probs.numel()
    loss.backward()
    gradients = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    return PolicyStep(
        tokens[:, LENGTH:].tolist(), torch.cat(drawn, 1).tolist(), log_probs.tolist(), loss.item(), gradients
    )


def difference(found: list[PolicyStep], layout: Layout, expected: PolicyStep) -> float:
    """The largest difference of a number of any rank; infinite if a token differs."""
    worst = 0.0
    for rank, step in enumerate(found):
        own = slice(layout.data_rank(rank), None, layout.data_ranks)
        if step.tokens != expected.tokens[own]:
            return float("inf")
        pairs = [(step.drawn, expected.drawn[own]), (step.scored, expected.scored[own]), (step.loss, expected.loss)]
        worst = max([worst, *(float((torch.tensor(a) - torch.tensor(b)).abs().max()) for a, b in pairs)])
        for name, gradient in step.gradients.items():
            worst = max(worst, float((gradient - expected.gradients[name]).abs().max()))
    return worst


@pytest.fixture(scope="module")
def expected() -> PolicyStep:
    return plain(DEEP)


@pytest.mark.parametrize("layout", rest_prove(LAYOUTS, LAYOUTS[0]), ids=str)
def test_a_layout_draws_scores_and_weights_as_plain_pytorch_does(layout: Layout, expected: PolicyStep):
    assert difference(run_ranks(on_layout, layout.world_size, DEEP, layout), layout, expected) < 1e-12


@prove
def test_experts_draw_and_score_as_plain_pytorch_does():
    layout = Layout(dp_shard=2, ep=2)
    assert difference(run_ranks(on_layout, 2, EXPERTS, layout), layout, plain(EXPERTS)) < 1e-12


ENGINE, STEP = "shardwright.generation.engine", "shardwright.training.step:ForwardBackward"
API = "shardwright.api.distributed:DistributedModel"
BUGS = {
    "the attention of generation is left in the model": (
        Layout(dp_replicate=2),
        Mutation(f"{ENGINE}:LayoutEngine.close", "self._changes.undo()", "pass"),
    ),
    "the hooks of generation are left in the model": (
        Layout(dp_replicate=2),
        Mutation(f"{ENGINE}:LayoutEngine.close", "hook.remove()", "pass"),
    ),
    "all data ranks draw with the same numbers": (
        Layout(dp_replicate=2),
        Mutation(f"{API}.generate", "n * self.layout.data_ranks + self.data_rank", "n"),
    ),
    "the weights of tokens are those of the first rank of cp": (
        Layout(cp=2),
        Mutation(f"{STEP}._microbatches", "weights_ABT[..., positions_T]", "weights_ABT[..., : len(positions_T)]"),
    ),
    "a weighted loss is divided by the targets of this rank alone": (
        Layout(dp_replicate=2),
        Mutation(f"{STEP}._loss", "self.loss_scale / n_targets.to(torch.float64)", "self.loss_scale / batch.n_targets"),
    ),
    "a rank of cp has the log-probabilities of its own tokens alone": (
        Layout(cp=2),
        Mutation(f"{STEP}.token_log_probs", "self.model.groups.cp_ring", "None"),
    ),
    "the rank of pp without the head has no log-probabilities": (
        Layout(pp=2),
        Mutation(f"{STEP}.token_log_probs", "self.model.groups.pp", "None"),
    ),
}


@prove
@pytest.mark.parametrize("bug", BUGS)
def test_a_bug_is_seen(bug: str, expected: PolicyStep):
    layout, mutation = BUGS[bug]
    try:
        found = run_ranks(on_layout, layout.world_size, DEEP, layout, (mutation,))
    except WorkerError:
        return  # what generation left in the model cannot be run
    assert difference(found, layout, expected) > 1e-6


def refusals() -> list[str]:
    said = []
    model = parallelize(DEEP, Layout(), seq_len=12, device="cpu")
    tokens = prompts()
    for call in (
        lambda: model.generate([[]], 3),
        lambda: model.generate([[1], [SPEC.vocab_size]], 3),
        lambda: model.generate([[1]], 0),
        lambda: model.forward_backward(tokens, tokens, weights=tokens),
    ):
        with pytest.raises(InputError) as error:
            call()
        said.append(str(error.value))
    return said


def test_what_cannot_be_generated_or_weighted_is_refused():
    (said,) = run_ranks(refusals, 1)
    for text, words in zip(
        said,
        (
            "prompt 0 has 0 tokens; needed: 1 to",
            "prompt 1 has 1 tokens; needed: 1 to",
            "max_tokens=0 and batch_size=64: both have to be 1 or more",
            "weights of shape (4, 5) and type torch.int64: floats of the shape of tokens, (4, 5), are needed",
        ),
        strict=True,
    ):
        assert words in text


def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("grpo", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def rewarded() -> list[float]:
    history: list[float] = example().run(Layout(dp_shard=2))
    return history


def test_the_reward_of_the_example_rises_on_two_ranks():
    means = [sum(rewards) / 2 for rewards in zip(*run_ranks(rewarded, 2), strict=True)]
    assert means[0] < 0.3
    assert means[-1] > 0.8


def test_the_page_shows_the_loop_of_the_example():
    loop = EXAMPLE.read_text(encoding="utf-8")
    loop = textwrap.dedent(loop[loop.index("        # Generate a group") : loop.index("        history.append")])
    assert f"```python\n{loop.rstrip()}\n```" in (EXAMPLE.parents[1] / "docs" / "python.md").read_text(encoding="utf-8")
