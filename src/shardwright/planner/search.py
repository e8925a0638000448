"""Search for the fastest layouts that fit. It computes the memory of all layouts and a lower bound on the time of the
layouts that fit, and simulates the best.

Call a function for several items at a time, in processes.
"""

import os
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import active_children, get_context, parent_process
from multiprocessing.connection import wait
from threading import Thread
from typing import Any, TypeVar

import numpy as np

from shardwright.cost.host import host_share, node_host_bytes, uses_host
from shardwright.cost.job import Candidates, Floats, Ints, Job
from shardwright.cost.memo import Memo
from shardwright.cost.reserved import PairedBytes, reserved_bytes
from shardwright.cost.states import averages_on_host
from shardwright.cost.step import least_time
from shardwright.planner.choice import Choice, PricedLayout, choice_at
from shardwright.planner.distinct import distinct
from shardwright.planner.pool import LayoutPool, memo_of
from shardwright.planner.recommendation import candidates, recommend, with_fewest_layers
from shardwright.planner.simplicity import simplest, simplest_near
from shardwright.planner.space import (
    OFFLOADS,
    CandidateRows,
    Condition,
    DistinctParts,
    FixedChoices,
    Mask,
    masked_groups,
    no_layout,
    none_searched,
)
from shardwright.system.errors import InputError, LayoutError
from shardwright.system.forks import SAFE_PATH, environment
from shardwright.system.units import divisors

MARGIN = 0.1
"""Share of an accelerator's memory that is kept free, for uncounted memory and for fragmentation."""
TOP = 10
PARALLEL_FROM = 512
"""Number of accelerators from which a search is slow enough to use several processes."""

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Survey:
    """Layouts of a job: their number, all that fit, and the layout that needs the least memory (None if there is none).

    `nearest_bytes`: the memory of the device that this layout needs. `least`: the same, or if larger, its share of its
    host's memory as an equal share of the limit of a device. A survey with a longest time compares only layouts that
    may fit.
    """

    n_layouts: int
    pool: LayoutPool
    nearest: Choice | None
    nearest_bytes: float
    least: float


@dataclass(frozen=True)
class Plan:
    """The result of a search. `best`: the fastest layouts that fit, the fastest first; empty if none fits. `equals`:
    for each of `best`, the layouts with the same cost that differ from it, or from one another, in one choice
    (`distinct`). `recommended`: a layout that ties with the fastest (`planner.recommendation`), which may be the
    fastest, or the layout of `prefer`. `simplest`: the simplest layout that is shown with it. Both are None if none
    fits. `fixed`: the values that all layouts have."""

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
        """Return all layouts that fit."""
        return self.survey.pool


def margin_problems(memory_margin: float) -> list[str]:
    """Return the problems of a share of the memory that is to be kept free."""
    if 0 <= memory_margin < 1:
        return []
    return [f"--memory-margin {memory_margin:g}: a share of the memory is needed, 0 or more and below 1"]


def limit_bytes(job: Job, memory_margin: float) -> float:
    """Return the bytes that a layout may use of a device. Raises InputError if the margin is not a share."""
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
    progress: Progress | None = None,
    most_s: float = np.inf,
) -> Plan:
    """Return the `top` layouts of the whole cluster that train fastest and fit, of equal ones the simplest.

    `memory_margin`: share of an accelerator's memory that is kept free. `fixed`: only layouts with these values.
    `prefer`: the layout to recommend, "fastest" or "simplest" (`simplicity.PREFERENCES`), instead of the recommendation
    of `planner.recommendation`. `processes`: number of processes that evaluate layouts (`survey`); below
    `PARALLEL_FROM` accelerators one. `progress`: called with the numbers of stages that are done, and all of them.
    `most_s`: layouts that take longer need not be found; nothing is recommended if all do. The
    result equals evaluating every layout of `planner.space` with a simulated
    schedule (`LayoutPool.fastest`). The `TOP` fastest, or `top` if larger, that recompute do so in as few layers of
    each stage as fit (`recomputation.fewest_layers`) if that saves `WORTH_A_KEY`, unless `fixed` has keys of
    recomputation.

    Raises LayoutError if no layout can partition the batch or has the fixed values, InputError for a margin that is not
    a share.
    """
    if fixed is not None and (
        problems := list(job.offload_problems(*(str(fixed.offload.get(name, "none")) for name in OFFLOADS)))
    ):
        raise LayoutError(*problems)
    limit = limit_bytes(job, memory_margin)
    processes = processes if job.cluster.size >= PARALLEL_FROM else 1
    surveyed = survey(job, limit, fixed, processes, progress=progress, most_s=most_s)
    if fixed is not None and not surveyed.n_layouts:
        raise none_searched(job, fixed)
    listed = distinct(surveyed.pool, max(top, TOP))
    best = [PricedLayout.from_choice(job, group.members[group.simplest]) for group in listed]
    equals = [group.others for group in listed]
    if not best:
        return Plan(job, limit, surveyed, [], [], None, None, fixed, prefer)
    fewer_layers = not (fixed and {"recompute", "recompute_layers"} & fixed.values.keys())
    if fewer_layers:
        best, equals = _with_fewest_layers(best, equals, limit)
    plain = simplest_near(best[0], surveyed.pool)
    others = [*candidates(best[0], surveyed.pool, limit, fewer_layers)]
    if fewer_layers:
        plain = [with_fewest_layers(priced, limit) for priced in plain]
        fewer = [priced for priced in (*plain, *others) if priced.layout.recompute_layers is not None]
        faster = _whole([priced for priced in fewer if priced.step_s < best[0].step_s])
        faster, _ = _with_fewest_layers(faster, [[] for _ in faster], limit)
        best, equals = [*faster, *best], [*([] for _ in faster), *equals]
    plainest = simplest([best[0], *plain, *others])
    recommended = {"fastest": best[0], "simplest": plainest}.get(prefer or "") or recommend([best[0], *others], limit)
    return Plan(job, limit, surveyed, best[:top], equals[:top], recommended, plainest, fixed, prefer)


def _whole(layouts: Sequence[PricedLayout]) -> list[PricedLayout]:
    """Return the layouts with recomputation in all layers, each once."""
    whole = {replace(priced.choice, layout=priced.layout.changed(recompute_layers=None)): priced for priced in layouts}
    return [PricedLayout.from_choice(priced.job, choice) for choice, priced in whole.items()]


def _with_fewest_layers(
    layouts: list[PricedLayout], equals: list[list[Choice]], limit: float
) -> tuple[list[PricedLayout], list[list[Choice]]]:
    """Return the layouts with recomputation in as few layers as fit, if that saves enough to justify another key, the
    fastest first, and the equals of the remaining layouts."""
    rows = []
    for priced, others in zip(layouts, equals, strict=True):
        less = with_fewest_layers(priced, limit)
        rows.append((less, others if less is priced else []))
    rows.sort(key=lambda row: row[0].step_s)
    return [less for less, _ in rows], [others for _, others in rows]


def survey(
    job: Job,
    limit: float,
    condition: Condition | None = None,
    processes: int = 1,
    pp: int | None = None,
    progress: Progress | None = None,
    most_s: float = np.inf,
) -> Survey:
    """Compute the memory of every layout that may fit, and a bound on the time of the layouts that need at most `limit`
    bytes.

    `condition`: only layouts that meet it. `processes`: if above 1, each process evaluates the layouts of one number of
    stages at a time, and `condition` has to be None or FixedChoices. `pp`: only pipelines of `pp` ranks. `most_s`:
    layouts whose step takes longer, also if fewer of their layers recompute, may be left out of the pool.
    Raises LayoutError if no layout can partition the batch, unless `pp` is given.
    """
    memo = memo_of(job) if processes == 1 else None  # other processes have their own
    pps = divisors(job.cluster.size) if pp is None else [pp]
    evaluate = partial(_survey_of, job, limit, condition, memo, most_s)
    parts = [part for part in spread(evaluate, pps, processes, progress) if part is not None]
    if not parts:
        if pp is None:
            raise LayoutError(no_layout(job))
        return Survey(0, LayoutPool(job, [], np.zeros(0), np.zeros(0)), None, np.inf, np.inf)
    nearest = min(parts, key=lambda part: part.least)
    pools = [part.pool for part in parts]
    low_s, peaks = (np.concatenate([getattr(pool, name) for pool in pools]) for name in ("low_s", "peak_bytes"))
    pool = LayoutPool(job, [group for pool in pools for group in pool.groups], low_s, peaks)
    n_layouts = sum(part.n_layouts for part in parts)
    return Survey(n_layouts, pool, nearest.nearest, nearest.nearest_bytes, nearest.least)


def _survey_of(
    job: Job, limit: float, condition: Condition | None, memo: Memo | None, most_s: float, pp: int
) -> Survey | None:
    """Return the survey of the layouts with `pp` stages; None if none can partition the batch. `memo`: the job's."""
    kept: list[Candidates] = []
    low_s, peaks = [np.zeros(0)], [np.zeros(0)]
    n_layouts, least, nearest_bytes, exists, memo = 0, np.inf, np.inf, False, memo or memo_of(job)
    guess = np.inf
    nearest: Choice | None = None
    for group, rows, valid in masked_groups(job, pp, _offload(condition), condition):
        exists, at = True, np.flatnonzero(valid)
        n_layouts += len(at)
        if most_s < np.inf:
            at = at[_quick(job, group, rows.passes.among(at), most_s, memo)]
        if not len(at):
            continue
        if nearest is None and most_s == np.inf:
            guess = _first_guess(job, group.take(rows.degrees.among(at).first), limit, memo)
        most = max(limit, min(guess, least)) if most_s == np.inf else limit
        at, on_device = _priced(job, group, rows, at, most, memo)
        if not len(at):
            continue
        needed = _with_host(job, group, at, on_device, limit, most)
        first = int(needed.argmin())
        if needed[first] < least:
            nearest, nearest_bytes, least = choice_at(group, at[first]), float(on_device[first]), float(needed[first])
        fits = needed <= limit
        if fits.any():
            passes = rows.passes.among(at[fits])
            kept.append(group.take(at[fits]))
            peaks.append(on_device[fits])
            low_s.append(least_time(job, group.take(passes.first), memo)[passes.of_row])
    if not exists:
        return None
    pool = LayoutPool(job, kept, np.concatenate(low_s), np.concatenate(peaks))
    return Survey(n_layouts, pool, nearest, nearest_bytes, least)


def _quick(job: Job, group: Candidates, passes: DistinctParts, most_s: float, memo: Memo) -> Mask:
    """Return the mask of the layouts, (n,), whose step may take at most `most_s` if fewer of their layers recompute.
    `passes`: of the n layouts."""
    passes_of = group.take(passes.first)
    least = least_time(job, replace(passes_of, recompute=np.zeros_like(passes_of.recompute)), memo)
    quick: Mask = (least <= most_s)[passes.of_row]
    return quick


def _priced(job: Job, group: Candidates, rows: CandidateRows, at: Ints, most: float, memo: Memo) -> tuple[Ints, Floats]:
    """Return the rows among `at` that may need at most `most` bytes of a device, and the bytes that they need; above
    `most` these may be a lower bound."""
    if job.cluster.size == 1:
        return at, reserved_bytes(job, group.take(at), most, memo)
    states, passes = rows.degrees.among(at), rows.passes.among(at)
    priced = PairedBytes(job, group.take(states.first), group.take(passes.first), memo)
    kept = priced.may_need(most, states.of_row, passes.of_row)
    return at[kept], priced.reserved(most, states.of_row[kept], passes.of_row[kept])


def _first_guess(job: Job, candidates: Candidates, limit: float, memo: Memo) -> float:
    """Return the bytes that the layout with the least states needs, or if larger, its share of its host's memory as an
    equal share of `limit`. The layout that needs the least memory of all needs no more."""
    at = int(reserved_bytes(job, candidates, 0.0, memo).argmin())
    one = candidates.take(slice(at, at + 1))
    return float(_with_host(job, one, np.zeros(1, np.int64), reserved_bytes(job, one, memo=memo), limit, np.inf)[0])


def _with_host(job: Job, group: Candidates, at: Ints, on_device: Floats, limit: float, most: float) -> Floats:
    """Return the bytes of a device that the layouts of some rows need, or if larger, the share of their host's memory
    as an equal share of `limit`. For layouts that need more than `most` bytes of the device, return the bytes of the
    device."""
    if not uses_host(group.shared, averages_on_host(job, group)):
        return on_device
    needed, room = on_device.copy(), on_device <= most
    if room.any():
        needed[room] = np.maximum(on_device[room], limit * host_share(job, group.take(at[room])))
    return needed


def fits(job: Job, limit: float, condition: Condition | None = None) -> bool:
    """Return whether any layout that meets `condition` needs at most `limit` bytes of a device and the memory of the
    host; stops at the first such layout."""
    return any((host_share(job, part) <= 1).any() for part in _on_device(job, limit, condition))


def least_host_bytes(job: Job, limit: float, condition: Condition | None = None) -> float | None:
    """Return the least memory of a node's host with which a layout that meets `condition` needs at most `limit` bytes
    of a device; None if there is no such layout."""
    needed = [float(node_host_bytes(job, part).min()) for part in _on_device(job, limit, condition)]
    return min(needed, default=None)


def _on_device(job: Job, limit: float, condition: Condition | None) -> Iterator[Candidates]:
    """Yield layouts that need at most `limit` bytes of a device, whatever they store in the memory of the host."""
    memo, any_group = memo_of(job), False
    for pp in divisors(job.cluster.size):
        for group, rows, valid in masked_groups(job, pp, _offload(condition), condition):
            any_group, at = True, np.flatnonzero(valid)
            if len(at):
                at, needed = _priced(job, group, rows, at, limit, memo)
                if (needed <= limit).any():
                    yield group.take(at[needed <= limit])
    if not any_group:
        raise LayoutError(no_layout(job))


def _offload(condition: Condition | None) -> dict[str, Any]:
    return condition.offload if isinstance(condition, FixedChoices) else {}


Item = TypeVar("Item")
Result = TypeVar("Result")


def spread(
    function: Callable[[Item], Result], items: Iterable[Item], processes: int, progress: Progress | None = None
) -> list[Result]:
    """Return `[function(item) for item in items]`, computed by `processes` processes; an idle one takes the next item.
    `progress`: called after each item, in order, with the number of items done and of all items.

    Functions, items and results are pickled. If processes cannot be started, or one of them is killed, this process
    calls the function alone. Exceptions of the function are raised here.
    """
    given = list(items)
    if min(processes, len(given)) > 1:
        try:
            return _by_others(function, given, min(processes, len(given)), progress)
        except (BrokenProcessPool, OSError):
            pass
    return [*_counted(map(function, given), len(given), progress)]


def _counted(results: Iterable[Result], n: int, progress: Progress | None) -> Iterator[Result]:
    for done, result in enumerate(results, 1):
        if progress is not None:
            progress(done, n)
        yield result


def _by_others(
    function: Callable[[Item], Result], items: list[Item], processes: int, progress: Progress | None
) -> list[Result]:
    # A fork server, because this process may have threads, such as one that shows progress.
    context, others = get_context("forkserver"), active_children()
    with environment(SAFE_PATH), ProcessPoolExecutor(processes, context, begin_worker) as executor:
        try:
            return list(_counted(executor.map(function, items), len(items), progress))
        except BaseException:  # Ctrl-C, too, which does not wait for calls that run
            for process in active_children():
                if process not in others:
                    process.kill()
            raise


def begin_worker() -> None:
    """Make a worker ignore Ctrl-C, which its parent handles, and end when the parent has ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)
