"""Finds private names of PyTorch in source text: names of which a part begins with one underscore."""

import ast
import functools
import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from shardwright.system.torch_private import FSDPParam, FSDPParamGroup

PUBLIC_CLASSES = (
    nn.Module,
    Tensor,
    DTensor,
    FSDPModule,
    torch.UntypedStorage,
    torch.optim.Optimizer,
    TorchFunctionMode,
)
"""Our own classes may use the names of their private attributes for other things, but on `self` alone."""
PRIVATE_CLASSES = (FSDPParam, FSDPParamGroup)
NOT_OF_TORCH = {"_asdict", "_config", "_current_frames", "_exit", "_fields", "_getframe", "_replace"}
NOT_OF_TORCH |= {"_forkserver", "_forkserver_pid"}
NOT_OF_TORCH |= {"_grid", "_take_model_step"}
NOT_OF_TORCH |= {"_set_main_param_and_optimizer_states", "_create_expert_and_data_parallel"}
"""Of named tuples, os, sys and multiprocessing, of DeepSpeed and of Megatron Core."""
BY_NAME = ("getattr", "hasattr", "setattr")
"""Functions that take the name of an attribute as their second argument."""


Nodes = Sequence[ast.AST]
"""The nodes of a file's syntax tree, the module first: a walk of all files takes longer than what is looked for."""


class Use(NamedTuple):
    """A private name in a file. `path` begins with a module that can be imported, or is one attribute of an object."""

    line: int
    path: str


def is_private(name: str) -> bool:
    """Whether a name begins with one underscore, and has more than that."""
    return name.startswith("_") and not name.startswith("__") and name != "_"


def own_names(files: Iterable[Nodes]) -> frozenset[str]:
    """Private names that these files define: functions, classes, variables and attributes of `self`."""
    names: set[str] = set()
    for node in (node for nodes in files for node in nodes):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_self(node.value):
            names.add(node.attr)
    return frozenset(filter(is_private, names))


@functools.cache
def _names_of_public_classes(own: frozenset[str]) -> set[str]:
    return {name for name in own if any(hasattr(each, name) for each in PUBLIC_CLASSES)}


def private_uses(nodes: Nodes, own: frozenset[str]) -> Iterator[Use]:
    """The private names of PyTorch that a file uses. `own`: private names that the package defines."""
    roots = dict(_imported(nodes))
    shared = _names_of_public_classes(own)
    for node in nodes[0].body:  # `aten = torch.ops.aten`
        if isinstance(node, ast.Assign) and (path := _path(node.value, roots)):
            roots |= {target.id: path for target in node.targets if isinstance(target, ast.Name)}
    for node in nodes:
        if isinstance(node, ast.ImportFrom | ast.Import):
            for path in dict(_imported([node])).values():
                if path.split(".")[0] == "torch" and any(map(is_private, path.split("."))):
                    yield Use(node.lineno, path)
        elif isinstance(node, ast.Attribute) and is_private(node.attr):
            path = _path(node, roots)
            if path.startswith("torch."):
                yield Use(node.lineno, path)
            elif node.attr not in NOT_OF_TORCH:
                ours = node.attr in own and (node.attr not in shared or _is_self(node.value))
                if not ours and _path(node, roots).split(".")[0] != "shardwright":
                    yield Use(node.lineno, node.attr)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in BY_NAME:
            name = node.args[1]
            if isinstance(name, ast.Constant) and is_private(str(name.value)) and not _is_self(node.args[0]):
                yield Use(node.lineno, f"{name.value}")
        elif isinstance(node, ast.ClassDef) and any(_path(base, roots).startswith("torch.") for base in node.bases):
            theirs = [_resolved(_path(base, roots)) for base in node.bases if _path(base, roots).startswith("torch.")]
            for method in (each for each in node.body if isinstance(each, ast.FunctionDef)):
                if is_private(method.name) and any(hasattr(base, method.name) for base in theirs):
                    yield Use(method.lineno, method.name)


def uses_of_private_classes(files: Mapping[Path, Nodes]) -> Iterator[tuple[Path, Use]]:
    """The attributes in these files that FSDP2's private classes have, and neither a public class of PyTorch nor a
    class of these files."""
    own = {name for nodes in files.values() for name in _defined_names(nodes)}
    theirs = {name for made in PRIVATE_CLASSES for name in _defined_names(parsed(inspect.getsource(made)))}
    theirs -= own | {name for name in theirs if any(hasattr(each, name) for each in PUBLIC_CLASSES)}
    for file, nodes in files.items():
        for node in nodes:
            if isinstance(node, ast.Attribute) and node.attr in theirs:
                yield file, Use(node.lineno, node.attr)


def _defined_names(nodes: Nodes) -> Iterator[str]:
    """Names of functions, and of the methods, fields and attributes of classes."""
    for node in nodes:
        match node:
            case ast.FunctionDef(name) | ast.AnnAssign(ast.Name(name)):
                yield name
            case ast.Attribute(owner, name, ast.Store()) if _is_self(owner):
                yield name


def missing(nodes: Nodes, owners: dict[str, Any]) -> list[str]:
    """The private names of PyTorch in a file that the installed version lacks. `owners`: for attributes of objects, an
    object that should have it."""
    return sorted({path for _, path in private_uses(nodes, frozenset()) if not _exists(path, owners)})


def parsed(source: str) -> Nodes:
    """The nodes of a file with this text."""
    return list(ast.walk(ast.parse(source)))


def _exists(path: str, owners: dict[str, Any]) -> bool:
    try:
        if "." in path:
            _resolved(path)
        else:
            declared = getattr(type(owners[path]), "__annotations__", {})
            return path in declared or hasattr(owners[path], path)
    except (AttributeError, ImportError, KeyError):
        return False
    return True


def _resolved(path: str) -> Any:
    """What a path names: `torch.nn.Module` -> the class."""
    parts = path.split(".")
    value: Any = import_module(parts[0])
    for n, part in enumerate(parts[1:], start=2):
        if not hasattr(value, part):
            import_module(".".join(parts[:n]))
        value = getattr(value, part)
    return value


def _imported(nodes: Nodes) -> Iterator[tuple[str, str]]:
    """Names that a file imports, with their paths."""
    for node in nodes:
        if isinstance(node, ast.Import):
            for each in node.names:
                yield (each.asname, each.name) if each.asname else (each.name.split(".")[0], each.name.split(".")[0])
                if not each.asname:
                    yield each.name, each.name
        elif isinstance(node, ast.ImportFrom) and node.module:
            for each in node.names:
                yield each.asname or each.name, f"{node.module}.{each.name}"


def _path(node: ast.expr, roots: dict[str, str]) -> str:
    """`torch.ops.aten.mm` of that expression, with the root as it was imported; empty if it is no such path."""
    if isinstance(node, ast.Name):
        return roots.get(node.id, "")
    if isinstance(node, ast.Attribute):
        base = _path(node.value, roots)
        return f"{base}.{node.attr}" if base else ""
    return ""


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")
