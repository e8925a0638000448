"""Validation loss with each way in which gradients and weights travel, on the run of `make quickstart`.

    python benchmarks/compression.py quickstart/quickstart.toml --out runs/compression

All runs have the same initial weights and samples, on two ranks; only the keys of LAYOUTS differ. `--set` changes keys
of the run file, such as the size of the model. The runs of experts have another model, and an exact run of their own.
Writes two files to `--out`: a table with the losses along each run, and a picture of the differences from the losses of
the exact run. A run whose folder exists is not trained again.
"""

import argparse
import datetime
import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
import torch

from shardwright.config import load
from shardwright.runs.folder import METRICS
from shardwright.training.start import start

STAGES, EXPERTS = {"pp": 2, "dp_shard": 1, "zero": 0}, {"dp_shard": 2, "ep": 2, "zero": 3}
ZERO_3, REPLICAS = {"dp_shard": 2, "zero": 3}, {"dp_replicate": 2, "dp_shard": 1, "zero": 0}
LAYOUTS: dict[str, dict[str, Any]] = {
    "exact": ZERO_3,
    "gradients bf16": ZERO_3 | {"compress_gradients": "bf16"},
    "gradients int8": ZERO_3 | {"compress_gradients": "int8"},
    "gradients int4": ZERO_3 | {"compress_gradients": "int4"},
    "weights int8": ZERO_3 | {"compress_weights": "int8"},
    "weights and gradients int8": ZERO_3 | {"compress_weights": "int8", "compress_gradients": "int8"},
    "powersgd-4": REPLICAS | {"compress_gradients": "powersgd-4"},
    "powersgd-1": REPLICAS | {"compress_gradients": "powersgd-1"},
    "topk-16": REPLICAS | {"compress_gradients": "topk-16"},
    "topk-4": REPLICAS | {"compress_gradients": "topk-4"},
    "topk-1": REPLICAS | {"compress_gradients": "topk-1"},
    "pipeline int8": STAGES | {"compress_pipeline": "int8"},
    "pipeline fp8": STAGES | {"compress_pipeline": "fp8"},
    "experts, exact": EXPERTS,
    "experts, dispatch fp8": EXPERTS | {"compress_dispatch": "fp8"},
}
MIXTURE = "model.moe={n_experts=8, top_k=2, d_ffn=96, bias_rate=0.005}"
"""The change of the model in the runs of experts."""


def curve_of(out: Path) -> dict[int, float]:
    """Validation loss at each step at which it was evaluated."""
    records = [json.loads(line) for line in (out / METRICS).read_text().splitlines()]
    return {record["step"]: record["loss"] for record in records if record["kind"] == "evaluation"}


def trained(run_file: Path, out: Path, changes: list[str]) -> dict[int, float]:
    """The curve of a run, which is trained if it is not there."""
    config = load(run_file, [*changes, f"out={out}"])
    if not out.exists():
        start(config, quiet=True)
    curve = curve_of(out)
    if config.steps not in curve:
        raise SystemExit(f"{out} holds a run that has not ended; wait for it, or delete the folder")
    return curve


def picture(curves: dict[str, dict[int, float]], path: Path) -> None:
    """Differences from the losses of the exact run of the same model, after each evaluated step."""
    figure, axes = plt.subplots(figsize=(7, 4))
    for name, curve in curves.items():
        exact = curves["experts, exact" if name.startswith("experts") else "exact"]
        axes.plot(list(curve), [loss - exact[step] for step, loss in curve.items()], marker="o", label=name)
    axes.set_xlabel("step")
    axes.set_ylabel("validation loss above that of the exact run")
    axes.legend()
    figure.savefig(path, bbox_inches="tight", metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_file", type=Path)
    parser.add_argument("--out", type=Path, default=Path("runs/compression"))
    parser.add_argument("--only", nargs="*", default=list(LAYOUTS), choices=list(LAYOUTS))
    parser.add_argument("--set", action="append", default=[], dest="changes", metavar="KEY=VALUE")
    given = parser.parse_args()
    curves = {}
    for name in given.only:
        layout = [f"layout.{key}={value}" for key, value in LAYOUTS[name].items()]
        model = [MIXTURE] if name.startswith("experts") else []
        out = given.out / name.replace(",", "").replace(" ", "-")
        curves[name] = trained(given.run_file, out, [*given.changes, *model, *layout])
        print(name, " ".join(f"{step}: {loss:.4f}" for step, loss in curves[name].items()), flush=True)
    config = load(given.run_file, given.changes)
    steps = sorted(next(iter(curves.values())))
    lines = [
        f"# Loss with compressed communication, {datetime.date.today()}",
        "",
        f"{config.steps} steps of {config.batch.global_batch} x {config.batch.seq_len} tokens of the corpus of `make "
        f"quickstart`, a model of {config.spec().n_parameters / 1e6:.2f}M parameters, 2 ranks, fp32, torch "
        f"{torch.__version__}, seed {config.seed}.",
        f"Changed of the quickstart: {', '.join(given.changes) or 'nothing'}. Of experts also {MIXTURE}.",
        "",
        f"| validation loss after | {' | '.join(f'{step} steps' for step in steps)} |",
        "| --- |" + " --- |" * len(steps),
        *(f"| {name} | {' | '.join(f'{curve[step]:.4f}' for step in steps)} |" for name, curve in curves.items()),
    ]
    (given.out / "losses.md").write_text("\n".join(lines) + "\n")
    if "exact" in curves:
        picture(curves, given.out / "losses.svg")


if __name__ == "__main__":
    main()
