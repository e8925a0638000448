"""Reading a checkpoint: PyTorch's planner decides which parts of which shards a rank needs, and here the bytes move.
Each shard is checked before any of it is used."""

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner

from shardwright.errors import CheckpointError, DamagedError
from shardwright.files import open_regular
from shardwright.hugging_face.writer import FILE_METADATA
from shardwright.training.checkpoint.manifest import Manifest, ShardRecord, key_of
from shardwright.training.offload.states import StoredTensor


def xxh3_128_of(tensor: Tensor) -> str:
    """Hex digest of a CPU tensor's bytes. Other threads go on meanwhile, which they do not with xxhash's functions that
    take one argument."""
    digest = xxhash.xxh3_128()
    digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def name_of(dtype: torch.dtype) -> str:
    """A type by torch's name, such as float32."""
    return str(dtype).removeprefix("torch.")


class SafetensorsReader:
    """Reads the shards a rank needs, each whole and checked against its xxh3_128 before any of it is used. `stored`:
    this rank's shards by name that are on a disk, and are written there."""

    def __init__(self, folder: Path, manifest: Manifest, stored: Mapping[str, StoredTensor]) -> None:
        self.folder = folder
        self._stored = stored
        self.manifest = manifest
        self._records = {
            MetadataIndex(name, shard.offsets): shard
            for name, tensor in manifest.tensors.items()
            for shard in tensor.shards
        }

    def metadata(self) -> Metadata:
        """What the checkpoint holds, as PyTorch's planner reads it."""
        return Metadata(
            {
                name: TensorStorageMetadata(
                    TensorProperties(dtype=getattr(torch, tensor.dtype)),
                    torch.Size(tensor.shape),
                    [ChunkStorageMetadata(torch.Size(s.offsets), torch.Size(s.shape)) for s in tensor.shards],
                )
                for name, tensor in self.manifest.tensors.items()
            }
        )

    def files_of(self, plan: LoadPlan) -> set[str]:
        """The files that a plan reads."""
        indices = (MetadataIndex(item.storage_index.fqn, item.storage_index.offset) for item in plan.items)
        return {self._records[index].file for index in indices}

    def read(self, plan: LoadPlan, planner: LoadPlanner) -> None:
        """Fill the tensors of a plan."""
        wanted = defaultdict(list)
        for item in plan.items:
            wanted[MetadataIndex(item.storage_index.fqn, item.storage_index.offset)].append(item)
        for index, items in sorted(wanted.items(), key=lambda pair: (self._records[pair[0]].file, pair[0].fqn)):
            shard = read_shard(self.folder, index.fqn, self.manifest.tensors[index.fqn].dtype, self._records[index])
            for item in items:
                part = shard
                for dim, (offset, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                    part = part.narrow(dim, offset, length)
                if (stored := self._stored.get(item.dest_index.fqn)) is not None:
                    stored.write(item.dest_offsets, part)
                else:
                    planner.resolve_tensor(item).detach().copy_(part)


class IntoPlace(DefaultLoadPlanner):
    """PyTorch's planner, but that it leaves tensors on the meta device as they are: it would give them memory, and
    their values are on a disk."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        self.state_dict = self.original_state_dict = state_dict
        self.metadata, self.is_coordinator = metadata, is_coordinator


def read_shard(folder: Path, name: str, dtype: str, record: ShardRecord) -> Tensor:
    """One shard of the tensor `name` of type `dtype` from its file. Raises DamagedError, naming file and tensor, if a
    single bit of it has changed."""
    path, key = folder / record.file, key_of(name, record.offsets)
    try:
        open_regular(path).close()
        with safe_open(path, framework="pt") as file:
            shard: Tensor = file.get_tensor(key)
            metadata = file.metadata()
    except FileNotFoundError:
        raise DamagedError(f"{path} is missing; it should hold {key}") from None
    except OSError as error:
        # Not damage: the next try may succeed, and passing over it would in the end delete a good checkpoint.
        raise CheckpointError(f"{path} cannot be read: {error}") from None
    except (SafetensorError, ValueError) as error:
        raise DamagedError(f"{path} is damaged and cannot be read (looking for {key}): {error}") from None
    if metadata != FILE_METADATA:
        raise DamagedError(f"{path} is damaged: its metadata are {metadata}, and were written as {FILE_METADATA}")
    found = name_of(shard.dtype), tuple(shard.shape)
    if found != (dtype, record.shape):
        raise DamagedError(
            f"{path} is damaged: {key} is {found[0]} {list(found[1])} there, and the manifest says {dtype} "
            f"{list(record.shape)}"
        )
    if xxh3_128_of(shard) != record.xxh3_128:
        raise DamagedError(f"{path} is damaged: the bytes of {key} do not have the xxh3_128 that the manifest gives")
    return shard
