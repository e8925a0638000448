"""The stages of each rank of `pp`, and the micro-batches of each stage in flight at the rank's memory peaks.

The counts follow from the order of the schedule's actions (`split.stages.ScheduleInputs`), without their times.
Shapes: S stages, R ranks, v stages of a rank, k moments.
"""

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache, cached_property
from typing import NamedTuple

import numpy as np

from shardwright.cost.blocks import BlockShape, blocks
from shardwright.cost.job import Candidates, Floats, Ints, Job
from shardwright.layout.layout import Layout
from shardwright.model.spec import ModelSpec
from shardwright.schedule.actions import Action, Schedule
from shardwright.schedule.registry import find
from shardwright.split.stages import ScheduleInputs, stage_layers

ACTIONS = ("forward or weight", "loss", "backward", "backward in the last stage", "gradient of the embedding")
OTHER, LOSS, BACKWARD, BACKWARD_LAST, EMBEDDING = range(len(ACTIONS))
"""Classes of actions, by their temporary buffers. F of the last stage computes the loss, and its B or I first frees the
logits. B or I of the first stage ends with the gradient of the embedding, which is not deferred to W. F of other stages
and W need no more than the memory in flight and waiting."""


@dataclass(frozen=True, eq=False)
class Stages:
    """The layers of each stage and the stages of each rank.

    `layers_by_kind`: for each kind of layer the number in each stage, (S,). `of_rank`, (R, v): the stages of each rank.
    `several`: whether any stage has more than one layer. `alike`, (S,): for each stage the first stage with the same
    kinds of layers in the same order that is also the first, also the last, or neither. `built_from`: the inputs of
    their schedules. `key`: equal for equal layers on equal ranks, of one model.
    """

    layers: tuple[range, ...]
    layers_by_kind: Mapping[BlockShape, Ints]
    of_rank: Ints
    several: bool
    alike: Ints
    built_from: ScheduleInputs
    key: tuple[Hashable, ...]

    def of_ranks(self, ranks: Ints) -> "Stages":
        """Return the stages of some ranks, with the first and the last stage of all; R is the number of these ranks."""
        kept = self.stages_of(ranks)
        return replace(
            self,
            layers=tuple(self.layers[stage] for stage in kept),
            layers_by_kind={block: counts[kept] for block, counts in self.layers_by_kind.items()},
            of_rank=np.searchsorted(kept, self.of_rank[ranks]),
            alike=_first_equals(self.alike[kept].tolist()),
            key=(*self.key, *ranks.tolist()),
        )

    @cached_property
    def merged(self) -> "Stages":
        """Return these stages with one stage of each rank's stages that are alike; a rank with fewer than v different
        stages repeats its first."""
        kept = [list(dict.fromkeys(row)) for row in self.alike[self.of_rank].tolist()]
        most = max(map(len, kept))
        return replace(self, of_rank=np.array([[*row, *[row[0]] * (most - len(row))] for row in kept], dtype=np.int64))

    def stages_of(self, ranks: Ints) -> Ints:
        """Return the numbers of the stages of some ranks, and of the first and the last stage, in ascending order."""
        return np.unique([0, len(self.layers) - 1, *self.of_rank[ranks].ravel()])


@dataclass(frozen=True, eq=False)
class Moments:
    """The moments of a step at which the memory of a rank can be at its peak: no other moment has at least as many
    micro-batches of every stage, in flight and waiting, and gradients of as many stages.

    `in_flight`, `waiting`, (R, k, v): micro-batches of each stage in `Stages.of_rank`, including the running action's.
    `accumulating`, (R, k, v): 1 for a stage whose gradients have been computed for some micro-batches but not for all.
    `reduced`, (R, k, v): 1 for a stage whose gradients are complete. `kind`, (R, k): which of `ACTIONS` runs. A rank
    with fewer than k such moments repeats one of them.
    """

    in_flight: Ints
    waiting: Ints
    accumulating: Ints
    reduced: Ints
    kind: Ints

    @property
    def fields(self) -> dict[str, Ints]:
        """Return the fields by name, with a first dim of 1 for a candidate."""
        return {field.name: getattr(self, field.name)[None] for field in fields(self)}

    def of_rank(self, rank: int) -> "Moments":
        """Return the moments of one rank; R is 1."""
        return Moments(**{field.name: getattr(self, field.name)[[rank]] for field in fields(self)})

    @cached_property
    def counts(self) -> Floats:
        """Return how often each part of the memory of a rank exists, (R, k, c): for each stage the parts in flight,
        waiting, accumulating and reduced, and for each of `ACTIONS` its buffers while it runs."""
        runs = self.kind[:, :, None] == np.arange(len(ACTIONS))
        parts = (self.in_flight, self.waiting, self.accumulating, self.reduced, runs)
        return np.concatenate(parts, axis=2).astype(np.float64)

    def counts_of(self, ranks: Ints) -> Floats:
        """Return the counts of some ranks, without moments that repeat the first moment of each rank."""
        counts = self.counts[ranks]
        others = (counts[:, 1:] != counts[:, :1]).any((0, 2))
        return counts[:, np.append(True, others)]


def stages(job: Job, candidates: Candidates) -> Stages:
    """Return the stages, which are the same for all candidates; `split.stages` partitions the layers."""
    shared = candidates.shared
    return _stages(job.model, job.seq_len, shared.pp, shared.pp_schedule, shared.virtual_stages, shared.stage_layers)


class Windows(NamedTuple):
    """Passes of a micro-batch with which collectives of a step overlap on each rank, (R,), in passes of all its stages:
    `weights`: forward passes up to the first of the stage that starts last; `gradients`: backward passes from the last
    of the stage that ends first. `stages`: on a rank. With one stage on a rank both are 1."""

    weights: Floats
    gradients: Floats
    stages: int


def windows(job: Job, candidates: Candidates) -> Windows:
    """Return the windows of a step of at least 2 pp micro-batches, in the order of the schedule's actions: 1F1B with v
    chunks on a rank runs pp micro-batches of a chunk before it changes to the next, so each is ((v - 1) pp + 1) / v.
    Ignored: passes of the other direction in between, as V-shaped schedules have them."""
    pp_stages = stages(job, candidates)
    return _windows(pp_stages.built_from, pp_stages.of_rank.shape[1], len(candidates.shared.ways))


@cache
def _windows(inputs: ScheduleInputs, n_stages: int, n_ways: int) -> Windows:
    if n_stages == 1:
        return Windows(np.ones(inputs.pp), np.ones(inputs.pp), 1)
    weights, gradients = np.zeros(inputs.pp), np.zeros(inputs.pp)
    for rank, actions in enumerate(inputs.schedule(2 * inputs.pp).ranks):
        starts = {action.stage: at for at, action in reversed(list(enumerate(actions))) if action.op == "F"}
        ends = {action.stage: at for at, action in enumerate(actions) if action.op in ("B", "W")}
        weights[rank] = sum(action.op == "F" for action in actions[: max(starts.values())])
        gradients[rank] = sum(_OF_BACKWARD[action.op] for action in actions[min(ends.values()) + 1 :])
    share = n_ways / n_stages
    return Windows(share * (weights + 1), share * (gradients + 1), n_stages)


class Layers(NamedTuple):
    """Layers that cost the same: their kind, their name in the ledger, their number in each stage, (S,), and the
    candidates with the recomputation of these layers."""

    block: BlockShape
    name: str
    counts: Ints
    candidates: Candidates


def layers_alike(job: Job, candidates: Candidates, stages: Stages) -> Iterator[Layers]:
    """Yield the layers of these stages by kind. If only the first layers of a stage recompute, they are separate."""
    first = candidates.shared.recompute_layers
    if first is None:
        yield from (Layers(block, block.name, counts, candidates) for block, counts in stages.layers_by_kind.items())
        return
    for block, numbers in blocks(job.model).items():
        again = np.array([len(set(numbers) & set(layers[:first])) for layers in stages.layers], dtype=np.int64)
        yield Layers(block, block.name, again, candidates)
        rest = replace(candidates, recompute=np.zeros_like(candidates.recompute))
        yield Layers(block, f"{block.name} that does not recompute", stages.layers_by_kind[block] - again, rest)


def moments(job: Job, candidates: Candidates, microbatches: int) -> Moments:
    """Return the possible peaks of every rank in a step of `microbatches`; `representative` gives a smaller number with
    the same peaks.

    Raises ScheduleError if the schedule cannot run that number.
    """
    return _moments_of(stages(job, candidates).built_from, microbatches)


def merged_moments(job: Job, candidates: Candidates, microbatches: int) -> Moments:
    """Return the `moments` of `Stages.merged`: the counts of a rank's stages that are alike are added up."""
    return _merged_moments(stages(job, candidates), microbatches)


def leading_ranks(job: Job, candidates: Candidates, microbatches: int) -> Ints:
    """Return the ranks of `pp`, in ascending order, that can need the most memory in a step of `microbatches`. Every
    other rank has the layers of a leading rank, and at each moment as many micro-batches or fewer of every stage."""
    return _leading_ranks(stages(job, candidates), microbatches)


def every_moment(
    job: Job, candidates: Candidates, microbatches: int, rank: int
) -> tuple[list[Action], Moments, Moments, Moments]:
    """Return the actions of one rank in order, and the memory at the start, before the end and at the end of each; R is
    1."""
    schedule = stages(job, candidates).built_from.schedule(microbatches)
    begin, before_end, end = map(_as_moments, _counts_by_action(schedule, [rank]))
    return list(schedule.ranks[rank]), begin, before_end, end


def representative(name: str, pp: int, microbatches: int) -> int:
    """Return a number of micro-batches, no larger, with the same memory peaks of all ranks."""
    return find(name).representative(pp, microbatches)


@cache
def _stages(
    model: ModelSpec,
    seq_len: int,
    pp: int,
    pp_schedule: str,
    virtual_stages: int,
    sizes: tuple[int, ...] | None,
) -> Stages:
    layout = Layout(pp=pp, pp_schedule=pp_schedule, virtual_stages=virtual_stages, stage_layers=sizes)
    layers = stage_layers(model, layout, seq_len)
    layers_by_kind = {
        block: np.array([len(set(those) & set(numbers)) for numbers in layers], dtype=np.int64)
        for block, those in blocks(model).items()
    }
    of_rank = np.array([sorted(layout.stages_on(rank)) for rank in range(layout.pp)], dtype=np.int64)
    several = any(len(numbers) > 1 for numbers in layers)
    key = (layout.ways, len(layers), sizes)
    block_of = {number: block for block, numbers in blocks(model).items() for number in numbers}
    last = len(layers) - 1
    alike = _first_equals(
        (stage == 0, stage == last, *map(block_of.__getitem__, numbers)) for stage, numbers in enumerate(layers)
    )
    return Stages(
        layers, layers_by_kind, of_rank, several, alike, ScheduleInputs.from_layout(model, layout, seq_len), key
    )


def _first_equals(items: Iterable[Hashable]) -> Ints:
    """Return for each item the index of the first item that equals it."""
    first: dict[Hashable, int] = {}
    return np.array([first.setdefault(item, at) for at, item in enumerate(items)], dtype=np.int64)


def _moments_of(inputs: ScheduleInputs, microbatches: int) -> Moments:
    if find(inputs.name).microbatches_stay and microbatches > 2:
        two = _moments(inputs, 2)
        return replace(two, in_flight=two.in_flight + microbatches - 2)
    return _moments(inputs, microbatches)


@cache
def _moments(inputs: ScheduleInputs, microbatches: int) -> Moments:
    begin, *later = _counts_by_action(inputs.schedule(microbatches), range(inputs.pp))
    differing = (rows[:, (rows != begin).any((0, 2))] for rows in later)
    return _as_moments(_largest(np.concatenate([begin, *differing], axis=1)))


@cache
def _merged_moments(stages: Stages, microbatches: int) -> Moments:
    unmerged, merged = _moments_of(stages.built_from, microbatches), stages.merged.of_rank
    place = (stages.alike[stages.of_rank][:, :, None] == merged[:, None]).argmax(2)  # (R, v), the first of equal ones
    added = (place[:, :, None] == np.arange(merged.shape[1])).astype(np.int64)
    counts = (unmerged.in_flight, unmerged.waiting, unmerged.accumulating + unmerged.reduced, unmerged.accumulating)
    rows = np.concatenate([unmerged.kind[:, :, None], *(count @ added for count in counts)], axis=2)
    return _as_moments(_largest(rows))


@cache
def _leading_ranks(stages: Stages, microbatches: int) -> Ints:
    inputs, alike = stages.built_from, stages.alike[stages.of_rank].tolist()
    counts = _moments(inputs, min(microbatches, 2) if find(inputs.name).microbatches_stay else microbatches).counts

    def dominates(one: int, other: int) -> bool:
        """Return whether, at some moment of `one`, at least as much of everything exists, for every one of `other`."""
        if alike[one] != alike[other]:
            return False
        return bool((counts[one][None, :] >= counts[other][:, None]).all(2).any(1).all())

    leading: list[int] = []
    for rank in range(inputs.pp):
        if not any(dominates(one, rank) for one in leading):
            leading = [*(one for one in leading if not dominates(rank, one)), rank]
    return np.array(leading, dtype=np.int64)


def _as_moments(rows_Rkc: Ints) -> Moments:
    """Convert rows of `_counts_by_action` to moments."""
    in_flight, waiting, some, accumulating = np.split(rows_Rkc[:, :, 1:], 4, axis=2)
    return Moments(in_flight, waiting, accumulating, some - accumulating, rows_Rkc[:, :, 0])


_OPS = {"F": 0, "B": 1, "I": 2, "W": 3}
_OF_BACKWARD = {"F": 0.0, "B": 1.0, "I": 0.5, "W": 0.5}
"""Part of a backward pass that an action is."""


def _counts_by_action(schedule: Schedule, ranks: Sequence[int]) -> tuple[Ints, Ints, Ints]:
    """Return the counts at the start of every action of some ranks, and the counts before its end and at its end, each
    (R, actions, 1 + 4 v).

    A row has the class of the action and, for each of the v stages: micro-batches in flight, including the action's;
    micro-batches waiting; 1 if there are gradients; 1 if they are not complete. The counts before the end differ from
    the counts at the start if the action makes the first gradients of a stage, which replace its micro-batch's memory,
    and the counts at the end if the action makes the embedding's gradient. A rank with fewer actions than another
    repeats its first row."""
    codes = [[(action.stage, _OPS[action.op]) for action in schedule.ranks[rank]] for rank in ranks]
    most = max(map(len, codes))
    padded = np.array([[*row, *[(-1, -1)] * (most - len(row))] for row in codes], dtype=np.int64)
    stage, op = padded[:, :, 0], padded[:, :, 1]
    forward, whole, split, weight = (op == code for code in _OPS.values())
    back = whole | split
    last = stage == schedule.n_stages - 1
    kinds = np.select([back & last, back, forward & last], [BACKWARD_LAST, BACKWARD, LOSS], OTHER)[:, :, None]
    at_stage = stage[:, :, None] == np.array([schedule.stages_of(rank) for rank in ranks])[:, None]
    sent_back = at_stage & back[:, :, None]
    in_flight = np.cumsum(at_stage & forward[:, :, None], axis=1) - np.cumsum(sent_back, axis=1) + sent_back
    waits = (at_stage & split[:, :, None]).astype(np.int64) - (at_stage & weight[:, :, None])
    waiting = np.cumsum(waits, axis=1) - waits
    completing = at_stage & (whole | weight)[:, :, None]
    after = np.cumsum(completing, axis=1)
    before, all_of_them = after - completing, after[:, -1:]
    begin = np.concatenate([kinds, in_flight, waiting, before > 0, (before > 0) & (before < all_of_them)], axis=2)
    ending = np.where(kinds == BACKWARD_LAST, BACKWARD, kinds)
    left = [in_flight - sent_back, waiting + waits, after > 0, (after > 0) & (after < all_of_them)]
    begin = np.where(op[:, :, None] < 0, begin[:, :1], begin)
    first = (completing & (after == 1)).any(2, keepdims=True)
    before_end = np.where(first, np.concatenate([ending, *left], axis=2), begin)
    embedded = (back & (stage == 0))[:, :, None]
    end = np.where(embedded, np.concatenate([np.full_like(kinds, EMBEDDING), *left], axis=2), begin)
    return begin, before_end, end


def _largest(rows_Rnc: Ints) -> Ints:
    """Return, for each rank, the rows of each class that no other row of the class dominates in all columns; of equal
    rows one. (R, k, c); a rank with fewer than k repeats its first."""
    order = np.argsort(-rows_Rnc[:, :, 1:].sum(axis=2), axis=1, kind="stable")
    rows_Rnc = np.take_along_axis(rows_Rnc, order[:, :, None], axis=1)
    ranks, left_Rn = np.arange(len(rows_Rnc)), np.ones(order.shape, dtype=bool)
    firsts: list[Ints] = []
    while (some_R := left_Rn.any(1)).any():
        # The first row that is left has the largest sum, so no other row dominates it.
        first_R = np.where(some_R, left_Rn.argmax(1), firsts[0] if firsts else 0)
        firsts.append(first_R)
        first_R1c = rows_Rnc[ranks, first_R][:, None]
        same = rows_Rnc[:, :, 0] == first_R1c[:, :, 0]
        left_Rn &= ~(same & np.all(rows_Rnc[:, :, 1:] <= first_R1c[:, :, 1:], axis=2))
    return rows_Rnc[ranks[:, None], np.stack(firsts, axis=1)]
