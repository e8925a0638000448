"""What the C library keeps of freed tensors on a CPU: blocks below the size from which they are mapped alone; and what
the header of a run says of its attention."""

import gc
import resource
import sys
from pathlib import Path

import pytest
import torch

from shardwright.config import load
from shardwright.cost.pools import MAPPED_BYTES
from shardwright.system.units import MiB
from shardwright.training import device
from shardwright.training.device import attention_kernels, configure_malloc
from tests.distributed import run_ranks


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def _kept_bytes(n_bytes: int, count: int) -> tuple[int, int]:
    """Resident memory that tensors of so many bytes add while they live, and after they are freed."""
    configure_malloc()
    torch.ones(MAPPED_BYTES // 4)  # pages of libraries count from their first use after a fork
    gc.collect()
    before = _resident_bytes()
    tensors = [torch.ones(n_bytes // 4) for _ in range(count)]
    alive = _resident_bytes() - before
    del tensors
    gc.collect()
    return alive, _resident_bytes() - before


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="mallopt is glibc's")
def test_large_blocks_go_back_to_the_kernel_and_small_ones_stay():
    (large,) = run_ranks(_kept_bytes, 1, MAPPED_BYTES, 4)
    (small,) = run_ranks(_kept_bytes, 1, MAPPED_BYTES // 4, 16)
    for alive, _ in (large, small):
        assert alive == pytest.approx(128 * MiB, rel=0.1)
    assert large[1] < 4 * MiB
    assert small[1] > 120 * MiB


def test_layers_with_a_window_are_named_by_themselves(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(device, "_selected", lambda *_: "memory-efficient")
    keys = ["model.window=16", "model.global_interval=2", "device='cuda'"]
    config = load("examples/debug.toml", [*keys, "precision.compute='fp32'"])
    said = attention_kernels(config, torch.device("cuda"))
    assert said is not None
    assert said.startswith("memory-efficient; in layers with a window some rows at a time")


@pytest.mark.parametrize(
    ("cp", "method", "in_kernel"), [(2, "ulysses", True), (2, "usp", True), (4, "usp", False), (2, "zigzag", False)]
)
def test_a_soft_cap_is_in_a_kernel_where_no_ring_merges_keys(cp: int, method: str, in_kernel: bool):
    layout = f"layout={{cp = {cp}, cp_method = '{method}'{', ulysses_degree = 2' if method == 'usp' else ''}}}"
    config = load(
        "examples/debug.toml", [layout, "model.attention_softcap=50.0", "device='cuda'", "precision.compute='bf16'"]
    )
    said = attention_kernels(config, torch.device("cuda"))
    assert said is not None
    assert said.endswith("FlexAttention" if in_kernel else "keys of other ranks of cp are merged step by step")
