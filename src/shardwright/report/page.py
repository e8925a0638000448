"""A run on one HTML page that needs nothing else: no network, no script, no other file."""

import re
from collections import Counter
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from statistics import median

from shardwright.report.curves import curves_svg
from shardwright.report.headline import RunHeadline, headline, title_of
from shardwright.report.ranks import has_ranks, ranks_svg
from shardwright.report.run_record import RunRecord
from shardwright.report.timeline import READING, PipelineRecord
from shardwright.report.words import batch_in_words, held_in_words, layout_in_words
from shardwright.run_folder import CHECKPOINTS
from shardwright.schedule.draw import svg as timelines_svg
from shardwright.system.files import write_whole
from shardwright.system.units import format_count, format_seconds, percent
from shardwright.view.html import document, facts, in_roles, picture, scrolling, table


def write_page(run: RunRecord, path: str | Path) -> None:
    """Write the page of a run to `path`, replacing an existing file. Raises InputError if `path` cannot be written."""
    write_whole(Path(path), _page(run).encode("utf-8"))


def _page(run: RunRecord) -> str:
    told = headline(run)
    title = title_of(run)
    body = f"""<header>
<h1>{escape(title)}</h1>
<p class="quiet"><code>{escape(str(run.folder))}</code>{_where(run)}</p>
</header>
{_alarm(told)}{facts(told.rows())}
<figure>
{picture(curves_svg(run), "curves", "Curves of the run")}
<figcaption>{_caption(run)}</figcaption>
</figure>
{_ranks(run)}{_pipeline(run)}<h2>Layout</h2>
{_layout(run)}
{_starts(run)}{_events(run)}<h2>Checkpoints</h2>
{_checkpoints(run, told)}
<h2>Run file</h2>
<p class="quiet">With every default filled in; <code>shardwright train</code> accepts it.</p>
<pre class="file">{escape(run.run_file)}</pre>"""
    return document(f"{title}: {told.steps:,} steps", body)


def _timelines(pipeline: PipelineRecord) -> str:
    """Return the picture of a step, as wide as the page; if its numbers would be too small, it is wider and scrolls."""
    svg = timelines_svg(pipeline.timelines).replace(' xmlns="http://www.w3.org/2000/svg"', "", 1)
    svg = re.sub(r' width="(\d+)" height="[^"]*"', r' style="min-width: calc(.9 * \1px)"', svg, count=1)
    return scrolling(in_roles(svg))


def _alarm(told: RunHeadline) -> str:
    if told.first_non_finite_step is None:
        return ""
    return f'<p class="bad">The loss is not finite at step {told.first_non_finite_step:,}.</p>\n'


def _caption(run: RunRecord) -> str:
    every = run.config.metrics.every
    measured = "each step" if every == 1 else f"every {every} steps; speed and time are means over those steps"
    return f"Logged {measured}. MFU is shown where the peak rate of the device is known."


def _ranks(run: RunRecord) -> str:
    """Return the section on the ranks' own times, or an empty text if they are not recorded or there is one rank."""
    if not has_ranks(run):
        return ""
    costs = [(record.slowest_costs_s or 0.0, record.step_s) for record in run.train if record.own_s_by_rank]
    share = sum(cost for cost, _ in costs) / (sum(step_s for _, step_s in costs) or 1.0)
    often, n_times = Counter(record.slowest_rank for record in run.train if record.own_s_by_rank).most_common(1)[0]
    named = sorted({rank for record in run.train for rank in record.stragglers})
    told = f"Stragglers: {', '.join(map(str, named))}; the events say when." if named else "No rank was a straggler."
    return f"""<h2>Ranks</h2>
<p>{told} The slowest rank of each record, most often rank {often} ({n_times} of {len(costs)}), takes longer than the
median of its peers by {percent(share)} of the time in steps.</p>
<figure>
{picture(ranks_svg(run), "ranks", "Time that each rank computes")}
<figcaption>Time for data and computation without waiting for other ranks. Stages of a pipeline are unequal by
themselves.</figcaption>
</figure>
"""


def _pipeline(run: RunRecord) -> str:
    """Return the section on the pipeline, or an empty text if layout.pp is 1."""
    layout = run.config.layout.layout()
    if layout.pp == 1:
        return ""
    if run.pipeline is None:
        told = (
            f"<p>No step has been recorded by all {layout.pp} ranks of the pipeline yet, or their clocks are further "
            f"apart than a step is long.</p>"
        )
    else:
        told = _step_of_pipeline(run.pipeline)
    return f"<h2>Pipeline</h2>\n{told}\n"


def _step_of_pipeline(pipeline: PipelineRecord) -> str:
    told = pipeline.numbers
    ranks = table(
        ("rank", "busy ms", "bubble planned", "bubble measured", "peak in flight"),
        [
            (
                f"{each.rank}",
                f"{1000 * each.busy_s:,.1f}",
                f"{each.bubble_planned:.1%}",
                f"{each.bubble_measured:.1%}",
                f"{each.peak_in_flight:g}",
            )
            for each in told.ranks
        ],
    )
    apart = ""
    if told.clocks_apart_s > 0.001 * told.makespan_s:
        apart = (
            f'<p class="bad">The clocks of the ranks differ by {format_seconds(told.clocks_apart_s)} or more: an '
            f"action is seen to start before what it needs was made, and rows are shifted by as much.</p>\n"
        )
    return f"""<p>In step {told.step:,} the ranks did nothing for {told.bubble_measured:.1%} of the time; the schedule,
{escape(told.schedule)}, leaves {told.bubble_planned:.1%}. For {told.bubble_waiting:.1%} another rank had not yet
computed the input of the next action; in the rest, {told.bubble_measured - told.bubble_waiting:.1%}, the input was
being sent, or the rank started late.</p>
{apart}<figure>
{_timelines(pipeline)}
<figcaption>{READING}</figcaption>
</figure>
{ranks}
<p class="quiet">A bubble is the share of the time from the first start of any rank to the last end of any. In flight:
micro-batches between their F and the end of their B or I, each weighted by its part of the rank's layers.</p>"""


def _layout(run: RunRecord) -> str:
    layout = run.config.layout.layout()
    stages = f"The layers are partitioned into {layout.n_stages} stages; the schedule is {layout.pp_schedule}. "
    told = f"{layout_in_words(layout)}. {stages if layout.pp > 1 else ''}{held_in_words(layout)}"
    return f"<p>{escape(told)}</p>\n<p>A step trains on {escape(batch_in_words(run.config))}.</p>"


def _where(run: RunRecord) -> str:
    """Return date, host, device and versions of the newest start, if they are recorded."""
    if not run.starts:
        return ""
    start = run.starts[-1]
    commit = f", git commit {start.git_commit[:12]}" if start.git_commit else ""
    device = f"{start.world_size} x {start.device} on {start.host}"
    versions = f"torch {start.torch}, shardwright {start.shardwright}{commit}"
    return f"<br>{escape(f'{_date(start.time)}, {device}; {versions}')}"


def _starts(run: RunRecord) -> str:
    """Return the section on a run's starts and its speed on each layout, or an empty text if it was never resumed."""
    if len(run.starts) < 2:
        return ""
    ends = [*(start.step for start in run.starts[1:]), max(run.last_step, run.starts[-1].step)]
    rows = []
    for start, end in zip(run.starts, ends, strict=True):
        speeds = [record.tokens_per_s for record in run.train if start.step < record.step <= end]
        told = (
            f"{start.step + 1:,} to {end:,}" if end > start.step else "none",
            start.layout,
            format_count(median(speeds)) if speeds else "n/a",
            _date(start.time),
            start.host,
            start.device,
            start.git_commit[:12] if start.git_commit else "",
        )
        rows.append(tuple(map(escape, told)))
    names = ("steps", "layout", "median tokens/s", "started", "host", "device", "git commit")
    return f"<h2>Starts</h2>\n{table(names, rows)}\n"


def _events(run: RunRecord) -> str:
    """Return the section on faults and omissions, or an empty text if the run has none."""
    if not run.faults:
        return ""
    rows = [
        tuple(
            map(
                escape,
                (
                    _date(event.time),
                    event.kind,
                    f"{event.step:,}",
                    "all" if event.rank is None else str(event.rank),
                    event.text.partition("\n")[0],
                ),
            )
        )
        for event in run.faults
    ]
    told = table(("time", "event", "after step", "rank", "what"), rows)
    return f"<h2>Events</h2>\n{told}\n"


def _date(time: str | None) -> str:
    """Return a time as, for example, `2026-11-22 10:52 UTC`."""
    return "" if time is None else f"{datetime.fromisoformat(time).astimezone(UTC):%Y-%m-%d %H:%M} UTC"


def _checkpoints(run: RunRecord, told: RunHeadline) -> str:
    if not run.checkpoints:
        return "<p>None has been saved.</p>"
    items = "\n".join(f"<li><code>{escape(name)}</code></li>" for name in run.checkpoints)
    more = "take more steps" if told.steps >= told.planned_steps else "go on from the last one"
    newest = run.folder / CHECKPOINTS / run.checkpoints[-1]
    return f"""<ul>
{items}
</ul>
<p>To {more}, on these ranks or others:</p>
<pre>{escape(run.resume_command)}</pre>
<p class="quiet">Another run begins from one of them with
<code>--set checkpoint.resume={escape(str(newest))} --set out=...</code></p>"""
