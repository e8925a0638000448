"""Durable copies: checkpoints copied to `checkpoint.durable`, a folder on another disk or an fsspec URL (s3://, gs://).

PLACE/step-00000100/
  manifest.json             written last: a copy with a manifest is complete
  run.toml
  rank-00001.safetensors    the files of the checkpoint, as they are in `out`
  copied/rank-00001         marks that a rank has copied its part; deleted when the copy is complete

An object store has no rename, so a copy is published by writing its manifest last (`parts.py`). Every rank copies a
part of the files, then writes a marker that contains the sha256 of the manifest. The marker of an earlier, unfinished
copy of another checkpoint with the same number of steps has a different sha256 and does not count.

During training a thread of each rank copies its part (`Copier`).
"""

import hashlib
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from shardwright.config import RunConfig
from shardwright.parallel.objects import gathered
from shardwright.runs.folder import checkpoint_name, step_of
from shardwright.system.errors import CheckpointError
from shardwright.system.remote import file_system
from shardwright.training.checkpoint.background import BackgroundThread
from shardwright.training.checkpoint.manifest import FILE_NAME as MANIFEST
from shardwright.training.checkpoint.parts import confirmations
from shardwright.training.checkpoint.store import CheckpointStore, not_kept

_CHUNK_BYTES = 2**24
_COPIED = "copied"
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*")
_STEP = re.compile(r"step-\d{8,}")
_OBJECT_STORES = frozenset(("s3", "gs", "az", "abfs", "adl", "oci", "oss", "memory"))
"""fsspec protocols of object stores."""
_PROBE = ".shardwright-can-write"


class DurableFolder:
    """The folder of the durable copies. Every method raises CheckpointError with the URL if the file system fails."""

    def __init__(self, url: str, keep_last: int = 0) -> None:
        """Open the folder. `keep_last`: number of complete copies to keep; 0 keeps all. Raises CheckpointError for
        an unsupported URL."""
        self.url, self.keep_last = url.rstrip("/"), keep_last
        try:
            self._system, self._root = file_system(self.url)
        except ValueError as error:
            raise CheckpointError(f"{url}: {error}") from None

    def url_of(self, step: int) -> str:
        """Return the URL of the copy of the checkpoint after `step` steps, whether or not it exists."""
        return f"{self.url}/{checkpoint_name(step)}"

    def require_writable(self) -> None:
        """Write and delete a small file in the folder, to check for write permission."""
        with self._named_errors(self.url):
            self._make_folder(self._root)
            self._system.pipe_file(f"{self._root}/{_PROBE}", b"")
            self._system.rm_file(f"{self._root}/{_PROBE}")

    def steps(self) -> list[int]:
        """Return the steps of all copies, complete or not, in ascending order."""
        with self._named_errors(self.url):
            self._system.invalidate_cache()
            try:
                names = self._system.ls(self._root, detail=False)
            except FileNotFoundError:
                return []
        basenames = (Path(name.rstrip("/")).name for name in names)
        return sorted(step_of(Path(name)) for name in basenames if _STEP.fullmatch(name))

    def manifest(self, step: int) -> bytes | None:
        """Return the manifest of a copy, or None if the copy is incomplete."""
        return self._read(step, MANIFEST)

    def is_complete(self, step: int) -> bool:
        """Return whether a copy has a manifest."""
        with self._named_errors(self.url_of(step)):
            self._system.invalidate_cache()
            return bool(self._system.exists(self._path(step, MANIFEST)))

    def files(self, step: int) -> dict[str, int]:
        """Return file name -> size in bytes of a copy."""
        with self._named_errors(self.url_of(step)):
            listed = self._system.ls(self._path(step), detail=True)
        sizes = {Path(entry["name"]).name: int(entry["size"] or 0) for entry in listed if entry["type"] == "file"}
        return {name: size for name, size in sizes.items() if _NAME.fullmatch(name)}

    def unpublish(self, step: int) -> None:
        """Delete the manifest of a complete copy, so that it counts as incomplete while it is overwritten."""
        with self._named_errors(self.url_of(step)):
            self._system.rm_file(self._path(step, MANIFEST))

    def put(self, step: int, file: Path) -> None:
        """Copy one file of a checkpoint to the copy after `step` steps."""
        with self._named_errors(self.url_of(step)):
            if "file" in self._protocols():
                _copy_to_disk(file, Path(self._path(step, file.name)))
            else:
                self._make_folder(self._path(step))
                self._system.put_file(str(file), self._path(step, file.name))

    def confirm(self, step: int, rank: int, text: str) -> None:
        """Write a marker that a rank has copied its part. `text`: sha256 of the manifest."""
        with self._named_errors(self.url_of(step)):
            self._make_folder(self._path(step, _COPIED))
            self._system.pipe_file(self._path(step, _COPIED, f"rank-{rank:05d}"), text.encode())

    def confirmed(self, step: int, ranks: AbstractSet[int]) -> dict[int, str]:
        """Return the text of the lowest rank's marker, if it has one: each look is a request to an object store."""
        rank = min(ranks)
        text = self._read(step, _COPIED, f"rank-{rank:05d}")
        return {} if text is None else {rank: text.decode(errors="replace")}

    def publish(self, step: int, manifest: Path) -> None:
        """Complete a copy by writing its manifest last, then delete copies beyond `keep_last`."""
        self.put(step, manifest)
        with self._named_errors(self.url_of(step)):
            self._system.rm(self._path(step, _COPIED), recursive=True)
        before = [earlier for earlier in self.steps() if earlier < step and self.is_complete(earlier)]
        for old in not_kept(before, self.keep_last) if self.keep_last else ():
            with self._named_errors(self.url_of(old)):
                # The manifest first: a partly deleted copy must not count as complete.
                self._system.rm_file(self._path(old, MANIFEST))
                self._system.rm(self._path(old), recursive=True)

    def fetch(self, step: int, name: str, into: Path) -> None:
        """Copy one file of a durable copy into the folder `into`."""
        with self._named_errors(self.url_of(step)):
            self._system.get_file(self._path(step, name), str(into / name))

    def _make_folder(self, path: str) -> None:
        # An object store has no folders. With a mistyped bucket name, its file system might create a bucket here.
        if not _OBJECT_STORES.intersection(self._protocols()):
            self._system.makedirs(path, exist_ok=True)

    def _protocols(self) -> tuple[str, ...]:
        protocols: str | tuple[str, ...] = self._system.protocol
        return (protocols,) if isinstance(protocols, str) else tuple(protocols)

    def _read(self, step: int, *names: str) -> bytes | None:
        with self._named_errors(self.url_of(step)):
            self._system.invalidate_cache()
            try:
                content: bytes = self._system.cat_file(self._path(step, *names))
            except FileNotFoundError:
                return None
            return content

    def _path(self, step: int, *names: str) -> str:
        return "/".join([self._root, checkpoint_name(step), *names])

    @contextmanager
    def _named_errors(self, url: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # file systems raise their own types: no network, no such bucket, no permission
            what = (isinstance(error, OSError) and error.strerror) or f"{type(error).__name__}: {error}"
            raise CheckpointError(f"{url}: {what}") from error


def durable_folder(config: RunConfig) -> DurableFolder | None:
    """Return the durable copies of a run, or None if it has none. Raises CheckpointError for an unsupported URL."""
    section = config.checkpoint
    return None if section.durable is None else DurableFolder(section.durable, section.durable_keep_last)


def durable_copy(url: str) -> tuple[DurableFolder, int]:
    """Return the folder and step of the copy at `url`. Raises CheckpointError if `url` names no checkpoint."""
    folder, _, name = url.rstrip("/").rpartition("/")
    if not folder or not _STEP.fullmatch(name):
        raise CheckpointError(
            f"{url} is not the URL of a checkpoint, which ends with /{checkpoint_name(100)} or the like"
        )
    return DurableFolder(folder), step_of(Path(name))


def copy(folder: DurableFolder, checkpoint: Path, rank: int, world_size: int, wait: Callable[[], bool]) -> bool:
    """Copy this rank's part of a published checkpoint; rank 0 also completes the copy. `wait` pauses and returns
    whether to continue. Return False if the copy was abandoned. Raises CheckpointError and OSError."""
    step, manifest = step_of(checkpoint), checkpoint / MANIFEST
    ours = manifest.read_bytes()
    of_this = hashlib.sha256(ours).hexdigest()
    while (theirs := folder.manifest(step)) is not None:
        if theirs == ours:
            return True
        if rank == 0:
            folder.unpublish(step)
        elif not wait():
            return False
    for name in part_of(rank, world_size, [path.name for path in checkpoint.iterdir() if path != manifest]):
        folder.put(step, checkpoint / name)
    folder.confirm(step, rank, of_this)
    if rank == 0:
        if confirmations(folder, step, world_size, wait, lambda text: text == of_this or None) is None:
            return False
        folder.publish(step, manifest)
    return True


def part_of(rank: int, world_size: int, names: list[str]) -> list[str]:
    """Return the files that a rank copies. Each file is assigned to exactly one rank."""
    return sorted(names)[rank::world_size]


def _copy_to_disk(file: Path, to: Path) -> None:
    """Copy a file, and rename it to its final name once it is on the disk."""
    fresh = to.with_name(f"{to.name}.tmp")
    to.parent.mkdir(parents=True, exist_ok=True)
    with file.open("rb") as source, fresh.open("wb") as target:
        shutil.copyfileobj(source, target, _CHUNK_BYTES)
        target.flush()
        os.fsync(target.fileno())
    fresh.rename(to)


@dataclass
class CompletedCopy:
    """A complete durable copy. `took_s`: seconds from its start."""

    url: str
    step: int
    took_s: float


class Copier:
    """The durable copies of a run. All ranks call every method together, except `news` and `abandon`."""

    def __init__(self, folder: DurableFolder, store: CheckpointStore, retries: int) -> None:
        self.folder, self.store = folder, store
        self.step = 0
        """Step of the copy in progress, or 0."""
        self._thread = BackgroundThread("durable copy", retries)
        self._news: list[CompletedCopy] = []

    @property
    def what(self) -> str:
        """A description of the copy in progress, for messages."""
        return f"the copy of the checkpoint after step {self.step}"

    def busy(self) -> bool:
        """Return whether any rank is still copying."""
        return any(gathered(self._thread.is_alive, bool))

    def begin(self, step: int) -> None:
        """Start to copy a checkpoint, even one still in progress. `settle` must have been called for the previous
        copy."""
        self.step = step
        self.store.keep(step)
        checkpoint, rank, world_size = self.store.path_of(step), dist.get_rank(), dist.get_world_size()

        def as_error(error: Exception) -> CheckpointError:
            what = error if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
            return CheckpointError(f"copying {checkpoint}: rank {rank}: {what}")

        self._thread.begin(lambda: self._in_background(checkpoint, rank, world_size), as_error)

    def settle(self) -> None:
        """Wait until the copy in progress, if any, is complete. Raises CheckpointError on all ranks if it failed on
        any."""
        self.step = 0
        self._thread.settle()

    def news(self) -> list[CompletedCopy]:
        """Return the copies completed since the last call; empty on ranks other than 0."""
        copies, self._news = self._news, []
        return copies

    def abandon(self) -> None:
        """Stop the copy in progress, because other ranks may be gone or there is no checkpoint to copy."""
        self._thread.abandon()

    def _in_background(self, checkpoint: Path, rank: int, world_size: int) -> None:
        """Background job: wait for the checkpoint to be published, then copy this rank's part."""
        began_s, step = time.monotonic(), step_of(checkpoint)
        wait = self._thread.pauses(self.folder.url_of(step))
        try:
            while not checkpoint.is_dir():  # if saving is asynchronous, rank 0's thread publishes it later
                if not wait():
                    return
            done = self._thread.tried(lambda: copy(self.folder, checkpoint, rank, world_size, wait), CheckpointError)
            if done and rank == 0:
                self._news.append(CompletedCopy(self.folder.url_of(step), step, time.monotonic() - began_s))
        finally:
            if rank == 0:
                self.store.keep(0)
