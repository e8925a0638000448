"""Fit `rl.step.RATES` to the published steps of NeMo-RL 0.4, and print the errors of all other rows.

    python benchmarks/fit_rl.py

Every part of a step is linear in one constant, so the parts are computed once. The constants minimise a robust sum of
squared logarithms of predicted / measured, and stay near PRIOR, because ten rows determine six constants poorly.
"""

from statistics import fmean

import numpy as np
from scipy.optimize import minimize

from shardwright.rl.measured import FITTED, PublishedStep, evaluate
from shardwright.rl.step import (
    ANSWERS,
    GENERATION,
    MOVING,
    OTHER,
    SCORING,
    TRAINING,
    WEIGHTS,
    RLRates,
)

PRIOR = np.log([1.2, 1.2, 0.75, 1 / 10, 5.0, 0.005])
WIDTHS = np.array([0.2, 0.2, 0.4, 0.7, 0.7, 0.7])
ERROR = 0.15
UNIT = RLRates(1.0, 1.0, 1.0, 1e9, 1.0, 1.0)


def seconds(log_rates: np.ndarray, parts: dict[str, float], off_policy: bool) -> float:
    """Return the seconds of a step whose parts have unit constants."""
    generation, training, link_share, per_gb, step_s, answer_s = np.exp(log_rates)
    first = generation * parts[GENERATION] + answer_s * parts[ANSWERS]
    second = training * (parts[SCORING] + parts[TRAINING]) + per_gb * parts[MOVING]
    work = max(first, second) if off_policy else first + second
    return float(work + parts[WEIGHTS] / link_share + step_s * parts[OTHER])


def main() -> None:
    """Fit, and print."""
    rows: list[tuple[PublishedStep, dict[str, float]]] = [
        (each.row, each.step.parts_s) for each in evaluate(rates=UNIT).rows
    ]

    def log_error(log_rates: np.ndarray, row: PublishedStep, parts: dict[str, float]) -> float:
        return float(np.log(seconds(log_rates, parts, row.off_policy_steps > 0) / row.step_time_s))

    def loss(log_rates: np.ndarray) -> float:
        errors = np.array([log_error(log_rates, *each) for each in rows if each[0].version == FITTED])
        near = (((log_rates - PRIOR) / WIDTHS) ** 2).sum()
        return float(2 * (np.sqrt(1 + (errors / ERROR) ** 2) - 1).sum() + near)

    options = {"maxiter": 20000, "maxfev": 20000, "xatol": 1e-5, "fatol": 1e-6}
    found = minimize(loss, PRIOR, method="Nelder-Mead", options=options).x
    generation, training, link_share, per_gb, step_s, answer_s = np.exp(found)
    rates = RLRates(generation, training, link_share, 1e9 / per_gb, step_s, answer_s)
    print({name: float(f"{value:.3g}") for name, value in vars(rates).items()})
    for name, fitted in ((f"version {FITTED}", True), ("others", False)):
        errors = [abs(np.exp(log_error(found, *each)) - 1) for each in rows if (each[0].version == FITTED) is fitted]
        print(f"{name}: mean absolute error {fmean(errors):.1%} of {len(errors)} rows")


if __name__ == "__main__":
    main()
