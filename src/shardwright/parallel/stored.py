"""The quantised base of a run with adapters, on the ranks of a layout (`[lora] base`).

A quantised matrix is a parameter of bytes with the name, the rows and the sharding of the matrix (`StoredRow`): tp, ep
and FSDP2 shard its rows, and a rank of tp that has some columns of each row has the bytes of these columns. FSDP2
gathers the bytes, and every matmul decodes them (`model/matmul.py`). Parameters of bytes are frozen, so there is no
gradient, no reduction and no optimizer state.
"""

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwright.layout.layout import Layout
from shardwright.model.lora_sizes import StoredRow
from shardwright.model.modules import row_of
from shardwright.model.quantised import decode, stored_row
from shardwright.model.row import Row
from shardwright.model.transformer import Transformer
from shardwright.parallel.boxes import TensorShard, gather_whole, local_box
from shardwright.parallel.norm import as_part
from shardwright.parallel.tensor import ColumnLinear
from shardwright.system.errors import LayoutError
from shardwright.system.torch_private import shards_bytes


def store_base(model: Transformer, layout: Layout, tp: dist.ProcessGroup | None) -> None:
    """Replace the quantised matrices of a model, or of a pipeline stage, on the meta device by parameters of bytes.

    Raises LayoutError if FSDP2 would shard them and this version of PyTorch cannot, and for a module of a user's family
    that does not decode.
    """
    for name, parameter in list(model.named_parameters()):
        row = row_of(model.spec, name)
        if not row.stored:
            continue
        if (layout.zero == 3 or layout.offload_parameters != "none") and not shards_bytes():
            raise LayoutError(
                f"lora.base={row.stored!r} with layout.zero={layout.zero} and offload_parameters="
                f"{layout.offload_parameters!r} needs PyTorch 2.13, whose FSDP2 shards bytes, and this is "
                f"{torch.__version__}; set layout.zero=2 without offload_parameters, or lora.base='compute'"
            )
        owner, _, attribute = name.rpartition(".")
        module: Any = model.get_submodule(owner)
        reader = module.shared if isinstance(module, ColumnLinear) else module
        if not hasattr(reader, row.recipe):
            raise LayoutError(
                f"lora.base={row.stored!r}: {owner} is a {type(module).__name__}, which does not decode its matrix; "
                f"use model.matmul.Linear in the family {model.spec.family!r}, or set lora.base='compute'"
            )
        stored = StoredRow(row.stored, row.shape[-1])
        if tp is not None and row.split == "row":
            stored = replace(stored, shards=tp.size(), shard=tp.rank())
        setattr(reader, row.recipe, stored)
        setattr(module, attribute, nn.Parameter(_bytes_like(parameter, stored), requires_grad=False))


def _bytes_like(parameter: Tensor, stored: StoredRow) -> Tensor:
    """Return the empty bytes of a matrix, with its sharding."""
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    part = torch.empty(*local.shape[:-1], stored.n_bytes, dtype=torch.uint8, device=local.device)
    if not isinstance(parameter, DTensor):
        return part
    whole = torch.empty(*parameter.shape[:-1], stored.shards * stored.n_bytes, dtype=torch.uint8, device="meta")
    return as_part(part, whole, parameter.device_mesh, parameter.placements)


def shard_of_values(row: Row, parameter: Tensor, dtype: torch.dtype) -> Tensor | TensorShard:
    """Return a parameter, or the values that the bytes of a quantised one stand for."""
    if not row.stored:
        return parameter
    local, offsets = local_box(parameter)
    stored = stored_row(row, local, offsets, tuple(parameter.shape))
    return TensorShard(decode(local, stored, dtype), (*offsets[:-1], stored.columns.start), row.shape)


def gather_values(row: Row, parameter: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a copy of the whole parameter on every rank, decoded; a collective of the ranks of its mesh."""
    whole = gather_whole(parameter)
    if not row.stored:
        return whole
    shards = parameter.shape[-1] // local_box(parameter)[0].shape[-1]
    parts = [StoredRow(row.stored, row.shape[-1], shards, shard) for shard in range(shards)]
    bytes_of = whole.chunk(shards, -1)
    return torch.cat([decode(codes, part, dtype) for codes, part in zip(bytes_of, parts, strict=True)], -1)
