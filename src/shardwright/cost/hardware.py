"""Accelerators, links and clusters, read from the package's hardware.toml and from a user's file of the same form.

    accelerator("A100-80GB-SXM")        rates and memory of one accelerator
    cluster("h100:64")                  64 of them in nodes of the usual 8, with the usual network
    cluster("h100:64/4@800Gb")          in nodes of 4, each with 800 Gbit/s to the others
    cluster("gb200:64")                 64 of one rack of 72
    cluster("mine:64", extra="my.toml") a cluster defined in a user's file

Files have figures in the units of data sheets (GB/s, Gbit/s, TFLOP/s, GiB, microseconds); the functions return bytes,
FLOPs and seconds. A figure belongs to an accelerator or to a network, never to one table of measurements.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from shardwright.cost.hardware_file import (
    AcceleratorTable,
    ClusterTable,
    InsideTable,
    LogCalibrationTable,
    NetworkTable,
    RatesTable,
    find,
    known_tables,
    node_rates,
    packaged,
)
from shardwright.system.errors import InputError, nearest
from shardwright.system.units import GiB, MiB, parsed_bytes

LARGEST = 1_000_000
"""Maximum accelerators of a cluster; ten times the largest one in existence."""
FORM = "NAME:COUNT, then if needed /NODE_SIZE and @GBIT_PER_S_PER_NODE, such as h100:64, h100:64/4 or h100:64@1600Gb"


@dataclass(frozen=True, kw_only=True)
class NetworkLink:
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
    part of the disks of its node, read or written, 0 if unknown; `host_memory_bytes_per_s`: its equal part of
    the bandwidth that an optimizer's update on the host reaches, reads and writes together, 0 if unknown;
    `failures_per_day`: interruptions of a run that one accelerator causes in a day, 0 if unknown.

    `memory_bytes`: available to a program. `matmul_share`: by precision, the fraction of the peak that the best large
    matmul has reached; `memory_share`: the fraction of the bandwidth that a large copy reaches. `multiprocessors`:
    processors over which the blocks of a kernel are distributed. `workspace_bytes`: that a matmul of Transformer Engine
    may use. `die`: the name of the accelerator with the same die; `lasting`: the sustained fraction of its best matmul
    rate in training, relative to the fraction of that accelerator. `sources`: the source of each figure, by its key in
    the file. `rates`: measured on this machine (`cost.hardware_file`), with a share `core_share` of the cores;
    `on_host`: it is the processor that also runs Python, and sends messages itself.
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
    failures_per_day: float = 0.0
    rates: RatesTable | None = field(default=None, hash=False, repr=False)
    core_share: float = 1.0
    on_host: bool = False
    host_memory_bytes_per_s: float = 0.0
    workspace_bytes: float = 32 * MiB
    sources: Mapping[str, str] = field(default_factory=dict, hash=False, repr=False)

    def peak_problem(self, precision: str) -> str | None:
        """Return why matmuls of a precision cannot be priced: their peak is not known; else None."""
        if precision in self.flops_per_s:
            return None
        return f"the peak of {self.name} in it is not known; known: {', '.join(self.flops_per_s)}"

    @property
    def is_cpu(self) -> bool:
        """Whether it is a processor that runs the training program itself."""
        return self.on_host or self.name == "cpu"


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """`size` accelerators in nodes of `node_size`, joined by `inside` in a node and by `across` between nodes.

    Ranks are numbered node by node. `across` is the link of one accelerator, with its equal part of the node's network,
    and `node_bytes_per_s` the line rate of the whole node. `host_memory_part`: bytes of a node's host memory for each
    of its accelerators, 0 if unknown. `calibrated`: constants calibrated by training logs, by kind of software
    (`cost.machine`).
    """

    name: str
    accelerator: Accelerator
    size: int
    node_size: int
    inside: NetworkLink
    across: NetworkLink
    node_bytes_per_s: float
    host_memory_part: float = 0.0
    usual_bytes_per_s: float = 0.0
    calibrated: Mapping[str, LogCalibrationTable] = field(default_factory=dict, hash=False)

    @property
    def host_memory_bytes(self) -> float:
        """Return the bytes of memory of the host of a node, 0 if unknown."""
        return self.host_memory_part * self.node_size

    def with_host_memory(self, text: str) -> "Cluster":
        """Return the same nodes, each with this memory of its host. Raises InputError if the text is not a size."""
        n_bytes = parsed_bytes(text)
        if n_bytes is None:
            raise InputError(
                "a number above 0 and a unit are needed, the memory of one node's host, such as 512GiB or 2TB"
            )
        return replace(self, host_memory_part=n_bytes / self.node_size)

    @property
    def nodes(self) -> int:
        """Return the number of nodes."""
        return self.size // self.node_size

    def with_network(self, node_bytes_per_s: float) -> "Cluster":
        """Return the same nodes on a network of another line rate; collectives reach the same fraction of it."""
        reached = self.across.bytes_per_s * node_bytes_per_s / self.node_bytes_per_s
        return replace(self, across=replace(self.across, bytes_per_s=reached), node_bytes_per_s=node_bytes_per_s)

    def on_usual_network(self) -> "Cluster":
        """Return the same nodes on a network that has at least the line rate of the accelerator's usual one."""
        usual = self.usual_bytes_per_s * self.node_size
        return self if self.node_bytes_per_s >= usual else self.with_network(usual)

    def on(self, network: str, extra: str | Path | None = None) -> "Cluster":
        """Return the same nodes and line rate on another kind of network. Raises InputError if no file has it."""
        if network not in (known := known_tables(extra).networks):
            raise InputError(f"network {network!r} is not known; {nearest(network, known)}")
        return replace(self, across=_across(network, known[network], self.node_bytes_per_s / self.node_size * 8 / 1e9))


def accelerator(name: str, extra: str | Path | None = None) -> Accelerator:
    """Return an accelerator by its name or an alias; case and punctuation do not matter.

    Raises InputError for a name that is in no file.
    """
    known = known_tables(extra)
    return _accelerator(*find("accelerator", name, known.accelerators))


def node_size(name: str, extra: str | Path | None = None) -> int:
    """Return the size of the usual node of an accelerator. Raises InputError for a name that is in no file."""
    return find("accelerator", name, known_tables(extra).accelerators)[1].node_size


def packaged_accelerators() -> list[Accelerator]:
    """Return every accelerator that is part of the package."""
    return [_accelerator(name, table) for name, table in packaged().accelerators.items()]


def cluster(text: str, extra: str | Path | None = None) -> Cluster:
    """Return a cluster from `NAME:COUNT`, `NAME:COUNT/NODE_SIZE` or `NAME:COUNT@GBIT_PER_S_PER_NODE`, or both, where
    NAME is an accelerator's or a cluster's.

    Fewer accelerators than a usual node has are a part of one node. Raises InputError for another form, an unknown
    name, or a count that does not fill its nodes.
    """
    known = known_tables(extra)
    if "," in text or "+" in text:
        raise InputError(
            f"cluster {text!r}: a plan has accelerators of one kind, and clusters of several kinds are not supported; "
            f"plan each kind by itself, or compare them with --compare"
        )
    form = re.fullmatch(r"(.+?):(\d+)(?:/(\d+))?(?:@(\d+(?:\.\d+)?)(?:g\w*(?:/s)?)?)?", text.replace(" ", ""), re.I)
    if form is None:
        raise InputError(f"cluster {text!r}: write {FORM}")
    named, size = form[1], int(form[2])
    tables: dict[str, AcceleratorTable | ClusterTable] = {**known.accelerators, **known.clusters}
    name, table = find("cluster", named, tables)
    node_size = int(form[3] or table.node_size)
    if form[3] is None and isinstance(table, AcceleratorTable) and table.part_of_node and size:
        node_size = evenly(size, node_size)
    if form[3] is None:  # fewer than a whole node has: a part of one node
        node_size = min(node_size, max(size, 1))
    if node_size < 1 or not 1 <= size <= LARGEST:
        raise InputError(f"cluster {text!r}: a cluster has 1 to {LARGEST:,} accelerators, and a node 1 or more")
    if form[4] and not 0 < float(form[4]) < 1e6:
        raise InputError(f"cluster {text!r}: {form[4]} Gbit/s a node; valid: more than 0, such as 1600")
    if isinstance(table, ClusterTable):
        kind, usual = find("accelerator", table.accelerator, known.accelerators)
        gbit_per_s = table.gbit_per_s_per_node / table.node_size
    else:
        kind, usual = name, table
        gbit_per_s = table.gbit_per_s
    if form[4]:
        gbit_per_s = float(form[4]) / node_size
    if size % node_size:
        below = size - size % node_size
        raise InputError(
            f"cluster {text!r}: {size} accelerators do not fill nodes of {node_size} ({size} = {node_size}*"
            f"{size // node_size} + {size % node_size}); nearest: {below} and {below + node_size}, or name another "
            f"node size: {named}:{size}/NODE_SIZE"
        )
    # A part of a larger node has its switches.
    is_whole = table.node_size == node_size or (form[3] is not None and isinstance(table, AcceleratorTable))
    return Cluster(
        name=text.strip(),
        accelerator=_accelerator(kind, usual, node_size),
        size=size,
        node_size=node_size,
        inside=_inside(usual.inside, _share(usual, node_size), node_size if is_whole else 0),
        across=_across(table.network, known.networks[table.network], gbit_per_s),
        node_bytes_per_s=gbit_per_s * node_size * 1e9 / 8,
        host_memory_part=(table.host_memory_gib or 0) * GiB / table.node_size,
        usual_bytes_per_s=usual.gbit_per_s * 1e9 / 8,
        calibrated=(table.calibrated if isinstance(table, ClusterTable) else None) or {},
    )


def evenly(size: int, largest: int) -> int:
    """Return the accelerators of each node, if `size` are spread evenly over the fewest nodes of at most `largest`."""
    nodes = next(k for k in range(-(-size // largest), size + 1) if size % k == 0)
    return size // nodes


def _share(table: AcceleratorTable, ranks: int) -> float:
    measured = node_rates(table.rates or {}, ranks, table.cores)
    return 1.0 if measured is None else measured[1]


def _accelerator(name: str, table: AcceleratorTable, ranks: int | None = None) -> Accelerator:
    """Build an accelerator. `ranks`: of a node, which measured rates depend on; by default a whole node's."""
    result = Accelerator(
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
        failures_per_day=(table.failures_per_1000_days or 0) / 1000,
        host_memory_bytes_per_s=(table.host_memory_gb_per_s or 0) * 1e9,
        workspace_bytes=(table.workspace_mib or 32) * MiB,
        sources=table.sources,
    )
    measured = node_rates(table.rates or {}, ranks or table.node_size, table.cores)
    if measured is None:
        return result
    rates, share = measured
    reached: dict[str, float] = {
        form: tflops * 1e12 * share / result.flops_per_s[form] for form, tflops in rates.tflops.items()
    }
    return replace(
        result,
        memory_bytes=rates.memory_gib * GiB * share,
        memory_bytes_per_s=rates.memory_gb_per_s * 1e9 * share,
        matmul_share=reached,
        memory_share=1.0,
        rates=rates,
        core_share=share,
        on_host=table.cores is not None,
    )


def _inside(table: InsideTable, share: float = 1.0, node_size: int = 0) -> NetworkLink:
    """Build the link inside a node of `node_size`, or 0 for a part of a node. `share`: of the cores of the measured
    ranks; messages take CPU time."""
    wired = node_size > 1 and node_size == table.wired_node
    peer_gb_per_s = table.bus_gb_per_s / (node_size - 1) if wired else table.peer_gb_per_s or 0
    return NetworkLink(
        name="inside",
        bytes_per_s=table.bus_gb_per_s * 1e9 * share,
        latency_s=table.latency_us * 1e-6 / share,
        half_bytes=table.half_mib * MiB,
        start_s=table.start_us * 1e-6 / share,
        switch_bytes_per_s=(0 if wired else table.switch_gb_per_s or 0) * 1e9,
        peer_bytes_per_s=peer_gb_per_s * 1e9,
        relative={kind: times for kind, times in (table.relative or {}).items()},
    )


def _across(name: str, table: NetworkTable, gbit_per_s: float) -> NetworkLink:
    return NetworkLink(
        name=name,
        bytes_per_s=table.share * gbit_per_s * 1e9 / 8,
        latency_s=table.latency_us * 1e-6,
        half_bytes=table.half_mib * MiB,
        start_s=table.start_us * 1e-6,
    )
