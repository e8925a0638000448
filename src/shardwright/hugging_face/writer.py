"""Writes safetensors files tensor by tensor, and the weights of a folder of `transformers`, in files of a given size.

Only one tensor is in memory at a time. The same tensors give the same bytes.
"""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from shardwright.hugging_face.files import DTYPES, INDEX, LENGTH, WHOLE
from shardwright.hugging_face.table import FileTensor
from shardwright.system.units import in_groups

Read = Callable[[str, Sequence[int], Sequence[int]], Tensor]
"""(parameter, offsets, shape) -> that box of the parameter."""
FILE_METADATA = {"format": "pt"}
"""Metadata of each file, as in files of `transformers`: its tensors are torch's."""
_NAMES = {torch_name: name for name, torch_name in DTYPES.items()} | {"uint8": "U8"}
"""Type in torch -> its name in a safetensors file; uint8 only for optimizer states in checkpoints."""


@dataclass(frozen=True)
class TensorToWrite:
    """A tensor to write; `dtype` by torch's name."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def n_bytes(self) -> int:
        return torch.Size(self.shape).numel() * getattr(torch, self.dtype).itemsize


def write_safetensors(
    path: Path,
    entries: Sequence[TensorToWrite],
    make: Callable[[TensorToWrite], Tensor],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write a safetensors file; `make` returns the tensor of an entry when it is written. `metadata`: more of it."""
    header: dict[str, object] = {"__metadata__": FILE_METADATA | dict(metadata or {})}
    begin = 0
    for entry in entries:
        offsets = [begin, begin := begin + entry.n_bytes]
        header[entry.name] = {"dtype": _NAMES[entry.dtype], "shape": list(entry.shape), "data_offsets": offsets}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the tensors begin at a multiple of 8, as the library writes them
    with path.open("wb") as file:
        file.write(LENGTH.pack(len(text)) + text)
        for entry in entries:
            tensor = make(entry).contiguous()
            assert (tuple(tensor.shape), tensor.dtype) == (entry.shape, getattr(torch, entry.dtype)), entry
            file.write(tensor.reshape(-1).view(torch.uint8).numpy().data)


def write_weights(
    folder: Path,
    tensors: Iterable[FileTensor],
    dtypes: Mapping[str, str],
    read: Read,
    max_shard_bytes: int,
    seen: Callable[[str, Tensor], None],
) -> int:
    """Write tensors under `transformers`' names, in one file or in several with an index; return their bytes.

    `dtypes`: name of the tensor -> its type in the file. A file has at most `max_shard_bytes`, or one tensor. Calls
    `seen` with the name and the values of each tensor.
    """
    named = {tensor.name: tensor for tensor in tensors}
    entries = [TensorToWrite(name, dtypes[name], tensor.shape) for name, tensor in sorted(named.items())]
    files = list(in_groups(entries, lambda entry: entry.n_bytes, max_shard_bytes))
    names = [WHOLE]
    if len(files) > 1:
        stem = WHOLE.removesuffix(".safetensors")
        names = [f"{stem}-{n:05d}-of-{len(files):05d}.safetensors" for n in range(1, len(files) + 1)]

    def make(entry: TensorToWrite) -> Tensor:
        tensor = tensor_of_file(named[entry.name], read, getattr(torch, entry.dtype))
        seen(entry.name, tensor)
        return tensor

    for name, inside in zip(names, files, strict=True):
        write_safetensors(folder / name, inside, make)
    total = sum(entry.n_bytes for entry in entries)
    if len(files) > 1:
        where = {entry.name: name for name, inside in zip(names, files, strict=True) for entry in inside}
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    return total


def tensor_of_file(tensor: FileTensor, read: Read, dtype: torch.dtype) -> Tensor:
    """Return a tensor as a file of `transformers` has it, from our parameters."""
    dim, stack = tensor.out_dim, []
    plain = [math.prod(tensor.shape)] if tensor.folded else list(tensor.shape)
    if tensor.transposed:
        plain[-2:] = plain[:-3:-1]
    for part in tensor.parts:
        shape = (*plain[:dim], part.n_rows, *plain[dim + 1 :])
        offsets = (0,) * len(shape)
        if part.expert is None:
            stack.append(read(part.name, offsets, shape).to(dtype))
        else:
            stack.append(read(part.name, (part.expert, *offsets), (1, *shape)).squeeze(0).to(dtype))
    whole = torch.cat(stack, dim) if len(stack) > 1 else stack[0]
    if tensor.order is not None:
        whole = torch.empty_like(whole).index_copy_(dim, torch.tensor(tensor.order), whole)
    return whole.view(tensor.shape) if tensor.folded else whole.mT if tensor.transposed else whole
