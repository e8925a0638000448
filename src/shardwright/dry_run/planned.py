"""The plan's formulas for a rank, shown next to the results of the dry run. No torch."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from shardwright.config import RunConfig
from shardwright.config.settle import job_of
from shardwright.cost.collectives import PricedMessage, named, point_to_point
from shardwright.cost.flops import executed_flops
from shardwright.cost.job import Candidates
from shardwright.cost.stack import SHARDWRIGHT
from shardwright.cost.step import estimate
from shardwright.cost.traffic import shards_over_link, step_messages
from shardwright.dry_run.length import axes_of
from shardwright.dry_run.record import LINK, AxisTraffic, RankRecord
from shardwright.layout.layout import Layout
from shardwright.system.errors import LayoutError

GROUPS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "parameters": (("parameters", "gathered"), ("weights", "master", "gathered")),
    "gradients": (("gradients",), ("gradients",)),
    "states": (("states",), ("optimizer",)),
    "activations and buffers": (
        ("activations", "communication", "temporaries"),
        ("activations", "experts", "logits", "working", "buffers"),
    ),
}
"""Kinds of memory that can be compared: the dry run's kinds, and the plan's kinds (`cost.memory.KINDS`)."""


@dataclass(frozen=True)
class PlannedRank:
    """The plan's prediction for a rank.

    `peak_bytes`: peak memory without `workspace_bytes` of libraries, which a dry run does not see. `groups`: bytes of
    each of GROUPS. `lost_share`: additional memory that the allocator reserves, as a fraction of both. `flops`: of a
    step, the mean over ranks. `sent`: messages of the rank by axis and operation. It includes parameter shards that are
    copied between host and device, but not messages of a few bytes, which the plan does not price.
    """

    peak_bytes: float
    workspace_bytes: float
    lost_share: float
    groups: dict[str, float]
    moment: str
    flops: float
    sent: dict[tuple[str, str], AxisTraffic]


def planned(config: RunConfig, rank: int) -> PlannedRank | str:
    """Return the memory of a rank by the plan, or the reason why the plan has none."""
    if config.precision.compute == "fp64":
        return "the plan has no formulas for precision.compute='fp64'"
    from shardwright.cost.memory import MOMENTS

    layout = config.layout.layout()
    job = replace(job_of(config), stack=SHARDWRIGHT)  # a dry run compiles nothing
    try:
        memory = estimate(job, layout, config.batch.micro_batch).memory
        candidates = Candidates.from_layout(layout, config.batch.micro_batch)
    except LayoutError as error:
        return str(error)
    pp_rank = layout.coordinates(rank)["pp"]
    kinds = {kind: float(values[0, pp_rank]) for kind, values in memory.kinds.items()}
    groups = {name: sum(kinds[kind] for kind in of_plan) for name, (_, of_plan) in GROUPS.items()}
    return PlannedRank(
        sum(groups.values()),
        kinds["workspace"],
        float(memory.lost_bytes[0, pp_rank] / memory.rank_bytes[0, pp_rank]),
        groups,
        MOMENTS[int(memory.moment[0, pp_rank])],
        float(executed_flops(job, candidates).full[0]) * job.seq_len * job.global_batch / layout.world_size,
        _sent(step_messages(job, candidates, pp_rank), layout, rank)
        | {
            (LINK, f"copy {where}"): AxisTraffic(*n_bytes)
            for where, n_bytes in shards_over_link(job, candidates, pp_rank).items()
        },
    )


def _sent(messages: Iterable[PricedMessage], layout: Layout, rank: int) -> dict[tuple[str, str], AxisTraffic]:
    calls: Counter[tuple[str, str]] = Counter()
    n_bytes: Counter[tuple[str, str]] = Counter()
    for message in messages:
        size, stride, count, message_bytes = (
            np.asarray(number).item() for number in (message.size, message.stride, message.calls, message.n_bytes)
        )
        if message.collective is point_to_point:
            key = "pp" if layout.pp > 1 and stride * layout.pp >= layout.world_size else "cp", "send"
        else:
            first = rank - rank // stride % size * stride
            group = tuple(range(first, first + size * stride, stride))
            key = axes_of(layout, group, rank), named(message.collective)
        calls[key] += round(count)
        n_bytes[key] += round(count * message_bytes)
    return {key: AxisTraffic(calls[key], n_bytes[key]) for key in calls}


def grouped(record: RankRecord) -> dict[str, int]:
    """Return the peak of a record in the groups of `PlannedRank.groups`."""
    return {name: sum(record.peak.kinds[kind] for kind in dry) for name, (dry, _) in GROUPS.items()}
