"""What autograd keeps of a model's forward pass."""

from collections.abc import Callable, Collection
from dataclasses import replace

import torch

from shardwright.model import recompute
from shardwright.model.spec import ModelSpec
from shardwright.model.transformer import Transformer


def saved_bytes(spec: ModelSpec, dtype: torch.dtype, parts: Collection[str] = ()) -> int:
    """Bytes that a forward pass of two sequences of 64 tokens keeps, weights aside; each storage counts once."""
    model = Transformer(replace(spec)).to(dtype)
    for block in model.layers.values():
        if parts:
            recompute.recompute_parts(block, parts)
    tokens_BT = torch.zeros(2, 64, dtype=torch.int64)
    return bytes_kept(model, lambda: model(tokens_BT, torch.arange(64)))


def bytes_kept(model: Transformer, run: Callable[[], torch.Tensor]) -> int:
    """Bytes that `run` keeps of a forward pass of the model, weights aside; each storage counts once."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: list[torch.Tensor] = []
    keep = recompute._keep

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    def counted(tensor: torch.Tensor) -> object:
        found = keep(tensor)
        if isinstance(found, torch.Tensor):
            kept.append(found)
        return found

    recompute._keep = counted  # type: ignore[assignment]
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            result = run()
    finally:
        recompute._keep = keep
    assert result.grad_fn is not None, "what is kept is freed with the graph"
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in kept}
    return sum(size for pointer, size in storages.items() if pointer not in weights)
