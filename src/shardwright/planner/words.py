"""Text about a layout, and about the reasons why other layouts are slower.

Known problems of a layout or a job, as sentences.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from shardwright.cost.expert_load import USUAL_CV, UnevenLoad
from shardwright.cost.job import Job
from shardwright.cost.optimizer_step import PLACEMENT
from shardwright.layout.key import JobSizes, written
from shardwright.layout.keys import KEYS
from shardwright.layout.layout import accumulation
from shardwright.planner.alternatives import Alternative, reasons, savings, slower_in_words
from shardwright.planner.choice import Choice, PricedLayout, shortage
from shardwright.planner.distinct import CHOICES, differing, value
from shardwright.planner.recommendation import MEMORY_ERROR, difference_error, ties, with_headroom
from shardwright.planner.search import Plan
from shardwright.planner.simplicity import MODEL_AXES, SETTINGS, leaves_nodes
from shardwright.system.units import counted, format_bytes, format_host_bytes, format_seconds

OFF = (None, "none", 0, False)
"""Values of keys that switch nothing on, and get no row."""
ALIKE = 0.01
"""Relative difference of step times below which a layout that differs in one choice gets no row of its own."""


def worth_a_row(best: Sequence[PricedLayout], taken: PricedLayout) -> list[tuple[int, PricedLayout]]:
    """Return the fastest layouts with their numbers, without layouts that differ in one choice from a listed layout and
    are as fast within `ALIKE`. The recommended layout is always kept."""
    rows: list[tuple[int, PricedLayout]] = []
    for number, priced in enumerate(best, 1):
        alike = (
            abs(priced.step_s / other.step_s - 1) < ALIKE and len(differing(priced.choice, other.choice)) == 1
            for _, other in rows
        )
        if priced.choice == taken.choice or not any(alike):
            rows.append((number, priced))
    return rows


def choices_in_words(job: Job, choice: Choice) -> list[tuple[str, str, str]]:
    """Return each key that is used and switched on, with its value and its meaning for this job."""
    layout = choice.layout
    experts = job.model.moe.n_experts if job.model.moe else 0
    sizes = JobSizes(job.model.n_layers, experts, job.seq_len, job.cluster.node_size)
    values = {name: getattr(layout, name) for name in KEYS}
    rows = [
        (name, written(value), KEYS[name].words(layout, sizes))
        for name, value in values.items()
        if value not in OFF and not value == KEYS[name].default == 1 and KEYS[name].used(layout)
    ]
    m = accumulation(job.global_batch, choice.micro_batch, layout.data_ranks)
    batch = f"{counted(layout.data_ranks, 'data rank')} x {counted(m, 'micro-batch')} x {choice.micro_batch}"
    return [*rows, ("batch", str(job.global_batch), batch)]


def merged(alternatives: Sequence[Alternative]) -> list[tuple[str, Alternative]]:
    """Return alternatives with their names, equal layouts once: layouts that fit first, the fastest first."""
    names: dict[Choice, list[str]] = {}
    kept: dict[Choice, Alternative] = {}
    for alternative in alternatives:
        names.setdefault(alternative.choice, []).append(alternative.name)
        kept.setdefault(alternative.choice, alternative)
    ordered = sorted(
        kept.values(), key=lambda alternative: alternative.priced.step_s if alternative.priced else float("inf")
    )
    return [(_joined(names[alternative.choice]), alternative) for alternative in ordered]


def _joined(names: Sequence[str]) -> str:
    """Join `another tp`, `another pp` to `another tp, pp`."""
    sides = [name.removeprefix("another ") for name in names if name.startswith("another ")]
    others = [name for name in names if not name.startswith("another ")]
    return "; ".join([*(["another " + ", ".join(sides)] if sides else []), *others])


def compared(plan: Plan, own: Alternative | None = None) -> list[tuple[str, Alternative]]:
    """Return the layouts to choose from, each once with its names: `own` of the run file, recommended, fastest,
    simplest."""
    assert plan.recommended is not None
    assert plan.simplest is not None
    named = {"recommended": plan.recommended, "fastest": plan.best[0], "simplest": plan.simplest}
    rows = [*([] if own is None else [own]), *(Alternative(name, priced, None) for name, priced in named.items())]
    names: dict[Choice, list[str]] = {}
    for alternative in rows:
        names.setdefault(alternative.choice, []).append(alternative.name)
    first = {alternative.choice: alternative for alternative in reversed(rows)}
    return [(", ".join(of_one), first[choice]) for choice, of_one in names.items()]


def remarks(plan: Plan) -> list[str]:
    """Return why the recommended layout is not the fastest, if it is not, and a warning if it has little headroom."""
    return [remark for remark in (_chosen_because(plan), _little_headroom(plan)) if remark]


def _chosen_because(plan: Plan) -> str:
    """Return why the recommended layout was chosen; empty if it is the fastest."""
    taken, fastest = plan.recommended, plan.best[0]
    assert taken is not None
    if taken.choice == fastest.choice:
        return ""
    gap, error = taken.step_s / fastest.step_s - 1, difference_error(fastest, taken)
    if not ties(fastest, taken):
        return f"the recommended layout takes {gap:.1%} longer than the fastest, as --prefer {plan.prefer} asks"
    return (
        f"a tie: the two steps differ by {gap:.1%}, and such a difference is predicted to within {error:.1%} for half "
        f"of the published pairs; the recommended layout {_safer_and_simpler(taken, fastest, plan.limit_bytes)}; "
        f"--prefer fastest takes the other"
    )


def _safer_and_simpler(taken: PricedLayout, fastest: PricedLayout, limit_bytes: float) -> str:
    """Return the advantages of a layout that ties with the fastest."""
    parts = []
    if fastest.peak_bytes > max(taken.peak_bytes, with_headroom(limit_bytes)):
        free, less = (1 - priced.peak_bytes / limit_bytes for priced in (taken, fastest))
        parts.append(f"leaves {free:.1%} of the limit free (the fastest {less:.1%})")
    axes, fewer = (sum(priced.layout.degree(axis) > 1 for axis in MODEL_AXES) for priced in (fastest, taken))
    if axes > fewer:
        parts.append(f"uses {fewer or 'none'} of the axes tp, pp, cp and ep (the fastest {axes})")
    elif leaves_nodes(fastest.layout.tp, fastest.job.cluster.node_size):
        parts.append("has tp within nodes")
    left = [name for name in fastest.choice.settings() if name in SETTINGS and name not in taken.choice.settings()]
    if left:
        parts.append(f"does without {' and '.join(left)}")
    return ", and ".join(parts)


def _little_headroom(plan: Plan) -> str:
    """Return a warning if the memory prediction's error decides whether the recommended layout fits; else empty."""
    taken = plan.recommended
    assert taken is not None
    if taken.peak_bytes <= with_headroom(plan.limit_bytes):
        return ""
    none = "" if plan.prefer else "; no layout that ties, with as few axes, leaves more"
    return (
        f"little headroom: the peak is {1 - taken.peak_bytes / plan.limit_bytes:.1%} below the limit, and half of the "
        f"published peaks are predicted to within {MEMORY_ERROR:.1%}{none}"
    )


def fewer_accelerators(part: Plan, whole: Plan) -> str:
    """Return the saving of a plan on a part of the cluster, and by how much its step is longer."""
    assert part.recommended is not None
    on = f"--prefer cheapest: {part.job.cluster.size} of the {whole.job.cluster.size} accelerators"
    if whole.recommended is None:
        return f"{on}"
    longer = part.recommended.step_s / whole.recommended.step_s
    saved = 1 - longer * part.job.cluster.size / whole.job.cluster.size
    return (
        f"{on} take {saved:.1%} fewer accelerator-hours than all, and {longer:.2f} times as long for a step; all take "
        f"{format_seconds(whole.recommended.step_s)} with {whole.recommended.choice}"
    )


def verdict(best: PricedLayout, other: Alternative, limit_bytes: float) -> str:
    """Return by how much an alternative is slower, `+38.0%`, or `as fast` within rounding, or by how much it does not
    fit."""
    slower = other.slower(best)
    if slower is not None:
        return slower_in_words(slower)
    assert other.nearest is not None
    return f"does not fit: {shortage(best.job, *other.nearest, limit_bytes)}"


def host_row(priced: PricedLayout) -> str:
    """Return the memory of the host that a layout needs, and the memory that a node has."""
    cluster, needed = priced.job.cluster, format_host_bytes(priced.host_bytes_per_node)
    row = f"{needed} for each node of {cluster.node_size}, by the plan"
    if not (has := cluster.host_memory_bytes):
        return f"{row}; how much a node has is not known, --host-memory SIZE says it"
    share = priced.host_bytes_per_node / has
    return f"{row}; {share:.1%} of {format_host_bytes(has)}" + (", does not fit" if share > 1 else "")


def host_limit_in_words(plan: Plan) -> str:
    """Return the limit of host memory, to append to the device's limit if no layout fits; empty without offloads."""
    has = plan.job.cluster.host_memory_bytes
    if plan.fixed is None or not plan.fixed.offload or not has:
        return ""
    return f", or more than {format_host_bytes(has)} of host memory in each node"


def why(best: PricedLayout, other: Alternative) -> str:
    """Return the kinds of work on which an alternative spends more time, and those on which it spends less."""
    if other.priced is None:
        return "with the least memory of its kind"
    parts = [f"{kind} +{format_seconds(seconds)}" for kind, seconds in reasons(best, other.priced)]
    parts += [f"{kind} -{format_seconds(-seconds)}" for kind, seconds in savings(best, other.priced)]
    return ", ".join(parts) or "as fast, as far as can be told"


def difference(best: Choice, other: Choice) -> str:
    """Return the choices in which another layout differs: `zero=3`, or `tp=4, dp_shard=2`."""
    keys = [key for name in differing(best, other) for key in CHOICES[name]]
    return ", ".join(
        f"{key} left out" if value(other, key) is None else f"{key}={value(other, key)}"
        for key in keys
        if value(other, key) != value(best, key)
    )


def also_fast(best: PricedLayout, alternatives: Sequence[Alternative]) -> str:
    """Return a line with choices that cost no time, with their memory; empty if there is none."""
    named: dict[str, str] = {}
    for alternative in alternatives:
        if alternative.as_fast(best) and alternative.priced is not None and alternative.choice != best.choice:
            same = abs(alternative.priced.peak_bytes - best.peak_bytes) < 1e-3 * best.peak_bytes
            needs = "" if same else f" (with {format_bytes(alternative.priced.peak_bytes)})"
            named[difference(best.choice, alternative.choice)] = needs
    return "; ".join(f"{what}{needs}" for what, needs in named.items())


def left_out(listed: Sequence[tuple[int, PricedLayout]], equals: Sequence[Sequence[Choice]]) -> str:
    """Return how many layouts cost the same as a listed layout, and the choices in which they differ; empty if none.
    `listed`: the layouts of the table with their numbers, from 1; `equals`: of each number, the layouts that cost the
    same."""
    n = sum(len(equals[number - 1]) for number, _ in listed)
    if not n:
        return ""
    by_change: dict[str, list[int]] = {}
    for number, priced in listed:
        for other in equals[number - 1]:
            by_change.setdefault(difference(priced.choice, other), []).append(number)
    parts = []
    for what, numbers in by_change.items():
        which = ", ".join(map(str, numbers))
        one = f"number {which}" if len(numbers) == 1 else f"numbers {which}"
        whom = "each" if len(numbers) == len(listed) > 1 else one
        parts.append(f"{whom} also with {what}")
    layouts = "1 more layout costs" if n == 1 else f"{n} more layouts cost"
    return f"{layouts} as much time and memory as one of these: {'; '.join(parts)}"


LONG = 4096
"""Sequence length, in tokens, from which the square of scores dominates a layer."""
IDLE = 0.15
"""Share of a step from which the pipeline bubble is reported."""
GROUPED_ROW_BYTES = 16
"""A row of a grouped matmul has to be a multiple of this number of bytes (`model.experts.has_grouped_mm`)."""


def expert_load_in_words(priced: PricedLayout) -> str:
    """Return the assumption about the loads of experts, with its cost in step time; empty for a dense model."""
    job = priced.job
    if job.model.moe is None:
        return ""
    given = job.expert_load
    usual = UnevenLoad(f"cv={USUAL_CV}", USUAL_CV)
    other = PricedLayout.from_choice(replace(job, expert_load=None if given else usual), priced.choice).step_s
    if given is None:
        more = other / priced.step_s - 1
        return f"experts have even loads; with --expert-load {usual.text} a step takes {more:.1%} longer"
    layout = priced.choice.layout
    load, placed = (float(job.busiest_load(np.array([layout.ep]), placed=by_load)[0]) for by_load in (False, True))
    change = ""
    if layout.place_experts_every:
        moves = priced.parts_s[PLACEMENT] / priced.step_s
        load, change = placed, f" ({load:.2f} with layout.place_experts_every=0; moves of experts take {moves:.1%})"
    elif placed < load:
        change = f" ({placed:.2f} if layout.place_experts_every places them by their load)"
    dropped = given.dropped(job.model.moe)
    lost = f"; {dropped:.1%} of the tokens of experts are dropped" if dropped else ""
    return (
        f"with --expert-load {given.text} the busiest rank has {load:.2f} times the mean load{change}, and a step "
        f"takes {priced.step_s / other - 1:.1%} longer than with even loads{lost}"
    )


def warnings(priced: PricedLayout) -> list[str]:
    """Return every known problem of a layout; empty for a good layout."""
    return [*job_warnings(priced.job), *_tensor(priced), *_pipeline(priced), *_experts(priced.job, priced.choice)]


def job_warnings(job: Job) -> Iterator[str]:
    """Yield the problems of the job that do not depend on the layout."""
    model = job.model
    if job.seq_len > model.max_seq_len and model.positions == "learned":
        yield (
            f"seq_len={job.seq_len} is beyond the model's {model.max_seq_len} learned positions (model.max_seq_len): "
            f"later tokens have no vector, and train refuses it; a larger max_seq_len makes a longer table, whose new "
            f"rows have to be learned"
        )
    elif job.seq_len > model.max_seq_len:
        yield (
            f"seq_len={job.seq_len} is beyond the model's rotary range of {model.max_seq_len} tokens "
            f"(model.max_seq_len); train refuses it until that is raised, and rope_theta or rope_scaling should be "
            f"chosen for the new length"
        )
    node = job.cluster.node_size
    if job.cluster.size > 1 and job.seq_len % 2 and (node == 1 or job.seq_len % node):
        yield (
            f"seq_len={job.seq_len} is no multiple of 2: neither tp with sequence_parallel nor cp can partition it "
            f"into 2, 4, ... parts, so layouts with them are not searched; take {job.seq_len - 1} or "
            f"{job.seq_len + 1}"
        )
    if job.precision == "fp16":
        yield (
            "precision fp16: large activations overflow, and steps whose gradients do are skipped, by the loss scale; "
            "bf16 costs the same and needs none"
        )
    if job.seq_len >= LONG and not job.stack.flash_attention:
        yield (
            f"seq_len={job.seq_len} without flash attention: the {job.stack.name} stack stores {job.seq_len} scores "
            f"for each token and head, more than all else a layer keeps"
        )
    elif job.seq_len >= LONG and job.element_bytes == 4:
        yield (
            f"seq_len={job.seq_len} in fp32: flash attention is made for 16 bits; what runs in its place is slower, "
            f"and over cp stores blocks of scores, which is not counted here; use bf16"
        )


def _tensor(priced: PricedLayout) -> Iterator[str]:
    layout, cluster = priced.choice.layout, priced.job.cluster
    if leaves_nodes(layout.tp, cluster.node_size):
        share = priced.parts_s.get("tensor parallel", 0.0) / priced.step_s
        yield (
            f"tp={layout.tp} does not stay within nodes of {cluster.node_size}: each layer has four collectives over "
            f"the network, exposed for {share:.0%} of the step; keep tp to a divisor of {cluster.node_size}"
        )


def _pipeline(priced: PricedLayout) -> Iterator[str]:
    layout = priced.choice.layout
    if layout.pp == 1:
        return
    m = priced.job.global_batch // (priced.choice.micro_batch * layout.data_ranks)
    share = priced.parts_s.get("pipeline", 0.0) / priced.step_s
    if m < layout.pp or share > IDLE:
        has = "1 micro-batch" if m == 1 else f"{m} micro-batches"
        yield (
            f"pp={layout.pp} has {has} a step to fill its stages, and ranks are idle for {share:.0%} of it; a larger "
            f"global batch, a smaller micro_batch or fewer data ranks give more micro-batches"
        )


def _experts(job: Job, choice: Choice) -> Iterator[str]:
    moe = job.model.moe
    if moe is None:
        return
    widths = {"model.moe.d_ffn": moe.d_ffn, "model.d_model": job.model.d_model}
    odd = {name: width for name, width in widths.items() if width * job.element_bytes % GROUPED_ROW_BYTES}
    for name, width in odd.items():
        yield (
            f"ep={choice.layout.ep} without grouped matmuls: {name}={width} makes rows of "
            f"{width * job.element_bytes} bytes, no multiple of {GROUPED_ROW_BYTES}, so "
            f"{moe.n_experts // choice.layout.ep} experts run one by one, each with a synchronisation with the "
            f"device; make it a multiple of {GROUPED_ROW_BYTES // job.element_bytes}"
        )
