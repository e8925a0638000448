"""The documents of `verify` and of `mup-check`.

`verify`: the verdict, the culprit and the comparisons of one layout, or of many. `mup-check`: the change of activations
by width, its slopes, and a picture.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import partial

from shardwright.config import RunConfig
from shardwright.model.spec import ModelSpec
from shardwright.system.units import counted
from shardwright.verification.case import Case
from shardwright.verification.compare import RankedLayout, Report, ReportRow
from shardwright.verification.coordinates import FLAT, CoordinateCheck
from shardwright.verification.pictures import ROLES, errors_svg, short
from shardwright.view.document import (
    CODE,
    COUNT,
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
from shardwright.view.style import Line, log_lines_svg

SLOPE = Quantity("{:+.2f}".format)
MORE_ROWS = 12
"""Most rows that are not equal, in addition to the worst row of each kind, and most replicas that differ."""
COMPARED = "losses, norms, gradients and parameters"
MULTIPLE = Quantity(short)
"""An error in multiples of its tolerance."""


def sizes(config: RunConfig, case: Case) -> str:
    """Return the sizes of model and batch, and how they differ from the run file's."""
    spec, whole = case.spec, config.spec()
    sizes = batch_sizes(case)
    if case.attention == "document":
        restarted = ", positions restarted" * (case.positions == "document")
        sizes += f", attention within documents{restarted}"
    if case.preference.kind != "none":
        sizes += f", {case.preference.kind} on pairs of documents"
    if case.fp8 is not None:
        sizes += f", fp8 {case.fp8.recipe}"
    narrow = {"bf16": "bfloat16", "fp16": "float16"}.get(config.precision.compute, case.dtype)
    if case.dtype != narrow and case.fp8 is None:
        sizes += f", not the {config.precision.compute} of precision.compute, which --dtype {narrow} takes"
    if config.init.weights is not None:
        sizes += "; initial values from the seed, and not init.weights"
    return sizes if spec == whole else f"reduced to {sizes} (--full for the true sizes)"


def batch_sizes(case: Case) -> str:
    """Return the sizes of the model and of the batch."""
    spec = case.spec
    adapters = "" if spec.lora is None else f", adapters of rank {spec.lora.rank}"
    return (
        f"{spec.n_layers} layers, d_model {spec.d_model}, {spec.n_heads} query and {spec.n_kv_heads} kv heads, "
        f"d_ffn {spec.d_ffn}, vocabulary {spec.vocab_size}{adapters}; {case.global_batch} sequences of "
        f"{case.seq_len} tokens a step{_stages(case)}, {counted(case.steps, 'step')}, {case.dtype}"
    )


def _stages(case: Case) -> str:
    sizes = [case.step_case(step) for step in range(case.steps)] if case.stages else []
    steps = ", then ".join(f"{one.global_batch} of {one.seq_len}" for one in sizes)
    return f" (in turn {steps})" if steps else ""


def report_document(report: Report, sizes: Sequence[str]) -> VerbDocument:
    """Return the document of one layout that was compared. `sizes`: sentences about the sizes of model and batch."""
    worst = report.worst_of_each()
    others = sorted((row for row in report.rows if not row.equal and row not in worst), key=lambda row: -row.excess)
    hidden = len(others) - MORE_ROWS
    parts: list[Part] = [
        Facts([*_facts(report)]),
        *([Note(report.culprit, "culprit", "bad")] if report.culprit else []),
        Section(f"{report.layout} against {report.against}"),
        *(Note(line, tone="quiet") for line in sizes),
        Picture(
            "errors",
            "Errors by layer and step",
            partial(errors_svg, report.rows),
            "A tensor is equal up to 1, its tolerance. Step 0 of the parameters: their initial values.",
            ROLES,
        ),
        Section("The worst of each kind"),
        Table(
            (
                Column("compared"),
                Column("worst at", CODE),
                Column("step", COUNT),
                Column("error", ERROR),
                Column("tolerance", ERROR),
                Column("ratio", MULTIPLE),
                Column("equal"),
            ),
            [_cells(row) for row in worst + others[:MORE_ROWS]],
            f"and {hidden:,} more that are not equal; all of them with --json" if hidden > 0 else "",
        ),
        Note("||a - b|| / ||b|| of a tensor, |a - b| / |b| of a number, b the reference", "error", "quiet"),
        *(Note(reason, "tolerance", "quiet") for reason in dict.fromkeys(row.reason for row in report.rows)),
    ]
    parts += [Note(part, "not compared", "quiet") for part in report.not_compared]
    if report.differing:
        hidden = len(report.differing) - MORE_ROWS
        parts += [Section("Replicas that differ"), *map(Note, report.differing[:MORE_ROWS])]
        parts += [Note(f"and {hidden:,} more; all of them with --json")] if hidden > 0 else []
    return VerbDocument(f"{report.layout}: {_verdict(report)}", report.document(), parts)


def _verdict(report: Report) -> str:
    return "failed" if report.crash else "equal" if report.equal else "not equal"


def _facts(report: Report) -> Iterator[Fact]:
    n_failing, n_rows = sum(not row.equal for row in report.rows), len(report.rows)
    if report.equal:
        yield Fact("equal", f"{n_rows:,}", COMPARED, "good")
    else:
        yield Fact("not equal", f"{n_failing:,}", f"of {n_rows:,} {COMPARED}", "bad")
    yield Fact("largest error", f"{report.worst.error:.1e}", f"= {short(report.worst.excess)} times its tolerance")
    if report.differing:
        yield Fact("replicas", f"{len(report.differing):,}", f"of {report.n_replicated:,} differ between ranks", "bad")
    else:
        same = "tensors and numbers, the same bits on all ranks that hold them"
        yield Fact("replicas", f"{report.n_replicated:,}", same if report.n_replicated else "no rank has a copy")


def _cells(row: ReportRow) -> tuple[object, ...]:
    compared = f"{row.quantity.kind}, {row.quantity.training}"
    equal = "yes" if row.equal else Marked("no", "bad")
    return compared, row.name or "-", row.quantity.step, row.error, row.tolerance, row.excess, equal


def matrix_table(what: str = "layout", rows: Iterable[Sequence[object]] = ()) -> Table:
    """Return a table with a row (`matrix_row`) for each comparison. The name is the last column, because some names are
    longer than all other columns."""
    columns = (
        Column("", width=9),
        Column("error", ERROR, 7),
        Column("tolerance", ERROR, 9),
        Column("replicas", Quantity(), 10),
        Column("worst at", width=40),
        Column(what),
    )
    return Table(columns, list(rows), streamed=True)


def matrix_row(report: Report, name: str) -> tuple[object, ...]:
    """Return the row of a comparison that has finished or whose ranks failed."""
    verdict = _verdict(report) if report.equal else Marked(_verdict(report), "bad")
    if report.crash:
        return verdict, None, None, None, report.crash.splitlines()[0], name
    worst = report.worst
    at = f"{worst.quantity.kind} {worst.name}".strip()
    replicas = Marked(f"{len(report.differing):,} differ", "bad") if report.differing else f"{report.n_replicated:,}"
    return verdict, worst.error, worst.tolerance, replicas, at, name


def matrix_document(
    reports: Sequence[Report], title: str, left_out: Sequence[tuple[RankedLayout, str]] = ()
) -> VerbDocument:
    """Return the document of many layouts of one number of ranks, in the order given. `left_out`: layouts that were not
    tried, and why."""
    n_ranks, n = reports[0].layout.world_size, len(reports)
    bad = [report for report in reports if not report.equal]
    layouts = f"layouts of {counted(n_ranks, 'rank')}"
    n_equal = f"{n - len(bad):,} of {n:,}" if bad else f"all {n:,}"
    facts = [Fact("equal", n_equal, layouts, "" if bad else "good")]
    for verdict in ("not equal", "failed"):
        if count := sum(_verdict(report) == verdict for report in bad):
            facts.append(Fact(verdict, f"{count:,}", f"of {n:,} layouts", "bad"))
    parts: list[Part] = [
        Facts(facts),
        *(Note(str(report.layout), _verdict(report), "bad") for report in bad),
        *(Note(f"{layout}: {reason}", "left out") for layout, reason in left_out),
        *([Note("for the culprit, verify one of them alone, with --set for its degrees")] if bad else []),
        matrix_table(rows=[matrix_row(report, str(report.layout)) for report in reports]),
        Note("the tensor or number with the largest error in multiples of its tolerance", "worst at", "quiet"),
        Note("tensors and numbers that several ranks hold, compared bit for bit", "replicas", "quiet"),
        *(Note(reason, "tolerance", "quiet") for reason in tolerances(reports)),
    ]
    document = {
        "equal": not bad,
        "layouts": [report.document() for report in reports],
        "left_out": [{"layout": str(layout), "reason": reason} for layout, reason in left_out],
    }
    return VerbDocument(title, document, parts)


def tolerances(reports: Iterable[Report]) -> Iterator[str]:
    """Yield the reasons of all tolerances. Of reasons that differ in numbers alone, yield the widest tolerance's."""
    reasons: dict[str, dict[str, float]] = defaultdict(dict)
    for row in (row for report in reports for row in report.rows):
        alike = reasons[re.sub(r"\d[\d.e+-]*", "", row.reason)]
        alike[row.reason] = max(row.tolerance, alike.get(row.reason, 0.0))
    for alike in reasons.values():
        others = f" (and {len(alike) - 1} alike, none wider)" if len(alike) > 1 else ""
        yield f"{max(alike, key=alike.__getitem__)}{others}"


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
