"""The documents of `plan evaluate`, `plan evaluate-serving` and `plan evaluate-rl`: predictions and measurements."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from shardwright.planner.error_summary import INTERVAL, ErrorSummary
from shardwright.planner.evaluate import MEASURED_RUNS, QUANTITIES, PlanEvaluation
from shardwright.rl.measured import PUBLISHED, RLEvaluation
from shardwright.serving.evaluate import MEASUREMENTS, ServingEvaluation
from shardwright.view.document import (
    CHANGE,
    COUNT,
    FOUR_DIGITS,
    NUMBER,
    SHARE,
    WHOLE_SHARE,
    Column,
    Note,
    Part,
    Quantity,
    Table,
    VerbDocument,
)

GIB = Quantity("{:.2f}".format)
FEW = 6
"""Most names of rows that are listed with a remark."""
NamedSummary = tuple[str, ErrorSummary]


def evaluation_view(evaluation: PlanEvaluation) -> VerbDocument:
    """Return the document of `plan evaluate`: each row, the skipped rows, the assumptions, the errors by source and by
    family."""
    parts: list[Part] = []
    if evaluation.path == MEASURED_RUNS:
        parts.append(Note(f"{MEASURED_RUNS.name}, the published runs that come with shardwright"))
    parts.append(_runs(evaluation))
    parts += _remarks("skipped", ((run.reason, run.row) for run in evaluation.skipped))
    parts += _remarks("assumed", ((text, row.run.row) for row in evaluation.rows for text in row.run.assumed))
    by_source, by_family = (
        [(f"{summary.quantity}, {summary.group}", summary) for summary in summaries]
        for summaries in (evaluation.summaries, evaluation.families)
    )
    parts += [_errors("quantity, source", by_source), _errors("quantity, family", by_family)]
    parts += _legend("family", by_source)
    return VerbDocument(f"{evaluation.path}: predicted and measured", evaluation.as_json(), parts)


def _runs(evaluation: PlanEvaluation) -> Table:
    columns = [Column("row", NUMBER), Column("model")]
    measured = [name for name in QUANTITIES if any(row.pair(name) for row in evaluation.rows)]
    for name in measured:
        unit = QUANTITIES[name]
        form = GIB if unit == "GiB" else FOUR_DIGITS
        columns += [Column(f"measured, {unit}", form), Column("predicted", form), Column("error", CHANGE)]
    rows: list[list[Any]] = []
    for row in evaluation.rows:
        cells: list[Any] = [row.run.row, row.run.measured.model]
        for name in measured:
            predicted, value = row.pair(name) or (None, None)
            cells += [value, predicted, row.error(name)]
        rows.append(cells)
    return Table(columns, rows)


def serving_evaluation_view(evaluation: ServingEvaluation, every_row: bool = False) -> VerbDocument:
    """Return the document of `plan evaluate-serving`: each row if `every_row`, the skipped rows, the assumptions, the
    errors by source, regime and metric."""
    parts: list[Part] = []
    if evaluation.path == MEASUREMENTS:
        parts.append(Note(f"{MEASUREMENTS.name}, the published measurements that come with shardwright"))
    if every_row:
        cases = [(row.case, row) for row in evaluation.rows]
        words = Column("row"), Column("model"), Column("metric")
        numbers = Column("measured", FOUR_DIGITS), Column("predicted", FOUR_DIGITS), Column("error", CHANGE)
        rows = [
            (case.line.id, case.line.model, case.line.metric, case.measured, row.predicted, row.error)
            for case, row in cases
        ]
        parts.append(Table((*words, *numbers), rows))
    parts += _remarks("skipped", ((skipped.reason, skipped.name) for skipped in evaluation.skipped))
    parts += _remarks("assumed", ((text, row.case.line.id) for row in evaluation.rows for text in row.case.assumed))
    kinds = [(f"{kind.source}, {kind.regime}, {kind.metric}", kind) for kind in evaluation.summaries]
    parts += [_errors("source, regime, metric", kinds), *_legend("source", kinds)]
    return VerbDocument(f"{evaluation.path}: predicted and measured", evaluation.as_json(), parts)


def rl_evaluation_view(evaluation: RLEvaluation) -> VerbDocument:
    """Return the document of `plan evaluate-rl`: each row with its predicted parts, the skipped rows, the errors by
    group."""
    times = Column("measured, s", FOUR_DIGITS), Column("predicted", FOUR_DIGITS), Column("error", CHANGE)
    rows = [
        (
            *(prediction.row.id, prediction.row.step_time_s, prediction.step.total_s, prediction.error),
            ", ".join(f"{name} {seconds:.1f}" for name, seconds in prediction.step.parts_s.items()),
        )
        for prediction in evaluation.rows
    ]
    parts: list[Part] = []
    if evaluation.path == PUBLISHED:
        parts.append(Note(f"{PUBLISHED.name}, the published steps that come with shardwright"))
    parts += [Table((Column("row"), *times, Column("predicted parts, in seconds")), rows)]
    parts += _remarks("skipped", ((row.why_not, row.id) for row in evaluation.skipped))
    parts.append(_errors("rows of", list(evaluation.summaries().items())))
    return VerbDocument(f"{evaluation.path}: predicted and measured", evaluation.as_json(), parts)


def _errors(title: str, summaries: Sequence[NamedSummary]) -> Table:
    """Return the table of summaries. `title`: the heading of their names."""
    apart = any(summary.left_out is not None or summary.inside is not None for _, summary in summaries)
    columns = [Column("mean abs", SHARE), Column("median", SHARE), Column("bias", CHANGE), Column("worst", CHANGE)]
    columns += [Column("left out", SHARE), Column("inside", WHOLE_SHARE)] if apart else []
    columns += [Column("rows", COUNT), Column(f"{title} (row of the worst)")]
    rows = [
        (
            *(summary.mean_absolute, summary.median_absolute, summary.bias, summary.worst),
            *((summary.left_out, summary.inside) if apart else ()),
            *(summary.n, f"{name} ({summary.worst_row})"),
        )
        for name, summary in summaries
    ]
    return Table(columns, rows)


def _legend(source: str, summaries: Iterable[NamedSummary]) -> Iterator[Note]:
    """Yield the meaning of the columns about predictions without the `source`, if one is filled."""
    if any(summary.left_out is not None for _, summary in summaries):
        yield Note(f"mean absolute error by constants that were fitted without this {source}", "left out")
        yield Note(f"rows whose measured value is in the {INTERVAL} of that prediction", "inside")


def _remarks(name: str, texts: Iterable[tuple[str, Any]]) -> Iterator[Note]:
    """Yield each text once, with the rows that it applies to and their number. `texts`: each with the name of a row."""
    rows: dict[str, list[Any]] = {}
    for text, row in texts:
        rows.setdefault(text, []).append(row)
    for text, names in rows.items():
        few = ", ".join(map(str, names[:FEW])) + (", ..." if len(names) > FEW else "")
        yield Note(text, f"{name} ({len(names)} {'rows' if len(names) > 1 else 'row'}: {few})")
