"""The best learning rate of narrow and wide models, with muP and without, on the corpus of `make quickstart`.

    python benchmarks/mup.py quickstart/quickstart.toml --out runs/mup --steps 100

Models of each of `--widths`, whose heads and networks grow in proportion, are trained at each of `--rates` on the same
random windows of the run file's data, once with `[mup] base_width` of the narrowest and once without muP. One process,
fp32, the optimizer, schedule and batch of the run file. Writes losses (a line of losses.jsonl each), a table and a
picture to `--out`; a loss that is there already is not computed again. `--set` changes keys of the run file.
"""

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from shardwright.config import RunConfig, load
from shardwright.data.shards import TokenSplit, open_split
from shardwright.model.init import initialise
from shardwright.model.mup import MupSpec
from shardwright.model.spec import ModelSpec
from shardwright.model.transformer import Transformer
from shardwright.training.optimizer import build_optimizer, learning_rate, set_learning_rate
from shardwright.verification.coordinates import at_width

RATES = (1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2)
WAYS = {True: "muP", False: "without muP"}
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#e69f00")
VALIDATION = 64
"""Windows of the validation split over which the loss is averaged."""

Losses = dict[int, dict[float, float]]
"""Width -> learning rate -> validation loss after the last step."""


def windows(split: TokenSplit, n_tokens: int, config: RunConfig, count: int, seed: int) -> Tensor:
    """Return random windows of a split, (count, seq_len + 1)."""
    length = config.batch.seq_len + 1
    starts = np.random.default_rng(seed).integers(0, n_tokens - length, count)
    return torch.from_numpy(np.stack([split.tokens(int(start), length) for start in starts]).astype(np.int64))


def loss_of(model: Transformer, tokens_BT: Tensor) -> Tensor:
    """Return the mean loss of the next token."""
    return F.cross_entropy(model(tokens_BT[:, :-1]).flatten(0, 1), tokens_BT[:, 1:].flatten())


def trained(config: RunConfig, spec: ModelSpec, rate: float, steps: int) -> float:
    """Train a model and return its validation loss; infinite if it diverged."""
    data = config.data.path
    assert data is not None
    train, validation = open_split(data, "train"), open_split(data, "validation")
    sizes = [int(split.document_lengths().sum()) for split in (train, validation)]
    model = Transformer(spec)
    initialise(model, spec, config.seed)
    section = config.optimizer.model_copy(update={"lr": rate})
    parameters = dict(model.named_parameters())
    optimizer = build_optimizer(parameters, spec, section)
    for step in range(steps):
        loss_of(
            model, windows(train, sizes[0], config, config.batch.global_batch, config.seed * steps + step)
        ).backward()
        if section.clip_norm:
            torch.nn.utils.clip_grad_norm_(parameters.values(), section.clip_norm)
        set_learning_rate(optimizer, learning_rate(step, steps, rate, config.lr_schedule))
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        loss = float(loss_of(model, windows(validation, sizes[1], config, VALIDATION, 0)))
    return loss if math.isfinite(loss) else math.inf


def best_rate(by_rate: dict[float, float]) -> float:
    """Return the rate at the vertex of the parabola of loss by log rate through the best rate and its neighbours; the
    best rate itself if it is the first or the last, or a neighbour diverged."""
    rates, losses = list(by_rate), list(by_rate.values())
    at = losses.index(min(losses))
    if not 0 < at < len(rates) - 1 or not all(map(math.isfinite, losses[at - 1 : at + 2])):
        return rates[at]
    a, b, _ = np.polyfit(np.log(rates[at - 1 : at + 2]), losses[at - 1 : at + 2], 2)
    return math.exp(-b / (2 * a))


def table(found: dict[bool, Losses], by_seed: Sequence[dict[bool, Losses]]) -> str:
    """Return the losses `found`, means over seeds, in Markdown, the best of each row in bold; then the best rate of the
    means and of each seed."""
    rates = [*next(iter(found[True].values()))]
    lines = [f"| | `d_model` | {' | '.join(f'{rate:g}' for rate in rates)} | best rate | of each seed |"]
    lines.append("| --- " * (len(rates) + 4) + "|")
    for with_mup, losses in found.items():
        for width, by_rate in losses.items():
            best = min(by_rate.values())
            cells = [f"**{loss:.3f}**" if loss == best else f"{loss:.3f}" for loss in by_rate.values()]
            each = [f"{best_rate(losses[with_mup][width]):.2g}" for losses in by_seed]
            row = [WAYS[with_mup], f"{width}", *cells, f"{best_rate(by_rate):.2g}", ", ".join(each)]
            lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines) + "\n"


def picture(found: dict[bool, Losses], path: Path) -> None:
    """Draw loss over learning rate, a panel for each parametrisation and a line for each width."""
    figure, panels = plt.subplots(1, 2, figsize=(9, 3.4), sharey=True)
    for axes, (with_mup, losses) in zip(panels, found.items(), strict=True):
        for colour, (width, by_rate) in zip(COLOURS, losses.items(), strict=False):
            axes.plot(list(by_rate), list(by_rate.values()), "o-", ms=3, color=colour, label=f"d_model {width}")
            best = min(by_rate, key=lambda rate: by_rate[rate])
            axes.plot([best], [by_rate[best]], "o", ms=9, mfc="none", color=colour)
        axes.set_xscale("log", base=2)
        axes.set_xticks([*by_rate], [f"{rate:g}" for rate in by_rate], fontsize=8)
        axes.set_title(WAYS[with_mup], fontsize=10)
        axes.set_xlabel("learning rate")
        axes.legend(frameon=False)
    panels[0].set_ylabel("validation loss")
    figure.savefig(path, bbox_inches="tight", metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_file", type=Path)
    parser.add_argument("--out", type=Path, default=Path("runs/mup"))
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 128, 256])
    parser.add_argument("--rates", type=float, nargs="+", default=list(RATES))
    parser.add_argument("--seeds", type=int, default=1, help="losses are means over N seeds")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--set", action="append", default=[], dest="changes", metavar="KEY=VALUE")
    given = parser.parse_args()
    torch.set_num_threads(1)
    given.out.mkdir(parents=True, exist_ok=True)
    kept = given.out / "losses.jsonl"
    there = {tuple(key): loss for key, loss in map(json.loads, kept.read_text().splitlines())} if kept.exists() else {}
    config = load(given.run_file, [*given.changes, f"steps={given.steps}"])
    base = min(given.widths)
    by_seed: list[dict[bool, Losses]] = []
    for seed in range(given.seeds):
        by_seed.append({True: {}, False: {}})
        seeded = config.model_copy(update={"seed": seed})
        for width in given.widths:
            for with_mup, losses in by_seed[-1].items():
                spec = replace(at_width(config.model.spec(), width), mup=MupSpec(base_width=base) if with_mup else None)
                for rate in given.rates:
                    # The base model is the same with muP and without.
                    key = (with_mup or width == base, width, rate, seed)
                    if key not in there:
                        there[key] = trained(seeded, spec, rate, given.steps)
                        with kept.open("a") as file:
                            file.write(json.dumps([key, there[key]]) + "\n")
                        print(WAYS[with_mup], width, f"{rate:g}", seed, f"{there[key]:.4f}", flush=True)
                    losses.setdefault(width, {})[rate] = there[key]
    found = {
        with_mup: {
            width: {rate: fmean(each[with_mup][width][rate] for each in by_seed) for rate in given.rates}
            for width in given.widths
        }
        for with_mup in WAYS
    }
    (given.out / "losses.md").write_text(table(found, by_seed))
    picture(found, given.out / "losses.svg")


if __name__ == "__main__":
    main()
