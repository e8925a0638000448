"""fp8 on a sharded model: over which ranks the largest absolute value of an operand is taken.

| linear     | along tokens                          | input features | output features |
| ---------- | ------------------------------------- | -------------- | --------------- |
| column     | cp                                    | -              | tp              |
| row        | cp                                    | tp             | -               |
| replicated | cp, and tp where it has token shards  | -              | -               |
| experts    | none: a scale for each row            | -              | -               |

The inputs of a column-parallel linear and the output's gradients of a row-parallel one are gathered, or the same on
all ranks of tp. FSDP gathers a weight, in the type of matmuls, before it is rounded. Data ranks have micro-batches of
their own, and so tensors of their own.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.layout import Layout
from shardwright.model.fp8 import Fp8Linear, Maximum, Shared
from shardwright.model.number_formats import Fp8
from shardwright.model.transformer import Transformer
from shardwright.parallel.mesh import Groups
from shardwright.parallel.tensor import ColumnLinear


def use_fp8(model: Transformer, fp8: Fp8, layout: Layout, groups: Groups) -> None:
    """Let the linears of a model, or of a pipeline stage, that is sharded over tp compute in fp8."""
    context = (groups.cp_ring, groups.cp_ulysses)
    tp = groups.tp
    shared = {
        "column": Shared(maximum(*context), outputs=maximum(tp)),
        "row": Shared(maximum(*context), inputs=maximum(tp)),
        "replicated": Shared(maximum(*context, tp if layout.token_shards else None)),
        "experts": Shared(),
    }
    for number, block in model.layers.items():
        for row in fp8.rows(model.spec, int(number)):
            linear: Any = block.get_submodule(row.module)
            computes = Fp8Linear(fp8, shared[row.split.removeprefix("kv_")])
            if isinstance(linear, ColumnLinear):
                linear.shared.fp8 = computes
            else:
                linear.fp8 = computes


def maximum(*groups: dist.ProcessGroup | None) -> Maximum | None:
    """The maximum over the ranks of all of these groups; None where there is no other rank."""
    some = [group for group in groups if group is not None]
    return partial(_maximum, some) if some else None


@torch.compiler.disable
def _maximum(groups: Sequence[dist.ProcessGroup], x: Tensor) -> None:
    for group in groups:
        dist.all_reduce(x, op=dist.ReduceOp.MAX, group=group)
