"""The least recomputation with which a layout fits, by the planner's memory formulas."""

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
    """The chosen layout, its bytes at the peak, and the `limit_bytes` that a rank may use."""

    layout: Layout
    peak_bytes: float
    limit_bytes: float

    def __str__(self) -> str:
        """Return `recompute selective, recompute_layers 3: 61.2 of 72 GiB`."""
        names = ("recompute", "recompute_layers")
        texts = [f"{name} {value}" for name in names if (value := getattr(self.layout, name)) is not None]
        return f"{', '.join(texts)}: {format_bytes(self.peak_bytes)} of {format_bytes(self.limit_bytes)}"


def least_recomputation(job: Job, layout: Layout, micro_batch: int, limit_bytes: float) -> SettledLayout:
    """Return the first of these choices that needs at most `limit_bytes` on every rank: no recomputation, selective in
    as few layers of each stage as possible, full in as few as possible. Parts are the default ones.

    Raises LayoutError if a choice of the layout has no formulas. Raises LayoutError with remedies if nothing fits.
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
    chunks = "" if layout.loss_chunk_tokens or job.pairs else "set layout.loss_chunk_tokens, "
    raise LayoutError(
        f"layout.recompute='auto': even with full recomputation of every layer a rank needs {format_bytes(needed)} of "
        f"the {format_bytes(limit_bytes)} that it may; lower batch.micro_batch={micro_batch} or raise tp, pp, cp or "
        f"dp_shard, shard more with layout.zero, {chunks}or raise memory_gib if there is more"
    )


def fewest_layers(job: Job, choice: Choice, limit_bytes: float) -> Choice:
    """Return the layout with recomputation only in the first layers of each stage, in as few as fit. Return the layout
    itself if all layers have to recompute, if nothing recomputes, or if nothing would have to."""
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
    """Return the reserved bytes of the rank with the most memory."""
    return float(reserved_bytes(job, Candidates.from_layout(layout, micro_batch))[0])


def _in_order(job: Job, layout: Layout, micro_batch: int, limit_bytes: float) -> Iterator[Layout]:
    """Yield the layout without recomputation; then, for each kind that fits in all layers, the kind in fewer layers,
    the fewest first; last the kind that recomputes most, which may not fit."""
    yield layout.changed(recompute="none")
    pp_stages = stages(job, Candidates.from_layout(layout, micro_batch))
    most = max(sum(len(pp_stages.layers[stage]) for stage in row) for row in pp_stages.of_rank.tolist())
    for kind in ("selective", "full"):
        whole = layout.changed(recompute=kind)
        if peak_bytes(job, whole, micro_batch) <= limit_bytes:
            yield from (whole.changed(recompute_layers=few) for few in range(1, most))
        yield whole
