"""Proves that compressed sums are those of the formula, bit for bit: what travels is rounded, what is added is not."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.parallel.compression import Rounded, reduce_scatter, start_sum
from tests.distributed import run_ranks

N, K = 4, 37


def addends(rank: int, n: int = N) -> Tensor:
    """What a rank adds: n parts of K elements of very different sizes."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(n, K, generator=generator) * 10 ** torch.empty(n, K).uniform_(-3, 3, generator=generator)


def scattered_in_bf16(dtype: torch.dtype) -> Tensor:
    kept = torch.empty(K, dtype=dtype)
    reduce_scatter(kept, addends(dist.get_rank()).to(dtype), dist.group.WORLD, Rounded(torch.bfloat16))
    return kept


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_each_addend_is_rounded_once_and_the_sum_is_not(dtype: torch.dtype):
    everyone = torch.stack([addends(rank) for rank in range(N)])
    expected = everyone.bfloat16().to(dtype).sum(0)
    found = torch.stack(run_ranks(scattered_in_bf16, N, dtype))
    assert torch.equal(found, expected)
    bound = 2.0**-8 * everyone.double().abs().sum(0)
    error = (found.double() - everyone.double().sum(0)).abs()
    assert bool((error <= bound + 2.0**-22 * everyone.double().abs().sum(0)).all())
    assert float(error.max()) > 0, "it is rounded"


def summed_in_bf16() -> Tensor:
    x = addends(dist.get_rank()).flatten()[:-3]  # not a multiple of the ranks
    start_sum(x, dist.group.WORLD, Rounded(torch.bfloat16)).wait()
    return x


def test_a_sum_on_all_ranks_is_rounded_once_more_and_the_same_everywhere():
    expected = torch.stack([addends(rank).flatten()[:-3] for rank in range(N)]).bfloat16().float().sum(0).bfloat16()
    for found in run_ranks(summed_in_bf16, N):
        assert torch.equal(found, expected.float())
