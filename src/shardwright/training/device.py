"""What is known of the device a rank runs on: its peak rate, for MFU, and the memory in use."""

import ctypes
import resource
import sys

import torch

# Dense peak rates in FLOP/s at bf16 and fp32 (without sparsity; fp32 outside tensor cores), by a part of the device's
# name. Sources: NVIDIA data sheets A100 (2021), H100 (2023), H200 (2023), L40S (2023); AMD data sheet MI300X (2023).
_PEAKS: dict[str, dict[torch.dtype, float]] = {
    "A100": {torch.bfloat16: 312e12, torch.float32: 19.5e12},
    "A100 PCIE": {torch.bfloat16: 312e12, torch.float32: 19.5e12},
    "H100 PCIe": {torch.bfloat16: 756e12, torch.float32: 51e12},
    "H100": {torch.bfloat16: 989e12, torch.float32: 67e12},
    "H200": {torch.bfloat16: 989e12, torch.float32: 67e12},
    "H800": {torch.bfloat16: 989e12, torch.float32: 67e12},
    "L40S": {torch.bfloat16: 362e12, torch.float32: 91.6e12},
    "MI300X": {torch.bfloat16: 1307e12, torch.float32: 163.4e12},
}


def peak_flops_per_s(device: torch.device, compute_dtype: torch.dtype) -> float | None:
    """The dense peak of a device in FLOP/s, or None where it is not known; never another device's."""
    if device.type != "cuda":
        return None
    return peak_of_name(torch.cuda.get_device_name(device), compute_dtype)


def peak_of_name(name: str, compute_dtype: torch.dtype) -> float | None:
    """The same by the device's name, such as `NVIDIA H200`; that of fp16 is that of bf16."""
    compute_dtype = torch.bfloat16 if compute_dtype == torch.float16 else compute_dtype
    words = set(name.replace("-", " ").split())
    variant = words & {"PCIe", "PCIE", "NVL", "MIG"}  # slower parts, and parts of a part, of the same name
    for known, peaks in _PEAKS.items():
        if set(known.split()) <= words and variant <= set(known.split()):
            return peaks.get(compute_dtype)
    return None


def peak_memory_bytes(device: torch.device) -> int:
    """The most memory this rank has used: of the GPU's allocator, or resident in the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    usage = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return usage if sys.platform == "darwin" else usage * 1024


def keep_freed_memory() -> None:
    """Have the C library keep what tensors on the CPU free, instead of giving it back and faulting it in again.

    Every step allocates the same activations. By default glibc returns large blocks to the kernel at once, and each
    of their pages is zeroed anew in the next step: 4 in 5 page faults of the benchmark's run on one process, and 2 to
    3 % of its CPU-seconds. Does nothing where the C library is another.
    """
    if not sys.platform.startswith("linux"):
        return
    trim_threshold, mmap_threshold = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of malloc.h
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(mmap_threshold, 2**30) or mallopt(mmap_threshold, 2**25)  # older versions take no more
        mallopt(trim_threshold, 2**31 - 1)
