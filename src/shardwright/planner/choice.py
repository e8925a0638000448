"""One layout with its micro-batch: selected from `Candidates`, formatted as a line, and parsed from a line.

One layout of the space with its cost, and whether it fits.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from shardwright.cost.host import host_share, node_host_bytes
from shardwright.cost.job import COLUMNS, RECOMPUTE, Candidates, Job
from shardwright.cost.step import Estimate
from shardwright.layout.key import written
from shardwright.layout.keys import KEYS
from shardwright.layout.layout import Layout
from shardwright.system.errors import LayoutError, nearest
from shardwright.system.units import format_bytes, format_host_bytes


@dataclass(frozen=True)
class Choice:
    """A layout and the number of sequences that a rank runs at a time."""

    layout: Layout
    micro_batch: int = 1

    @property
    def candidates(self) -> Candidates:
        """Return `Candidates` with this choice as their only element."""
        return Candidates.from_layout(self.layout, self.micro_batch)

    def __str__(self) -> str:
        """Return the values that are not defaults, with the keys of a run file's layout section:
        `tp=8,pp=4,dp_shard=2,zero=1,micro_batch=1`. `read` returns an equal choice."""
        return ",".join(f"{key}={written(value)}" for key, value in self.settings().items())

    def settings(self) -> dict[str, Any]:
        """Return micro_batch and the keys of a run file's layout section that have to be written for this layout."""
        return self.layout.settings() | {"micro_batch": self.micro_batch}


def micro_batch_problem(value: Any) -> str | None:
    """Return the rule that a micro-batch breaks, None if it breaks none."""
    return None if type(value) is int and value >= 1 else "sequences at a time, 1 or more"


def read(text: str) -> Choice:
    """Parse `key=value` pairs, separated by commas: keys of a run file's layout section, and micro_batch.

    Omitted keys have their defaults, as in a run file. `stage_layers=20+21+20` has the layers of each stage. Raises
    LayoutError with every problem at once.
    """
    values, problems = pairs(text, "--explain")
    micro_batch = values.pop("micro_batch", 1)
    if rule := micro_batch_problem(micro_batch):
        problems.append(f"--explain micro_batch={micro_batch}: {rule}")
    try:
        layout = Layout(**values)
    except LayoutError as error:
        raise LayoutError(*problems, *error.problems) from None
    if problems:
        raise LayoutError(*problems)
    return Choice(layout, micro_batch)


def pairs(text: str, option: str) -> tuple[dict[str, Any], list[str]]:
    """Parse `key=value` pairs, separated by commas; return their values and the problems of invalid pairs. `option`:
    the name of the command-line option, for the messages."""
    kinds = {name: key.type for name, key in KEYS.items()} | {"micro_batch": int}
    problems: list[str] = []
    values: dict[str, Any] = {}
    for pair in filter(None, (part.strip() for part in text.split(","))):
        key, equals, value = (part.strip() for part in pair.partition("="))
        if not equals:
            problems.append(f"{option} {pair!r}: write key=value, such as tp=8")
        elif key not in kinds:
            problems.append(f"{option} {key}={value}: there is no such key; {nearest(key, kinds)}")
        elif key in values:
            problems.append(f"{option} {key}={value}: given twice, and {written(values[key])} before; leave one out")
        else:
            try:
                values[key] = _value(value, kinds[key])
            except ValueError:
                problems.append(f"{option} {key}={value}: {_EXPECTED.get(kinds[key], _LAYERS)} is needed")
    return values, problems


_EXPECTED: dict[Any, str] = {
    int: "a whole number",
    int | None: "a whole number",
    bool: "true or false",
    str: "a word",
}
_LAYERS = "a number of layers for each stage, such as 20+21+20,"


def _value(text: str, kind: Any) -> Any:
    """Convert the text of a value to `kind`. Raises ValueError."""
    if kind is bool:
        return bool(("false", "true").index(text))
    if kind == tuple[str, ...]:
        return tuple(text.split("+"))
    return int(text) if kind in (int, int | None) else text if kind is str else tuple(map(int, text.split("+")))


def choice_at(candidates: Candidates, at: int) -> Choice:
    """Return candidate number `at`. Its recomputation must be one that `Layout` accepts."""
    own: dict[str, Any] = {name: getattr(candidates, name)[at].item() for name in COLUMNS}
    micro_batch, own["recompute"] = own.pop("micro_batch"), RECOMPUTE[own["recompute"]]
    return Choice(replace(candidates.shared, **own), micro_batch)


@dataclass(frozen=True)
class PricedLayout(Estimate):
    """One layout of the space with its cost."""

    choice: Choice

    @property
    def layout(self) -> Layout:
        """Return the layout: degrees of the axes and the choices that go with them."""
        return self.choice.layout

    @property
    def micro_batch(self) -> int:
        """Return the number of sequences that a rank runs at a time."""
        return self.choice.micro_batch

    @cached_property
    def host_bytes_per_node(self) -> float:
        """Return the bytes of memory that the layout needs on the host of a node."""
        return float(node_host_bytes(self.job, self.candidates)[0])

    @property
    def fullest_kinds(self) -> dict[str, float]:
        """The bytes of the fullest rank of pp by kind, with the bytes that the allocator cannot use."""
        memory, rank = self.memory, self.memory.fullest_rank
        kinds = {kind: float(n_bytes[0, rank]) for kind, n_bytes in memory.kinds.items()}
        return kinds | {"allocator": float(memory.lost_bytes[0, rank])}

    def fits(self, limit_bytes: float) -> bool:
        """Return whether a rank needs at most `limit_bytes` of its device, and a node at most its host's memory."""
        return not shortage(self.job, self.choice, self.peak_bytes, limit_bytes)

    @staticmethod
    def from_choice(job: Job, choice: Choice) -> "PricedLayout":
        """Price a choice without checking it: every layout of the space is valid."""
        return PricedLayout(job, choice.candidates, choice)


def shortage(job: Job, choice: Choice, peak_bytes: float, limit_bytes: float) -> str:
    """Return the memory that a layout lacks as text, `142 GiB of 21.2 GiB`; empty if it fits."""
    parts = [f"{format_bytes(peak_bytes)} of {format_bytes(limit_bytes)}"] if peak_bytes > limit_bytes else []
    if host_share(job, choice.candidates)[0] > 1:
        needed, memory = float(node_host_bytes(job, choice.candidates)[0]), job.cluster.host_memory_bytes
        parts.append(f"{format_host_bytes(needed)} of {format_host_bytes(memory)} of host memory in each node")
    return " and ".join(parts)
