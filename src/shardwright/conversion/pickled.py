"""Files of `torch.save` of other systems, read without constructing a class of theirs."""

import io
import pickle
import re
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from shardwright.system.errors import CheckpointError, DamagedError
from shardwright.system.files import inside, open_regular
from shardwright.system.units import MiB

StandIn = Callable[..., Any] | tuple[Callable[..., Any], str]
"""The class or function that is called, with the name in a file that it stands for."""


class InertObject:
    """An object of a class of another system: its arguments and attributes, without the code of the class."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        self.__dict__.update(state)


def load_pickled(path: Path, classes: Sequence[StandIn], system: str) -> Any:
    """Return the content of a file, tensors mapped, after its check sums are verified. `classes`: the classes that are
    read besides PyTorch's own; they are of `system`.

    Raises CheckpointError if it needs other classes, DamagedError if it is damaged or a link out of its folder.
    """
    path = inside(path.parent, path.name, DamagedError)
    try:
        with open_regular(path) as file:
            check_sums(file, str(path))
    except FileNotFoundError:
        raise DamagedError(f"{path} is missing: copy the files of all ranks") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    return load_checked(path, str(path), classes, system)


def load_checked(source: Path | io.BytesIO, where: str, classes: Sequence[StandIn], system: str) -> Any:
    """Return the content of a file of `torch.save` whose check sums are verified. `where`: its name in errors."""
    try:
        with torch.serialization.safe_globals(list(classes)):
            content = torch.load(source, map_location="cpu", weights_only=True, mmap=isinstance(source, Path))
    except OSError as error:
        raise CheckpointError(f"{where} cannot be read: {error.strerror}") from None
    except pickle.UnpicklingError as error:
        needed = next((line for line in str(error).splitlines() if re.search("GLOBAL|class|function", line)), None)
        if needed is None:
            raise DamagedError(f"{where} is damaged: its pickle is none that torch.save writes") from None
        raise CheckpointError(
            f"{where} needs other classes than {system}'s and PyTorch's, which are not constructed, because they can "
            f"run any code; nothing of it has been run: {needed.strip()[:200]}"
        ) from None
    except Exception as error:  # a damaged pickle raises errors of any type
        reason = (str(error).strip().splitlines() or [""])[0]
        raise DamagedError(f"{where} is damaged: PyTorch cannot read it ({reason[:200]})") from None
    for tensor in _tensors_in(content):
        if tensor.layout != torch.strided or tensor.device.type != "cpu" or tensor.is_quantized or tensor.is_nested:
            kind = "quantized" if tensor.is_quantized else f"{tensor.device.type}, {tensor.layout}"
            raise CheckpointError(
                f"{where} has a tensor of {[*tensor.shape]} without plain values ({kind}); supported: dense tensors of "
                f"the CPU"
            )
    return content


def _tensors_in(content: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested containers and stand-ins."""
    seen: set[int] = set()
    rest = [content]
    while rest:
        value = rest.pop()
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, dict | list | tuple | set | InertObject) and id(value) not in seen:
            seen.add(id(value))
            parts = vars(value) if isinstance(value, InertObject) else value
            rest += parts.values() if isinstance(parts, dict) else parts


def check_sums(file: IO[bytes], where: str) -> None:
    """Verify the check sum (CRC-32) of each record of a file of `torch.save`, which PyTorch itself does not verify.

    All check sums are 0 in a file that was written with `torch.serialization.set_crc32_options(False)`; they are not
    verified. Raises DamagedError, with the first record that differs.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            records = archive.infolist()
            for record in records if any(record.CRC for record in records) else ():
                with archive.open(record) as content:
                    while content.read(MiB):
                        pass
    except OSError:
        raise
    except Exception as error:  # damaged headers raise errors of any type
        why = str(error).strip() or "a record is cut off"
        raise DamagedError(f"{where} is damaged, or is no file of torch.save since PyTorch 1.6: {why[:200]}") from None
