"""Explain the difference between the steps of two layouts, and between their memory, term by term.

The terms are the keys of `Estimate.parts_s`; their differences add up to the difference of the step times. The two
layouts may be of different models, batches and clusters.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shardwright.cost import ledger
from shardwright.cost.ledger import LedgerEntry
from shardwright.planner.choice import PricedLayout
from shardwright.planner.explain import explain, number

ROUNDING = 1e-9
"""Terms that differ by less than this share of the longer step count as equal."""


@dataclass(frozen=True)
class DiffTerm:
    """A kind of work (seconds) or of memory (bytes) of both layouts, 0 if a layout has none. `why`: for seconds, the
    formula and the inputs that differ."""

    name: str
    a: float
    b: float
    why: tuple[str, ...] = ()

    @property
    def more(self) -> float:
        """Return the second layout's value less the first's."""
        return self.b - self.a


@dataclass(frozen=True)
class PlanDifference:
    """Two layouts compared. `time`, `memory`: terms that differ, the largest difference first; memory is compared on
    the pp rank with most memory. `choices`: the requested values that differ, by key, as (first, second)."""

    a: PricedLayout
    b: PricedLayout
    time: tuple[DiffTerm, ...]
    memory: tuple[DiffTerm, ...]
    choices: Mapping[str, tuple[Any, Any]]

    @property
    def slower(self) -> float:
        """Return the second step's time relative to the first, less 1; per token if their numbers differ."""
        return self.b.step_s / self.b.job.tokens / (self.a.step_s / self.a.job.tokens) - 1

    @property
    def per(self) -> str:
        """Return the unit of work by which the times are compared."""
        return "a step" if self.a.job.tokens == self.b.job.tokens else "a token"

    def as_json(self) -> dict[str, Any]:
        """Return the difference as a JSON document."""
        sides = {
            name: {"step_s": side.step_s, "tokens": side.job.tokens, "peak_bytes": side.peak_bytes,
                   "cluster": side.job.cluster.name, "text": str(side.choice)}
            for name, side in (("a", self.a), ("b", self.b))
        }  # fmt: skip
        terms = {
            kind: [
                {"name": term.name, "a": term.a, "b": term.b, "more": term.more, "why": list(term.why)}
                for term in group
            ]
            for kind, group in (("time_s", self.time), ("memory_bytes", self.memory))
        }
        return sides | {"slower": self.slower} | terms | {"choices": self.choices}


def diff(a: PricedLayout, b: PricedLayout, *, explained: bool = True) -> PlanDifference:
    """Return the difference of two layouts that have been checked (`cost.step.estimate`). `explained`: with the
    formulas of the terms, which take most of the time."""
    why = {}
    if explained:
        sides = _by_name(explain(a)), _by_name(explain(b))
        why = {name: _why(name, *sides) for name in {*a.parts_s, *b.parts_s}}
    time = _terms(a.parts_s, b.parts_s, why)
    memory = _terms(_memory(a), _memory(b), {})
    return PlanDifference(a, b, time, memory, _choices(a, b))


def _terms(a: Mapping[str, float], b: Mapping[str, float], why: Mapping[str, tuple[str, ...]]) -> tuple[DiffTerm, ...]:
    least = ROUNDING * max(sum(a.values()), sum(b.values()))
    names = list(dict.fromkeys([*a, *b]))
    terms = [DiffTerm(name, a.get(name, 0.0), b.get(name, 0.0), why.get(name, ())) for name in names]
    return tuple(sorted((term for term in terms if abs(term.more) > least), key=lambda term: -abs(term.more)))


def _memory(priced: PricedLayout) -> dict[str, float]:
    memory = priced.memory
    rank = memory.fullest_rank
    kinds = {kind: float(n_bytes[0, rank]) for kind, n_bytes in memory.kinds.items()}
    return kinds | {"allocator": priced.peak_bytes - sum(kinds.values())}


def _by_name(entries: list[LedgerEntry]) -> dict[str, LedgerEntry]:
    """Return the last entry of each name: the step's entry, if a part of the model has an entry of that name too."""
    return {ledger.identifier(entry.what): entry for entry in entries}


def _why(name: str, a: Mapping[str, LedgerEntry], b: Mapping[str, LedgerEntry]) -> tuple[str, ...]:
    """Return the formula of a term on both sides, and its inputs that differ."""
    one, other = a.get(ledger.identifier(name)), b.get(ledger.identifier(name))
    formulas = [entry.formula if entry is not None else "" for entry in (one, other)]
    texts = [formulas[0]] if formulas[0] == formulas[1] else [formula or "none" for formula in formulas]
    lines = [" -> ".join(texts)] if any(formulas) else []
    inputs = [dict(entry.inputs) if entry is not None else {} for entry in (one, other)]
    for symbol in dict.fromkeys([*inputs[0], *inputs[1]]):
        values = [by_symbol.get(symbol) for by_symbol in inputs]
        if values[0] != values[1] and None not in values:
            lines.append(f"{symbol} {' -> '.join(number(value) for value in values if value is not None)}")
    return tuple(lines)


def _choices(a: PricedLayout, b: PricedLayout) -> dict[str, tuple[Any, Any]]:
    """Return the keys of the layout and of the job whose values differ."""
    keys = dict.fromkeys([*a.layout.settings(), *b.layout.settings()])
    sides: list[dict[str, Any]] = []
    for priced in (a, b):
        job = priced.job
        choices = {name: getattr(job, name) for name in ("seq_len", "global_batch", "precision", "optimizer")}
        choices |= {"cluster": job.cluster.name, "parameters": job.model.n_parameters, "stack": job.stack.name}
        choices |= {"micro_batch": priced.micro_batch} | {key: getattr(priced.layout, key) for key in keys}
        sides.append(choices)
    return {name: (value, sides[1][name]) for name, value in sides[0].items() if value != sides[1][name]}
