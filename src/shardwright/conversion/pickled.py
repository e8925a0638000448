"""Files of `torch.save` of other systems, read without constructing a class of theirs."""

import pickle
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from shardwright.system.errors import CheckpointError, DamagedError
from shardwright.system.files import inside, open_regular

StandIn = Callable[..., Any] | tuple[Callable[..., Any], str]
"""The class or function that is called, with the name in a file that it stands for."""


class InertObject:
    """An object of a class of another system: its arguments and attributes, without the code of the class."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self.__dict__.update(state)


def load_pickled(path: Path, classes: Sequence[StandIn], system: str) -> Any:
    """Return the content of a file, tensors mapped. `classes`: the classes that are read besides PyTorch's own; they
    are of `system`.

    Raises CheckpointError if it needs other classes, DamagedError if it is damaged or a link out of its folder.
    """
    path = inside(path.parent, path.name, DamagedError)
    try:
        open_regular(path).close()
        with torch.serialization.safe_globals(list(classes)):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except FileNotFoundError:
        raise DamagedError(f"{path} is missing: copy the files of all ranks") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    except pickle.UnpicklingError as error:
        needed = next(
            (line for line in str(error).splitlines() if "GLOBAL" in line or "nsupported" in line), str(error)
        )
        raise CheckpointError(
            f"{path} needs other classes than {system}'s and PyTorch's, which are not constructed, because they can "
            f"run any code; nothing of it has been run: {needed.strip()[:200]}"
        ) from None
    except Exception as error:  # a damaged pickle raises errors of any type
        raise DamagedError(f"{path} is damaged: {type(error).__name__}: {str(error).strip()[:200]}") from None
