"""A run on fewer ranks: the layout with smaller data-parallel degrees and no other changes."""

import tomllib
from collections.abc import Iterator

from shardwright.config.reading import as_toml, parse, resolved_toml
from shardwright.config.run_config import RunConfig
from shardwright.layout.layout import Layout
from shardwright.system.errors import ConfigError, LayoutError


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
