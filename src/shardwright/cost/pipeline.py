"""The stages of each rank of `pp`, and the micro-batches of each stage in flight at the rank's memory peaks.

The counts follow from the order of the schedule's actions (`split.stages.Pipeline`), without their times.
Shapes: S stages, R ranks, v stages of a rank, k moments.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

import numpy as np

from shardwright.cost.blocks import Block, blocks
from shardwright.cost.job import Candidates, Ints, Job
from shardwright.layout import Layout
from shardwright.model.spec import ModelSpec
from shardwright.schedule.actions import Action, Schedule
from shardwright.schedule.registry import find
from shardwright.split.stages import Pipeline, stage_layers

ACTIONS = ("forward or weight", "loss", "backward", "backward in the last stage", "gradient of the embedding")
OTHER, LOSS, BACKWARD, BACKWARD_LAST, EMBEDDING = range(len(ACTIONS))
"""Classes of actions, by their temporary buffers: F of the last stage computes the loss, and its B or I first frees the
logits; I of the first stage ends with the gradient of the embedding, which is not deferred to W; F of other stages and
W need no more than is counted as in flight and waiting."""


@dataclass(frozen=True, eq=False)
class Stages:
    """The layers of each stage and the stages of each rank.

    `of_kind`: for each kind of layer the number in each stage, (S,). `of_rank`, (R, v): the stages that a rank holds.
    `built_from`: what their schedules are built from.
    """

    layers: tuple[range, ...]
    of_kind: Mapping[Block, Ints]
    of_rank: Ints
    built_from: Pipeline


@dataclass(frozen=True, eq=False)
class Moments:
    """The moments of a step at which the memory of a rank can be at its peak: no other moment has at least as many
    micro-batches of every stage, in flight and waiting, and gradients of as many stages.

    `in_flight`, `waiting`, (R, k, v): micro-batches of each stage in `Stages.of_rank`, with that of the running action.
    `accumulating`, `reduced`, (R, k, v): 1 for a stage whose gradients have been computed for some micro-batches but
    not for all, and for one whose gradients are complete. `kind`, (R, k): which of `ACTIONS` runs. A rank with fewer
    than k such moments repeats one of them.
    """

    in_flight: Ints
    waiting: Ints
    accumulating: Ints
    reduced: Ints
    kind: Ints

    @property
    def each(self) -> dict[str, Ints]:
        """The fields by name, with a first dim of 1 for a candidate."""
        return {name: values[None] for name, values in vars(self).items()}

    def of_rank(self, rank: int) -> "Moments":
        """Those of one rank; R is 1."""
        return self.of_ranks([rank])

    def of_ranks(self, ranks: list[int]) -> "Moments":
        """Those of some ranks."""
        return Moments(**{name: values[ranks] for name, values in vars(self).items()})


def stages(job: Job, candidates: Candidates) -> Stages:
    """The stages, which are the same for all candidates; `split.stages` partitions the layers."""
    keys = ("pp", "pp_schedule", "virtual_stages", "stage_layers")
    return _stages(job.model, Layout(**{key: getattr(candidates.shared, key) for key in keys}), job.seq_len)


class Layers(NamedTuple):
    """Layers that cost the same: their kind, what the ledger calls them, how many each stage has, (S,), and the
    candidates with the recomputation of these layers."""

    block: Block
    name: str
    counts: Ints
    candidates: Candidates


def layers_alike(job: Job, candidates: Candidates) -> Iterator[Layers]:
    """The layers of all stages: by kind, and where only the first of a stage recompute, those apart from the rest."""
    held, first = stages(job, candidates), candidates.shared.recompute_layers
    if first is None:
        yield from (Layers(block, block.name, counts, candidates) for block, counts in held.of_kind.items())
        return
    for block, numbers in blocks(job.model).items():
        again = np.array([len(set(numbers) & set(each[:first])) for each in held.layers], dtype=np.int64)
        yield Layers(block, block.name, again, candidates)
        rest = replace(candidates, recompute=np.zeros_like(candidates.recompute))
        yield Layers(block, f"{block.name} that does not recompute", held.of_kind[block] - again, rest)


def moments(job: Job, candidates: Candidates, microbatches: int) -> Moments:
    """The possible peaks of every rank in a step of `microbatches`; `representative` gives a smaller number with the
    same peaks.

    Raises ScheduleError if the schedule cannot run that many.
    """
    of = stages(job, candidates).built_from
    if candidates.kind.microbatches_stay and microbatches > 2:
        two = _moments(of, 2)
        return replace(two, in_flight=two.in_flight + microbatches - 2)
    return _moments(of, microbatches)


def every_moment(
    job: Job, candidates: Candidates, microbatches: int, rank: int
) -> tuple[list[Action], Moments, Moments]:
    """The actions of one rank in order, and what is held while each of them runs: at first, at the end; R is 1."""
    schedule = stages(job, candidates).built_from.schedule(microbatches)
    begin, end = _held(schedule, rank)
    return list(schedule.ranks[rank]), _as_moments([begin]), _as_moments([end])


def representative(name: str, pp: int, microbatches: int) -> int:
    """A number of micro-batches, no larger, with the same memory peaks of all ranks."""
    return find(name).representative(pp, microbatches)


@cache
def _stages(model: ModelSpec, layout: Layout, seq_len: int) -> Stages:
    layers = stage_layers(model, layout, seq_len)
    of_kind = {
        block: np.array([len(set(those) & set(each)) for each in layers], dtype=np.int64)
        for block, those in blocks(model).items()
    }
    of_rank = np.array([sorted(layout.held_by(rank)) for rank in range(layout.pp)], dtype=np.int64)
    return Stages(layers, of_kind, of_rank, Pipeline.of(model, layout, seq_len))


@cache
def _moments(of: Pipeline, microbatches: int) -> Moments:
    schedule = of.schedule(microbatches)
    return _as_moments([_largest(np.concatenate(_held(schedule, rank))) for rank in range(of.pp)])


def _as_moments(ranks: list[Ints]) -> Moments:
    """Moments from the rows of `_held` of each rank; a rank with fewer rows repeats its first."""
    k = max(map(len, ranks))
    rows = np.array([np.concatenate([each, np.repeat(each[:1], k - len(each), axis=0)]) for each in ranks])
    in_flight, waiting, some, accumulating = np.split(rows[:, :, 1:], 4, axis=2)
    return Moments(in_flight, waiting, accumulating, some - accumulating, rows[:, :, 0])


def _held(schedule: Schedule, rank: int) -> tuple[Ints, Ints]:
    """For every action of a rank its class, and for each of the v stages what is held when it begins, (actions,
    1 + 4 v): micro-batches in flight, with that of the action, and waiting; 1 if there are gradients, and 1 if they are
    not those of all micro-batches. Then the same when it ends, if it makes the first gradients of a stage, which take
    the place of what its micro-batch held, or that of the embedding; else once more what is held at its beginning."""
    actions = schedule.ranks[rank]
    stage = np.array([action.stage for action in actions], dtype=np.int64)
    op = np.array([action.op for action in actions])
    forward, back, weight = op == "F", (op == "B") | (op == "I"), op == "W"
    last = stage == schedule.n_stages - 1
    kinds = np.select([back & last, back, forward & last], [BACKWARD_LAST, BACKWARD, LOSS], OTHER)[:, None]
    here = stage[:, None] == np.array(schedule.stages_of(rank))
    sent_back = here & back[:, None]
    in_flight = np.cumsum(here & forward[:, None], axis=0) - np.cumsum(sent_back, axis=0) + sent_back
    weighed = here & weight[:, None]
    deferred = here & (op == "I")[:, None]
    waits = deferred.astype(np.int64) - weighed
    waiting = np.cumsum(waits, axis=0) - waits
    completing = here & ((op == "B") | weight)[:, None]
    after = np.cumsum(completing, axis=0)
    before, all_of_them = after - completing, after[-1]
    begin = np.concatenate([kinds, in_flight, waiting, before > 0, (before > 0) & (before < all_of_them)], axis=1)
    embedded = ((op == "I") & (stage == 0))[:, None]
    ending = np.where(embedded, EMBEDDING, np.where(kinds == BACKWARD_LAST, BACKWARD, kinds))
    end = [ending, in_flight - sent_back, waiting + waits, after > 0, (after > 0) & (after < all_of_them)]
    counts = embedded | (completing & (after == 1)).any(1, keepdims=True)
    return begin, np.where(counts, np.concatenate(end, axis=1), begin)


def _largest(rows: Ints) -> Ints:
    """The rows of each class that no other row of the class dominates in all columns; one of equal rows."""
    found = []
    rows = rows[np.argsort(-rows[:, 1:].sum(axis=1), kind="stable")]
    while len(rows):
        # The first row has the largest sum, so no other row dominates it.
        found.append(rows[0])
        below = (rows[:, 0] == rows[0, 0]) & np.all(rows[:, 1:] <= rows[0, 1:], axis=1)
        rows = rows[~below]
    return np.array(found)
