"""What is computed for some of many layouts and holds for others, kept for as long as one search takes.

Passes of a layer do not depend on the pipeline or on data ranks, and parameters and optimizer states not on the
micro-batch; so thousands of groups of layouts share some hundred distinct rows of the columns that matter.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence

import numpy as np

from shardwright.cost import ledger
from shardwright.cost.job import COLUMNS, Candidates, Floats, Ints, Job
from shardwright.cost.passes import Passes
from shardwright.layout_keys import KEYS, RECOMPUTE
from shardwright.units import MiB

Arrays = dict[str, Floats]
OF_A_PASS = ("tp", "cp", "ep", "sequence_parallel", "micro_batch", "recompute")
"""The columns that the passes of a part of the model depend on."""
OF_STATES = ("tp", "cp", "ep", "dp_shard", "dp_replicate", "zero", "sequence_parallel")
"""Those that parameters, gradients and optimizer states depend on."""
OF_A_STAGE = (*OF_STATES, "micro_batch", "recompute")
"""Those that activations, gradients and temporary buffers of a stage depend on."""
NOT_OF_A_PASS = {name for name in KEYS if name.startswith(("pp", "virtual", "stage", "zero", "compress"))}
NOT_OF_A_STAGE = {"pp_schedule", "virtual_stages"}
NOT_OF_STATES = NOT_OF_A_STAGE | {"loss_chunk_tokens", "cp_method"}
"""Keys that the layouts of a group share, and on which these do not depend; stages and their ranks are told apart."""


MOST_BYTES = 128 * MiB
"""Of the tables of a memo, which forgets them all when they are larger: of 405B on 16,384 accelerators those of stages
would take 5 GiB."""


class Memo:
    """Tables of a job. `values`: for each column of candidates the numbers that it can have, in order."""

    def __init__(self, values: Mapping[str, Sequence[int]]) -> None:
        self.values = {name: np.asarray(those, dtype=np.int64) for name, those in values.items()}
        self._tables: dict[Hashable, Table] = {}

    @staticmethod
    def of(candidates: Candidates) -> "Memo":
        """One for these candidates alone."""
        values = {name: np.unique(getattr(candidates, name)).tolist() for name in COLUMNS}
        return Memo(values | {"recompute": range(len(RECOMPUTE))})  # some of the layers may recompute nothing

    def table(self, columns: Sequence[str], *of: Hashable) -> "Table":
        """That of some columns, for what is computed with all else equal, which `of` names."""
        if sum(table.n_bytes for table in self._tables.values()) > MOST_BYTES:
            self._tables.clear()
        if of not in self._tables:
            self._tables[of] = Table([(name, self.values[name]) for name in columns])
        return self._tables[of]

    def passes(self, job: Job, candidates: Candidates, of: Hashable, compute: Callable[[Candidates], Passes]) -> Passes:
        """`compute(candidates)`, with what is known; `of`: the part of the model. Messages are left out."""
        shared = others(candidates, NOT_OF_A_PASS)
        table = self.table(OF_A_PASS, of, candidates.kind.splits_backward, shared)
        rows = table.rows(candidates, lambda new: _as_arrays(compute(new)))
        found = Passes(str(of))
        for name, values in table.values.items():
            part, _, kind = name.partition(" ")
            found.parts[part][kind] = values[rows]
        return found


def others(candidates: Candidates, but: set[str]) -> Hashable:
    """The keys that candidates share, without some."""
    return tuple(getattr(candidates.shared, name) for name in KEYS if name not in COLUMNS and name not in but)


def _as_arrays(passes: Passes) -> Arrays:
    return {f"{part} {kind}": seconds for part, kinds in passes.parts.items() for kind, seconds in kinds.items()}


class Table:
    """Arrays (u, ...), by name, of u distinct rows of some columns."""

    def __init__(self, columns: Sequence[tuple[str, Ints]]) -> None:
        self.columns = columns
        self.values: Arrays = {}
        self.n_bytes = 0
        self._keys, self._places = np.zeros(0, np.int64), np.zeros(0, np.int64)

    def rows(self, candidates: Candidates, compute: Callable[[Candidates], Arrays]) -> Ints:
        """Where in the arrays each of the candidates is, (n,); `compute` is called for those that are not there yet."""
        key = np.zeros(len(candidates), np.int64)
        for name, values in self.columns:
            column = getattr(candidates, name)
            place = np.searchsorted(values, column)
            assert np.array_equal(values[place], column), name
            key = key * len(values) + place
        found = self._find(key)
        if (missing := found < 0).any():
            new_keys, first = np.unique(key[missing], return_index=True)
            self._add(new_keys, compute(candidates.take(np.nonzero(missing)[0][first])))
            found = self._find(key)
        return found

    def _find(self, key: Ints) -> Ints:
        if not len(self._keys):
            return np.full(len(key), -1)
        at = np.minimum(np.searchsorted(self._keys, key), len(self._keys) - 1)
        return np.where(self._keys[at] == key, self._places[at], -1)

    def _add(self, keys: Ints, arrays: Arrays) -> None:
        n, more = len(self._keys), len(keys)
        for name in {**self.values, **arrays}:
            shape = (arrays if name in arrays else self.values)[name].shape[1:]
            before = self.values.get(name, np.zeros((n, *shape)))
            self.values[name] = np.concatenate([before, np.broadcast_to(arrays.get(name, 0.0), (more, *shape))])
        self.n_bytes = sum(each.nbytes for each in self.values.values())
        together = np.concatenate([self._keys, keys])
        order = np.argsort(together, kind="stable")
        self._keys, self._places = together[order], np.concatenate([self._places, np.arange(n, n + more)])[order]


def remembers(memo: Memo | None, job: Job) -> bool:
    """Whether passes may come from a table: not while formulas are recorded, and not where casts of weights are counted
    once a step, so that passes depend on the number of micro-batches."""
    return memo is not None and not ledger.recording() and not job.stack.keeps_casts
