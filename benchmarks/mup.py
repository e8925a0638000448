"""The best learning rate of narrow and wide models, with muP and without, on the corpus of `make quickstart`.

    python benchmarks/mup.py quickstart/quickstart.toml --out runs/mup

Models of each of `--widths`, whose heads and networks grow in proportion, are trained at each of `--rates` from the
same samples, once with `[mup] base_width` of the narrowest and once without muP. Writes a table and a picture to
`--out`; a run that is there already is not trained again. `--set` changes keys of the run file.
"""

import argparse
import json
import math
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

from shardwright.config import load
from shardwright.run_folder import METRICS
from shardwright.training.start import start
from shardwright.verification.coordinates import at_width

RATES = (5e-4, 1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2)
WAYS = {True: "muP", False: "without muP"}
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#e69f00")

Losses = dict[int, dict[float, float]]
"""Width -> learning rate -> validation loss after the last step; infinite for a run that diverged."""


def loss_of(out: Path) -> float | None:
    """Return the last validation loss of a run, or None if there is none."""
    if not (out / METRICS).exists():
        return None
    records = [json.loads(line) for line in (out / METRICS).read_text().splitlines()]
    losses = [record["loss"] for record in records if record["kind"] == "evaluation" and record["step"] > 0]
    return losses[-1] if losses and isinstance(losses[-1], float) and math.isfinite(losses[-1]) else None


def trained(run_file: Path, out: Path, changes: list[str]) -> float:
    """Return the loss of a run, which is trained if it is not there."""
    if not out.exists():
        start(load(run_file, [*changes, f"out={out}"]), quiet=True)
    loss = loss_of(out)
    return math.inf if loss is None else loss


def changes_of(run_file: Path, changes: list[str], width: int, base: int | None) -> list[str]:
    """Return the changes of the run file that make its model `width` wide, with muP from `base` if that is given."""
    spec = at_width(load(run_file, changes).model.spec(), width)
    sizes = [f"model.{name}={getattr(spec, name)}" for name in ("d_model", "n_heads", "n_kv_heads", "d_ffn")]
    return [*changes, *sizes, *([] if base is None else [f"mup.base_width={base}"])]


def table(found: dict[bool, Losses]) -> str:
    """Return the losses in Markdown, the best of each row in bold."""
    rates = [*next(iter(found[True].values()))]
    lines = [f"| | d_model | {' | '.join(f'{rate:g}' for rate in rates)} |", "| --- " * (len(rates) + 2) + "|"]
    for with_mup, losses in found.items():
        for width, by_rate in losses.items():
            best = min(by_rate.values())
            cells = [
                "diverged" if math.isinf(loss) else f"**{loss:.3f}**" if loss == best else f"{loss:.3f}"
                for loss in by_rate.values()
            ]
            lines.append(f"| {WAYS[with_mup]} | {width} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def picture(found: dict[bool, Losses], path: Path) -> None:
    """Draw loss over learning rate, a panel for each parametrisation and a line for each width."""
    figure, panels = plt.subplots(1, 2, figsize=(9, 3.4), sharey=True)
    for axes, (with_mup, losses) in zip(panels, found.items(), strict=True):
        for colour, (width, by_rate) in zip(COLOURS, losses.items(), strict=False):
            finite = {rate: loss for rate, loss in by_rate.items() if math.isfinite(loss)}
            axes.plot(list(finite), list(finite.values()), "o-", ms=3, color=colour, label=f"d_model {width}")
            best = min(finite, key=lambda rate: finite[rate])
            axes.plot([best], [finite[best]], "o", ms=9, mfc="none", color=colour)
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
    parser.add_argument("--set", action="append", default=[], dest="changes", metavar="KEY=VALUE")
    given = parser.parse_args()
    one_process = [*given.changes, "layout.dp_shard=1", "layout.zero=0"]
    found: dict[bool, Losses] = {True: {}, False: {}}
    for width in given.widths:
        for with_mup, losses in found.items():
            changes = changes_of(given.run_file, one_process, width, min(given.widths) if with_mup else None)
            by_rate: dict[float, Any] = losses.setdefault(width, {})
            for rate in given.rates:
                out = given.out / f"{'mup' if with_mup else 'plain'}-{width}-{rate:g}"
                if not with_mup and width == min(given.widths):
                    by_rate[rate] = found[True][width][rate]  # the base model is the same with muP and without
                else:
                    by_rate[rate] = trained(given.run_file, out, [*changes, f"optimizer.lr={rate}"])
                print(WAYS[with_mup], width, f"{rate:g}", f"{by_rate[rate]:.4f}", flush=True)
    (given.out / "losses.md").write_text(table(found))
    picture(found, given.out / "losses.svg")


if __name__ == "__main__":
    main()
