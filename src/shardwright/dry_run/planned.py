"""What the formulas of the plan say of a rank, to stand beside what the dry run has found. No torch."""

from dataclasses import dataclass

from shardwright.config import RunConfig
from shardwright.cost.estimate import estimate
from shardwright.cost.hardware import cluster
from shardwright.cost.job import Job
from shardwright.dry_run.record import RankRecord
from shardwright.errors import LayoutError

GROUPS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "parameters": (("parameters", "gathered"), ("weights", "master", "gathered")),
    "gradients": (("gradients",), ("gradients",)),
    "states": (("states",), ("optimizer",)),
    "activations and buffers": (
        ("activations", "communication", "temporaries"),
        ("activations", "experts", "logits", "working", "buffers"),
    ),
}
"""Kinds of memory that can be compared: those of the dry run, and those of the plan (`cost.memory.KINDS`)."""


@dataclass(frozen=True)
class Planned:
    """Bytes of a rank by the plan. `peak_bytes`: at its peak, without `workspace_bytes` of libraries, which no dry run
    sees; `groups`: those of GROUPS; `fragmentation`: what the allocator needs beyond that, as a fraction; `flops`: of a
    step, the mean over ranks."""

    peak_bytes: float
    workspace_bytes: float
    fragmentation: float
    groups: dict[str, float]
    moment: str


def job_of(config: RunConfig) -> Job:
    """The job of a run file, for formulas of memory, which do not read what kind of accelerator it is."""
    size = config.layout.layout().world_size
    return Job(
        model=config.model.spec(),
        cluster=cluster(f"h100:{size}/{size}"),
        seq_len=config.batch.seq_len,
        global_batch=config.batch.global_batch,
        precision=config.precision.compute,
        optimizer=config.optimizer.name,
        narrow_states=config.optimizer.state_dtype == "bf16",
        optimizer_options=tuple(config.optimizer.options.items()),
    )


def planned(config: RunConfig, rank: int) -> Planned | str:
    """The memory of a rank by the plan, or why there is none."""
    if config.precision.compute == "fp64":
        return "the plan has no formulas for precision.compute='fp64'"
    from shardwright.cost.memory import MOMENTS

    layout = config.layout.layout()
    job = job_of(config)
    try:
        memory = estimate(job, layout, config.batch.micro_batch).memory
    except LayoutError as error:
        return str(error)
    pp_rank = layout.coordinates(rank)["pp"]
    kinds = {kind: float(values[0, pp_rank]) for kind, values in memory.kinds.items()}
    groups = {name: sum(kinds[kind] for kind in of_plan) for name, (_, of_plan) in GROUPS.items()}
    return Planned(
        sum(groups.values()),
        kinds["workspace"],
        memory.fragmentation,
        groups,
        MOMENTS[int(memory.moment[0, pp_rank])],
    )


def grouped(record: RankRecord) -> dict[str, int]:
    """The peak of a record in the groups of `Planned.groups`."""
    return {name: sum(record.peak.kinds[kind] for kind in dry) for name, (dry, _) in GROUPS.items()}
