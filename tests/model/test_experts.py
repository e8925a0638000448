"""Proves that rows reach their experts and come back: PyTorch's grouped product, the loop in its place and one product
an expert give the same values and gradients, whatever the load, on real tensors and on fake ones."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from shardwright.model import matmul
from shardwright.model.experts import Experts, combine, dispatch, sort_rows
from shardwright.model.matmul import has_grouped_mm, linear

torch.set_num_threads(1)
COUNTS = [[3, 5, 4], [0, 12, 0], [0, 0, 12], [12, 0, 0], [5, 7, 0], [1, 0, 2]]


def one_by_one(x_RD: Tensor, weight_EFD: Tensor, counts: list[int]) -> Tensor:
    parts = x_RD[: sum(counts)].split(counts)
    return torch.cat([part @ weight.T for part, weight in zip(parts, weight_EFD, strict=True)])


def values_and_gradients(function, x: Tensor, weight: Tensor, dy: Tensor) -> list[Tensor]:  # type: ignore[no-untyped-def]
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    y = function(x, weight)
    assert x.grad is None
    y[: len(dy)].backward(dy)
    assert x.grad is not None
    assert weight.grad is not None
    return [y[: len(dy)].detach(), x.grad[: len(dy)], weight.grad]


@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_rows_are_multiplied_by_the_matrix_of_their_expert(dtype: torch.dtype, counts: list[int]) -> None:
    generator = torch.Generator().manual_seed(0)
    x_RD, weight_EFD = (torch.randn(shape, generator=generator).to(dtype) for shape in ((12, 16), (3, 8, 16)))
    dy_RF = torch.randn(sum(counts), 8, generator=generator).to(dtype)
    ours = values_and_gradients(lambda x, w: linear(x, w, counts_E=torch.tensor(counts)), x_RD, weight_EFD, dy_RF)
    exact = values_and_gradients(
        lambda x, w: one_by_one(x, w, counts), x_RD.double(), weight_EFD.double(), dy_RF.double()
    )
    # Sums of up to 16 products of order 1, rounded once or added in another order.
    tolerance = 16 * torch.finfo(dtype).eps
    for value, expected in zip(ours, exact, strict=True):
        assert (value.double() - expected).abs().max() <= tolerance * expected.abs().max()
    for expert, count in enumerate(counts):
        assert count or not ours[2][expert].any(), "an expert without rows has a gradient"


@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_the_loop_gives_what_the_grouped_product_gives(counts: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    x_RD, weight_EFD, dy_RF = torch.randn(12, 16), torch.randn(3, 8, 16), torch.randn(sum(counts), 8)
    both = []
    for grouped in (True, False):
        assert has_grouped_mm(x_RD, 8, 16)
        if not grouped:
            monkeypatch.setattr(matmul, "has_grouped_mm", lambda *_: False)
        both.append(
            values_and_gradients(lambda x, w: linear(x, w, counts_E=torch.tensor(counts)), x_RD, weight_EFD, dy_RF)
        )
    for value, expected in zip(*both, strict=True):
        assert torch.allclose(value, expected, rtol=1e-5, atol=1e-5)


def test_the_type_and_width_decide_who_multiplies() -> None:
    assert has_grouped_mm(torch.empty(0, dtype=torch.bfloat16), 8, 16)
    assert not has_grouped_mm(torch.empty(0, dtype=torch.bfloat16), 8, 12)  # 24 bytes
    assert has_grouped_mm(torch.empty(0), 8, 12)
    assert not has_grouped_mm(torch.empty(0, dtype=torch.float64), 8, 16)


def test_the_gradient_of_the_product_is_its_derivative() -> None:
    x_RD = torch.randn(6, 4, dtype=torch.float64, requires_grad=True)
    weight_EFD = torch.randn(3, 5, 4, dtype=torch.float64, requires_grad=True)
    counts_E = torch.tensor([2, 0, 4])
    assert torch.autograd.gradcheck(lambda x, w: linear(x, w, counts_E=counts_E), (x_RD, weight_EFD))


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_what_is_dispatched_comes_back_weighted(data: st.DataObject) -> None:
    """With experts that do nothing, combine after dispatch is a sum of weights; its gradients are the derivatives."""
    n, k, n_experts = data.draw(st.integers(1, 7)), data.draw(st.integers(1, 4)), data.draw(st.integers(4, 9))
    picks = data.draw(st.lists(st.permutations(range(n_experts)).map(lambda order: order[:k]), min_size=n, max_size=n))
    experts_NK = torch.tensor(picks)
    kept_NK = torch.tensor(data.draw(st.lists(st.booleans(), min_size=n * k, max_size=n * k))).view(n, k)
    rows = sort_rows(experts_NK, kept_NK, n_experts)
    picked_R = experts_NK.masked_fill(~kept_NK, n_experts).flatten()[rows.order_R]
    assert torch.equal(picked_R, picked_R.sort().values)
    x_ND = torch.randn(n, 3, dtype=torch.float64, requires_grad=True)
    weights_NK = torch.rand(n, k, dtype=torch.float64, requires_grad=True)

    def through(x_ND: Tensor, weights_NK: Tensor, of_inputs: bool) -> Tensor:
        weights_NK = weights_NK.masked_fill(~kept_NK, 0)
        rows_RD = dispatch(x_ND, rows, weights_NK if of_inputs else None)
        undefined_R = torch.arange(n * k) >= kept_NK.sum()
        rows_RD = rows_RD.masked_fill(undefined_R.unsqueeze(1), torch.nan)
        return combine(rows_RD, None if of_inputs else weights_NK, rows)

    expected_ND = x_ND * (weights_NK * kept_NK).sum(-1, keepdim=True)
    for of_inputs in (False, True):
        assert torch.allclose(through(x_ND, weights_NK, of_inputs), expected_ND)
        assert torch.autograd.gradcheck(partial(through, of_inputs=of_inputs), (x_ND, weights_NK))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_experts_run_on_fake_tensors(dtype: torch.dtype) -> None:
    with FakeTensorMode():
        network = Experts(4, 16, 8, "swiglu")
        for name, p in network.named_parameters():
            setattr(network, name, torch.nn.Parameter(p.detach().to(dtype)))
        x_ND, picks_NK = torch.randn(6, 16, dtype=dtype, requires_grad=True), torch.zeros(6, 2, dtype=torch.long)
        rows = sort_rows(picks_NK, None, 4)
        y_RD = network(dispatch(x_ND, rows), torch.zeros(4, dtype=torch.long))
        combine(y_RD, torch.rand(6, 2), rows).sum().backward()
        assert x_ND.grad is not None
        assert [p.grad is not None and p.grad.shape == p.shape for p in network.parameters()] == [True] * 3


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_a_gpu_multiplies_rows_as_a_cpu_does(dtype: torch.dtype, counts: list[int]) -> None:
    x_RD, weight_EFD, dy_RF = (torch.randn(shape).to(dtype) for shape in ((12, 16), (3, 8, 16), (sum(counts), 8)))
    both = [
        values_and_gradients(
            lambda x, w, at=device: linear(x, w, counts_E=torch.tensor(counts, device=at)),
            *(tensor.to(device) for tensor in (x_RD, weight_EFD, dy_RF)),
        )
        for device in ("cpu", "cuda")
    ]
    for cpu, cuda in zip(*both, strict=True):
        assert (cpu - cuda.cpu()).abs().max() <= 32 * torch.finfo(dtype).eps * cpu.abs().max()
