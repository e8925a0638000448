"""Reads boxes of our parameters from a folder of `transformers`, and only the bytes that they need."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from shardwright.hugging_face.adapter import MergedAdapter, Spans
from shardwright.hugging_face.files import (
    ADAPTER,
    MXFP4,
    ModelFolder,
    TensorInFile,
    read_folder,
    shortened,
    tensors_in_files,
)
from shardwright.hugging_face.table import FileTensor, ParameterPart, file_tensors, reasons_to_ignore
from shardwright.model.modules import rows
from shardwright.model.spec import ModelSpec
from shardwright.system.errors import CheckpointError, DamagedError
from shardwright.system.files import find_inside, open_regular

_GROUP = 32
"""Numbers with one scale in mxfp4."""
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The 16 numbers of four bits: a sign, two bits of exponent, one of mantissa (OCP Microscaling Formats 1.0)."""


def from_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return the numbers of mxfp4 in bf16: (..., groups, 16) bytes, with two numbers in each, the first in the low
    bits, and (..., groups) exponents of two, 127 more than they say -> (..., 32 groups). transformers
    computes the same bits."""
    codes = torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2)
    numbers = torch.tensor(_FP4, dtype=torch.bfloat16)[codes.int()]
    return torch.ldexp(numbers, scales.int().unsqueeze(-1) - 127).to(torch.bfloat16).flatten(-2)


class MappedTensors:
    """Tensors of files under our names: boxes of our parameters are read from the tensors of an architecture's table.

    `dtypes`, `shapes`: our parameter -> torch's name of its type in the file, and its whole shape. `in_files`: name in
    the file -> the tensor.
    """

    def __init__(
        self,
        spec: ModelSpec,
        tensors: Sequence[FileTensor],
        dtypes: Mapping[str, str],
        read_slice: Callable[[str, Spans], Tensor],
    ) -> None:
        """`dtypes`: name in the file -> torch's name of its type; `read_slice`: (name in the file, spans) -> the box of
        the tensor."""
        self._read_slice = read_slice
        self.spec, self.in_files = spec, {tensor.name: tensor for tensor in tensors}
        self._places: dict[str, list[tuple[FileTensor, ParameterPart]]] = {}
        for tensor in tensors:
            for part in tensor.parts:
                self._places.setdefault(part.name, []).append((tensor, part))
        self.dtypes = {name: dtypes[places[0][0].name] for name, places in self._places.items()}
        self.shapes = {name: rows(spec)[name].shape for name in self._places}

    def read(self, name: str, offsets: Sequence[int], shape: Sequence[int]) -> Tensor:
        """Return the box [offsets, offsets + shape) of the parameter `name`, on the CPU, in the type of the file.

        Raises DamagedError if the file is not readable.
        """
        places = self._places[name]
        if places[0][1].expert is None:
            return self._box(*places[0], offsets, shape)
        of_expert = {part.expert: (tensor, part) for tensor, part in places}
        experts = range(offsets[0], offsets[0] + shape[0])
        boxes = [self._box(*of_expert[expert], offsets[1:], shape[1:]) for expert in experts]
        return torch.stack(boxes) if boxes else torch.empty(tuple(shape), dtype=getattr(torch, self.dtypes[name]))

    def _box(self, tensor: FileTensor, part: ParameterPart, offsets: Sequence[int], shape: Sequence[int]) -> Tensor:
        """Return a box of one tensor of a file; `offsets` within the part."""
        dim = tensor.out_dim
        first, n_rows = tensor.first_row(part) + offsets[dim], shape[dim]
        spans = [(o, o + n) for o, n in zip(offsets, shape, strict=True)]
        spans[dim] = (first, first + n_rows)
        places = None if tensor.order is None else tensor.order[first : first + n_rows]
        if places is not None:
            spans[dim] = (min(places), max(places) + 1) if places else (0, 0)
        if tensor.folded:
            box = self.read_in_file(tensor.name).flatten()[slice(*spans[0])]
        elif tensor.transposed:
            box = self._read_slice(tensor.name, [*spans[:-2], spans[-1], spans[-2]]).mT
        else:
            box = self._read_slice(tensor.name, spans)
        if places is None:
            return box
        low = spans[dim][0]
        return box.index_select(dim, torch.tensor([place - low for place in places], dtype=torch.long))

    def read_in_file(self, name: str) -> Tensor:
        """Return a whole tensor by its name in the file, as it is there."""
        return self._read_slice(name, [(0, n) for n in self.in_files[name].shape])


class HuggingFaceWeights(MappedTensors):
    """The weights of a folder of `transformers` under our names.

    `spec`: the model; `dtypes`: parameter -> its type in the file, by torch's name; `left_out`: tensors of the files
    without a parameter of the model -> the reason.
    """

    def __init__(self, folder: ModelFolder) -> None:
        """Raises CheckpointError, with every problem at once: tensors missing, too many or of other shapes."""
        self.folder, self.path = folder, folder.path
        self._stored = tensors_in_files(folder.path)
        self._halves: dict[str, tuple[str, str]] = {}
        """The name of a tensor in mxfp4 -> the names of its blocks and of its scales."""
        expected = [tensor for tensor in file_tensors(folder.architecture, folder.spec) if not tensor.copy]
        self._tensors = [self._as_stored(tensor) for tensor in _named_as_stored(expected, self._stored, folder)]
        known = {tensor.name for tensor in self._tensors} | {*chain(*self._halves.values())}
        reasons = reasons_to_ignore(folder.architecture, folder.spec, self._stored.keys() - known)
        self._raise_problems(reasons)
        self.left_out = {name: reason for name, reason in sorted(reasons.items()) if reason is not None}
        dtypes = {name: stored.dtype for name, stored in self._stored.items()} | dict.fromkeys(self._halves, "bfloat16")
        super().__init__(folder.spec, self._tensors, dtypes, self._slice)
        self._open: dict[Path, safe_open] = {}
        self._adapter = self._read_adapter()

    @property
    def quantised(self) -> bool:
        """Return whether some tensors are in mxfp4."""
        return bool(self._halves)

    def _read_adapter(self) -> MergedAdapter | None:
        """Return the LoRA adapter in the folder, which `transformers` with peft adds to the weights, too."""
        if find_inside(self.path, ADAPTER, CheckpointError) is None:
            return None
        if self._halves:
            raise CheckpointError(
                f"{self.path}: an adapter ({ADAPTER}) cannot be merged into weights in mxfp4; save the base in bf16 "
                f"with transformers first"
            )
        matrices = {
            t.name: t.shape for t in self._tensors if len(t.shape) == 2 and t.parts[0].name != "embedding.weight"
        }
        return MergedAdapter(self.path, matrices, {t.name for t in self._tensors if t.transposed})

    def _as_stored(self, tensor: FileTensor) -> FileTensor:
        """Return a tensor as the files have it: as (..., out, in) if it is in mxfp4, even if it is transposed in bf16.
        Raises CheckpointError for blocks and scales of other shapes or types."""
        halves = (tensor.name + MXFP4[0], tensor.name + MXFP4[1])
        if tensor.name in self._stored or not all(name in self._stored for name in halves):
            return tensor
        if tensor.transposed:
            tensor = replace(tensor, transposed=False, shape=(*tensor.shape[:-2], tensor.shape[-1], tensor.shape[-2]))
        *lead, n_in = tensor.shape
        for name, more in zip(halves, ((_GROUP // 2,), ()), strict=True):
            if n_in % _GROUP or self._stored[name].shape != (*lead, n_in // _GROUP, *more):
                shape, expected = [*self._stored[name].shape], [*lead, n_in // _GROUP, *more]
                raise CheckpointError(f"{self.path}: {name} is {shape}, and config.json makes it {expected}")
            if (dtype := self._stored[name].dtype) != "uint8":
                raise CheckpointError(f"{self.path}: {name} is {dtype}, and a tensor in mxfp4 has bytes: uint8")
        self._halves[tensor.name] = halves
        return tensor

    def _raise_problems(self, others: dict[str, str | None]) -> None:
        missing = [tensor.name for tensor in self._tensors if tensor.name not in {*self._stored, *self._halves}]
        problems = [f"{name} is missing" for name in missing]
        for tensor in self._tensors:
            stored = self._stored.get(tensor.name)
            if stored is not None and stored.shape != tensor.shape:
                problems.append(f"{tensor.name} is {list(stored.shape)}, and config.json makes it {list(tensor.shape)}")
        problems += [
            f"{name} is not a tensor of this model" for name, reason in sorted(others.items()) if reason is None
        ]
        if problems:
            raise CheckpointError(*(f"{self.path}: {problem}" for problem in shortened(problems)))

    def _slice(self, name: str, spans: Spans) -> Tensor:
        if name in self._halves:
            *lead, (low, high) = spans
            groups = low // _GROUP, -(-high // _GROUP)
            blocks, scales = self._halves[name]
            numbers = from_mxfp4(
                self._slice(blocks, [*lead, groups, (0, _GROUP // 2)]), self._slice(scales, [*lead, groups])
            )
            return numbers[..., low - groups[0] * _GROUP : high - groups[0] * _GROUP]
        if self._adapter and name in self._adapter:
            return self._adapter.merged(name, partial(self._stored_slice, name), spans)
        return self._stored_slice(name, spans)

    def _stored_slice(self, name: str, spans: Spans) -> Tensor:
        stored = self._stored[name]
        try:
            if stored.file not in self._open:
                open_regular(stored.file).close()
                self._open[stored.file] = safe_open(stored.file, framework="pt")
            box: Tensor = self._open[stored.file].get_slice(name)[tuple(slice(*span) for span in spans)]
        except (SafetensorError, OSError) as error:
            raise DamagedError(f"{stored.file}: {name} cannot be read: {error}") from None
        return box

    def describe(self) -> str:
        return f"{self.folder.architecture.class_name} of {self.path}"


def _named_as_stored(
    expected: list[FileTensor], stored: dict[str, TensorInFile], folder: ModelFolder
) -> list[FileTensor]:
    """Return the tensors under their names in the files, which may omit the prefix, as the first GPT-2's do."""
    prefix = folder.architecture.prefix
    if not any(name.startswith(prefix) for name in stored):
        expected = [replace(tensor, name=tensor.name.removeprefix(prefix)) for tensor in expected]
    # The one matrix of a tied model may be stored only under the name of the head.
    ends, head = folder.architecture.ends, f"{folder.architecture.ends['head']}.weight"
    embeddings = (f"{prefix}{ends['embedding']}.weight", f"{ends['embedding']}.weight")
    if folder.spec.tied_embedding and head in stored and not stored.keys() & set(embeddings):
        expected = [replace(tensor, name=head) if tensor.name in embeddings else tensor for tensor in expected]
    return expected


def open_weights(path: str | Path) -> HuggingFaceWeights:
    """Return the weights of a folder of `transformers`.

    Raises ConfigError if its architecture is not supported, and CheckpointError or DamagedError for files that are
    missing, damaged or of another model.
    """
    return HuggingFaceWeights(read_folder(Path(path)))
