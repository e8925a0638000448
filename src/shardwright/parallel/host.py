"""The memory of the host of a device."""

import torch


def pins(device: torch.device) -> bool:
    """Whether memory of the host that is copied to and from a device is pinned: a GPU then copies on its own."""
    return device.type == "cuda" and torch.cuda.is_available()
