"""The document of `mup-check`: the change of activations by width, its slopes, and a picture."""

from collections.abc import Sequence
from functools import partial

from shardwright.model.spec import ModelSpec
from shardwright.verification.coordinates import FLAT, CoordinateCheck
from shardwright.view.document import (
    ERROR,
    Column,
    Fact,
    Facts,
    Marked,
    Note,
    Part,
    Picture,
    Quantity,
    Section,
    Table,
    VerbDocument,
)
from shardwright.view.log_lines import Line, log_lines_svg

SLOPE = Quantity("{:+.2f}".format)


def coordinates_document(check: CoordinateCheck, spec: ModelSpec, lr: float) -> VerbDocument:
    """Return the document of a coordinate check of the model `spec`, trained with the learning rate `lr`."""
    slopes = check.slopes
    worst = max(slopes, key=lambda place: abs(slopes[place]))
    verdict = f"slope of {worst} {slopes[worst]:+.2f}; flat is up to {FLAT:g}, up or down"
    columns = (Column("place"), *(Column(f"{width:,}", ERROR) for width in check.widths), Column("slope", SLOPE))
    rows = [
        (place, *changes, Marked(slopes[place], "" if abs(slopes[place]) <= FLAT else "bad"))
        for place, changes in check.changes.items()
    ]
    parametrisation = _parametrisation(spec)
    parts: list[Part] = [
        Facts([Fact("flat" if check.flat else "not flat", parametrisation, verdict, "good" if check.flat else "bad")]),
        Section(f"Change of an element of each activation after {check.steps} steps, by d_model"),
        Table(columns, rows),
        Note(
            f"root mean squares, averaged over layers and seeds; {spec.n_layers} layers, lr {lr:g}, one batch of "
            "random tokens in fp32; slope: of log change over log d_model",
            tone="quiet",
        ),
    ]
    data = {
        "flat": check.flat,
        "widths": check.widths,
        "steps": check.steps,
        "changes": check.changes,
        "slopes": slopes,
        "mup": None if spec.mup is None else vars(spec.mup),
    }
    caption = "Each line is divided by its value at the smallest width. With muP the lines are flat."
    picture = Picture("changes", "Change of activations by width", partial(coordinates_svg, check), caption)
    return VerbDocument(f"mup-check: {parametrisation}", data, parts, [picture])


def coordinates_svg(check: CoordinateCheck) -> str:
    """Return a picture of the changes, each divided by its value at the smallest width."""
    lines: Sequence[Line] = [
        (place, check.widths, [change / changes[0] for change in changes]) for place, changes in check.changes.items()
    ]
    return log_lines_svg(lines, x_label="d_model", y_label="change / first", ticks=check.widths).decode("utf-8")


def _parametrisation(spec: ModelSpec) -> str:
    """Return the parametrisation of a model in words."""
    if spec.mup is None:
        return "standard parametrisation"
    given = [f"{name}={value}" for name, value in vars(spec.mup).items() if value]
    return f"muP with {', '.join(given)}"
