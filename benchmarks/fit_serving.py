"""Fit the constants of serving to published measurements, and write src/shardwright/serving/rates.toml.

    python benchmarks/fit_serving.py [TABLE.csv] [--left-out] [--out FILE.toml]

Least squares on the logarithm of predicted / measured, robust against rows that nothing explains. A constant of an
engine's generation stays near the mean of all engines, and a factor of an accelerator near 1, unless rows speak
against it; where there are no rows, that mean is what it gets ("others"). A source counts as much as its rows, up to
MOST_ROWS. Of closed loops, which are simulated, every ninth counts. With --left-out every source is left out once, too.
"""

import argparse
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwright.serving import forms
from shardwright.serving.engines import ENGINES
from shardwright.serving.evaluate import MEASUREMENTS, full_batch, loop_key, of_loop
from shardwright.serving.measured import FULL, LOOP, Case, cases, read
from shardwright.serving.rates import OTHERS, PACKAGED, RATES, Fitted, Rates
from shardwright.serving.setting import Serving, Settings

Floats = NDArray[np.float64]
GUESSES = {
    "matmul_share": (0.75, 0.25),
    "memory_share": (0.75, 0.2),
    "cache_share": (0.6, 0.3),
    "flash_share": (0.45, 0.3),
    "cached_share": (0.08, 1.0),
    "expert_share": (0.6, 0.4),
    "layer_s": (30e-6, 0.7),
    "pass_s": (1e-3, 1.0),
    "prefill_s": (3e-3, 1.0),
    "launch_s": (0.5e-3, 1.2),
    "expert_launch_s": (0.5e-3, 0.7),
    "arrive_s": (10e-3, 1.5),
    "request_s": (10e-6, 1.0),
    "reduce_s": (10e-6, 0.5),
    "exchange_s": (30e-6, 0.7),
    "link_share": (0.8, 0.3),
}
"""The mean of all engines that a fit starts from, and the spread of engines around it, of the logarithm."""
FACTORS = ("matmul_share", "memory_share", "flash_share", "reduce_s", "link_share")
"""Constants that an accelerator has a factor on; with their spread."""
FACTOR_SPREAD = 0.15
STEP = 0.05
"""Of a difference, in the logarithm: a simulation goes from pass to pass, so what changes little changes nothing."""
PRIOR = 0.15
"""What a constant one spread away from its mean counts, in the logarithm of one row."""
MOST_ROWS = 150
LOOPS = 9
ROUNDS, LEFT_OUT_ROUNDS = 25, 2
ROBUST = 0.15


class Problem:
    """The rows of a fit, grouped so that those of one model, machine and precision are evaluated at once."""

    def __init__(self, rows: Sequence[Case]) -> None:
        self.rows = list(rows)
        self.engines = [each.name for each in ENGINES if any(row.engine is each for row in self.rows)]
        self.chips = list(dict.fromkeys(row.cluster.accelerator.name for row in self.rows))
        self.groups = groups(self.rows)
        counts = Counter(row.line.source_id for row in self.rows)
        self.weight = np.sqrt([
            min(counts[row.line.source_id], MOST_ROWS) / counts[row.line.source_id] for row in self.rows
        ])  # fmt: skip
        self.measured = np.array([row.measured for row in self.rows])
        self.spreads = np.array([spread for _, spread in GUESSES.values()])

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Numbers of means, of engines' deviations, of accelerators' factors."""
        return len(RATES), len(RATES) * len(self.engines), len(FACTORS) * len(self.chips)

    def fitted(self, x: Floats) -> Fitted:
        """The constants of a point."""
        n_mean, n_engine, _ = self.sizes
        mean = np.log([guess for guess, _ in GUESSES.values()]) + x[:n_mean]
        each = x[n_mean : n_mean + n_engine].reshape(len(self.engines), -1)
        factors = x[n_mean + n_engine :].reshape(len(self.chips), -1)
        named = {OTHERS: mean} | {name: mean + each[at] for at, name in enumerate(self.engines)}
        return Fitted(
            {name: dict(zip(RATES, map(float, np.exp(values)), strict=True)) for name, values in named.items()},
            {OTHERS: dict.fromkeys(FACTORS, 1.0)}
            | {
                name: dict(zip(FACTORS, map(float, np.exp(factors[at])), strict=True))
                for at, name in enumerate(self.chips)
            },
        )

    def predicted(self, fitted: Fitted) -> Floats:
        """By row."""
        found = np.empty(len(self.rows))
        for places in self.groups:
            found[places] = predict([self.rows[at] for at in places], fitted)
        return found

    def residuals(self, x: Floats) -> Floats:
        """Of the rows, and of the constants from their means."""
        errors = np.log(self.predicted(self.fitted(x)) / self.measured)
        softened = errors / np.sqrt(1 + np.abs(errors) / ROBUST)
        n_mean, n_engine, _ = self.sizes
        each = x[n_mean : n_mean + n_engine].reshape(len(self.engines), -1) / self.spreads
        prior = np.concatenate([x[:n_mean] / self.spreads / 2, each.ravel(), x[n_mean + n_engine :] / FACTOR_SPREAD])
        return np.concatenate([self.weight * softened, PRIOR * prior])

    def jacobian(self, x: Floats) -> Floats:
        """By differences. A constant of all engines is changed at once, since each row has one engine, and so are the
        factors of all accelerators; a mean changes each engine's."""
        n_mean, n_engine, n_factor = self.sizes
        n_rows, step = len(self.rows), STEP
        at = self.residuals(x)
        found = np.zeros((len(at), len(x)))
        engine = np.array([self.engines.index(row.engine.name) for row in self.rows])
        chip = np.array([self.chips.index(row.cluster.accelerator.name) for row in self.rows])
        rows = np.arange(n_rows)
        for first, size, width, of_row in (
            (n_mean, n_engine, n_mean, engine),
            (sum(self.sizes[:2]), n_factor, len(FACTORS), chip),
        ):
            for constant in range(width):
                moved = x.copy()
                moved[first + constant : first + size : width] += step
                slope = ((self.residuals(moved) - at) / step)[:n_rows]
                found[rows, first + constant + width * of_row] = slope
                if first == n_mean:
                    found[rows, constant] = slope
        priors = np.concatenate([
            1 / self.spreads / 2, np.tile(1 / self.spreads, len(self.engines)), np.full(n_factor, 1 / FACTOR_SPREAD)
        ])  # fmt: skip
        found[n_rows + np.arange(len(x)), np.arange(len(x))] = PRIOR * priors
        return found

    def solve(self, start: Floats | None, rounds: int) -> Floats:
        """The point that suits the rows best, by Levenberg and Marquardt's method."""
        x = np.zeros(sum(self.sizes)) if start is None else start
        residuals, damping = self.residuals(x), 1e-2
        for _ in range(rounds):
            slopes = self.jacobian(x)
            normal, gradient = slopes.T @ slopes, slopes.T @ residuals
            for _ in range(6):
                step = np.linalg.solve(normal + damping * np.diag(np.diag(normal)), -gradient)
                tried = self.residuals(x + step)
                if tried @ tried < residuals @ residuals:
                    x, residuals, damping = x + step, tried, damping / 5
                    break
                damping *= 6
            else:
                break
        return x

    def taken_from(self, other: "Problem", x: Floats) -> Floats:
        """The point of a problem with more rows, as one of this: without engines and accelerators that are not here."""
        n_mean, n_engine, _ = other.sizes
        each = x[n_mean : n_mean + n_engine].reshape(len(other.engines), -1)
        factors = x[n_mean + n_engine :].reshape(len(other.chips), -1)
        engines = [other.engines.index(name) for name in self.engines]
        chips = [other.chips.index(name) for name in self.chips]
        return np.concatenate([x[:n_mean], each[engines].ravel(), factors[chips].ravel()])


def thinned(rows: Sequence[Case], every: int = LOOPS) -> list[Case]:
    """All rows, and of closed loops one of so many, with all that is measured of it."""
    loops = dict.fromkeys(loop_key(row) for row in rows if row.regime == LOOP)
    kept = set(list(loops)[::every])
    return [row for row in rows if row.regime != LOOP or loop_key(row) in kept]


def groups(rows: Sequence[Case]) -> list[list[int]]:
    """Places of rows that can be evaluated as arrays."""
    found: dict[Any, list[int]] = defaultdict(list)
    for at, row in enumerate(rows):
        across = row.degrees.size if row.degrees.size > 1 else 1
        key = (row.model_name, row.cluster.accelerator.name, across, row.precision, row.kv_precision, row.regime)
        found[(*key, row.line.metric)].append(at)
    return list(found.values())


def predict(rows: Sequence[Case], fitted: Fitted) -> Floats:
    """The closed forms for rows of one group."""
    first = rows[0]
    each = [fitted.rates(row.engine.name, row.cluster.accelerator.name) for row in rows]
    rates = Rates(**{name: np.array([getattr(one, name) for one in each]) for name in RATES})
    serving = Serving(
        model=first.model, cluster=first.cluster, rates=rates, precision=first.precision,
        kv_precision=first.kv_precision,
    )  # fmt: skip
    settings = Settings.of([row.degrees for row in rows])
    mean = np.array([(1 + row.shortest) / 2 for row in rows])
    read_in = np.array([row.input_len for row in rows]) * mean
    out = np.array([row.output_len for row in rows]) * mean
    requests = np.array([max(row.requests, 1) for row in rows], dtype=float)
    if first.regime == FULL:
        batches = np.array([full_batch(row, serving, Settings.of([row.degrees])) for row in rows])
        most = np.array([row.engine.max_tokens for row in rows])
        found = forms.full_load_tokens_per_s(serving, settings, batches, read_in, out, most)
        return found * (read_in + out) / out if first.line.metric == "total_tokens_per_s" else found
    if first.regime == LOOP:
        return np.array([of_loop(row, fitted) for row in rows])
    if first.line.metric == "ttft_s":
        return forms.prefill_s(serving, settings, requests, read_in)
    if first.line.metric == "tpot_s":
        return forms.decode_s(serving, settings, requests, forms.middle(read_in, out))
    seconds = forms.generation_s(serving, settings, requests, read_in, out)
    if first.line.metric == "e2e_latency_s":
        return seconds
    return requests * (out + read_in * (first.line.metric == "total_tokens_per_s")) / seconds


def written(best: Fitted, left_out: Mapping[str, Fitted]) -> str:
    """The text of the file."""
    lines = [f"# Written by `python benchmarks/fit_serving.py --left-out` on {date.today()}; see rates.py."]
    for prefix, fitted in {"": best, **{f'left_out."{name}".': each for name, each in left_out.items()}}.items():
        for kind, tables in (("engines", fitted.engines), ("accelerators", fitted.accelerators)):
            for name, values in tables.items():
                lines += ["", f'[{prefix}{kind}."{name}"]']
                lines += [f"{key} = {value:.4g}" for key, value in values.items()]
    return "\n".join(lines) + "\n"


def summary(problem: Problem, fitted: Fitted) -> None:
    """Print the mean absolute error by source and metric."""
    errors: dict[tuple[str, ...], list[float]] = defaultdict(list)
    for row, ratio in zip(problem.rows, problem.predicted(fitted) / problem.measured, strict=True):
        errors[(row.line.source_id, row.engine.name, row.line.metric)].append(float(ratio) - 1)
    for key, values in errors.items():
        print(f"{np.mean(np.abs(values)):7.1%} {np.mean(values):+7.1%} {len(values):5d}  {', '.join(key)}")


def without_each(rows: Sequence[Case], problem: Problem, x: Floats) -> dict[str, Fitted]:
    """For each source the constants that the others give, from those of all."""
    found = {}
    for source in dict.fromkeys(row.line.source_id for row in rows):
        rest = Problem([row for row in thinned(rows, 4 * LOOPS) if row.line.source_id != source])
        found[source] = rest.fitted(rest.solve(rest.taken_from(problem, x), LEFT_OUT_ROUNDS))
        print(f"without {source}", flush=True)
    return found


def main() -> None:
    """Fit, write, and print the errors."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", type=Path, nargs="?", default=MEASUREMENTS, help="by default the packaged one")
    parser.add_argument("--left-out", action="store_true", help="fit without each source, too")
    parser.add_argument("--out", type=Path, default=PACKAGED, help="by default the packaged file")
    options = parser.parse_args()
    rows = cases(read(options.table))
    problem = Problem(thinned(rows))
    x = problem.solve(None, ROUNDS)
    best = problem.fitted(x)
    summary(problem, best)
    left_out = without_each(rows, problem, x) if options.left_out else {}
    options.out.write_text(written(best, left_out), encoding="utf-8")


if __name__ == "__main__":
    main()
