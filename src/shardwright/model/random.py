"""Counter-based random numbers: a pure function of (seed, name, element index), the same on every rank.

Initial weights, dropout masks and drawn routing come from here. Each rank computes the values of its own shard, and
every partition of a tensor, chunk size and vectorisation gives the same bits.

The generator is splitmix64 (Steele, Lea, Flood, OOPSLA 2014): element i of a stream is mix(key + i * golden),
where mix is a bijection of 64-bit words. Torch has no unsigned 64-bit arithmetic, so words are int64 that
wrap, and a logical shift is an arithmetic one with the copied sign bits masked away. Per element there are
only integer operations, table look-ups, and float64 sums and products: the last bit of a transcendental function
may differ between a vectorised loop and its scalar remainder, and so between shards.

Shapes: B sequences, T positions, D features.
"""

import hashlib
import math
from collections.abc import Sequence
from functools import cache
from statistics import NormalDist

import numpy as np
import torch
from torch import Tensor


def _signed(word: int) -> int:
    """Return the int64 with the bits of an unsigned 64-bit constant."""
    return word - 2**64 if word >= 2**63 else word


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_MIX_1 = _signed(0xBF58476D1CE4E5B9)
_MIX_2 = _signed(0x94D049BB133111EB)

# Elements of a chunk. Temporary tensors take about ten times as many words: on a CPU they should fit into the cache
# (a quarter of the time of 4M-element chunks), on an accelerator a kernel should take longer than its launch.
_CHUNK_CPU = 2**16
_CHUNK_ACCELERATOR = 2**22

_LANES = 4
_LANE_VALUES = 2**16


def _mix(words: Tensor) -> Tensor:
    """Apply splitmix64's finaliser to int64 words of any shape: a bijection in which every input bit affects all output
    bits."""
    words = (words ^ ((words >> 30) & (2**34 - 1))) * _MIX_1
    words = (words ^ ((words >> 27) & (2**37 - 1))) * _MIX_2
    return words ^ ((words >> 31) & (2**33 - 1))


def _key(seed: int, name: str) -> int:
    """Return the start of the stream `name` of `seed`: 64 bits of sha256, so similar names get unrelated streams."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8], "little", signed=True)


@cache
def _normal_table() -> tuple[np.ndarray, np.ndarray]:
    """Return 2**16 intervals of the inverse normal CDF: left ends, and slopes for a 24-bit fraction (both float64).

    The tables are numpy: a tensor cached during a dry run would be a fake one for the rest of the process. Knots are
    rounded to 2**-28, which hides the last-bit differences of C libraries and makes fraction * slope exact, so that a
    compiler that fuses it with the addition changes nothing.
    """
    n = 2**16
    inverse_cdf = NormalDist().inv_cdf
    knots = np.array([round(inverse_cdf((i + 0.5) / (n + 1)) * 2**28) * 2.0**-28 for i in range(n + 1)])
    return knots[:-1].copy(), np.diff(knots) * 2.0**-24


def normal(
    seed: int,
    name: str,
    global_shape: Sequence[int],
    offsets: Sequence[int],
    shape: Sequence[int],
    std: float,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Return the box [offsets, offsets + shape) of the normal tensor `name` of `global_shape`, mean 0 and `std`.

    Values depend only on seed, name and the row-major index in the global tensor. They are the inverse CDF of the
    normal distribution, linear between 2**16 + 1 equally likely knots, computed in float64, scaled there and rounded
    once to `dtype`. Tails end at 4.33 std, beyond which one in 65,000 values of a true normal lies, and the standard
    deviation is within 2e-4 of `std`. Temporary memory is bounded for any shape. Two streams of n elements overlap with
    probability 2n / 2**64.
    """
    assert len(global_shape) == len(offsets) == len(shape)
    assert all(o >= 0 and o + n <= g for g, o, n in zip(global_shape, offsets, shape, strict=True)), (
        f"box at {tuple(offsets)} of shape {tuple(shape)} lies outside {tuple(global_shape)}"
    )
    out = torch.empty(tuple(shape), dtype=dtype, device=device)
    strides = [math.prod(global_shape[dim + 1 :]) for dim in range(len(global_shape))]
    first = sum(offset * stride for offset, stride in zip(offsets, strides, strict=True))
    left, slope = (torch.from_numpy(part).to(out.device) for part in _normal_table())
    chunk = _CHUNK_CPU if out.device.type == "cpu" else _CHUNK_ACCELERATOR

    def fill(box: Tensor, first: int) -> None:
        if box.numel() > chunk:
            dim = next(d for d, size in enumerate(box.shape) if size > 1)
            rows = max(1, chunk * box.shape[dim] // box.numel())
            for start in range(0, box.shape[dim], rows):
                part = box.narrow(dim, start, min(rows, box.shape[dim] - start))
                fill(part, first + start * strides[dim])
            return
        index = torch.tensor(first, device=box.device)
        for size, stride in zip(box.shape, strides, strict=True):
            index = index.unsqueeze(-1) + torch.arange(size, device=box.device) * stride
        words = _mix(index * _GOLDEN + _key(seed, name))
        interval = (words >> 48) & (2**16 - 1)
        fraction = (words & (2**24 - 1)).to(torch.float64)
        box.copy_((left[interval] + fraction * slope[interval]) * std)

    if out.numel():
        fill(out, first)
    return out


EVALUATION = -1
"""The step in the random keys of an evaluation."""


def sample_keys(seed: int, step: int, sample_ids_B: Tensor) -> Tensor:
    """Return one int64 random key for each sequence of a step, from its int64 id in the data; shape (B,).

    The key of a sequence does not depend on its rank or micro-batch.
    """
    return _mix(sample_ids_B * _GOLDEN + _key(seed, f"dropout/{step}"))


def site_keys(keys_B: Tensor, first_site: int, n_sites: int) -> Tensor:
    """Return keys of `n_sites` sites in the network where random numbers are drawn, from the sequences' keys; int64
    (n_sites, B). They are computed outside of the block, so that one compiled block serves every layer."""
    sites_S = torch.arange(first_site, first_site + n_sites, device=keys_B.device)
    return _mix(keys_B + sites_S[:, None] * _GOLDEN)


def matrix_key(matrix: str) -> int:
    """Return the number that `matrix_keys` adds for a matrix of a layer."""
    return _key(0, f"adapter/{matrix}")


def matrix_keys(keys_B: Tensor, key: int) -> Tensor:
    """Return a layer's keys for the adapter of one matrix, int64 (B,). `key`: its `matrix_key`."""
    return _mix(keys_B + key)


def keep_mask(site_keys_B: Tensor, positions_T: Tensor, d: int, p: float, first: int = 0) -> Tensor:
    """Return which elements dropout keeps: bool (B, T, d), a function of only key, GLOBAL position and feature.
    `first`: the global number of the first feature.

    Each 64-bit word serves four features with 16 bits each, which is a quarter of the work, so `p` is rounded to a
    multiple of 1/65536: `keep_probability(p)` is the exact probability that an element is kept.
    """
    rows_BT = _mix(site_keys_B[:, None] + positions_T * _GOLDEN)
    before, after = first // _LANES, math.ceil((first + d) / _LANES)
    groups_G = torch.arange(before + 1, after + 1, device=positions_T.device) * _GOLDEN
    lanes_BTD = _mix(rows_BT[:, :, None] + groups_G).view(torch.int16)[:, :, first - before * _LANES :][:, :, :d]
    return lanes_BTD >= _dropped_lanes(p) - _LANE_VALUES // 2


def uniform(site_keys_B: Tensor, positions_T: Tensor, n: int) -> Tensor:
    """Return `n` numbers in [0, 1) for each token, float64 (B, T, n), a function of only key, GLOBAL position and
    index. They differ from the numbers that `keep_mask` draws with the same key."""
    return _uniform(_mix(_mix(site_keys_B + _GOLDEN)[:, None] + positions_T * _GOLDEN), n)


def sampling_uniform(seed: int, prompts_B: Tensor, positions_B: Tensor, n: int) -> Tensor:
    """Return `n` numbers in [0, 1) for the token at each position of each prompt's continuation, float64 (B, n): a
    function of only seed, index of the prompt, position and index."""
    keys_B = _mix(prompts_B * _GOLDEN + _key(seed, "sampling"))
    return _uniform(_mix(keys_B + positions_B * _GOLDEN), n)


def _uniform(rows: Tensor, n: int) -> Tensor:
    """Return `n` numbers in [0, 1) for each word of `rows`, in a new last dim; float64."""
    index_N = torch.arange(1, n + 1, device=rows.device) * _GOLDEN
    return ((_mix(rows[..., None] + index_N) >> 11) & (2**53 - 1)).double() * 2.0**-53


def keep_probability(p: float) -> float:
    """Return the exact probability that `keep_mask(..., p)` keeps an element: 1 - p to the nearest 1/65536."""
    return 1 - _dropped_lanes(p) / _LANE_VALUES


def _dropped_lanes(p: float) -> int:
    return min(round(p * _LANE_VALUES), _LANE_VALUES - 1)
