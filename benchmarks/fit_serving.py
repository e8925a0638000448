"""Fit the constants of serving to published measurements, and write src/shardwright/serving/rates.toml.

    python benchmarks/fit_serving.py [TABLE.csv] [--left-out] [--out FILE.toml]
    python benchmarks/fit_serving.py [TABLE.csv] --hold-out table|model|accelerator

Least squares on the logarithm of predicted / measured, robust against rows that nothing explains, from the packaged
constants on. A constant of an
engine's generation stays near that of the generation which it is `like`, back to "others", and a factor of an
accelerator's die near 1, unless rows speak against it; a generation without rows has the constants of what it is like.
A source counts as much as its rows, up to MOST_ROWS. Of closed loops, which are simulated, every eleventh counts. With
--left-out every source is left out once, too, and the constants that the others give, to first order from those of all,
are written beside them.
--hold-out leaves out each table, model or accelerator instead, prints the errors of what was left out, and writes
nothing.
"""

import argparse
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwright.serving import evaluate, forms
from shardwright.serving.engines import ENGINES
from shardwright.serving.evaluate import MEASUREMENTS, full_batch, loop_key, simulate_loop
from shardwright.serving.measured import FULL, LOOP, ServingCase, read
from shardwright.serving.rates import OTHERS, PACKAGED, RATES, FittedRates, Rates
from shardwright.serving.rates import fitted as packaged
from shardwright.serving.setting import Serving, Settings

Floats = NDArray[np.float64]
GUESSES = {
    "matmul_share": (0.95, 0.12),
    "memory_share": (0.9, 0.1),
    "cache_share": (0.85, 0.2),
    "flash_share": (0.45, 0.2),
    "cached_share": (0.05, 1.2),
    "expert_share": (0.8, 0.25),
    "layer_s": (25e-6, 0.8),
    "pass_s": (0.5e-3, 0.7),
    "prefill_s": (1.5e-3, 0.7),
    "launch_s": (0.2e-3, 0.7),
    "expert_launch_s": (0.4e-3, 0.7),
    "arrive_s": (30e-3, 1.5),
    "request_s": (8e-6, 0.7),
    "reduce_s": (15e-6, 0.6),
    "exchange_s": (25e-6, 0.5),
    "link_share": (0.8, 0.2),
}
"""What "others" is near to unless rows speak against it, and the spread of the logarithm of an engine's around that of
the one that it is like; "others" has twice that spread."""
FACTORS = ("matmul_share", "memory_share", "flash_share", "reduce_s", "link_share")
"""Constants that a die has a factor on; with their spread."""
FACTOR_SPREAD = 0.08
STEP = 0.05
"""Of a difference, in the logarithm: a simulation goes from pass to pass, so what changes little changes nothing."""
PRIOR = 0.3
"""What a constant one spread away from its prior counts, in the logarithm of one row."""
MOST_ROWS = 150
LOOPS = 11
ROUNDS, LINEAR_ROUNDS = 15, 10
ENOUGH = 2e-3
"""A round that makes the sum of squares less by a smaller share is the last one."""
ROBUST = 0.15
NAMES = (OTHERS, *(each.name for each in ENGINES))
EXPERTS, RANKS = ("expert_share", "expert_launch_s", "exchange_s"), ("reduce_s", "link_share")


class Problem:
    """The rows of a fit, grouped so that those of one model, machine and precision are evaluated at once.

    A point has the logarithms of the constants of "others" over `GUESSES`, of each generation over those that it is
    like, and of the factors of each die.
    """

    def __init__(self, rows: Sequence[ServingCase]) -> None:
        self.rows = list(rows)
        self.chips = sorted({row.cluster.accelerator.die for row in priced_rows(MEASUREMENTS)})
        self.groups = groups(self.rows)
        counts = Counter(row.line.source_id for row in self.rows)
        self.weight = np.sqrt([
            min(counts[row.line.source_id], MOST_ROWS) / counts[row.line.source_id] for row in self.rows
        ])  # fmt: skip
        self.measured = np.array([row.measured for row in self.rows])
        spreads = np.array([spread for _, spread in GUESSES.values()])
        self.spreads = np.concatenate(
            [2 * spreads, *[spreads] * len(ENGINES), np.full(len(FACTORS) * len(self.chips), FACTOR_SPREAD)]
        )
        self.engine = np.array([NAMES.index(row.engine.name) for row in self.rows])
        self.chip = np.array([self.chips.index(row.cluster.accelerator.die) for row in self.rows])

    def fitted(self, x: Floats) -> FittedRates:
        """The constants of a point."""
        n, at = len(RATES), len(RATES) * len(NAMES)
        constants = np.log([guess for guess, _ in GUESSES.values()]) + LINEAGE @ x[:at].reshape(-1, n)
        factors = x[at:].reshape(len(self.chips), -1)
        return FittedRates(
            {name: _named(RATES, row) for name, row in zip(NAMES, constants, strict=True)},
            {OTHERS: dict.fromkeys(FACTORS, 1.0)}
            | {name: _named(FACTORS, row) for name, row in zip(self.chips, factors, strict=True)},
        )

    def predicted(self, fitted: FittedRates, moved: str | None = None) -> Floats:
        """By row; nan where a constant that was `moved` changes nothing."""
        found = np.full(len(self.rows), np.nan)
        for places in self.groups:
            rows = [self.rows[at] for at in places]
            if moved is None or _counts(moved, rows[0]):
                found[places] = predict(rows, fitted)
        return found

    def errors(self, x: Floats) -> Floats:
        """Logarithms of predicted / measured, by row."""
        return np.asarray(np.log(self.predicted(self.fitted(x)) / self.measured))

    def slopes(self, x: Floats, errors: Floats) -> Floats:
        """(rows, constants of a point) of the errors, by differences. A constant of all engines is moved at once: a row
        has the sum of what leads to its engine, and of the factor of its die."""
        n, n_rows = len(RATES), len(self.rows)
        found = np.zeros((n_rows, len(x)))
        for place, name in enumerate(RATES):
            moved = x.copy()
            moved[place] += STEP
            after = np.log(self.predicted(self.fitted(moved), name) / self.measured)
            slope = np.nan_to_num((after - errors) / STEP)
            found[:, place : n * len(NAMES) : n] = slope[:, None] * LINEAGE[self.engine]
            if name in FACTORS:
                columns = n * len(NAMES) + len(FACTORS) * self.chip + FACTORS.index(name)
                found[np.arange(n_rows), columns] = slope
        return found

    def loss(self, x: Floats, errors: Floats) -> float:
        """Sum of squares that a fit makes least: of softened errors, and of constants from what they are near to."""
        softened = self.weight * errors / np.sqrt(1 + np.abs(errors) / ROBUST)
        return float(softened @ softened + ((PRIOR * x / self.spreads) ** 2).sum())

    def step(self, x: Floats, errors: Floats, slopes: Floats, damping: float) -> Floats:
        """Of Levenberg and Marquardt's method."""
        large = np.abs(errors) / ROBUST
        softened = self.weight * errors / np.sqrt(1 + large)
        steep = (self.weight * (1 + large / 2) * (1 + large) ** -1.5)[:, None] * slopes
        prior = (PRIOR / self.spreads) ** 2
        normal = steep.T @ steep + np.diag(prior)
        return np.linalg.solve(normal + damping * np.diag(np.diag(normal)), -(steep.T @ softened + prior * x))

    def point(self, fitted: FittedRates) -> Floats:
        """The point of constants."""
        guesses = np.log([guess for guess, _ in GUESSES.values()])
        named = [np.log([fitted.engines[name][each] for each in RATES]) - guesses for name in NAMES]
        ones = fitted.accelerators[OTHERS]
        factors = [[fitted.accelerators.get(chip, ones)[each] for each in FACTORS] for chip in self.chips]
        return np.concatenate([np.linalg.solve(LINEAGE, np.array(named)).ravel(), np.log(factors).ravel()])

    def solve(self, x: Floats) -> Floats:
        """The point that suits the rows best, from one near to it."""
        errors, damping = self.errors(x), 1e-2
        for number in range(ROUNDS):
            slopes, loss = self.slopes(x, errors), self.loss(x, errors)
            for _ in range(6):
                tried = x + self.step(x, errors, slopes, damping)
                left = self.errors(tried)
                if self.loss(tried, left) < loss:
                    break
                damping *= 6
            else:
                break
            x, errors, damping = tried, left, damping / 5
            print(f"round {number + 1}: {self.loss(x, errors):.4f}", flush=True)
            if self.loss(x, errors) > (1 - ENOUGH) * loss:
                break
        return x

    def without(self, left_out: NDArray[np.bool_], x: Floats, errors: Floats, slopes: Floats) -> FittedRates:
        """The constants that the other rows give, by the slopes of the errors at the point of all rows."""
        rest = copy(self)
        rest.weight = np.where(left_out, 0.0, self.weight)
        at = x.copy()
        for _ in range(LINEAR_ROUNDS):
            at = at + rest.step(at, errors + slopes @ (at - x), slopes, 0.0)
        return self.fitted(at)


def _lineage() -> Floats:
    """(names, names): 1 where the column is the engine of the row, or one that it is like, directly or not."""
    found = np.eye(len(NAMES))
    for each in ENGINES:
        place, above = NAMES.index(each.name), each.like
        while above != OTHERS:
            found[place, NAMES.index(above)] = 1.0
            above = next(other.like for other in ENGINES if other.name == above)
        found[place, 0] = 1.0
    return found


LINEAGE = _lineage()


def _named(names: Sequence[str], logarithms: Floats) -> dict[str, float]:
    return dict(zip(names, map(float, np.exp(logarithms)), strict=True))


def _counts(name: str, row: ServingCase) -> bool:
    """Whether a constant changes anything for rows like this one."""
    if name in EXPERTS:
        return row.model.moe is not None
    if name in RANKS:
        return row.degrees.size > 1
    return name != "arrive_s" or row.regime == LOOP


def thinned(rows: Sequence[ServingCase], every: int = LOOPS) -> list[ServingCase]:
    """All rows, and of closed loops one of so many, with all that is measured of it."""
    loops = dict.fromkeys(loop_key(row) for row in rows if row.regime == LOOP)
    kept = set(list(loops)[::every])
    return [row for row in rows if row.regime != LOOP or loop_key(row) in kept]


def groups(rows: Sequence[ServingCase]) -> list[list[int]]:
    """Places of rows that can be evaluated as arrays."""
    found: dict[Any, list[int]] = defaultdict(list)
    for at, row in enumerate(rows):
        across = row.degrees.size if row.degrees.size > 1 else 1
        key = (row.model_name, row.cluster.accelerator.name, across, row.precision, row.kv_precision, row.regime)
        found[(*key, row.line.metric)].append(at)
    return list(found.values())


def priced_rows(table: Path) -> list[ServingCase]:
    """Return the rows of a table that can be priced."""
    return [row for row in read(table) if isinstance(row, ServingCase)]


def predict(rows: Sequence[ServingCase], fitted: FittedRates) -> Floats:
    """The closed forms for rows of one group."""
    first = rows[0]
    each = [fitted.rates(row.engine.name, row.cluster.accelerator.die) for row in rows]
    rates = Rates(**{name: np.array([getattr(one, name) for one in each]) for name in RATES})
    serving = Serving(
        model=first.model, cluster=first.cluster, rates=rates, precision=first.precision,
        kv_precision=first.kv_precision,
    )  # fmt: skip
    settings = Settings.from_layouts([row.degrees for row in rows])
    mean = np.array([(1 + row.shortest) / 2 for row in rows])
    read_in = np.array([row.input_len for row in rows]) * mean
    out = np.array([row.output_len for row in rows]) * mean
    requests = np.array([max(row.requests, 1) for row in rows], dtype=float)
    if first.regime == FULL:
        batches = np.array([full_batch(row, serving, Settings.from_layouts([row.degrees])) for row in rows])
        most = np.array([row.engine.max_tokens for row in rows])
        found = forms.full_load_tokens_per_s(serving, settings, batches, read_in, out, most)
        return found * (read_in + out) / out if first.line.metric == "total_tokens_per_s" else found
    if first.regime == LOOP:
        return np.array([simulate_loop(row, fitted) for row in rows])
    if first.line.metric == "ttft_s":
        return forms.prefill_s(serving, settings, requests, read_in)
    if first.line.metric == "tpot_s":
        return forms.decode_s(serving, settings, requests, forms.middle(read_in, out))
    seconds = forms.generation_s(serving, settings, requests, read_in, out)
    if first.line.metric == "e2e_latency_s":
        return seconds
    return requests * (out + read_in * (first.line.metric == "total_tokens_per_s")) / seconds


def written(best: FittedRates, left_out: Mapping[str, FittedRates]) -> str:
    """The text of the file."""
    lines = [f"# Written by `python benchmarks/fit_serving.py --left-out` on {date.today()}; see rates.py."]
    for prefix, fitted in {"": best, **{f'left_out."{name}".': each for name, each in left_out.items()}}.items():
        for kind, tables in (("engines", fitted.engines), ("accelerators", fitted.accelerators)):
            for name, values in tables.items():
                lines += ["", f'[{prefix}{kind}."{name}"]']
                lines += [f"{key} = {value:.4g}" for key, value in values.items()]
    return "\n".join(lines) + "\n"


def summary(rows: Sequence[ServingCase], predicted: Floats) -> None:
    """Print the mean absolute error and the bias by source, engine and metric."""
    errors: dict[tuple[str, ...], list[float]] = defaultdict(list)
    for row, found in zip(rows, predicted, strict=True):
        errors[(row.line.source_id, row.regime, row.line.metric)].append(float(found) / row.measured - 1)
    for key, values in errors.items():
        print(f"{np.mean(np.abs(values)):7.1%} {np.mean(values):+7.1%} {len(values):5d}  {', '.join(key)}")


def without_each(problem: Problem, x: Floats, of_row: Callable[[ServingCase], str]) -> dict[str, FittedRates]:
    """For each value of `of_row` the constants that the other rows give."""
    errors = problem.errors(x)
    slopes = problem.slopes(x, errors)
    names = np.array([of_row(row) for row in problem.rows])
    return {name: problem.without(names == name, x, errors, slopes) for name in dict.fromkeys(names.tolist())}


HOLD_OUT: dict[str, Callable[[ServingCase], str]] = {
    "source": lambda row: row.line.source_id,
    "table": lambda row: f"{row.line.source_id}, {row.model_name}",
    "model": lambda row: row.model_name,
    "accelerator": lambda row: row.cluster.accelerator.die,
}


def main() -> None:
    """Fit, write, and print the errors."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", type=Path, nargs="?", default=MEASUREMENTS, help="by default the packaged one")
    parser.add_argument("--left-out", action="store_true", help="fit without each source, too")
    parser.add_argument("--hold-out", choices=HOLD_OUT, help="only print the errors of what was left out")
    parser.add_argument("--out", type=Path, default=PACKAGED, help="by default the packaged file")
    options = parser.parse_args()
    rows = priced_rows(options.table)
    problem = Problem(thinned(rows))
    x = problem.solve(problem.point(packaged()[0]))
    best = problem.fitted(x)
    summary(problem.rows, problem.predicted(best))
    if options.hold_out:
        of_row = HOLD_OUT[options.hold_out]
        others = without_each(problem, x, of_row)
        summary(rows, np.array([evaluate.predict(row, others[of_row(row)]) for row in rows]))
        return
    left_out = without_each(problem, x, HOLD_OUT["source"]) if options.left_out else {}
    options.out.write_text(written(best, left_out), encoding="utf-8")


if __name__ == "__main__":
    main()
