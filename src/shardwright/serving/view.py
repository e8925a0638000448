"""The document of `plan serve`: the best layout with its times and memory, the next best ones, and why others lose."""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice
from math import inf
from typing import TYPE_CHECKING

import numpy as np

from shardwright.planner.error_summary import INTERVAL, bounds_in_words
from shardwright.serving.interval import FIRST, FURTHER, RATE, interval
from shardwright.serving.search import PERCENTILE, ServingOption, ServingPlan, ServingTask, SimulatedOption
from shardwright.serving.separate import SimulatedSplit
from shardwright.serving.setting import Serving
from shardwright.serving.simulate import ServedTimes
from shardwright.serving.words import reasons, serving_data, usable
from shardwright.system.units import format_bytes, format_count, format_seconds
from shardwright.view.document import (
    COUNT,
    ROUNDED,
    SECONDS,
    Column,
    Fact,
    Facts,
    Note,
    Part,
    Picture,
    Quantity,
    Section,
    Table,
    VerbDocument,
)
from shardwright.view.style import COLOURS, plain_log_ticks, rendered

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SIZE_IN = (10, 4.2)
NAMED = 6
"""Points of the Pareto curve that have their layout written next to them."""
OTHERS = 20
POINTS = 12
TOKENS_PER_S = Quantity("{:,.1f}".format)


def serving_document(
    plan: ServingPlan, name: str, apart: SimulatedSplit | None, separate: bool, remedies: Sequence[str]
) -> VerbDocument:
    """Return the document of a plan of serving the model `name`. `apart`: prefill and decode on separate accelerators,
    if that was asked for (`separate`) and is possible; `remedies`: changes that would make the model fit."""
    parts: list[Part] = [*task_notes(plan.task, name, plan.n_settings)]
    if not plan.options:
        parts += _nothing_fits(plan, remedies)
    elif not plan.best:
        parts += [*_no_limits_kept(plan), _curve(plan)]
    else:
        parts += [*_best(plan, plan.best[0]), _curve(plan), *_next_best(plan)]
    if plan.options:
        parts += _others(plan)
    if plan.best and plan.task.concurrency is None and plan.task.rate_per_s is None:
        parts += _pareto(plan)
    if separate:
        parts += _separate(plan, apart)
    title = f"{name} on {plan.task.serving.cluster.name}: how to serve it"
    return VerbDocument(title, serving_data(plan, name, apart, remedies), parts)


def task_notes(task: ServingTask, name: str, n_settings: int) -> Iterator[Note]:
    """Yield the serving task and the number of priced settings."""
    serving = task.serving
    yield Note(
        f"{name}, {format_count(serving.model.n_parameters)} parameters, on {serving.cluster.name}: prompts of "
        f"{task.input_len:,} tokens, answers of {task.output_len:,}; weights {serving.precision}, cache "
        f"{serving.kv_precision}; constants of {task.engine.name}"
    )
    demand = "as many requests as give most tokens/s"
    if task.concurrency is not None:
        demand = f"{task.concurrency:,} requests at a time"
    elif task.rate_per_s is not None:
        demand = f"{task.rate_per_s:g} requests/s"
    limits = [
        f"{what} {format_seconds(limit)}"
        for what, limit in (("first token", task.ttft_s), ("further token", task.tpot_s))
        if limit < inf
    ]
    limited = f"; limits for {PERCENTILE} of 100 requests: {', '.join(limits)}" if limits else ""
    yield Note(f"{demand}{limited}; {n_settings:,} settings priced")


def _best(plan: ServingPlan, best: SimulatedOption) -> Iterator[Part]:
    task, at = plan.task, plan.layouts.index(best.layout)
    weights, working, token, cache = plan.memory.layout_bytes(at)
    yield Section(f"best: {best.layout}, at most {best.option.batch:,} requests in each instance")
    details = f"{best.per_accelerator:,.0f} of each accelerator, {best.per_user:,.1f} of each user"
    if not task.serving.on_host:
        details += f"; {INTERVAL} {bounds_in_words(interval(best.tokens_per_s, RATE), '{:,.0f}'.format)}"
    rows = [
        Fact("tokens/s", f"{best.tokens_per_s:,.0f}", details),
        *_latencies(best.served, task.serving),
        Fact(
            "cache",
            format_bytes(cache),
            f"for {plan.largest[at]:,.0f} requests of {format_bytes(token * task.length)} on each rank, next to "
            f"weights of {format_bytes(weights)} and working memory of {format_bytes(working)}",
        ),
    ]
    if (cost := best.cost_per_million(task)) is not None:
        rows.append(
            Fact("cost", f"{cost:.3g}", f"for a million output tokens at {task.price_per_hour:g} an accelerator-hour")
        )
    if task.speculation.drafted:
        accepted = f"{task.speculation.accepted:.2f} tokens"
        rows.append(Fact("speculation", accepted, f"in each pass, {task.speculation.drafted} of them drafted"))
    yield Facts(rows)


def _latencies(served: ServedTimes, serving: Serving) -> Iterator[Fact]:
    """Yield the seconds to the first token and of each further token, with the interval of the median."""
    for name, value in ((FIRST, served.first_s), (FURTHER, served.further_s)):
        median, *rest = (format_seconds(value(share)) for share in (50, PERCENTILE, 99))
        more = "".join(f", {latency} for {share} of 100" for latency, share in zip(rest, (PERCENTILE, 99), strict=True))
        if not serving.on_host:
            more += f"; {INTERVAL} of the median {bounds_in_words(interval(value(50), name))}"
        yield Fact(name, median, f"for 50 of 100{more}")


def _next_best(plan: ServingPlan) -> Iterator[Part]:
    yield Section(f"The best {len(plan.best)}, simulated")
    yield Table(
        (
            Column("layout"),
            Column("batch", COUNT),
            Column("tokens/s each", ROUNDED),
            Column("of a user", TOKENS_PER_S),
            *(Column(name, SECONDS) for name in ("first token", f"p{PERCENTILE}", "further", f"p{PERCENTILE}")),
        ),
        [
            (
                result.layout,
                result.option.batch,
                result.per_accelerator,
                result.per_user,
                *(value(at) for value in (result.ttft_s, result.tpot_s) for at in (50, PERCENTILE)),
            )
            for result in plan.best
        ],
    )


def _others(plan: ServingPlan) -> Iterator[Part]:
    others = reasons(plan)
    rows = [(layout, why) for layout, _, why in islice(others, OTHERS)]
    if rows:
        more = sum(1 for _ in others)
        yield Section("Other layouts, by closed forms")
        rest = f"and {more:,} more; all of them with --json" if more else ""
        yield Table((Column("layout"), Column("why not")), rows, rest)


def _pareto(plan: ServingPlan) -> Iterator[Part]:
    yield Section("Tokens/s of an accelerator against tokens/s of a user; no setting has more of both")
    speeds = Column("of a user", TOKENS_PER_S), Column("of an accelerator", TOKENS_PER_S)
    step = max(1, -(-len(plan.pareto) // POINTS))
    yield Table(
        (*speeds, Column("batch", COUNT), Column("layout")),
        [(1 / option.tpot_s, option.per_accelerator, option.batch, option.layout) for option in plan.pareto[::step]],
    )


def _nothing_fits(plan: ServingPlan, remedies: Sequence[str]) -> Iterator[Note]:
    """Yield the memory that the weights need, and the changes that would make them fit."""
    least = int(np.argmin(plan.memory.weights + plan.memory.working))
    weights, working, token, _ = plan.memory.layout_bytes(least)
    needed = (
        f"{plan.layouts[least]} needs least, {format_bytes(weights)} of weights + {format_bytes(working)} of working "
        f"memory + {format_bytes(token * plan.task.length)} for one request, of {usable(plan.task)}"
    )
    yield Note(needed, "nothing fits", "bad")
    if remedies:
        yield Note("; ".join(remedies), "would fit")
    else:
        yield Note("no other precision and no larger cluster would make it fit")


def _no_limits_kept(plan: ServingPlan) -> Iterator[Note]:
    """Yield the best possible value of each limited quantity."""
    task = plan.task
    yield Note("no layout keeps the limits", tone="bad")
    if task.ttft_s < inf:
        first = min(plan.options, key=lambda option: option.ttft_s)
        shortest = f"{format_seconds(first.ttft_s)}, {first.layout} with {first.batch}"
        yield Note(shortest, "shortest time to the first token")
    if task.tpot_s < inf:
        further = min(plan.options, key=lambda option: option.tpot_s)
        shortest = f"{format_seconds(further.tpot_s)}, {further.layout} with {further.batch}"
        yield Note(shortest, "shortest time of a further token")
    if task.rate_per_s is not None:
        most = max(plan.options, key=lambda option: option.tokens_per_s)
        requests = f"{most.tokens_per_s / task.output_len:.3g} requests/s, {most.layout} with {most.batch}"
        yield Note(f"{requests}; {task.rate_per_s:g} requests/s were asked for", "most requests")
    if plan.missed:
        nearest = min(
            plan.missed,
            key=lambda option: max(option.ttft_s(PERCENTILE) / task.ttft_s, option.tpot_s(PERCENTILE) / task.tpot_s),
        )
        yield Note(
            f"{nearest.layout} with {nearest.option.batch}: {PERCENTILE} of 100 requests have their first token within "
            f"{format_seconds(nearest.ttft_s(PERCENTILE))} and further ones within "
            f"{format_seconds(nearest.tpot_s(PERCENTILE))}",
            "nearest as simulated",
        )


def _separate(plan: ServingPlan, apart: SimulatedSplit | None) -> Iterator[Part]:
    """Yield prefill and decode on separate accelerators, compared with both on the same ones."""
    yield Section("Prefill and decode on separate accelerators, simulated")
    if apart is None:
        yield Note("no split of the cluster fits and keeps the limits")
        return
    split, crossed, together = apart.split, apart.crossed, ""
    if plan.best:
        share = apart.per_accelerator / plan.best[0].per_accelerator - 1
        together = f", {share:+.0%} against the best layout above"
    under_way = f"; {apart.requests:,} requests at a time" if apart.requests is not None else ""
    queued, moved = (format_seconds(float(times_s.mean())) for times_s in (crossed.queued_s, crossed.transfer_s))
    yield Facts(
        [
            Fact("prefill", f"{split.readers} x ({split.prefill})"),
            Fact(
                "decode",
                f"{split.writers} x ({split.decode})",
                f"with at most {split.batch:,} requests each{under_way}",
            ),
            Fact(
                "tokens/s",
                f"{apart.tokens_per_s:,.0f}",
                f"{apart.per_accelerator:,.0f} of each accelerator{together}",
            ),
            *_latencies(crossed.served, plan.task.serving),
            Fact(
                "of the first token",
                queued,
                f"in the line before prefill, {moved} for moving the cache, on average",
            ),
        ]
    )


def _curve(plan: ServingPlan) -> Picture:
    return Picture(
        "pareto",
        "Tokens a second of an accelerator against tokens a second of a user",
        partial(pareto_svg, plan),
        "Each point is a layout with a batch, by closed forms. No setting has more of both than one on the line.",
    )


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
    users, rates = zip(*((1 / option.tpot_s, option.per_accelerator) for option in options), strict=True)
    ax.scatter(users, rates, s=5, color=COLOURS["grid"], label="layouts and batches", zorder=1)
    line = [(1 / option.tpot_s, option.per_accelerator) for option in pareto]
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
