"""The page of serving a model: its form, its command, and the curve of throughput against interactivity."""

import os.path
import shlex
from collections.abc import Sequence
from math import inf, log
from pathlib import Path
from urllib.parse import urlencode

from markupsafe import Markup

from shardwright.explore.page import templates
from shardwright.explore.pictures import KeyEntry, PagePicture
from shardwright.explore.state import LONGEST, SERVE_FIELDS, read_query
from shardwright.model.presets import PRESETS
from shardwright.serving.search import ServingOption, ServingPlan
from shardwright.system.units import format_seconds
from shardwright.view.document import Picture, VerbDocument

DEFAULTS = {key: field.default for key, field in SERVE_FIELDS.items() if field.default}
MOST_DOTS = 1500


def serving_values(query: str) -> tuple[dict[str, str], list[str]]:
    """Return the fields of a query string, and its problems."""
    problems: list[str] = []
    values = read_query(query, tuple(SERVE_FIELDS), problems)
    model = values.get("model", "")
    if Path(model).suffix in (".json", ".toml") or model.startswith(("/", ".", "~")) or os.path.isdir(model):
        problems.append(f"model={model[:LONGEST]}: a page reads no file; name a preset, or give sizes")
    return values, problems


def serving_page(query: str, hardware: Path | None) -> str:
    """Return the page of serving for a query string."""
    values, problems = serving_values(query) if query else (DEFAULTS, [])
    words = ["shardwright", "plan", "serve"]
    for key, text in values.items():
        words += [f"--{key.replace('_', '-')}", text]
    words += [] if hardware is None else ["--hardware", str(hardware)]
    template = templates().get_template("serve.html")
    return template.render(
        fields=SERVE_FIELDS, values=values, problems=problems, models=tuple(PRESETS), command=shlex.join(words),
        query="", here="serve", title="Serve a model", serve_query=urlencode(values),
    )  # fmt: skip


def served_html(plan: ServingPlan, document: VerbDocument) -> str:
    """Return the result of a search: the curve, and the document of `plan serve` without its picture."""
    parts = [part for part in document.parts if not isinstance(part, Picture)]
    return templates().get_template("served.html").render(pictures=[curve(plan)] if plan.options else [], parts=parts)


def curve(plan: ServingPlan) -> PagePicture:
    """Return tokens/s of an accelerator over tokens/s of a user, on logarithmic axes, with the limits of the task."""
    task, step = plan.task, -(-len(plan.options) // MOST_DOTS)
    users, rates = zip(*((1 / one.tpot_s, one.per_accelerator) for one in plan.options), strict=True)
    limit = 1 / task.tpot_s if task.tpot_s < inf else users[0]
    low, high = min(*users, limit) / 1.15, max(*users, limit) * 1.15
    bottom, top = min(rates) / 1.15, max(rates) * 1.15

    def x(value: float) -> float:
        return 1000 * log(value / low) / log(high / low)

    def y(value: float) -> float:
        return 1000 * (1 - log(value / bottom) / log(top / bottom))

    def dots(options: Sequence[ServingOption], kind: str) -> Markup:
        d = "".join(f"M{x(1 / one.tpot_s):.0f} {y(one.per_accelerator):.0f}h0" for one in options)
        return Markup('<path class="dots {}" d="{}"/>').format(kind, d)

    late = [one for one in plan.options if one.ttft_s > task.ttft_s]
    front = "L".join(f"{x(1 / one.tpot_s):.0f} {y(one.per_accelerator):.0f}" for one in plan.pareto)
    inner = dots([one for one in plan.options if one.ttft_s <= task.ttft_s][::step], "") + dots(late[::step], "late")
    inner += Markup('<path class="front" d="M{}"/>').format(front)
    key = [KeyEntry("quiet", "layouts and batches", ""), KeyEntry("curve", "none has more of both", "")]
    if late:
        key.append(KeyEntry("data", "first token later than the limit of", format_seconds(task.ttft_s)))
    if task.tpot_s < inf:
        inner += Markup('<path class="limit" d="M{0:.0f} 0V1000"/>').format(x(limit))
        key.append(KeyEntry("limit", "dashed line: limit of a further token", format_seconds(task.tpot_s)))
    if plan.best:
        best = plan.best[0]
        inner += Markup('<path class="dots best" d="M{:.0f} {:.0f}h0"/>').format(
            x(best.per_user), y(best.per_accelerator)
        )
        key.append(KeyEntry("limit", "the best, simulated", f"{best.layout}"))
    drawn = Markup(
        '<svg x="9%" y="6" width="90%" height="260" viewBox="0 0 1000 1000" preserveAspectRatio="none">{}</svg>'
    )
    parts = drawn.format(inner)
    for value, at in ((top / 1.15, y(top / 1.15)), (bottom * 1.15, y(bottom * 1.15))):
        parts += Markup('<text x="8.5%" y="{:.0f}" text-anchor="end">{:,.0f}</text>').format(10 + at * 0.26, value)
    for value in (low * 1.15, (low * high) ** 0.5, high / 1.15):
        parts += Markup('<text x="{:.1f}%" y="282" text-anchor="middle">{:,.0f}</text>').format(
            9 + 0.09 * x(value), value
        )
    picture = Markup('<svg width="100%" height="290" role="img" aria-label="{}">{}</svg>').format(
        "tokens a second of an accelerator against tokens a second of a user", parts
    )
    caption = (
        "Upwards: tokens/s of an accelerator; to the right: tokens/s of a user. Each point is a layout with a batch, "
        "by closed forms; the large point is simulated."
    )
    return PagePicture("Throughput against interactivity", picture, key, caption)
