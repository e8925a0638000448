"""The least recomputation with which a layout fits, by the memory formulas of the plan."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from shardwright.cost.host import host_share
from shardwright.cost.job import Candidates, Job
from shardwright.cost.pipeline import stages
from shardwright.cost.reserved import reserved_bytes
from shardwright.layout.keys import KEYS
from shardwright.layout.layout import Layout
from shardwright.planner.choice import Choice
from shardwright.system.errors import LayoutError
from shardwright.system.units import format_bytes


@dataclass(frozen=True)
class SettledLayout:
    """The layout that was chosen, and what of the `limit_bytes` that a rank may need it does need at its peak."""

    layout: Layout
    peak_bytes: float
    limit_bytes: float

    def __str__(self) -> str:
        """`recompute selective, recompute_layers 3: 61.2 of 72 GiB`."""
        names = ("recompute", "recompute_layers")
        said = [f"{name} {value}" for name in names if (value := getattr(self.layout, name)) is not None]
        return f"{', '.join(said)}: {format_bytes(self.peak_bytes)} of {format_bytes(self.limit_bytes)}"


def least_recomputation(job: Job, layout: Layout, micro_batch: int, limit_bytes: float) -> SettledLayout:
    """The first that needs no more than `limit_bytes` on any rank: none, selective for as few layers of each stage as
    possible, full for as few as possible. Parts are the default ones.

    Raises LayoutError where a choice of the layout has no formulas, and where nothing fits, with what would help.
    """
    unpriced = [name for name, key in KEYS.items() if getattr(layout, name) in key.not_priced()]
    if unpriced:
        raise LayoutError(
            *(
                f"layout.recompute='auto' goes by the memory formulas of the plan, which has none for "
                f"layout.{name}={getattr(layout, name)!r}; set recompute to none, selective or full"
                for name in unpriced
            )
        )
    needed = float("inf")
    for tried in _in_order(job, layout, micro_batch, limit_bytes):
        needed = peak_bytes(job, tried, micro_batch)
        if needed <= limit_bytes:
            return SettledLayout(tried, needed, limit_bytes)
    chunks = "" if layout.loss_chunk_tokens else "set layout.loss_chunk_tokens, "
    raise LayoutError(
        f"layout.recompute='auto': even with full recomputation of every layer a rank needs {format_bytes(needed)} of "
        f"the {format_bytes(limit_bytes)} that it may; lower batch.micro_batch={micro_batch} or raise tp, pp, cp or "
        f"dp_shard, shard more with layout.zero, {chunks}or raise memory_gib if there is more"
    )


def fewest_layers(job: Job, choice: Choice, limit_bytes: float) -> Choice:
    """The same layout, in which only the first layers of each stage recompute, as few as fit; the layout itself where
    all have to, where nothing recomputes, and where nothing would have to."""
    layout, micro_batch = choice.layout, choice.micro_batch
    if not layout.recomputes:
        return choice

    def fits(tried: Layout) -> bool:
        room = host_share(job, Candidates.from_layout(tried, micro_batch))[0] <= 1
        return bool(room and peak_bytes(job, tried, micro_batch) <= limit_bytes)

    most = max(map(len, stages(job, choice.candidates).layers))
    too_few, enough = 0, most
    if fits(layout.changed(recompute="none")):
        return choice
    while enough - too_few > 1:
        few = (too_few + enough) // 2
        too_few, enough = (too_few, few) if fits(layout.changed(recompute_layers=few)) else (few, enough)
    return choice if enough == most else replace(choice, layout=layout.changed(recompute_layers=enough))


def peak_bytes(job: Job, layout: Layout, micro_batch: int) -> float:
    """Reserved bytes of the rank with the most."""
    return float(reserved_bytes(job, Candidates.from_layout(layout, micro_batch))[0])


def _in_order(job: Job, layout: Layout, micro_batch: int, limit_bytes: float) -> Iterator[Layout]:
    """No recomputation, then for each kind that fits in all layers the same in fewer, the fewest first; last the kind
    that recomputes most, which may not fit."""
    yield layout.changed(recompute="none")
    held = stages(job, Candidates.from_layout(layout, micro_batch))
    most = max(sum(len(held.layers[stage]) for stage in row) for row in held.of_rank.tolist())
    for kind in ("selective", "full"):
        whole = layout.changed(recompute=kind)
        if peak_bytes(job, whole, micro_batch) <= limit_bytes:
            yield from (whole.changed(recompute_layers=few) for few in range(1, most))
        yield whole
