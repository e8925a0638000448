"""Finds the smallest layout that still differs: axes and keys are switched off one by one while it differs."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from shardwright.layout.box import DENSE_AXES
from shardwright.layout.key import written
from shardwright.layout.keys import KEYS
from shardwright.layout.layout import Layout
from shardwright.system.errors import LayoutError, WorkerError
from shardwright.verification.case import Case
from shardwright.verification.compare import Report
from shardwright.verification.verifier import Verifier

Setting = tuple[Case, Layout]


def find_culprit(verifier: Verifier, report: Report, tell: Callable[[str], None] = lambda line: None) -> str:
    """Return a sentence with the smallest setting that is not equal to one process, and the axes and keys left in it.

    `tell` is called with each trial. Every trial is a separate run.
    """
    setting: Setting = (report.case, report.layout)
    if report.against != "one process" and _fails(verifier, setting, tell) is not True:
        return f"it equals one process: look at the other side, {report.against}"
    known: dict[Setting, bool | None] = {}
    while True:
        needed: list[str] = []
        for name, smaller in switched_off(*setting):
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
    """Return whether a setting is not equal; None if it cannot be run, which is another fault."""
    tell(f"trying {_name(setting)}")
    try:
        return not verifier.parity(*setting).equal
    except (LayoutError, WorkerError):
        return None


def switched_off(case: Case, layout: Layout) -> Iterator[tuple[str, Setting]]:
    """Yield every setting with one axis, key, accumulation or dropout less than this one; axes first."""
    for name, changes in _fewer(layout):
        try:
            smaller = layout.changed(**changes)
        except LayoutError:
            continue
        # The micro-batches stay the same, so that switching off one thing does not switch on accumulation.
        yield name, (_accumulating(case, smaller, case.accumulation(layout)), smaller)
    if case.accumulation(layout) > 1:
        yield "accumulation", (_accumulating(case, layout, 1), layout)
    if case.spec.dropout:
        yield "dropout", (replace(case, spec=replace(case.spec, dropout=0.0)), layout)


def _accumulating(case: Case, layout: Layout, accumulation: int) -> Case:
    return replace(case, micro_batch=case.global_batch // (layout.data_ranks * accumulation))


def _fewer(layout: Layout) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the switches, by name, with the changes that they make: axes first, then dependent keys."""
    axes = ("pp", "ep", *reversed(DENSE_AXES[1:]))
    for axis in axes:
        if layout.degree(axis) > 1:
            yield f"{axis}={layout.degree(axis)}", {axis: 1}
    for name, key in KEYS.items():
        value = getattr(layout, name)
        off = key.off(layout) if key.off else {name: key.default}
        usual = key.default_in(layout) if off.get(name) is None else off[name]
        if name in axes or not key.used(layout) or value == usual:
            continue
        yield f"{name}={written(value)}", off
        if key.milder not in (None, value):
            yield f"{name}={value}, not {name}={key.milder}", {name: key.milder}


def _name(setting: Setting) -> str:
    case, layout = setting
    extra = [f"accumulation {n}"] if (n := case.accumulation(layout)) > 1 else []
    extra += [f"dropout {case.spec.dropout:g}"] if case.spec.dropout else []
    return ", ".join([str(layout), *extra])


def _sentence(setting: Setting, needed: list[str]) -> str:
    smallest = f"the smallest layout that still differs: {_name(setting)} ({setting[1].world_size} ranks)"
    if not needed:
        return f"{smallest}; no axis is left, so the fault is in the model, the loss or the update itself"
    return f"{smallest}; it is equal without {' and without '.join(needed)}"
