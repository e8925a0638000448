"""Frozen matrices stored in 8 or 4 bits, and converted to the type of a matmul when it runs.

int8: each row has one scale, largest |w| / 127, and w is about scale x code (`torch.round`).

nf4 (Dettmers et al., QLoRA, arXiv 2305.14314, sections 2 and 3): each block of 64 elements of a row is divided by its
largest absolute value and rounded to the nearest of 16 quantiles of a normal distribution. With double quantisation
the largest values a_1, a_2, ... of a row's blocks are 8-bit codes too:

    a_b is about offset + factor x CODES_8[q_b],    offset = mean of a_b,    factor = largest |a_b - offset|

QLoRA and bitsandbytes have one offset for a matrix and a factor for 256 blocks in a line. Here both belong to a row, so
a rank that has some rows, or some columns of them, needs no numbers of other ranks, and all layouts have the same
weights. Bits of an element: 4 + 8 / 64 + 64 / columns, 4.14 for 4,096 columns; with int8 8 + 32 / columns.

A shard of a row has the bytes of `model.lora_sizes.StoredRow`. Values are decoded in fp32 and rounded once.

Shapes: R rows, D columns of the whole row, d columns of a shard, b blocks, Y bytes of a shard's row.
"""

from collections.abc import Callable, Sequence
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwright.model.lora_sizes import BLOCK, StoredRow
from shardwright.model.row import Row

NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""The 16 values of nf4 (QLoRA, appendix E)."""


def _dynamic() -> tuple[float, ...]:
    """Return the 256 values of dynamic 8-bit quantisation (Dettmers et al., arXiv 2110.02861, section 1.3): 0, 1, and
    for i = 0 to 6 the middles of 2^i equal parts of 0.1 to 1, times 10^(i - 6), with both signs."""
    values = [0.0, 1.0]
    for i in range(7):
        for part in range(2**i):
            middle = (0.1 + 0.9 * (part + 0.5) / 2**i) * 10.0 ** (i - 6)
            values += [middle, -middle]
    return tuple(sorted(values))


CODES_8 = _dynamic()
_TINY = 1e-38  # a block of zeros is divided by this
_CHUNK = 2**22
"""Elements that are converted at a time: temporary tensors of a matmul take up to 32 MiB."""


@cache
def _tables(device: torch.device) -> dict[str, Tensor]:
    """Return on a device the values of nf4 and of 8-bit scales, their midpoints, and the two values of each byte of nf4
    codes, (256, 2), the first in the high bits."""
    nf4, codes_8 = (torch.tensor(values, dtype=torch.float32) for values in (NF4, CODES_8))
    byte = torch.arange(256)
    tables = {"nf4": nf4, "codes 8": codes_8, "pairs": torch.stack([nf4[byte // 16], nf4[byte % 16]], 1)}
    tables |= {f"between {name}": (tables[name][1:] + tables[name][:-1]) / 2 for name in ("nf4", "codes 8")}
    return {name: table.to(device) for name, table in tables.items()}


def encode(rows: Tensor, stored: StoredRow) -> Tensor:
    """Return a shard of whole rows in bytes, (..., D) -> (..., Y) uint8."""
    wide, tables = rows.to(torch.float32), _tables(rows.device)
    columns = stored.columns
    if stored.kind == "int8":
        scale = wide.abs().amax(-1, keepdim=True) / 127
        codes = torch.round(wide / scale.clamp(min=_TINY)).to(torch.int8)[..., columns.start : columns.stop]
        return torch.cat([codes.view(torch.uint8), _bytes_of(scale)], -1)
    blocks = F.pad(wide, (0, -stored.n_columns % BLOCK)).unflatten(-1, (-1, BLOCK))
    largest = blocks.abs().amax(-1)
    offset = largest.mean(-1, keepdim=True, dtype=torch.float64).float()  # so that the order of the sum plays no part
    factor = (largest - offset).abs().amax(-1, keepdim=True)
    scales = torch.bucketize((largest - offset) / factor.clamp(min=_TINY), tables["between codes 8"])
    codes = torch.bucketize(blocks / largest.clamp(min=_TINY).unsqueeze(-1), tables["between nf4"]).to(torch.uint8)
    own_blocks = slice(stored.blocks.start, stored.blocks.stop)
    codes, scales = codes[..., own_blocks, :].flatten(-2), scales[..., own_blocks].to(torch.uint8)
    room = stored.n_blocks - len(stored.blocks)
    packed = F.pad(codes[..., ::2] * 16 + codes[..., 1::2], (0, room * BLOCK // 2))
    return torch.cat([packed, F.pad(scales, (0, room)), _bytes_of(factor), _bytes_of(offset)], -1)


def _bytes_of(numbers: Tensor) -> Tensor:
    """Return fp32 numbers as bytes, (..., n) -> (..., 4 n)."""
    return numbers.contiguous().view(torch.uint8)


def decode(values: Tensor, stored: StoredRow, dtype: torch.dtype) -> Tensor:
    """Return the elements of a shard of rows, (..., Y) uint8 -> (..., d). Not differentiable."""
    first, last = stored.columns.start - stored.blocks.start * BLOCK, len(stored.columns)
    decoded: Tensor = _decode(values.flatten(0, -2), stored.kind, stored.n_blocks, first, last, dtype)
    return decoded.view(*values.shape[:-1], last)


# A custom operator: its tables stay on the device, which neither a compiled block nor a dry run may keep.
@torch.library.custom_op("shardwright::decode_rows", mutates_args=())
def _decode(values_RY: Tensor, kind: str, n_blocks: int, first: int, n_columns: int, dtype: torch.dtype) -> Tensor:
    """Return `n_columns` elements of each row, of nf4 from element `first` of the first block."""
    decoded_Rd = torch.empty(values_RY.shape[0], n_columns, dtype=dtype, device=values_RY.device)
    step = max(1, _CHUNK // max(1, n_columns))
    for begin in range(0, len(values_RY), step):
        some_RY = values_RY[begin : begin + step]
        if kind == "int8":
            codes_Rd, scale_R1 = some_RY[:, :n_columns].view(torch.int8), some_RY[:, n_columns:].contiguous()
            decoded_Rd[begin : begin + step] = codes_Rd * scale_R1.view(torch.float32)
            continue
        tables, n_codes = _tables(values_RY.device), n_blocks * BLOCK // 2
        codes, scales_Rb, tail = some_RY.split([n_codes, n_blocks, 8], 1)
        factor_R1, offset_R1 = tail.contiguous().view(torch.float32).split(1, 1)
        scales = tables["codes 8"].index_select(0, scales_Rb.flatten().int()).view(-1, n_blocks)
        blocks = tables["pairs"].index_select(0, codes.flatten().int()).view(-1, n_blocks, BLOCK)
        blocks *= torch.addcmul(offset_R1, scales, factor_R1).unsqueeze(-1)
        decoded_Rd[begin : begin + step] = blocks.flatten(1)[:, first : first + n_columns]
    return decoded_Rd


@_decode.register_fake
def _(values_RY: Tensor, kind: str, n_blocks: int, first: int, n_columns: int, dtype: torch.dtype) -> Tensor:
    return values_RY.new_empty(values_RY.shape[0], n_columns, dtype=dtype)


def stored_row(row: Row, local: Tensor, offsets: Sequence[int], shape: Sequence[int]) -> StoredRow:
    """Return the form of a rank's shard `local`, at `offsets` of the bytes of a whole parameter of `shape`."""
    assert row.stored, f"{row.name} is not quantised"
    n_bytes = local.shape[-1]
    return StoredRow(row.stored, row.shape[-1], shape[-1] // n_bytes, offsets[-1] // n_bytes)


Read = Callable[[Sequence[int], Sequence[int]], Tensor]
"""(offsets, shape) -> that box of a parameter's values."""


def fill_box(row: Row, local: Tensor, offsets: Sequence[int], shape: Sequence[int], read: Read) -> None:
    """Fill a shard `local`, at `offsets` of a whole parameter of `shape`, in place, with values that `read` returns.

    A quantised matrix is read in whole rows, some at a time. If `local` has the type of matmuls, it gets the values
    that the stored bytes stand for.
    """
    if not row.stored:
        local.copy_(read(offsets, tuple(local.shape)))
        return
    n_columns = row.shape[-1]
    step = max(1, _CHUNK // (n_columns * max(1, local[:1, ..., 0].numel())))
    for begin in range(0, local.shape[0], step):
        part = local[begin : begin + step]
        values = read((offsets[0] + begin, *offsets[1:-1], 0), (*part.shape[:-1], n_columns)).to(local.device)
        if local.dtype == torch.uint8:
            part.copy_(encode(values, stored_row(row, local, offsets, shape)))
        else:
            whole = StoredRow(row.stored, n_columns)
            part.copy_(decode(encode(values, whole), whole, local.dtype)[..., offsets[-1] :][..., : local.shape[-1]])
