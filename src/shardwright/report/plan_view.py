"""The document of `plan`: the layouts to choose from, the recommended layout with its time and memory, and why others
are not recommended."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from shardwright.cost.job import Job
from shardwright.planner.alternatives import Alternative
from shardwright.planner.batches import NearBatch
from shardwright.planner.choice import PricedLayout, shortage
from shardwright.planner.document import job_document, layout_document
from shardwright.planner.error_summary import INTERVAL, bounds_in_words
from shardwright.planner.explain import explain, lines
from shardwright.planner.headline import headline, unmeasured, unmeasured_software
from shardwright.planner.nearest import PlanRemedy, adapters_in_words
from shardwright.planner.search import Plan
from shardwright.planner.sweep import by_length, by_size
from shardwright.planner.whole_run import TrainingGoal, reference_s, whole_run_on
from shardwright.planner.words import (
    ALIKE,
    also_fast,
    choices_in_words,
    compared,
    difference,
    expert_load_in_words,
    fewer_accelerators,
    host_limit_in_words,
    host_row,
    job_warnings,
    left_out,
    merged,
    remarks,
    verdict,
    warnings,
    why,
    worth_a_row,
)
from shardwright.report.plan_pictures import ROLES, length_svg, memory_svg, scaling_svg, time_svg
from shardwright.report.whole_run_view import whole_run_parts
from shardwright.system.units import GiB, MiB, counted, format_bytes, format_count, format_seconds
from shardwright.view.document import (
    CODE,
    FOUR_DIGITS,
    NUMBER,
    SECONDS,
    SHARE,
    Code,
    Column,
    Fact,
    Facts,
    Marked,
    Note,
    Part,
    Picture,
    Quantity,
    Section,
    Table,
    VerbDocument,
)

ROUNDING = 1e-9
"""Share of a step below which a part is only the rounding error of a difference of equal numbers."""
BARS = 9
"""Most layouts in the picture of the step time."""
LOSS = Quantity("{:+.2%}".format)
IN_MS = Quantity(lambda seconds: f"{1e3 * seconds:.4g}")


@dataclass(frozen=True)
class SearchedPlan:
    """A plan and the layouts it is compared with. `whole`: the plan of all requested accelerators; `own`: the layout of
    the run file; `took_s`: seconds of the search; `remedies`: changes that would make a layout fit, if none does."""

    plan: Plan
    whole: Plan
    name: str
    own: Alternative | None
    alternatives: Sequence[Alternative]
    batches: Sequence[NearBatch]
    remedies: Sequence[PlanRemedy]
    margin: float
    goal: TrainingGoal | None
    took_s: float

    @property
    def taken(self) -> PricedLayout:
        assert self.plan.recommended is not None
        return self.plan.recommended


def plan_view(searched: SearchedPlan, data: Any) -> VerbDocument:
    """Return the document of a plan. `data`: its JSON document, or None if only the text or the page is needed."""
    job, wanted = searched.plan.job, searched.whole.job.cluster
    fits = searched.plan.recommended is not None
    on = wanted.name if searched.whole is searched.plan else f"{job.cluster.size} of {wanted.size} in {wanted.name}"
    parts = [job_note(job, searched.name, on), *(_recommendation(searched) if fits else _nothing_fits(searched))]
    return VerbDocument(f"{searched.name} on {on}: the layout", data, parts)


def explained_view(
    priced: PricedLayout, name: str, limit_bytes: float, goal: TrainingGoal | None, texts: Iterable[str], data: Any
) -> VerbDocument:
    """Return the document of one layout with every formula behind it (`planner.explain.lines`)."""
    parts = [job_note(priced.job, name), *layout_parts(priced, limit_bytes, goal), *formula_parts(texts)]
    return VerbDocument(f"{name} on {priced.job.cluster.name}: {priced.choice}", data, parts)


def explained_document(priced: PricedLayout, name: str, limit_bytes: float, goal: TrainingGoal | None) -> VerbDocument:
    """Return the document of `plan --explain`: one layout with its numbers, and every formula behind them."""
    entries = explain(priced)
    data = job_document(priced.job, name, limit_bytes) | layout_document(priced, limit_bytes, goal)
    data["formulas"] = [vars(entry) for entry in entries]
    return explained_view(priced, name, limit_bytes, goal, lines(entries), data)


def formula_parts(texts: Iterable[str]) -> Iterator[Part]:
    """Yield a section for each line that is not indented, with the indented lines after it."""
    inside: list[str] = []
    for line in texts:
        if line.startswith(" "):
            inside.append(line)
        elif line:
            if inside:
                yield Code("\n".join(inside))
            inside = []
            yield Section(line)
    yield Code("\n".join(inside))


def job_note(job: Job, name: str, cluster: str = "") -> Note:
    """Return the model, the cluster and the batch of the job. `cluster`: instead of the name of the job's cluster."""
    tokens = job.document_tokens
    within = "" if tokens is None else f", attention within documents (sum L^2 / sum L = {tokens:,.0f} tokens)"
    return Note(
        f"{name}, {format_count(job.model.n_parameters)} parameters{_adapters(job)}, on {cluster or job.cluster.name}: "
        f"{counted(job.global_batch, 'sequence')} of {job.seq_len:,} "
        f"{'token' if job.seq_len == 1 else 'tokens'} a step, {job.precision}, "
        f"{_software(job)}{within}"
    )


def _adapters(job: Job) -> str:
    lora = job.model.lora
    if lora is None:
        return ""
    return f" with adapters of rank {lora.rank} on {', '.join(lora.targets)}, {adapters_in_words(job.model)}"


def _software(job: Job) -> str:
    calibrated = ", calibrated by logs" if job.calibration.covariance else ""
    if others := ", ".join(job.cluster.calibrated):  # on_calibrated_cluster leaves those of other software
        calibrated = f", not calibrated: the logs in the hardware file are of {others}"
    return f"{_name_of_software(job)}{calibrated}"


def _name_of_software(job: Job) -> str:
    if job.stack.name.startswith("shardwright"):
        return "compiled" if job.compiled else "eager"
    return f"software {job.stack.name}"


def _room(searched: SearchedPlan) -> str:
    memory = searched.plan.job.cluster.accelerator.memory_bytes
    return f"{format_bytes(searched.plan.limit_bytes)} ({1 - searched.margin:.0%} of {format_bytes(memory)})"


def _restricted(plan: Plan) -> str:
    return "" if plan.fixed is None else f" with {plan.fixed}"


def _recommendation(searched: SearchedPlan) -> Iterator[Part]:
    plan, taken = searched.plan, searched.taken
    yield Note(
        f"{plan.survey.n_layouts:,} layouts{_restricted(plan)}, {len(plan.pool):,} of them fit in {_room(searched)}; "
        f"searched in {format_seconds(searched.took_s)}"
    )
    yield _compared(searched)
    if searched.whole is not plan:
        yield Note(fewer_accelerators(plan, searched.whole))
    yield from map(Note, remarks(plan))
    for batch in searched.batches:
        yield Note(
            f"--global-batch {batch.global_batch} takes {batch.saved:.1%} less time for a token, with "
            f"{batch.plan.best[0].choice}"
        )
    yield from layout_parts(taken, plan.limit_bytes, searched.goal)
    if taken.choice != plan.best[0].choice:
        yield Section(f"fastest: {plan.best[0].choice}")
        yield Note(why(taken, Alternative("fastest", plan.best[0], None)))
    if len(plan.best) > 1:
        yield Section(f"Of the fastest {len(plan.best)}")
        yield _top(plan, taken)
    yield from _others(searched)
    yield from _sweeps(plan, taken)


def _compared(searched: SearchedPlan) -> Table:
    """Return the layouts to choose from: the run file's layout first, then the recommended layout."""
    plan, taken = searched.plan, searched.taken
    columns = Column(""), Column("step", SECONDS), Column("change", NUMBER), Column("memory", NUMBER)
    rows = []
    for name, other in compared(plan, searched.own):
        peak = other.priced.peak_bytes if other.priced else other.nearest[1] if other.nearest else 0.0
        memory = format_bytes(peak) + ("" if other.priced else ", does not fit")
        slower = verdict(taken, other, plan.limit_bytes) if other.priced and other.choice != taken.choice else None
        named = Marked(name, "strong" if other.choice == taken.choice else "")
        rows.append((named, other.priced.step_s if other.priced else None, slower, memory, other.choice))
    return Table((*columns, Column("layout", CODE)), rows)


def layout_parts(priced: PricedLayout, limit_bytes: float, goal: TrainingGoal | None) -> Iterator[Part]:
    """Yield one layout: its choices, its speed, its time and memory by part, and its warnings."""
    job = priced.job
    yield Section(str(priced.choice))
    yield Table((Column(""), Column("", CODE), Column("")), choices_in_words(job, priced.choice))
    yield Facts([*_speed(priced), *_memory_facts(priced, limit_bytes)])
    if load := expert_load_in_words(priced):
        yield Note(load)
    if job.reference_sequences:
        seconds = format_seconds(reference_s(job, priced.step_s))
        yield Note(
            f"before the first step, a forward pass over the {job.reference_sequences:,} sequences of the data takes "
            f"{seconds}, in less memory than a step: no second model is loaded",
            "reference",
        )
    yield _time(priced)
    yield _memory(priced, limit_bytes)
    yield from (Note(warning, "warning", "bad") for warning in warnings(priced))
    if goal is not None:
        run = whole_run_on(priced, headline(priced).interval_s, goal)
        yield from whole_run_parts(run, job.cluster)
    yield Picture(
        "memory",
        "Memory by kind",
        partial(memory_svg, priced, limit_bytes),
        f"The memory of each rank of the pipeline at its fullest moment, against {format_bytes(limit_bytes)}, the part "
        f"of {format_bytes(job.cluster.accelerator.memory_bytes)} that a layout may use.",
        (ROLES[0], ROLES[1]),
    )


def _speed(priced: PricedLayout) -> Iterator[Fact]:
    numbers, job = headline(priced), priced.job
    rate = f"{format_count(numbers.tokens_per_s_per_accelerator)} on each accelerator"
    yield Fact("a step takes", format_seconds(numbers.step_s), f"{format_count(numbers.tokens_per_s)} tokens/s, {rate}")
    unseen = [f"on {job.cluster.accelerator.name}"] if unmeasured(job) else []
    unseen += [f"of {job.stack.name}"] if unmeasured_software(job) else []
    wide = f"(no measured run is {' or '.join(unseen)}, so this is wide)" if unseen else ""
    yield Fact(INTERVAL, bounds_in_words(numbers.interval_s), wide)
    peak_tflops = job.peak_flops_per_s / 1e12
    peak = f"{peak_tflops:,.0f} TFLOP/s" if peak_tflops >= 10 else f"{peak_tflops:.3g} TFLOP/s"
    again = f"; HFU {numbers.hfu_full:.1%}, {numbers.hfu_causal:.1%}" if numbers.recomputes_flops else ""
    yield Fact(
        "MFU",
        f"{numbers.mfu_full:.1%}",
        f"with the full square of attention, {numbers.mfu_causal:.1%} with its causal half{again} "
        f"(PaLM, arXiv 2204.02311; peak {peak})",
    )


def _memory_facts(priced: PricedLayout, limit_bytes: float) -> Iterator[Fact]:
    over = priced.peak_bytes > limit_bytes
    share = f"= {priced.peak_bytes / limit_bytes:.1%} of {format_bytes(limit_bytes)}{', does not fit' if over else ''}"
    yield Fact("peak memory", format_bytes(priced.peak_bytes), share, "bad" if over else "")
    if priced.host_bytes_per_node:
        yield Fact("memory of the host", host_row(priced))


def _seconds(name: str, step_s: float) -> Column:
    """Return a column of times next to a step of `step_s`: in seconds, or in ms if the step is shorter than one."""
    return Column(f"{name} s".strip(), FOUR_DIGITS) if step_s >= 1 else Column(f"{name} ms".strip(), IN_MS)


def _bytes(peak_bytes: float, digits: int) -> Column:
    """Return a column of bytes next to a peak: in GiB, or in MiB if the peak is below one GiB."""
    unit, name = (GiB, "GiB") if peak_bytes >= GiB else (MiB, "MiB")
    return Column(name, Quantity(lambda n_bytes: f"{n_bytes / unit:,.{digits}f}"))


def _time(priced: PricedLayout) -> Table:
    rows = [
        (kind, seconds, f"{share:.1%}" if abs(share) >= 1e-3 else f"{share:.2%}")
        for kind, seconds in priced.parts_s.items()
        if abs(share := seconds / priced.step_s) > ROUNDING
    ]
    whole = Marked("step", "strong"), Marked(priced.step_s, "strong"), None
    return Table((Column("time"), _seconds("", priced.step_s), Column("share", NUMBER)), [*rows, whole])


def _memory(priced: PricedLayout, limit_bytes: float) -> Table:
    memory = priced.memory
    rank = memory.fullest_rank
    title = f"memory, pp rank {rank}" if priced.choice.layout.pp > 1 else "memory"
    kinds = {kind: n_bytes for kind, n_bytes in priced.fullest_kinds.items() if n_bytes > 0 or kind == "allocator"}
    rows: list[Sequence[Any]] = [(kind, n_bytes, n_bytes / limit_bytes) for kind, n_bytes in kinds.items()]
    peak = priced.peak_bytes / limit_bytes
    rows.append(
        (Marked("peak", "strong"), Marked(priced.peak_bytes, "strong"), Marked(peak, "bad" if peak > 1 else ""))
    )
    rows.append(("limit", limit_bytes, None))
    return Table((Column(title), _bytes(priced.peak_bytes, 2), Column("of limit", SHARE)), rows)


def _top(plan: Plan, taken: PricedLayout) -> Table:
    """Return the fastest layouts, each with its differences from the recommended layout."""
    rows = worth_a_row(plan.best, taken)
    numbers = _seconds("step", taken.step_s), Column("change", LOSS), Column("MFU", SHARE)
    more = len(plan.best) - len(rows)
    hidden = f"{more} more of them differ from one of these in one choice, and by less than {ALIKE:.0%}" if more else ""
    return Table(
        (Column("", NUMBER), *numbers, _bytes(taken.peak_bytes, 1), Column("instead", CODE)),
        [
            (
                number,
                priced.step_s,
                priced.step_s / taken.step_s - 1 if priced.choice != taken.choice else None,
                headline(priced).mfu_full,
                priced.peak_bytes,
                difference(taken.choice, priced.choice),
            )
            for number, priced in rows
        ],
        "\n".join(filter(None, (hidden, left_out(rows, plan.equals)))),
    )


def _others(searched: SearchedPlan) -> Iterator[Part]:
    """Yield the best layouts of other kinds, with the work on which they spend more time."""
    plan, taken = searched.plan, searched.taken
    rows = merged(searched.alternatives)
    if not rows:
        return
    yield Section("Why not another")
    columns = Column("kind"), Column("change"), Column("layout", CODE), Column("why")
    slower = [
        (Marked(name, "strong"), verdict(taken, other, plan.limit_bytes), other.choice, why(taken, other))
        for name, other in rows
        if not other.as_fast(taken)
    ]
    yield Table(columns, slower, stacked=True)
    if equal := also_fast(taken, searched.alternatives):
        yield Note(equal, "as fast, within rounding")
    bars = [("recommended", taken), *((_short(name), other.priced) for name, other in rows if other.priced is not None)]
    yield Picture(
        "time",
        "Time by kind of work",
        partial(time_svg, [(name, priced.parts_s, priced.step_s) for name, priced in bars[:BARS]]),
        "The seconds of a step by kind of work, without overlapped communication; “pipeline” is the bubble of the "
        "busiest rank.",
        (ROLES[0], ROLES[1]),
    )


def _short(name: str, most: int = 44) -> str:
    first = name.split(";")[0].split(" (")[0]
    return first if len(first) <= most else first[: most - 1] + "…"


def _sweeps(plan: Plan, taken: PricedLayout) -> Iterator[Picture]:
    """Yield the pictures of other numbers of accelerators and other lengths; they are searched when they are drawn."""
    roles = (ROLES[0], ROLES[1])
    yield Picture(
        "scaling",
        "More accelerators",
        lambda: scaling_svg(by_size(plan), plan.job.cluster.size),
        "The best layout for each number of accelerators, with the same batch. Degrees of tp, cp and pp are searched "
        "within a factor of two of the degrees above.",
        roles,
    )
    yield Picture(
        "length",
        "Longer sequences",
        lambda: length_svg(by_length(taken), plan.job.seq_len, plan.limit_bytes),
        "The layout above with shorter and longer sequences, and the same number of sequences a step.",
        roles,
    )


def _nothing_fits(searched: SearchedPlan) -> Iterator[Note]:
    """Yield the layout that is nearest to fitting, and the changes that would make it fit."""
    plan, nearest = searched.plan, searched.plan.survey.nearest
    assert nearest is not None
    yield Note(
        f"all {plan.survey.n_layouts:,} layouts{_restricted(plan)} need more than {_room(searched)}"
        f"{host_limit_in_words(plan)}",
        "nothing fits",
        "bad",
    )
    needed = shortage(plan.job, nearest, plan.survey.nearest_bytes, plan.limit_bytes)
    yield Note(f"{nearest} needs {needed}", "nearest")
    if searched.remedies:
        yield Note("what would make it fit, each tried by itself:")
        yield from (Note(f"  {remedy.what}") for remedy in searched.remedies)
    else:
        yield Note("no single change that was tried (accelerators, sequence length, precision) makes it fit")
    yield from (Note(warning, "warning", "bad") for warning in job_warnings(plan.job))
