"""`Find the fastest`: the search of `plan` for the job of a page, as cards that load into the sliders."""

from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlencode

from shardwright.explore.page import templates
from shardwright.explore.state import JOB_DEFAULTS, parse, written_layout
from shardwright.explore.worker import Progress
from shardwright.layout.key import written
from shardwright.planner.alternatives import Alternative, runners_up, well_known
from shardwright.planner.nearest import remedies
from shardwright.planner.search import Plan, search
from shardwright.planner.words import compared, merged, remarks, verdict, why
from shardwright.system.control_groups import usable_cores
from shardwright.system.errors import InputError
from shardwright.system.units import format_bytes, format_seconds


class LayoutCard(NamedTuple):
    """A layout that a search has found. `query`: the address of its page, None if it does not fit; then `slower` is
    the memory that it lacks."""

    name: str
    layout: str
    query: str | None
    step: str
    memory: str
    slower: str
    why: str


def find_fastest(progress: Progress, query: str, hardware: Path | None) -> str:
    """Return the cards of the search for the job of an address as HTML. Raises InputError for a problem of the job."""
    parsed = parse(query, hardware)
    if parsed.job is None:
        raise InputError(*parsed.problems)
    margin = float(parsed.value("memory_margin"))
    plan = search(parsed.job, memory_margin=margin, processes=usable_cores(), progress=progress)
    given = {key: parsed.values[key] for key in JOB_DEFAULTS if key in parsed.values}
    cards = [] if plan.recommended is None else _cards(plan, given)
    instead = [] if plan.recommended is not None else [remedy.what for remedy in remedies(parsed.job, margin, None)]
    notes = [] if plan.recommended is None else remarks(plan)
    return (
        templates()
        .get_template("cards.html")
        .render(plan=plan, cards=cards, remarks=notes, remedies=instead, limit=format_bytes(plan.limit_bytes))
    )


def _cards(plan: Plan, given: dict[str, str]) -> list[LayoutCard]:
    """Return the layouts to choose from, and the best layouts of other kinds, each with the reason why it is not the
    recommended one."""
    taken = plan.recommended
    assert taken is not None
    others = merged([*runners_up(plan), *well_known(plan)])
    first = [(name, alternative, "") for name, alternative in compared(plan)]
    rest = [(name, other, why(taken, other)) for name, other in others if not other.as_fast(taken)]
    return [_card(plan, name, alternative, reason, given) for name, alternative, reason in (*first, *rest)]


def _card(plan: Plan, name: str, alternative: Alternative, reason: str, given: dict[str, str]) -> LayoutCard:
    taken = plan.recommended
    assert taken is not None
    return LayoutCard(
        name,
        str(alternative.choice),
        urlencode(given | {k: written(v) for k, v in written_layout(plan.job, alternative.choice).items()})
        if alternative.priced
        else None,
        format_seconds(alternative.priced.step_s) if alternative.priced else "",
        format_bytes(alternative.priced.peak_bytes) if alternative.priced else "",
        verdict(taken, alternative, plan.limit_bytes) if alternative.choice != taken.choice else "",
        reason,
    )
