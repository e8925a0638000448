"""Offload of layers' activations to host memory from the forward to the backward pass
(`layout.offload_activations`).

Storages that a layer's operations save for the backward pass are copied to the host and freed on the device; before the
layer's backward pass they are copied back, equal to the bit. A storage is copied once, for any number of operations
that save it or views of it. Parameters, the input of a pipeline stage (which the pipeline keeps anyway) and storages of
fewer than `offload_min_bytes` stay on the device.

    forward    layer k runs while the activations of k go to the host; at its end the activations of k - 1 have to be
               on the host and are freed on the device
    backward   layer k runs while the activations of k - 1 come back, the largest first

So the device has the activations of two layers of a part at a time. Without a pipeline the last layer keeps its
activations, because its backward pass comes next. On a GPU each direction has a stream, and host memory is pinned. On a
CPU device and host are the same: the copies are made and save nothing.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any
from weakref import WeakValueDictionary, ref

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from shardwright.parallel.norm import local_part
from shardwright.parallel.observer import NO_OBSERVER, Observer, TensorCopy
from shardwright.system.torch_private import FakeTensor, storage_id, tensor_version


class ActivationsOnHost:
    """Keeps the activations of the layers of one part of the model on the host."""

    def __init__(self, device: torch.device, min_bytes: int, observer: Observer = NO_OBSERVER) -> None:
        self.device, self.min_bytes, self.observer = device, min_bytes, observer
        self._down, self._up = (torch.cuda.Stream(device) if pins(device) else None for _ in range(2))
        self._known: WeakValueDictionary[int, _StorageVersion] = WeakValueDictionary()
        """Copies of the current forward pass, by their storage."""
        self._layer: _LayerPass | None = None
        self._leaving: tuple[_LayerPass, list[Tensor]] | None = None
        """The layer whose activations are being copied to the host, and these tensors on the device."""
        self._inputs: set[int] = set()
        """Storages of the stage's input."""

    def wrap(self, block: nn.Module, *, first: bool, keeps: bool) -> None:
        """Make a layer keep its activations on the host. `first`: the layer is the first of its part; `keeps`: it is
        the last layer of a model without a pipeline, which keeps them on the device."""
        block_forward = block.forward

        @torch.compiler.disable(recursive=False)
        def forward(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return block_forward(*args, **kwargs)
            if first:
                self._begin(args)
            if keeps:
                output = block_forward(*args, **kwargs)
                self._let_go()
                return output
            leaving: list[Tensor] = []
            self._layer = layer = _LayerPass(self, self._layer, block, leaving)
            with torch.autograd.graph.saved_tensors_hooks(self.keep, read):
                output = block_forward(*args, **kwargs)
            self._let_go()
            self._leaving = layer, leaving
            layer.leaving = None
            return output

        block.forward = forward

    def keep(self, x: Tensor) -> "Tensor | OffloadedView":
        """Return the tensor to save instead of `x` for the backward pass, or a handle of its copy."""
        layer = self._layer
        if layer is None or layer.leaving is None or type(x) not in (Tensor, FakeTensor) or x.is_conj() or x.is_neg():
            return x
        storage = x.untyped_storage()
        n_bytes, number = storage.nbytes(), storage_id(storage)
        if n_bytes < self.min_bytes or n_bytes % x.element_size() or x.device.type != self.device.type:
            return x
        copy = self._known.get(number)
        # The copy does not contain later changes in place.
        if copy is None or copy.version != tensor_version(x):
            if number in self._inputs or number in layer.parameters():
                return x
            copy = self._known[number] = self._copied(x, layer)
        return OffloadedView(copy, x)

    def copy_out(self, on_device: Tensor) -> Tensor:
        """Return a copy in host memory."""
        on_host = torch.empty(on_device.shape, dtype=on_device.dtype, pin_memory=pins(self.device))
        self.observer.transfer(TensorCopy(to_host=True, n_bytes=on_device.nbytes, activations=on_host))
        return on_host.copy_(on_device, non_blocking=True)

    def copy_in(self, on_host: Tensor) -> Tensor:
        """Return a copy in device memory."""
        on_device = torch.empty(on_host.shape, dtype=on_host.dtype, device=self.device)
        self.observer.transfer(TensorCopy(to_host=False, n_bytes=on_host.nbytes, activations=on_device))
        with _stream_context(self._up):
            return on_device.copy_(on_host, non_blocking=True)

    def bring(self, layer: "_LayerPass") -> None:
        """Start copying back the rest of a layer's activations, and the activations of the layer before it."""
        if self._leaving is not None and self._leaving[0] is layer:
            self._wait(self._down)  # activations that are still on the device are used directly
            self._leaving = None
        else:
            self._let_go()
        now, ahead = ([] if one is None else one.to_come() for one in (layer, layer.before))
        # The backward pass reads this layer's last copy first; the largest copies of the next one need the most time.
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

    def _copied(self, x: Tensor, layer: "_LayerPass") -> "_StorageVersion":
        storage = x.untyped_storage()
        flat = x.detach().as_strided((storage.nbytes() // x.element_size(),), (1,), 0)
        if self._down is not None:
            self._down.wait_stream(torch.cuda.current_stream(self.device))
        with _stream_context(self._down):
            copy = _StorageVersion(layer, StorageWeakRef(storage), tensor_version(x), flat, self.copy_out(flat))
        layer.copies.append(ref(copy))
        assert layer.leaving is not None
        layer.leaving.append(flat)
        return copy

    def _let_go(self) -> None:
        """Free the activations on the device after they have been copied to the host."""
        if self._leaving is not None:
            self._wait(self._down)
            for copy in self._leaving[0].alive():
                copy.on_device = None
            self._leaving = None

    def _wait(self, stream: Any) -> None:
        if stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(stream)


class _LayerPass:
    """One forward pass of a layer. `before`: the forward pass of the previous layer; `leaving`: the activations on the
    device that are copied to the host while the layer runs."""

    def __init__(
        self, store: ActivationsOnHost, before: "_LayerPass | None", block: nn.Module, leaving: list[Tensor]
    ) -> None:
        self.store, self.before, self.block = store, before, block
        self.leaving: list[Tensor] | None = leaving
        self.copies: list[Callable[[], _StorageVersion | None]] = []

    def alive(self) -> Iterator["_StorageVersion"]:
        """Return the copies that a backward pass still needs."""
        return (copy for reference in self.copies if (copy := reference()) is not None)

    def to_come(self) -> list["_StorageVersion"]:
        """Return the live copies that are not on the device, in the order in which they were saved."""
        return [copy for copy in self.alive() if copy.has_to_come]

    def parameters(self) -> set[int]:
        """Return the storages of its parameters; while the layer runs, FSDP replaces them by gathered ones."""
        return {storage_id(local_part(p.detach()).untyped_storage()) for p in self.block.parameters()}


class _StorageVersion:
    """The contents of a storage at one version. While the weak reference lives, no other storage has its number."""

    def __init__(
        self, layer: _LayerPass, storage: StorageWeakRef, version: int, on_device: Tensor, on_host: Tensor
    ) -> None:
        self.layer, self.storage, self.version = layer, storage, version
        self.on_device: Tensor | None = on_device
        self.is_original = True
        """Whether `on_device` is the storage itself, not yet freed."""
        self.on_host = on_host
        self.arrived: Any = None
        """Event after the copy to the device."""

    @property
    def has_to_come(self) -> bool:
        """Return whether the device does not have the contents, or no longer."""
        return self.on_device is None or (self.is_original and tensor_version(self.on_device) != self.version)


class OffloadedView:
    """A handle that replaces a saved tensor: a copy of its storage, and its view of that storage."""

    def __init__(self, copy: _StorageVersion, x: Tensor) -> None:
        self.copy, self.dtype = copy, x.dtype
        self.view = x.size(), x.stride(), int(x.storage_offset())

    def read(self) -> Tensor:
        """Return the tensor, on the device."""
        copy, store = self.copy, self.copy.layer.store
        store.bring(copy.layer)
        assert copy.on_device is not None
        if copy.arrived is not None:
            torch.cuda.current_stream(store.device).wait_event(copy.arrived)
        return copy.on_device.view(self.dtype).as_strided(*self.view)


def read(kept: Tensor | OffloadedView) -> Tensor:
    """Return the tensor that was saved for the backward pass."""
    return kept if isinstance(kept, Tensor) else kept.read()


def _stream_context(stream: Any) -> Any:
    return nullcontext() if stream is None else torch.cuda.stream(stream)


def pins(device: torch.device) -> bool:
    """Return whether host memory for copies to and from `device` is pinned, so that a GPU copies without the CPU."""
    return device.type == "cuda" and torch.cuda.is_available()
