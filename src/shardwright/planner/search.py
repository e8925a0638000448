"""The fastest layouts that fit: memory of all, a bound on the time of those that fit, and simulation of the best."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from shardwright.cost.host import host_share, node_host_bytes
from shardwright.cost.job import Candidates, Floats, Job
from shardwright.cost.memo import EVERY, Memo
from shardwright.cost.reserved import reserved_bytes
from shardwright.cost.step import step_time
from shardwright.planner.choice import Choice, choice_at
from shardwright.planner.distinct import distinct
from shardwright.planner.fixed import OFFLOADS, FixedChoices, none_searched
from shardwright.planner.pool import LayoutPool
from shardwright.planner.priced import PricedLayout
from shardwright.planner.recommendation import candidates, recommend, with_fewest_layers
from shardwright.planner.simplicity import simplest, simplest_near
from shardwright.planner.space import Condition, groups, groups_of, no_layout
from shardwright.planner.spread import spread
from shardwright.system.errors import InputError, LayoutError
from shardwright.system.units import divisors

MARGIN = 0.1
"""Share of an accelerator's memory that is kept free, for what is not counted and for fragments."""
TOP = 10
PARALLEL_FROM = 512
"""Accelerators from which on the time that a search takes is worth several processes."""
CELLS = 2**19
"""Layouts x ranks of `pp` that are evaluated at once: with fewer the calls of numpy take longer than what they do, with
more the arrays leave the cache."""


@dataclass(frozen=True)
class Survey:
    """Layouts of a job: how many, all that fit, and the one that needs least memory (None where there is none).

    `nearest_bytes`: of its device; `least`: the same, or if that is more, the layout's share of its host's memory, as
    that share of the limit of a device.
    """

    n_layouts: int
    pool: LayoutPool
    nearest: Choice | None
    nearest_bytes: float
    least: float


@dataclass(frozen=True)
class Plan:
    """What a search found. `best`: the fastest layouts that fit, the fastest first; empty where none fits. `equals`:
    for each of them, those that cost the same and differ from it, or from one another, in one choice (`distinct`).
    `recommended`: one that ties with the fastest (`planner.recommendation`), which may be that one, or the one of
    `prefer`; `simplest`: the simplest that is shown beside it; both None where none fits. `fixed`: the values that all
    layouts have."""

    job: Job
    limit_bytes: float
    survey: Survey
    best: list[PricedLayout]
    equals: list[list[Choice]]
    recommended: PricedLayout | None
    simplest: PricedLayout | None
    fixed: FixedChoices | None = None
    prefer: str | None = None

    @property
    def pool(self) -> LayoutPool:
        """All layouts that fit."""
        return self.survey.pool


def margin_problems(memory_margin: float) -> list[str]:
    """What is wrong with a share of the memory that is to be kept free."""
    if 0 <= memory_margin < 1:
        return []
    return [f"--memory-margin {memory_margin:g}: a share of the memory is needed, 0 or more and below 1"]


def limit_bytes(job: Job, memory_margin: float) -> float:
    """What a layout may need. Raises InputError for a margin that is no share."""
    if problems := margin_problems(memory_margin):
        raise InputError(*problems)
    return (1 - memory_margin) * job.cluster.accelerator.memory_bytes


def search(
    job: Job,
    *,
    memory_margin: float = MARGIN,
    top: int = TOP,
    fixed: FixedChoices | None = None,
    processes: int = 1,
    prefer: str | None = None,
) -> Plan:
    """The `top` layouts of the whole cluster that train fastest and fit, of equal ones the simplest.

    `memory_margin`: share of an accelerator's memory that is kept free. `fixed`: only layouts with these values. What
    is found is what evaluating every layout of `planner.space` with a simulated schedule would find
    (`LayoutPool.fastest`); of the `TOP` fastest, or `top` if that is more, that recompute, only as few layers of each
    stage as fit do so (`recomputation.fewest_layers`) where that saves `WORTH_A_KEY`, unless `fixed` says what
    recomputes. `prefer`: which layout is recommended, "fastest" or "simplest" (`simplicity.PREFERENCES`), instead of
    `planner.recommendation`'s. `processes`: that evaluate layouts at a time (`survey`); below `PARALLEL_FROM`
    accelerators there is one.

    Raises LayoutError where no layout can partition the batch or has the fixed values, InputError for a margin that is
    no share.
    """
    if fixed is not None and (
        problems := list(job.offload_problems(*(str(fixed.offload.get(name, "none")) for name in OFFLOADS)))
    ):
        raise LayoutError(*problems)
    limit = limit_bytes(job, memory_margin)
    found = survey(job, limit, fixed, processes if job.cluster.size >= PARALLEL_FROM else 1)
    if fixed is not None and not found.n_layouts:
        raise none_searched(job, fixed)
    listed = distinct(found.pool, max(top, TOP))
    best = [PricedLayout.from_choice(job, each.members[each.simplest]) for each in listed]
    equals = [each.others for each in listed]
    if not best:
        return Plan(job, limit, found, [], [], None, None, fixed, prefer)
    fewer_layers = not (fixed and {"recompute", "recompute_layers"} & fixed.values.keys())
    if fewer_layers:
        best, equals = _with_fewest_layers(best, equals, limit)
    plain = simplest_near(best[0], found.pool)
    others = [*candidates(best[0], found.pool, limit, fewer_layers)]
    if fewer_layers:
        plain = [with_fewest_layers(each, limit) for each in plain]
        fewer = [each for each in (*plain, *others) if each.layout.recompute_layers is not None]
        faster = _whole([each for each in fewer if each.step_s < best[0].step_s])
        faster, _ = _with_fewest_layers(faster, [[] for _ in faster], limit)
        best, equals = [*faster, *best], [*([] for _ in faster), *equals]
    plainest = simplest([best[0], *plain, *others])
    recommended = {"fastest": best[0], "simplest": plainest}.get(prefer or "") or recommend([best[0], *others], limit)
    return Plan(job, limit, found, best[:top], equals[:top], recommended, plainest, fixed, prefer)


def _whole(found: Sequence[PricedLayout]) -> list[PricedLayout]:
    """Layouts with recomputation in all layers, each once."""
    whole = {replace(each.choice, layout=each.layout.changed(recompute_layers=None)): each for each in found}
    return [PricedLayout.from_choice(each.job, choice) for choice, each in whole.items()]


def _with_fewest_layers(
    found: list[PricedLayout], equals: list[list[Choice]], limit: float
) -> tuple[list[PricedLayout], list[list[Choice]]]:
    """Layouts with recomputation in as few layers as fit where that is worth another key, the fastest first, and the
    equals of those that stay."""
    rows = []
    for each, others in zip(found, equals, strict=True):
        less = with_fewest_layers(each, limit)
        rows.append((less, others if less is each else []))
    rows.sort(key=lambda row: row[0].step_s)
    return [less for less, _ in rows], [others for _, others in rows]


def survey(
    job: Job, limit: float, condition: Condition | None = None, processes: int = 1, pp: int | None = None
) -> Survey:
    """The memory of every layout, and the bound on the time of those that need no more than `limit` bytes.

    `condition`: only of layouts of this kind. `processes`: more than one each evaluate the layouts of one number of
    stages at a time; `condition` has to be None or FixedChoices then. `pp`: only with pipelines of so many ranks.
    Raises LayoutError where no layout can partition the batch, unless `pp` is given.
    """
    memo = memo_of(job) if processes == 1 else None  # other processes have their own
    evaluate, pps = partial(_survey_of, job, limit, condition, memo), divisors(job.cluster.size) if pp is None else [pp]
    found = [each for each in spread(evaluate, pps, processes) if each is not None]
    if not found:
        if pp is None:
            raise LayoutError(no_layout(job))
        return Survey(0, LayoutPool(job, [], np.zeros(0), np.zeros(0)), None, np.inf, np.inf)
    nearest = min(found, key=lambda each: each.least)
    pools = [each.pool for each in found]
    bounds, peaks = (np.concatenate([getattr(pool, name) for pool in pools]) for name in ("bound_s", "peak_bytes"))
    pool = LayoutPool(job, [group for pool in pools for group in pool.groups], bounds, peaks)
    n_layouts = sum(each.n_layouts for each in found)
    return Survey(n_layouts, pool, nearest.nearest, nearest.nearest_bytes, nearest.least)


def _survey_of(job: Job, limit: float, condition: Condition | None, memo: Memo | None, pp: int) -> Survey | None:
    """The survey of the layouts with `pp` stages; None where none can partition the batch. `memo`: of the job."""
    kept: list[Candidates] = []
    bounds, peaks = [np.zeros(0)], [np.zeros(0)]
    n_layouts, least, nearest_bytes, exists, memo = 0, np.inf, np.inf, False, memo or memo_of(job)
    nearest: Choice | None = None
    for whole in groups_of(job, pp, _offload(condition), condition):
        exists = True
        for group in _parts(whole):
            on_device = reserved_bytes(job, group, max(limit, least), memo)
            needed = _with_host(job, group, on_device, limit, max(limit, least))
            n_layouts += len(group)
            at = int(needed.argmin())
            if needed[at] < least:
                nearest, nearest_bytes, least = choice_at(group, at), float(on_device[at]), float(needed[at])
            fits = needed <= limit
            if fits.any():
                kept.append(group.take(fits))
                peaks.append(on_device[fits])
                bounds.append(step_time(job, kept[-1], simulated=False, memo=memo).total_s)
    if not exists:
        return None
    pool = LayoutPool(job, kept, np.concatenate(bounds), np.concatenate(peaks))
    return Survey(n_layouts, pool, nearest, nearest_bytes, least)


def memo_of(job: Job) -> Memo:
    """An empty one for the layouts of the space of a job."""
    degrees, experts = divisors(job.cluster.size), 1 if job.model.moe is None else job.model.moe.n_experts
    values = dict.fromkeys(("tp", "cp", "dp_shard", "dp_replicate"), degrees)
    return Memo({
        **EVERY, **values, "ep": divisors(experts), "sequence_parallel": (False, True),
        "micro_batch": divisors(job.global_batch),
    })  # fmt: skip


def _with_host(job: Job, candidates: Candidates, on_device: Floats, limit: float, most: float) -> Floats:
    """The bytes that layouts need of a device, or if that is more, the share of their host's memory as that share of
    `limit`; for those that need more than `most` of the device only this."""
    needed, rows = on_device.copy(), np.flatnonzero(on_device <= most)
    if len(rows):
        needed[rows] = np.maximum(on_device[rows], limit * host_share(job, candidates.take(rows)))
    return needed


def fits(job: Job, limit: float, condition: Condition | None = None) -> bool:
    """Whether any layout, of this kind, needs no more than `limit` bytes of a device and the memory of the host;
    returns at the first that does."""
    return any((host_share(job, part) <= 1).any() for part in _on_device(job, limit, condition))


def least_host_bytes(job: Job, limit: float, condition: Condition | None = None) -> float | None:
    """The least memory of a node's host with which a layout of this kind needs no more than `limit` bytes of a device;
    None where none does."""
    needed = [float(node_host_bytes(job, part).min()) for part in _on_device(job, limit, condition)]
    return min(needed, default=None)


def _on_device(job: Job, limit: float, condition: Condition | None) -> Iterator[Candidates]:
    """Layouts that need no more than `limit` bytes of a device, whatever they keep in the memory of the host."""
    memo = memo_of(job)
    for group in groups(job, _offload(condition), condition):
        for part in _parts(group):
            room = reserved_bytes(job, part, limit, memo) <= limit
            if room.any():
                yield part.take(room)


def _offload(condition: Condition | None) -> dict[str, Any]:
    return condition.offload if isinstance(condition, FixedChoices) else {}


def _parts(group: Candidates) -> Iterator[Candidates]:
    """The layouts of a group in parts that the formulas take at once."""
    step = max(1, CELLS // group.pp)
    for begin in range(0, len(group), step):
        yield group.take(slice(begin, begin + step))
