"""The plan that the Python API returns: it prints as a table, and a notebook shows it as an HTML table."""

import io
from typing import Any

from rich.console import Console

from shardwright.planner.alternatives import Alternative
from shardwright.planner.search import Plan
from shardwright.planner.words import compared, remarks, verdict, worth_a_row
from shardwright.system.units import format_bytes, format_count
from shardwright.view.document import BYTES, NUMBER, SECONDS, WORDS, Column, Note, Part, Table
from shardwright.view.html import fragment
from shardwright.view.terminal import print_parts

_COLUMNS = (
    Column("", WORDS),
    Column("step", SECONDS),
    Column("change", NUMBER),
    Column("memory", BYTES),
    Column("layout", WORDS),
)


class PlanTable(Plan):
    """A `Plan` with a text and an HTML form."""

    def __str__(self) -> str:
        """Return a text with the job, the layouts to choose from, and the fastest layouts, one line each."""
        text = io.StringIO()
        print_parts(self._parts(), Console(file=text, width=100_000))
        return "\n".join(map(str.rstrip, text.getvalue().splitlines()))

    def _repr_html_(self) -> str:
        return fragment(self._parts())

    def _parts(self) -> list[Part]:
        job, n_fit = self.job, len(self.pool)
        title = (
            f"{format_count(job.model.n_parameters)} parameters on {job.cluster.name}: {job.global_batch:,} x "
            f"{job.seq_len:,} tokens a step, {job.precision}; {self.survey.n_layouts:,} layouts, {n_fit:,} fit in "
            f"{format_bytes(self.limit_bytes)}"
        )
        notes = remarks(self) if self.recommended is not None else []
        return [Note(title), Table(_COLUMNS, self._rows()), *map(Note, notes)]

    def _rows(self) -> list[tuple[Any, ...]]:
        taken, nearest = self.recommended, self.survey.nearest
        if taken is None:
            return [("nothing fits; nearest", None, "", self.survey.nearest_bytes, str(nearest))]
        named = compared(self)
        choices = {alternative.choice for _, alternative in named}
        listed = [(f"number {n}", Alternative("", priced, None)) for n, priced in worth_a_row(self.best, taken)]
        others = [(name, alternative) for name, alternative in listed if alternative.choice not in choices]
        return [
            (
                name,
                alternative.priced.step_s,
                verdict(taken, alternative, self.limit_bytes) if alternative.choice != taken.choice else "",
                alternative.priced.peak_bytes,
                str(alternative.choice),
            )
            for name, alternative in [*named, *others]
            if alternative.priced is not None
        ]
