"""Draw the pictures of docs/tensor-parallel.md and docs/context-parallel.md.

    python -m docs.draw_axes

To be run in the root of the repository. The activations are those of docs/kept.py: lines by the formula, dots as
counted. The balance of attention is computed by src/shardwright/split/sequence.py.
"""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from docs.kept import counted_bytes, formula_bytes
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from tests.parallel.test_tensor import WIDE

from shardwright.layout.layout import Layout
from shardwright.model.presets import resolve
from shardwright.split.sequence import attention_flops, attention_pairs, step_pairs
from shardwright.view.style import COLOURS, SETTINGS

HERE = Path(__file__).parent
DPI = 160
SEQ_LEN, RING = 8192, 8
METHODS = {"ring": "contiguous (ring)", "zigzag": "zig-zag", "striped": "striped"}
METHOD_COLOURS = {"ring": COLOURS["validation"], "zigzag": COLOURS["curve"], "striped": COLOURS["forward-backward"]}


def main() -> None:
    plt.rcParams.update(SETTINGS)
    _save(activations(), "tensor-activations.png")
    _save(balance(), "context-balance.png")


def _save(figure: Figure, name: str) -> None:
    figure.savefig(HERE / name, dpi=DPI, facecolor=COLOURS["paper"], metadata={"Software": None})
    print(f"written to {HERE / name}")


def activations() -> Figure:
    """Bytes that a layer keeps over tp: of a real model by the formula, of the tests' also as counted."""
    figure, (large, small) = plt.subplots(1, 2, figsize=(8.6, 3.5), layout="constrained")
    mib = SEQ_LEN / 2**20
    spec = resolve("llama-3.1-8b")
    _over_tp(large, (1, 2, 4, 8), lambda layout: formula_bytes(spec, layout) * mib)
    large.set_title(f"llama-3.1-8b, one sequence of {SEQ_LEN:,} tokens")
    large.set_ylabel("MiB that a layer keeps, bf16")
    large.legend(loc="upper right", title="by the formula", alignment="left")
    _over_tp(small, (1, 2, 4), lambda layout: formula_bytes(WIDE, layout))
    _dots(small, (1, 2, 4))
    small.set_title("the model of the tests, one token")
    small.set_ylabel("bytes that a layer keeps, bf16")
    return figure


def _over_tp(axes: Axes, degrees: tuple[int, ...], kept) -> None:  # type: ignore[no-untyped-def]
    for sequence_parallel, colour, words in (
        (False, COLOURS["validation"], "tensor parallelism alone"),
        (True, COLOURS["curve"], "with sequence parallelism"),
    ):
        values = [kept(Layout(tp=tp, sequence_parallel=sequence_parallel)) for tp in degrees]
        axes.plot(degrees, values, color=colour, label=words)
        axes.annotate(
            f"{values[-1]:,.0f}",
            (degrees[-1], values[-1]),
            (4, 0),
            textcoords="offset points",
            va="center",
            color=colour,
        )
    axes.set_xscale("log", base=2)
    axes.set_xticks(degrees, [str(tp) for tp in degrees])
    axes.minorticks_off()
    axes.set_xlim(degrees[0] * 0.9, degrees[-1] * 1.28)
    axes.set_ylim(0, axes.get_ylim()[1] * 1.06)
    axes.set_xlabel("tp")


def _dots(axes: Axes, degrees: tuple[int, ...]) -> None:
    for sequence_parallel, colour in ((False, COLOURS["validation"]), (True, COLOURS["curve"])):
        counted = [counted_bytes(Layout(tp=tp, sequence_parallel=sequence_parallel)) for tp in degrees]
        axes.plot(degrees, counted, "o", color=colour, markersize=5)
    line = Line2D([], [], color=COLOURS["quiet"], label="by the formula")
    dots = Line2D([], [], color=COLOURS["quiet"], marker="o", linestyle="", markersize=5, label="counted")
    axes.legend(handles=[line, dots], loc="upper right")


def balance() -> Figure:
    """Attention's FLOPs of each rank, and of the slowest rank in each step of the ring."""
    figure, (ranks, steps) = plt.subplots(1, 2, figsize=(8.6, 3.4), layout="constrained", sharey=False)
    spec = resolve("llama-3.1-8b")
    width = 0.27
    seq_len = SEQ_LEN * RING

    def tflops(pairs: int) -> float:
        return attention_flops(pairs, spec.n_heads, spec.head_dim) / 1e12

    for i, (method, words) in enumerate(METHODS.items()):
        shift = (i - 1) * width
        of_ranks = [tflops(pairs) for pairs in attention_pairs(method, seq_len, RING)]
        of_steps = [tflops(max(step)) for step in step_pairs(method, seq_len, RING)]
        at = [x + shift for x in range(RING)]
        ranks.bar(at, of_ranks, width, color=METHOD_COLOURS[method], label=words)
        steps.bar(at, of_steps, width, color=METHOD_COLOURS[method], label=f"{words}: {sum(of_steps):.1f} in all")
    ranks.set_title("each rank, all steps")
    ranks.set_xlabel("ring rank")
    ranks.set_ylabel("TFLOPs of one layer's attention forward")
    steps.set_title("the slowest rank, each step")
    steps.set_xlabel("step of the ring")
    for axes in (ranks, steps):
        axes.set_xticks(range(RING))
        axes.set_ylim(0, axes.get_ylim()[1] * 1.28)
    ranks.legend(loc="upper left", borderaxespad=0.6)
    steps.legend(loc="upper right")
    return figure


if __name__ == "__main__":
    main()
