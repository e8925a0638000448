"""Local checkpoints: checkpoints in a folder of each host, `checkpoint.local`, on the host's disk or in shared memory.
Every shard is on two hosts, so the loss of one host loses no shard.

LOCAL/                         one folder, seen by all ranks of one host
  host.json                    identifies the host and names the run that the folder belongs to
  step-00000120/               has this name once every rank's shards are on two hosts
    manifest.json run.toml     as in OUT/checkpoints; equal on all hosts
    rank-00002.safetensors     the shards of a rank of this host
    rank-00005.safetensors     a copy of the shards of a rank of the previous host

The hosts form a ring, as in Gemini (Wang et al., SOSP '23). A thread of each rank writes and sends. Ranks exchange data
in point-to-point messages over a separate process group (`messages`). When all shards have been written and copied,
rank 0 has the records of all ranks and sends the manifest to them; each host then publishes the checkpoint.
`Hosts` computes which rank of another host keeps a rank's shards, and which files are sent, without communication.
"""

import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from shardwright.config import RunConfig
from shardwright.parallel.objects import gathered
from shardwright.runs.folder import RUN_FILE, published, step_of
from shardwright.system.errors import CheckpointError
from shardwright.system.files import parse_json, read_bytes, read_text
from shardwright.training.checkpoint.manifest import FILE_NAME as MANIFEST
from shardwright.training.checkpoint.manifest import LONGEST_MANIFEST, CheckpointManifest, read_manifest
from shardwright.training.checkpoint.messages import CheckpointMessages
from shardwright.training.checkpoint.parts import PartReport, ShardRecords, all_records, good_report
from shardwright.training.checkpoint.plan import TensorPiece
from shardwright.training.checkpoint.shards import file_name, rank_of, write_shards
from shardwright.training.checkpoint.state import files_needed, together
from shardwright.training.checkpoint.store import CheckpointStore
from shardwright.training.ranks import COLLECTIVE_TIMEOUT_S
from shardwright.training.step import Trainer

KEPT = 2
"""Number of checkpoints that a host keeps. If a host publishes the newest checkpoint and is lost before another host
has published it, all other hosts still have the previous one."""
_HOST = "host.json"
_REST = (MANIFEST, RUN_FILE)
"""Files of a checkpoint other than shards."""


class LocalLevel:
    """The local checkpoints of a run. All ranks call each method together; `write` need not be simultaneous."""

    def __init__(self, folder: Path, out: Path, trainer: Trainer) -> None:
        """Claim the folder and agree on the hosts. Raises CheckpointError on all ranks if it is unusable on any."""
        self.folder, self.trainer, self.rank = folder, trainer, dist.get_rank()
        together(lambda: claim(folder, out), self._failed)
        host_names: list[str] = []
        together(lambda: host_names.append(_name_of_host(folder, out)), self._failed)
        self.hosts = Hosts.by_name(gathered(host_names[0], str))
        self._first = self.hosts.is_first(self.rank)
        self._kept_by = self.hosts.kept_by(self.rank)
        self.store = CheckpointStore(folder, KEPT)
        self._messages = CheckpointMessages(COLLECTIVE_TIMEOUT_S)
        self._read: dict[int, CheckpointManifest] = {}
        """Manifests of the checkpoints in the folder, by step; filled on the first rank of each host."""
        self._copies: dict[int, dict[int, list[int]]] = {}
        """For each complete step: host -> ranks whose files are on that host."""
        if self._first:
            self.store.sweep()

    @property
    def remark(self) -> str | None:
        """A warning if no copy is on another host, otherwise None."""
        if self.hosts.n == 1:
            return f"all ranks see the same {self.folder}: local checkpoints have no copy on another host"
        return None

    def write(
        self,
        step: int,
        pieces: Sequence[TensorPiece],
        take: Callable[[TensorPiece], Tensor],
        rest: Callable[[ShardRecords], list[str]],
    ) -> None:
        """Write this rank's part of a checkpoint in a background thread. `take` returns the tensor of a piece.
        `rest` returns the manifest and the run file, on rank 0. Raises CheckpointError if any rank could not write."""
        partial, problem = self.store.partial_of(step), ""
        records: ShardRecords = ()
        partial.mkdir(parents=True, exist_ok=True)
        try:
            records = write_shards(partial, self.rank, pieces, take)
        except Exception as error:  # the other ranks wait for messages from this rank
            problem = self._in_words(error)
        problem = self._exchanged(partial, problem) or problem
        verdict = self._judged(PartReport(records, problem).text(), rest)
        if verdict["problem"]:
            if self._first:
                shutil.rmtree(partial, ignore_errors=True)
            raise CheckpointError(f"writing {self.store.path_of(step)}: {verdict['problem']}")
        if self._first:
            self.store.complete(step, *verdict["rest"])

    def steps(self, remarks: list[str]) -> list[int]:
        """Return the steps of checkpoints that are complete over all hosts. Appends warnings to `remarks`."""
        local = self._listed(remarks) if self._first else []
        everyone = gathered(local, list[ListedCheckpoint])
        versions: dict[tuple[int, str], dict[int, list[int]]] = {}
        for rank, checkpoint in ((rank, checkpoint) for rank, listed in enumerate(everyone) for checkpoint in listed):
            versions.setdefault((checkpoint.step, checkpoint.sha256), {})[self.hosts.host_of_rank[rank]] = list(
                checkpoint.ranks
            )
        whole = [version for version, parts in versions.items() if self._is_whole(version, parts)]
        # A host that continued without the others may leave two checkpoints of the same step. Both belong to this run.
        agreed = sorted({version for those in gathered(whole, list[tuple[int, str]]) for version in those})
        self._copies = {step: versions[step, sha256] for step, sha256 in agreed}
        for step in sorted({step for step, _ in versions} - self._copies.keys()):
            remarks.append(f"the local checkpoint after step {step} is not whole on the hosts that are here")
        return sorted(self._copies)

    def brought(self, step: int) -> Path:
        """Return the folder of a checkpoint of `steps`, after fetching from other hosts the files that ranks of this
        host read and that are missing here. Raises CheckpointError on every rank."""
        parts = self._copies[step]
        final, has_part = self.store.path_of(step), self.hosts.host_of_rank[self.rank] in parts
        folder = final if has_part else self.store.partial_of(step)
        together(lambda: folder.mkdir(parents=True, exist_ok=True), self._failed)
        self._bring_manifest(step, parts)
        needed: list[int] = []
        together(lambda: needed.extend(self._needed(folder)), self._failed)
        plan = transfers(self.hosts, parts, gathered(needed, list[int]))

        def act() -> None:
            for transfer in plan:
                if transfer.source == self.rank:
                    path = final / file_name(transfer.owner)
                    self._messages.send_file(path if path.is_file() else None, transfer.target)
            for transfer in plan:
                if transfer.target == self.rank:
                    self._messages.receive_file(folder / file_name(transfer.owner), transfer.source)

        together(act, self._failed)
        self._messages.settle()
        together(lambda: None if has_part or not self._first else self.store.put_in_place(step), self._failed)
        return final

    def clear(self, saved: int) -> None:
        """Delete each host's folder after a run that saved the checkpoint after `saved` steps, unless a local one is
        newer."""
        if self._first and all(step_of(path) <= saved for path in self.store.published()):
            shutil.rmtree(self.folder, ignore_errors=True)

    def _exchanged(self, partial: Path, problem: str) -> str:
        """Send this rank's shards to their keeper, receive the shards that it keeps, and return an error text or ""."""
        keeper, failed = self.hosts.keeper(self.rank), ""
        if keeper is not None:
            self._messages.send_file(None if problem else partial / file_name(self.rank), keeper)
        for other in self._kept_by:
            try:
                self._messages.receive_file(partial / file_name(other), other)
            except (OSError, CheckpointError) as error:
                failed = failed or self._in_words(error)
        self._messages.settle()
        return failed

    def _judged(self, report: str, rest: Callable[[ShardRecords], list[str]]) -> Any:
        """Collect all ranks' reports on rank 0. Return, on every rank, the first problem or the result of `rest`."""
        if self.rank != 0:
            self._messages.send_text(report, 0)
            self._messages.settle()
            return self._messages.receive_text(0)
        reports = [report, *(self._messages.receive_text(rank) for rank in range(1, len(self.hosts.host_of_rank)))]
        try:
            verdict = {"problem": "", "rest": rest(all_records(map(good_report, reports)))}
        except CheckpointError as error:
            verdict = {"problem": str(error)}
        for rank in range(1, len(self.hosts.host_of_rank)):
            self._messages.send_text(verdict, rank)
        self._messages.settle()
        return verdict

    def _listed(self, remarks: list[str]) -> "list[ListedCheckpoint]":
        """Return the checkpoints in this host's folder whose manifests are undamaged."""
        checkpoints, self._read = [], {}
        for path in self.store.published():
            try:
                self._read[step_of(path)] = read_manifest(path)
                content = read_bytes(path / MANIFEST, LONGEST_MANIFEST)
            except (CheckpointError, OSError) as error:
                remarks.append(str(error))
                continue
            ranks = tuple(rank for file in path.iterdir() if (rank := rank_of(file.name)) is not None)
            checkpoints.append(ListedCheckpoint(step_of(path), hashlib.sha256(content).hexdigest(), ranks))
        return checkpoints

    def _is_whole(self, version: tuple[int, str], parts: Mapping[int, Sequence[int]]) -> bool:
        """Return whether the hosts together have all files of a checkpoint that this host has a part of."""
        if not self._first or self.hosts.host_of_rank[self.rank] not in parts:
            return False
        manifest = self._read[version[0]]
        files = {shard.file for tensor in manifest.tensors.values() for shard in tensor.shards}
        return {rank_of(name) for name in files} <= {rank for ranks in parts.values() for rank in ranks}

    def _bring_manifest(self, step: int, parts: Mapping[int, Sequence[int]]) -> None:
        """Send the manifest and the run file to the first rank of each host that lacks the checkpoint."""
        source = self.hosts.ranks[min(parts)][0]
        targets = [ranks[0] for host, ranks in enumerate(self.hosts.ranks) if host not in parts]

        def act() -> None:
            for target in targets if self.rank == source else ():
                for name in _REST:
                    self._messages.send_file(self.store.path_of(step) / name, target)
            if self.rank in targets:
                for name in _REST:
                    self._messages.receive_file(self.store.partial_of(step) / name, source)

        together(act, self._failed)
        self._messages.settle()

    def _needed(self, folder: Path) -> list[int]:
        """Return the ranks whose files this rank reads."""
        names = files_needed(folder, read_manifest(folder), self.trainer)
        return sorted(rank for name in names if (rank := rank_of(name)) is not None)

    def _failed(self, error: Exception) -> CheckpointError:
        return CheckpointError(f"checkpoint.local={str(self.folder)!r}: {self._in_words(error)}")

    def _in_words(self, error: Exception) -> str:
        what = str(error) if isinstance(error, OSError | CheckpointError) else f"{type(error).__name__}: {error}"
        full = "; free some of it, or choose another checkpoint.local" if "No space left" in what else ""
        return f"rank {self.rank} on {os.uname().nodename}: {what}{full}"


@dataclass(frozen=True)
class ListedCheckpoint:
    """A checkpoint on a host: step, sha256 of its manifest, and the ranks whose files are on the host."""

    step: int
    sha256: str
    ranks: tuple[int, ...]


def local_level(config: RunConfig, trainer: Trainer) -> LocalLevel | None:
    """Return the local checkpoints of the folder named in the run file, or None."""
    local = config.checkpoint.local
    return None if local is None else LocalLevel(Path(local), Path(config.out), trainer)


def claim(folder: Path, out: Path) -> None:
    """Create a folder of local checkpoints for the run in `out`. Raises CheckpointError if the folder contains
    checkpoints of another run, and OSError if it cannot be written."""
    folder.mkdir(parents=True, exist_ok=True)
    path, run = folder / _HOST, str(out.absolute())
    with suppress(FileNotFoundError, ValueError, TypeError, KeyError):
        other = parse_json(read_text(path))["out"]
        if other != run and published(folder):
            raise CheckpointError(
                f"{folder} holds checkpoints of the run in {other}, and this one is in {run}; name another folder, or "
                f"delete it"
            )
        if other == run:
            return
    path.unlink(missing_ok=True)


def _name_of_host(folder: Path, out: Path) -> str:
    """Return a host name, equal on all ranks that see the same folder. All of them must have called `claim` before."""
    path, fresh = folder / _HOST, folder / f"{_HOST}.{uuid.uuid4().hex}.tmp"
    try:
        fresh.write_text(json.dumps({"host": uuid.uuid4().hex, "out": str(out.absolute())}), encoding="utf-8")
        with suppress(FileExistsError):
            os.link(fresh, path)  # only the first rank to link succeeds
    finally:
        fresh.unlink(missing_ok=True)
    return str(parse_json(read_text(path))["host"])


@dataclass(frozen=True)
class Hosts:
    """The hosts of a run's ranks, numbered in order of their first ranks. `host_of_rank`: the host of each rank."""

    host_of_rank: tuple[int, ...]

    @classmethod
    def by_name(cls, names: Sequence[str]) -> "Hosts":
        """Return the hosts, numbered in the order of their first rank. `names`: the host name of each rank."""
        numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
        return cls(tuple(numbers[name] for name in names))

    @cached_property
    def ranks(self) -> list[list[int]]:
        """The ranks on each host."""
        result: list[list[int]] = [[] for _ in set(self.host_of_rank)]
        for rank, host in enumerate(self.host_of_rank):
            result[host].append(rank)
        return result

    @property
    def n(self) -> int:
        """Number of hosts."""
        return len(self.ranks)

    def is_first(self, rank: int) -> bool:
        """Return whether a rank is the first rank on its host."""
        return self.ranks[self.host_of_rank[rank]][0] == rank

    def keeper(self, rank: int) -> int | None:
        """Return the rank on the next host that keeps a copy of this rank's shards, or None if there is one host."""
        if self.n == 1:
            return None
        local, following = self.ranks[self.host_of_rank[rank]], self.ranks[(self.host_of_rank[rank] + 1) % self.n]
        return following[local.index(rank) % len(following)]

    def kept_by(self, rank: int) -> list[int]:
        """Return the ranks whose shards this rank keeps a copy of."""
        return [other for other in range(len(self.host_of_rank)) if self.keeper(other) == rank]


@dataclass(frozen=True)
class FileTransfer:
    """A transfer of rank `owner`'s file from the host of rank `source` to the host of rank `target`."""

    owner: int
    source: int
    target: int


def transfers(hosts: Hosts, parts: Mapping[int, Sequence[int]], needed: Sequence[Sequence[int]]) -> list[FileTransfer]:
    """Return the transfers that give each host the files that its ranks need. `parts`: host -> ranks whose files it
    has. `needed`: for each rank, the ranks whose files it reads. The ranks of a host share the transfers."""
    holders: dict[int, list[int]] = {}
    for host, files in sorted(parts.items()):
        for owner in files:
            holders.setdefault(owner, []).append(host)
    result = []
    for host, targets in enumerate(hosts.ranks):
        wanted = {owner for rank in targets for owner in needed[rank]}
        for at, owner in enumerate(sorted(wanted - set(parts.get(host, ())))):
            sources = hosts.ranks[holders[owner][at % len(holders[owner])]]
            result.append(FileTransfer(owner, sources[at % len(sources)], targets[at % len(targets)]))
    return result
