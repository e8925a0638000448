"""A plan of serving on one HTML page that needs no other file, with its Pareto curve."""

from html import escape
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING

from shardwright.serving.search import PERCENTILE, ServingOption, ServingPlan, ServingTask, SimulatedOption
from shardwright.serving.words import SIMULATED, reasons, simulated_cells
from shardwright.system.files import write_whole
from shardwright.system.units import format_count, format_seconds
from shardwright.view.html import document, facts, picture, table
from shardwright.view.style import COLOURS, plain_log_ticks, rendered

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SIZE_IN = (10, 4.2)
NAMED = 6
"""Points of the Pareto curve that have their layout written next to them."""
MOST_OTHERS = 40


def write_page(plan: ServingPlan, name: str, path: str | Path) -> None:
    """Write the page of a plan in which at least one layout fits, replacing an existing file. `name`: the model's name.

    Raises InputError if `path` cannot be written.
    """
    write_whole(Path(path), _page(plan, name).encode("utf-8"))


def _page(plan: ServingPlan, name: str) -> str:
    task = plan.task
    title = f"{name} on {task.serving.cluster.name}"
    limits = "".join(
        f", {what} within {format_seconds(limit)}"
        for what, limit in (("first token", task.ttft_s), ("further tokens", task.tpot_s))
        if limit < inf
    )
    best = plan.best[0] if plan.best else None
    chosen = (
        f"<h2>The best layout</h2>\n<pre>{escape(str(best.layout))}, at most {best.option.batch:,} requests in each "
        f"instance</pre>\n{facts(_numbers(task, best))}"
        if best
        else '<p class="bad">No layout keeps the limits.</p>'
    )
    body = f"""<header>
<h1>{escape(title)}: how to serve it</h1>
<p class="quiet">prompts of {task.input_len:,} tokens, answers of {task.output_len:,}{limits};
{format_count(task.serving.model.n_parameters)} parameters in {task.serving.precision}, cache in
{task.serving.kv_precision}; {plan.n_settings:,} layouts and batches priced</p>
</header>
{chosen}
<figure>
{picture(pareto_svg(plan), "pareto", "Tokens a second of an accelerator against those of a user", {})}
<figcaption>Each point is a layout with a batch, by closed forms; on the line are those that no other beats in
both.</figcaption>
</figure>
<h2>The best {len(plan.best)}, simulated</h2>
{
        table(
            SIMULATED,
            [[escape(cell) for cell in simulated_cells(each)] for each in plan.best],
            "top",
        )
    }
<h2>Others</h2>
{
        table(
            ("layout", "why not"),
            [[escape(str(layout)), escape(why)] for layout, _, why in list(reasons(plan))[:MOST_OTHERS]],
            "others",
        )
    }"""
    return document(f"{title}: serving", body, _STYLE)


_STYLE = """table.top td:first-child, table.top th:first-child, table.others td, table.others th { text-align: left; }
table.others td, table.top td { font-size: .875rem; border-bottom: 1px solid var(--grid); }
"""


def _numbers(task: ServingTask, best: SimulatedOption) -> list[tuple[str, str, str]]:
    rows = [
        ("tokens per second", f"{best.tokens_per_s:,.0f}", f"{best.per_accelerator:,.0f} of each accelerator"),
        ("of a user", f"{best.per_user:,.1f}", "tokens per second"),
        ("first token", format_seconds(best.ttft_s()), f"{format_seconds(best.ttft_s(PERCENTILE))} for {PERCENTILE} %"),
        (
            "further token",
            format_seconds(best.tpot_s()),
            f"{format_seconds(best.tpot_s(PERCENTILE))} for {PERCENTILE} %",
        ),
    ]
    if (cost := best.cost_per_million(task)) is not None:
        rows.append(("a million tokens", f"{cost:.3g}", f"at {task.price_per_hour:g} an accelerator-hour"))
    return rows


def pareto_svg(plan: ServingPlan) -> str:
    """Draw tokens/s of an accelerator over tokens/s of a user: all settings, the Pareto-optimal ones, and the best."""

    def compose(figure: "Figure") -> None:
        ax = figure.add_axes((0.075, 0.12, 0.9, 0.84))
        _points(ax, plan.options, plan.pareto)
        if plan.best:
            best = plan.best[0]
            ax.plot(best.per_user, best.per_accelerator, marker="*", markersize=13, color=COLOURS["limit"], linewidth=0,
                    label="the best, simulated")  # fmt: skip
        if plan.task.tpot_s < inf:
            ax.axvline(
                1 / plan.task.tpot_s, color=COLOURS["limit"], linewidth=1.2, linestyle=(0, (5, 3)), label="limit"
            )
        ax.set_xlabel("tokens/s of a user", color=COLOURS["quiet"])
        ax.set_ylabel("tokens/s of an accelerator", color=COLOURS["quiet"])
        ax.legend(loc="upper right")

    return rendered(SIZE_IN, compose, "svg", transparent=True).decode("utf-8")


def _points(ax: "Axes", options: list[ServingOption], pareto: list[ServingOption]) -> None:
    users, each = zip(*((1 / option.tpot_s, option.per_accelerator()) for option in options), strict=True)
    ax.scatter(users, each, s=5, color=COLOURS["grid"], label="layouts and batches", zorder=1)
    line = [(1 / option.tpot_s, option.per_accelerator()) for option in pareto]
    ax.plot(*zip(*line, strict=True), color=COLOURS["curve"], marker="o", markersize=3, label="none has more of both")
    step = max(1, len(pareto) // NAMED)
    for option, place in list(zip(pareto, line, strict=True))[::step]:
        ax.annotate(
            f"{option.layout}, {option.batch}",
            place,
            (5, 3),
            textcoords="offset points",
            fontsize=8.5,
            color=COLOURS["ink"],
        )
    ax.set_xscale("log")
    ax.set_yscale("log")
    plain_log_ticks(ax)
