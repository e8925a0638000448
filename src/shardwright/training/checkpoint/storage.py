"""The storage under PyTorch's checkpoint planner: safetensors files out, verified safetensors files in.

PyTorch decides which rank writes which shard, and which parts of which a rank needs; here the bytes move.
"""

import hashlib
import os
import socket
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.checkpoint import StorageReader, StorageWriter
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from shardwright.errors import CheckpointError, DamagedError
from shardwright.hugging_face.writer import Entry, write_safetensors
from shardwright.training.checkpoint.manifest import Manifest, ShardRecord, TensorRecord, key_of
from shardwright.training.offload.states import StoredTensor


def sha256_of(tensor: Tensor) -> str:
    """Hex digest of a CPU tensor's bytes."""
    return hashlib.sha256(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data).hexdigest()


class _AsPlanned:
    """What PyTorch asks of a storage and ours leaves as it is: its plans, and the name of the checkpoint."""

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        pass

    def prepare_local_plan(self, plan: Any) -> Any:
        return plan

    def prepare_global_plan(self, plans: Any) -> Any:
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


class SafetensorsWriter(_AsPlanned, StorageWriter):
    """Writes each rank's shards to one file in `folder`; the first rank then calls `publish` with the
    records. `stored`: shards by name that are on a disk; they are read one at a time."""

    def __init__(
        self,
        folder: Path,
        rank: int,
        prepare: Callable[[], None],
        publish: Callable[[dict[str, TensorRecord]], None],
        stored: Mapping[str, StoredTensor],
    ) -> None:
        self.folder = folder
        self._stored = stored
        self.file = f"rank-{rank:05d}.safetensors"
        self._prepare = prepare
        self._publish = publish

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if is_coordinator:
            self._prepare()

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        if not self.folder.is_dir():
            raise CheckpointError(
                f"{self.folder}, which rank 0 has made, cannot be seen from {socket.gethostname()}; `out` "
                f"must be on a file system that all machines of the run share"
            )
        items: dict[Entry, WriteItem] = {}
        for item in plan.items:
            assert item.tensor_data is not None, f"{item.index.fqn} is no tensor; there is nothing else here"
            offsets, chunk = tuple(item.tensor_data.chunk.offsets), item.tensor_data.chunk
            dtype = str(item.tensor_data.properties.dtype).removeprefix("torch.")
            items[Entry(key_of(item.index.fqn, offsets), dtype, tuple(chunk.sizes))] = item
        results = []

        def taken(entry: Entry) -> Tensor:
            item = items[entry]
            assert item.tensor_data is not None
            stored = self._stored.get(item.index.fqn)
            resolved = planner.resolve_data(item) if stored is None else stored.read()
            assert isinstance(resolved, Tensor)
            tensor = resolved.detach().cpu().contiguous()
            offsets = tuple(item.tensor_data.chunk.offsets)
            record = ShardRecord(offsets, entry.shape, self.file, sha256_of(tensor))
            results.append(WriteResult(item.index, tensor.nbytes, record))
            return tensor

        path = self.folder / self.file
        # What fails on one rank, PyTorch's planner tells to all.
        write_safetensors(path, list(items), taken)
        with path.open("rb") as file:
            os.fsync(file.fileno())
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        shards: dict[str, list[ShardRecord]] = defaultdict(list)
        for of_rank in results:
            for result in of_rank:
                shards[result.index.fqn].append(result.storage_data)
        records = {}
        for name, entry in metadata.state_dict_metadata.items():
            assert isinstance(entry, TensorStorageMetadata)
            dtype = str(entry.properties.dtype).removeprefix("torch.")
            records[name] = TensorRecord(tuple(entry.size), dtype, tuple(shards[name]))
            assert records[name].is_whole, f"{name} would be saved with a gap"
        self._publish(records)


class SafetensorsReader(_AsPlanned, StorageReader):
    """Reads the shards a rank needs, each whole and checked against its sha256 before any of it is used. `stored`:
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

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
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

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
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
        done: Future[None] = Future()
        done.set_result(None)
        return done


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
        with safe_open(path, framework="pt") as file:
            shard: Tensor = file.get_tensor(key)
    except FileNotFoundError:
        raise DamagedError(f"{path} is missing; it should hold {key}") from None
    except OSError as error:
        # Not damage: the next try may succeed, and passing over it would in the end delete a good checkpoint.
        raise CheckpointError(f"{path} cannot be read: {error}") from None
    except (SafetensorError, ValueError) as error:
        raise DamagedError(f"{path} is damaged and cannot be read (looking for {key}): {error}") from None
    found = str(shard.dtype).removeprefix("torch."), tuple(shard.shape)
    if found != (dtype, record.shape):
        raise DamagedError(
            f"{path} is damaged: {key} is {found[0]} {list(found[1])} there, and the manifest says {dtype} "
            f"{list(record.shape)}"
        )
    if sha256_of(shard) != record.sha256:
        raise DamagedError(f"{path} is damaged: the bytes of {key} do not have the sha256 that the manifest gives")
    return shard
