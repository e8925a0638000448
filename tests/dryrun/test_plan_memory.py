"""Proves that the plan is the dry run: peak memory, calls, bytes and FLOPs of a few of the pairs of
`benchmarks/plan_memory.py`, in a short form, and of what these showed to be wrong once."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

WITHIN = 0.05
"""Four layers beside the embedding and the head of a large model, whose reduction is a large part of the peak."""
SHORT: dict[str, tuple[str, tuple[int, int, int], dict[str, Any]]] = {
    "one micro-batch a step, zero 3": ("llama-3.1-8b", (2048, 8, 1), {"dp_shard": 8, "zero": 3}),
    "as many micro-batches as stages": (
        "llama-3.1-8b",
        (2048, 2, 1),
        {"pp": 2, "tp": 2, "zero": 0, "pp_schedule": "interleaved-1f1b", "virtual_stages": 2},
    ),
    "gradients on the host as they are reduced": (
        "llama-3.2-1b",
        (2048, 8, 1),
        {"dp_shard": 4, "zero": 2, "offload_optimizer": "cpu", "offload_parameters": "cpu"},
    ),
    "mixture": ("mixtral-8x7b", (2048, 16, 1), {"dp_shard": 8, "ep": 8, "zero": 1}),
    "tied, between two ranks of a pipeline": ("gpt-7.5b", (2048, 8, 1), {"pp": 4, "zero": 0}),
}
CLOSE = 0.005
"""Where the peak is in the backward pass of the head, or in that of a layer."""
PEAKS: dict[str, tuple[str, tuple[int, int, int], str, dict[str, Any]]] = {
    "gradient of the head in fp32": ("gpt2", (1024, 2, 2), "fp32", {}),
    "gradient of the head's input": ("llama-3.1-8b", (8192, 2, 1), "bf16", {"tp": 2}),
    "block that is on its way in the head": ("llama-3.1-8b", (8192, 2, 1), "bf16", {"dp_shard": 2, "zero": 3}),
    "scores of a ring in fp32": ("llama-3.2-1b", (16384, 1, 1), "fp32", {"cp": 2, "recompute": "full"}),
    "tied embedding in fp32": ("llama-3.2-1b", (2048, 2, 1), "fp32", {"recompute": "full"}),
    "tied embedding, one micro-batch": ("llama-3.2-1b", (1024, 4, 1), "bf16", {"dp_shard": 4, "zero": 1}),
    "tied embedding, zero 3": ("llama-3.2-1b", (1024, 8, 1), "fp32", {"dp_shard": 4, "zero": 3, "recompute": "full"}),
    "tied embedding of replicas": ("llama-3.2-1b", (1024, 4, 1), "bf16", {"dp_replicate": 4, "recompute": "full"}),
    "untied ends reduced as one group": ("llama-3.1-8b", (1024, 16, 1), "bf16", {"dp_shard": 8, "zero": 2}),
    "untied ends of two shards": (
        "llama-3.1-8b",
        (1024, 4, 1),
        "bf16",
        {"dp_shard": 2, "zero": 2, "recompute": "full"},
    ),
    "untied ends of replicas": ("llama-3.1-8b", (1024, 16, 1), "bf16", {"dp_replicate": 8}),
    "untied ends accumulated": ("llama-3.1-8b", (1024, 32, 1), "bf16", {"dp_shard": 8, "zero": 1}),
    "untied ends of a mixture": ("llama-4-scout", (4096, 32, 1), "bf16", {"dp_shard": 8, "ep": 8, "zero": 2}),
    "embedding accumulated in a pipeline": (
        *("llama-3.1-8b", (1024, 8, 1), "bf16"),
        {"dp_shard": 2, "dp_replicate": 2, "pp": 2, "zero": 1},
    ),
    "gradient of the head's input over tp": ("gemma-7b", (8192, 4, 4), "bf16", {"tp": 8}),
    "soft cap of logits, and norms with an offset": ("gemma2-2b", (8192, 1, 1), "bf16", {}),
}


@pytest.fixture(scope="module")
def plan_memory() -> Iterator[Any]:
    """The benchmark."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
        yield importlib.import_module("plan_memory")
    sys.modules.pop("plan_memory")


@pytest.mark.prove
@pytest.mark.parametrize("name", SHORT)
def test_the_plan_is_the_dry_run(plan_memory: Any, name: str):
    preset, batch, layout = SHORT[name]
    each = plan_memory.pair(preset, batch, n_layers=4, **layout)
    found = plan_memory.Compared.from_run(each.config, plan_memory.dry_of(each))
    assert abs(found.difference) < WITHIN, "\n".join(found.parts)
    assert not found.unequal, "\n".join(found.parts)
    if found.flops is not None and each.config.spec().moe is None:
        assert found.flops[0] == pytest.approx(found.flops[1], rel=1e-6)


@pytest.mark.prove
@pytest.mark.parametrize("name", PEAKS)
def test_peaks_of_backward_passes_are_those_of_the_dry_run(plan_memory: Any, name: str):
    preset, batch, compute, layout = PEAKS[name]
    each = plan_memory.pair(preset, batch, compute, n_layers=4, **layout)
    found = plan_memory.Compared.from_run(each.config, plan_memory.dry_of(each))
    assert abs(found.difference) < CLOSE, "\n".join(found.parts)
