"""The plan that the Python API returns: it prints as a table, and a notebook shows it as an HTML table."""

from html import escape

from shardwright.planner.search import Plan
from shardwright.planner.words import compared, remarks
from shardwright.system.units import format_bytes, format_count, format_seconds
from shardwright.view.html import table

TITLES = ("", "step", "slower", "memory", "layout")


class PlanTable(Plan):
    """A `Plan` with a text and an HTML form."""

    def __str__(self) -> str:
        """Return a text with the job, the layouts to choose from, and the fastest layouts, one line each."""
        rows = [TITLES, *self._rows()]
        widths = [max(len(row[column]) for row in rows) for column in range(len(TITLES) - 1)]
        lines = [
            "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:-1], widths[1:]), row[-1]]).rstrip()
            for row in rows
        ]
        return "\n".join(filter(None, [self._title(), *lines, *self._remarks()]))

    def _repr_html_(self) -> str:
        rows = [[escape(cell) for cell in row] for row in self._rows()]
        paragraphs = "".join(f"<p>{escape(remark)}</p>" for remark in self._remarks())
        return f"<p>{escape(self._title())}</p>{table(TITLES, rows)}{paragraphs}"

    def _title(self) -> str:
        job, n_fit = self.job, len(self.pool)
        return (
            f"{format_count(job.model.n_parameters)} parameters on {job.cluster.name}: {job.global_batch:,} x "
            f"{job.seq_len:,} tokens a step, {job.precision}; {self.survey.n_layouts:,} layouts, {n_fit:,} fit in "
            f"{format_bytes(self.limit_bytes)}"
        )

    def _remarks(self) -> list[str]:
        return remarks(self) if self.recommended is not None else []

    def _rows(self) -> list[tuple[str, ...]]:
        taken, nearest = self.recommended, self.survey.nearest
        if taken is None:
            return [("nothing fits; nearest", "", "", format_bytes(self.survey.nearest_bytes), str(nearest))]
        named = [(name, each.priced) for name, each in compared(self)]
        rows = [*named, *((f"number {number}", each) for number, each in enumerate(self.best[1:], 2))]
        return [
            (
                name,
                format_seconds(each.step_s),
                "" if each.choice == taken.choice else f"{each.step_s / taken.step_s - 1:+.1%}",
                format_bytes(each.peak_bytes),
                str(each.choice),
            )
            for name, each in rows
            if each is not None
        ]
