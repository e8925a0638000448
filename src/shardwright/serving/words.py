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
    listed = {result.layout for result in plan.best}
    late = {result.layout: result for result in reversed(plan.missed)}
    by_layout: dict[ServingLayout, list[ServingOption]] = {}
    for option in plan.options:
        by_layout.setdefault(option.layout, []).append(option)
    rows: list[tuple[float, ServingLayout, ServingOption | None, str]] = []
    for at, layout in enumerate(plan.layouts):
        if layout in listed:
            continue
        if layout not in by_layout:
            rows.append((-1.0, layout, None, _too_large(plan, at)))
            continue
        option, kept = _best_of(plan.task, by_layout[layout])
        if not kept:
            rows.append((0.0, layout, option, _missed(plan.task, option)))
        elif layout in late:
            rows.append((0.5, layout, option, _late(plan.task, late[layout])))
        elif chosen is not None:
            rows.append((option.per_accelerator, layout, option, _slower(plan.task, option, chosen)))
    for _, layout, best, why in sorted(rows, key=lambda row: -row[0]):
        yield layout, best, why


def _best_of(task: ServingTask, options: list[ServingOption]) -> tuple[ServingOption, bool]:
    kept = [option for option in options if keeps(task, option)]
    if kept:
        return max(kept, key=lambda option: (option.per_accelerator, -option.tpot_s)), True
    return min(options, key=lambda option: excess(task, option)), False


def usable(task: ServingTask) -> str:
    """Return the memory of an accelerator that the engine uses, as text."""
    whole = format_bytes(task.usable_bytes)
    share = task.engine.memory_share
    return whole if share == 1 else f"{whole}, {share:.0%} of its memory, as {task.engine.name} takes"


def _too_large(plan: ServingPlan, at: int) -> str:
    weights, working, token, _ = plan.memory.layout_bytes(at)
    if weights + working > plan.task.usable_bytes:
        return f"weights {format_bytes(weights)} + {format_bytes(working)} of {usable(plan.task)}"
    return f"no room for one request: {format_bytes(token * plan.task.length)} of cache next to the weights"


def _missed(task: ServingTask, option: ServingOption) -> str:
    parts = []
    if option.ttft_s > task.ttft_s:
        parts.append(f"first token after {format_seconds(option.ttft_s)}, limit {format_seconds(task.ttft_s)}")
    if option.tpot_s > task.tpot_s:
        parts.append(f"a further token each {format_seconds(option.tpot_s)}, limit {format_seconds(task.tpot_s)}")
    if task.rate_per_s is not None and option.tokens_per_s < task.rate_per_s * task.output_len:
        parts.append(f"{option.tokens_per_s / task.output_len:.3g} of {task.rate_per_s:g} requests/s")
    return f"{' and '.join(parts)}, with {option.batch} {'requests' if option.batch > 1 else 'request'}"


def _late(task: ServingTask, result: SimulatedOption) -> str:
    """Return why an option that keeps the limits on average misses them for the percentile of its requests."""
    first, further = result.ttft_s(PERCENTILE), result.tpot_s(PERCENTILE)
    parts = [f"first token within {format_seconds(first)}"] * (first > task.ttft_s)
    parts += [f"further ones within {format_seconds(further)}"] * (further > task.tpot_s)
    parts = parts or ["requests arrive faster than it serves them"]
    return f"{PERCENTILE} of 100 requests: {', '.join(parts)}, with {result.option.batch}"


def _slower(task: ServingTask, option: ServingOption, chosen: SimulatedOption) -> str:
    rate, best = option.per_accelerator, chosen.option.per_accelerator
    share = rate / best - 1
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
        "best": [option_document(task, result) for result in plan.best],
        "pareto": [_option_document(option) for option in plan.pareto],
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


def option_document(task: ServingTask, result: SimulatedOption) -> dict[str, Any]:
    """Return a simulated option as JSON."""
    return {
        "layout": result.layout.as_json(),
        "batch": result.option.batch,
        "tokens_per_s": result.tokens_per_s,
        "tokens_per_s_per_accelerator": result.per_accelerator,
        "tokens_per_s_per_user": result.per_user,
        **_latencies(result),
        "interval": None if task.serving.on_host else _intervals(result),
        "cost_per_million_tokens": result.cost_per_million(task),
    }


def _latencies(result: SimulatedServing) -> dict[str, dict[str, float]]:
    """Return percentiles of the time to the first token and of the time of a further token."""
    values = {"ttft_s": result.ttft_s, "tpot_s": result.tpot_s}
    return {name: {f"p{share}": value(share) for share in (50, 90, 95, 99)} for name, value in values.items()}


def _intervals(result: SimulatedOption) -> dict[str, tuple[float, float]]:
    """Return the 80 % intervals of the rate and of the medians of both latencies."""
    return {
        "tokens_per_s": interval(result.tokens_per_s, RATE),
        "ttft_s": interval(result.ttft_s(50), FIRST),
        "tpot_s": interval(result.tpot_s(50), FURTHER),
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
