"""Activations of layers in the memory of the host, from the forward to the backward pass
(`layout.offload_activations`).

What the operations of a layer save for the backward pass is copied to the host, storage by storage, and the device lets
go of it; before the backward pass of the layer it is copied back. Bits stay as they are. What a storage holds is copied
once, however many operations save it or views of it. Parameters, the input of a pipeline stage, which the pipeline
keeps anyway, and storages of fewer bytes than `offload_min_bytes` stay where they are.

    forward    layer k runs while the activations of k go down; at its end those of k - 1 have to be on the host,
               and the device lets go of them
    backward   layer k runs while the activations of k - 1 come up, the largest first

So the device has the activations of two layers of a part at a time. Without a pipeline the last layer keeps its own,
since its backward pass comes next. On a GPU each direction has a stream, and memory of the host is pinned. On a CPU
device and host are the same: the copies are made, and nothing is gained.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any
from weakref import WeakValueDictionary, ref

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from shardwright.parallel.host import pins
from shardwright.parallel.norm import local_part
from shardwright.torch_private import FakeTensor, storage_id, tensor_version


class ActivationsOnHost:
    """Those of the layers of one part of the model."""

    def __init__(self, device: torch.device, min_bytes: int) -> None:
        self.device, self.min_bytes = device, min_bytes
        self._down, self._up = (torch.cuda.Stream(device) if pins(device) else None for _ in range(2))
        self._known: WeakValueDictionary[int, _Copy] = WeakValueDictionary()
        """Of the forward pass that runs: the copies that were made, by their storage."""
        self._layer: _Layer | None = None
        self._leaving: tuple[_Layer, list[Tensor]] | None = None
        """The layer whose activations go down, and these on the device."""
        self._inputs: set[int] = set()
        """Storages of the input of the stage."""

    def wrap(self, block: nn.Module, *, first: bool, keeps: bool) -> None:
        """Let a layer have its activations on the host. `first`: of its part; `keeps`: it is the last of a part without
        a pipeline, which has them on the device."""
        own = block.forward

        @torch.compiler.disable(recursive=False)
        def forward(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return own(*args, **kwargs)
            if first:
                self._begin(args)
            if keeps:
                found = own(*args, **kwargs)
                self._let_go()
                return found
            leaving: list[Tensor] = []
            self._layer = layer = _Layer(self, self._layer, block, leaving)
            with torch.autograd.graph.saved_tensors_hooks(self.keep, read):
                found = own(*args, **kwargs)
            self._let_go()
            self._leaving = layer, leaving
            layer.leaving = None
            return found

        block.forward = forward

    def keep(self, x: Tensor) -> "Tensor | Kept":
        """What is kept in the place of a tensor that is saved for the backward pass."""
        layer = self._layer
        if layer is None or layer.leaving is None or type(x) not in (Tensor, FakeTensor) or x.is_conj() or x.is_neg():
            return x
        storage = x.untyped_storage()
        n_bytes, number = storage.nbytes(), storage_id(storage)
        if n_bytes < self.min_bytes or n_bytes % x.element_size() or x.device.type != self.device.type:
            return x
        copy = self._known.get(number)
        # What was changed in place since is not what the copy has.
        if copy is None or copy.version != tensor_version(x):
            if number in self._inputs or number in layer.parameters():
                return x
            copy = self._known[number] = self._copied(x, layer)
        return Kept(copy, x)

    def copy_out(self, on_device: Tensor) -> Tensor:
        """A copy in the memory of the host."""
        on_host = torch.empty(on_device.shape, dtype=on_device.dtype, pin_memory=pins(self.device))
        return on_host.copy_(on_device, non_blocking=True)

    def copy_in(self, on_host: Tensor) -> Tensor:
        """A copy in the memory of the device."""
        on_device = torch.empty(on_host.shape, dtype=on_host.dtype, device=self.device)
        with _on(self._up):
            return on_device.copy_(on_host, non_blocking=True)

    def bring(self, layer: "_Layer") -> None:
        """Start the copies of what is left of a layer's activations, and of those of the layer before it."""
        if self._leaving is not None and self._leaving[0] is layer:
            self._wait(self._down)  # what is still on the device is used as it is
            self._leaving = None
        else:
            self._let_go()
        now, ahead = ([] if each is None else each.to_come() for each in (layer, layer.before))
        # Of this layer the backward pass reads the last first; ahead of it the largest have most time to arrive.
        copies = [*reversed(now), *sorted(ahead, key=lambda copy: -copy.on_host.nbytes)]
        if copies and self._up is not None:
            self._up.wait_stream(torch.cuda.current_stream(self.device))
        for copy in copies:
            copy.on_device, copy.is_original = self.copy_in(copy.on_host), False
            copy.arrived = None if self._up is None else self._up.record_event()

    def _begin(self, args: Sequence[Any]) -> None:
        self._known = WeakValueDictionary()
        self._layer = None
        # The pipeline keeps the input of a stage for its gradient.
        inputs = [x for x in args if isinstance(x, Tensor) and x.requires_grad and x.is_leaf]
        self._inputs = {storage_id(x.untyped_storage()) for x in inputs}

    def _copied(self, x: Tensor, layer: "_Layer") -> "_Copy":
        storage = x.untyped_storage()
        flat = x.detach().as_strided((storage.nbytes() // x.element_size(),), (1,), 0)
        if self._down is not None:
            self._down.wait_stream(torch.cuda.current_stream(self.device))
        with _on(self._down):
            copy = _Copy(layer, StorageWeakRef(storage), tensor_version(x), flat, self.copy_out(flat))
        layer.copies.append(ref(copy))
        assert layer.leaving is not None
        layer.leaving.append(flat)
        return copy

    def _let_go(self) -> None:
        """Let go of the activations that have gone down, once they are there."""
        if self._leaving is not None:
            self._wait(self._down)
            for copy in self._leaving[0].alive():
                copy.on_device = None
            self._leaving = None

    def _wait(self, stream: Any) -> None:
        if stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(stream)


class _Layer:
    """One forward pass of a layer. `before`: that of the layer before; `leaving`: what goes down of its activations, on
    the device, while it runs."""

    def __init__(
        self, store: ActivationsOnHost, before: "_Layer | None", block: nn.Module, leaving: list[Tensor]
    ) -> None:
        self.store, self.before, self.block = store, before, block
        self.leaving: list[Tensor] | None = leaving
        self.copies: list[Callable[[], _Copy | None]] = []

    def alive(self) -> Iterator["_Copy"]:
        """The copies that a backward pass still needs."""
        return (copy for each in self.copies if (copy := each()) is not None)

    def to_come(self) -> list["_Copy"]:
        """Those of them that are not on the device, in the order in which they were saved."""
        return [copy for copy in self.alive() if copy.has_to_come]

    def parameters(self) -> set[int]:
        """Storages of its parameters, which FSDP has gathered for a part of the layer only while that runs."""
        return {storage_id(local_part(each.detach()).untyped_storage()) for each in self.block.parameters()}


class _Copy:
    """What a storage held at a version of it. While the weak reference lives, no other storage has its number."""

    def __init__(
        self, layer: _Layer, storage: StorageWeakRef, version: int, on_device: Tensor, on_host: Tensor
    ) -> None:
        self.layer, self.storage, self.version = layer, storage, version
        self.on_device: Tensor | None = on_device
        self.is_original = True
        """Whether `on_device` is the storage itself, which was not let go of yet."""
        self.on_host = on_host
        self.arrived: Any = None
        """Event after its copy to the device."""

    @property
    def has_to_come(self) -> bool:
        """Whether the device has not, or has no longer, what the storage held."""
        return self.on_device is None or (self.is_original and tensor_version(self.on_device) != self.version)


class Kept:
    """What is kept in the place of a tensor: a copy of its storage, and which view of that it is."""

    def __init__(self, copy: _Copy, x: Tensor) -> None:
        self.copy, self.dtype = copy, x.dtype
        self.view = x.size(), x.stride(), int(x.storage_offset())

    def read(self) -> Tensor:
        """The tensor, on the device."""
        copy, store = self.copy, self.copy.layer.store
        store.bring(copy.layer)
        assert copy.on_device is not None
        if copy.arrived is not None:
            torch.cuda.current_stream(store.device).wait_event(copy.arrived)
        return copy.on_device.view(self.dtype).as_strided(*self.view)


def read(kept: Tensor | Kept) -> Tensor:
    """The tensor that was saved for the backward pass."""
    return kept if isinstance(kept, Tensor) else kept.read()


def _on(stream: Any) -> Any:
    return nullcontext() if stream is None else torch.cuda.stream(stream)
