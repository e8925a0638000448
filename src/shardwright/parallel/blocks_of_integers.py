"""Codec that sends elements as integers of 8 or 4 bits, with a scale for each block of a row.

A block is `BLOCK` elements of a row or fewer: a row is cut into the fewest blocks of equal length, so the start of a
block depends on the row alone, not on the number of ranks that share the rows. The scale s of a block is its largest
absolute value over 127 (8 bits) or 7 (4 bits), in fp32. An element x is sent as round(x / s) and received as
round(x / s) s, with an error of at most s / 2. A block with an infinite element or a NaN is received as NaN.

Vectors (norms and biases) are few and are sent unchanged, first; then come the scales, then the integers.

Source: ZeRO++, arXiv 2306.10209, sections 3.1 and 3.3; its block sizes differ.

Shapes: n ranks, K elements of each; R rows, B blocks of a row, E elements of a block.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwright.parallel.compression import BufferPart
from shardwright.split.compression import block_length

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
            x_nBE = _in_blocks(x_nP, part.columns)
            scale_nB = (x_nBE.abs().amax(-1).to(_wide(x_nP.dtype)) / self.largest).float()
            divisor_nB1 = torch.where(scale_nB == 0, 1.0, scale_nB)[..., None]
            scales.append(torch.where(scale_nB.isfinite(), scale_nB, torch.nan))
            integers.append((x_nBE / divisor_nB1).round().to(torch.int8).flatten(1))
        sent = [torch.cat(vectors, 1).contiguous().view(torch.uint8)] if vectors else []
        if integers:
            sent += [torch.cat(scales, 1).view(torch.uint8), self._packed(torch.cat(integers, 1))]
        return torch.cat(sent, 1)

    def decode(self, sent: Tensor, parts: Sequence[BufferPart], dtype: torch.dtype) -> Tensor:
        """Return (n, K) in `dtype`, which has to be the type of the encoded elements."""
        matrices = [part for part in parts if part.columns]
        shapes = [_shape(part) for part in matrices]
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
            x_nBE = next(integers_n).view(*scale_nB.shape, -1) * scale_nB[..., None].to(_wide(dtype))
            decoded.append(_out_of_blocks(x_nBE.to(dtype), part))
        return torch.cat(decoded, 1)

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


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Return the type of products with scales."""
    return torch.promote_types(dtype, torch.float32)


def _shape(part: BufferPart) -> tuple[int, int]:
    """Return the number of blocks of a matrix and the length of each."""
    length = block_length(part.columns)
    return part.n_elements // part.columns * -(-part.columns // length), length


def _in_blocks(x_nP: Tensor, columns: int) -> Tensor:
    """Return the blocks of a matrix, (n, B, E); the last block of a row is padded with zeros."""
    length = block_length(columns)
    return F.pad(x_nP.reshape(len(x_nP), -1, columns), (0, -columns % length)).reshape(len(x_nP), -1, length)


def _out_of_blocks(x_nBE: Tensor, part: BufferPart) -> Tensor:
    n, rows = len(x_nBE), part.n_elements // part.columns
    return x_nBE.view(n, rows, -1)[..., : part.columns].reshape(n, -1)
