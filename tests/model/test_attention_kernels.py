"""Proves docs/attention-kernels.md: the kernel of each kind of layer, and that no memory grows with its square."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.generation.batch import RaggedBatch, SequenceSegment
from shardwright.generation.cache import Cache, RuledLayerCache
from shardwright.model import attention
from shardwright.model.device_type import assumed, device_type
from shardwright.model.documents import Documents
from shardwright.model.piece_attention import AttentionRule
from shardwright.parallel.context import ContextAttention
from shardwright.system.torch_private import FakeTensorMode, TorchDispatchMode, start_fake_world, tree_leaves
from tests.distributed import run_ranks

PAGE = Path(__file__).parents[2] / "docs/attention-kernels.md"
B, H, K, C = 1, 4, 2, 16
SHORT, LONG = 1024, 2048
LAYERS: dict[str, dict[str, Any]] = {
    "causal": {},
    "documents": {},
    "window": {"window": 600},
    "chunks": {"window": 600, "chunked": True},
    "sinks": {"sinks": True},
    "soft cap": {"softcap": 50.0},
    "soft cap and window": {"softcap": 50.0, "window": 600},
    "soft cap and sinks": {"softcap": 50.0, "sinks": True},
}
TYPES = {"16 bits": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}
OPERATORS = {
    "_scaled_dot_product_flash_attention_for_cpu": "flash",
    "_scaled_dot_product_flash_attention": "flash",
    "_flash_attention_forward": "varlen",
    "_varlen_attn": "varlen",
    "logsumexp": "rows",
}
"""Operators of the forward pass and their kernels. A dry run on a CPU build runs SDPA as the kernel for CPUs."""


def told() -> dict[tuple[str, str], str]:
    """Return the kernels of the page by layer and column, without empty cells."""
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in PAGE.read_text().splitlines()
        if line.startswith("| ") and line.count("|") == 12
    ]
    head, _, *lines = rows
    return {(line[0], column): cell for line in lines for column, cell in zip(head[1:], line[1:], strict=True) if cell}


class Watched(TorchDispatchMode):
    """Notes the kernels of attention that are run, and the most elements of a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: set[str] = set()
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in OPERATORS:
            self.kernels.add(OPERATORS[name])
            # The memory-efficient kernel of GPUs refuses groups of heads, which the kernel of CPUs accepts.
            grouped = name.startswith("_scaled_dot_product") and args[0].shape[1] != args[1].shape[1]
            masked = (kwargs or {}).get("attn_mask") is not None  # of few queries of a cache
            if grouped and not masked and device_type(args[0]) == "cuda" and args[0].dtype == torch.float32:
                self.kernels.add("grouped")
        sizes = [x.untyped_storage().nbytes() for x in tree_leaves(result) if isinstance(x, Tensor)]
        self.largest = max(self.largest, *sizes, 0)
        return result


@contextmanager
def watched_flex(watched: Watched) -> Iterator[None]:
    """Note FlexAttention, which a CPU cannot compile, where it would be called."""

    def noted(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Tensor:
        watched.kernels.add("FlexAttention")
        return q + k.repeat_interleave(H // K, 2) + v.repeat_interleave(H // K, 2)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "capped_attention", noted)
        yield


def attended(layer: str, column: str, n_tokens: int, method: str) -> Watched:
    """Run attention forward, and backward except with a cache, of `n_tokens` new tokens."""
    device, *words = column.split(", ")
    keys = dict(LAYERS[layer])
    dtype = next((TYPES[word] for word in words if word in TYPES), torch.float32)
    watched, gpu = Watched(), device == "GPU"
    with FakeTensorMode() if gpu else nullcontext(), assumed("cuda") if gpu else nullcontext():
        q, k, v = (torch.zeros(B, n_tokens, n, C, dtype=dtype, requires_grad=True) for n in (H, K, K))
        sinks_H = torch.zeros(H, dtype=dtype, requires_grad=True) if keys.pop("sinks", False) else None
        rule = AttentionRule(**keys, sinks_H=sinks_H) if LAYERS[layer] else None
        with watched, watched_flex(watched):
            if "cache" in words:
                with torch.no_grad():
                    continued(q, k, v, rule)
                return watched
            n_ranks = 2 if "ring" in words else 1
            half = n_ranks * n_tokens // 2
            documents = Documents(((half, half),)) if layer == "documents" else None
            attend: Callable[..., Tensor] = attention.attend
            if "ring" in words:
                attend = ContextAttention(method, dist.group.WORLD, None)
            o = attend(q, k, v, documents) if rule is None else attend(q, k, v, documents, rule)
            torch.autograd.grad(o, (q, k, v), torch.zeros_like(o))
    return watched


def continued(q: Tensor, k: Tensor, v: Tensor, rule: AttentionRule | None) -> None:
    """Run the second half of a sequence, whose first half is in a cache."""
    n = q.shape[1]
    cache = Cache(1, 2 * n)
    layer = cache.layer(rule)
    for start in (0, n):
        cache.begin(RaggedBatch([SequenceSegment(0, start, n)], range(n)), q.device)
        if rule is not None and start:
            assert isinstance(layer, RuledLayerCache)
            layer.attend_and_write(q[0], k[0], v[0], rule)
            continue
        layer.write(k[0], v[0])
        if start:
            layer.attend(q[0])


def cells_that_differ() -> list[str]:
    """Compare all cells; a fake process group has the second rank of a ring of two."""
    if dist.is_initialized():
        dist.destroy_process_group()
    start_fake_world(1, 2)
    different = []
    for (layer, column), kernel in told().items():
        for method in ("zigzag", "ring", "allgather") if "ring" in column else ("",):
            short, long = (attended(layer, column, n, method) for n in (SHORT, LONG))
            # A CPU build runs SDPA of a GPU as its own kernel.
            expected = "flash" if kernel == "SDPA" else kernel
            if long.kernels != {expected}:
                different.append(f"{layer}, {column} {method}: {long.kernels or 'none'}, and the page says {kernel}")
            if long.largest > 2.1 * short.largest:
                different.append(f"{layer}, {column} {method}: {short.largest} bytes, then {long.largest}")
    return different


@pytest.mark.prove
def test_every_cell_of_the_page_is_the_kernel_that_runs_and_linear_in_the_sequence():
    cells = told()
    assert {layer for layer, _ in cells} == set(LAYERS)
    (different,) = run_ranks(cells_that_differ, 1)
    assert not different
