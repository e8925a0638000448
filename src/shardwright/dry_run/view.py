"""The document of a dry run: the verdict, the memory of the fullest rank and its collectives, and the other ranks."""

from collections.abc import Iterator
from functools import partial
from math import radians, sin
from typing import TYPE_CHECKING, Any

import numpy as np

from shardwright.dry_run.agreement import checked
from shardwright.dry_run.length import step_length
from shardwright.dry_run.planned import PlannedRank
from shardwright.dry_run.record import KINDS, WAIT, Moment, RankRecord, RecordedMessage
from shardwright.dry_run.run import DryRun
from shardwright.report.plan_pictures import KINDS as COLOURS_OF_KINDS
from shardwright.report.plan_pictures import ROLES
from shardwright.system.units import GiB, MiB, counted, format_bytes
from shardwright.view.document import (
    BYTES,
    COUNT,
    NUMBER,
    WORDS,
    Column,
    Fact,
    Facts,
    Note,
    Part,
    Picture,
    Section,
    Table,
    VerbDocument,
)
from shardwright.view.style import COLOURS, rendered, text_width_pt

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MOST_NAMES = 24
"""Maximum number of actions whose names are written below the plot, evenly selected."""
_NAMES_AT = 60
"""Rotation of these names in degrees."""
_SIZE_IN = (10.0, 3.6)


def dry_run_document(result: DryRun, messages: bool) -> VerbDocument:
    """Return the document of a dry run. `messages`: list every collective and message of the fullest rank."""
    record, layout = result.fullest, result.config.layout.layout()
    verdict = "fits" if result.fits else "does not fit"
    parts: list[Part] = [
        Note(f"rank {record.rank} of {layout.world_size:,}: {layout}", tone="strong"),
        Facts([*_facts(result, record, verdict)]),
    ]
    if len(result.stages) > 1:
        batch = result.config.batch
        parts.append(
            Note(
                f"{batch.global_batch:,} sequences of {batch.seq_len:,} tokens in micro-batches of "
                f"{batch.micro_batch:,}: of the {len(result.stages)} stages of the batch the one that needs most memory"
            )
        )
    if result.compile_left_out:
        parts.append(
            Note(
                "precision.compile is left out, here and in the plan's numbers: compiled layers keep fewer activations "
                "than this"
            )
        )
    if record.repeats:
        n, n_run = result.config.accumulation, step_length(result.config).n_run
        parts.append(
            Note(
                f"{n_run} of {n} micro-batches were run: after the first ones the step repeats itself, so the peak is "
                f"that of all {n}, and calls, bytes and FLOPs are counted for all {n}"
            )
        )
    parts += _memory(result, record)
    parts += [Section("The largest tensors at the peak"), _largest(record)]
    parts += [Section("Collectives and messages"), _traffic(result, record)]
    if len(result.records) > 1:
        parts += _ranks(result)
    parts += [Note(disagreement.sentence, "ranks do not agree", "bad") for disagreement in result.disagreements]
    if not result.fits and result.remedies is not None:
        parts += [Section("What would make it fit"), *_remedies(result)]
    if messages:
        parts += [Section("Every collective and message"), _messages(record)]
    return VerbDocument(
        f"Dry run of rank {record.rank} of {layout.world_size:,}: it {verdict}", dry_run_data(result), parts
    )


def _facts(result: DryRun, record: RankRecord, verdict: str) -> Iterator[Fact]:
    needed, limit, peak = result.needed_bytes(record), result.how.limit_bytes, record.peak
    yield Fact(
        verdict,
        format_bytes(needed),
        f"= {needed / limit:.1%} of the {format_bytes(limit)} that a rank may need, with libraries and the allocator "
        "as the plan estimates",
        "good" if result.fits else "bad",
    )
    at = f", in {peak.module}" if peak.module else ""
    yield Fact("peak of tensors", format_bytes(peak.n_bytes), f"in {peak.action}{at}, when {peak.op} allocates")
    if record.host_bytes:
        yield Fact("memory of the host", format_bytes(record.host_bytes))
    n_calls, n_bytes = (sum(numbers) for numbers in zip((0, 0), *record.sent.values(), strict=True))
    yield Fact("messages a step", f"{n_calls:,}", f"with {format_bytes(n_bytes)}")
    plan = result.plans[record.rank]
    planned = "" if isinstance(plan, str) else f"; by the plan {plan.flops / 1e12:.4g}, the mean of all ranks"
    flops = f"{sum(record.flops.values()) / 1e12:.4g} TFLOP"
    yield Fact("compute a step", flops, f"of matmuls and attention (not halved by the causal mask){planned}")


def _memory(result: DryRun, record: RankRecord) -> Iterator[Part]:
    peak, plan = record.peak, result.plans[record.rank]
    yield Picture(
        "memory",
        "Memory over the step",
        partial(_memory_svg, record),
        "For each action of the step, in order, the moment with the most bytes. Tensors alone: the verdict adds "
        "workspace of libraries and memory that the allocator cannot use.",
        (ROLES[0], ROLES[1]),
    )
    columns = Column("kind"), Column("at the peak", BYTES), Column("its own peak", BYTES)
    yield Table(columns, [(kind, peak.kinds[kind], record.peak_of_kinds[kind]) for kind in KINDS])
    if isinstance(plan, str):
        yield Note(plan, "no plan to compare with")
        return
    rows = [*result.groups(record), ("peak", peak.n_bytes, plan.peak_bytes)]
    yield Table(
        (Column("kinds"), Column("dry run", BYTES), Column("plan", BYTES), Column("difference", NUMBER)),
        [(name, dry, by_plan, _difference(by_plan or 0.0, dry)) for name, dry, by_plan in rows],
    )


def _difference(plan: float, dry: float) -> str:
    if plan > 10 * dry:
        return f"+{format_bytes(plan - dry)}"  # a ratio to a number near 0 is not informative
    return f"{plan / dry - 1:+.1%}" if dry else ""


def _largest(record: RankRecord) -> Table:
    names = "shape", "made by", "in", "line"
    return Table(
        (Column("kind"), Column("bytes", BYTES), *(Column(name, WORDS) for name in names)),
        [
            (
                block.kind,
                block.n_bytes,
                f"{' x '.join(map(str, block.shape))} {block.dtype}",
                block.op if block.action else "",
                block.module or "-",
                block.line or "-",
            )
            for block in record.largest
        ],
    )


def _traffic(result: DryRun, record: RankRecord) -> Part:
    if not record.messages:
        return Note("no collectives and no messages")
    numbers = ("calls", COUNT), ("bytes a step", BYTES), ("plan: calls", COUNT), ("bytes", BYTES)
    return Table(
        (Column("axis"), Column("operation"), *(Column(*number) for number in numbers)),
        [
            (axis, op, sums.calls, sums.n_bytes, *((None, None) if plan is None else (plan.calls, plan.n_bytes)))
            for axis, op, sums, plan in result.traffic(record)
        ],
    )


def _ranks(result: DryRun) -> Iterator[Part]:
    yield Section("Ranks that were run")
    yield Table(
        (Column("rank", COUNT), Column("peak", BYTES), Column("in", NUMBER), Column("messages", COUNT)),
        [
            (record.rank, record.peak.n_bytes, record.peak.action, sum(sums.calls for sums in record.sent.values()))
            for record in result.records
        ],
    )
    counts, world_size = checked(result.records), result.config.layout.layout().world_size
    ranks = "all ranks" if counts.ranks == world_size else f"{counts.ranks} of {world_size:,} ranks, one of each class"
    rules = "same collectives, order, counts and types; a receive for each send; no cycle if every call blocks"
    communicators = counted(counts.communicators, "communicator")
    yield Note(
        f"NCCL's rules {'are broken' if result.disagreements else 'hold'} over {counts.calls:,} calls of {ranks}, in "
        f"{communicators}, {counts.matched_sends:,} sends among them: {rules}"
    )


def _remedies(result: DryRun) -> Iterator[Part]:
    for remedy in result.remedies or ():
        yield Note(f"fits with {remedy.change}: {format_bytes(remedy.needed_bytes)}")
    if not result.remedies:
        yield Note(
            "none of the changes that were tried makes it fit; `shardwright plan` searches every layout of a cluster"
        )


def _messages(record: RankRecord) -> Table:
    names = "action", "operation", "axis", "bytes", "type", "module"
    return Table(
        [Column(name) for name in names],
        [
            (message.action, message.op, message.axis, message.n_bytes, message.dtype, message.module or "-")
            for message in record.messages
            if message.op != WAIT
        ],
    )


def _memory_svg(record: RankRecord) -> str:
    curve = record.curve
    places = np.arange(len(curve))
    colours = [light for light, _ in COLOURS_OF_KINDS]
    unit, name = (GiB, "GiB") if record.peak.n_bytes >= GiB else (MiB, "MiB")

    def compose(figure: "Figure") -> None:
        step = -(-len(curve) // _MOST_NAMES)
        names = [moment.action for moment in curve]
        longest_pt = max(text_width_pt(name, 9) for name in names[::step])
        bottom = (longest_pt * sin(radians(_NAMES_AT)) + 14) / (72 * _SIZE_IN[1])
        ax = figure.add_axes((0.06, bottom, 0.92, 0.82 - bottom))
        below = np.zeros(len(curve))
        for colour, kind in zip(colours, KINDS, strict=False):
            resident = np.array([moment.kinds[kind] for moment in curve]) / unit
            ax.bar(places, resident, bottom=below, width=1.0, color=colour, linewidth=0, label=kind)
            below = below + resident
        ax.set_xticks(places[::step], names[::step], rotation=_NAMES_AT, ha="right", rotation_mode="anchor")
        ax.set_xlim(-0.6, len(curve) - 0.4)
        figure.text(0.06, 0.98, f"Memory, {name}", va="top", fontsize=10.5, fontweight="bold", color=COLOURS["ink"])
        figure.legend(ncols=len(KINDS), loc="upper left", bbox_to_anchor=(0.06, 0.92))

    return rendered(_SIZE_IN, compose, "svg", transparent=True).decode("utf-8")


def dry_run_data(result: DryRun) -> dict[str, Any]:
    """Return a dry run as a JSON-compatible dict. Bytes are integers; the plan's values are None, with a reason, if
    missing."""
    return {
        "fits": result.fits,
        "limit_bytes": result.how.limit_bytes,
        "needed_bytes": result.needed_bytes(result.fullest),
        "layout": result.config.layout.layout().settings(),
        "world_size": result.config.layout.layout().world_size,
        "compile_left_out": result.compile_left_out,
        "microbatches": result.config.accumulation,
        "microbatches_run": step_length(result.config).n_run,
        "fullest": result.fullest.rank,
        "ranks": [_rank(result, record) for record in result.records],
        "checked": checked(result.records)._asdict(),
        "disagreements": [
            {
                "what": disagreement.what,
                "sentence": disagreement.sentence,
                "sides": [
                    {"rank": rank, "message": None if side is None else _message(side)}
                    for rank, side in zip(disagreement.ranks, disagreement.sides, strict=True)
                ],
            }
            for disagreement in result.disagreements
        ],
        "remedies": None if result.remedies is None else [vars(remedy) for remedy in result.remedies],
    }


def _rank(result: DryRun, record: RankRecord) -> dict[str, Any]:
    plan = result.plans[record.rank]
    return {
        "rank": record.rank,
        "peak": _moment(record.peak),
        "peak_of_kinds": record.peak_of_kinds,
        "host_bytes": record.host_bytes,
        "plan": _plan(plan),
        "groups": {name: {"dry_bytes": dry, "plan_bytes": by_plan} for name, dry, by_plan in result.groups(record)},
        "curve": [_moment(moment) for moment in record.curve],
        "largest": [block._asdict() for block in record.largest],
        "traffic": [
            {"axis": axis, "op": op, "calls": sums.calls, "bytes": sums.n_bytes}
            | ({} if by_plan is None else {"plan_calls": by_plan.calls, "plan_bytes": by_plan.n_bytes})
            for axis, op, sums, by_plan in result.traffic(record)
        ],
        "flops": record.flops,
        "messages": [_message(message) for message in record.messages if message.op != WAIT],
    }


def _plan(plan: PlannedRank | str) -> dict[str, Any]:
    if isinstance(plan, str):
        return {"peak_bytes": None, "why": plan}
    return {
        "peak_bytes": plan.peak_bytes,
        "workspace_bytes": plan.workspace_bytes,
        "moment": plan.moment,
        "flops": plan.flops,
    }


def _moment(moment: Moment) -> dict[str, Any]:
    return {**moment._asdict(), "bytes": moment.n_bytes}


def _message(message: RecordedMessage) -> dict[str, Any]:
    """Return a message as a dict. `first_rank`, `n_ranks`: of the process group."""
    fields = message._asdict()
    ranks = fields.pop("ranks")
    return fields | {"first_rank": ranks[0], "n_ranks": len(ranks)}
