"""fp8 on a sharded model: the ranks over which the largest absolute value of an operand is taken.

| linear     | along tokens                          | input features | output features |
| ---------- | ------------------------------------- | -------------- | --------------- |
| column     | cp                                    | -              | tp              |
| row        | cp                                    | tp             | -               |
| replicated | cp, and tp where it has token shards  | -              | -               |
| experts    | none: a scale for each row            | -              | -               |

The inputs of a column-parallel linear and the output gradients of a row-parallel linear are gathered, or equal on all
ranks of tp. FSDP gathers a weight, in the type of matmuls, before it is rounded. Each data rank has its own
micro-batches, and so its own scales.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.layout.layout import Layout
from shardwright.model.fp8 import Fp8Linear, Maximum, OperandShards
from shardwright.model.number_formats import Fp8
from shardwright.model.transformer import Transformer
from shardwright.parallel.mesh import Groups
from shardwright.parallel.tensor import ColumnLinear


def use_fp8(model: Transformer, fp8: Fp8, layout: Layout, groups: Groups) -> None:
    """Make the linears of a model, or of a pipeline stage, that is sharded over tp compute in fp8."""
    context = (groups.cp_ring, groups.cp_ulysses)
    tp = groups.tp
    shared = {
        "column": OperandShards(maximum(*context), outputs=maximum(tp)),
        "row": OperandShards(maximum(*context), inputs=maximum(tp)),
        "replicated": OperandShards(maximum(*context, tp if layout.token_shards else None)),
        "experts": OperandShards(),
    }
    for number, block in model.layers.items():
        for row in fp8.rows(model.spec, int(number)):
            linear: Any = block.get_submodule(row.module)
            computes = Fp8Linear(fp8, shared[row.split.removeprefix("kv_")])
            if isinstance(linear, ColumnLinear):
                linear.shared.recipe = computes
            else:
                setattr(linear, row.recipe, computes)


def maximum(*groups: dist.ProcessGroup | None) -> Maximum | None:
    """Return the in-place maximum over the ranks of all groups, or None if every group is None."""
    some = [group for group in groups if group is not None]
    return partial(_maximum, some) if some else None


@torch.compiler.disable
def _maximum(groups: Sequence[dist.ProcessGroup], x: Tensor) -> None:
    for group in groups:
        dist.all_reduce(x, op=dist.ReduceOp.MAX, group=group)
