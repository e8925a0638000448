"""Accelerators, links and clusters, read from hardware.toml beside this file and from a user's file of the same form.

    accelerator("A100-80GB-SXM")        rates and memory of one accelerator
    cluster("h100:64")                  64 of them in nodes of the usual 8, with the usual network
    cluster("h100:64/4@800Gb")          in nodes of 4, each with 800 Gbit/s to the others
    cluster("gb200:64")                 64 of one rack of 72
    cluster("mine:64", extra="my.toml") a cluster defined in a user's file

Files have figures in the units of data sheets (GB/s, Gbit/s, TFLOP/s, GiB, microseconds); the functions return bytes,
FLOPs and seconds. A figure belongs to an accelerator or to a network, never to one table of measurements.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from pydantic import Field, ValidationError

from shardwright.cost.measured import VERSION, MeasuredTable, RatesTable, of_ranks
from shardwright.cost.table import ByPrecision, CollectiveName, Count, NotNegative, Peak, Positive, Share, Table
from shardwright.errors import InputError, nearest
from shardwright.files import parse_toml, read_text
from shardwright.units import GiB, MiB

PACKAGED = Path(__file__).with_name("hardware.toml")
LARGEST = 1_000_000
"""Maximum accelerators of a cluster; ten times the largest one in existence."""
FORM = "NAME:COUNT, then if needed /NODE_SIZE and @GBIT_PER_S_PER_NODE, such as h100:64, h100:64/4 or h100:64@1600Gb"


@dataclass(frozen=True, kw_only=True)
class Link:
    """The link of one accelerator to the others of a group, in one direction.

    `bytes_per_s`: bus bandwidth of large messages; `latency_s`: of one message; `half_bytes`: message size at which the
    transfer (without latency) reaches half of that bandwidth; `start_s`: start-up time of a collective before its first
    message. `switch_bytes_per_s`: buffer bytes per second of an all-reduce in the switches (NVLink SHARP), 0 if they
    cannot reduce. `peer_bytes_per_s`: between two accelerators if each pair has its own wire, 0 if they are switched.
    `relative`: the measured time of a kind of collective relative to the formula with these figures.
    """

    name: str
    bytes_per_s: float
    latency_s: float
    half_bytes: float
    start_s: float = 0.0
    switch_bytes_per_s: float = 0.0
    peer_bytes_per_s: float = 0.0
    relative: Mapping[str, float] = field(default_factory=dict, hash=False)


@dataclass(frozen=True, kw_only=True)
class Accelerator:
    """`flops_per_s`: peak by precision, dense. `memory_bytes_per_s`: bandwidth of its memory.

    `host_bytes_per_s`: to or from the memory of the host, 0 if it is the same memory; `disk_bytes_per_s`: its equal
    part of the disks of its node, read or written, 0 if that is not known; `host_memory_bytes_per_s`: its equal part of
    the bandwidth that an optimizer's update on the host reaches, reads and writes together, 0 if that is not known.

    `memory_bytes`: available to a program. `matmul_share`: by precision, the fraction of the peak that the best large
    matmul has reached; `memory_share`: the fraction of the bandwidth that a large copy reaches. `multiprocessors`:
    processors over which the blocks of a kernel are distributed. `die`: the name of the accelerator with the same die;
    `lasting`: how much more of its rate lasts in training. `sources`: the source of each figure, by its key in the
    file. `rates`: those measured on this machine (`cost.measured`), with a share `core_share` of the cores; `on_host`:
    it is the processor that also runs Python, and sends messages itself.
    """

    name: str
    memory_bytes: float
    memory_bytes_per_s: float
    flops_per_s: Mapping[str, float] = field(hash=False)
    matmul_share: Mapping[str, float] = field(hash=False)
    memory_share: float
    multiprocessors: int
    die: str
    lasting: float = 1.0
    host_bytes_per_s: float = 0.0
    disk_bytes_per_s: float = 0.0
    rates: RatesTable | None = field(default=None, hash=False, repr=False)
    core_share: float = 1.0
    on_host: bool = False
    host_memory_bytes_per_s: float = 0.0
    sources: Mapping[str, str] = field(default_factory=dict, hash=False, repr=False)


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """`size` accelerators in nodes of `node_size`, joined by `inside` in a node and by `across` between nodes.

    Ranks are numbered node by node. `across` is the link of one accelerator, with its equal part of the node's network,
    and `node_bytes_per_s` the line rate of the whole node.
    """

    name: str
    accelerator: Accelerator
    size: int
    node_size: int
    inside: Link
    across: Link
    node_bytes_per_s: float

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return self.size // self.node_size

    def with_network(self, node_bytes_per_s: float) -> "Cluster":
        """The same nodes on a network of another line rate, of which collectives reach the same fraction."""
        reached = self.across.bytes_per_s * node_bytes_per_s / self.node_bytes_per_s
        return replace(self, across=replace(self.across, bytes_per_s=reached), node_bytes_per_s=node_bytes_per_s)

    def on(self, network: str, extra: str | Path | None = None) -> "Cluster":
        """The same nodes and line rate on another kind of network. Raises InputError for one that is in no file."""
        if network not in (known := _known(extra).networks):
            raise InputError(f"network {network!r} is not known; {nearest(network, known)}")
        return replace(self, across=_across(network, known[network], self.node_bytes_per_s / self.node_size * 8 / 1e9))


class InsideTable(Table):
    """Links between the accelerators of a node."""

    bus_gb_per_s: Positive = Field(description="bus bandwidth of a ring all-reduce of a large buffer, GB/s")
    switch_gb_per_s: Positive | None = Field(None, description="buffer GB/s of an all-reduce in the switches")
    peer_gb_per_s: Positive | None = Field(None, description="GB/s of a pair, where each pair has its own wire")
    start_us: NotNegative = Field(description="of any collective before its first message, microseconds")
    latency_us: Positive = Field(description="of one message, microseconds")
    half_mib: NotNegative = Field(description="MiB sent at which half the bandwidth is reached")
    relative: dict[CollectiveName, Positive] | None = Field(
        None, description="measured time of a kind of collective relative to these figures"
    )


class NetworkTable(Table):
    """A kind of network between nodes."""

    share: Share = Field(description="of the line rate that a large collective reaches")
    start_us: NotNegative = Field(description="of any collective before its first message, microseconds")
    latency_us: Positive = Field(description="of one message, microseconds")
    half_mib: NotNegative = Field(description="MiB sent by an accelerator at which half the bandwidth is reached")
    sources: dict[str, str] = Field(default_factory=dict, description="where each figure stands")


class AcceleratorTable(Table):
    """An accelerator and the usual node with it."""

    aliases: list[str] = Field(default_factory=list, description="other names people type")
    memory_gib: Positive = Field(description="GiB that a program can have")
    memory_gb_per_s: Positive = Field(description="bandwidth of its memory, GB/s")
    memory_share: Share = Field(description="of that bandwidth, reached by a large copy")
    multiprocessors: Count = Field(description="processors over which a kernel's blocks are distributed")
    die: str | None = Field(None, description="the accelerator with the same die, on which rates in training depend")
    tflops: ByPrecision = Field(description="peak of matmuls by precision, dense, 1e12 FLOP/s")
    matmul_share: dict[Peak, Share] = Field(
        description="of the peak, by precision, the most that a large matmul reaches"
    )
    lasting: Positive | None = Field(
        None, description="how much more of it lasts in training than with that of its die"
    )
    node_size: Count = Field(description="accelerators of a node")
    network: str = Field(description="kind of network between nodes, a name of [networks]")
    gbit_per_s: Positive = Field(description="line rate of it for each accelerator, Gbit/s")
    part_of_node: bool | None = Field(
        None, description="whether a cluster may use a part of its nodes, such as of a rack; equally many of each"
    )
    host_gb_per_s: Positive | None = Field(
        None, description="link to the memory of the host, each direction, GB/s; none if it is the same memory"
    )
    disk_gb_per_s: Positive | None = Field(
        None, description="its equal part of the disks of a node, read or written, GB/s; without it none is priced"
    )
    host_memory_gb_per_s: Positive | None = Field(
        None, description="its part of the memory bandwidth of an update on the host, GB/s; without it none is priced"
    )
    inside: InsideTable = Field(description="links in a node")
    cores: Count | None = Field(
        None, description="cores of a node, if its ranks are processes that share them: a CPU as an accelerator"
    )
    rates: dict[str, RatesTable] | None = Field(
        None, description="what shardwright measure has measured, by the ranks of a node"
    )
    sources: dict[str, str] = Field(default_factory=dict, description="where each figure stands")


class ClusterTable(Table):
    """A kind of cluster whose nodes differ from the usual ones of an accelerator."""

    aliases: list[str] = Field(default_factory=list, description="other names people type")
    accelerator: str = Field(description="a name of [accelerators]")
    node_size: Count = Field(description="accelerators of a node")
    network: str = Field(description="kind of network between nodes, a name of [networks]")
    gbit_per_s_per_node: Positive = Field(description="line rate of a node's network, Gbit/s")
    sources: dict[str, str] = Field(default_factory=dict, description="where each figure stands")


class HardwareFile(Table):
    """A whole file."""

    networks: dict[str, NetworkTable] = Field(default_factory=dict, description="kinds of network between nodes")
    accelerators: dict[str, AcceleratorTable] = Field(default_factory=dict, description="accelerators by name")
    clusters: dict[str, ClusterTable] = Field(default_factory=dict, description="kinds of cluster by name")
    measured: MeasuredTable | None = Field(None, description="how a file of shardwright measure was made")


def accelerator(name: str, extra: str | Path | None = None) -> Accelerator:
    """An accelerator by its name or an alias; case and punctuation do not matter.

    Raises InputError for a name that is in no file.
    """
    known = _known(extra)
    return _accelerator(*_find("accelerator", name, known.accelerators))


def node_size(name: str, extra: str | Path | None = None) -> int:
    """Accelerators of the usual node of an accelerator. Raises InputError for a name that is in no file."""
    return _find("accelerator", name, _known(extra).accelerators)[1].node_size


def packaged_accelerators() -> list[Accelerator]:
    """Every accelerator that comes with the package."""
    return [_accelerator(name, table) for name, table in _packaged().accelerators.items()]


def cluster(text: str, extra: str | Path | None = None) -> Cluster:
    """A cluster from `NAME:COUNT`, `NAME:COUNT/NODE_SIZE` or `NAME:COUNT@GBIT_PER_S_PER_NODE`, or both, where NAME is
    an accelerator's or a cluster's.

    Raises InputError for another form, an unknown name, a count smaller than a node, or one that does not fill its
    nodes.
    """
    known = _known(extra)
    form = re.fullmatch(r"(.+?):(\d+)(?:/(\d+))?(?:@(\d+(?:\.\d+)?)(?:g\w*(?:/s)?)?)?", text.replace(" ", ""), re.I)
    if form is None:
        raise InputError(f"cluster {text!r}: write {FORM}")
    named, size = form[1], int(form[2])
    tables: dict[str, AcceleratorTable | ClusterTable] = {**known.accelerators, **known.clusters}
    name, table = _find("cluster", named, tables)
    node_size = int(form[3] or table.node_size)
    if form[3] is None and isinstance(table, AcceleratorTable) and table.part_of_node and size:
        node_size = evenly(size, node_size)
    if node_size < 1 or not 1 <= size <= LARGEST:
        raise InputError(f"cluster {text!r}: a cluster has 1 to {LARGEST:,} accelerators, and a node 1 or more")
    if form[4] and not 0 < float(form[4]) < 1e6:
        raise InputError(f"cluster {text!r}: {form[4]} Gbit/s a node; valid: more than 0, such as 1600")
    if isinstance(table, ClusterTable):
        kind, usual = _find("accelerator", table.accelerator, known.accelerators)
        gbit_per_s = table.gbit_per_s_per_node / table.node_size
    else:
        kind, usual = name, table
        gbit_per_s = table.gbit_per_s
    if form[4]:
        gbit_per_s = float(form[4]) / node_size
    if size < node_size:
        raise InputError(
            f"cluster {text!r}: {size} accelerators are less than a node of {node_size}; valid: {node_size} and its "
            f"multiples, or name the node you have: {named}:{size}/{size}"
        )
    if size % node_size:
        below = size - size % node_size
        raise InputError(
            f"cluster {text!r}: {size} accelerators do not fill nodes of {node_size} ({size} = {node_size}*"
            f"{size // node_size} + {size % node_size}); nearest: {below} and {below + node_size}, or name another "
            f"node size: {named}:{size}/NODE_SIZE"
        )
    return Cluster(
        name=text.strip(),
        accelerator=_accelerator(kind, usual, node_size),
        size=size,
        node_size=node_size,
        inside=_inside(usual.inside, _share(usual, node_size)),
        across=_across(table.network, known.networks[table.network], gbit_per_s),
        node_bytes_per_s=gbit_per_s * node_size * 1e9 / 8,
    )


def evenly(size: int, largest: int) -> int:
    """Accelerators of each node, if `size` of them are spread evenly over as few nodes of `largest` as hold them."""
    nodes = next(k for k in range(-(-size // largest), size + 1) if size % k == 0)
    return size // nodes


def _share(table: AcceleratorTable, ranks: int) -> float:
    found = of_ranks(table.rates or {}, ranks, table.cores)
    return 1.0 if found is None else found[1]


def _accelerator(name: str, table: AcceleratorTable, ranks: int | None = None) -> Accelerator:
    """`ranks`: of a node, which measured rates depend on; by default those of a whole node."""
    found = Accelerator(
        name=name,
        memory_bytes=table.memory_gib * GiB,
        memory_bytes_per_s=table.memory_gb_per_s * 1e9,
        flops_per_s={precision: tflops * 1e12 for precision, tflops in table.tflops.items()},
        matmul_share={precision: share for precision, share in table.matmul_share.items()},
        memory_share=table.memory_share,
        multiprocessors=table.multiprocessors,
        die=table.die or name,
        lasting=table.lasting or 1.0,
        host_bytes_per_s=(table.host_gb_per_s or 0) * 1e9,
        disk_bytes_per_s=(table.disk_gb_per_s or 0) * 1e9,
        host_memory_bytes_per_s=(table.host_memory_gb_per_s or 0) * 1e9,
        sources=table.sources,
    )
    measured = of_ranks(table.rates or {}, ranks or table.node_size, table.cores)
    if measured is None:
        return found
    rates, share = measured
    reached: dict[str, float] = {
        form: tflops * 1e12 * share / found.flops_per_s[form] for form, tflops in rates.tflops.items()
    }
    return replace(
        found,
        memory_bytes=rates.memory_gib * GiB * share,
        memory_bytes_per_s=rates.memory_gb_per_s * 1e9 * share,
        matmul_share=reached,
        memory_share=1.0,
        rates=rates,
        core_share=share,
        on_host=table.cores is not None,
    )


def _inside(table: InsideTable, share: float = 1.0) -> Link:
    """`share`: of the cores that the ranks had which were measured; messages take CPU time."""
    return Link(
        name="inside",
        bytes_per_s=table.bus_gb_per_s * 1e9 * share,
        latency_s=table.latency_us * 1e-6 / share,
        half_bytes=table.half_mib * MiB,
        start_s=table.start_us * 1e-6 / share,
        switch_bytes_per_s=(table.switch_gb_per_s or 0) * 1e9,
        peer_bytes_per_s=(table.peer_gb_per_s or 0) * 1e9,
        relative={kind: times for kind, times in (table.relative or {}).items()},
    )


def _across(name: str, table: NetworkTable, gbit_per_s: float) -> Link:
    return Link(
        name=name,
        bytes_per_s=table.share * gbit_per_s * 1e9 / 8,
        latency_s=table.latency_us * 1e-6,
        half_bytes=table.half_mib * MiB,
        start_s=table.start_us * 1e-6,
    )


def _letters(name: str) -> str:
    """A name in a normal form, without optional words and punctuation."""
    return re.sub(r"nvidia|amd|geforce|instinct|gpu|[^a-z0-9]", "", name.lower())


_Named = TypeVar("_Named", bound=AcceleratorTable | ClusterTable)


def _find(kind: str, name: str, tables: Mapping[str, _Named]) -> tuple[str, _Named]:
    """The table of that name or alias; that of the last file read takes precedence."""
    for known, table in reversed(list(tables.items())):
        if _letters(name) in map(_letters, (known, *table.aliases)):
            return known, table
    raise InputError(f"{kind} {name!r} is not known; {nearest(name.lower(), tables)}")


def _known(extra: str | Path | None) -> HardwareFile:
    """The packaged tables, with those that a user's file adds or replaces."""
    packaged = _packaged()
    return packaged if extra is None else _read(Path(extra), packaged)


@lru_cache(maxsize=1)
def _packaged() -> HardwareFile:
    return _read(PACKAGED, HardwareFile())


def _read(path: Path, below: HardwareFile) -> HardwareFile:
    """A file merged into another. Raises InputError with all its problems at once."""
    try:
        table = parse_toml(read_text(path))
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise InputError(f"{path}: not valid TOML: {error}") from None
    version = table["measured"].get("version", VERSION) if isinstance(table.get("measured"), dict) else VERSION
    if version != VERSION:
        raise InputError(
            f"{path}: measured.version={version!r}, and this shardwright reads version {VERSION}; measure the machine "
            f"again: shardwright measure --out {path} --overwrite"
        )
    try:
        file = HardwareFile.model_validate(table)
    except ValidationError as error:
        raise InputError(*(f"{path}: {_sentence(entry)}" for entry in error.errors())) from None
    both = HardwareFile(
        networks={**below.networks, **file.networks},
        accelerators={**below.accelerators, **file.accelerators},
        clusters={**below.clusters, **file.clusters},
        measured=file.measured,
    )
    if problems := [f"{path}: {problem}" for problem in _problems(file, both)]:
        raise InputError(*problems)
    return both


def _problems(file: HardwareFile, both: HardwareFile) -> Iterable[str]:
    """Every rule between tables that a file breaks, one sentence each."""
    for name, table in file.accelerators.items():
        for precision in table.tflops.keys() ^ table.matmul_share.keys():
            has, lacks = ("tflops", "matmul_share") if precision in table.tflops else ("matmul_share", "tflops")
            yield f"accelerators.{name}: {precision} stands in {has} and not in {lacks}; give both"
        if table.network not in both.networks:
            hint = nearest(table.network, both.networks)
            yield f"accelerators.{name}.network={table.network!r}: no such network; {hint}"
        for ranks, rates in (table.rates or {}).items():
            if not ranks.isdecimal() or int(ranks) < 1:
                yield f"accelerators.{name}.rates.{ranks}: the ranks of a node are needed, a number of 1 or more"
            if only_one := rates.tflops.keys() ^ table.tflops.keys():
                yield (
                    f"accelerators.{name}.rates.{ranks}.tflops: has to have the precisions of "
                    f"accelerators.{name}.tflops; only one has {', '.join(sorted(only_one))}"
                )
    for name, nodes in file.clusters.items():
        if nodes.network not in both.networks:
            hint = nearest(nodes.network, both.networks)
            yield f"clusters.{name}.network={nodes.network!r}: no such network; {hint}"
        try:
            _find("accelerator", nodes.accelerator, both.accelerators)
        except InputError as error:
            yield f"clusters.{name}.accelerator: {error}"


_TABLES: dict[str, type[Table]] = {"networks": NetworkTable, "accelerators": AcceleratorTable, "clusters": ClusterTable}


def _sentence(entry: Any) -> str:
    """One of pydantic's errors as a sentence with the valid choices."""
    path = [str(part) for part in entry["loc"] if part != "[key]"]
    owner: type[Table] = HardwareFile
    if path[0] == "measured" and len(path) > 1:
        owner = MeasuredTable
    elif len(path) > 4 and path[2] == "rates":
        owner = RatesTable
    elif len(path) > 2:
        owner = InsideTable if path[2] == "inside" and len(path) > 3 else _TABLES[path[0]]
    key = ".".join(path)
    if entry["type"] == "extra_forbidden":
        return f"{key}: there is no such key; {nearest(path[-1], owner.model_fields)}"
    if entry["type"] == "missing":
        return f"{key}: missing, and there is no default; it is: {owner.model_fields[path[-1]].description}"
    if entry["type"] in ("model_type", "model_attributes_type", "dict_type"):
        return f"{key}={entry['input']!r}: this is a table, written [{key}]"
    return f"{key}={entry['input']!r}: {entry['msg'][0].lower() + entry['msg'][1:]}"
