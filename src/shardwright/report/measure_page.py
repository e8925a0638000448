"""The curves of a measured machine on one HTML page that needs nothing else."""

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwright.system.files import write_whole
from shardwright.system.units import format_bytes, format_seconds
from shardwright.view.html import document, facts, picture
from shardwright.view.style import plain_log_ticks, rendered

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Points = Sequence[Mapping[str, Any]]
Line = tuple[str, list[float], list[float]]
"""The name of a line, and the x and y of its points."""
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#e69f00", "#b3356b", "#6b5b95")


def write_page(machine: Mapping[str, Any], path: str | Path) -> None:
    """Write the page of a machine, given as the document of `measure --json`, to `path`, replacing an existing file."""
    write_whole(Path(path), _page(machine).encode("utf-8"))


def _page(machine: Mapping[str, Any]) -> str:
    most = machine["ranks"][-1]
    numbers = [
        ("cores", str(machine["cores"]), ""),
        ("ranks of a node", ", ".join(str(each["ranks"]) for each in machine["ranks"]), "measured at once"),
        ("launches of a layer", format_seconds(most["overheads"]["layer_s"]), "forward and backward"),
        ("disk", f"{format_bytes(machine['disk_bytes_per_s'])}/s", "written"),
    ]
    pictures = [
        ("matmuls", "Rate of matmuls (TFLOP/s) by their FLOPs", _matmuls(machine)),
        ("attention", "Rate of attention, forward and backward (TFLOP/s), by sequence length", _attention(machine)),
        ("copies", "Copies (GB/s read and written) by bytes", _copies(machine)),
    ]
    for where in ("inside", "across"):
        if machine[where]:
            title = f"Messages {'in a node' if where == 'inside' else 'between nodes'} (ms) by bytes of the buffer"
            pictures.append((where, title, _messages(machine[where])))
    figures = "\n".join(
        f"<figure>\n{picture(_svg(lines, title), name, title)}\n</figure>" for name, title, lines in pictures if lines
    )
    title = f"{machine['name']}, measured"
    seconds = "CPU-seconds" if machine["clock"] == "cpu" else "wall seconds"
    body = f"""<header>
<h1>{escape(title)}</h1>
<p class="quiet">{seconds}; medians of repeats; measured in {format_seconds(machine["took_s"])}</p>
</header>
{facts(numbers)}
{figures}"""
    return document(title, body)


def _matmuls(machine: Mapping[str, Any]) -> list[Line]:
    lines = []
    for each in machine["ranks"]:
        for precision in dict.fromkeys(point["precision"] for point in each["matmuls"]):
            points = sorted(
                (2.0 * point["m"] * point["k"] * point["n"], point["seconds"])
                for point in each["matmuls"]
                if point["precision"] == precision
            )
            name = f"{precision}, {each['ranks']} of a node"
            lines.append((name, [flops for flops, _ in points], [flops / s / 1e12 for flops, s in points]))
    return lines


def _attention(machine: Mapping[str, Any]) -> list[Line]:
    lines = []
    for each in machine["ranks"][-1:]:
        for width in sorted({point["width"] for point in each["attention"]}):
            points = [point for point in each["attention"] if point["width"] == width]
            rates = [
                7.0 * point["batch"] * point["length"] ** 2 * point["heads"] * width
                / (point["forward_s"] + point["backward_s"]) / 1e12
                for point in points
            ]  # fmt: skip
            lines.append((f"heads of {width}", [point["length"] for point in points], rates))
    return lines


def _copies(machine: Mapping[str, Any]) -> list[Line]:
    return [
        (f"{each['ranks']} of a node", [point["n_bytes"] for point in each["copies"]],
         [2 * point["n_bytes"] / point["seconds"] / 1e9 for point in each["copies"]])
        for each in machine["ranks"]
    ]  # fmt: skip


def _messages(points: Points) -> list[Line]:
    lines = []
    for name in dict.fromkeys(point["collective"] for point in points):
        those = [point for point in points if point["collective"] == name]
        sizes, times = [point["n_bytes"] for point in those], [1e3 * point["seconds"] for point in those]
        lines.append((name.replace("_", "-"), sizes, times))
    return lines


def _svg(lines: Sequence[Line], title: str) -> str:
    def compose(figure: "Figure") -> None:
        ax = figure.add_axes((0.06, 0.13, 0.74, 0.75))
        for at, (name, x, y) in enumerate(lines):
            # Matmuls of different shapes may have equally many FLOPs; a line through them would mean nothing.
            joined = "-" if len(set(x)) == len(x) else ""
            ax.plot(x, y, f"o{joined}", ms=3, lw=1, color=COLOURS[at % len(COLOURS)], label=name)
        ax.set_xscale("log")
        ax.set_yscale("log")
        plain_log_ticks(ax)
        ax.grid(True, which="major", lw=0.4)
        figure.legend(*ax.get_legend_handles_labels(), loc="upper left", bbox_to_anchor=(0.81, 0.9))
        figure.text(0.02, 0.98, title, va="top", fontsize=10.5, fontweight="bold")

    return rendered((10, 3.4), compose, "svg", transparent=True).decode("utf-8")
