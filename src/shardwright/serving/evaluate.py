"""Predictions compared with published measurements of serving."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from shardwright.planner.error_summary import ComparedRow, ErrorSummary, summary
from shardwright.serving import forms
from shardwright.serving.interval import KINDS, interval
from shardwright.serving.measured import FULL, LOOP, ServingCase, SkippedServingRow, as_json, read, skipped
from shardwright.serving.memory import largest_batch, memory
from shardwright.serving.rates import FittedRates, Rates, fitted
from shardwright.serving.setting import Serving, Settings
from shardwright.serving.simulate import PassTable, Scheduler, ServedTimes, closed_loop, lengths, run, steady_loop
from shardwright.system.errors import InputError

MEASUREMENTS = Path(__file__).with_name("published") / "inference_runs.csv"
"""Published measurements that are part of the package."""
ROUNDS = 10
"""Requests of a closed loop for each concurrent user, as InferenceX sends them. If lengths do not vary, simulated users
would stay in step forever, which no client does; they are then spread evenly (`simulate.steady_loop`)."""


@dataclass(frozen=True)
class ServingPrediction:
    """A measurement with its prediction. `left_out`: the prediction with constants fitted without the measurement's
    source; None if the constants were not fitted to its source."""

    case: ServingCase
    predicted: float
    left_out: float | None

    @property
    def error(self) -> float:
        """Return predicted / measured - 1."""
        return self.predicted / self.case.measured - 1

    @property
    def interval(self) -> tuple[float, float] | None:
        """Return the 80 % interval of `left_out`."""
        return None if self.left_out is None else interval(self.left_out, KINDS[self.case.line.metric])


@dataclass(frozen=True, kw_only=True)
class ServingErrorSummary(ErrorSummary):
    """Errors of one metric of one source in one regime."""

    source: str
    regime: str
    metric: str


@dataclass(frozen=True)
class ServingEvaluation:
    """The result of `evaluate`."""

    path: Path
    rows: tuple[ServingPrediction, ...]
    skipped: tuple[SkippedServingRow, ...]

    @property
    def summaries(self) -> list[ServingErrorSummary]:
        """Return one summary for each source, regime and metric, in the order of the file."""
        kinds: dict[tuple[str, str, str], list[ServingPrediction]] = {}
        for row in self.rows:
            case = row.case
            kinds.setdefault((case.line.source_id, case.regime, case.line.metric), []).append(row)
        return [_summary(*kind, rows) for kind, rows in kinds.items()]

    def as_json(self) -> dict[str, Any]:
        """Return `rows`, with the skipped ones after the others, and `sources`."""
        rows = [
            _row_json(row.case.line.id, row.case.line.source_id, row.case.line.metric, row.case.measured)
            | {"predicted": row.predicted, "left_out": row.left_out, "left_out_interval": row.interval}
            | as_json(row.case)
            for row in self.rows
        ]
        rows += [
            _row_json(row.name, row.source, row.metric, row.measured) | {"skipped": row.reason} for row in self.skipped
        ]
        return {"file": str(self.path), "rows": rows, "sources": [vars(kind) for kind in self.summaries]}


def _row_json(name: str, source: str, metric: str, measured: float | str) -> dict[str, Any]:
    """Return the JSON of a row that has no prediction."""
    names = {"id": name, "source": source, "metric": metric, "measured": measured}
    return names | dict.fromkeys(("predicted", "left_out", "left_out_interval", "skipped"))


def evaluate(path: Path) -> ServingEvaluation:
    """Predict every row of a CSV with the columns of `serving.measured`.

    Raises InputError with every column and cell that is not valid. A row without a price is skipped.
    """
    best, without = fitted()
    rows, without_price = [], []
    for case in read(path):
        if isinstance(case, SkippedServingRow):
            without_price.append(case)
            continue
        others = without.get(case.line.source_id)
        try:
            rows.append(ServingPrediction(case, predict(case, best), None if others is None else predict(case, others)))
        except InputError as error:
            without_price.append(skipped(case.line, error))
    return ServingEvaluation(path, tuple(rows), tuple(without_price))


def predict(case: ServingCase, constants: FittedRates) -> float:
    """Predict the measured quantity of a row. Raises InputError if the weights or one request do not fit."""
    if case.regime == LOOP:
        return simulate_loop(case, constants)
    serving = serving_of(case, constants.rates(case.engine.name, case.cluster.accelerator.die))
    settings = Settings.from_layouts([case.degrees])
    if case.regime == FULL:
        requests = full_batch(case, serving, settings)
        lengths_and_most = case.input_len, case.output_len, case.engine.max_tokens
        tokens_per_s = forms.full_load_tokens_per_s(serving, settings, requests, *lengths_and_most)
        return float(tokens_per_s[0]) * _counted(case)
    return float(static(case, serving, settings)[0])


def static(case: ServingCase, serving: Serving, settings: Settings) -> Any:
    """Return the measured quantity of a static batch."""
    requests, read_in, out = float(max(case.requests, 1)), case.input_len, case.output_len
    if case.line.metric == "ttft_s":
        return forms.prefill_s(serving, settings, requests, read_in)
    if case.line.metric == "tpot_s":
        return forms.decode_s(serving, settings, requests, forms.middle(read_in, out))
    seconds = forms.generation_s(serving, settings, requests, read_in, out)
    return seconds if case.line.metric == "e2e_latency_s" else requests * out * _counted(case) / seconds


def _counted(case: ServingCase) -> float:
    """Return the tokens that a metric counts for each output token."""
    both = case.line.metric == "total_tokens_per_s"
    return (case.input_len + case.output_len) / case.output_len if both else 1.0


def serving_of(case: ServingCase, rates: Rates) -> Serving:
    """Return the model and machine of a row, with constants."""
    return Serving(
        model=case.model, cluster=case.cluster, rates=rates, precision=case.precision, kv_precision=case.kv_precision
    )


def full_batch(case: ServingCase, serving: Serving, settings: Settings) -> float:
    """Return the requests in a batch at maximum load: the number that fits, at most the engine's maximum."""
    fits = largest_batch(serving, settings, case.input_len + case.output_len, case.engine)
    most = case.requests or case.engine.max_batch * case.degrees.dp
    return max(1.0, min(float(fits[0]), most, case.engine.max_batch * case.degrees.dp))


def loop_key(case: ServingCase) -> tuple[Any, ...]:
    """Return the values that determine the simulation of a closed loop, except the constants."""
    return (*_table_key(case), case.input_len, case.output_len, case.requests, case.shortest)


def _table_key(case: ServingCase) -> tuple[Any, ...]:
    """Return the key of a pass table and of the tokens that fit, which depend on the length with windows."""
    length = case.input_len + case.output_len if case.model.window else 0
    return (case.model_name, case.cluster, case.engine, case.degrees, case.precision, case.kv_precision, length)


def simulate_loop(case: ServingCase, constants: FittedRates) -> float:
    """Simulate a closed loop. Return the measured metric: mean TTFT, mean TPOT, or tokens per second."""
    served = _looped(constants, loop_key(case), _CachedCase(case))
    if case.line.metric == "ttft_s":
        return float(served.ttft_s.mean())
    if case.line.metric == "tpot_s":
        return float(np.nanmean(served.tpot_s))
    return served.tokens_per_s * _counted(case)


class _CachedCase:
    """A case that a cache ignores, because the key next to it has all values that matter."""

    def __init__(self, case: ServingCase) -> None:
        self.case = case

    def __hash__(self) -> int:
        return 0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _CachedCase)


@lru_cache(maxsize=4096)
def _looped(constants: FittedRates, key: tuple[Any, ...], cached: _CachedCase) -> ServedTimes:
    case = cached.case
    table, cache_tokens = _table(constants, _table_key(case), cached)
    limits = Scheduler(case.engine, case.engine.max_batch * case.degrees.dp, cache_tokens)
    concurrency = max(case.requests, 1)
    if case.shortest >= 1:
        return steady_loop(table, limits, case.input_len, case.output_len, concurrency, ROUNDS)
    n = ROUNDS * concurrency
    inputs, outputs = (lengths(case.input_len, case.shortest, n), lengths(case.output_len, case.shortest, n, seed=7))
    return run(table, limits, closed_loop(inputs, outputs), concurrency)


@lru_cache(maxsize=512)
def _table(constants: FittedRates, key: tuple[Any, ...], cached: _CachedCase) -> tuple[PassTable, float]:
    case = cached.case
    serving = serving_of(case, constants.rates(case.engine.name, case.cluster.accelerator.die))
    held_bytes = memory(serving, Settings.from_layouts([case.degrees]), case.engine, case.input_len + case.output_len)
    tokens = float(np.max(held_bytes.cache_tokens(case.degrees.dp)))
    return PassTable(serving, case.degrees, case.engine.max_tokens), tokens


def _summary(source: str, regime: str, metric: str, rows: Sequence[ServingPrediction]) -> ServingErrorSummary:
    compared = [
        ComparedRow(row.case.line.id, row.predicted, row.case.measured, row.left_out, row.interval) for row in rows
    ]
    return summary(ServingErrorSummary, compared, source=source, regime=regime, metric=metric)
