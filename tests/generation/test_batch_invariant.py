"""Proves that in the batch-invariant mode the forward pass of training, `score`, and generation with a cache have
log-probabilities that are equal in each bit, whatever the batch and the place of a sequence in it."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from shardwright import Layout, parallelize
from shardwright.generation.engine import WholeEngine
from shardwright.generation.score import decoded, scored
from shardwright.model import batch_invariant as module
from shardwright.model.batch_invariant import batch_invariant
from shardwright.model.spec import ModelSpec
from shardwright.parallel.boxes import gather_whole
from shardwright.split.rules import batch_invariance_problems
from shardwright.system.errors import InputError, LayoutError
from tests.distributed import run_ranks
from tests.generation.models import EXPERTS, GROUPED, LATENT, LINEAR, SPECS, WINDOWS, whole_model
from tests.marks import prove, rest_prove
from tests.mutation import Mutation, mutated

LENGTHS = (5, 27, 2, 18)
SEQUENCES = {
    i: (torch.randint(31, (n,), generator=torch.Generator().manual_seed(i)).tolist(), min(n - 1, 4))
    for i, n in enumerate(LENGTHS)
}
FAMILIES = ("grouped", "experts", "windows", "caps", "chunks", "learned")
Paths = list[dict[int, tuple[float, ...]]]


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short sequences then have several blocks of keys."""
    monkeypatch.setattr(module, "KEYS", 8)
    monkeypatch.setattr(module, "QUERIES", 4)


def picked(logits_TV: Tensor, tokens: list[int], n: int) -> tuple[float, ...]:
    log_p_WV = logits_TV[len(tokens) - 1 - n : len(tokens) - 1].double().log_softmax(-1)
    return tuple(log_p_WV.gather(1, torch.tensor(tokens[-n:])[:, None])[:, 0].tolist())


@torch.no_grad()
def paths(spec: ModelSpec, dtype: torch.dtype, invariant: bool = True) -> Paths:
    """The log-probabilities of each sequence alone, of all in one padded batch, by `score`, and token by token."""
    spec = replace(spec, max_seq_len=64)
    model = whole_model(spec, dtype)
    tokens_NT = torch.zeros(len(SEQUENCES), max(LENGTHS), dtype=torch.int64)
    for index, (tokens, _) in SEQUENCES.items():
        tokens_NT[index, : len(tokens)] = torch.tensor(tokens)
    with batch_invariant(invariant):
        alone = {i: picked(model(torch.tensor([tokens]))[0], tokens, n) for i, (tokens, n) in SEQUENCES.items()}
        together_NTV = model(tokens_NT)
    results = [alone, {i: picked(together_NTV[i], *sequence) for i, sequence in SEQUENCES.items()}]
    for n_slots, score in ((1, scored), (3, scored), (1, decoded), (3, decoded)):
        engine = WholeEngine(whole_model(spec, dtype), n_slots, max(LENGTHS), batch_invariant=invariant)
        results.append({index: each.log_probs for index, each in score(engine, SEQUENCES).items()})
    return results


def are_equal(results: Paths) -> bool:
    return all(result == results[0] for result in results)


CASES = [(name, dtype) for name in FAMILIES for dtype in (torch.float32, torch.bfloat16)]


@pytest.mark.parametrize(("name", "dtype"), rest_prove(CASES, ("windows", torch.float32)), ids=str)
def test_every_way_and_every_batch_has_equal_bits(name: str, dtype: torch.dtype):
    assert are_equal(paths(SPECS[name], dtype))


@prove
@pytest.mark.parametrize(("name", "dtype"), [("experts", torch.float32), ("windows", torch.bfloat16)], ids=str)
def test_two_threads_have_equal_bits(name: str, dtype: torch.dtype):
    n_threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        wide = replace(SPECS[name], d_ffn=1100)  # so that an activation of all tokens is divided among threads
        assert are_equal(paths(wide, dtype))
    finally:
        torch.set_num_threads(n_threads)


@pytest.mark.parametrize(("name", "dtype"), [("windows", torch.float32), ("grouped", torch.float32)], ids=str)
def test_without_the_mode_the_bits_differ(name: str, dtype: torch.dtype):
    assert not are_equal(paths(SPECS[name], dtype, invariant=False))


@prove
@pytest.mark.parametrize("name", FAMILIES)
def test_the_mode_computes_what_the_model_computes(name: str):
    for one, other in zip(paths(SPECS[name], torch.float64), paths(SPECS[name], torch.float64, False), strict=True):
        for index, values in one.items():
            assert torch.allclose(torch.tensor(values), torch.tensor(other[index]), rtol=0, atol=1e-12)


MODE, CACHE = "shardwright.model.batch_invariant", "shardwright.generation.cache"
BUGS = {
    "rows are not padded": (GROUPED, Mutation(f"{MODE}:_blocks", "ROWS - len(part)", "0")),
    "blocks of keys start at the first key of the cache": (
        WINDOWS,
        Mutation(f"{CACHE}:RuledLayerCache._pieces", "first", "0"),
    ),
    "a window hides the first key that it reads": (
        WINDOWS,
        Mutation(f"{MODE}:_seen", "columns_1S > last_Q1 - window", "columns_1S > last_Q1 - window + 1"),
    ),
    "experts share one matmul": (
        EXPERTS,
        Mutation(f"{MODE}:_grouped_matmul", "_matmul(x_RD[start : start + count], weight_FD.T)",
                 "x_RD[start : start + count] @ weight_FD.T"),
    ),
}  # fmt: skip


@prove
@pytest.mark.parametrize("bug", BUGS)
def test_a_bug_of_the_mode_is_seen(bug: str):
    spec, mutation = BUGS[bug]
    right = paths(spec, torch.float64, invariant=False)[0]
    with mutated(mutation):
        results = paths(spec, torch.float32)
    error = max(abs(a - b) for i, values in right.items() for a, b in zip(results[0][i], values, strict=True))
    assert not are_equal(results) or error > 1e-4


OPERATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "exp2": torch.exp2,
    "log1p": lambda x: x.abs().log1p(),
    "softplus": F.softplus,
    "mish": F.mish,
    "pow in place": lambda x: x.abs().pow_(1.7),
    "sum with a factor": lambda x: torch.add(x, x.cos(), alpha=0.3),
    "exp into a tensor": lambda x: torch.exp(x, out=torch.empty_like(x)),
    "logaddexp of a row": lambda x: torch.logaddexp(x, torch.linspace(-1, 1, x.shape[1]).to(x)),
    "mv": lambda x: x @ torch.linspace(-1, 1, x.shape[1]).to(x),
    "baddbmm of aligned rows": lambda x: torch.baddbmm(
        x[:, None, :40], x[:, None, :40], x.new_ones(37, 40, 40)[: len(x)]
    )[:, 0],
}


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("name", OPERATORS)
def test_a_row_of_an_operator_of_a_family_has_the_same_bits_in_every_pass(name: str, inference: bool):
    function, x_ND = OPERATORS[name], torch.randn(37, 43, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode(inference):
        with batch_invariant():
            together = function(x_ND)
            apart = torch.cat([function(rows) for rows in x_ND.split(3)])
        assert torch.equal(together, apart)
        torch.testing.assert_close(together, function(x_ND.double()).float(), rtol=1e-4, atol=1e-5)


def test_pointwise_operators_compute_blocks_of_whole_vectors(monkeypatch: pytest.MonkeyPatch):
    sizes = []
    monkeypatch.setattr(module, "ELEMENTS", 512)
    x_N = torch.arange(1300.0)
    y_N = module._by_elements(lambda some: sizes.append(len(some)) or some + 1, x_N)
    assert sizes == [512, 512, 512]
    assert torch.equal(y_N, x_N + 1)


@pytest.mark.parametrize("inference", [False, True])
def test_an_operator_without_a_rule_is_refused_by_its_name(inference: bool):
    x = torch.randn(2, 4, 8, 6)
    for function, name in (
        (F.glu, "glu"),
        (F.logsigmoid, "log_sigmoid"),
        (lambda x: F.scaled_dot_product_attention(x, x, x), "_scaled_dot_product"),
        (lambda x: F.conv1d(x[0], torch.ones(1, 8, 2)), "convolution"),
    ):
        with (
            torch.inference_mode(inference),
            batch_invariant(),
            pytest.raises(InputError, match=f"batch invariance with the operator '{name}"),
        ):
            function(x)


@prove
def test_decoding_that_attends_as_without_the_mode_is_refused():
    with (
        mutated(Mutation(f"{CACHE}:LayerCache.attend", "is_batch_invariant()", "False")),
        pytest.raises(InputError, match="_scaled_dot_product"),
    ):
        paths(GROUPED, torch.float32)


def trained(
    spec: ModelSpec, layout: Layout, dtype: torch.dtype, invariant: bool, mutations: tuple[Mutation, ...] = ()
) -> tuple[bool, float, dict[str, Tensor]]:
    """Whether a rank's drawn log-probabilities are those of the forward pass of training, and its gradients."""
    with mutated(*mutations):
        model = parallelize(
            spec, layout, seq_len=12, seed=3, param_dtype=dtype, device="cpu", batch_invariant=invariant
        )
        asked = [[1, 2, 3, 4 + model.data_rank], [5], [6, 7]]
        drawn = model.generate(asked, 8, seed=1, batch_size=2)
        tokens_NT, targets_NT = torch.zeros(3, 12, dtype=torch.int64), torch.full((3, 12), -100)
        for row, (prompt, each) in enumerate(zip(asked, drawn, strict=True)):
            n, whole = len(prompt), torch.tensor([*prompt, *each.tokens])
            tokens_NT[row, : len(whole) - 1], targets_NT[row, n - 1 : len(whole) - 1] = whole[:-1], whole[n:]
        values_NT = model.log_probs(tokens_NT, targets_NT, micro_batch=1)
        values = values_NT[targets_NT >= 0].tolist()
        equal = values == [value for each in drawn for value in each.log_probs]
        loss = model.forward_backward(tokens_NT, targets_NT)
        gradients = {name: gather_whole(each.grad) for name, each in model.named_parameters() if each.grad is not None}
        return equal, float(loss), gradients


LAYOUTS = [
    (GROUPED, Layout()),
    (GROUPED, Layout(tp=2)),
    (WINDOWS, Layout(pp=2)),
    (EXPERTS, Layout(dp_shard=2, ep=2)),
    (EXPERTS, Layout(tp=2, ep=2, sequence_parallel=True)),
]


@pytest.mark.parametrize("dtype", rest_prove([torch.float32, torch.bfloat16], torch.float32), ids=str)
@pytest.mark.parametrize("number", rest_prove(range(len(LAYOUTS)), 1))
def test_a_model_of_a_users_loop_draws_with_the_bits_of_its_forward_pass(number: int, dtype: torch.dtype):
    spec, layout = LAYOUTS[number]
    assert all(equal for equal, _, _ in run_ranks(trained, layout.world_size, spec, layout, dtype, True))


@prove
@pytest.mark.parametrize("number", range(len(LAYOUTS)))
def test_the_gradients_of_the_mode_are_those_without(number: int):
    spec, layout = LAYOUTS[number]
    (_, loss, right), *_ = run_ranks(trained, layout.world_size, spec, layout, torch.float64, False)
    (_, found, gradients), *_ = run_ranks(trained, layout.world_size, spec, layout, torch.float64, True)
    assert abs(found - loss) < 1e-12
    assert gradients.keys() == right.keys()
    assert max(float((gradients[name] - right[name]).abs().max()) for name in right) < 1e-12


@prove
def test_a_loss_of_another_function_would_be_seen():
    before = Mutation(
        "shardwright.training.forward_backward:ForwardBackward.token_log_probs", "is_batch_invariant()", "0"
    )
    assert not run_ranks(trained, 1, GROUPED, Layout(), torch.float32, True, (before,))[0][0]


def test_what_cannot_be_invariant_is_refused():
    for spec, layout, words in (
        (GROUPED, Layout(tp=4), "layout.tp=4: an all-reduce of more than two ranks"),
        (GROUPED, Layout(cp=2), "layout.cp=2: ranks of cp merge"),
        (LATENT, Layout(), "latent attention: training multiplies"),
        (LINEAR, Layout(), "linear attention: training computes chunks"),
        (replace(EXPERTS, moe=replace(EXPERTS.moe, capacity_factor=1.5)), Layout(), "capacity_factor=1.5: an expert"),
    ):
        (problem,) = batch_invariance_problems(spec, layout)
        assert words in problem
    with pytest.raises(LayoutError, match="batch_invariant with compile"):
        parallelize(GROUPED, compile=True, batch_invariant=True, device="cpu")
