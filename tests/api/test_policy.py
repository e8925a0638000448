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
from shardwright.model.sections import MoESpec, RopeScaling
from shardwright.model.spec import ModelSpec
from shardwright.parallel.boxes import gather_whole
from shardwright.split.rules import token_call_problems
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


ENGINE, STEP = "shardwright.generation.engine", "shardwright.training.forward_backward:ForwardBackward"
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
    "every rank of cp takes the first rank's weights of tokens": (
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
    chunked = parallelize(DEEP, Layout(loss_chunk_tokens=4), seq_len=12, device="cpu")
    dropping = parallelize(
        replace(EXPERTS, moe=replace(EXPERTS.moe, capacity_factor=1.0, force_balance=True)), seq_len=12, device="cpu"
    )
    tokens = prompts()
    for call in (
        lambda: model.generate([[1]], 3, temperature=-1.0, top_k=-2, top_p=0.0, ends=[-1, 2]),
        lambda: chunked.generate([[1]], 3),
        lambda: chunked.log_probs(tokens, tokens),
        lambda: chunked.forward_backward(tokens, tokens, weights=tokens.double()),
        lambda: dropping.generate([[1]], 3),
        lambda: dropping.log_probs(tokens, tokens),
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
            "temperature=-1: 0 (the most probable token) or more is needed\n"
            "top_p=0: a probability above 0 and up to 1 is needed; 1 keeps all tokens\n"
            "top_k=-2: 0 (all tokens) or a number of tokens is needed\n"
            "ends=[-1]: ids of 0 to 30 are needed",
            "generate needs the logits of each token, and layout.loss_chunk_tokens=4",
            "log_probs needs the logits of each token, and layout.loss_chunk_tokens=4",
            "weights needs the logits of each token, and layout.loss_chunk_tokens=4",
            "generate with model.moe.capacity_factor=1: an expert would drop",
            "log_probs with model.moe.force_balance: the experts of a token are drawn",
            "prompt 0 has 0 tokens; needed: 1 to",
            "prompt 1 has 1 tokens; needed: 1 to",
            "max_tokens=0 and batch_size=64: both have to be 1 or more",
            "weights of shape (4, 5) and type torch.int64: floats of the shape of tokens, (4, 5), are needed",
        ),
        strict=True,
    ):
        assert words in text


@pytest.mark.parametrize(
    ("schedule", "n_stages"), [("interleaved-1f1b", 2), ("zb-v", 2), ("dualpipe", 2), ("dualpipe-v", 2)], ids=str
)
def test_a_schedule_with_several_stages_on_a_rank_cannot_generate(schedule: str, n_stages: int):
    layout = Layout(pp=2, pp_schedule=schedule, virtual_stages=2 if schedule == "interleaved-1f1b" else None)
    (said,) = token_call_problems(DEEP, layout, "generate")
    assert f"layout.pp_schedule={schedule!r} has {n_stages} on a rank; valid: afab, 1f1b, zb-h1" in said
    assert not token_call_problems(DEEP, layout, "log_probs")
    assert not token_call_problems(DEEP, Layout(pp=2), "generate")


LONGROPE = replace(
    SPEC,
    rope_scaling=RopeScaling(
        kind="longrope", factor=2.0, original_max_seq_len=12, short_factor=(1.0,) * 4, long_factor=(2.0,) * 4
    ),
)


def after_errors(spec: ModelSpec) -> tuple[list[str], bool]:
    """What a data rank says if one has a bad prompt or too long sequences, and whether the model is as before."""
    model = parallelize(spec, Layout(dp_replicate=2), seq_len=12, param_dtype=torch.float64, device="cpu")
    tokens, said = prompts(), []
    before = model.log_probs(tokens[:, :-1], tokens[:, 1:])
    for asked, n_new in (([[1], [2, 99]][model.data_rank], 3), ([[1], [1] * 10][model.data_rank], 3)):
        with pytest.raises(InputError) as error:
            model.generate([asked], n_new)
        said.append(str(error.value))
    return said, torch.equal(model.log_probs(tokens[:, :-1], tokens[:, 1:]), before)


def test_every_rank_raises_the_error_of_one_and_the_model_is_as_before():
    for said, is_as_before in run_ranks(after_errors, 2, LONGROPE):
        assert said[0] == "data rank 1: prompt 0 has 2 tokens; needed: 1 to 15 (max_seq_len - 1), with ids of 0 to 30"
        assert said[1].startswith("sequences of up to 13 tokens: longrope has other frequencies")
        assert is_as_before


def attached_in_part() -> bool:
    """Whether a model is as before after an error while a cache is attached to it."""
    model = parallelize(SPEC, Layout(), seq_len=12, param_dtype=torch.float64, device="cpu")
    tokens = prompts()
    before = model.log_probs(tokens[:, :-1], tokens[:, 1:])
    fails = Mutation("shardwright.generation.engine:LayoutEngine._attach_to_parts", "part.norm is not None", "1 / 0")
    with mutated(fails), pytest.raises(ZeroDivisionError):
        model.generate([[1]], 3)
    return torch.equal(model.log_probs(tokens[:, :-1], tokens[:, 1:]), before)


def test_an_error_while_the_cache_is_attached_leaves_nothing_of_it():
    assert run_ranks(attached_in_part, 1) == [True]


def greedy() -> list[bool]:
    model = parallelize(SPEC, Layout(), seq_len=12, param_dtype=torch.float64, device="cpu")
    return [model.generate([[1]], 5, temperature=t) == model.generate([[1]], 5, top_k=1) for t in (0, 0.0, None)]


def test_a_temperature_of_0_is_greedy():
    assert run_ranks(greedy, 1) == [[True, True, True]]


def with_modules(layout: Layout) -> list[float]:
    model = parallelize(
        replace(DEEP, mtp_modules=1), layout, seq_len=12, seed=SEED, param_dtype=torch.float64, device="cpu"
    )
    (drawn,) = model.generate([[1, 2, 3]], 6)
    tokens = torch.tensor([[1, 2, 3, *drawn.tokens]])
    scored = model.log_probs(tokens[:, :-1], tokens[:, 1:])[0, 2:].tolist()
    with pytest.raises(InputError, match=r"weights with model.mtp_modules=1: the losses of later tokens have no"):
        model.forward_backward(tokens[:, :-1], tokens[:, 1:], weights=torch.ones(1, 8))
    return [max(abs(a - b) for a, b in zip(scored, drawn.log_probs, strict=True))]


@pytest.mark.parametrize("layout", rest_prove([Layout(), Layout(pp=2), Layout(tp=2)], Layout()), ids=str)
def test_a_model_with_mtp_modules_scores_the_next_token_as_it_generates(layout: Layout):
    assert max(difference for (difference,) in run_ranks(with_modules, layout.world_size, layout)) < 1e-12


def scored_by_schedule(layout: Layout) -> list[list[float]]:
    model = parallelize(DEEP, layout, seq_len=12, seed=SEED, param_dtype=torch.float64, device="cpu")
    tokens = prompts()
    scores: list[list[float]] = model.log_probs(tokens[:, :-1], tokens[:, 1:], micro_batch=1).tolist()
    return scores


@prove
@pytest.mark.parametrize("schedule", ["zb-v", "dualpipe", "dualpipe-v"])
def test_log_probs_do_not_depend_on_the_schedule(schedule: str):
    (expected,) = run_ranks(scored_by_schedule, 1, Layout())
    for scored in run_ranks(scored_by_schedule, 2, Layout(pp=2, pp_schedule=schedule)):
        assert float((torch.tensor(scored) - torch.tensor(expected)).abs().max()) < 1e-12


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
