"""Where a layout is not equal: switch off one thing after another, as long as it stays not equal without."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from math import gcd
from typing import Any

from shardwright.errors import LayoutError, WorkerError
from shardwright.layout import Layout
from shardwright.schedule.named import ONE_F_ONE_B
from shardwright.verify.case import Case
from shardwright.verify.compare import Report, describe
from shardwright.verify.verifier import Verifier

Setting = tuple[Case, Layout]

_PLAIN_PIPELINE: dict[str, Any] = {
    "schedule": ONE_F_ONE_B.name,
    "virtual_stages": None,
    "stage_layers": None,
    "zero_pp_gather": "step",
}


def find_culprit(verifier: Verifier, report: Report, tell: Callable[[str], None] = lambda line: None) -> str:
    """The smallest setting that still is not equal to one process, and what is left in it, in a sentence.

    `tell` is told of each trial. Every trial is a run of its own.
    """
    setting: Setting = (report.case, report.layout)
    if report.against != "one process" and _fails(verifier, setting, tell) is not True:
        return f"it equals one process: look at the other side, {report.against}"
    known: dict[Setting, bool | None] = {}
    while True:
        needed: list[str] = []
        for name, smaller in _switched_off(*setting):
            if smaller not in known:
                known[smaller] = _fails(verifier, smaller, tell)
            if known[smaller]:
                setting = smaller
                break
            if known[smaller] is False:
                needed.append(name)
        else:
            return _sentence(setting, needed)


def _fails(verifier: Verifier, setting: Setting, tell: Callable[[str], None]) -> bool | None:
    """Whether a setting is not equal; None where it cannot be run, which is another fault."""
    tell(f"trying {_name(setting)}")
    try:
        return not verifier.parity(*setting).equal
    except (LayoutError, WorkerError):
        return None


def _switched_off(case: Case, layout: Layout) -> Iterator[tuple[str, Setting]]:
    """Every setting with one thing less than this one; the largest steps first."""
    for name, changes in _fewer(layout):
        try:
            smaller = replace(layout, **_follow(layout, changes))
        except LayoutError:
            continue
        # The same microbatches, so that accumulation is not switched on by what is switched off.
        yield name, (_accumulating(case, smaller, case.accumulation(layout)), smaller)
    if case.accumulation(layout) > 1:
        yield "accumulation", (_accumulating(case, layout, 1), layout)
    if case.spec.dropout:
        yield "dropout", (replace(case, spec=replace(case.spec, dropout=0.0)), layout)


def _follow(layout: Layout, changes: dict[str, Any]) -> dict[str, Any]:
    """`changes`, with what cannot stay as it is beside them: ep, where fewer ranks are left to deal experts out to, and
    how a pipeline gathers under ZeRO-3."""
    degrees = {axis: changes.get(axis, layout.degree(axis)) for axis in ("dp_shard", "cp", "tp", "ep")}
    ep = gcd(degrees["ep"], degrees["dp_shard"] * degrees["cp"] * degrees["tp"])
    plain = {"zero_pp_gather": "step"} if changes.get("zero", 3) != 3 else {}
    return plain | changes | {"ep": ep}


def _accumulating(case: Case, layout: Layout, accumulation: int) -> Case:
    return replace(case, micro_batch=case.global_batch // (layout.data_ranks * accumulation))


def _fewer(layout: Layout) -> Iterator[tuple[str, dict[str, Any]]]:
    no_zero: dict[str, Any] = {} if layout.dp_shard > 1 else {"zero": 0}
    if layout.recompute != "none":
        yield "recompute", {"recompute": "none"}
    if layout.pp > 1:
        yield f"pp={layout.pp}", {"pp": 1} | _PLAIN_PIPELINE
    if layout.cp > 1:
        off = {"cp": 1, "cp_method": "zigzag", "ulysses_degree": 1}
        yield f"cp={layout.cp} ({layout.cp_method})", off | no_zero
    if layout.ep > 1:
        yield f"ep={layout.ep}", {"ep": 1}
    if layout.tp > 1:
        yield f"tp={layout.tp}", {"tp": 1, "sequence_parallel": False}
    if layout.dp_shard > 1:
        zero: dict[str, Any] = {} if layout.cp > 1 else {"zero": 0}
        yield f"dp_shard={layout.dp_shard}", {"dp_shard": 1} | zero
    if layout.dp_replicate > 1:
        yield f"dp_replicate={layout.dp_replicate}", {"dp_replicate": 1}
    if layout.token_shards:
        yield "sequence_parallel", {"sequence_parallel": False}
    if layout.schedule != ONE_F_ONE_B.name:
        yield f"schedule={layout.schedule}", _PLAIN_PIPELINE | {"zero_pp_gather": layout.zero_pp_gather}
    usual = layout.kind.virtual_stages
    if layout.virtual_stages > usual:
        fewer = {"virtual_stages": usual, "stage_layers": None}
        yield f"virtual_stages={layout.virtual_stages}, not virtual_stages={usual}", fewer
    if layout.stage_layers:
        yield f"stage_layers={list(layout.stage_layers)}", {"stage_layers": None}
    if layout.pp > 1 and layout.regathers:
        yield "zero_pp_gather=microbatch", {"zero_pp_gather": "step"}
    if layout.zero:
        copies = {"dp_replicate": layout.dp_replicate * layout.dp_shard, "dp_shard": 1}
        yield f"zero={layout.zero}", {"zero": 0} | copies
        if layout.zero > 1:
            yield f"zero={layout.zero}, not zero=1", {"zero": 1}


def _name(setting: Setting) -> str:
    case, layout = setting
    extra = [f"accumulation {n}"] if (n := case.accumulation(layout)) > 1 else []
    extra += [f"dropout {case.spec.dropout:g}"] if case.spec.dropout else []
    return ", ".join([describe(layout), *extra])


def _sentence(setting: Setting, needed: list[str]) -> str:
    smallest = f"the smallest layout that still differs: {_name(setting)} ({setting[1].world_size} ranks)"
    if not needed:
        return f"{smallest}; no axis is left, so the fault is in the model, the loss or the update itself"
    return f"{smallest}; it is equal without {' and without '.join(needed)}"
