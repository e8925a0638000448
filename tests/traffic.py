"""Counting what a rank sends: the collectives that PyTorch dispatches, their number and bytes; and reported copies."""

from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.parallel.observer import Observer, TensorCopy, Transfer
from shardwright.system.torch_private import TorchDispatchMode, tree_leaves

KINDS = {
    "allreduce": "all-reduce",
    "allgather_base": "all-gather",
    "reduce_scatter_base": "reduce-scatter",
    "alltoall_base": "all-to-all",
    "send": "send",
}


class Traffic(TorchDispatchMode):
    """Counts collectives by name, and the bytes of their larger side; tensors of under 64 bytes apart."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func.namespace == "c10d":
            tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
            largest = max((t.numel() * t.element_size() for t in tensors), default=0)
            name = func.overloadpacket.__name__.strip("_")
            self.calls[name if largest >= 64 else "small"] += 1
            self.bytes[name if largest >= 64 else "small"] += largest
        return func(*args, **(kwargs or {}))


Link = tuple[str, int, int]
"""What collective, and the ranks of its group: how many, how far apart."""


class TrafficByGroup(TorchDispatchMode):
    """Counts collectives of tensors of some dtypes by group, and the bytes of their larger side, or of what a rank
    sends; scalars are left out. An all-to-all without a rank's own part counts as if that were there."""

    def __init__(self, *dtypes: torch.dtype) -> None:
        super().__init__()
        self.dtypes = dtypes
        self.calls: Counter[Link] = Counter()
        self.bytes: Counter[Link] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        name = func.overloadpacket.__name__.strip("_")
        if func.namespace == "c10d" and name in KINDS:
            given = dict(zip((each.name for each in func._schema.arguments), args, strict=False)) | (kwargs or {})
            self._count(KINDS[name], given)
        return func(*args, **(kwargs or {}))

    def _count(self, kind: str, given: dict[str, Any]) -> None:
        tensors = [t for t in tree_leaves(list(given.values())) if isinstance(t, Tensor)]
        if tensors[0].dtype not in self.dtypes or tensors[0].numel() == 1:
            return
        group = dist.ProcessGroup.unbox(given["process_group"])
        ranks = dist.get_process_group_ranks(dist.distributed_c10d._resolve_process_group(group.group_name))
        n_bytes = max(t.nbytes for t in tensors)
        if kind == "all-to-all":
            n_bytes, splits = given["input"].nbytes, given["input_split_sizes"]
            if splits and splits[dist.get_rank(group)] == 0 and len(set(splits)) == 2:
                n_bytes = n_bytes * len(ranks) // (len(ranks) - 1)
        link = (kind, len(ranks), ranks[1] - ranks[0])
        self.calls[link] += 1
        self.bytes[link] += n_bytes


class ReportedCopies(Observer):
    """The bytes of each copy to the host, and of each copy back to the device, as observers are told of them."""

    def __init__(self) -> None:
        self.out: list[int] = []
        self.back: list[int] = []

    def transfer(self, transfer: Transfer) -> None:
        if isinstance(transfer, TensorCopy):
            (self.out if transfer.to_host else self.back).append(transfer.n_bytes)
