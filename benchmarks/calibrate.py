"""Fit what no data sheet says to measured runs, and write it to src/shardwright/cost/calibration.toml.

    python benchmarks/calibrate.py [RUNS.csv] [--left-out]

One number for each accelerator and each software stack, for all sources together, by least squares on the logarithm of
predicted / measured, robust against rows that nothing explains. A source counts as much as its rows, up to 20, and a
constant stays near its first guess unless rows speak against it. With --left-out every source is left out once, too;
that takes some minutes a source.
"""

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from shardwright.cost.calibration import PACKAGED, Calibration
from shardwright.planner.evaluate import MEASURED_RUNS, step_seconds
from shardwright.planner.measured_run import Run
from shardwright.planner.runs import read_runs

MOST_ROWS = 20
"""Rows of a source that count; a longer table has each row count for less."""
ROBUST = 0.1
"""Error (of the logarithm) from which on a row pulls less than in proportion."""
PRIOR = 0.05
"""What a constant that is one spread away from its guess counts, in the logarithm of one row."""


@dataclass(frozen=True)
class Constant:
    """`places`: tables and keys in the file that have this value. `guess` with a spread as a factor."""

    guess: float
    low: float
    high: float
    places: tuple[tuple[str, ...], ...]
    spread: float = 1.3


def _one(*place: str, guess: float, low: float, high: float, spread: float = 1.3) -> Constant:
    return Constant(guess, low, high, (place,), spread)


def _places(table: str, *names: str) -> tuple[tuple[str, ...], ...]:
    """One number for accelerators of one die."""
    return tuple((table, name) for name in names)


CONSTANTS: dict[str, Constant] = {
    "products on A100": Constant(0.93, 0.5, 1.1, _places("product_share", "a100-80gb", "a100-40gb", "a800"), 1.2),
    "products on H100": Constant(0.8, 0.5, 1.1, _places("product_share", "h100", "h800"), 1.2),
    "products on H100 of 500 W": _one("product_share", "h100-96gb", guess=0.8, low=0.5, high=1.1, spread=1.2),
    "products on H200": _one("product_share", "h200", guess=0.8, low=0.5, high=1.1, spread=1.2),
    "products on B200": Constant(0.7, 0.4, 1.1, _places("product_share", "b200", "gb200"), 1.2),
    "attention on A100": Constant(0.48, 0.2, 1.0, _places("flash_share", "a100-80gb", "a100-40gb", "a800")),
    "attention on H100": Constant(0.35, 0.2, 1.0, _places("flash_share", "h100", "h800")),
    "attention on H100 of 500 W": _one("flash_share", "h100-96gb", guess=0.42, low=0.2, high=1.0),
    "attention on H200": _one("flash_share", "h200", guess=0.42, low=0.2, high=1.0),
    "attention on B200": Constant(0.41, 0.2, 1.0, _places("flash_share", "b200", "gb200")),
    "ramp of a product": _one("ramp_k", guess=110.0, low=60.0, high=250.0),
    "partial waves": _one("partial_wave", guess=0.4, low=0.1, high=1.0),
    "width of a head": _one("flash_width", guess=16.0, low=8.0, high=64.0),
    "bandwidth of kernels": _one("memory_share", guess=0.9, low=0.6, high=1.0, spread=1.1),
    "score forward": _one("score_bytes", guess=18.0, low=13.0, high=26.0),
    "score backward": _one("score_bytes_backward", guess=18.0, low=13.0, high=26.0),
    "stragglers": _one("straggler_share", guess=0.007, low=0.001, high=0.02, spread=1.5),
    "eager kernels": _one("stacks", "fsdp", "kernel_share", guess=0.6, low=0.4, high=1.0),
    "interference": Constant(
        0.3,
        0.05,
        0.6,
        tuple(("stacks", name, "interference") for name in ("fsdp", "fsdp-compiled")),
    ),
    "launch": _one("stacks", "megatron", "launch_s", guess=0.75e-3, low=0.2e-3, high=2e-3),
    "launch backward": _one("stacks", "megatron", "launch_backward", guess=2.2, low=1.2, high=3.0),
    "step": _one("stacks", "megatron", "step_s", guess=8e-3, low=1e-3, high=50e-3),
    "message": Constant(0.16e-3, 0.05e-3, 0.4e-3, (("stacks", "megatron", "message_s"),)),
}


def calibration(values: Sequence[float]) -> Calibration:
    """The constants as the model takes them; accelerators that nothing was fitted to get the mean of the others."""
    document: dict[str, Any] = {}
    for constant, value in zip(CONSTANTS.values(), values, strict=True):
        for place in constant.places:
            table = document
            for key in place[:-1]:
                table = table.setdefault(key, {})
            table[place[-1]] = float(value)
    for name in ("product_share", "flash_share"):
        table = document[name]
        table["others"] = float(np.mean(list(set(table.values()))))
    return Calibration(**document)


def fit(runs: Sequence[Run], start: Sequence[float], rounds: int) -> list[float]:
    """The constants that suit the runs best."""
    counts = Counter(run.measured.source for run in runs)
    weight = np.array(
        [np.sqrt(min(counts[run.measured.source], MOST_ROWS) / counts[run.measured.source]) for run in runs]
    )
    measured = np.array([run.measured.step_time_s for run in runs])
    constants = list(CONSTANTS.values())
    guesses = np.log([each.guess for each in constants])
    spreads = np.log([each.spread for each in constants])

    def residuals(ratios: NDArray[np.float64]) -> NDArray[np.float64]:
        # Logarithms of constant / guess, plus 1, so that steps in their parts per thousand are of use.
        found = calibration(np.exp(guesses + ratios - 1))
        errors = np.log([step_seconds(run, found) for run in runs] / measured)
        softened = errors / np.sqrt(1 + np.abs(errors) / ROBUST)
        return np.concatenate([weight * softened, PRIOR * (ratios - 1) / spreads])

    low, high = (np.log([getattr(each, end) for each in constants]) - guesses + 1 for end in ("low", "high"))
    inside = np.clip(np.log(start) - guesses + 1, low + 1e-3, high - 1e-3)
    found = least_squares(residuals, inside, bounds=(low, high), diff_step=1e-3, max_nfev=rounds)
    return [float(value) for value in np.exp(guesses + found.x - 1)]


def written(values: Sequence[float], left_out: Mapping[str, Sequence[float]]) -> str:
    """The file's text."""
    lines = [f"# Written by `python benchmarks/calibrate.py --left-out` on {date.today()}; see calibration.py.", ""]
    lines += _tables("", calibration(values))
    for source, those in left_out.items():
        lines += ["", *_tables(f'left_out."{source}"', calibration(those))]
    return "\n".join(lines) + "\n"


def _tables(prefix: str, found: Calibration) -> list[str]:
    document = asdict(found)
    stacks = document.pop("stacks")
    tables = {name: document.pop(name) for name in ("product_share", "flash_share")}
    tables |= {f"stacks.{name}": values for name, values in stacks.items()}
    lines = [f"[{prefix}]"] if prefix else []
    lines += [f"{name} = {value:.4g}" for name, value in document.items()]
    for name, values in tables.items():
        lines += ["", f"[{prefix}.{name}]" if prefix else f"[{name}]"]
        lines += [f"{key} = {value:.4g}" for key, value in values.items()]
    return lines


def main(arguments: Sequence[str]) -> None:
    """Fit, write, and print what changed."""
    paths = [Path(each) for each in arguments if not each.startswith("-")]
    runs = [
        run
        for run in read_runs(paths[0] if paths else MEASURED_RUNS)
        if isinstance(run, Run) and run.measured.step_time_s is not None
    ]
    best = fit(runs, [each.guess for each in CONSTANTS.values()], rounds=10)
    for name, value in zip(CONSTANTS, best, strict=True):
        print(f"{name:<28} {value:.4g}", flush=True)
    left_out: dict[str, list[float]] = {}
    PACKAGED.write_text(written(best, left_out), encoding="utf-8")
    if "--left-out" in arguments:
        for source in dict.fromkeys(run.measured.source for run in runs):
            left_out[source] = fit([run for run in runs if run.measured.source != source], best, rounds=4)
            print(f"without {source}", flush=True)
            PACKAGED.write_text(written(best, left_out), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
