"""Proves what the chunked loss computes and keeps: with few chunks or many the loss and the gradients of whole logits,
and a peak of memory that has the logits of one chunk. On every layout: tests/training/test_chunked_loss.py."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import profile

from shardwright.model.presets import PRESETS
from shardwright.parallel import loss
from shardwright.parallel.loss import ChunkedLoss, bound, loss_sum
from tests.marks import prove

B, T, D, V = 2, 32, 24, 300
N = B * T
IGNORED = -100


class Ends(nn.Module):
    """The part of a model that the loss reads."""

    def __init__(self, tied: bool, dtype: torch.dtype) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        weight = nn.Parameter(torch.randn(V, D, generator=generator, dtype=torch.float64).to(dtype))
        self.embedding, self.head = nn.Embedding(V, D), None if tied else nn.Linear(D, V, bias=False)
        (self.embedding if self.head is None else self.head).weight = weight
        self.matrix, self.spec = weight, PRESETS["debug"]


def inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(B, T, D, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    targets = torch.randint(V, (B, T), generator=generator)
    return x, targets.masked_fill(torch.rand(B, T, generator=generator) < 0.4, IGNORED)


def rounding_of_the_gradient(grouped: bool) -> float:
    """The largest error of a gradient of logits in fp16, in units of its last digit, which is computed for 5 tokens at
    a time."""
    x_NV, targets_N = torch.randn(N, V, generator=torch.Generator().manual_seed(2)).mul(3).half(), inputs()[1].flatten()
    factor = torch.tensor(2.0**15 / 7)
    exact_NV = x_NV.double().requires_grad_()
    (factor * F.cross_entropy(exact_NV, targets_N, ignore_index=IGNORED, reduction="sum")).backward()
    cross_entropy = bound(range(V), IGNORED, dist.group.WORLD if grouped else None, compiled=False)
    x_NV.requires_grad_()
    before, loss.LOGITS_TOGETHER = loss.LOGITS_TOGETHER, 5 * V
    try:
        (factor * loss_sum(cross_entropy, x_NV[None].view(B, T, V), targets_N.view(B, T), factor)).backward()
    finally:
        loss.LOGITS_TOGETHER = before
    assert x_NV.grad is not None
    assert exact_NV.grad is not None
    assert x_NV.grad.data_ptr() == x_NV.data_ptr(), "the gradient takes the memory of the logits"
    exponent = exact_NV.grad.abs().clamp(min=2.0**-14).log2().floor()
    return float(((x_NV.grad.double() - exact_NV.grad) / (exponent - 10).exp2()).abs().max())


@pytest.mark.parametrize("grouped", [False, True])
def test_the_gradient_in_16_bits_is_rounded_once_and_in_the_memory_of_the_logits(grouped: bool):
    if grouped:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        error = rounding_of_the_gradient(grouped)
    finally:
        if grouped:
            dist.destroy_process_group()
    assert 0.49 < error < 0.51


def chunked(ends: Ends, n_tokens: int) -> ChunkedLoss:
    return ChunkedLoss(ends, range(V), None, n_tokens, IGNORED, compiled=False)  # type: ignore[arg-type]


def whole(ends: Ends, x: Tensor, targets: Tensor) -> Tensor:
    logits = F.linear(x, ends.matrix)
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")


def gradients(ends: Ends, loss: Callable[[Tensor, Tensor], Tensor], x: Tensor, targets: Tensor) -> list[Tensor]:
    total = loss(x, targets)
    (total / 7).backward()
    assert x.grad is not None
    assert ends.matrix.grad is not None
    return [total.detach(), x.grad, ends.matrix.grad]


@pytest.mark.parametrize("n_tokens", [1, 7, 16, 63, N, 1000])
@pytest.mark.parametrize("tied", [False, True])
def test_any_number_of_chunks_gives_the_loss_and_gradients_of_whole_logits(n_tokens: int, tied: bool):
    one, other = (Ends(tied, torch.float64) for _ in range(2))
    expected = gradients(one, lambda *given: whole(one, *given), *inputs())
    found = gradients(other, chunked(other, n_tokens), *inputs())
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)


def test_a_micro_batch_without_targets_has_loss_and_gradients_0():
    ends, (x, targets) = Ends(False, torch.float64), inputs()
    found = gradients(ends, chunked(ends, 7), x, torch.full_like(targets, IGNORED))
    assert all(not each.any() for each in found)


def test_without_gradients_none_is_computed():
    ends, (x, targets) = Ends(False, torch.float64), inputs()
    with torch.no_grad():
        found = chunked(ends, 7)(x, targets)
    assert found.item() == pytest.approx(whole(ends, x, targets).item(), rel=1e-13)
    assert not found.requires_grad


def test_the_heads_gradient_in_16_bits_is_rounded_once():
    """So chunks of one token are nearly as good as one matmul; 64 terms added in bf16 are 3 times as far off."""
    exact = Ends(False, torch.float64)
    exact.matrix.data = Ends(False, torch.bfloat16).matrix.data.double()
    x, targets = inputs(torch.bfloat16)
    x = (0.2 * x.detach()).requires_grad_()  # all probabilities count
    whole(exact, x.detach().double(), targets).backward()
    assert exact.matrix.grad is not None
    errors = []
    for n_tokens in (N, 1):
        ends = Ends(False, torch.bfloat16)
        chunked(ends, n_tokens)(x, targets).backward()
        assert ends.matrix.grad is not None
        errors.append(float((ends.matrix.grad.double() - exact.matrix.grad).norm() / exact.matrix.grad.norm()))
    assert errors[1] < 1.5 * errors[0] < 2**-7


MATMULS = {f"aten::{name}" for name in ("mm", "addmm", "addmm_", "matmul", "linear", "bmm")}


def peak_bytes(run: Callable[[], object]) -> int:
    """The most bytes that the CPU's allocator had handed out at one moment of a call, above those before it. What a
    matmul frees before it returns is left out: kernels of some CPUs pack their operands into buffers, others do not."""
    with profile(profile_memory=True) as recorded:
        run()
    assert recorded.profiler is not None
    events = sorted(recorded.profiler.kineto_results.events(), key=lambda each: each.start_ns())
    held = most = matmul_until = 0
    for event in events:
        if event.start_ns() >= matmul_until:
            most = max(most, held)
        if event.name() in MATMULS:
            matmul_until = max(matmul_until, event.end_ns())
        elif event.name() == "[memory]":
            held += event.nbytes()
    return max(most, held)


def formula(n_tokens: int, e: int) -> int:
    """Bytes of docs/chunked-loss.md: the gradients of the input and of the matrix, the latter in 32 bits or more, and
    the logits of a chunk, in 16 bits with their copy."""
    return N * D * e + V * D * max(e, 4) + n_tokens * V * (e + 4 * (e < 4))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_peak_is_that_of_one_chunk_as_the_formula_says(dtype: torch.dtype):
    ends, (x, targets), e = Ends(False, dtype), inputs(dtype), dtype.itemsize
    for n_tokens in (4, 16, 50):
        found = peak_bytes(lambda n=n_tokens: chunked(ends, n)(x, targets).backward())
        # Beside it some numbers for each token of the chunk: targets, largest logits, sums.
        assert 0 <= found - formula(n_tokens, e) < 100 * n_tokens, (found, formula(n_tokens, e))
        x.grad = ends.matrix.grad = None
    assert peak_bytes(lambda: whole(ends, x, targets).backward()) > 3 * N * V * e


def test_a_peak_has_the_results_of_matmuls_but_not_what_their_kernels_use_meanwhile():
    """In 16 bits, where oneDNN packs operands on a CPU with AVX-512 or AMX."""
    x = torch.ones(64, 256, dtype=torch.bfloat16)
    assert peak_bytes(lambda: (x @ x.T).float()) == 64 * 64 * (2 + 4)


def test_the_peak_in_16_bits_has_the_last_product_beside_the_sum():
    """On a CPU, where PyTorch widens the product before it adds it, in both types."""
    ends, (x, targets), e = Ends(False, torch.bfloat16), inputs(torch.bfloat16), 2
    found = [peak_bytes(lambda n=n: chunked(ends, n)(x, targets).backward()) for n in (4, 50)]
    kept = N * D * e + V * D * 4
    assert 0 <= found[0] - (kept + 4 * V * e + V * D * (e + 4)) < 1000
    assert 0 <= found[1] - formula(50, e) < 5000


@prove
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_the_loss_has_two_buffers_of_some_tokens_at_a_time(dtype: torch.dtype):
    """As `Stack.compiles_loss` has them priced."""
    together, targets_N = 8, inputs()[1].flatten()
    given, expected, found = (torch.randn(N, V, generator=torch.Generator().manual_seed(2)).to(dtype) for _ in range(3))
    factor = torch.tensor(1 / 7)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(loss, "LOGITS_TOGETHER", together * V)
        eager, compiled = (bound(range(V), IGNORED, None, each) for each in (False, True))
        compiled(given, targets_N, factor)
        sums = [eager(expected, targets_N, factor)]
        most = peak_bytes(lambda: sums.append(compiled(found, targets_N, factor)))
    torch.testing.assert_close(sums[1], sums[0])
    torch.testing.assert_close(found, expected)
    assert 0 <= most - 2 * together * V * 4 < 10 * N * 4


def test_an_input_whose_tokens_are_not_one_after_another_has_the_same_gradient():
    x_BTD, targets_BT = inputs()
    strided_BTD = x_BTD.detach().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
    assert not strided_BTD.is_contiguous()
    for each in (x_BTD, strided_BTD):
        chunked(Ends(False, torch.float64), 16)(each, targets_BT).backward()
    assert x_BTD.grad is not None
    assert x_BTD.grad.any()
    assert strided_BTD.grad is not None
    assert torch.equal(strided_BTD.grad, x_BTD.grad)
