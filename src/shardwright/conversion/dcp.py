"""Distributed checkpoints of PyTorch (DCP): `.metadata` read without running code; tensors read and written by chunk.

FOLDER/.metadata       pickle: for each tensor its type, shape and chunks, for each chunk its bytes in a file
FOLDER/__0_0.distcp    chunks, each one a file of `torch.save`
"""

import io
import pickle
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwright.conversion.pickled import InertObject, check_sums, load_checked
from shardwright.conversion.schema import DcpChunk, DcpIndex, DcpMetadata, DcpPlace, DcpTensor, checked
from shardwright.hugging_face.files import shortened
from shardwright.system.errors import CheckpointError, DamagedError
from shardwright.system.files import inside, open_regular, read_bytes
from shardwright.system.torch_private import bytes_in_dcp_file
from shardwright.system.units import GiB
from shardwright.training.checkpoint.manifest import LONGEST_MANIFEST, ShardRecord, TensorRecord
from shardwright.training.checkpoint.storage import name_of

METADATA = ".metadata"
FILE_BYTES = 4 * GiB
_CLASSES = {
    "torch.distributed.checkpoint.metadata": (
        "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties",
        "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING",
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.distributed.checkpoint.planner": ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData"),
    "pathlib": ("PosixPath", "PurePosixPath"),
    "pathlib._local": ("PosixPath", "PurePosixPath"),
}  # fmt: skip
"""Module -> the classes in a `.metadata` whose objects are read, as attributes without the code of the class."""
_FUNCTIONS: dict[tuple[str, str], Any] = {
    ("torch", "Size"): tuple,
    ("torch.serialization", "_get_layout"): str,
    ("collections", "OrderedDict"): dict,
}
"""The other names that a `.metadata` may call -> the function that is called here."""


class _MetadataObject(InertObject):
    """An object of a `.metadata`, whose state may be no table of attributes."""

    def __setstate__(self, state: Any) -> None:
        self.__dict__.update(state if isinstance(state, dict) else {"state": state})


class _MetadataUnpickler(pickle.Unpickler):
    """Reads a `.metadata` and constructs the classes of `_CLASSES` and `more_classes` only, each as a new class without
    code."""

    def __init__(self, content: bytes, where: Path, more_classes: Mapping[str, Sequence[str]]) -> None:
        super().__init__(io.BytesIO(content))
        self.where, self.more_classes = where, more_classes

    def find_class(self, module: str, name: str) -> Any:
        if name in (*_CLASSES.get(module, ()), *self.more_classes.get(module, ())):
            return type(name, (_MetadataObject,), {})
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return name
        if (module, name) in _FUNCTIONS:
            return _FUNCTIONS[module, name]
        raise CheckpointError(
            f"{self.where} needs {module}.{name}, and only the classes of PyTorch's distributed checkpoints are "
            f"constructed, because other classes can run any code; nothing of it has been run"
        )


@dataclass(frozen=True)
class BytesInFile:
    """`n_bytes` of a file of a checkpoint, from `begin` on."""

    file: str
    begin: int
    n_bytes: int


@dataclass(frozen=True)
class DcpFolder:
    """A distributed checkpoint. `tensors`: name -> type, shape and chunks. `places`: (name, offsets) -> bytes of the
    chunk, and (name, ()) -> bytes of an object that is no tensor."""

    path: Path
    tensors: Mapping[str, TensorRecord]
    places: Mapping[tuple[str, tuple[int, ...]], BytesInFile]

    @property
    def names(self) -> list[str]:
        """The names of tensors and of other values."""
        return list(dict.fromkeys(name for name, _ in self.places))

    def read_all(self, places: Mapping[str, str]) -> dict[str, Tensor]:
        """Return the whole tensors of some places, read by `torch.distributed.checkpoint`, which unpickles `.metadata`:
        `read_dcp` has accepted its classes before."""
        import torch.distributed.checkpoint as dcp  # slow to import

        state = {
            place: torch.empty(self.tensors[place].shape, dtype=getattr(torch, self.tensors[place].dtype))
            for place in places.values()
        }
        with warnings.catch_warnings(action="ignore"):  # it has no process group
            dcp.load(state, checkpoint_id=self.path, no_dist=True)
        return {name: state[place] for name, place in places.items()}

    def file_of(self, name: str) -> Path:
        """Return the file of a value that is no tensor, or of a tensor's first chunk."""
        return self.path / self._files.get(name, METADATA)

    @cached_property
    def _files(self) -> dict[str, str]:
        return {name: place.file for (name, _), place in reversed([*self.places.items()])}

    def read_shard(self, name: str, record: ShardRecord) -> Tensor:
        """Return the values of a chunk. Raises DamagedError if they do not fit `.metadata`."""
        tensor = self._load(name, record.offsets)
        expected = self.tensors[name].dtype, record.shape
        if not isinstance(tensor, Tensor) or (name_of(tensor.dtype), tuple(tensor.shape)) != expected:
            raise DamagedError(f"{self.path / record.file} is damaged: {name} is not {expected[0]} {[*record.shape]}")
        return tensor.detach()

    def value(self, name: str) -> Any:
        """Return an object that is no tensor or a tensor of one element, such as a learning rate; None if there is
        none."""
        value = self._load(name, ()) if (name, ()) in self.places else None
        return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value

    def _load(self, name: str, offsets: tuple[int, ...]) -> Any:
        place = self.places[name, offsets]
        path = inside(self.path, place.file, DamagedError)
        try:
            with open_regular(path) as file:
                file.seek(place.begin)
                content = io.BytesIO(file.read(place.n_bytes))
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
        check_sums(content, f"{path}: {name}")
        content.seek(0)
        return load_checked(content, f"{path}: {name}", (), "DCP")


def read_dcp(path: Path, more_classes: Mapping[str, Sequence[str]] | None = None) -> DcpFolder:
    """Read and check the `.metadata` of a distributed checkpoint; tensors are not read. `more_classes`: module -> the
    classes of another system that it may have, too; then `DcpFolder.read_all` must not be called.

    Raises CheckpointError if it needs other classes than DCP's, and DamagedError, with all problems, if files are
    missing or too short, or if the chunks of a tensor do not cover it once.
    """
    if not (path / METADATA).is_file():
        raise DamagedError(
            f"{path} has no {METADATA}, which is written last: the checkpoint was not completed, or the folder is none "
            f"of PyTorch's distributed checkpoints"
        )
    content = read_bytes(inside(path, METADATA, DamagedError), LONGEST_MANIFEST)
    try:
        folder = _folder_of(path, _MetadataUnpickler(content, path / METADATA, more_classes or {}).load())
    except CheckpointError:
        raise
    except Exception as error:  # a damaged pickle raises errors of any type
        reason = f" ({str(error)[:200]})" if str(error) else ""
        raise DamagedError(f"{path / METADATA} is damaged: it is no whole pickle of PyTorch's{reason}") from None
    if problems := list(_missing(folder)):
        raise DamagedError(*shortened(problems))
    return folder


def _folder_of(path: Path, metadata: Any) -> DcpFolder:
    where = path / METADATA
    tables = checked(DcpMetadata, metadata, where)
    places: dict[tuple[str, tuple[int, ...]], BytesInFile] = {}
    for stored_index, stored in tables.storage_data.items():
        index = checked(DcpIndex, stored_index, where)
        if getattr(stored, "transform_descriptors", None):
            raise CheckpointError(
                f"{where}: {index.fqn} is stored through {stored.transform_descriptors}; supported: none"
            )
        place = checked(DcpPlace, stored, f"{where}: {index.fqn}")
        if (index.fqn, offsets := index.offset or ()) in places:
            raise DamagedError(f"{where} is damaged: it has {index.fqn} at {[*offsets]} twice")
        places[index.fqn, offsets] = BytesInFile(place.relative_path, place.offset, place.length)
    tensors = {}
    for name, entry in tables.state_dict_metadata.items():
        if type(entry).__name__ != "TensorStorageMetadata":
            if (name, ()) not in places:
                raise DamagedError(f"{where} is damaged: it has no bytes for {name}")
            continue
        tensor, shards = checked(DcpTensor, entry, f"{where}: {name}"), []
        for stored_chunk in tensor.chunks:
            chunk = checked(DcpChunk, stored_chunk, f"{where}: {name}")
            if (name, chunk.offsets) not in places:
                raise DamagedError(f"{where} is damaged: it has no bytes for the chunk of {name} at {[*chunk.offsets]}")
            shards.append(ShardRecord(chunk.offsets, chunk.sizes, places[name, chunk.offsets].file, ""))
        dtype = next(iter(entry.properties.state), None)
        if not isinstance(dtype, str) or not isinstance(getattr(torch, dtype, None), torch.dtype):
            raise DamagedError(f"{where}: {name} has the type {dtype!r}, and PyTorch has no such type")
        tensors[name] = TensorRecord(tensor.size, dtype, tuple(shards))
    if more := {name for name, _ in places} - tables.state_dict_metadata.keys():
        raise DamagedError(f"{where} is damaged: it has bytes for {min(more)}, and no type or shape")
    return DcpFolder(path, tensors, places)


def _missing(folder: DcpFolder) -> Iterable[str]:
    """Yield missing and short files, bytes that belong to two chunks, and tensors that the chunks do not cover once."""
    ends: dict[str, int] = {}
    for (name, _), place in sorted(folder.places.items(), key=lambda item: item[1].begin):
        if place.begin < ends.get(place.file, 0):
            yield f"{folder.path / METADATA} is damaged: {name} has bytes of {place.file} that another tensor has, too"
        ends[place.file] = place.begin + place.n_bytes
    for file, end in sorted(ends.items()):
        path = inside(folder.path, file, DamagedError)
        parts = len({name for (name, _), place in folder.places.items() if place.file == file})
        if not path.is_file():
            yield f"{path} is missing; it has parts of {parts} tensors: copy the files of all ranks"
        elif (size := path.stat().st_size) < end:
            yield f"{path} is damaged: it has {size:,} bytes, and {METADATA} says {end:,}"
    for name, tensor in folder.tensors.items():
        if not tensor.is_whole:
            yield f"{folder.path / METADATA} is damaged: the chunks of {name} do not cover each of its elements once"


def file_of(value: Any) -> memoryview:
    """Return the bytes of the file that torch.save writes. It raises RuntimeError if the disk is full; Python, which
    writes these bytes, raises OSError."""
    content = io.BytesIO()
    torch.save(value, content)
    return content.getbuffer()


class DcpWriter:
    """Writes a distributed checkpoint with one chunk in memory at a time; `finish` writes `.metadata`."""

    def __init__(self, folder: Path) -> None:
        from torch.distributed.checkpoint import metadata  # slow to import

        self._folder, self._types, self._n_files = folder, metadata, 0
        self._entries: dict[str, Any] = {}
        self._stored: dict[Any, Any] = {}
        self._paths: dict[str, tuple[str, ...]] = {}

    def write_tensor(self, path: tuple[str, ...], shape: tuple[int, ...], chunks: Iterable[tuple[Any, Tensor]]) -> None:
        """Write a tensor; `path`: its keys in the nested state; `chunks`: (offsets, values) that cover it."""
        name, records = self._name(path), []
        properties = self._types.TensorProperties()
        for offsets, chunk in chunks:
            sizes = torch.Size(chunk.shape)
            records.append(self._types.ChunkStorageMetadata(torch.Size(offsets), sizes))
            properties = self._types.TensorProperties(dtype=chunk.dtype)
            index = self._types.MetadataIndex(name, torch.Size(offsets), len(records) - 1)
            self._write(index, chunk.detach().clone(memory_format=torch.contiguous_format))
        self._entries[name] = self._types.TensorStorageMetadata(properties, torch.Size(shape), records)

    def write_object(self, path: tuple[str, ...], value: Any) -> None:
        """Write a number, a text or a list."""
        name = self._name(path)
        self._write(self._types.MetadataIndex(name), value)
        self._entries[name] = self._types.BytesStorageMetadata()

    def finish(self) -> None:
        """Write `.metadata`."""
        content = self._types.Metadata(self._entries, self._paths, self._stored)
        (self._folder / METADATA).write_bytes(pickle.dumps(content))

    def _name(self, path: tuple[str, ...]) -> str:
        name = ".".join(path)
        self._paths[name] = path
        return name

    def _write(self, index: Any, value: Any) -> None:
        content = file_of(value)
        path = self._folder / f"__{self._n_files}_0.distcp"
        if path.is_file() and path.stat().st_size >= FILE_BYTES:
            self._n_files += 1
            path = self._folder / f"__{self._n_files}_0.distcp"
        with path.open("ab") as file:
            begin = file.tell()
            file.write(content)
        self._stored[index] = bytes_in_dcp_file(path.name, begin, len(content))
