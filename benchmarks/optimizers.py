"""Validation loss of each optimizer at several learning rates, on the run of `make quickstart`.

    python benchmarks/optimizers.py quickstart/quickstart.toml --out runs/optimizers

Every optimizer is trained from the same initial weights on the same samples, at five rates a factor of 2 apart around
the one in RATES; `--rates 3` takes the middle three. Only the optimizer and its rate differ; every other option is at
its default. `--set` changes keys of the run file, such as the size of the model. Writes a table with each loss, and a
picture with the curves of the best rates, to `--out`; a run that is there already is not trained again.
"""

import argparse
import datetime
import json
import math
import os
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
import torch

from shardwright.config import RunConfig, load
from shardwright.runs.folder import METRICS, RUN_FILE
from shardwright.training.start import start

RATES = {"adamw": 3e-3, "adamw-8bit": 3e-3, "muon": 6e-3, "lion": 1e-3, "adafactor": 3e-2, "sgd": 0.05}
"""The middle of the rates of each optimizer."""
FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)

Curve = list[tuple[int, float]]


def curve_of(out: Path) -> Curve:
    """(step, validation loss) of a run."""
    records = [json.loads(line) for line in (out / METRICS).read_text().splitlines()]
    return [(record["step"], record["loss"]) for record in records if record["kind"] == "evaluation"]


def ended(out: Path) -> bool:
    """Whether a run is there and has taken its last step."""
    if not (out / METRICS).exists():
        return False
    curve = curve_of(out)
    return bool(curve) and curve[-1][0] == load(out / RUN_FILE).steps


def trained(run_file: Path, out: Path, changes: list[str]) -> Curve | None:
    """The curve of a run, which is trained if it is not there; None where it diverged, and its loss is no number."""
    config: RunConfig = load(run_file, [*changes, f"out={out}", "layout.dp_shard=1", "layout.zero=0"])
    if not out.exists():
        start(config, quiet=True)
    if not ended(out):
        raise SystemExit(f"{out} holds a run that has not ended; wait for it, or delete the folder")
    found = curve_of(out)
    return found if math.isfinite(found[-1][1]) else None


def table(found: dict[str, dict[float, Curve | None]], described: str) -> str:
    """The losses after the last step, in Markdown."""
    lines = [
        f"# Loss of each optimizer, {datetime.date.today()}",
        "",
        described,
        "",
        "| optimizer | best rate | validation loss at it | at the other rates |",
        "| --- | --- | --- | --- |",
    ]
    for name, curves in sorted(found.items(), key=lambda each: best(each[1])[1][-1][1]):
        rate, curve = best(curves)
        others = ", ".join(
            f"{other:g}: {'diverged' if each is None else f'{each[-1][1]:.4f}'}"
            for other, each in curves.items()
            if other != rate
        )
        edge = " (the end of the range)" if len(curves) > 1 and rate in (min(curves), max(curves)) else ""
        lines.append(f"| `{name}` | {rate:g}{edge} | {curve[-1][1]:.4f} | {others} |")
    return "\n".join(lines) + "\n"


def best(curves: dict[float, Curve | None]) -> tuple[float, Curve]:
    """The rate with the lowest loss after the last step, and its curve."""
    return min(((rate, curve) for rate, curve in curves.items() if curve), key=lambda each: each[1][-1][1])


def picture(found: dict[str, dict[float, Curve | None]], path: Path) -> None:
    """The curves of the best rates."""
    figure, axes = plt.subplots(figsize=(7, 4))
    for name, curves in found.items():
        rate, curve = best(curves)
        axes.plot(*zip(*curve, strict=True), marker="o", markersize=3, label=f"{name}, lr {rate:g}")
    axes.set_xlabel("step")
    axes.set_ylabel("validation loss")
    axes.legend()
    figure.savefig(path, bbox_inches="tight")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_file", type=Path)
    parser.add_argument("--out", type=Path, default=Path("runs/optimizers"))
    parser.add_argument("--optimizers", nargs="*", default=list(RATES), choices=list(RATES))
    parser.add_argument("--rates", type=int, default=5, choices=(1, 3, 5))
    parser.add_argument("--report", action="store_true", help="train nothing; table and picture of the runs that ended")
    parser.add_argument("--set", action="append", default=[], dest="changes", metavar="KEY=VALUE")
    given = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    skipped = (len(FACTORS) - given.rates) // 2
    found: dict[str, dict[float, Curve | None]] = {}
    for name in given.optimizers:
        for factor in FACTORS[skipped : len(FACTORS) - skipped]:
            rate = RATES[name] * factor
            out = given.out / f"{name}-{rate:g}"
            if given.report and not ended(out):
                continue
            changes: list[Any] = [*given.changes, f"optimizer.name={name}", f"optimizer.lr={rate}"]
            curve = trained(given.run_file, out, changes)
            found.setdefault(name, {})[rate] = curve
            print(name, f"{rate:g}", "diverged" if curve is None else f"{curve[-1][1]:.4f}", flush=True)
    config = load(given.run_file, given.changes)
    described = (
        f"{config.steps} steps of {config.batch.global_batch} x {config.batch.seq_len} tokens of the corpus of `make "
        f"quickstart`, a model of {config.spec().n_parameters / 1e6:.2f}M parameters, one process, fp32, torch "
        f"{torch.__version__}, seed {config.seed}."
        + (f" Changed of the quickstart: {', '.join(given.changes)}." if given.changes else "")
    )
    (given.out / "losses.md").write_text(table(found, described))
    picture(found, given.out / "losses.svg")


if __name__ == "__main__":
    main()
