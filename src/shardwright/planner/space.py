"""Every layout that can train a model with a batch on a cluster, as arrays.

| choice              | values                                                                                   |
| ------------------- | ---------------------------------------------------------------------------------------- |
| degrees             | all with pp x dp_replicate x dp_shard x cp x tp = the number of accelerators               |
| ep                  | every degree that divides the experts and dp_shard x cp x tp                               |
| zero                | 0 without dp_shard, else 1 to 3; under a pipeline 3 gathers once a step or a micro-batch;   |
|                     | with shards in the memory of the host 1 to 3 without dp_shard too                           |
| sequence_parallel   | wherever there is tp                                                                       |
| cp_method           | zigzag and ulysses; the other methods move more bytes or leave ranks idle                  |
| pp_schedule         | all that are priced; a schedule with free virtual stages has the numbers of its table row |
| micro_batch         | every divisor of a data rank's share of the batch                                          |
| recompute           | none, selective with the default parts, and full, each in all layers; afterwards in as     |
|                     | few layers as fit, for the layouts that are found (`recomputation.fewest_layers`)          |
| loss_chunk_tokens   | 0, and 4096 where a rank has more tokens of a micro-batch, not of pairs of answers         |
| zero_secondary_ranks | 1; with zero 3 over several nodes and no pipeline also the ranks of dp_shard x cp in a node |
| compress_gradients and other compression | none: the others change the numerical results of the training         |

A choice that changes nothing is made once: zero is 0 if there is nothing to shard over; pp_schedule and
zero_pp_gather keep their defaults if they are not used. The rules come from `Layout.problems`,
`split.rules.problems`, `split.stages.schedule_problems` and `layout.accumulation`, applied here to many layouts at
once.

Layout keys that are not searched because the user has fixed their values.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardwright.cost.job import COLUMNS, RECOMPUTE, Candidates, Ints, Job
from shardwright.cost.memo import numbered
from shardwright.layout.box import DENSE_AXES
from shardwright.layout.key import written
from shardwright.layout.keys import KEYS
from shardwright.layout.layout import Layout, batch_divides, zero_fits
from shardwright.model.spec import ModelSpec
from shardwright.planner.choice import micro_batch_problem, pairs
from shardwright.split.rules import (
    expert_shards_fit,
    expert_sizes,
    experts_divide,
    heads_divide,
    heads_of_rank,
    pair_loss_problems,
    sequence_parts,
    tp_divides,
)
from shardwright.split.stages import schedule_problems
from shardwright.system.errors import LayoutError, nearest
from shardwright.system.units import divisors

_ALL_AXES = Layout(dp_shard=2, cp=2, tp=2)
"""A layout with every axis except pp, in which all keys that belong to an axis are used."""
_RECOMPUTED = tuple(map(RECOMPUTE.index, KEYS["recompute"].searched(_ALL_AXES)))

Columns = dict[str, Ints]
Mask = NDArray[np.bool_]
Condition = Callable[[Candidates], Mask]
"""A function that returns the mask, (n,), of the selected candidates among n."""


def groups(
    job: Job, offload: Mapping[str, Any] = MappingProxyType({}), condition: Condition | None = None
) -> Iterator[Candidates]:
    """Yield every layout of the whole cluster for this job, in groups that share a pipeline; no group is empty, unless
    a condition excludes all its layouts. All layouts have the values of `offload`.

    Simple layouts come first: layouts without a pipeline before layouts with one, fewer ranks of tp before more. Raises
    LayoutError, with the nearest batches that can be partitioned, if no layout can partition the batch.
    """
    n_groups = 0
    for pp in divisors(job.cluster.size):
        for group, _, kept in masked_groups(job, pp, offload, condition):
            n_groups += 1
            yield group.take(kept)
    if not n_groups:
        raise LayoutError(no_layout(job))


def masked_groups(
    job: Job, pp: int, offload: Mapping[str, Any] = MappingProxyType({}), condition: Condition | None = None
) -> Iterator[tuple[Candidates, "CandidateRows", Mask]]:
    """Yield for each of the `groups` with pipelines of `pp` ranks all rows as candidates, the rows, and the mask of the
    rows in the group; nothing if there is no group."""
    by_method: dict[str, CandidateRows] = {}
    for shared in _in_nodes(job, _shared(pp, job.model.n_layers, tuple(offload.items()))):
        method = shared.cp_method
        if method not in by_method:
            by_method[method] = CandidateRows.from_degrees(job, pp, method, shared.offload_parameters != "none")
        group, kept = _group(job, shared, by_method[method])
        if kept.any():
            yield group, by_method[method], kept if condition is None else kept & condition(group)


@cache
def _shared(pp: int, n_layers: int, offload: tuple[tuple[str, Any], ...] = ()) -> tuple[Layout, ...]:
    """Return every choice of the keys that the layouts of a group share, for pipelines of `pp` ranks in which each
    stage has a layer."""
    layouts = [_ALL_AXES.changed(pp=pp, **dict(offload))]
    for name, key in KEYS.items():
        if name not in COLUMNS and name != "pp":
            layouts = [
                other
                for layout in layouts
                for value in key.searched(layout)
                for other in _with_value(layout, name, value)
            ]
    return tuple(layout for layout in layouts if layout.n_stages <= n_layers)


def _in_nodes(job: Job, layouts: Sequence[Layout]) -> Iterator[Layout]:
    """Yield these layouts, and on several nodes the layouts without a pipeline also with secondary ranks in a node."""
    node = job.cluster.node_size
    for layout in layouts:
        yield layout
        for ranks in divisors(node)[1:] if layout.pp == 1 and job.cluster.size > node else ():
            yield layout.changed(dp_shard=2 * ranks, zero_secondary_ranks=ranks)


def _with_value(layout: Layout, name: str, value: Any) -> list[Layout]:
    """Return a layout with another value of a key; empty if that is invalid, such as dualpipe on an odd pp."""
    if getattr(layout, name) == value:
        return [layout]
    try:
        return [layout.changed(**{name: value})]
    except LayoutError:
        return []


class DistinctParts(NamedTuple):
    """The distinct values of some columns of n rows: for each value the index of its first row, (u,), and for each row
    the index of its value, (n,)."""

    first: Ints
    of_row: Ints

    @staticmethod
    def from_numbers(numbers: Ints) -> "DistinctParts":
        """Return the distinct values of integers >= 0 that are not far above n."""
        first = np.full(int(numbers.max(initial=-1)) + 1, -1)
        first[numbers[::-1]] = np.arange(len(numbers))[::-1]
        present = first >= 0
        return DistinctParts(first[present], (np.cumsum(present) - 1)[numbers])

    def among(self, rows: Ints) -> "DistinctParts":
        """Return the distinct values of some of the rows, each with the first of these rows that has it."""
        of_row = self.of_row[rows]
        first = np.full(len(self.first), -1)
        first[of_row[::-1]] = rows[::-1]
        present = first >= 0
        return DistinctParts(first[present], (np.cumsum(present) - 1)[of_row])


@dataclass(frozen=True)
class CandidateRows:
    """Every valid choice of the keys in which the layouts of a group differ, for any shared keys. `microbatches`: the
    distinct numbers of micro-batches of a step, and for each row the index of its number. `degrees`: the distinct
    degrees and ZeRO stages. `passes`: the distinct tp, cp, ep, ZeRO stage, micro-batch and recomputation, which also
    determine the number of micro-batches."""

    columns: Mapping[str, Any]
    microbatches: tuple[Ints, Ints]
    degrees: DistinctParts
    passes: DistinctParts

    @staticmethod
    def from_degrees(job: Job, pp: int, method: str, on_host: bool) -> "CandidateRows":
        """Return the rows of pipelines of `pp` ranks; `on_host` as in `_degrees`."""
        degrees = _degrees(job.model, job.cluster.size // pp, job.seq_len, method, on_host)
        degrees = _where(degrees, batch_divides(job.global_batch, 1, degrees["dp_replicate"] * degrees["dp_shard"]))
        names = ("tp", "cp", "ep", "zero")
        kinds = np.unique(np.stack([degrees[name] for name in names]), axis=1, return_inverse=True)[1].reshape(-1)
        choices = {"micro_batch": divisors(job.global_batch), "recompute": _RECOMPUTED}
        n_choices = len(choices["micro_batch"]) * len(_RECOMPUTED)
        columns = _times(degrees, choices)
        data_ranks = columns["dp_replicate"] * columns["dp_shard"]
        valid = batch_divides(job.global_batch, columns["micro_batch"], data_ranks)
        at, choice = (index[valid] for index in np.divmod(np.arange(len(valid)), n_choices))
        columns = _where(columns, valid)
        return CandidateRows(
            {"sequence_parallel": columns["tp"] > 1, **columns},
            numbered(job.global_batch // (columns["micro_batch"] * data_ranks[valid])),
            DistinctParts.from_numbers(at),
            DistinctParts.from_numbers(kinds[at] * n_choices + choice),
        )


def _group(job: Job, shared: Layout, rows: CandidateRows) -> tuple[Candidates, Mask]:
    """Return all rows as candidates, and the mask of the rows with which the shared keys are valid, and used if they
    are not at their default."""
    candidates = Candidates(shared=shared, **rows.columns)
    distinct, which = rows.microbatches
    kept: Mask = np.array([not schedule_problems(shared, int(m)) for m in distinct], dtype=bool)[which]
    if shared.zero_secondary_ranks > 1:
        kept &= shared.zero_secondary_ranks * candidates.tp == job.cluster.node_size  # fewer add network bytes
    if shared.loss_chunk_tokens:
        kept &= candidates.tokens(job.seq_len) > shared.loss_chunk_tokens
    if job.pairs:
        kept &= not any(pair_loss_problems("pairs", None, shared))
    for name, key in KEYS.items():
        if name not in COLUMNS and getattr(shared, name) != key.default_in(shared):
            kept &= key.used(candidates)
    return candidates, kept


def _degrees(spec: ModelSpec, n_ranks: int, seq_len: int, method: str, on_host: bool = False) -> Columns:
    """Return every valid choice of degrees, ZeRO stage and ep for the `n_ranks` ranks of a stage, for any batch.
    `on_host`: shards are in the memory of the host, for which the stage is used without ranks to shard over, too."""
    moe = spec.moe
    columns = _times(
        {},
        {
            "tp": [tp for tp in divisors(n_ranks) if tp_divides(spec, tp)],
            "cp": [cp for cp in divisors(n_ranks) if (method == "zigzag" or cp > 1)],
            "dp_shard": divisors(n_ranks),
            "zero": KEYS["zero"].searched(_ALL_AXES),
            "ep": [ep for ep in divisors(n_ranks) if experts_divide(spec, ep)],
        },
    )
    tp, cp, dp_shard, zero, ep = (columns[name] for name in ("tp", "cp", "dp_shard", "zero", "ep"))
    fold = dp_shard * cp * tp
    valid = (n_ranks % fold == 0) & (fold % ep == 0)  # the latter as in `Layout.problems`
    valid &= zero_fits(zero, n_ranks // fold, dp_shard, cp)
    valid &= (zero == 0) | (dp_shard * cp > 1) | on_host  # otherwise ZeRO changes nothing
    for parts in sequence_parts(method, np.ones_like(cp) if method == "ulysses" else cp, cp, tp):
        valid &= seq_len % parts == 0
    if method == "ulysses":
        valid &= heads_divide(*heads_of_rank(spec, tp), cp)
    if moe is not None:
        ranks = np.maximum(fold // ep, 1)
        for size in expert_sizes(spec).values():
            valid &= expert_shards_fit(moe, size, zero, tp, ep, ranks)
    columns = _where(columns, valid)
    return {"dp_replicate": n_ranks // (columns["dp_shard"] * columns["cp"] * columns["tp"]), **columns}


def _times(columns: Columns, choices: Mapping[str, Sequence[int]]) -> Columns:
    """Return every row of `columns` with every combination of `choices`; the last choice varies fastest."""
    result = dict(columns)
    for name, values in choices.items():
        n_rows = len(next(iter(result.values()))) if result else 1
        result = {key: np.repeat(column, len(values)) for key, column in result.items()}
        result[name] = np.tile(np.asarray(values, dtype=np.int64), n_rows)
    return result


def _where(columns: Columns, kept: Mask) -> Columns:
    return {name: column[kept] for name, column in columns.items()}


def no_layout(job: Job) -> str:
    """Return why no layout can partition the batch, with the nearest batches that some layout can partition."""
    data_ranks: set[int] = set()
    for pp in divisors(job.cluster.size):
        for method in {shared.cp_method for shared in _shared(pp, job.model.n_layers)}:
            degrees = _degrees(job.model, job.cluster.size // pp, job.seq_len, method)
            data_ranks |= set((degrees["dp_replicate"] * degrees["dp_shard"]).tolist())
    least = min(data_ranks)
    below = max(job.global_batch // n * n for n in data_ranks)
    above = min(-(-job.global_batch // n) * n for n in data_ranks)
    near = " or ".join(str(batch) for batch in (below, above) if batch)
    return (
        f"--global-batch {job.global_batch}: no layout of {job.cluster.size} ranks shares it out evenly: this model "
        f"and --seq-len {job.seq_len} need {least} data ranks or more, and a batch is a multiple of the number of data "
        f"ranks; nearest: {near}"
    )


OPTION = "--fix"
OFFLOADS = ("offload_optimizer", "offload_parameters", "offload_activations")


@dataclass(frozen=True)
class FixedChoices:
    """Select the candidates in which each key of `values` (of [layout], or micro_batch) has the given value and is
    used. The degree 1 of an axis is a value like any other."""

    values: Mapping[str, Any]

    def __call__(self, candidates: Candidates) -> Mask:
        mask = np.ones(len(candidates), dtype=bool)
        for name, value in self.values.items():
            if name in COLUMNS:
                mask &= getattr(candidates, name) == (RECOMPUTE.index(value) if name == "recompute" else value)
            else:
                mask &= getattr(candidates.shared, name) == value
                mask &= name in DENSE_AXES or KEYS[name].used(candidates)
        return mask

    @property
    def offload(self) -> dict[str, Any]:
        """Return the offload keys. Only the fixed offloads are searched."""
        return {name: value for name, value in self.values.items() if name in OFFLOADS}

    def __str__(self) -> str:
        return ",".join(f"{name}={written(value)}" for name, value in self.values.items())


def read_fixed(text: str) -> FixedChoices:
    """Parse the values to fix, `key=value` pairs separated by commas. Raises LayoutError with all problems at once."""
    return _checked(*pairs(text, OPTION))


def fixed_values(values: Mapping[str, Any]) -> FixedChoices:
    """Check the values to fix. Raises LayoutError with every problem at once."""
    known = [*KEYS, "micro_batch"]
    problems = [
        f"{OPTION} {name}={value}: no such key; {nearest(name, known)}"
        for name, value in values.items()
        if name not in known
    ]
    return _checked({name: value for name, value in values.items() if name in known}, problems)


def _checked(values: Mapping[str, Any], problems: list[str]) -> FixedChoices:
    for name, value in values.items():
        rule = micro_batch_problem(value) if name == "micro_batch" else KEYS[name].problem(value)
        if rule is not None:
            problems.append(f"{OPTION} {name}={written(value)}: {rule}")
        elif name != "micro_batch" and value in KEYS[name].not_priced():
            problems.append(f"{OPTION} {name}={written(value)}: plan has no formulas for it")
    if not values and not problems:
        problems.append(f"{OPTION}: write key=value, such as tp=8,pp=1")
    if problems:
        raise LayoutError(*problems)
    return FixedChoices(values)


def none_searched(job: Job, fixed: FixedChoices) -> LayoutError:
    """Return the error that no layout of the space has these values, with the values that layouts have for each key."""
    known: dict[str, set[Any]] = {name: set() for name in fixed.values}
    for group in groups(job, fixed.offload):
        for name in known:
            column = getattr(group, name) if name in COLUMNS else [getattr(group.shared, name)]
            known[name] |= set(np.unique(column).tolist())
    named = {name: [RECOMPUTE[code] for code in some] if name == "recompute" else some for name, some in known.items()}
    values = "; ".join(f"{name}: {', '.join(map(written, sorted(some)))}" for name, some in named.items())
    return LayoutError(
        f"{OPTION} {fixed}: no layout that is searched on {job.cluster.size} accelerators has these values; those that "
        f"some layouts have, {values}; --explain takes a layout that is not searched"
    )
