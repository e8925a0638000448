"""The reasons why layouts lose, as sentences with numbers, and a plan as JSON data."""

from collections.abc import Iterator, Sequence
from math import inf
from typing import Any

from shardwright.serving.interval import FIRST, FURTHER, RATE, interval
from shardwright.serving.search import (
    PERCENTILE,
    ServingLayout,
    ServingOption,
    ServingPlan,
    ServingTask,
    SimulatedOption,
    SimulatedServing,
    excess,
    keeps,
)
from shardwright.serving.separate import SimulatedSplit
from shardwright.system.units import format_bytes, format_seconds


def reasons(plan: ServingPlan) -> Iterator[tuple[ServingLayout, ServingOption | None, str]]:
    """Yield every layout that is not among the best, with its best option by closed forms and the reason why it loses;
    the layouts that come nearest first."""
    chosen = plan.best[0] if plan.best else None
    listed = {each.layout for each in plan.best}
    late = {each.layout: each for each in reversed(plan.missed)}
    by_layout: dict[ServingLayout, list[ServingOption]] = {}
    for option in plan.options:
        by_layout.setdefault(option.layout, []).append(option)
    found: list[tuple[float, ServingLayout, ServingOption | None, str]] = []
    for at, layout in enumerate(plan.layouts):
        if layout in listed:
            continue
        if layout not in by_layout:
            found.append((-1.0, layout, None, _too_large(plan, at)))
            continue
        option, kept = _best_of(plan.task, by_layout[layout])
        if not kept:
            found.append((0.0, layout, option, _missed(plan.task, option)))
        elif layout in late:
            found.append((0.5, layout, option, _late(plan.task, late[layout])))
        elif chosen is not None:
            found.append((option.per_accelerator, layout, option, _slower(plan.task, option, chosen)))
    for _, layout, best, why in sorted(found, key=lambda each: -each[0]):
        yield layout, best, why


def _best_of(task: ServingTask, options: list[ServingOption]) -> tuple[ServingOption, bool]:
    kept = [each for each in options if keeps(task, each)]
    if kept:
        return max(kept, key=lambda each: (each.per_accelerator, -each.tpot_s)), True
    return min(options, key=lambda each: excess(task, each)), False


def usable(task: ServingTask) -> str:
    """Return the memory of an accelerator that the engine uses, as text."""
    whole = format_bytes(task.usable_bytes)
    share = task.engine.memory_share
    return whole if share == 1 else f"{whole}, {share:.0%} of its memory, as {task.engine.name} takes"


def _too_large(plan: ServingPlan, at: int) -> str:
    weights, working, token, _ = plan.memory.of_layout(at)
    if weights + working > plan.task.usable_bytes:
        return f"weights {format_bytes(weights)} + {format_bytes(working)} of {usable(plan.task)}"
    return f"no room for one request: {format_bytes(token * plan.task.length)} of cache beside the weights"


def _missed(task: ServingTask, option: ServingOption) -> str:
    found = []
    if option.ttft_s > task.ttft_s:
        found.append(f"first token after {format_seconds(option.ttft_s)}, limit {format_seconds(task.ttft_s)}")
    if option.tpot_s > task.tpot_s:
        found.append(f"a further token each {format_seconds(option.tpot_s)}, limit {format_seconds(task.tpot_s)}")
    if task.rate_per_s is not None and option.tokens_per_s < task.rate_per_s * task.output_len:
        found.append(f"{option.tokens_per_s / task.output_len:.3g} of {task.rate_per_s:g} requests/s")
    return f"{' and '.join(found)}, with {option.batch} {'requests' if option.batch > 1 else 'request'}"


def _late(task: ServingTask, found: SimulatedOption) -> str:
    """Return why an option that keeps the limits on average misses them for the percentile of its requests."""
    first, further = found.ttft_s(PERCENTILE), found.tpot_s(PERCENTILE)
    said = [f"first token within {format_seconds(first)}"] * (first > task.ttft_s)
    said += [f"further ones within {format_seconds(further)}"] * (further > task.tpot_s)
    said = said or ["requests arrive faster than it serves them"]
    return f"{PERCENTILE} of 100 requests: {', '.join(said)}, with {found.option.batch}"


def _slower(task: ServingTask, option: ServingOption, chosen: SimulatedOption) -> str:
    each, best = option.per_accelerator, chosen.option.per_accelerator
    share = each / best - 1
    batch = option.batch * option.layout.replicas, chosen.option.batch * chosen.layout.replicas
    users = "as many users" if batch[0] == batch[1] else f"{batch[0]:,} users, not {batch[1]:,}"
    return f"{share:+.0%} tokens/s: {users}, {1 / option.tpot_s:.3g} tokens/s each, not {1 / chosen.option.tpot_s:.3g}"


def serving_data(plan: ServingPlan, name: str, apart: SimulatedSplit | None, remedies: Sequence[str]) -> dict[str, Any]:
    """Return a plan as JSON data."""
    task, serving = plan.task, plan.task.serving
    return {
        "model": name,
        "cluster": serving.cluster.name,
        "engine": task.engine.name,
        "precision": serving.precision,
        "kv_precision": serving.kv_precision,
        "input_len": task.input_len,
        "output_len": task.output_len,
        "concurrency": task.concurrency,
        "rate_per_s": task.rate_per_s,
        "limits": {"ttft_s": _known(task.ttft_s), "tpot_s": _known(task.tpot_s), "percentile": PERCENTILE},
        "settings_priced": plan.n_settings,
        "best": [found_document(task, each) for each in plan.best],
        "pareto": [_option_document(each) for each in plan.pareto],
        "others": [
            {"layout": str(layout), "option": None if best is None else _option_document(best), "why": why}
            for layout, best, why in reasons(plan)
        ],
        "separate": None if apart is None else _separate_document(apart),
        "remedies": list(remedies),
    }


def _known(limit: float) -> float | None:
    return None if limit == inf else limit


def _option_document(option: ServingOption) -> dict[str, Any]:
    return {
        "layout": option.layout.as_json(),
        "batch": option.batch,
        "ttft_s": option.ttft_s,
        "tpot_s": option.tpot_s,
        "tokens_per_s": option.tokens_per_s,
        "tokens_per_s_per_accelerator": option.per_accelerator,
        "tokens_per_s_per_user": 1 / option.tpot_s,
    }


def found_document(task: ServingTask, found: SimulatedOption) -> dict[str, Any]:
    """Return a simulated option as JSON."""
    return {
        "layout": found.layout.as_json(),
        "batch": found.option.batch,
        "tokens_per_s": found.tokens_per_s,
        "tokens_per_s_per_accelerator": found.per_accelerator,
        "tokens_per_s_per_user": found.per_user,
        **_latencies(found),
        "interval": None if task.serving.on_host else _intervals(found),
        "cost_per_million_tokens": found.cost_per_million(task),
    }


def _latencies(found: SimulatedServing) -> dict[str, dict[str, float]]:
    """Return percentiles of the time to the first token and of the time of a further token."""
    values = {"ttft_s": found.ttft_s, "tpot_s": found.tpot_s}
    return {name: {f"p{each}": value(each) for each in (50, 90, 95, 99)} for name, value in values.items()}


def _intervals(found: SimulatedOption) -> dict[str, tuple[float, float]]:
    """Return the 80 % intervals of the rate and of the medians of both latencies."""
    return {
        "tokens_per_s": interval(found.tokens_per_s, RATE),
        "ttft_s": interval(found.ttft_s(50), FIRST),
        "tpot_s": interval(found.tpot_s(50), FURTHER),
    }


def _separate_document(apart: SimulatedSplit) -> dict[str, Any]:
    split = apart.split
    return {
        "prefill": split.prefill._asdict(),
        "decode": split.decode._asdict(),
        **{name: getattr(split, name) for name in ("readers", "writers", "batch")},
        "requests": apart.requests,
        **_latencies(apart),
        "queued_s": float(apart.crossed.queued_s.mean()),
        "transfer_s": float(apart.crossed.transfer_s.mean()),
        "tokens_per_s": apart.tokens_per_s,
        "tokens_per_s_per_accelerator": apart.per_accelerator,
    }
