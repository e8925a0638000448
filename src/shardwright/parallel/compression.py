"""Sums over ranks of encoded elements, which have fewer bytes; elements are decoded and summed where they arrive.

A reduce-scatter is an all-to-all of encoded parts. Every rank decodes and adds them in the type of the sum, so each
addend is rounded once, for any number of ranks. A ring in bf16 rounds each partial sum: n - 1 times. An all-reduce is
this reduce-scatter and an all-gather of the encoded sums, which rounds the sums once more and gives every rank the same
bits.

| collective       | sent by a rank of n, of X elements    | roundings of an element             |
| ---------------- | ------------------------------------- | ----------------------------------- |
| `reduce_scatter` | (n-1)/n encoded X                     | 1 of each addend                    |
| `start_sum`      | 2 (n-1)/n encoded X                   | 1 of each addend, and 1 of the sum  |

A reduce-scatter may take two hops (ZeRO++, arXiv 2306.10209, section 3.3). The first is between the ranks of a node and
leaves each rank with its node's sums for as many parts as there are nodes. The second sends only these sums between
nodes. Elements are rounded in each hop.

`Integers` sends elements as integers of 8 or 4 bits, with a scale for each block of a row. A block is `BLOCK` elements
of a row or fewer: a row is cut into the fewest blocks of equal length, so the start of a block depends on the row
alone, not on the number of ranks that share the rows. The scale s of a block is its largest absolute value over 127 (8
bits) or 7 (4 bits), in fp32. An element x is sent as round(x / s) and received as round(x / s) s, with an error of at
most s / 2. A block with an infinite element or a NaN is received as NaN.

Vectors (norms and biases) are few and are sent unchanged, first; then come the scales, then the integers.

Activations travel in the same messages, one for each row (a token): as integers or in fp8 (`Floats`), whose 1 x 128
blocks are DeepSeek-V3's (arXiv 2412.19437, section 3.3).

Source: ZeRO++, arXiv 2306.10209, sections 3.1 and 3.3; its block sizes differ.

Shapes: n ranks of the group, K elements of the sum that a rank keeps; R rows, B blocks of a
row, E elements of a block.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from shardwright.parallel.collectives import StartedCollective
from shardwright.split.compression import block_length
from shardwright.system.torch_private import all_gather_single


class BufferPart(NamedTuple):
    """A tensor among the K elements: its number of elements, and the length of its rows, or 0 for a vector."""

    n_elements: int
    columns: int

    @staticmethod
    def from_shape(shape: Sequence[int]) -> "BufferPart":
        """Return the part of a tensor of this shape."""
        return BufferPart(torch.Size(shape).numel(), shape[-1] if len(shape) > 1 else 0)


class Codec(Protocol):
    """An encoding of elements. `parts` are the tensors that make up the K elements, in order."""

    def encode(self, x_nK: Tensor, parts: Sequence[BufferPart]) -> Tensor:
        """Return the message to each of n ranks, (n, bytes or elements), from K elements for each."""

    def decode(self, sent: Tensor, parts: Sequence[BufferPart], dtype: torch.dtype) -> Tensor:
        """Return (n, K) in `dtype` from the messages of n ranks."""


class RoundedCodec:
    """Codec that sends elements in a narrower floating-point type."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def encode(self, x_nK: Tensor, parts: Sequence[BufferPart]) -> Tensor:
        return x_nK.to(self.dtype)

    def decode(self, sent: Tensor, parts: Sequence[BufferPart], dtype: torch.dtype) -> Tensor:
        return sent.to(dtype)


def reduce_scatter(
    kept_K: Tensor, x_nK: Tensor, hops: Iterable[dist.ProcessGroup], codec: Codec, parts: Sequence[BufferPart]
) -> None:
    """Sum `x_nK[r]` of all ranks into `kept_K` of rank r, in the type of `kept_K`.

    `hops`: the group of the ranks; or, for two hops, the group of this node's ranks, which are consecutive, and the
    group of the ranks at the same place in each node.
    """
    for group in hops:
        m, k = group.size(), kept_K.numel()
        towards_mRK = x_nK.view(-1, m, k).transpose(0, 1)
        sent = codec.encode(towards_mRK.reshape(-1, k), parts)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        x_nK = codec.decode(received, parts, kept_K.dtype).view(m, -1, k).sum(0)
    kept_K.copy_(x_nK[0])


def start_sum(x_nK: Tensor, group: dist.ProcessGroup, codec: Codec, parts: Sequence[BufferPart]) -> StartedCollective:
    """Start an all-reduce (sum) in which every rank adds up K elements; the result is the sum (n, K).

    The addends are sent at once; they are added up, and the sums gathered, when the caller waits."""
    sent = codec.encode(x_nK, parts)
    received = torch.empty_like(sent)
    work = dist.all_to_all_single(received, sent, group=group, async_op=True)

    def finish() -> Tensor:
        sums_1K = codec.decode(received, parts, x_nK.dtype).sum(0, keepdim=True)
        all_gather_single(sent, codec.encode(sums_1K, parts), group=group)
        return codec.decode(sent, parts, x_nK.dtype)

    return StartedCollective(work, finish)


def start_sum_of_vector(x: Tensor, group: dist.ProcessGroup, codec: Codec) -> StartedCollective:
    """Start the all-reduce of `start_sum` for a vector, in place."""
    x_nK = F.pad(x, (0, -x.numel() % group.size())).view(group.size(), -1)
    started = start_sum(x_nK, group, codec, (BufferPart(x_nK.shape[1], 0),))
    return started.then(lambda sum_nK: x.copy_(sum_nK.view(-1)[: x.numel()]))


def sum_over(gradients: Sequence[Tensor], group: dist.ProcessGroup, codec: Codec) -> None:
    """Sum tensors over the ranks of a group, in place, together; each rank adds up some rows of each."""
    n = group.size()
    rows = [-(-gradient.shape[0] // n) * n for gradient in gradients]
    padded = [
        F.pad(gradient.flatten(1) if gradient.dim() > 1 else gradient[:, None], (0, 0, 0, more - gradient.shape[0]))
        for gradient, more in zip(gradients, rows, strict=True)
    ]
    parts = [
        BufferPart(whole.numel() // n, gradient.shape[-1] if gradient.dim() > 1 else 0)
        for gradient, whole in zip(gradients, padded, strict=True)
    ]
    summed_nK = start_sum(torch.cat([gradient.view(n, -1) for gradient in padded], 1), group, codec, parts).wait()
    for gradient, summed in zip(gradients, summed_nK.split([part.n_elements for part in parts], 1), strict=True):
        gradient.copy_(summed.reshape(-1)[: gradient.numel()].view_as(gradient))


_SCALE_BYTES = 4


class Integers:
    """The codec (`compression.Codec`) of integers of `bits` bits, 8 or 4. It sends bytes."""

    def __init__(self, bits: int) -> None:
        self.bits, self.largest = bits, 2 ** (bits - 1) - 1

    def encode(self, x_nK: Tensor, parts: Sequence[BufferPart]) -> Tensor:
        vectors, scales, integers = [], [], []
        for part, x_nP in zip(parts, x_nK.split([part.n_elements for part in parts], 1), strict=True):
            if not part.columns:
                vectors.append(x_nP)
                continue
            x_nBE = in_blocks(x_nP, part.columns)
            scale_nB = (x_nBE.abs().amax(-1).to(_wide(x_nP.dtype)) / self.largest).float()
            divisor_nB1 = torch.where(scale_nB == 0, 1.0, scale_nB)[..., None]
            scales.append(torch.where(scale_nB.isfinite(), scale_nB, torch.nan))
            integers.append(self._rounded(x_nBE / divisor_nB1).flatten(1))
        sent = [torch.cat(vectors, 1).contiguous().view(torch.uint8)] if vectors else []
        if integers:
            sent += [torch.cat(scales, 1).view(torch.uint8), self._packed(torch.cat(integers, 1))]
        return torch.cat(sent, 1)

    def decode(self, sent: Tensor, parts: Sequence[BufferPart], dtype: torch.dtype) -> Tensor:
        """Return (n, K) in `dtype`, which has to be the type of the encoded elements."""
        matrices = [part for part in parts if part.columns]
        shapes = [shape_in_blocks(part) for part in matrices]
        of_vectors = sum(part.n_elements for part in parts if not part.columns) * dtype.itemsize
        of_scales = sum(n_blocks for n_blocks, _ in shapes) * _SCALE_BYTES
        cuts = (of_vectors, of_scales, sent.shape[1] - of_vectors - of_scales)
        vectors, scales, packed = (part.clone(memory_format=torch.contiguous_format) for part in sent.split(cuts, 1))
        vectors_n = iter(
            vectors.view(dtype).split([part.n_elements for part in parts if not part.columns], 1) if of_vectors else ()
        )
        scales_nB = iter(scales.view(torch.float32).split([n for n, _ in shapes], 1) if shapes else ())
        sizes = [n * length for n, length in shapes]
        integers_n = iter(self._unpacked(packed, sum(sizes)).split(sizes, 1) if shapes else ())
        decoded = []
        for part in parts:
            if not part.columns:
                decoded.append(next(vectors_n))
                continue
            scale_nB = next(scales_nB)
            x_nBE = next(integers_n).view(*scale_nB.shape, block_length(part.columns)).to(_wide(dtype))
            x_nBE = x_nBE * scale_nB[..., None].to(_wide(dtype))
            decoded.append(out_of_blocks(x_nBE.to(dtype), part))
        return torch.cat(decoded, 1)

    def _rounded(self, x_nBE: Tensor) -> Tensor:
        """Return the integers of elements / scales, int8."""
        return x_nBE.round().to(torch.int8)

    def _packed(self, integers_nX: Tensor) -> Tensor:
        """Return the integers as bytes; integers of 4 bits two in each byte."""
        if self.bits == 8:
            return integers_nX.view(torch.uint8)
        pairs = (F.pad(integers_nX, (0, integers_nX.shape[1] % 2)) + self.largest).to(torch.uint8).unflatten(1, (-1, 2))
        return pairs[..., 0] + 16 * pairs[..., 1]

    def _unpacked(self, packed: Tensor, n_elements: int) -> Tensor:
        if self.bits == 8:
            return packed.view(torch.int8)
        pairs = torch.stack([packed % 16, packed // 16], -1).flatten(1)[:, :n_elements]
        return pairs.to(torch.int8) - self.largest


class Floats(Integers):
    """The codec of fp8 in e4m3, up to 448, instead of integers: an element x of a block with scale s is received as s
    times the number of fp8 next to x / s, with an error of at most 1/16 of x, or s / 1024 if that is larger."""

    def __init__(self) -> None:
        self.bits, self.largest = 8, 448

    def _rounded(self, x_nBE: Tensor) -> Tensor:
        """Return the numbers of fp8 of elements / scales, as their bytes. They are rounded from fp32."""
        return x_nBE.float().to(torch.float8_e4m3fn).view(torch.int8)

    def _unpacked(self, packed: Tensor, n_elements: int) -> Tensor:
        return packed.view(torch.float8_e4m3fn)


def encode_rows(x: Tensor, codec: Codec) -> Tensor:
    """Return the message of each row of (..., D), (rows, bytes)."""
    columns = x.shape[-1]
    return codec.encode(x.reshape(x.numel() // columns, columns), (BufferPart(columns, columns),))


def decode_rows(sent: Tensor, codec: Codec, columns: int, dtype: torch.dtype) -> Tensor:
    """Return the rows of received messages, (rows, D)."""
    return codec.decode(sent, (BufferPart(columns, columns),), dtype)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Return the type of products with scales."""
    return torch.promote_types(dtype, torch.float32)


def shape_in_blocks(part: BufferPart) -> tuple[int, int]:
    """Return the number of blocks of a matrix and the length of each."""
    length = block_length(part.columns)
    return part.n_elements // part.columns * -(-part.columns // length), length


def in_blocks(x_nP: Tensor, columns: int) -> Tensor:
    """Return the blocks of a matrix, (n, B, E); the last block of a row is padded with zeros."""
    length = block_length(columns)
    n, rows = len(x_nP), x_nP.shape[1] // columns
    padded = F.pad(x_nP.reshape(n, rows, columns), (0, -columns % length))
    return padded.reshape(n, rows * (padded.shape[-1] // length), length)


def out_of_blocks(x_nBE: Tensor, part: BufferPart) -> Tensor:
    n, rows = len(x_nBE), part.n_elements // part.columns
    blocks_of_row = x_nBE.shape[1] // rows
    return x_nBE.view(n, rows, blocks_of_row * x_nBE.shape[2])[..., : part.columns].reshape(n, part.n_elements)
