"""The layers of each pipeline stage, and the relative times of the actions of each stage."""

from collections.abc import Iterator
from functools import cache
from itertools import accumulate, pairwise
from typing import NamedTuple

from shardwright.layout.layout import Layout
from shardwright.model.spec import ModelSpec
from shardwright.schedule import build
from shardwright.schedule.actions import Schedule
from shardwright.schedule.named import ONE_F_ONE_B
from shardwright.schedule.registry import find
from shardwright.schedule.simulate import Times

KEPT_FOR_WEIGHT = 1.0
"""Activations that a micro-batch keeps from I to W, as a fraction of the activations from F to I (`schedule.simulate`).

Each matmul keeps its input and the gradient of its output. Attention stores no scores, so both amounts are equal.
"""


def stage_layers(spec: ModelSpec, layout: Layout, seq_len: int) -> tuple[range, ...]:
    """Return the layers of every stage: from `layout.stage_layers`, or the partition with the smallest maximum work.

    The work includes the embedding in the first stage; the last stage also has the norm, head and multi-token
    prediction modules, whose numbers follow the layers' numbers. Every stage has at least one layer. The layout must
    fit the model (`problems`).
    """
    counts = layout.stage_layers or _balanced(spec, layout.n_stages, seq_len)
    *ends, _ = 0, *accumulate(counts)
    ends.append(spec.n_blocks)
    return tuple(range(begin, end) for begin, end in pairwise(ends))


def most_layers(spec: ModelSpec, layout: Layout, seq_len: int) -> int:
    """Return the largest number of layers of a stage, as partitioned by `stage_layers`."""
    return max(map(len, stage_layers(spec, layout, seq_len)))


def problems(spec: ModelSpec, layout: Layout) -> Iterator[str]:
    """Yield the reasons why the layers cannot be partitioned into the stages of a layout, one sentence each."""
    if layout.pp == 1:
        return
    n = layout.n_stages
    what = f"layout.pp={layout.pp}, layout.pp_schedule={layout.pp_schedule!r}" + (
        f", layout.virtual_stages={layout.virtual_stages}" if layout.kind.virtual_stages_tried else ""
    )
    if n > spec.n_layers:
        most = spec.n_layers // (n // layout.pp)
        yield (
            f"{what} make {n} stages, more than the {spec.n_layers} layers (model.n_layers), and each needs one; "
            + (
                f"valid: layout.pp from 1 to {most} with this schedule"
                if most > 1
                else f"valid: layout.pp=1, or up to {spec.n_layers} with layout.pp_schedule={ONE_F_ONE_B.name!r}"
            )
        )
    counts = layout.stage_layers
    if counts is not None and (len(counts) != n or sum(counts) != spec.n_layers or min(counts) < 1):
        even = _balanced(spec, n, spec.max_seq_len) if n <= spec.n_layers else ()
        yield (
            f"layout.stage_layers={list(counts)} are {len(counts)} stages of {sum(counts)} layers; {what} make {n} "
            f"stages, of at least one each, and the model has {spec.n_layers} layers"
            + (f"; valid: {list(even)}, or leave it out" if even else "")
        )


def schedule_problems(layout: Layout, n_microbatches: int) -> list[str]:
    """Return the reasons why the schedule of a layout cannot run `n_microbatches` in a step, one sentence each."""
    if layout.pp == 1:
        return []
    problems = build.problems(layout.pp_schedule, layout.pp, n_microbatches, layout.virtual_stages)
    return [
        f"layout.pp_schedule: {problem} (microbatches = batch.global_batch / (batch.micro_batch x data ranks) = "
        f"{n_microbatches})"
        for problem in problems
    ]


def stage_times(spec: ModelSpec, layout: Layout, seq_len: int) -> Times:
    """Return the times of F, I and W of every stage, as FLOPs of a token; messages take no time.

    A matmul with weights costs the same in F, I and W. The matmuls of attention have no weights; their backward pass,
    two matmuls for each, is all in I.
    """
    matmuls, squares = [], []
    for number, layers in enumerate(stage_layers(spec, layout, seq_len)):
        head = _head_flops(spec) if number == layout.n_stages - 1 else 0.0
        matmuls.append(sum(_matmul_flops(spec, layer) for layer in layers) + head)
        squares.append(len(layers) * _square(spec, seq_len))
    return Times(
        forward=tuple(p + s for p, s in zip(matmuls, squares, strict=True)),
        backward_input=tuple(p + 2 * s for p, s in zip(matmuls, squares, strict=True)),
        weight=tuple(matmuls),
    )


class ScheduleInputs(NamedTuple):
    """The inputs of a layout's schedules, independent of the number of micro-batches. `times`: stage times if the
    schedule is searched for them; None for other schedules, which are the same for every model."""

    name: str
    pp: int
    virtual_stages: int
    times: Times | None

    @classmethod
    def from_layout(cls, spec: ModelSpec, layout: Layout, seq_len: int) -> "ScheduleInputs":
        """Return the inputs for a layout."""
        searched = find(layout.pp_schedule).searched
        times = stage_times(spec, layout, seq_len) if searched else None
        return cls(layout.pp_schedule, layout.pp, layout.virtual_stages, times)

    def schedule(self, n_microbatches: int) -> Schedule:
        """Return the schedule of a step. Raises ScheduleError (`build.problems`)."""
        return build.build(
            self.name, self.pp, n_microbatches, self.virtual_stages, self.times, kept_for_weight=KEPT_FOR_WEIGHT
        )


def step_schedule(spec: ModelSpec, layout: Layout, n_microbatches: int, seq_len: int) -> Schedule:
    """Return the schedule of a step of a layout with pp; deterministic, so that every rank builds the same schedule.

    Raises ScheduleError (`schedule_problems`).
    """
    return ScheduleInputs.from_layout(spec, layout, seq_len).schedule(n_microbatches)


def _matmul_flops(spec: ModelSpec, layer: int) -> float:
    """Return the forward FLOPs of a token in a layer's matmuls with weights."""
    return 2.0 * spec.layer_matmul_parameters(layer)


def _head_flops(spec: ModelSpec) -> float:
    """Return the forward FLOPs of a token in the head, which each multi-token prediction module uses once more."""
    return 2.0 * (1 + spec.mtp_modules) * spec.vocab_size * spec.d_model


def _square(spec: ModelSpec, seq_len: int) -> float:
    """Return the forward FLOPs of a token in one layer's attention matmuls, over the causal half of the scores."""
    return 1.0 * spec.n_heads * (spec.qk_dim + spec.head_dim) * seq_len


@cache
def _balanced(spec: ModelSpec, n_stages: int, seq_len: int) -> tuple[int, ...]:
    """Return the number of layers of each stage with the smallest maximum work, then the smallest sum of squares.

    Ties assign more layers to late stages, which store fewer activations. The last stage also has the head and the
    multi-token prediction modules. The first stage has the embedding, a lookup whose moved bytes are counted as FLOPs.
    """
    import numpy as np  # Not at the top: importing it would slow down reading run files and drawing reports.

    blocks = [3 * (_matmul_flops(spec, layer) + _square(spec, seq_len)) for layer in range(spec.n_blocks)]
    layers, modules = blocks[: spec.n_layers], blocks[spec.n_layers :]
    upto = np.array([0.0, *accumulate(layers)])
    # [start, end]: the work of the layers from start to end, inf for an empty range.
    number = np.arange(len(upto))
    between = np.where(number[:, None] < number, upto - upto[:, None], np.inf)
    # For the layers up to each end: the largest work of a stage, the sum of squares, and the start of the last stage.
    most, squares = np.full(len(upto), np.inf), np.full(len(upto), np.inf)
    most[0] = squares[0] = 0.0
    begins = []
    for stage in range(n_stages):
        first, last = stage == 0, stage == n_stages - 1
        ends = first * 3.0 * spec.d_model + last * (3 * _head_flops(spec) + sum(modules))
        work = between + ends
        mosts = np.maximum(most[:, None], work)
        most = mosts.min(axis=0)
        sums = np.where(mosts == most, squares[:, None] + work * work, np.inf)
        begins.append(sums.argmin(axis=0))
        squares = sums.min(axis=0)
    counts, end = [], spec.n_layers
    for begin_of in reversed(begins):
        begin = int(begin_of[end])
        counts.append(end - begin)
        end = begin
    return tuple(reversed(counts))
