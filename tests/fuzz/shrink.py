"""Shrink a setting that fails: a smaller and plainer one that fails in the same way."""

import re
from collections.abc import Callable, Iterator
from dataclasses import MISSING, fields, replace
from functools import partial
from math import gcd
from typing import Any

from shardwright.config import OptimizerSection
from shardwright.layout.box import DENSE_AXES
from shardwright.layout.layout import Layout
from shardwright.model.spec import ModelSpec
from shardwright.split.rules import sequence_cuts
from shardwright.system.errors import LayoutError
from shardwright.verification.case import Case
from shardwright.verification.compare import Report
from shardwright.verification.verifier import Setting, Verifier, switched_off
from tests.fuzz.settings import problems

Step = Callable[[Case, Layout], Iterator[Setting]]

# Smaller ones are not tried: a norm over a few features leaves gradients that are nothing but rounding.
_LEAST = {"d_model": 8, "head_dim": 4, "d_ffn": 4, "vocab_size": 11}
_LEAST_TOKENS = 4
_LEAST_OF_EXPERTS = {"n_experts": 2, "top_k": 1, "d_ffn": 4, "n_shared": 1, "first_dense": 0, "n_groups": 1}
_LEAST_OF_LATENT = {"kv_rank": 4, "q_rank": 4, "nope_dim": 4, "rope_dim": 2}
# Values that switch a part of the model off, where its default does not.
_OFF = {"bias_rate": 0.0}


def failure(report: Report) -> str:
    """Name how a comparison failed: "" if it is equal, the type of the error and the function that raised it if a rank
    crashed, or how the rank ended."""
    if not report.crash:
        return "" if report.equal else "not equal"
    first, *rest = report.crash.splitlines()
    error = re.match(r"rank \d+ failed: (\w+)", first)
    places = re.findall(r'^ *File ".*", line \d+, in (\w+)', "\n".join(rest), re.MULTILINE)
    if error:
        return " in ".join([error[1], *places[-1:]])
    return re.sub(r"\d+", "", first)


def shrink(verifier: Verifier, report: Report, on_trial: Callable[[str], None] = lambda line: None) -> Report:
    """Return the report of the smallest setting found that fails in the same way as the setting of `report`.

    Axes and keys of the layout, parts of the model and options of the optimizer are switched off, and sizes and the
    batch are lowered, one after another, until no change keeps the failure. Each trial is a comparison of its own;
    `on_trial` gets a line before each.
    """
    kind_of_failure, smallest = failure(report), report
    tried: set[Setting] = {(report.case, report.layout)}

    def smaller(step: Step) -> Report | None:
        for case, layout in step(smallest.case, smallest.layout):
            if (case, layout) in tried or problems(case, layout):
                continue
            tried.add((case, layout))
            on_trial(f"trial {len(tried) - 1}: {layout}")
            result = verifier.outcome(case, layout)
            if failure(result) == kind_of_failure:
                return result
        return None

    before = None
    while smallest is not before:
        before = smallest
        for step in _STEPS:
            while (result := smaller(step)) is not None:
                smallest = result
    return smallest


def _whole_model(case: Case, layout: Layout) -> Iterator[Setting]:
    """Switch off every part of the model at once, and use the default optimizer, or the default options of its own."""
    spec, moe = case.spec, case.spec.moe
    off = {name: value for name, value in _off(spec).items() if moe is None or name != "moe"}
    if moe is not None:
        off["moe"] = replace(moe, **_off(moe))
    for optimizer in (OptimizerSection(), OptimizerSection(name=case.optimizer.name)):
        plain = replace(case, optimizer=optimizer)
        yield replace(plain, spec=_changed_spec(spec, _off(spec))), layout
        yield replace(plain, spec=_changed_spec(spec, off)), layout
        yield plain, layout


def _layout(case: Case, layout: Layout) -> Iterator[Setting]:
    yield from (smaller for _, smaller in switched_off(case, layout))
    for axis in (*DENSE_AXES, "ep"):
        degree = layout.degree(axis)
        for lower in (n for n in range(2, degree) if n == 2 or degree % n == 0):
            yield from _lower(case, layout, axis, lower)


def _lower(case: Case, layout: Layout, axis: str, lower: int) -> Iterator[Setting]:
    """Lower the degree of an axis: alone, with sizes that the lower degree divides, and with ep lowered by the same
    factor. A shorter pipeline keeps the first layers of `stage_layers`."""
    degree, n_layers, each = layout.degree(axis), case.spec.n_layers, case.micro_batch * case.accumulation(layout)
    changes: dict[str, Any] = {axis: lower}
    if axis == "pp" and layout.stage_layers:
        counts = layout.stage_layers[: len(layout.stage_layers) // degree * lower]
        changes["stage_layers"], n_layers = counts, sum(counts)
    for more in ({}, {"ep": layout.ep // degree * lower}) if layout.ep % degree == 0 else ({},):
        try:
            smaller = layout.changed(**changes | more)
        except LayoutError:
            continue
        spec = replace(case.spec, n_layers=n_layers)
        changed = replace(case, spec=spec, global_batch=each * smaller.data_ranks)
        yield changed, smaller
        yield _divisible(changed, degree, lower), smaller


def _divisible(case: Case, degree: int, lower: int) -> Case:
    """Replace sizes that `degree` divides by multiples of `lower`: 6 heads on 3 ranks become 4 heads on 2."""

    def scaled(size: int) -> int:
        return size if size % degree else size // degree * lower

    spec, seq_len = case.spec, scaled(case.seq_len)
    heads, kv_heads = scaled(spec.n_heads), scaled(spec.n_kv_heads)
    moe = spec.moe and replace(spec.moe, n_experts=scaled(spec.moe.n_experts), n_shared=scaled(spec.moe.n_shared))
    spec = replace(spec, n_heads=heads, n_kv_heads=kv_heads, d_ffn=scaled(spec.d_ffn), moe=moe)
    return replace(case, spec=spec, seq_len=seq_len)


def _parts(case: Case, layout: Layout) -> Iterator[Setting]:
    """Switch off one part of the model, or set one option of the optimizer to its default."""
    spec = case.spec
    for name, value in _off(spec).items():
        yield replace(case, spec=_changed_spec(spec, {name: value})), layout
    if spec.moe is not None:
        for name, value in _off(spec.moe).items():
            yield replace(case, spec=replace(spec, moe=replace(spec.moe, **{name: value}))), layout
    if spec.latent_attention is not None and spec.latent_attention.q_rank:
        yield replace(case, spec=replace(spec, latent_attention=replace(spec.latent_attention, q_rank=0))), layout
    yield replace(case, spec=replace(spec, n_kv_heads=spec.n_heads)), layout
    for attention in ("sequence", case.attention):
        yield replace(case, attention=attention, positions="sequence"), layout
    usual = OptimizerSection(name=case.optimizer.name).model_dump()
    for name, value in case.optimizer.model_dump().items():
        if value != usual[name]:
            changed = OptimizerSection(**case.optimizer.model_dump() | {name: usual[name]})
            yield replace(case, optimizer=changed), layout


def _changed_spec(spec: Any, changes: dict[str, Any]) -> ModelSpec:
    return replace(spec, **changes)


def _off(section: Any) -> dict[str, Any]:
    """Return the fields of a model, or of its experts, that are not off, with the values that switch them off."""
    values = {each.name: _OFF.get(each.name, each.default) for each in fields(section) if each.default is not MISSING}
    return {
        name: value
        for name, value in values.items()
        if value != getattr(section, name) and name not in ("family", "init_std")
    }


def _layers(case: Case, layout: Layout) -> Iterator[Setting]:
    """Remove layers, from one stage at a time where `stage_layers` is given."""
    n_layers, counts = case.spec.n_layers, layout.stage_layers
    if counts is None:
        for fewer in range(layout.n_stages if layout.pp > 1 else 1, n_layers):
            yield replace(case, spec=replace(case.spec, n_layers=fewer)), layout
        return
    for stage, count in enumerate(counts):
        for fewer in range(1, count):
            changed = (*counts[:stage], fewer, *counts[stage + 1 :])
            yield (
                replace(case, spec=replace(case.spec, n_layers=sum(changed))),
                replace(layout, stage_layers=changed),
            )


def _heads(case: Case, layout: Layout) -> Iterator[Setting]:
    spec = case.spec
    for heads in range(layout.tp * layout.cp_ulysses, spec.n_heads, layout.tp * layout.cp_ulysses):
        kv_heads = heads if spec.n_kv_heads == spec.n_heads else gcd(heads, spec.n_kv_heads)
        changed = replace(spec, n_heads=heads, n_kv_heads=kv_heads)
        if spec.d_model == spec.n_heads * spec.head_dim and heads * spec.head_dim >= _LEAST["d_model"]:
            yield replace(case, spec=replace(changed, d_model=heads * spec.head_dim)), layout
        yield replace(case, spec=changed), layout


def _size(name: str, case: Case, layout: Layout) -> Iterator[Setting]:
    spec: Any = case.spec
    for size in _smaller(getattr(spec, name), _LEAST[name], layout.tp if name == "d_ffn" else 1):
        if name == "head_dim" and spec.latent_attention is not None:
            changed = replace(spec, latent_attention=replace(spec.latent_attention, v_dim=size), head_dim=size)
        else:
            changed = replace(spec, **{name: size})
        yield replace(case, spec=changed), layout


def _size_of_table(table: str, name: str, case: Case, layout: Layout) -> Iterator[Setting]:
    section: Any = getattr(case.spec, table)
    least = (_LEAST_OF_EXPERTS if table == "moe" else _LEAST_OF_LATENT)[name]
    unit = {"n_experts": layout.ep, "n_shared": layout.tp, "rope_dim": 2}.get(name, 1)
    for size in _smaller(getattr(section, name), least, unit) if section is not None else ():
        yield replace(case, spec=_changed_spec(case.spec, {table: replace(section, **{name: size})})), layout


def _smaller(size: int, least: int, unit: int = 1) -> list[int]:
    """Return a few multiples of `unit` between `least` and `size`, the smallest first."""
    first = -(-least // unit) * unit
    return sorted(n for n in {first, 2 * first, size // 2 // unit * unit} if first <= n < size)


def _tokens(case: Case, layout: Layout) -> Iterator[Setting]:
    for seq_len in _smaller(case.seq_len, _LEAST_TOKENS, sequence_cuts(layout)):
        yield replace(case, seq_len=seq_len, spec=replace(case.spec, max_seq_len=seq_len)), layout
    yield replace(case, spec=replace(case.spec, max_seq_len=case.seq_len)), layout


def _batch(case: Case, layout: Layout) -> Iterator[Setting]:
    rounds = case.accumulation(layout)
    for micro_batch in sorted({1, 2, case.micro_batch}):
        for fewer in sorted({1, 2, layout.pp, 2 * layout.pp, rounds}):
            global_batch = micro_batch * fewer * layout.data_ranks
            if micro_batch <= case.micro_batch and global_batch < case.global_batch:
                yield replace(case, micro_batch=micro_batch, global_batch=global_batch), layout


_STEPS: list[Step] = [
    _whole_model,
    _layout,
    _parts,
    _layers,
    _batch,
    _tokens,
    _heads,
    *(partial(_size, name) for name in _LEAST),
    *(partial(_size_of_table, "moe", name) for name in _LEAST_OF_EXPERTS),
    *(partial(_size_of_table, "latent_attention", name) for name in _LEAST_OF_LATENT),
]
"""The largest steps come first: later trials take less time with fewer ranks and a plain model."""
