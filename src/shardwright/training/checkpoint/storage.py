"""Reading a checkpoint: find the parts of shards that a rank needs from their boxes. Each shard's checksum is
verified before its values are used."""

from collections.abc import Mapping
from pathlib import Path

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from torch import Tensor

from shardwright.hugging_face.writer import FILE_METADATA
from shardwright.parallel.boxes import Indices, overlap, shard_of
from shardwright.parallel.norm import local_part
from shardwright.system.errors import CheckpointError, DamagedError
from shardwright.system.files import open_regular
from shardwright.training.checkpoint.manifest import CheckpointManifest, ShardRecord, key_of
from shardwright.training.offload.states import StoredTensor


def xxh3_128_of(tensor: Tensor) -> str:
    """Hex digest of a CPU tensor's bytes. Unlike xxhash's one-argument functions, this releases the GIL."""
    digest = xxhash.xxh3_128()
    digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def name_of(dtype: torch.dtype) -> str:
    """Return torch's name of a type, such as float32."""
    return str(dtype).removeprefix("torch.")


class SafetensorsReader:
    """Reads the shards that this rank needs for its parts of `tensors`. Each shard is read completely and its
    xxh3_128 is verified before its values are used. `stored`: this rank's shards on a disk, by name; they are
    written there."""

    def __init__(
        self,
        folder: Path,
        manifest: CheckpointManifest,
        tensors: Mapping[str, Tensor],
        stored: Mapping[str, StoredTensor],
    ) -> None:
        self.folder, self.manifest, self._tensors, self._stored = folder, manifest, tensors, stored
        self._wanted: list[tuple[str, ShardRecord, Indices, Indices]] = []
        """Tensor name, shard, the indices to read in the shard, and the indices to write in this rank's part."""
        for name, tensor in tensors.items():
            offsets, shape, _ = shard_of(tensor)
            for shard in manifest.tensors[name].shards:
                if both := overlap(shard.offsets, shard.shape, offsets, shape):
                    self._wanted.append((name, shard, *both))

    @property
    def files(self) -> set[str]:
        """Names of the files to read."""
        return {shard.file for _, shard, _, _ in self._wanted}

    def read(self) -> None:
        """Fill this rank's parts of the tensors."""
        for name, record, source, target in sorted(self._wanted, key=lambda wanted: (wanted[1].file, wanted[0])):
            shard = read_shard(self.folder, name, self.manifest.tensors[name].dtype, record)
            if (stored := self._stored.get(name)) is not None:
                stored.write(tuple(part.start for part in target), shard[source])
            else:
                local_part(self._tensors[name]).detach()[target] = shard[source]


def read_shard(folder: Path, name: str, dtype: str, record: ShardRecord) -> Tensor:
    """Read one shard of the tensor `name` of type `dtype` from its file. Raises DamagedError, with file and tensor
    name, if the file is missing or its contents changed, and CheckpointError if the file cannot be read."""
    path, key = folder / record.file, key_of(name, record.offsets)
    try:
        open_regular(path).close()
        with safe_open(path, framework="pt") as file:
            shard: Tensor = file.get_tensor(key)
            metadata = file.metadata()
    except FileNotFoundError:
        raise DamagedError(f"{path} is missing; it should hold {key}") from None
    except OSError as error:
        # Not damage: a retry may succeed, while skipping the checkpoint as damaged would eventually delete a good one.
        raise CheckpointError(f"{path} cannot be read: {error}") from None
    except (SafetensorError, ValueError) as error:
        raise DamagedError(f"{path} is damaged and cannot be read (looking for {key}): {error}") from None
    if metadata != FILE_METADATA:
        raise DamagedError(f"{path} is damaged: its metadata are {metadata}, and were written as {FILE_METADATA}")
    actual = name_of(shard.dtype), tuple(shard.shape)
    if actual != (dtype, record.shape):
        raise DamagedError(
            f"{path} is damaged: {key} is {actual[0]} {list(actual[1])} there, and the manifest says {dtype} "
            f"{list(record.shape)}"
        )
    if xxh3_128_of(shard) != record.xxh3_128:
        raise DamagedError(f"{path} is damaged: the bytes of {key} do not have the xxh3_128 that the manifest gives")
    return shard
