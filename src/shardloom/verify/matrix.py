"""Every valid layout of a number of ranks for a model and a sequence length; no torch."""

from collections.abc import Iterator
from itertools import product
from typing import Any

from shardloom.errors import LayoutError
from shardloom.layout import CP_METHODS, ZERO_STAGES, Layout
from shardloom.model.spec import ModelSpec
from shardloom.split.rules import problems


def layouts(spec: ModelSpec, world_size: int, seq_len: int) -> list[Layout]:
    """Every way to lay this model over exactly `world_size` ranks, with each choice that makes a difference.

    Choices that change nothing are left at their default: sequence_parallel without tp, cp_method without cp, "usp"
    with all or none of cp given to Ulysses, and ZeRO with nothing to shard over.
    """
    found = []
    for tp, cp in product(_divisors(world_size), repeat=2):
        if world_size % (tp * cp):
            continue
        for dp_shard in _divisors(world_size // (tp * cp)):
            degrees: dict[str, Any] = {
                "tp": tp,
                "cp": cp,
                "dp_shard": dp_shard,
                "dp_replicate": world_size // (tp * cp * dp_shard),
            }
            for zero, sequence_parallel, method in product(ZERO_STAGES, (False, True), _methods(cp)):
                if (sequence_parallel and tp == 1) or (zero and dp_shard * cp == 1):
                    continue
                try:
                    layout = Layout(**degrees, **method, zero=zero, sequence_parallel=sequence_parallel)
                except LayoutError:
                    continue
                if not problems(spec, layout, seq_len):
                    found.append(layout)
    return found


def _methods(cp: int) -> Iterator[dict[str, Any]]:
    if cp == 1:
        yield {}
        return
    for method in CP_METHODS:
        if method != "usp":
            yield {"cp_method": method}
        else:
            yield from ({"cp_method": method, "ulysses_degree": n} for n in _divisors(cp) if 1 < n < cp)


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]
