"""The module of the model that an operation belongs to, in the forward and the backward pass, and the running line."""

import sys
import sysconfig
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from shardwright.parallel import observer
from shardwright.system import torch_private
from shardwright.system.torch_private import next_node_number, node_number


class ModuleLocator:
    """The running module, by its name in the whole model.

    In a forward pass this is the innermost module whose `forward` has not returned. In a backward pass it is the module
    whose forward pass created the current autograd node: PyTorch numbers nodes in the order of creation.
    """

    def __init__(self, parts: Iterable[nn.Module]) -> None:
        self._names: Mapping[nn.Module, str] = {
            module: name or "model" for part in parts for name, module in part.named_modules()
        }
        self._stack: list[str] = []
        self._starts: list[int] = []
        """The number of the first node after each change of the running module."""
        self._modules: list[str] = []
        self._handles: list[Any] = []

    def __enter__(self) -> "ModuleLocator":
        self._handles = [
            register_module_forward_pre_hook(self._entered),
            register_module_forward_hook(self._left, always_call=True),
        ]
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def restart(self) -> None:
        """Forget the nodes of earlier steps."""
        self._starts.clear()
        self._modules.clear()

    @property
    def module(self) -> str:
        """The running module; "" outside of all modules."""
        if self._stack:
            return self._stack[-1]
        number = node_number()
        if number is None or not self._starts:
            return ""
        at = bisect_right(self._starts, number) - 1
        return self._modules[at] if at >= 0 else ""

    def _entered(self, module: nn.Module, inputs: Any) -> None:
        self._stack.append(self._names.get(module, self._stack[-1] if self._stack else ""))
        self._note()

    def _left(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        self._stack.pop()
        self._note()

    def _note(self) -> None:
        number = next_node_number()
        now = self._stack[-1] if self._stack else "loss"
        if self._starts and self._starts[-1] == number:
            self._modules[-1] = now
        else:
            self._starts.append(number)
            self._modules.append(now)


_HERE = Path(__file__).parent
_PACKAGE = _HERE.parent
_PASSED_THROUGH = (Path(torch_private.__file__), Path(observer.__file__))
"""Files whose functions stand for PyTorch's own, or pass an event on to this package."""
_LIBRARIES = (Path(torch.__file__).parent, Path(sysconfig.get_path("stdlib")))


def running_line() -> str:
    """Return the innermost running line outside of PyTorch and Python's standard library, as `model/norm.py:12`, or
    ""."""
    frame = sys._getframe(1)
    while frame is not None:
        if place := _program_file(frame.f_code.co_filename):
            return f"{place}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return ""


@cache
def _program_file(file: str) -> str:
    """Return the name of a file of the program, relative to this package if it is inside; "" for other files."""
    path = Path(file)
    if path.is_relative_to(_PACKAGE):
        return "" if path.is_relative_to(_HERE) or path in _PASSED_THROUGH else str(path.relative_to(_PACKAGE))
    return "" if file.startswith("<") or any(path.is_relative_to(library) for library in _LIBRARIES) else file
