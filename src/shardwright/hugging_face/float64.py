"""Models of `transformers` in float64: norms, angles and routing too, which the library computes in float32."""

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class Float64(TorchFunctionMode):
    """In the block float64 replaces float32 and `Tensor.bfloat16` wherever code names them. Rounding would hide small
    errors of a model in float64. `Tensor.backward` runs without the mode, so a recomputed block has to enter it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        wide = {torch.float32: torch.float64}
        if func in (Tensor.float, Tensor.bfloat16):
            func = Tensor.double
        args = [wide.get(value, value) if isinstance(value, torch.dtype) else value for value in args]
        named = {key: wide.get(value, value) if key == "dtype" else value for key, value in (kwargs or {}).items()}
        return func(*args, **named)
