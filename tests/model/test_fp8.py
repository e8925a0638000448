"""Proves that matmuls in fp8 round their operands to the numbers of the format, part by part, and nothing else."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from shardwright.layout.layout import Layout
from shardwright.model import matmul
from shardwright.model.fp8 import (
    FORWARD,
    GRADIENT,
    Fp8Linear,
    OperandShards,
    product,
    rounded,
    scaled_mm,
    spread,
    use_fp8,
)
from shardwright.model.init import initialise
from shardwright.model.number_formats import Fp8, block_of, problems
from shardwright.model.presets import PRESETS
from shardwright.model.sections import MoESpec
from shardwright.model.transformer import Transformer

RECIPES = {
    "tensorwise": Fp8("tensorwise"),
    "rowwise": Fp8("rowwise"),
    "blockwise": Fp8("blockwise", weight_gradient=False, block=8),
}
DEBUG = replace(PRESETS["debug"], n_layers=4)


def numbers(dtype: torch.dtype) -> Tensor:
    """Every finite number of a format of 8 bits, in order, from its bits: sign, exponent, significand."""
    exponent_bits, significand_bits = (4, 3) if dtype == torch.float8_e4m3fn else (5, 2)
    bias, found = 2 ** (exponent_bits - 1) - 1, []
    for e in range(2**exponent_bits):
        for m in range(2**significand_bits):
            fraction = m / 2**significand_bits
            value = 2.0 ** (e - bias) * (1 + fraction) if e else 2.0 ** (1 - bias) * fraction
            found.append(value)
    largest = 448.0 if exponent_bits == 4 else 57344.0
    positive = torch.tensor([value for value in found if value <= largest], dtype=torch.float64)
    return torch.cat([-positive.flip(0), positive]).unique()


def nearest(x: Tensor, dtype: torch.dtype) -> Tensor:
    """How far each element is from the nearest number of the format."""
    return (x[..., None] - numbers(dtype)).abs().amin(-1)


def parts(recipe: str, rows: int, x_RK: Tensor) -> Tensor:
    """The largest absolute value of the part of each element that has one scale."""
    if recipe == "tensorwise":
        return x_RK.abs().max().expand_as(x_RK)
    if recipe == "rowwise":
        return x_RK.abs().max(1, keepdim=True).values.expand_as(x_RK)
    amax_RK = torch.empty_like(x_RK)
    for i in range(0, len(x_RK), rows):
        for j in range(0, x_RK.shape[1], 8):
            amax_RK[i : i + rows, j : j + 8] = x_RK[i : i + rows, j : j + 8].abs().max()
    return amax_RK


def check_rounding(recipe: str) -> None:
    generator = torch.Generator().manual_seed(1)
    # Rows and columns of very different sizes, so that scales of other parts would show.
    spread = torch.logspace(-6, 2, 24, dtype=torch.float64)
    x_RK = torch.randn(24, 16, generator=generator, dtype=torch.float64) * spread[:, None] * spread[:16]
    computes = Fp8Linear(RECIPES[recipe])
    for dtype, rows in ((FORWARD, 1), (FORWARD, 8), (GRADIENT[recipe], 1)):
        found = computes.scaled(x_RK, dtype, None, None, rows)
        assert found.values.dtype == dtype
        assert nearest(found.values.double(), dtype).max() == 0
        largest = numbers(dtype).max()
        scale_RK = (parts(recipe, rows, x_RK) / largest).float().double()
        error = (found.values.double() - (x_RK / scale_RK).clamp(-largest, largest)).abs()
        assert torch.allclose(error, nearest((x_RK / scale_RK).clamp(-largest, largest), dtype), rtol=1e-6, atol=0)
        assert torch.equal(found.wide(torch.float64), found.values.double() * scale_RK)


def test_operands_are_rounded_to_the_nearest_number_of_the_format():
    for recipe in RECIPES:
        check_rounding(recipe)


def test_every_operand_has_the_type_of_its_recipe():
    """Matmuls of operands rounded to other formats are other numbers, so they are compared with plain float64."""
    generator = torch.Generator().manual_seed(2)
    x_ND, weight_FD, dy_NF = (
        torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((32, 16), (24, 16), (32, 24))
    )
    for recipe, settings in RECIPES.items():
        computes, gradient = Fp8Linear(settings), GRADIENT[recipe]
        assert (gradient == torch.float8_e5m2) == (recipe == "tensorwise")

        def rounded(x_RK: Tensor, dtype: torch.dtype, rows: int, computes: Fp8Linear = computes) -> Tensor:
            return computes.scaled(x_RK, dtype, None, None, rows).wide(torch.float64)

        y_NF = rounded(x_ND, FORWARD, 1) @ rounded(weight_FD, FORWARD, 8).T
        dx_ND = rounded(dy_NF, gradient, 1) @ rounded(weight_FD.T, FORWARD, 8).T
        assert torch.equal(computes.forward(x_ND, weight_FD), y_NF)
        assert torch.equal(computes.input_gradient(dy_NF, weight_FD), dx_ND)
        assert 1e-3 < (y_NF - x_ND @ weight_FD.T).norm() / y_NF.norm() < 0.1
        if settings.weight_gradient:
            dweight_FD = rounded(dy_NF.T, gradient, 1) @ rounded(x_ND.T, FORWARD, 1).T
            assert torch.equal(computes.weight_gradient(dy_NF, x_ND), dweight_FD)


def test_experts_multiply_rounded_rows_by_rounded_matrices():
    """Beside a loop over experts: rows with scales of their own, each matrix as the recipe says; forward and backward,
    where the gradient of a weight is not in fp8."""
    generator = torch.Generator().manual_seed(4)
    counts_E, starts = torch.tensor([5, 0, 3]), (0, 5, 5, 8)
    x_RD, weight_EFD, dy_RF = (
        torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((8, 16), (3, 24, 16), (8, 24))
    )
    weight_EFD *= torch.tensor([0.01, 1.0, 30.0]).view(3, 1, 1)
    for recipe, settings in RECIPES.items():
        of_rows = Fp8Linear(RECIPES["blockwise" if recipe == "blockwise" else "rowwise"])
        of_matrices, computes = Fp8Linear(settings), Fp8Linear(settings)
        x, weight = x_RD.clone().requires_grad_(), weight_EFD.clone().requires_grad_()
        y = matmul.linear(x, weight, counts_E=counts_E, recipe=computes)
        dx, dweight = torch.autograd.grad(y, (x, weight), dy_RF)
        for expert, (begin, end) in enumerate(pairwise(starts)):
            rows_RD = of_rows.scaled(x_RD[begin:end], FORWARD, None, None, 1).wide(torch.float64)
            dys_RF = of_rows.scaled(dy_RF[begin:end], GRADIENT[recipe], None, None, 1).wide(torch.float64)
            w_FD, w_DF = (
                of_matrices.scaled(w, FORWARD, None, None, 8).wide(torch.float64)
                for w in (weight_EFD[expert], weight_EFD[expert].T)
            )
            torch.testing.assert_close(y[begin:end], rows_RD @ w_FD.T, rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(dx[begin:end], dys_RF @ w_DF.T, rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(dweight[expert], dy_RF[begin:end].T @ x_RD[begin:end], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_pytorchs_matmul_in_fp8_gives_the_same(recipe: str, dtype: torch.dtype):
    """What GPUs run, where PyTorch has it for CPUs, too; its outputs are rounded to bf16."""
    generator = torch.Generator().manual_seed(3)
    a_MK, b_NK = (torch.randn(shape, generator=generator).bfloat16() for shape in ((48, 64), (32, 64)))
    computes = Fp8Linear(RECIPES[recipe])
    a = computes.scaled(a_MK, dtype, None, None, 1)
    b = computes.scaled(b_NK, FORWARD, None, None, 1)
    expected = product(a, b, torch.float64)
    try:
        found = scaled_mm(a, b, torch.bfloat16)
    except RuntimeError as error:
        if recipe == "rowwise" and "only supports per-tensor scaling for CPU" in str(error):
            pytest.skip(f"torch {torch.__version__} has no fp8 matmul with a scale a row on CPUs")  # 2.11
        if "could not create a primitive descriptor for the matmul primitive" in str(error):
            pytest.skip("oneDNN has no fp8 matmul for CPUs without AVX-512")
        raise
    assert found.dtype == torch.bfloat16
    assert (found.double() - expected).norm() / expected.norm() < 2.0**-8


def test_the_matmuls_of_the_layers_are_in_fp8_but_those_that_are_left_out(monkeypatch: pytest.MonkeyPatch):
    spec = replace(DEBUG, moe=MoESpec(n_experts=4, top_k=2, d_ffn=16, n_shared=1, first_dense=2))
    for skip, expected in ((0, {0, 1, 2, 3}), (1, {1, 2})):
        model = Transformer(spec)
        fp8 = Fp8("tensorwise", skip_layers=skip)
        use_fp8(model, spec, fp8)
        inside = {name for name, module in model.named_modules() if getattr(module, "recipe", None) is not None}
        attention = {f"layers.{layer}.attention.{name}" for layer in expected for name in "qkvo"}
        networks = {
            f"layers.{layer}.ffn.{'shared.' * (layer >= 2)}{name}"
            for layer in expected
            for name in ("gate", "up", "down")
        }
        assert inside == attention | networks
        use_fp8(model, spec, replace(fp8, experts=True))
        inside = {name for name, module in model.named_modules() if getattr(module, "recipe", None) is not None}
        assert inside == attention | networks | {f"layers.{layer}.ffn.experts" for layer in expected if layer >= 2}


def test_what_autograd_saves_is_as_large_as_without_fp8():
    found = []
    for fp8 in (None, *RECIPES.values()):
        model = Transformer(DEBUG)
        initialise(model, DEBUG, seed=0)
        if fp8 is not None:
            use_fp8(model, DEBUG, fp8)
        kept: dict[int, int] = {}

        def keep(x: Tensor, kept: dict[int, int] = kept) -> Tensor:
            kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            logits_BTV = model(torch.zeros(2, 16, dtype=torch.long))
            found.append(sum(kept.values()))
        logits_BTV.sum().backward()
    assert len(set(found)) == 1, found


@pytest.mark.parametrize(("recipe", "n_maxima"), [("tensorwise", 8), ("rowwise", 10)])
def test_gradients_of_a_linear_are_those_of_its_matmuls(recipe: str, n_maxima: int):
    """A scale of a whole tensor is computed once for the two matmuls that read it, each with the maximum over ranks
    along both dims: of two operands forward, and of dy in each of two backward passes. Scales of rows are computed by
    each matmul: of two operands forward and four backward, along one dim."""
    taken: list[Tensor] = []
    computes = Fp8Linear(RECIPES[recipe], OperandShards(*[taken.append] * 3))
    passes, alone = [], Fp8Linear(RECIPES[recipe])
    for saves_first in (False, True):
        x, weight, bias = (torch.randn(shape).requires_grad_() for shape in ((2, 8, 16), (24, 16), (24,)))
        y = matmul.linear(x, weight, bias, recipe=computes, saves_first=saves_first)
        passes.append((x, weight, bias, y, torch.randn(2, 8, 24)))
    for x, weight, bias, y, largest_dy in passes:
        for dy in (largest_dy / 1000, largest_dy):
            gradients = torch.autograd.grad(y, (x, weight, bias), dy, retain_graph=True)
            with torch.no_grad():
                expected = (alone.input_gradient(dy, weight), alone.weight_gradient(dy, x), dy.sum((0, 1)))
                assert torch.equal(y, alone.forward(x, weight) + bias)
            assert all(torch.equal(a, b) for a, b in zip(gradients, expected, strict=True))
    assert len(taken) == 2 * n_maxima


def test_operands_along_either_dim_are_rounded_to_rows_by_one_operator():
    """On a GPU one kernel then does it, and no quotient in 32 bits is stored."""
    x_RK = torch.randn(24, 16).bfloat16()
    for settings in RECIPES.values():
        for x in (x_RK, x_RK.T):
            computes = Fp8Linear(settings)
            scale = computes.scale(x, FORWARD, None, None, 1)
            with profile(activities=[ProfilerActivity.CPU]) as ran:
                result = rounded(x, FORWARD, scale)
            assert result.values.is_contiguous()
            assert torch.equal(result.values.float(), (x.float() / spread(scale, x.shape)).to(FORWARD).float())
            called = {event.name for event in ran.events() if event.cpu_parent is None}
            assert not called & {"aten::clamp", "aten::to", "aten::contiguous"}, called


@pytest.mark.parametrize(
    ("fp8", "layout", "tokens", "said"),
    [
        (Fp8("tensorwise"), Layout(), 24, ["24 tokens", "not a multiple of 16", "fp8_weight_gradient=false"]),
        (Fp8("tensorwise", skip_layers=2), Layout(), 32, ["leaves none of the 4 layers", "valid: 0 to 1"]),
        (Fp8("blockwise", weight_gradient=False), Layout(tp=2), 32, ["multiples of 128", "lower layout.tp"]),
        (Fp8("rowwise", experts=True), Layout(), 32, ["precision.fp8_experts=true: this model has no experts"]),
        (Fp8("rowwise"), Layout(tp=4), 32, ["tp=4 above 2 kv heads", "valid: tp up to 2"]),
    ],
)
def test_what_cannot_be_computed_in_fp8_is_refused_with_the_way_out(fp8, layout, tokens, said):
    told = "\n".join(problems(DEBUG, layout, fp8, tokens))
    for words in said:
        assert words in told


def test_sizes_that_are_no_multiple_of_16_are_refused_all_at_once():
    spec = replace(DEBUG, d_ffn=DEBUG.d_ffn + 8)
    (told,) = problems(spec, Layout(), Fp8("tensorwise"), 32)
    assert f"ffn.up.weight: {spec.d_ffn} output features" in told
    assert f"ffn.down.weight: {spec.d_ffn} input features" in told
    assert list(problems(DEBUG, Layout(), Fp8("tensorwise"), 32)) == []
    assert block_of(spec, Fp8("blockwise", weight_gradient=False), 2) == 4


def test_sizes_of_experts_that_are_no_multiple_of_16_are_refused_where_they_are_in_fp8():
    spec = replace(DEBUG, moe=MoESpec(n_experts=4, top_k=2, d_ffn=24))
    assert list(problems(spec, Layout(), Fp8("rowwise"), 32)) == []
    (told,) = problems(spec, Layout(), Fp8("rowwise", experts=True), 32)
    assert "ffn.experts.up: 24 output features" in told
    assert "set precision.fp8_experts=false" in told
