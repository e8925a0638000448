"""An extension of run files: faults in a rank that `chaos.py` asks for, by files in the folder CHAOS_FOLDER.

rank-R.nan     the loss of its next try of a step is not a number, once
rank-R.flip    one bit of its weights changes: the content is a number that chooses which
rank-R.slow    its steps take so many seconds longer, as long as the file is there
"""

import math
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

from shardwright.parallel.norm import local_part
from shardwright.training.forward_backward import ForwardBackward, LossParts

FOLDER = Path(os.environ["CHAOS_FOLDER"])
_forward_backward = ForwardBackward.forward_backward


def _asked(kind: str, take: bool) -> str | None:
    """What the file of a fault of this rank holds, if it is there; `take`: it is removed."""
    path = FOLDER / f"rank-{dist.get_rank()}.{kind}"
    try:
        content = path.read_text()
        if take:
            path.unlink()
    except FileNotFoundError:
        return None
    return content


def flip_bit(tensors: list[torch.Tensor], number: int) -> None:
    """Flip bit `number`, counted over all bits of float32 tensors, modulo their number."""
    n_bits = 32 * sum(tensor.numel() for tensor in tensors)
    number %= n_bits
    for tensor in tensors:
        if number < 32 * tensor.numel():
            bit = number % 32
            mask = torch.tensor(-(2**31) if bit == 31 else 1 << bit, dtype=torch.int32)
            tensor.view(torch.int32).flatten()[number // 32] ^= mask
            return
        number -= 32 * tensor.numel()


def _with_faults(self: ForwardBackward, batch, step: int) -> LossParts:  # type: ignore[no-untyped-def]
    if (slow := _asked("slow", take=False)) is not None:
        time.sleep(float(slow or 0))
    if (flip := _asked("flip", take=True)) is not None:
        with torch.no_grad():
            flip_bit([local_part(each).detach() for each in self.model.named_parameters.values()], int(flip))
    parts = _forward_backward(self, batch, step)
    if _asked("nan", take=True) is not None:
        return parts._replace(loss_part=parts.loss_part * math.nan)
    return parts


ForwardBackward.forward_backward = _with_faults  # type: ignore[method-assign]
