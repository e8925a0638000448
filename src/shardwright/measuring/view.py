"""The document of a measured machine: its rates for the terminal and, on a page, the measured curves."""

from collections.abc import Iterable, Iterator, Sequence
from functools import partial

from shardwright.measuring.fit import copy_bytes_per_s, fit_link, fit_matmuls
from shardwright.measuring.points import MachineMeasurements, MessagePoint
from shardwright.system.units import format_bytes, format_seconds
from shardwright.view.document import NUMBER, Column, Fact, Facts, Note, Part, Picture, Quantity, Table, VerbDocument
from shardwright.view.style import Line, log_lines_svg


def machine_document(machine: MachineMeasurements) -> VerbDocument:
    """Return the document of a machine: a table of its rates, and its measured curves as pictures."""
    clock = "CPU-seconds" if machine.clock == "cpu" else "wall seconds"
    parts: list[Part] = [
        Note(f"{machine.name}, measured in {format_seconds(machine.took_s)}: {clock}, medians of repeats"),
        Facts(list(_facts(machine))),
        _rates(machine),
        *(Note(remark, "not measured") for remark in machine.remarks),
    ]
    return VerbDocument(f"{machine.name}, measured", machine.as_json(), parts, list(_pictures(machine)))


def _facts(machine: MachineMeasurements) -> Iterator[Fact]:
    yield Fact("cores", str(machine.cores))
    yield Fact("ranks of a node", ", ".join(str(points.ranks) for points in machine.ranks), "measured at once")
    for where, points in (("in a node", machine.inside), ("between nodes", machine.across)):
        if points:
            link = fit_link(points)
            remark = (
                f"with {link.start_s * 1e6:.0f} us to start, {link.latency_s * 1e6:.0f} us each; "
                f"the fit is off by {link.error:.0%}"
            )
            yield Fact(f"messages {where}", f"{format_bytes(link.bytes_per_s)}/s", remark)
    yield Fact("disk", f"{format_bytes(machine.disk_bytes_per_s)}/s", "written")


def _rates(machine: MachineMeasurements) -> Table:
    columns = (
        Column("ranks of a node", NUMBER),
        Column("threads", NUMBER),
        Column("precision"),
        Column("TFLOP/s", Quantity(lambda flops_per_s: f"{flops_per_s / 1e12:.3g}")),
        Column("copy GB/s", Quantity(lambda bytes_per_s: f"{bytes_per_s / 1e9:.3g}")),
        Column("launches of a layer, us", Quantity(lambda seconds: f"{seconds * 1e6:.0f}")),
    )
    rows = [
        (points.ranks, points.threads, precision, rate, copy_bytes_per_s(points.copies), points.overheads.layer_s)
        for points in machine.ranks
        for precision, rate in fit_matmuls(points.matmuls).flops_per_s.items()
    ]
    return Table(columns, rows)


def _pictures(machine: MachineMeasurements) -> Iterator[Picture]:
    titles = {
        "matmuls": ("Rate of matmuls (TFLOP/s) by their FLOPs", _matmuls(machine)),
        "attention": ("Rate of attention, forward and backward (TFLOP/s), by sequence length", _attention(machine)),
        "copies": ("Copies (GB/s read and written) by bytes", _copies(machine)),
        "inside": ("Messages in a node (ms) by bytes of the buffer", _messages(machine.inside)),
        "across": ("Messages between nodes (ms) by bytes of the buffer", _messages(machine.across)),
    }
    for name, (title, lines) in titles.items():
        if drawn := list(lines):
            yield Picture(name, title, partial(_svg, drawn), "")


def _svg(lines: Sequence[Line]) -> str:
    return log_lines_svg(lines).decode("utf-8")


def _matmuls(machine: MachineMeasurements) -> Iterator[Line]:
    for rank in machine.ranks:
        for precision in dict.fromkeys(point.precision for point in rank.matmuls):
            points = sorted((point.flops, point.seconds) for point in rank.matmuls if point.precision == precision)
            rates = [flops / seconds / 1e12 for flops, seconds in points]
            yield f"{precision}, {rank.ranks} of a node", [flops for flops, _ in points], rates


def _attention(machine: MachineMeasurements) -> Iterator[Line]:
    most = machine.ranks[-1].attention
    for width in sorted({point.width for point in most}):
        points = [point for point in most if point.width == width]
        # The backward pass takes 2.5 times the FLOPs of the forward pass.
        rates = [3.5 * point.flops / (point.forward_s + point.backward_s) / 1e12 for point in points]
        yield f"heads of {width}", [point.length for point in points], rates


def _copies(machine: MachineMeasurements) -> Iterator[Line]:
    for points in machine.ranks:
        rates = [2 * point.n_bytes / point.seconds / 1e9 for point in points.copies]
        yield f"{points.ranks} of a node", [point.n_bytes for point in points.copies], rates


def _messages(points: Iterable[MessagePoint]) -> Iterator[Line]:
    for name in dict.fromkeys(point.collective for point in points):
        these = [point for point in points if point.collective == name]
        yield name.replace("_", "-"), [point.n_bytes for point in these], [1e3 * point.seconds for point in these]
