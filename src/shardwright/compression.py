"""How gradients and parameters travel between data ranks, and which of these ways a layout can have; no torch."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from shardwright.schedule.registry import names
from shardwright.units import divisors

if TYPE_CHECKING:
    from shardwright.layout import Layout
    from shardwright.model.modules import Row

WORDS = {
    "none": "gradients travel in the type in which they accumulate",
    "bf16": "gradients travel in bf16",
    "int8": "gradients travel as integers of 8 bits",
    "int4": "gradients travel as integers of 4 bits",
    **{f"powersgd-{rank}": f"gradients of matrices travel as products of rank {rank}" for rank in (1, 2, 4, 8, 16, 32)},
}
"""What each value of `layout.compress_gradients` means."""
GRADIENTS = tuple(WORDS)
INTEGERS = ("int8", "int4")
"""Those of them that have a scale for each block."""
POWERSGD = tuple(name for name in GRADIENTS if name.startswith("powersgd-"))
"""Those that are products of thin matrices, each with its rank."""
BLOCK = 128
"""Elements of a block, at most. A scale of 4 bytes adds 3 % to integers of 8 bits."""


def block_length(columns: int) -> int:
    """Elements of a block of a row: it is cut into the fewest blocks of equal length, the last of which may be
    shorter."""
    return -(-columns // -(-columns // BLOCK))


def problems(layout: "Layout") -> Iterator[str]:
    """Every rule that is broken, one sentence each."""
    shards, how = layout.dp_shard * layout.cp, layout.compress_gradients
    if how in INTEGERS and not (layout.zero and shards > 1):
        yield (
            f"layout.compress_gradients={how!r} needs zero=1, 2 or 3 with dp_shard x cp above 1, and here zero="
            f"{layout.zero} and dp_shard x cp = {shards}; set dp_shard and zero, or compress_gradients='bf16', which "
            f"every stage can have"
        )
    if how in POWERSGD and (
        layout.zero or layout.tp * layout.ep > 1 or (layout.pp_schedule in names() and len(layout.ways) > 1)
    ):
        yield (
            f"layout.compress_gradients={how!r} needs whole gradients of whole matrices, once a rank: zero=0, tp=1, "
            f"ep=1 and a pp_schedule without replicas of stages, and here zero={layout.zero}, tp={layout.tp}, ep="
            f"{layout.ep} and {layout.pp_schedule!r}; change those, or set compress_gradients='bf16'"
        )
    if shards % layout.node_ranks:
        yield (
            f"layout.node_ranks={layout.node_ranks} does not divide dp_shard x cp = {layout.dp_shard} x {layout.cp} = "
            f"{shards}; valid: {', '.join(map(str, divisors(shards)))}"
        )


def powersgd_rank(layout: "Layout") -> int:
    """The rank of the products that gradients of matrices travel as; 0 where they do not."""
    how = layout.compress_gradients
    return int(how.removeprefix("powersgd-")) if how in POWERSGD else 0


def factored(row: "Row", rank: int) -> bool:
    """Whether the gradient of a parameter travels as products of this rank: all its logical matrices do, or none."""
    if not row.hidden:
        return False
    columns = row.shape[-1]
    return all(rank * (row.heads * n + columns) < row.heads * n * columns for _, n in row.parts)


def gradient_roundings(layout: "Layout") -> int:
    """How often an element of a gradient is rounded on its way to its sum over all data ranks: once in each hop of a
    reduce-scatter, and once on its way to replicas and once on its way back."""
    if layout.compress_gradients == "none" or layout.compress_gradients in POWERSGD:
        return 0
    sharded = layout.zero > 0 and layout.dp_shard * layout.cp > 1
    replicas = layout.dp_replicate * (1 if layout.zero else layout.cp)
    hops = 2 if 1 < layout.node_ranks < layout.dp_shard * layout.cp else 1
    return sharded * hops + 2 * (replicas > 1)
