"""Proves that compressed sums are those of the formula, bit for bit: what travels is rounded, what is added is not."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.parallel import compression
from shardwright.parallel.compression import BufferPart, Integers, RoundedCodec, reduce_scatter, start_sum_of_vector
from tests.distributed import run_ranks
from tests.mutation import Mutation, mutated

N, K = 4, 37


def addends(rank: int, n: int = N) -> Tensor:
    """What a rank adds: n parts of K elements of very different sizes."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(n, K, generator=generator) * 10 ** torch.empty(n, K).uniform_(-3, 3, generator=generator)


def scattered_in_bf16(dtype: torch.dtype) -> Tensor:
    kept = torch.empty(K, dtype=dtype)
    x_nK, parts = addends(dist.get_rank()).to(dtype), [BufferPart(K, 0)]
    reduce_scatter(kept, x_nK, [dist.group.WORLD], RoundedCodec(torch.bfloat16), parts)
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
    start_sum_of_vector(x, dist.group.WORLD, RoundedCodec(torch.bfloat16)).wait()
    return x


def test_a_sum_on_all_ranks_is_rounded_once_more_and_the_same_everywhere():
    expected = torch.stack([addends(rank).flatten()[:-3] for rank in range(N)]).bfloat16().float().sum(0).bfloat16()
    for found in run_ranks(summed_in_bf16, N):
        assert torch.equal(found, expected.float())


PARTS = [BufferPart.from_shape(shape) for shape in ((3, 300), (5,), (2, 4, 7), (6, 128), (4, 1))]
"""Rows of three blocks, a vector, experts with one block a row, rows of one block, and of one element."""


def in_blocks(x_K: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """What arrives of PARTS by the definition, block by block, and half a scale for each element."""
    arrived, half = x_K.clone(), torch.zeros_like(x_K)
    largest, at = {8: 127, 4: 7}[bits], 0
    for n_elements, columns in PARTS:
        for row in range(at, at + n_elements, columns) if columns else ():
            n_blocks = math.ceil(columns / 128)
            length = math.ceil(columns / n_blocks)
            for first in range(row, row + columns, length):
                block = slice(first, min(first + length, row + columns))
                scale = (x_K[block].abs().max() / largest).float().to(x_K.dtype)
                arrived[block] = (x_K[block] / scale).round() * scale if scale else 0.0
                half[block] = scale / 2
        at += n_elements
    return arrived, half


def elements(seed: int, n: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """n times the elements of PARTS, some rows of which are zeros."""
    generator = torch.Generator().manual_seed(seed)
    x_nK = torch.randn(n, sum(part.n_elements for part in PARTS), generator=generator, dtype=dtype)
    x_nK[0, :300] = 0
    return x_nK


@pytest.mark.parametrize("bits", [8, 4])
def test_integers_arrive_within_half_a_scale_of_their_block(bits: int):
    x_nK, codec = elements(1, 3), Integers(bits)
    sent = codec.encode(x_nK, PARTS)
    found = codec.decode(sent, PARTS, torch.float32)
    for x_K, found_K in zip(x_nK, found, strict=True):
        arrived_K, half_K = in_blocks(x_K, bits)
        assert torch.equal(found_K, arrived_K)
        assert bool(((found_K - x_K).abs() <= half_K * (1 + 1e-6)).all())
    integers = 3 * 300 + 2 * 4 * 7 + 6 * 128 + 4
    scales = 3 * 3 + 2 * 4 + 6 + 4
    assert sent.shape == (3, 4 * 5 + 4 * scales + integers * bits // 8)


def test_blocks_are_the_same_however_rows_are_shared():
    whole = torch.randn(8, 300, generator=torch.Generator().manual_seed(3))
    codec = Integers(8)
    found = [
        codec.decode(
            codec.encode(whole.view(n, -1), [BufferPart(8 * 300 // n, 300)]),
            [BufferPart(8 * 300 // n, 300)],
            whole.dtype,
        ).view(8, 300)
        for n in (1, 2, 4, 8)
    ]
    assert all(torch.equal(found[0], each) for each in found)


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_what_is_no_number_arrives_as_none(wrong: float):
    x_nK, codec = elements(2, 1), Integers(8)
    x_nK[0, 310] = wrong
    found = codec.decode(codec.encode(x_nK, PARTS), PARTS, torch.float32)
    assert bool(found[0, 300:400].isnan().all()), "nor does anything else of its block"
    assert not bool(found[0, 400:].isnan().any())


def scattered_as_integers(bits: int, *bugs: Mutation) -> tuple[Tensor, Tensor]:
    with mutated(*bugs):
        return scattered(bits)


def scattered(bits: int) -> tuple[Tensor, Tensor]:
    """The part of this rank of the sum over two nodes of two ranks, in one hop and in two."""
    world, rank = dist.group.WORLD, dist.get_rank()
    inside, _ = dist.new_subgroups_by_enumeration([[0, 1], [2, 3]])
    across, _ = dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])
    found = []
    for hops in ((world,), (inside, across)):
        kept = torch.empty(sum(part.n_elements for part in PARTS))
        compression.reduce_scatter(kept, elements(rank, N), hops, Integers(bits), PARTS)
        found.append(kept)
    return found[0], found[1]


@pytest.mark.parametrize("bits", [8, 4])
def test_a_sum_in_two_hops_is_rounded_once_in_each(bits: int, *bugs: Mutation):
    everyone = torch.stack([elements(rank, N) for rank in range(N)])
    for rank, (once, twice) in enumerate(run_ranks(scattered_as_integers, N, bits, *bugs)):
        arrived = [in_blocks(x_K, bits) for x_K in everyone[:, rank]]
        assert torch.equal(once, torch.stack([x_K for x_K, _ in arrived]).sum(0))
        nodes = [in_blocks(arrived[first][0] + arrived[first + 1][0], bits) for first in (0, 2)]
        assert torch.equal(twice, nodes[0][0] + nodes[1][0])
        bound_K = torch.stack([half_K for _, half_K in (*arrived, *nodes)]).sum(0)
        error_K = (twice - everyone[:, rank].sum(0)).abs()
        assert bool((error_K <= bound_K * (1 + 1e-5) + 1e-6).all())


_REDUCE_SCATTER = "shardwright.parallel.compression:reduce_scatter"
HOPS: dict[str, Mutation] = {
    "sums of integers take the parts of another node": Mutation(
        _REDUCE_SCATTER, "x_nK.view(-1, m, k).transpose(0, 1)", "x_nK.view(m, -1, k)"
    ),
    "what goes between nodes has not been summed in them": Mutation(
        _REDUCE_SCATTER,
        "codec.decode(received, parts, kept_K.dtype).view(m, -1, k).sum(0)",
        "codec.decode(received, parts, kept_K.dtype).view(m, -1, k)[0]",
    ),
    "sums of integers are rounded to bf16": Mutation(
        _REDUCE_SCATTER,
        "codec.decode(received, parts, kept_K.dtype).view(m, -1, k).sum(0)",
        "codec.decode(received, parts, kept_K.dtype).view(m, -1, k).sum(0).bfloat16().to(kept_K.dtype)",
    ),
}
"""Each is put in and seen by a test of its own, on ranks of two nodes."""


@pytest.mark.prove
@pytest.mark.parametrize("bug", HOPS)
def test_a_sum_shows_the_bug(bug: str):
    with pytest.raises(AssertionError):
        test_a_sum_in_two_hops_is_rounded_once_in_each(8, HOPS[bug])
