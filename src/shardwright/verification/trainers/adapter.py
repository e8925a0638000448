"""The objects that a Trainer class receives and returns, and the import of a user's file with such a class.

Shapes: B sequences of this rank, T tokens.
"""

import importlib
import inspect
import linecache
import re
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardwright.model.spec import ModelSpec
from shardwright.system import extensions
from shardwright.system.errors import ConfigError, InputError, near_path, nearest
from shardwright.system.files import read_bytes

METHODS = {
    "__init__": ("spec", "world"),
    "load": ("weights",),
    "step": ("batch",),
    "gradients": (),
    "parameters": (),
}
"""The methods that a Trainer class needs, each with its arguments after self."""
ADAPTERS = (
    "accelerate",
    "accelerate_deepspeed",
    "deepspeed",
    "megatron",
    "shardwright",
    "torch",
    "torchtitan",
    "transformers",
)
"""The adapters of this folder, by name."""
PACKAGES = {"megatron": "megatron-core"}
"""The package of a module of another name."""


class MissingOptionError(InputError, KeyError):
    """An option that a trainer reads without a default is not set."""


class Options(Mapping[str, Any]):
    """The options of `--set`, which remember the names that a trainer has read."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = dict(values)
        self.names_read: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self.names_read.add(name)
        if name not in self._values:
            raise MissingOptionError(f"the trainer needs the option {name}: --set {name}=VALUE")
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def check_read(self, axes: Iterable[str]) -> None:
        """Raise InputError for options that the trainer has never read. `axes`: the axes that it has."""
        unread = [name for name in self if name not in self.names_read]
        if unread:
            name = unread[0]
            valid = ", ".join([*axes, *sorted(self.names_read - {name})])
            raise InputError(
                f"--set {name}={self._values[name]}: the trainer reads no such axis or option; valid: {valid}"
            )


@dataclass(frozen=True)
class World:
    """The ranks that a trainer runs on, as seen by one of them."""

    rank: int
    size: int
    axes: dict[str, int]
    """The degree of each axis in `Trainer.AXES`, in order; their product is `size`."""
    options: Options
    """The other options of `--set`, a mapping: `world.options.get("name", default)`."""
    dtype: torch.dtype
    """The type of parameters; also PyTorch's default type while the trainer runs."""
    seed: int = 0

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group of all ranks (gloo)."""
        assert dist.group.WORLD is not None
        return dist.group.WORLD

    @property
    def device(self) -> torch.device:
        """The device of parameters and batches: the CPU."""
        return torch.device("cpu")

    def mesh(self) -> DeviceMesh:
        """Return a device mesh with a dim for each axis, with the names of the axes."""
        return init_device_mesh("cpu", tuple(self.axes.values()), mesh_dim_names=tuple(self.axes))


@dataclass
class StepBatch:
    """A rank's part of the batch of one optimizer step."""

    step: int
    """The number of the step, from 0."""
    micro_batches: list[tuple[Tensor, Tensor]]
    """Tokens and targets, each (B, T), of each micro-batch of the rank. A target of -100 is not counted; every sequence
    has at least one target that is counted."""
    n_targets: int
    """The number of targets that are counted in the global batch: all ranks and all micro-batches."""
    learning_rate: float
    largest_norm: float
    names_read: set[str] = field(default_factory=set)
    """The names that the trainer has read: `lr`, `clip_norm`."""

    @property
    def lr(self) -> float:
        """The learning rate of the step."""
        self.names_read.add("lr")
        return self.learning_rate

    @property
    def clip_norm(self) -> float:
        """The norm that the gradients of the step are clipped to; infinite if they are not clipped."""
        self.names_read.add("clip_norm")
        return self.largest_norm

    @property
    def tokens(self) -> Tensor:
        """The tokens of all micro-batches of the rank."""
        return torch.cat([tokens_BT for tokens_BT, _ in self.micro_batches])

    @property
    def targets(self) -> Tensor:
        """The targets of all micro-batches of the rank."""
        return torch.cat([targets_BT for _, targets_BT in self.micro_batches])


def axes_of(name: str) -> tuple[str, ...]:
    """Return the axes of the trainer `name`; `dp` alone if its class has no AXES. Runs on a rank."""
    axes = getattr(trainer_class(name), "AXES", ("dp",))
    if isinstance(axes, str) or not axes or not all(isinstance(axis, str) for axis in axes):
        raise InputError(f'{name}: AXES={axes!r}; a tuple of the names of axes is needed, such as ("dp", "tp")')
    if twice := [axis for axis in axes if list(axes).count(axis) > 1]:
        raise InputError(f"{name}: AXES={axes!r}; {twice[0]} occurs more than once")
    return tuple(axes)


def invalid_degrees(name: str, spec: ModelSpec, degrees: list[dict[str, int]], options: dict[str, Any]) -> list[str]:
    """Return for each set of degrees why the trainer `name` cannot have them; "" if it can, or if its class has no
    method `problem`. Runs on a rank."""
    problem = getattr(trainer_class(name), "problem", None)
    return ["" if problem is None else problem(spec, axes, Options(options)) or "" for axes in degrees]


def resolved(trainer: str | Path | type[Any]) -> str:
    """Return the absolute path of a trainer's file, or the name of an adapter of this folder. Raises InputError if
    there is neither. A class is found by its file and the name `Trainer`."""
    if isinstance(trainer, type) and getattr(sys.modules.get(trainer.__module__), "Trainer", None) is not trainer:
        raise InputError(
            f"class {trainer.__name__}: a class is found by its file and the name Trainer; name it Trainer, in a file "
            f"of its own"
        )
    name = inspect.getfile(trainer) if isinstance(trainer, type) else str(trainer)
    if name in ADAPTERS:
        return name
    if not name.endswith(".py"):
        raise InputError(f"trainer {name!r}: a Python file (.py) or an adapter is needed; {nearest(name, ADAPTERS)}")
    try:
        read_bytes(Path(name))
    except FileNotFoundError:
        raise InputError(f"trainer {name}: no such file{near_path(name, '*.py')}") from None
    except OSError as error:
        raise InputError(f"trainer {name}: cannot be read: {error.strerror}") from None
    return extensions.resolve(name)


def trainer_class(name: str) -> type[Any]:
    """Return the class `Trainer` of a file or of an adapter (`resolved`). Raises InputError if the file cannot be
    imported, or if its class has not the needed methods."""
    if name in ADAPTERS:
        try:
            module = importlib.import_module(f"shardwright.verification.trainers.{name}")
        except ModuleNotFoundError as error:
            raise _not_installed(name, error) from None
        except Exception as error:  # the code of the installed package
            reason = (str(error).splitlines() or [""])[0]
            raise environment_error(name, error) or InputError(
                f"--trainer {name}: the installed package cannot be imported ({type(error).__name__}: {reason}); set "
                f"what it asks for, or install another version"
            ) from None
    else:
        sys.path.insert(0, str(Path(name).parent))  # the file imports its neighbours, as it does when it is run
        try:
            extensions.load([name])
        except ConfigError as error:
            cause = error.__cause__
            raise (None if cause is None else environment_error(name, cause)) or InputError(
                *(problem.replace("extension", "trainer", 1) for problem in error.problems)
            ) from None
        module = sys.modules[extensions.module_name(name)]
    kind = getattr(module, "Trainer", None)
    if not isinstance(kind, type):
        classes = [key for key, value in vars(module).items() if isinstance(value, type)]
        hint = f"; it has {', '.join(classes)}" if classes else ""
        raise InputError(f"{name}: a class named Trainer is needed{hint}")
    if missing := [method for method in METHODS if not callable(getattr(kind, method, None))]:
        raise InputError(f"{name}: class Trainer has no method {' and no '.join(missing)}; it needs {tuple(METHODS)}")
    for method, arguments in METHODS.items():
        try:
            inspect.signature(getattr(kind, method)).bind("self", *arguments)
        except TypeError as error:
            raise InputError(
                f"{name}: class Trainer is called as {method}({', '.join(('self', *arguments))}), and its method takes "
                f"other arguments: {error}"
            ) from None
    return kind


def _not_installed(name: str, error: ModuleNotFoundError) -> InputError:
    """Return one sentence about a package that an adapter needs, with the command that installs it."""
    module = (error.name or name).partition(".")[0]
    return InputError(f"--trainer {name}: {error}; install it: pip install {PACKAGES.get(module, module)}")


_NEEDS_CUDA = re.compile(r"\b(cuda|nvidia|nccl|hip|gpus?|dummy base class)\b", re.IGNORECASE)
_REMEDIES = {
    "initialize the default process group twice": "the process group is made before the trainer; leave out "
    "init_process_group",
    "daemonic processes are not allowed to have children": "a rank starts no processes; num_workers=0 lets a "
    "DataLoader read in the rank",
}
"""What to do about errors of PyTorch and Python whose text contains the key."""


def environment_error(name: str, error: BaseException) -> InputError | None:
    """Return one sentence about an error whose cause is a missing module or a missing accelerator; None for any other
    error."""
    if name in ADAPTERS and isinstance(error, ModuleNotFoundError):
        return _not_installed(name, error)
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if Path(frame.filename).parent == Path(name).parent]
    at = own[-1] if own else frames[-1]
    where = f"trainer {at.filename}, line {at.lineno}"
    if isinstance(error, ImportError) and not isinstance(error, ModuleNotFoundError):
        return InputError(f"{where}: {error}; the installed version has no such name")
    if isinstance(error, ModuleNotFoundError):
        line = linecache.getline(at.filename, at.lineno or 0).strip()
        names = line.partition(" import ")[2].strip("( ") if line.startswith("from ") else ""
        offer = f"that defines {names}" if names else "with the names that the trainer uses"
        module = error.name or "a module"
        path = module.replace(".", "/") + ".py"
        return InputError(
            f"{where}: {module} cannot be imported ({error}); install it, or put a stand-in {path} {offer}, in "
            f"plain PyTorch for the CPU, next to the trainer"
        )
    if isinstance(error, AttributeError) and isinstance(error.obj, StepBatch | World | ModelSpec):
        valid = [name for name in dir(error.obj) if not name.startswith("_")]
        kind = {StepBatch: "batch", World: "world"}.get(type(error.obj), "spec")
        return InputError(f"{where}: {kind} has no {error.name}; {nearest(error.name or '', valid)}")
    for sign, remedy in _REMEDIES.items():
        if sign in str(error):
            return InputError(f"{where}: {remedy}")
    # PyTorch ends such a sentence with a list of all backends, CUDA among them.
    reason = (str(error).splitlines() or [""])[0].partition(" This could be because")[0]
    if isinstance(error, RuntimeError | AssertionError | NotImplementedError) and _NEEDS_CUDA.search(reason):
        return InputError(
            f"{where}: the trainer needs an accelerator ({reason}); verify runs on CPUs with gloo: take world.device "
            f"and world.group instead of CUDA and NCCL"
        )
    return None
