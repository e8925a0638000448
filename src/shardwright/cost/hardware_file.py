"""The form of hardware.toml and of files like it: their tables, how a file is read and merged, and validation.

Figures are in the units of data sheets; `cost/hardware.py` converts them to accelerators and clusters.

Tables of a hardware file: their common part, and the rates that `shardwright measure` has measured on a machine,
which replace the constants fitted to published runs.

An accelerator of a hardware file has rates by the number of ranks of a node that they were measured with, since ranks
on the processor of one host share its cores and its memory's bandwidth. Rates for more ranks than were measured follow
from the shares of the cores.
"""

import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from shardwright.system.errors import InputError, nearest
from shardwright.system.files import parse_toml, read_text

VERSION = 3
"""Version of the tables below. A file with another version was written by another version of shardwright."""
Kernel = Literal[
    "norm_bytes", "rmsnorm_bytes", "residual_bytes", "heads_bytes", "rope_bytes", "gated_bytes", "gelu_bytes",
    "loss_bytes", "optimizer_bytes",
]  # fmt: skip


def name_of_file(path: Path) -> str:
    """Return the name that an accelerator or a cluster gets in the hardware file that a verb writes: the name of the
    file, in characters that TOML allows unquoted."""
    return re.sub(r"[^A-Za-z0-9_-]+", "-", path.stem).strip("-") or "mine"


class HardwareTable(BaseModel):
    """A table of a hardware file: unknown keys are errors, values are not coerced."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(gt=0, le=1)]
Count = Annotated[int, Field(ge=1)]
Peak = Literal["fp32", "tf32", "bf16", "fp16", "fp8", "mxfp8", "nvfp4"]
ByPrecision = dict[Peak, Positive]
CalibratedConstant = Literal["matmuls", "attention", "kernels", "network", "host"]
CollectiveName = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "point_to_point"]


class MeasuredTable(HardwareTable):
    """How, when and with which software a file was measured."""

    version: Count = Field(description=f"of these tables; this shardwright reads {VERSION}")
    date: str = Field(description="day of the measurement")
    shardwright: str = Field(description="version of shardwright")
    torch: str = Field(description="version of PyTorch")
    python: str = Field(description="version of Python")
    machine: str = Field(description="name of the processor or the accelerator")
    clock: Literal["wall", "cpu"] = Field(description="wall seconds, or CPU-seconds of a loaded machine")
    took_s: NotNegative = Field(description="seconds that the measurement took")


class GenerationTable(HardwareTable):
    """The overhead of a pass of `shardwright generate` on a processor, and the rates of matmuls of few tokens."""

    layer_us: NotNegative = Field(description="of a layer in each pass, microseconds")
    pass_us: NotNegative = Field(description="of each pass: embedding, head, and choosing the batch, microseconds")
    request_us: NotNegative = Field(description="of each sequence in each pass, microseconds")
    sequence_us: NotNegative = Field(
        description="of each sequence in a layer of a decode pass, in addition to its heads, microseconds"
    )
    cached_share: Positive = Field(
        description="of the rate of matmuls in fp32, in attention of one token of each sequence to the cache"
    )
    head_us: NotNegative = Field(description="of each head of each sequence in a layer of a decode pass, microseconds")
    prompt_us: NotNegative = Field(description="of each prompt in each layer of the pass that reads it, microseconds")
    split_layer_us: NotNegative = Field(
        description="of a layer that is sharded over tp, without its collectives, microseconds"
    )
    split_pass_us: NotNegative = Field(
        description="of each pass that is sharded over tp, without its collectives, microseconds"
    )
    row_gb_per_s: Positive = Field(description="rate at which a matmul of one token reads its weights, GB/s")
    weights_gb_per_s: Positive = Field(
        description="rate at which a matmul of several tokens reads its weights, before it multiplies, GB/s"
    )


WORK = "work"
"""A key of `InStepFactors`."""


class InStepFactors(HardwareTable):
    """Measured time in a step, relative to kernels and messages that run alone."""

    work: Positive = Field(1.0, description="kernels, and the waiting of stages for each other")
    data_parallel: Positive = Field(1.0, description="messages of weights and gradients")
    tensor_parallel: Positive = Field(1.0, description="messages over tp")
    context_parallel: Positive = Field(1.0, description="messages over cp")


class RatesTable(HardwareTable):
    """Rates of one rank of a node with a given number of ranks."""

    memory_gib: Positive = Field(description="GiB that a rank can have")
    process_gib: NotNegative = Field(description="GiB that a rank holds before any of a model")
    holes: list[NotNegative] = Field(
        default_factory=lambda: [0.0] * 4,
        min_length=4,
        max_length=4,
        description="bytes that the C library keeps for each byte of tensors of less than 32 MiB, by ZeRO stage; "
        "cost/pools.py",
    )
    tflops: ByPrecision = Field(description="best rate of a large matmul by precision, 1e12 FLOP/s")
    memory_gb_per_s: Positive = Field(description="bandwidth of a large copy, read and written, GB/s")
    ramp_k: NotNegative = Field(description="input features at which a matmul reaches half of that rate")
    partial_wave: NotNegative = Field(description="waves that a matmul takes longer than its tiles")
    attention_share: Positive = Field(description="rate of attention, forward, of wide heads and long sequences")
    attention_width: NotNegative = Field(description="head width at which attention reaches half of that rate")
    attention_length: NotNegative = Field(description="sequence length at which attention reaches half of that rate")
    attention_backward: Positive = Field(description="time of attention's backward pass, relative to the forward pass")
    launch_us: NotNegative = Field(description="to start the kernels of a layer forward, microseconds")
    launch_backward: NotNegative = Field(description="the same backward, relative to it")
    launch_ends: NotNegative = Field(description="to start kernels of embedding, head and loss, relative to a layer")
    step_us: NotNegative = Field(description="of a step beyond its work, microseconds")
    bucket_us: NotNegative = Field(description="to gather or reduce a block's parameters, beyond the collective")
    kernels: dict[Kernel, NotNegative] = Field(description="bytes moved for each element by our kernels; cost/speed.py")
    in_step: InStepFactors = Field(
        default_factory=InStepFactors, description="time in a step of the training program, relative to that alone"
    )
    generation: GenerationTable | None = Field(
        None, description="passes of shardwright generate, of a CPU; without them plan serve cannot price it"
    )


def node_rates(tables: Mapping[str, RatesTable], ranks: int, cores: int | None) -> tuple[RatesTable, float] | None:
    """Return the rates of a rank of a node with `ranks` ranks, and the share of a core of the measured rank that each
    has, if they share `cores`. The rates are those measured with the most ranks up to `ranks`."""
    if not tables:
        return None
    measured = sorted(map(int, tables))
    nearest = max((count for count in measured if count <= ranks), default=measured[0])
    share = min(1.0, max(nearest, cores) / ranks) if cores is not None else 1.0
    return tables[str(nearest)], share


PACKAGED = Path(__file__).with_name("hardware.toml")


class InsideTable(HardwareTable):
    """Links between the accelerators of a node."""

    bus_gb_per_s: Positive = Field(description="bus bandwidth of a ring all-reduce of a large buffer, GB/s")
    switch_gb_per_s: Positive | None = Field(None, description="buffer GB/s of an all-reduce in the switches")
    peer_gb_per_s: Positive | None = Field(None, description="GB/s of a pair, where each pair has its own wire")
    wired_node: Count | None = Field(
        None, description="accelerators of a node in which each pair has an equal part of the links, without switches"
    )
    start_us: NotNegative = Field(description="of any collective before its first message, microseconds")
    latency_us: Positive = Field(description="of one message, microseconds")
    half_mib: NotNegative = Field(description="MiB sent at which half the bandwidth is reached")
    relative: dict[CollectiveName, Positive] | None = Field(
        None, description="measured time of a kind of collective relative to these figures"
    )


class NetworkTable(HardwareTable):
    """A kind of network between nodes."""

    share: Share = Field(description="of the line rate that a large collective reaches")
    start_us: NotNegative = Field(description="of any collective before its first message, microseconds")
    latency_us: Positive = Field(description="of one message, microseconds")
    half_mib: NotNegative = Field(description="MiB sent by an accelerator at which half the bandwidth is reached")
    sources: dict[str, str] = Field(default_factory=dict, description="where each figure stands")


class AcceleratorTable(HardwareTable):
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
    workspace_mib: Positive | None = Field(
        None, description="MiB that a matmul of Transformer Engine may use; 32 where it is not said"
    )
    lasting: Positive | None = Field(
        None,
        description="the fraction of its best matmul rate that is kept up in training, relative to the fraction of the "
        "accelerator with the same die",
    )
    node_size: Count = Field(description="accelerators of a node")
    network: str = Field(description="kind of network between nodes, a name of [networks]")
    gbit_per_s: Positive = Field(description="line rate of the network for each accelerator, Gbit/s")
    part_of_node: bool | None = Field(
        None,
        description="whether a cluster may use a part of its nodes, such as of a rack of 72; equally many of each",
    )
    host_gb_per_s: Positive | None = Field(
        None, description="link to the memory of the host, each direction, GB/s; none if it is the same memory"
    )
    disk_gb_per_s: Positive | None = Field(
        None, description="its equal part of the disks of a node, read or written, GB/s; without it none is priced"
    )
    failures_per_1000_days: Positive | None = Field(
        None,
        description="interruptions of a run for each 1,000 days of one accelerator, of hardware and software; without "
        "it the rate of its die, else of h100",
    )
    host_memory_gb_per_s: Positive | None = Field(
        None,
        description="its equal part of the memory bandwidth that an update on the host reaches, GB/s; without it none "
        "is priced",
    )
    host_memory_gib: Positive | None = Field(
        None,
        description="memory of the host of a node of node_size accelerators, GiB; a part of a node has its share; "
        "without it no layout is refused for its memory on the host",
    )
    inside: InsideTable = Field(description="links in a node")
    cores: Count | None = Field(
        None, description="cores of a node, if its ranks are processes that share them: a CPU as an accelerator"
    )
    rates: dict[str, RatesTable] | None = Field(
        None, description="what shardwright measure has measured, by the ranks of a node"
    )
    sources: dict[str, str] = Field(default_factory=dict, description="where each figure stands")


CALIBRATED_CONSTANTS: tuple[CalibratedConstant, ...] = get_args(CalibratedConstant)


class LogCalibrationTable(HardwareTable):
    """Constants of a cluster and one software stack, calibrated by `shardwright plan calibrate` (cost/machine.py)."""

    time: dict[CalibratedConstant, Positive] = Field(description="times relative to the packaged constants")
    covariance: dict[CalibratedConstant, list[float]] = Field(
        description="rows of the covariance of the logarithms of these times"
    )
    logs: list[str] = Field(description="the logs, with their steps and their median")


class ClusterTable(HardwareTable):
    """A kind of cluster whose nodes differ from the usual ones of an accelerator."""

    aliases: list[str] = Field(default_factory=list, description="other names people type")
    accelerator: str = Field(description="a name of [accelerators]")
    node_size: Count = Field(description="accelerators of a node")
    network: str = Field(description="kind of network between nodes, a name of [networks]")
    gbit_per_s_per_node: Positive = Field(description="line rate of a node's network, Gbit/s")
    host_memory_gib: Positive | None = Field(None, description="memory of the host of such a node, GiB")
    calibrated: dict[str, LogCalibrationTable] | None = Field(
        None, description="what shardwright plan calibrate has learned from training logs, by kind of software"
    )
    sources: dict[str, str] = Field(default_factory=dict, description="where each figure stands")


class HardwareFile(HardwareTable):
    """A whole file."""

    networks: dict[str, NetworkTable] = Field(default_factory=dict, description="kinds of network between nodes")
    accelerators: dict[str, AcceleratorTable] = Field(default_factory=dict, description="accelerators by name")
    clusters: dict[str, ClusterTable] = Field(default_factory=dict, description="kinds of cluster by name")
    measured: MeasuredTable | None = Field(None, description="how a file of shardwright measure was made")


def _letters(name: str) -> str:
    """Return a name in a normal form, without optional words and punctuation."""
    return re.sub(r"nvidia|amd|geforce|instinct|gpu|[^a-z0-9]", "", name.lower())


_Named = TypeVar("_Named", bound=AcceleratorTable | ClusterTable)


def find(kind: str, name: str, tables: Mapping[str, _Named]) -> tuple[str, _Named]:
    """Return the table with a name or alias; the last file read takes precedence."""
    for known, table in reversed(list(tables.items())):
        if _letters(name) in map(_letters, (known, *table.aliases)):
            return known, table
    raise InputError(f"{kind} {name!r} is not known; {nearest(name.lower(), tables)}")


def known_tables(extra: str | Path | None) -> HardwareFile:
    """Return the packaged tables, with the tables that a user's file adds or replaces."""
    return packaged() if extra is None else _read(Path(extra), packaged())


@lru_cache(maxsize=1)
def packaged() -> HardwareFile:
    """Return the tables that are part of the package."""
    return _read(PACKAGED, HardwareFile())


def _read(path: Path, below: HardwareFile) -> HardwareFile:
    """Merge a file into another. Raises InputError with all its problems at once."""
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
    """Yield every rule between tables that a file breaks, one sentence each."""
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
        for kind, calibrated in (nodes.calibrated or {}).items():
            rows = [calibrated.covariance.get(constant, []) for constant in CALIBRATED_CONSTANTS]
            square = all(len(row) == len(rows) and row[at] > 0 for at, row in enumerate(rows))
            if calibrated.time.keys() != set(CALIBRATED_CONSTANTS) or not square:
                yield (
                    f"clusters.{name}.calibrated.{kind}: time needs a number and covariance {len(rows)} numbers for "
                    f"each of {', '.join(CALIBRATED_CONSTANTS)}, with variances above 0; shardwright plan "
                    f"calibrate writes it"
                )
        if nodes.network not in both.networks:
            hint = nearest(nodes.network, both.networks)
            yield f"clusters.{name}.network={nodes.network!r}: no such network; {hint}"
        try:
            find("accelerator", nodes.accelerator, both.accelerators)
        except InputError as error:
            yield f"clusters.{name}.accelerator: {error}"


_TABLES: dict[str, type[HardwareTable]] = {
    "networks": NetworkTable,
    "accelerators": AcceleratorTable,
    "clusters": ClusterTable,
}


def _sentence(entry: Any) -> str:
    """Return one of pydantic's errors as a sentence with the valid choices."""
    path = [str(part) for part in entry["loc"] if part != "[key]"]
    owner: type[HardwareTable] = HardwareFile
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
