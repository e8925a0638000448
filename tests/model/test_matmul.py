"""Proves that every matmul with a weight goes through the three functions of one file, in the whole model and in one
that is split, and that they give the bits of PyTorch's own linear."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from shardwright.layout.layout import Layout
from shardwright.model import matmul
from shardwright.model.init import initialise
from shardwright.model.modules import rows
from shardwright.model.presets import PRESETS
from shardwright.model.sections import LatentAttentionSpec, MoESpec
from shardwright.model.spec import ModelSpec
from shardwright.model.transformer import Transformer
from shardwright.verification import Case
from shardwright.verification.case import PLAIN_SGD
from shardwright.verification.rank import build_trainer, local_batch
from tests.distributed import run_ranks
from tests.marks import rest_prove

torch.set_num_threads(1)
FUNCTIONS = ("forward", "input_gradient", "weight_gradient")
DEBUG = replace(PRESETS["debug"], n_layers=2)
MODELS = {
    "dense": DEBUG,
    "gelu, biases, tied": replace(DEBUG, activation="gelu", bias=True, tied_embedding=True),
    "experts": replace(DEBUG, moe=MoESpec(n_experts=4, top_k=2, d_ffn=16, n_shared=1)),
    "latent": replace(
        DEBUG,
        n_kv_heads=DEBUG.n_heads,
        latent_attention=LatentAttentionSpec(q_rank=10, kv_rank=12, nope_dim=8, rope_dim=4, v_dim=8),
    ),
}


@pytest.mark.parametrize("saves_first", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_a_linear_gives_the_bits_of_pytorchs(dtype: torch.dtype, bias: bool, saves_first: bool):
    generator = torch.Generator().manual_seed(0)
    x_BTD, weight_FD, bias_F, dy_BTF = (
        torch.randn(shape, generator=generator).to(dtype) for shape in ((2, 5, 16), (24, 16), (24,), (2, 5, 24))
    )
    found = []
    for ours in (True, False):
        leaves = [each.clone().requires_grad_() for each in (x_BTD, weight_FD, bias_F)]
        x, weight, b = leaves[0], leaves[1], leaves[2] if bias else None
        y_BTF = matmul.linear(x, weight, b, saves_first=saves_first) if ours else F.linear(x, weight, b)
        y_BTF.backward(dy_BTF)
        found.append([y_BTF, *(leaf.grad for leaf in leaves if leaf.grad is not None)])
    assert len(found[0]) == len(found[1])
    for value, expected in zip(*found, strict=True):
        assert torch.equal(value, expected)


def count_calls(patch: pytest.MonkeyPatch) -> Counter[str]:
    calls: Counter[str] = Counter()

    def counted(name: str) -> None:
        plain = getattr(matmul, name)

        def call(*args: Tensor | None, **named: Tensor | None) -> Tensor:
            calls[name] += 1
            result: Tensor = plain(*args, **named)
            return result

        patch.setattr(matmul, name, call)

    for name in FUNCTIONS:
        counted(name)
    return calls


def n_matmuls(spec: ModelSpec) -> int:
    """Parameters that activations are multiplied with; the router's matmul is in fp32, whatever the others are in."""
    return sum(row.matmul is not None and row.kind != "router" for row in rows(spec).values())


@pytest.mark.parametrize("name", MODELS)
def test_every_matmul_of_a_model_goes_through_the_three_functions(name: str, monkeypatch: pytest.MonkeyPatch):
    spec = MODELS[name]
    model = Transformer(spec)
    initialise(model, spec, seed=0)
    calls = count_calls(monkeypatch)
    model(torch.zeros(1, 8, dtype=torch.long)).sum().backward()
    assert calls == dict.fromkeys(FUNCTIONS, n_matmuls(spec))


def calls_of_a_step(case: Case, layout: Layout) -> Counter[str]:
    trainer = build_trainer(case, layout, PLAIN_SGD)
    with pytest.MonkeyPatch.context() as patch:
        calls = count_calls(patch)
        trainer.step(local_batch(case, layout, torch.distributed.get_rank(), 0), 0, 1e-3)
    return calls


LAYOUTS = [
    Layout(tp=2, sequence_parallel=False),
    Layout(pp=2, pp_schedule="zb-h1"),
    Layout(pp=2, tp=2, pp_schedule="zb-h1", sequence_parallel=True),
]


@pytest.mark.parametrize("layout", rest_prove(LAYOUTS, LAYOUTS[-1]), ids=["tp2", "pp2, W later", "pp2 tp2, W later"])
@pytest.mark.parametrize("name", MODELS)
def test_so_does_every_matmul_of_a_layout(name: str, layout: Layout):
    spec, n_microbatches = MODELS[name], 2
    case = Case(spec, seq_len=8, global_batch=n_microbatches, micro_batch=1)
    total = sum(run_ranks(calls_of_a_step, layout.world_size, case, layout), Counter[str]())
    assert total == dict.fromkeys(FUNCTIONS, n_microbatches * layout.tp * n_matmuls(spec))
