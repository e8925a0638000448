"""Host memory that a device reads and writes."""

import torch


def pins(device: torch.device) -> bool:
    """Return whether host memory for copies to and from `device` is pinned, so that a GPU copies without the CPU."""
    return device.type == "cuda" and torch.cuda.is_available()
