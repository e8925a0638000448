"""Record allocations and messages of the program, on fake or real tensors."""

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardwright.dry_run.length import axes_of
from shardwright.dry_run.operations import formulas_of, op_name
from shardwright.dry_run.places import ModuleLocator, running_line
from shardwright.dry_run.record import (
    DISK,
    KINDS,
    LINK,
    TO_DEVICE,
    TO_HOST,
    WAIT,
    Allocation,
    History,
    RankRecord,
    RecordedMessage,
    summed,
)
from shardwright.layout.layout import Layout
from shardwright.parallel.point_to_point import launches
from shardwright.system.torch_private import (
    DispatchMode,
    observed_resizes,
    observed_shape_queries,
    script_type,
    storage_id,
    tree_leaves,
)

BLOCK_BYTES = 512
"""CUDA's caching allocator rounds every tensor up to a multiple of this size."""


class OperationRecorder(DispatchMode):
    """While active, records every creation, resize and release of a storage, and every collective and message.

    It sees the operations that PyTorch dispatches, but not memory that a kernel allocates and frees internally. For
    flash attention on a GPU, `gpu` adds that memory by formula and rounds sizes as CUDA's allocator does.
    """

    def __init__(
        self, layout: Layout, rank: int, places: ModuleLocator, gpu: bool, on_action: Callable[[], None] = lambda: None
    ) -> None:
        """`on_action`: called when an action of the step starts."""
        super().__init__()
        self._on_action = on_action
        self.layout, self.rank, self.places, self.gpu = layout, rank, places, gpu
        self.allocations: list[Allocation] = []
        self.actions: list[tuple[int, str]] = []
        self.messages: list[RecordedMessage] = []
        self.flops: Counter[tuple[str, str]] = Counter()
        """(action, operation) -> FLOPs."""
        self._times: list[int] = []
        """Times of the messages."""
        self._now = 0
        self._live: dict[int, int] = {}
        """Address of a storage -> its number in `allocations`."""
        self._of_action: list[int] = []
        self._unseen = False
        self._on_host: dict[int, int] = {}
        """Number of a storage in host memory -> its bytes, which are not in `allocations`."""
        self._host_bytes = 0
        self.most_host_bytes = 0
        """Maximum of `_host_bytes`, the current bytes in host memory."""
        self._in_messages: set[int] = set()
        self._in_fsdp_messages: set[int] = set()
        self._groups: dict[int, tuple[str, tuple[int, ...]]] = {}
        self._observed = ExitStack()
        self._launches_before = launches()
        self._querying = False
        """Whether DTensor is inferring the shape of a whole tensor by running an operation on fake tensors."""

    def __enter__(self) -> "OperationRecorder":
        self._observed.enter_context(observed_resizes(self._sized))
        self._observed.enter_context(observed_shape_queries(self._set_querying))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._observed.close()
        super().__exit__(*error)

    # Calls from the watched program

    def begin(self, action: str) -> None:
        """Start an action of the step."""
        self._on_action()
        self._now += 1
        self.actions.append((self._now, action))
        self._of_action.clear()

    def keep(self) -> None:
        """End a forward pass, or a backward pass that leaves weight gradients to a later action: memory that it created
        and has not freed is kept as activations."""
        for number in self._of_action:
            allocation = self.allocations[number]
            if not allocation.kind and allocation.sizes[-1][1] and number not in self._in_fsdp_messages:
                allocation.kind = "activations"
        self._of_action.clear()

    def hold(self, n_bytes: int, kind: str) -> None:
        """Count bytes for the whole step that this process does not allocate."""
        self.allocations.append(Allocation("", "", "", (n_bytes,), "uint8", [(0, self.rounded(n_bytes))], kind))

    @contextmanager
    def on_host(self) -> Iterator[None]:
        """Count memory created in the block as host memory. Only with `gpu`; otherwise both memories are the same."""
        before, self._unseen = self._unseen, self.gpu
        try:
            yield
        finally:
            self._unseen = before

    @contextmanager
    def extra_memory(self, n_bytes: int, kind: str) -> Iterator[None]:
        """Count additional device memory during the block. Only with `gpu`."""
        self._now += 1
        sizes = [(self._now, self.rounded(n_bytes))]
        if self.gpu:
            self.allocations.append(Allocation("", "", self._action, (n_bytes,), "uint8", sizes, kind, running_line()))
        try:
            yield
        finally:
            self._now += 1
            sizes.append((self._now, 0))

    def put_on_host(self, tensor: Tensor | None, kind: str) -> None:
        """Count a tensor as host memory. Without `gpu` it has kind `kind`."""
        self.mark(tensor, kind)
        if self.gpu and tensor is not None:
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            number = self._number(local)
            if number not in self._on_host:
                self.allocations[number].sizes = [(0, 0)]
                self._on_host[number] = local.untyped_storage().nbytes()
                self._add_on_host(self._on_host[number])

    def hold_on_host(self, n_bytes: int, kind: str) -> None:
        """Count host memory for the whole step that has no tensor. Without `gpu` it has kind `kind`."""
        if self.gpu:
            self._add_on_host(n_bytes)
        else:
            self.hold(n_bytes, kind)

    def is_on_host(self, tensor: Tensor) -> bool:
        """Return whether a tensor was put into host memory."""
        return self._live.get(storage_id(tensor.untyped_storage()), -1) in self._on_host

    def copied(self, op: str, n_bytes: int) -> None:
        """Record a copy to the host or the device (TO_HOST, TO_DEVICE), or from or to a disk (READ, WRITE). Also
        without `gpu`, although host and device memory are then the same and nothing may be copied."""
        if n_bytes:
            self._times.append(self._now)
            axis = LINK if op in (TO_HOST, TO_DEVICE) else DISK
            self.messages.append(
                RecordedMessage(
                    op, axis, (self.rank,), n_bytes, "uint8", ((n_bytes,),), self._action, self.places.module
                )
            )

    def _add_on_host(self, n_bytes: int) -> None:
        self._host_bytes += n_bytes
        self.most_host_bytes = max(self.most_host_bytes, self._host_bytes)

    def mark(self, tensor: Tensor | None, kind: str) -> None:
        """Set the kind of a tensor's storage; of two kinds the first in KINDS applies."""
        if tensor is None:
            return
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        number = self._number(local)
        known = self.allocations[number].kind
        if not known or KINDS.index(kind) < KINDS.index(known):
            self.allocations[number].kind = kind

    def wait(self, what: str, peer: int, number: int) -> None:
        """Record a wait for message number `number` from another rank."""
        self._times.append(self._now)
        pair = (min(peer, self.rank), max(peer, self.rank))
        self.messages.append(RecordedMessage(WAIT, "pp", pair, 0, "", (), self._action, what, (number,), peer))

    def record(self, repeats: Mapping[str, int], history: bool = False) -> RankRecord:
        """Return the record after the step. `repeats`, `history`: as in `RankRecord`."""
        for number, allocation in enumerate(self.allocations):
            if not allocation.kind:
                allocation.kind = "communication" if number in self._in_messages else "temporaries"
        curve, peak, tops, largest = summed(self.allocations, self.actions)
        flops: Counter[str] = Counter()
        for (action, op), count in self.flops.items():
            flops[op] += repeats.get(action, 1) * count
        messages = tuple(self.messages)
        everything = History(tuple(self.allocations), tuple(self.actions), tuple(self._times), self._now)
        return RankRecord(
            self.rank,
            curve,
            peak,
            tops,
            largest,
            messages,
            dict(flops),
            dict(repeats),
            everything if history else None,
            self.most_host_bytes,
        )

    # Operations that PyTorch dispatches

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor runs first; its operations on shards come back here
        kwargs = kwargs or {}
        if self._querying or self._unseen or func.namespace == "prim":  # prim: a query of a fake tensor's device
            return func(*args, **kwargs)
        self._now += 1
        if func.namespace == "c10d":
            self._message(func, args)
        out = func(*args, **kwargs)
        on_host = bool(self._on_host) and self._computes_on_host(args)
        for result in out if isinstance(out, list | tuple) else (out,):
            if isinstance(result, Tensor):
                self._made(result, func, on_host)
        count, inside = formulas_of(func)
        if count is not None:
            self.flops[self._action, op_name(func)] += count(*args, **kwargs, out_val=out)
        if self.gpu and inside is not None:
            self._passing(inside(*args), func)
        return out

    def _computes_on_host(self, args: Any) -> bool:
        """Return whether all tensor arguments of an operation are in host memory, where its results are then."""
        tensors = [x for x in tree_leaves(args) if isinstance(x, Tensor)]
        return bool(tensors) and all(map(self.is_on_host, tensors))

    def _made(self, tensor: Tensor, func: Any, on_host: bool) -> None:
        # A view of an unknown storage views memory of the collectives' backend: gloo's reduce-scatter works on a copy.
        if func.is_view or storage_id(tensor.untyped_storage()) in self._live:
            return
        self._of_action.append(self._number(tensor, op_name(func), before=False))
        if on_host:
            self.put_on_host(tensor, "temporaries")

    def _number(self, tensor: Tensor, op: str = "", before: bool = True) -> int:
        """Return the number of a tensor's storage. An unknown storage was allocated before this record (`before`), or
        just now."""
        storage = tensor.untyped_storage()
        key = storage_id(storage)
        if key in self._live:
            return self._live[key]
        number = self._live[key] = len(self.allocations)
        at = 0 if before else self._now
        module = "" if before else self.places.module
        shape, dtype = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
        sizes = [(at, self.rounded(storage.nbytes()))]
        action, line = ("", "") if before else (self._action, running_line())
        self.allocations.append(Allocation(op, module, action, shape, dtype, sizes, line=line))
        weakref.finalize(storage, self._freed, key)
        return number

    def _freed(self, key: int) -> None:
        number = self._live.pop(key, None)
        if number is not None:
            self._now += 1
            self.allocations[number].sizes.append((self._now, 0))
            self._host_bytes -= self._on_host.pop(number, 0)

    def _sized(self, storage: torch.UntypedStorage) -> None:
        number = self._live.get(storage_id(storage))
        if number is not None:
            self._now += 1
            self.allocations[number].sizes.append((self._now, self.rounded(storage.nbytes())))

    def _set_querying(self, querying: bool) -> None:
        self._querying = querying

    def _passing(self, n_bytes: int, func: Any) -> None:
        """Record bytes that a kernel allocates and frees."""
        sizes = [(self._now, self.rounded(n_bytes)), (self._now + 1, 0)]
        self._now += 1
        self.allocations.append(
            Allocation(
                f"inside of {op_name(func)}",
                self.places.module,
                self._action,
                (n_bytes,),
                "uint8",
                sizes,
                "temporaries",
                running_line(),
            )
        )

    def rounded(self, n_bytes: int) -> int:
        """Return the bytes of a storage, as the allocator rounds them."""
        return -(-n_bytes // BLOCK_BYTES) * BLOCK_BYTES if self.gpu else n_bytes

    @property
    def _action(self) -> str:
        return self.actions[-1][1] if self.actions else ""

    # Messages

    def _message(self, func: Any, args: Any) -> None:
        op = op_name(func).strip("_")
        op = _NAMES.get(op, op)
        tensors = [x for x in tree_leaves(args) if isinstance(x, Tensor)]
        group = next((x for x in args if isinstance(x, torch.ScriptObject) and _is_group(x)), None)
        if group is None or not tensors:
            return
        axis, ranks = self._group(dist.ProcessGroup.unbox(group))
        of_fsdp = op in ("all-gather", "reduce-scatter") and axis.startswith(("dp", "cp", "expert", "one"))
        for tensor in tensors:
            number = self._number(tensor)
            self._in_messages.add(number)
            if of_fsdp:
                self._in_fsdp_messages.add(number)
        if of_fsdp and op == "reduce-scatter":
            self.mark(tensors[0], "gradients")
        self._times.append(self._now)
        largest = max(tensors, key=lambda x: x.numel() * x.element_size())
        n_bytes, peer, splits, launch = largest.numel() * largest.element_size(), -1, (), 0
        if op in ("send", "receive"):
            peer, launch = ranks[args[2]], launches() - self._launches_before
        elif op == "all-to-all":
            splits = (*args[3], -1, *args[4]) if args[3] or args[4] else ()
            if args[4] and args[4][ranks.index(self.rank)] == 0 and len(set(args[4])) == 2:
                n_bytes = n_bytes * len(ranks) // (len(ranks) - 1)
        self.messages.append(
            RecordedMessage(
                op,
                axis,
                ranks,
                n_bytes,
                str(largest.dtype).removeprefix("torch."),
                tuple(tuple(x.shape) for x in tensors),
                self._action,
                self.places.module,
                splits,
                peer,
                launch,
            )
        )

    def _group(self, group: dist.ProcessGroup) -> tuple[str, tuple[int, ...]]:
        key = id(group)
        if key not in self._groups:
            ranks = tuple(dist.get_process_group_ranks(group))
            self._groups[key] = axes_of(self.layout, ranks, self.rank), ranks
        return self._groups[key]


_NAMES = {
    "allreduce": "all-reduce",
    "allgather_base": "all-gather",
    "allgather": "all-gather",
    "reduce_scatter_base": "reduce-scatter",
    "reduce_scatter": "reduce-scatter",
    "alltoall_base": "all-to-all",
    "alltoall": "all-to-all",
    "recv": "receive",
}


def _is_group(script: torch.ScriptObject) -> bool:
    return "ProcessGroup" in script_type(script)
