"""Draw the picture of docs/experts.md from two runs, and print what it says as a table.

    python -m docs.draw_experts runs/moe runs/moe-unbalanced

To be run in the root of the repository. The first run is balanced, the second is not.
"""

import sys
from pathlib import Path
from statistics import mean, median

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from shardwright.report.run_record import RunRecord, read_run
from shardwright.runs.records import TrainRecord
from shardwright.view.style import COLOURS, SETTINGS

PICTURE = Path(__file__).parent / "experts-load.svg"
GOAL = 1.2
LAST = 20
"""Records that the numbers are taken over."""
RUNS = {"with the bias": "curve", "without any balance": "validation"}


def main() -> None:
    import matplotlib

    matplotlib.rcParams.update(SETTINGS)
    runs = dict(zip(RUNS, map(read_run, sys.argv[1:3]), strict=True))
    picture(runs).savefig(PICTURE, facecolor=COLOURS["paper"], metadata={"Date": None})
    print(f"written to {PICTURE}\n")
    print(
        f"| | load at step 1 | step 50 | last {LAST} steps: mean | worst layer and step | entropy | validation loss | "
        "sent in a step |"
    )
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    for name, run in runs.items():
        first, at_50 = (next(r for r in run.train if r.step == step).load_max_over_mean for step in (1, 50))
        last = run.train[-LAST:]
        load = mean(record.load_max_over_mean or 0 for record in last)
        worst = max(max(record.load_by_layer) for record in last)
        entropy = mean(record.load_entropy or 0 for record in last)
        sent = median(record.expert_sent_bytes or 0 for record in run.train) / 2**20
        print(
            f"| {name} | {first:.2f} | {at_50:.2f} | {load:.2f} | {worst:.2f} | {entropy:.4f} | "
            f"{run.validation[-1].loss:.3f} | {sent:.1f} MiB |"
        )


def picture(runs: dict[str, RunRecord]) -> Figure:
    """The load of each layer's busiest expert by step: a panel for each run, on one logarithmic axis."""
    figure = Figure(figsize=(8.6, 3.6), layout="constrained")
    panels = figure.subplots(1, len(runs), sharey=True)
    for ax, (name, run) in zip(panels, runs.items(), strict=True):
        _layers(ax, run.train, COLOURS[RUNS[name]])
        ax.set_title(name)
    panels[0].set_ylabel("load of the busiest expert / mean load")
    return figure


def _layers(ax: Axes, train: tuple[TrainRecord, ...], colour: str) -> None:
    steps = [record.step for record in train]
    layers = list(zip(*(record.load_by_layer for record in train), strict=True))
    for number, layer in enumerate(layers):
        ax.plot(steps, layer, color=colour, alpha=0.35, linewidth=0.9, label="each layer" if number == 0 else None)
    ax.plot(steps, [record.load_max_over_mean for record in train], color=colour, label="mean of the layers")
    ax.axhline(GOAL, color=COLOURS["limit"], linewidth=1, linestyle=(0, (5, 3)), label=f"{GOAL:g}")
    ax.set_yscale("log")
    ax.set_ylim(1, 4.2)
    ax.set_yticks([1, GOAL, 1.5, 2, 3, 4])
    ax.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    ax.minorticks_off()
    ax.set_xlabel("step")
    ax.legend(
        loc="upper right" if layers[0][-1] < 2 else "lower right",
        bbox_to_anchor=None if layers[0][-1] < 2 else (1, 0.16),
    )


if __name__ == "__main__":
    main()
