"""The keeper of each rank's shards on another host, and the file transfers between hosts: pure arithmetic."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Hosts:
    """The hosts of a run's ranks, numbered in order of their first ranks. `of`: the host of each rank."""

    of: tuple[int, ...]

    @classmethod
    def by_name(cls, names: Sequence[str]) -> "Hosts":
        """Number the hosts. `names`: the host name of each rank."""
        numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
        return cls(tuple(numbers[name] for name in names))

    @cached_property
    def ranks(self) -> list[list[int]]:
        """The ranks on each host."""
        found: list[list[int]] = [[] for _ in set(self.of)]
        for rank, host in enumerate(self.of):
            found[host].append(rank)
        return found

    @property
    def n(self) -> int:
        """Number of hosts."""
        return len(self.ranks)

    def is_first(self, rank: int) -> bool:
        """Return whether a rank is the first rank on its host."""
        return self.ranks[self.of[rank]][0] == rank

    def keeper(self, rank: int) -> int | None:
        """Return the rank on the next host that keeps a copy of this rank's shards, or None if there is one host."""
        if self.n == 1:
            return None
        here, there = self.ranks[self.of[rank]], self.ranks[(self.of[rank] + 1) % self.n]
        return there[here.index(rank) % len(there)]

    def kept_by(self, rank: int) -> list[int]:
        """Return the ranks whose shards this rank keeps a copy of."""
        return [other for other in range(len(self.of)) if self.keeper(other) == rank]


@dataclass(frozen=True)
class FileTransfer:
    """A transfer of rank `of`'s file from the host of rank `source` to the host of rank `target`."""

    of: int
    source: int
    target: int


def transfers(hosts: Hosts, there: Mapping[int, Sequence[int]], needed: Sequence[Sequence[int]]) -> list[FileTransfer]:
    """Return the transfers that give each host the files that its ranks need. `there`: host -> ranks whose files it
    has. `needed`: for each rank, the ranks whose files it reads. The ranks of a host share the transfers."""
    holders: dict[int, list[int]] = {}
    for host, files in sorted(there.items()):
        for of in files:
            holders.setdefault(of, []).append(host)
    found = []
    for host, targets in enumerate(hosts.ranks):
        wanted = {of for rank in targets for of in needed[rank]}
        for at, of in enumerate(sorted(wanted - set(there.get(host, ())))):
            sources = hosts.ranks[holders[of][at % len(holders[of])]]
            found.append(FileTransfer(of, sources[at % len(sources)], targets[at % len(targets)]))
    return found
