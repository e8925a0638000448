"""Fit a run file to its devices: `layout.recompute = "auto"` by their memory, and a layout on fewer ranks."""

import tomllib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from shardwright.config.reading import as_toml, parse, resolved_toml
from shardwright.config.run_config import RunConfig
from shardwright.layout.keys import AUTO
from shardwright.layout.layout import Layout
from shardwright.system.errors import ConfigError, LayoutError
from shardwright.system.units import GiB

if TYPE_CHECKING:
    from shardwright.cost.job import Job

MARGIN = 0.1
"""Fraction of the memory that is kept free, as in a plan."""


def needs_memory(config: RunConfig) -> bool:
    """Return whether the layout depends on the memory of a rank."""
    return config.layout.recomputation[0] == AUTO


def settled(config: RunConfig, memory_bytes: float, margin: float = MARGIN) -> tuple[RunConfig, str]:
    """Return the configuration with the least recomputation that fits, and the choice in words with the peak memory.

    `memory_bytes`: memory of a rank's device, unless the run file sets `memory_gib`; the fraction `margin` is kept
    free. Deterministic. Raises LayoutError if no choice fits, and if the plan has no formulas for the run.
    """
    from shardwright.planner.recomputation import least_recomputation

    if config.precision.compute == "fp64":
        raise LayoutError(
            f"layout.recompute={AUTO!r} goes by the memory formulas of the plan, which has none for "
            f"precision.compute='fp64'; set recompute to none, selective or full"
        )
    layout, fullest = config.layout.layout(), fullest_stage_config(config)
    limit = (1 - margin) * (memory_bytes if config.memory_gib is None else config.memory_gib * GiB)
    chosen = least_recomputation(job_of(fullest), layout, fullest.batch.micro_batch, limit)
    recomputation = {name: getattr(chosen.layout, name) for name in ("recompute", "recompute_layers")}
    return with_recomputation(config, **recomputation), str(chosen)


def fullest_stage_config(config: RunConfig) -> RunConfig:
    """Return the configuration of a run that has, in every step, the batch of the stage that needs most memory: by the
    formulas of the plan, or for precision.compute='fp64' by the tokens of a micro-batch; the last of several."""
    from shardwright.planner.recomputation import peak_bytes

    def needed(config: RunConfig) -> float:
        if config.precision.compute == "fp64":
            return config.batch.micro_batch * config.batch.seq_len
        return peak_bytes(job_of(config), config.layout.layout(), config.batch.micro_batch)

    return max(reversed(config.by_stage), key=needed) if config.batch.stages else config


def job_of(config: RunConfig, accelerator: str = "h100") -> "Job":
    """Return the job of a run file, with its precision and its stack, on one node of an accelerator. Memory formulas
    use the accelerator only for its libraries."""
    from shardwright.cost.hardware import cluster
    from shardwright.cost.job import Job
    from shardwright.cost.stack import SHARDWRIGHT, SHARDWRIGHT_COMPILED

    size = config.layout.layout().world_size
    return Job(
        model=config.spec(),
        cluster=cluster(f"{accelerator}:{size}/{size}"),
        seq_len=config.batch.seq_len,
        global_batch=config.batch.global_batch,
        precision=config.precision.planned,
        optimizer=config.optimizer.name,
        narrow_states=config.optimizer.state_dtype == "bf16",
        optimizer_options=tuple(config.optimizer.options.items()),
        averages=len(config.average.slots),
        averages_on_host=config.average.device == "cpu",
        pairs=config.preference.kind != "none",
        stack=SHARDWRIGHT_COMPILED if config.precision.compile else SHARDWRIGHT,
    )


def with_recomputation(config: RunConfig, recompute: str, recompute_layers: int | None) -> RunConfig:
    """Return the configuration with these values instead of "auto"."""
    section = config.layout.model_copy(update={"recompute": recompute, "recompute_layers": recompute_layers})
    return config.model_copy(update={"layout": section})


def shrunk(config: RunConfig, most: int, least: int) -> RunConfig | None:
    """Return the run on the largest usable number of ranks from `least` to `most`, or None if no number is usable.

    Only dp_replicate and dp_shard decrease, dp_replicate first, because replicas are redundant. tp, cp, pp, ep, the
    global batch and the micro-batch stay, so that the samples of a step are the same.
    """
    layout = config.layout.layout()
    for replicate, shard in _degrees(layout, most, least):
        try:
            smaller = layout.changed(dp_replicate=replicate, dp_shard=shard)
        except LayoutError:
            continue
        if smaller.ep != layout.ep:
            continue
        changes = [
            f"layout.{name}={as_toml(value)}"
            for name, value in vars(smaller).items()
            if value != getattr(layout, name) and value is not None
        ]
        try:
            return parse(tomllib.loads(resolved_toml(config)), changes)
        except ConfigError:  # the global batch cannot be partitioned, or a section does not fit this layout
            continue
    return None


def _degrees(layout: Layout, most: int, least: int) -> Iterator[tuple[int, int]]:
    """Yield (dp_replicate, dp_shard) of worlds of `least` to `most` ranks, largest first, then largest dp_shard."""
    others = layout.world_size // layout.data_ranks
    pairs = [
        (replicate, shard)
        for replicate in range(1, layout.dp_replicate + 1)
        for shard in range(1, layout.dp_shard + 1)
        if least <= replicate * shard * others <= most
    ]
    yield from sorted(pairs, key=lambda pair: (pair[0] * pair[1], pair[1]), reverse=True)
