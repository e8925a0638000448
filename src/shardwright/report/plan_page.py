"""A plan on one HTML page that needs no network, no script and no other file."""

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from shardwright.planner.alternatives import Alternative
from shardwright.planner.choice import PricedLayout
from shardwright.planner.headline import accelerator_hours, days, headline
from shardwright.planner.search import Plan
from shardwright.planner.sweep import by_length, by_size
from shardwright.planner.words import choices_in_words, compared, host_row, merged, remarks, verdict, warnings, why
from shardwright.report.plan_pictures import ROLES, length_svg, memory_svg, scaling_svg, time_svg
from shardwright.system.files import write_whole
from shardwright.system.units import format_bytes, format_count, format_seconds
from shardwright.view.html import document, facts, picture, table

ROWS = 9
"""Most layouts in the picture of the step time."""


def write_page(
    plan: Plan,
    name: str,
    own: Alternative | None,
    alternatives: Sequence[Alternative],
    budget_tokens: float | None,
    path: str | Path,
) -> None:
    """Write the page of a plan in which at least one layout fits, replacing an existing file. `name`: the model's name;
    `own`: the layout of the run file.

    Raises InputError if `path` cannot be written.
    """
    write_whole(Path(path), _page(plan, name, own, alternatives, budget_tokens).encode("utf-8"))


def _page(
    plan: Plan, name: str, own: Alternative | None, alternatives: Sequence[Alternative], budget_tokens: float | None
) -> str:
    best, job = _taken(plan), plan.job
    title = f"{name} on {job.cluster.name}"
    body = f"""<header>
<h1>{escape(title)}: the layout</h1>
<p class="quiet">{job.global_batch:,} sequences of {job.seq_len:,} tokens a step, {job.precision};
{format_count(job.model.n_parameters)} parameters; {plan.survey.n_layouts:,} layouts, {len(plan.pool):,} fit</p>
</header>
{facts(_numbers(plan, budget_tokens))}
{table(("", "step", "slower", "memory", "layout"), _compared(plan, own), "compared")}
{_remarks(plan)}
{_warnings(best)}<h2>The recommended layout</h2>
<pre>{escape(str(best.choice))}</pre>
{table((), _escaped(choices_in_words(job, best.choice)), "words")}
<figure>
{_picture(memory_svg(best, plan.limit_bytes), "memory", "Memory by kind")}
<figcaption>What each rank of the pipeline holds at its fullest moment, against {format_bytes(plan.limit_bytes)}, what
is left of {format_bytes(job.cluster.accelerator.memory_bytes)} after the margin.</figcaption>
</figure>
<h2>Others</h2>
<figure>
{_picture(time_svg(_bars(plan, alternatives)), "time", "Time by kind of work")}
<figcaption>Where the seconds of a step go. Overlapped communication is not shown; “pipeline” is the
bubble of the busiest rank.</figcaption>
</figure>
{table(("kind", "layout", "slower", "why"), _others(plan, alternatives), "others")}
<h2>More accelerators, longer sequences</h2>
<figure>
{_picture(scaling_svg(by_size(plan), job.cluster.size), "scaling", "Speed against accelerators")}
<figcaption>The best layout for each number of accelerators, with the same batch. Degrees of tp, cp and pp are searched
within a factor of two of those above.</figcaption>
</figure>
<figure>
{_picture(length_svg(by_length(best), job.seq_len, plan.limit_bytes), "length", "Memory against sequence length")}
<figcaption>The layout above with shorter and longer sequences, as many of them a step.</figcaption>
</figure>
<h2>The fastest {len(plan.best)}</h2>
{table(("", "layout", "step", "slower", "MFU", "memory"), _top(plan), "top")}
<p class="quiet">MFU counts the full square of attention (PaLM, arXiv 2204.02311); memory is that of the fullest rank,
with what the allocator cannot use.</p>"""
    return document(f"{title}: a plan", body, _STYLE, (ROLES[0], ROLES[1]))


_STYLE = """table.words td, table.others td, table.others th, table.top td:nth-child(2), table.top th:nth-child(2)
  { text-align: left; vertical-align: top; }
table.words td:first-child { color: var(--quiet); }
table.others td, table.top td { font-size: .875rem; border-bottom: 1px solid var(--grid); }
td code { font-size: .8125rem; overflow-wrap: anywhere; }
table.compared td:first-child, table.compared td:last-child, table.compared th:last-child { text-align: left; }
table.others td:nth-child(3) { white-space: nowrap; }
"""


def _picture(svg: str, name: str, title: str) -> str:
    return picture(svg, name, title, ROLES[0])


def _numbers(plan: Plan, budget_tokens: float | None) -> list[tuple[str, str, str]]:
    best = _taken(plan)
    told = headline(best)
    rows = [
        ("step", format_seconds(told.step_s), f"{plan.job.tokens:,} tokens"),
        ("tokens per second", format_count(told.tokens_per_s), f"{told.tokens_per_s_per_accelerator:,.0f} each"),
        ("MFU", f"{told.mfu_full:.1%}", f"{told.mfu_causal:.1%} with the causal half of attention"),
    ]
    if told.recomputes_flops:
        rows.append(("HFU", f"{told.hfu_full:.1%}", f"{told.hfu_causal:.1%} with the causal half"))
    share = best.peak_bytes / plan.limit_bytes
    rows.append(("peak memory", format_bytes(best.peak_bytes), f"{share:.1%} of {format_bytes(plan.limit_bytes)}"))
    if best.host_bytes_per_node:
        rows.append(("memory of the host", host_row(best), ""))
    if budget_tokens is not None:
        hours = f"{accelerator_hours(plan.job, best.step_s, budget_tokens):,.0f} accelerator-hours"
        rows.append(
            (f"{format_count(budget_tokens)} tokens", f"{days(plan.job, best.step_s, budget_tokens):,.1f} days", hours)
        )
    return rows


def _taken(plan: Plan) -> PricedLayout:
    assert plan.recommended is not None
    return plan.recommended


def _remarks(plan: Plan) -> str:
    return "".join(f'<p class="quiet">{escape(remark)}</p>' for remark in remarks(plan))


def _compared(plan: Plan, own: Alternative | None) -> list[list[str]]:
    """Return rows of the layouts to choose from: the run file's layout first, then the recommended layout."""
    rows = []
    for name, each in compared(plan, own):
        peak = each.priced.peak_bytes if each.priced else each.nearest[1] if each.nearest else 0.0
        step = format_seconds(each.priced.step_s) if each.priced else ""
        slower = verdict(_taken(plan), each, plan.limit_bytes) if each.choice != _taken(plan).choice else ""
        rows.append(
            [escape(name), step, escape(slower), format_bytes(peak), f"<code>{escape(str(each.choice))}</code>"]
        )
    return rows


def _warnings(best: PricedLayout) -> str:
    return "".join(f'<p class="bad">{escape(warning)}</p>\n' for warning in warnings(best))


def _escaped(rows: Iterable[Iterable[str]]) -> list[list[str]]:
    return [[escape(cell) for cell in row] for row in rows]


def _bars(plan: Plan, alternatives: Sequence[Alternative]) -> list[tuple[str, PricedLayout]]:
    """Return the recommended layout and the best layout of each other kind, if it fits."""
    found = [("recommended", _taken(plan))]
    found += [(_short(name), each.priced) for name, each in merged(alternatives) if each.priced is not None]
    return found[:ROWS]


def _short(name: str, most: int = 44) -> str:
    first = name.split(";")[0].split(" (")[0]
    return first if len(first) <= most else first[: most - 1] + "…"


def _others(plan: Plan, alternatives: Sequence[Alternative]) -> list[list[str]]:
    best, rows = _taken(plan), []
    for name, each in merged(alternatives):
        told = name, str(each.choice), verdict(best, each, plan.limit_bytes), why(best, each)
        kind, layout, slower, reason = map(escape, told)
        rows.append([kind, f"<code>{layout}</code>", slower, reason])
    return rows


def _top(plan: Plan) -> list[list[str]]:
    return [
        [
            str(number),
            f"<code>{escape(str(each.choice))}</code>",
            f"{each.step_s:.4g} s",
            f"{each.step_s / _taken(plan).step_s - 1:+.2%}" if each.choice != _taken(plan).choice else "",
            f"{headline(each).mfu_full:.1%}",
            format_bytes(each.peak_bytes),
        ]
        for number, each in enumerate(plan.best, 1)
    ]
