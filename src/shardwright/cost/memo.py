"""A cache of per-layout results that many layouts share, valid for one search.

Passes of a layer do not depend on the pipeline or on data ranks, and parameters and optimizer states do not depend on
the micro-batch. So thousands of groups of layouts share some hundred distinct rows of the columns that matter.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardwright.cost import ledger
from shardwright.cost.job import COLUMNS, Candidates, Ints, Job
from shardwright.cost.passes import Passes
from shardwright.layout.keys import KEYS, RECOMPUTE, ZERO
from shardwright.system.units import MiB

Arrays = dict[str, NDArray[Any]]
OF_A_PASS = ("tp", "cp", "ep", "sequence_parallel", "micro_batch", "recompute")
"""The columns on which the passes of a part of the model depend."""
OF_STATES = ("tp", "cp", "ep", "dp_shard", "dp_replicate", "zero", "sequence_parallel")
"""The columns on which parameters, gradients and optimizer states depend."""
OF_A_MICROBATCH = (*OF_A_PASS, "zero")
"""The columns on which activations and temporary buffers of a stage depend; zero, as it may shard gradients."""
NOT_OF_A_PASS = {name for name in KEYS if name.startswith(("pp", "virtual", "stage", "zero", "compress"))}
NOT_OF_A_PASS -= {"compress_dispatch"}
NOT_OF_A_STAGE = {"pp_schedule", "virtual_stages"}
NOT_OF_A_MICROBATCH = NOT_OF_A_STAGE | {"zero_pp_gather", "zero_secondary_ranks"}
NOT_OF_STATES = NOT_OF_A_STAGE | {"loss_chunk_tokens", "cp_method"}
"""Keys that the layouts of a group share and that do not affect states. Stages and their ranks are separate keys."""
NOT_OF_A_LAYER = NOT_OF_A_PASS | {"loss_chunk_tokens"}
"""Keys that do not affect the passes of a layer. The chunks of a loss affect the head."""


MOST_BYTES = 128 * MiB
"""Largest size of the tables of a memo. Above it, the least recently used tables are dropped."""


MOST_PLACES = 2**20
"""Values up to this limit are looked up in an array with an entry for each; larger values by bisection."""


EVERY: dict[str, Sequence[int]] = {"recompute": range(len(RECOMPUTE)), "zero": ZERO}
"""The values of columns that do not depend on a job."""


class Memo:
    """Tables of a job. `values`: for each column of candidates the values that it can have, in ascending order."""

    def __init__(self, values: Mapping[str, Sequence[int]]) -> None:
        self.columns = {name: CandidateColumn(those) for name, those in values.items()}
        self._tables: dict[Hashable, DistinctRows] = {}
        self._last: dict[tuple[str, ...], tuple[Candidates, ColumnKeys]] = {}

    @staticmethod
    def from_candidates(candidates: Candidates) -> "Memo":
        """Return a memo for these candidates alone."""
        values = {name: np.unique(getattr(candidates, name)).tolist() for name in COLUMNS}
        # Some layers may recompute nothing, and a layout may represent layouts with equal gradients.
        return Memo(values | EVERY)

    def table(self, columns: Sequence[str], *key: Hashable) -> "DistinctRows":
        """Return the table of some columns, for a result that depends only on them and on `key`."""
        tables = self._tables
        if (table := tables.pop(key, None)) is None:
            table = DistinctRows(partial(self._keys, tuple(columns)))
            while sum(cached.n_bytes for cached in tables.values()) > MOST_BYTES:
                del tables[next(iter(tables))]
        tables[key] = table  # move to the end: most recently used
        return table

    def _keys(self, columns: tuple[str, ...], candidates: Candidates) -> "ColumnKeys":
        """Return the keys of candidates, cached until the next candidates: several tables have the same columns."""
        if self._last.get(columns, (None,))[0] is not candidates:
            key = np.zeros(len(candidates), np.int64)
            for name in columns:
                column = self.columns[name]
                key *= len(column)
                key += column.places(np.asarray(getattr(candidates, name), dtype=np.int64))
            begins = np.flatnonzero(np.diff(key, prepend=-1))
            self._last[columns] = candidates, ColumnKeys(key[begins], begins, np.diff(begins, append=len(key)))
        return self._last[columns][1]

    def passes(
        self, candidates: Candidates, key: Hashable, but: set[str], compute: Callable[[Candidates], Passes]
    ) -> Passes:
        """Return `compute(candidates)`, using cached rows; `key`: the part of the model, which does not depend on the
        keys in `but`. Messages are left out."""
        shared = others(candidates, but)
        table = self.table(OF_A_PASS, key, candidates.kind.splits_backward, shared)
        rows = table.rows(candidates, lambda new: _as_arrays(compute(new)))
        result = Passes(str(key))
        for name, values in table.values.items():
            part, _, kind = name.partition(" ")
            result.parts[part][kind] = values[rows]
        return result


def others(candidates: Candidates, but: set[str]) -> Hashable:
    """Return the keys that candidates share, except the keys in `but`."""
    return tuple(getattr(candidates.shared, name) for name in KEYS if name not in COLUMNS and name not in but)


def _as_arrays(passes: Passes) -> Arrays:
    return {f"{part} {kind}": seconds for part, kinds in passes.parts.items() for kind, seconds in kinds.items()}


class CandidateColumn:
    """The values that a column of candidates can have, in ascending order."""

    def __init__(self, numbers: Sequence[int]) -> None:
        self._numbers = np.asarray(numbers, dtype=np.int64)
        self._places: Ints | None = None
        if self._numbers[-1] < MOST_PLACES:
            self._places = np.full(self._numbers[-1] + 1, -1)
            self._places[self._numbers] = np.arange(len(self))

    def __len__(self) -> int:
        return len(self._numbers)

    def places(self, values: Ints) -> Ints:
        """Return the index of each value in the column's values."""
        if self._places is not None:
            indices = self._places[values]
            assert indices.min(initial=0) == 0, "a value that is not one of the numbers"
        else:
            indices = np.searchsorted(self._numbers, values)
            assert np.array_equal(self._numbers[indices], values), "a value that is not one of the numbers"
        return indices


class ColumnKeys(NamedTuple):
    """Numbers of the values of some columns of n candidates. Neighbours often have equal values, because they differ in
    other columns, so runs of equal candidates are stored once. `keys`: the number of each run; `begins`: the index of
    its first candidate; `counts`: its length."""

    keys: Ints
    begins: Ints
    counts: Ints


class DistinctRows:
    """Arrays (u, ...), by name, of u distinct rows of some columns; `keys` numbers the rows."""

    def __init__(self, keys: Callable[[Candidates], ColumnKeys]) -> None:
        self.values: Arrays = {}
        self.n_bytes = 0
        self._keys_of = keys
        self._keys, self._places = np.zeros(0, np.int64), np.zeros(0, np.int64)

    def rows(self, candidates: Candidates, compute: Callable[[Candidates], Arrays]) -> Ints:
        """Return the index of each candidate in the arrays, (n,); `compute` is called for missing candidates."""
        keys, begins, counts = self._keys_of(candidates)
        indices = self._find(keys)
        if (missing := indices < 0).any():
            new_keys, first = np.unique(keys[missing], return_index=True)
            self._add(new_keys, compute(candidates.take(begins[missing][first])))
            indices = self._find(keys)
        return np.repeat(indices, counts)

    def _find(self, key: Ints) -> Ints:
        if not len(self._keys):
            return np.full(len(key), -1)
        at = np.minimum(np.searchsorted(self._keys, key), len(self._keys) - 1)
        return np.where(self._keys[at] == key, self._places[at], -1)

    def _add(self, keys: Ints, arrays: Arrays) -> None:
        n, more = len(self._keys), len(keys)
        for name, like in {**self.values, **arrays}.items():
            shape, nothing = like.shape[1:], np.zeros(1, like.dtype)
            before = self.values.get(name, np.broadcast_to(nothing, (n, *shape)))
            self.values[name] = np.concatenate([before, np.broadcast_to(arrays.get(name, nothing), (more, *shape))])
        self.n_bytes = sum(array.nbytes for array in self.values.values())
        together = np.concatenate([self._keys, keys])
        order = np.argsort(together, kind="stable")
        self._keys, self._places = together[order], np.concatenate([self._places, np.arange(n, n + more)])[order]


def remembers(memo: Memo | None, job: Job) -> bool:
    """Return whether passes may come from a table. They may not while formulas are recorded, nor if casts of weights
    are counted once a step, because passes then depend on the number of micro-batches, or if messages of experts
    overlap, because passes then depend on the pipeline."""
    apart = job.stack.keeps_casts or job.stack.speed.hides_experts
    return memo is not None and not ledger.recording() and not apart


def numbered(values: Ints) -> tuple[Ints, Ints]:
    """Return the distinct values of n integers >= 0 in ascending order, (u,), and the index of each of the n, (n,).

    Equals `np.unique` with `return_inverse`, but does not sort if the largest is not far above n.
    """
    most = int(values.max(initial=0))
    if most > 4 * len(values):
        distinct, back = np.unique(values, return_inverse=True)
        return distinct, back
    present = np.zeros(most + 1, dtype=bool)
    present[values] = True
    places = np.cumsum(present) - 1
    return np.flatnonzero(present), places[values]
