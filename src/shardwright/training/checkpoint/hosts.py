"""Which rank keeps a copy of the shards of which other, and which files go from where to where: pure arithmetic."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Hosts:
    """The hosts that the ranks of a run are on, numbered by their first ranks. `of`: the host of each rank."""

    of: tuple[int, ...]

    @classmethod
    def by_name(cls, names: Sequence[str]) -> "Hosts":
        """From a name of its host of each rank."""
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
        """How many there are."""
        return len(self.ranks)

    def is_first(self, rank: int) -> bool:
        """Whether a rank is the first of its host."""
        return self.ranks[self.of[rank]][0] == rank

    def keeper(self, rank: int) -> int | None:
        """The rank that keeps a copy of the shards of a rank: one of the next host; None where there is one host."""
        if self.n == 1:
            return None
        here, there = self.ranks[self.of[rank]], self.ranks[(self.of[rank] + 1) % self.n]
        return there[here.index(rank) % len(there)]

    def kept_by(self, rank: int) -> list[int]:
        """The ranks whose shards a rank keeps a copy of."""
        return [other for other in range(len(self.of)) if self.keeper(other) == rank]


@dataclass(frozen=True)
class FileTransfer:
    """The file of rank `of` goes from the host of rank `source` to that of rank `target`."""

    of: int
    source: int
    target: int


def transfers(hosts: Hosts, there: Mapping[int, Sequence[int]], needed: Sequence[Sequence[int]]) -> list[FileTransfer]:
    """What has to be sent so that each host has what its ranks need. `there`: the ranks whose files a host has;
    `needed`: of each rank the ranks whose files it reads. The ranks of a host share its work."""
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
