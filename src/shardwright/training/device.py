"""Properties of a rank's device: peak FLOP/s for MFU, attention kernels, and memory in use."""

import ctypes
import re
import resource
import sys

import torch
from torch.nn.attention import SDPBackend

from shardwright.config import RunConfig
from shardwright.cost.hardware import Accelerator, packaged_accelerators
from shardwright.cost.pools import MAPPED_BYTES
from shardwright.model.pieces import needs_equal_heads, refuses_flash, scores_in_rows
from shardwright.system.torch_private import fused_attention_choice

_ATTENTION = {
    SDPBackend.CUDNN_ATTENTION: "cuDNN",
    SDPBackend.FLASH_ATTENTION: "FlashAttention-2",
    SDPBackend.EFFICIENT_ATTENTION: "memory-efficient",
    SDPBackend.MATH: "unfused, which stores the scores",
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}
"""`precision.compute` -> the type of matmuls."""
_FORMATS = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


def least_state_bytes(config: RunConfig, trained_bytes: float) -> float:
    """Return a lower bound of the bytes of a run's parameters and states on a rank.

    T / N trained_bytes + F / (N / c) e

    T parameters with a gradient, `trained_bytes` for each; N ranks; F frozen parameters of a run with adapters, e bytes
    of the type of matmuls, or of a quantised base. c copies of the frozen base: one for each data rank, or with ZeRO-3
    for each replica.
    Ignored: copies of the trained parameters, uneven stages, and that experts alone are partitioned over ep.
    """
    layout, spec = config.layout.layout(), config.spec()
    trained = spec.n_trained_parameters
    frozen_bytes = spec.frozen_bytes(DTYPES[config.precision.compute].itemsize)
    parts = layout.tp * layout.pp * layout.ep  # ep may use ranks of tp
    copies = layout.dp_replicate if layout.zero == 3 else max(1, layout.world_size // parts)
    return (trained_bytes * trained + frozen_bytes * copies) / layout.world_size


def peak_flops_per_s(device: torch.device, compute_dtype: torch.dtype, tf32: bool = False) -> float | None:
    """Return the dense peak of a device in FLOP/s, or None if unknown; never the peak of another device."""
    if device.type != "cuda":
        return None
    return peak_of_name(torch.cuda.get_device_name(device), compute_dtype, tf32)


def peak_of_name(name: str, compute_dtype: torch.dtype, tf32: bool = False) -> float | None:
    """Return the dense peak in FLOP/s by device name, such as `NVIDIA H200`, from `cost/hardware.toml`, or None.
    `tf32`: fp32 tensors are multiplied in TF32."""
    known = accelerator_of_name(name)
    form = "tf32" if tf32 and compute_dtype == torch.float32 else _FORMATS.get(compute_dtype)
    return None if known is None or form is None else known.flops_per_s.get(form)


def accelerator_of_name(name: str) -> Accelerator | None:
    """Return the accelerator of `cost/hardware.toml` with the peaks of the device of this name, or None."""
    words = set(name.lower().replace("-", " ").split())
    variant = words & {"pcie", "nvl", "mig"}  # slower parts, and partitions of a part, with the same name
    if "a100" in words:
        variant.discard("pcie")  # the same peaks as the SXM part
    for known in packaged_accelerators():
        known_words = set(known.name.removeprefix("rtx").split("-"))
        # Memory sizes, which distinguish two parts with the same die, do not change the peak.
        if {word for word in known_words if not re.fullmatch(r"\d+gb", word)} <= words and variant <= known_words:
            return known
    return None


def attention_kernels(config: RunConfig, device: torch.device) -> str | None:
    """Describe the kernels of a run's attention, of layers with and without a window by themselves if they differ. None
    on a CPU, where there is no choice."""
    if device.type != "cuda":
        return None
    spec = config.spec()
    windows = {spec.layer_window(layer) > 0 for layer in range(spec.n_layers) if not spec.is_linear(layer)}
    kernels = {windowed: _attention_kernel(config, device, windowed=windowed) for windowed in sorted(windows)}
    if len(set(kernels.values())) < 2:
        return next(iter(kernels.values()), None)
    return f"{kernels[False]}; in layers with a window {kernels[True]}"


def _attention_kernel(config: RunConfig, device: torch.device, *, windowed: bool) -> str:
    """Return the kernel of layers with or without a window, or why their scores are in memory."""
    layout, spec, dtype = config.layout.layout(), config.spec(), DTYPES[config.precision.compute]
    refused = scores_in_rows(
        gpu=True,
        element_bytes=dtype.itemsize,
        width=spec.qk_dim,
        softcap=spec.attention_softcap > 0,
        sinks=spec.attention_sinks,
        windows=windowed,
        cp=layout.cp_ring,
    )
    if refused:
        wide = "fp64" if dtype == torch.float64 else "fp32"
        return f"some rows at a time, with scores in {wide}: {refused}"
    if spec.attention_softcap:
        return "FlexAttention"
    in_pieces = windowed or spec.attention_sinks or layout.cp_ring > 1
    of_documents = config.data.attention == "document" and refuses_flash(dtype.itemsize, spec.qk_dim) is None
    return _ATTENTION[SDPBackend.FLASH_ATTENTION] if in_pieces or of_documents else _selected(config, device, dtype)


def _selected(config: RunConfig, device: torch.device, dtype: torch.dtype) -> str:
    """Return the kernel that PyTorch selects for plain causal attention."""
    layout, spec = config.layout.layout(), config.spec()
    equal = needs_equal_heads(gpu=True, element_bytes=dtype.itemsize, width=spec.qk_dim)
    shards = layout.tp * layout.cp_ulysses
    n_heads, n_kv_heads = (max(1, n // shards) for n in (spec.n_heads, spec.n_heads if equal else spec.n_kv_heads))
    q, k, v = (
        torch.empty(1, n, 128, spec.qk_dim, device=device, dtype=dtype, requires_grad=True)
        for n in (n_heads, n_kv_heads, n_kv_heads)
    )
    choice = fused_attention_choice(q, k, v, None, 0.0, True, enable_gqa=n_heads != n_kv_heads)
    return _ATTENTION[SDPBackend(choice)]


def peak_memory_bytes(device: torch.device) -> int:
    """Return the peak memory of this rank in bytes: of the GPU's allocator, or resident in the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    usage = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return usage if sys.platform == "darwin" else usage * 1024


def configure_malloc() -> None:
    """Let the C library keep memory freed by CPU tensors, except blocks of `MAPPED_BYTES` or more, which it maps
    separately.

    Memory returned to the system is faulted in and zeroed again in each step. If all tensors' memory is returned, a 14M
    model has 222,000 page faults, and ZeRO-1 takes half as many CPU-seconds again. But kept memory is reused poorly:
    PyTorch aligns blocks to 64 bytes, for which glibc searches for a hole that is 96 bytes larger (its bug 14581). So a
    block does not fit where a block of the same size was, and splits a larger hole, such as one left by FSDP2's
    buffers. Does nothing with another C library.
    """
    if not sys.platform.startswith("linux"):
        return
    trim_threshold, mmap_threshold = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of malloc.h
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(mmap_threshold, MAPPED_BYTES)
        mallopt(trim_threshold, 2**31 - 1)
