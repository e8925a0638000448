"""Fit what no data sheet says to measured runs, and write it to src/shardwright/cost/calibration.toml.

    python benchmarks/calibrate.py [RUNS.csv] [--steps 4] [--again] [--rows 30] [--families A,B,C] [--hold "NAME;NAME"]
    python benchmarks/calibrate.py [RUNS.csv] --intervals

--again: start from the constants there are; --rows: of a source, at most, evenly over the table. --families: fit to
those alone, as after a change that does not touch the others, with the constants --hold as they are in the file, for
the families that are left out too. --intervals: only the widths of intervals and the error of
differences, with the constants as they are.

One number for each die and format, and for each kind of software, for all families of runs together: Gauss-Newton on
the logarithm of predicted / measured, robust against rows that nothing explains. A family counts as much as its rows,
up to 20, and a constant stays near its first guess unless rows speak against it. Then every family is left out once;
these fits start from the common one, with its derivatives. No constant may depend on the rows of one family alone: such
a constant is printed as an error.
"""

import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import date
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog

from shardwright.cost.calibration import CALIBRATED, LEFT_OUT, OTHERS, PACKAGED, Calibration
from shardwright.cost.speed import Speed
from shardwright.planner.error_summary import COVERED
from shardwright.planner.evaluate import MEASURED_RUNS, step_seconds, timed_run
from shardwright.planner.headline import TERMS, features
from shardwright.planner.measured_run import PredictableRun
from shardwright.planner.recommendation import moved_share
from shardwright.planner.runs import read_runs

Floats = NDArray[np.float64]
OPTIONS = "--steps", "--rows", "--families", "--hold"
MOST_ROWS = 20
"""Rows of a family that count; a longer one has each row count for less."""
FITTED_ROWS = 200
"""Rows of a source that the derivatives are taken from, evenly over the table."""
ROBUST = 0.03
"""Error (of the logarithm) from which on a row pulls less than in proportion."""
PRIOR = 0.05
"""What a constant that is one spread away from its guess counts, in the logarithm of one row."""
LEFT_OUT_STEPS = 3
LEAST_WIDTH = 0.05
"""Of an interval, as a logarithm: the mean error of the families that are predicted best. The regression gives less to
steps that are matmuls alone."""
EVEN, FEW = (0.75, 0.9), 10
"""Share of a family's rows that should be inside its intervals, for families of more rows than `FEW`."""
BALANCING, BALANCING_ROUNDS = 0.5, 60
"""Growth of the logarithm of a family's weight for its share that is missing inside, and the number of fits."""
STEP = 1e-3
"""Change of a constant's logarithm for its derivative."""
PAGE = Path(__file__).parents[1] / "docs/cost-model.md"
BEGIN, END = "<!-- constants -->", "<!-- end of constants -->"
MATTERS = 0.02
"""Derivative from which on a constant matters to a row: percent of time for each percent of it."""


@dataclass(frozen=True)
class Constant:
    """`places`: tables and keys in the file that have this value. `guess` with a spread as a factor; or the value, if
    it is not fitted but of a `source`."""

    guess: float
    low: float
    high: float
    places: tuple[tuple[str, ...], ...]
    spread: float = 1.3
    source: str = ""


def _one(*place: str, guess: float, low: float, high: float, spread: float = 1.3) -> Constant:
    return Constant(guess, low, high, (place,), spread)


def _published(*place: str, value: float, source: str) -> Constant:
    return Constant(value, value, value, (place,), source=source)


EAGER = ("fsdp", "nanotron")
"""Stacks of eager PyTorch kernels."""
CONSTANTS: dict[str, Constant] = {
    "matmuls, A100": _one("product_share", "a100-80gb", "bf16", guess=0.93, low=0.5, high=1.0, spread=1.2),
    "matmuls, H100": _one("product_share", "h100", "bf16", guess=0.85, low=0.5, high=1.0, spread=1.2),
    "matmuls, H100, fp8": _one("product_share", "h100", "fp8", guess=0.85, low=0.5, high=1.0, spread=1.2),
    "matmuls, B200": _one("product_share", "b200", "bf16", guess=0.8, low=0.5, high=1.0, spread=1.2),
    "matmuls, B200, fp8": _one("product_share", "b200", "fp8", guess=0.8, low=0.5, high=1.0, spread=1.2),
    "attention, A100": _published("flash_share", "a100-80gb", value=0.49, source="arXiv 2307.08691, figure 4"),
    "attention, H100": _one("flash_share", "h100", guess=0.42, low=0.2, high=1.0),
    "attention, B200": _one("flash_share", "b200", guess=0.42, low=0.2, high=1.0),
    "ramp of a matmul": _one("ramp_k", guess=110.0, low=60.0, high=250.0),
    "partial waves": _one("partial_wave", guess=0.4, low=0.1, high=1.0),
    "width of a head": _one("flash_width", guess=16.0, low=8.0, high=64.0),
    "length of attention": _one("flash_length", guess=500.0, low=100.0, high=2000.0),
    "bandwidth of kernels": _one("memory_share", guess=0.9, low=0.6, high=1.0, spread=1.1),
    "score forward": _one("score_bytes", guess=18.0, low=13.0, high=26.0),
    "score backward": _one("score_bytes_backward", guess=18.0, low=13.0, high=26.0),
    "stragglers": _one("straggler_share", guess=0.007, low=0.001, high=0.02, spread=1.5),
    "launches with experts": _one("expert_launches", guess=2.0, low=1.0, high=8.0, spread=1.5),
    "eager kernels": Constant(0.6, 0.4, 1.0, tuple(("stacks", name, "kernel_share") for name in EAGER)),
    "interference": Constant(
        0.3,
        0.05,
        0.6,
        tuple(("stacks", name, "interference") for name in (*EAGER, "fsdp-compiled")),
    ),
    "interference, Megatron-Core": _one("stacks", "megatron-core", "interference", guess=0.2, low=0.02, high=0.6),
    "tuned matmuls": _one("stacks", "megatron-core", "matmul_gain", guess=1.05, low=0.9, high=1.3, spread=1.1),
    "tuned attention": _one("stacks", "megatron-core", "flash_gain", guess=1.9, low=1.2, high=2.6, spread=1.2),
    "launch": _one("host", "launch_s", guess=0.75e-3, low=0.2e-3, high=2e-3),
    "launch backward": _one("host", "launch_backward", guess=2.2, low=1.2, high=3.0),
    "step": _one("host", "step_s", guess=8e-3, low=1e-3, high=50e-3),
    "message": _one("stacks", "megatron", "message_s", guess=0.16e-3, low=0.05e-3, high=0.4e-3),
}
GUESSES, LOW, HIGH, SPREADS = (
    np.log([getattr(each, name) for each in CONSTANTS.values()]) for name in ("guess", "low", "high", "spread")
)


def calibration(logarithms: Floats) -> Calibration:
    """The constants as the model takes them; dies that nothing was fitted to get the mean of the others."""
    document: dict[str, Any] = {}
    for constant, value in zip(CONSTANTS.values(), np.exp(logarithms), strict=True):
        for place in constant.places:
            table = document
            for key in place[:-1]:
                table = table.setdefault(key, {})
            table[place[-1]] = float(value)
    shares = document["product_share"].values()
    document["product_share"]["others"] = {
        name: float(np.mean([each[name] for each in shares if name in each])) for name in ("bf16", "fp8")
    }
    document["flash_share"]["others"] = float(np.mean(list(document["flash_share"].values())))
    return Calibration(**document, interval={})


def packaged(there: Calibration = CALIBRATED) -> Floats:
    """The logarithms of the constants in calibration.toml, of the first place of each, inside the bounds."""
    document = asdict(there)
    found = []
    for constant in CONSTANTS.values():
        value: Any = document
        for key in constant.places[0]:
            value = value.get(key, {}) if isinstance(value, dict) else value
        found.append(np.log(value or constant.guess))
    return np.clip(found, LOW, HIGH)


class Fit:
    """The runs that are fitted to, with the errors and derivatives at some constants."""

    def __init__(self, runs: Sequence[PredictableRun], held: Sequence[str] = ()) -> None:
        self.runs = runs
        self.fitted = np.array([name not in held and not each.source for name, each in CONSTANTS.items()])
        self.families = np.array([run.measured.family for run in runs])
        self.measured = np.log([run.measured.step_time_s for run in runs])
        counts = Counter(self.families)
        self.weights = np.array([min(counts[each], MOST_ROWS) / counts[each] for each in self.families])

    def errors(self, at: Floats) -> Floats:
        """ln(predicted / measured) of each run."""
        found = calibration(at)
        return np.log([step_seconds(run, found) for run in self.runs]) - self.measured

    def derivatives(self, at: Floats, errors: Floats) -> Floats:
        """(runs, constants): of the logarithm of each time by that of each constant, inside the bounds."""
        columns = []
        for column in range(len(at)):
            if not self.fitted[column]:
                columns.append(np.zeros(len(errors)))
                continue
            step = -STEP if at[column] + STEP > HIGH[column] else STEP
            moved = at.copy()
            moved[column] += step
            columns.append((self.errors(moved) - errors) / step)
        return np.stack(columns, axis=1)

    def improved(self, at: Floats, errors: Floats, derivatives: Floats, kept: NDArray[np.bool_]) -> Floats:
        """The constants after one step of Gauss-Newton with the runs `kept`; those pulled out of a bound stay at it."""
        weights = kept * self.weights / (1 + np.abs(errors) / ROBUST)
        free = self.fitted.copy()
        for _ in range(len(at)):
            matrix = derivatives[:, free]
            prior = np.diag((PRIOR / SPREADS[free]) ** 2)
            slope = matrix.T @ (weights * errors) + (PRIOR / SPREADS[free]) ** 2 * (at - GUESSES)[free]
            change = np.zeros(len(at))
            change[free] = -np.linalg.solve((matrix.T * weights) @ matrix + prior, slope)
            outside = (at + change < LOW - 1e-9) | (at + change > HIGH + 1e-9)
            at_bound = free & outside & ((at <= LOW + 1e-9) | (at >= HIGH - 1e-9))
            if not at_bound.any():
                break
            free &= ~at_bound
        return np.clip(at + change, LOW, HIGH)


class LeftOut:
    """The errors of all runs by the constants of the fits without their families, and what intervals depend on."""

    def __init__(self, runs: Sequence[PredictableRun], left_out: dict[str, Calibration]) -> None:
        self.runs = runs
        self.families = np.array([run.measured.family for run in runs])
        self.measured = np.log([run.measured.step_time_s for run in runs])
        left_out = {family: replace(each, software=software(runs, family)) for family, each in left_out.items()}
        by = [left_out[run.measured.family] for run in runs]
        timed = [timed_run(run, each) for run, each in zip(runs, by, strict=True)]
        self.features = np.concatenate([features(job, time) for job, time in timed])
        self.times = [time for _, time in timed]
        self.errors = np.log([float(time.total_s[0]) for time in self.times]) - self.measured
        dies = [run.job.cluster.accelerator.die for run in runs]
        self.other_die = self._errors(map(without_die, by, dies))
        kinds = [run.job.stack.speed.kind for run in runs]
        self.other_software = self._errors(map(without_software, by, kinds))

    def _errors(self, by: Iterable[Calibration]) -> Floats:
        return np.log([step_seconds(*each) for each in zip(self.runs, by, strict=True)]) - self.measured

    def coefficients(self, but: str = "") -> dict[str, float]:
        """The widths of intervals over all families but one, with LEAST_WIDTH; `unmeasured`, `software`: by what the
        error exceeds the rest of the width without the constants of the own die, or of the own software."""
        kept = self.families != but
        families = self.families[kept]
        x = self.features[kept] * [term not in ("unmeasured", "software") for term in TERMS]
        known = balanced_regression(x, np.abs(self.errors[kept]), families)
        unseen = {"unmeasured": self.other_die[kept], "software": self.other_software[kept]}
        one, weights = np.ones((len(x), 1)), equal_weights(families)
        beyond = {
            term: quantile_regression(one, np.abs(errors) - x @ known, weights, COVERED, [0.0])[0]
            for term, errors in unseen.items()
        }
        return {term: float(value) for term, value in (dict(zip(TERMS, known, strict=True)) | beyond).items()}

    def difference(self) -> dict[str, float]:
        """The error of a difference (`planner.recommendation`), over pairs of runs of one source, model, software and
        cluster."""
        pairs = list(self._pairs())
        x = np.array([[1, moved_share(*(self._parts_s(each) for each in pair))] for pair in pairs])
        y = np.array([abs(self.errors[one] - self.errors[other]) for one, other in pairs])
        weights = equal_weights(self.families[[one for one, _ in pairs]])
        base, moved = quantile_regression(x, y, weights, 0.5, [0.0, 0.0])
        print(f"{len(pairs)} pairs of {len(set(self.families[[one for one, _ in pairs]]))} families", flush=True)
        for low, high in ((0, 1), (1, 2), (2, 100)):
            gaps = [self._gaps(*pair) / (base + moved * own) for pair, own in zip(pairs, x[:, 1], strict=True)]
            those = [one < 0 for one, other in gaps if low <= other < high]
            print(f"predicted to differ by {low} to {high} d: {np.mean(those):.0%} of {len(those)} in the wrong order")
        return {"base": float(base), "moved": float(moved)}

    def _pairs(self) -> Iterator[tuple[int, int]]:
        groups: dict[Any, list[int]] = {}
        for number, run in enumerate(self.runs):
            row, job = run.measured, run.job
            same = row.source, row.stack, row.te, row.flash, row.date, job.model, job.precision, job.seq_len
            groups.setdefault((*same, job.cluster), []).append(number)
        for numbers in groups.values():
            for one, other in combinations(numbers, 2):
                if str(self.runs[one].candidates) != str(self.runs[other].candidates):
                    yield one, other

    def _parts_s(self, number: int) -> dict[str, float]:
        """Seconds of each kind of work for a token."""
        tokens = self.runs[number].job.tokens
        return {kind: float(part[0]) / tokens for kind, part in self.times[number].parts.items()}

    def _gaps(self, one: int, other: int) -> Floats:
        """The measured difference, above 0 where the slower one was predicted to be, and the predicted one."""
        at, tokens = [one, other], np.log([self.runs[each].job.tokens for each in (one, other)])
        measured = np.diff(self.measured[at] - tokens)[0]
        predicted = measured + np.diff(self.errors[at])[0]
        return np.array([measured, predicted]) * np.sign(predicted)


def without_die(there: Calibration, die: str) -> Calibration:
    """The constants as if no run were on a die: it gets the mean of the other dies."""
    products = {name: each for name, each in there.product_share.items() if name not in (die, OTHERS)}
    flash = {name: each for name, each in there.flash_share.items() if name not in (die, OTHERS)}
    mean = {
        form: float(np.mean([each[form] for each in products.values() if form in each])) for form in ("bf16", "fp8")
    }
    return replace(
        there,
        product_share={**products, OTHERS: mean},
        flash_share={**flash, OTHERS: float(np.mean(list(flash.values())))},
    )


def without_software(there: Calibration, kind: str) -> Calibration:
    """The constants as if no run were of a kind of software: it gets the defaults of `Speed`."""
    own = {name: getattr(Speed(), name) for name in there.stacks.get(kind, {})}
    return replace(there, stacks={**there.stacks, kind: own})


def software(runs: Iterable[PredictableRun], but: str = "") -> list[str]:
    """The kinds of software of the runs of all families but one."""
    return sorted({run.job.stack.speed.kind for run in runs if run.measured.family != but})


def balanced_regression(x: Floats, errors: Floats, families: NDArray[np.str_]) -> Floats:
    """Coefficients of the width with which each family has about the same share of its rows inside. Each family counts
    the same at first, and then more if fewer of its rows are inside than of others. The round counts that has the least
    shortage and excess over `EVEN` in families of more than `FEW` rows."""
    lows = [LEAST_WIDTH if term == "base" else 0.0 for term in TERMS]
    weights, best = equal_weights(families), (np.inf, np.zeros(len(TERMS)))
    for _ in range(BALANCING_ROUNDS):
        found = quantile_regression(x, errors, weights, COVERED, lows)
        inside = errors <= x @ found + 1e-9
        shares = {family: inside[families == family].mean() for family in set(families)}
        least, most = EVEN
        uneven = sum(
            max(least - share, share - most, 0.0)
            for family, share in shares.items()
            if np.count_nonzero(families == family) > FEW
        )
        best = min(best, (uneven, found), key=lambda pair: pair[0])
        weights = weights * np.exp([BALANCING * (COVERED - shares[family]) for family in families])
    return best[1]


def equal_weights(families: NDArray[np.str_]) -> Floats:
    """A weight for each row, with which each family counts the same."""
    counts = Counter(families)
    return np.array([1 / counts[each] for each in families])


def quantile_regression(x: Floats, y: Floats, weights: Floats, share: float, lows: Sequence[float]) -> Floats:
    """Coefficients c, each at least its `low`, with which `share` of the weights has y <= x c (Koenker and Bassett,
    1978): y = x c + above - below, and the sum of share above + (1 - share) below is least."""
    n, terms = x.shape
    costs = np.concatenate([np.zeros(terms), share * weights, (1 - share) * weights])
    bounds = [(low, None) for low in lows] + [(0, None)] * 2 * n
    found = linprog(costs, A_eq=np.hstack([x, np.eye(n), -np.eye(n)]), b_eq=y, bounds=bounds)
    return np.asarray(found.x[:terms])


def written(best: Calibration, left_out: dict[str, Calibration], errors: LeftOut) -> str:
    """The file's text, with the software, the widths of intervals and the error of differences of these runs."""
    lines = [f"# Written by `python benchmarks/calibrate.py` on {date.today()}; see calibration.py.", ""]
    for family, fitted in {"": replace(best, difference=errors.difference()), **left_out}.items():
        seen = replace(fitted, interval=errors.coefficients(but=family), software=software(errors.runs, but=family))
        lines += _tables(f'left_out."{family}"' if family else "", asdict(seen))
    return "\n".join(lines) + "\n"


def _tables(prefix: str, table: dict[str, Any]) -> list[str]:
    numbers = {key: value for key, value in table.items() if not isinstance(value, dict)}
    lines = [f"[{prefix}]"] if prefix and numbers else []
    for key, value in numbers.items():
        lines.append(f"{key} = {value:.4g}" if isinstance(value, float) else f"{key} = {json.dumps(value)}")
    lines += [""] if numbers else []
    for key, value in table.items():
        if isinstance(value, dict):
            lines += _tables(f"{prefix}.{key}" if prefix else key, value)
    return lines


def described(values: Floats, touched: Sequence[Sequence[str]]) -> str:
    """A table of the constants for docs/cost-model.md; `touched`: the families that each rests on."""
    lines = ["| constant | value | allowed | runs it rests on |", "| --- | --- | --- | --- |"]
    for (name, each), value, families in zip(CONSTANTS.items(), values, touched, strict=True):
        allowed = "published" if each.source else f"{each.low:g} to {each.high:g}"
        lines.append(f"| {name} | {value:.3g} | {allowed} | {each.source or ', '.join(families) or 'none'} |")
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> None:
    """Fit, write, and print what changed."""
    if "--help" in arguments:
        print(__doc__)
        return
    given = {name: arguments[arguments.index(name) + 1] for name in OPTIONS if name in arguments}
    steps, rows = int(given.get("--steps", 4)), int(given.get("--rows", FITTED_ROWS))
    families, held = given.get("--families", ""), given.get("--hold", "").split(";")
    path = Path(arguments[0]) if arguments and not arguments[0].startswith("-") else MEASURED_RUNS
    runs = [
        each for each in read_runs(path) if isinstance(each, PredictableRun) and each.measured.step_time_s is not None
    ]
    if "--intervals" in arguments:
        PACKAGED.write_text(written(CALIBRATED, LEFT_OUT, LeftOut(runs, LEFT_OUT)), encoding="utf-8")
        return
    counts = Counter(run.measured.source for run in runs)
    places: Counter[str] = Counter()
    chosen = []
    for run in runs:
        source, n = run.measured.source, counts[run.measured.source]
        wanted = not families or run.measured.family in families.split(",")
        if wanted and (n <= rows or places[source] * rows // n != (places[source] - 1) * rows // n):
            chosen.append(run)
        places[source] += 1
    fit, at = Fit(chosen, held), packaged() if "--again" in arguments else GUESSES.copy()
    for step in range(steps):
        errors = fit.errors(at)
        derivatives = fit.derivatives(at, errors)
        at = fit.improved(at, errors, derivatives, np.ones(len(chosen), dtype=bool))
        print(f"step {step + 1}: mean absolute error {np.abs(errors).mean():.4f} of {len(chosen)} rows", flush=True)
    errors = fit.errors(at)
    touched = [sorted(set(fit.families[np.abs(column) > MATTERS])) for column in derivatives.T]
    for name, value, those in zip(CONSTANTS, np.exp(at), touched, strict=True):
        print(f"{name:<28} {value:<10.4g} {', '.join(those)}", flush=True)
        if len(those) == 1:
            print(f"{'':<28} error: serves {those[0]} alone")
    left_out = {}
    for family in dict.fromkeys(run.measured.family for run in runs):
        there, now = np.where(fit.fitted, at, packaged(LEFT_OUT.get(family, CALIBRATED))), errors
        left_out[str(family)] = there
        kept = fit.families != family
        if kept.all():
            continue
        for _ in range(LEFT_OUT_STEPS):
            there = fit.improved(there, now, derivatives, kept)
            now = fit.errors(there)
        left_out[str(family)] = there
        mine = np.abs(np.exp(now[~kept]) - 1).mean(), np.abs(np.exp(errors[~kept]) - 1).mean()
        print(f"{family}: {mine[1]:.1%}, left out {mine[0]:.1%}", flush=True)
    without = {family: calibration(values) for family, values in left_out.items()}
    PACKAGED.write_text(written(calibration(at), without, LeftOut(runs, without)), encoding="utf-8")
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    PAGE.write_text(f"{before}{BEGIN}\n{described(np.exp(at), touched)}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
