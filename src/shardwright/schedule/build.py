"""Every schedule by its name: what can be built, why not, and the building."""

from collections.abc import Callable, Iterator

from shardwright.errors import ScheduleError, nearest
from shardwright.schedule.actions import Schedule
from shardwright.schedule.basic import afab, interleaved, one_f_one_b
from shardwright.schedule.dualpipe import dualpipe, dualpipe_v, zb_v
from shardwright.schedule.memory import KEPT_FOR_WEIGHT
from shardwright.schedule.placement import V_SHAPED
from shardwright.schedule.simulate import Times
from shardwright.schedule.zero_bubble import zb_h1, zb_h2

_BUILDERS: dict[str, Callable[[int, int], Schedule]] = {
    "afab": afab,
    "1f1b": one_f_one_b,
    "zb-h1": zb_h1,
    "zb-h2": zb_h2,
    "zb-v": zb_v,
    "dualpipe": dualpipe,
    "dualpipe-v": dualpipe_v,
}
NAMES = ("afab", "1f1b", "interleaved-1f1b", "zb-h1", "zb-h2", "zb-v", "dualpipe", "dualpipe-v", "auto")


def build(
    name: str,
    n_ranks: int,
    n_microbatches: int,
    virtual_stages: int = 1,
    times: Times | None = None,
    in_flight_limit: int | None = None,
    *,
    kept_for_weight: float = KEPT_FOR_WEIGHT,
) -> Schedule:
    """The schedule of that name, one of `NAMES`, for one step of n_microbatches on n_ranks ranks of `pp`.

    `virtual_stages`: stages a rank holds, for interleaved-1f1b; the others have a fixed number (`stages_per_rank`).
    `times`, `in_flight_limit` (in microbatches in flight on a rank, by default 2 x n_ranks) and `kept_for_weight`
    (what one that waits for its W counts, 0 to 1) are what "auto" searches a schedule for; the others do not depend on
    them.

    Raises ScheduleError with every one of `problems`.
    """
    found = problems(name, n_ranks, n_microbatches, virtual_stages)
    if in_flight_limit is not None and in_flight_limit < 1:
        found.append(f"in_flight_limit={in_flight_limit} microbatches in flight on a rank: valid: 1 or more")
    if found:
        raise ScheduleError(*found)
    if name == "auto":
        from shardwright.schedule.search import search

        return search(n_ranks, n_microbatches, times or Times(), in_flight_limit, kept_for_weight=kept_for_weight)
    if name == "interleaved-1f1b":
        return interleaved(n_ranks, n_microbatches, virtual_stages)
    return _BUILDERS[name](n_ranks, n_microbatches)


def problems(name: str, n_ranks: int, n_microbatches: int, virtual_stages: int = 1) -> list[str]:
    """Why a schedule cannot be built, one line for each rule that is broken; empty where it can."""
    if name not in NAMES:
        return [f"schedule {name!r} is not known; {nearest(name, NAMES)}"]
    return list(_problems(name, n_ranks, n_microbatches, virtual_stages))


def stages_per_rank(name: str, virtual_stages: int = 1) -> int:
    """Stages whose weights a rank holds. In dualpipe the two are held by another rank too: it has as many stages as
    ranks, and the others this many times as many."""
    if name == "interleaved-1f1b":
        return virtual_stages
    return 2 if name == "dualpipe" or name in V_SHAPED else 1


def _problems(name: str, n_ranks: int, n_microbatches: int, virtual_stages: int) -> Iterator[str]:
    for what, value in (("pp", n_ranks), ("microbatches", n_microbatches), ("virtual_stages", virtual_stages)):
        if value < 1:
            yield f"{name}: {what}={value}: valid: 1 or more"
    if name == "dualpipe":
        if n_ranks > 0 and n_ranks % 2:
            yield (
                f"{name}: pp={n_ranks} is odd, and its ranks are paired from both ends; nearest: {_even(n_ranks)}; "
                f"dualpipe-v runs on any number"
            )
        if n_microbatches > 0 and n_microbatches % 2:
            yield (
                f"{name}: microbatches={n_microbatches} is odd, and half of them enter at each end; nearest: "
                f"{_even(n_microbatches)}"
            )
    if name in V_SHAPED and virtual_stages > 2:
        yield f"{name}: virtual_stages={virtual_stages}, but a rank holds the 2 stages of its V; valid: 1 (unset) or 2"
    elif name not in (*V_SHAPED, "interleaved-1f1b") and virtual_stages > 1:
        yield (
            f"{name}: virtual_stages={virtual_stages}, but its number of stages on a rank is fixed; valid: 1, or "
            f"schedule interleaved-1f1b"
        )


def _even(odd: int) -> str:
    return " or ".join(str(n) for n in (odd - 1, odd + 1) if n)
