"""The printed output of `shardwright dryrun`."""

from collections import Counter
from typing import TYPE_CHECKING

from shardwright.cli.common import console, print_table, print_text
from shardwright.dry_run.agreement import checked
from shardwright.dry_run.document import LARGEST, TRAFFIC, largest_rows, traffic_rows
from shardwright.dry_run.length import step_length
from shardwright.dry_run.record import KINDS, WAIT, RankRecord
from shardwright.system.units import format_bytes
from shardwright.view.terminal import columns

if TYPE_CHECKING:
    from shardwright.dry_run.run import DryRun


def print_dry_run(found: "DryRun", messages: bool) -> None:
    """Print the verdict, the fullest rank, the other ranks, and the calls on which the ranks do not agree."""
    record = found.fullest
    layout = found.config.layout.layout()
    print_text(f"rank {record.rank} of {layout.world_size}: {layout}")
    needed, limit = found.needed_bytes(record), found.how.limit_bytes
    verdict = "fits" if found.fits else "does not fit"
    print_text(
        f"{verdict}: {format_bytes(needed)} of the {format_bytes(limit)} that a rank may need; "
        f"{format_bytes(record.peak.n_bytes)} of tensors, and what the plan estimates for libraries and the allocator"
    )
    if record.repeats:
        n, n_run = found.config.accumulation, step_length(found.config).n_run
        print_text(
            f"{n_run} of {n} micro-batches were run: after the first ones the step repeats itself, so the peak is that "
            f"of all {n}, and calls, bytes and FLOPs are counted for all {n}"
        )
    _print_memory(found, record)
    _print_largest(record)
    _print_traffic(found, record)
    if len(found.records) > 1:
        _print_ranks(found)
    for each in found.disagreements:
        console.print()
        print_text(f"ranks do not agree: {each.sentence}")
    if not found.fits:
        _print_remedies(found)
    if messages:
        _print_messages(record)


def _print_memory(found: "DryRun", record: RankRecord) -> None:
    peak = record.peak
    console.print()
    at = f", in {peak.module}" if peak.module else ""
    print_text(f"peak in {peak.action}{at}, when {peak.op} allocates")
    table = columns("kind", "at the peak", "its own peak", left=1)
    for kind in KINDS:
        table.add_row(kind, format_bytes(peak.kinds[kind]), format_bytes(record.peak_of_kinds[kind]))
    print_table(table)
    if record.host_bytes:
        print_text(f"besides, {format_bytes(record.host_bytes)} in the memory of the host")
    console.print()
    plan = found.plans[record.rank]
    if isinstance(plan, str):
        print_text(f"no plan to compare with: {plan}")
        return
    table = columns("kinds", "dry run", "plan", "difference", left=1)
    for name, dry, by_plan in found.groups(record):
        assert by_plan is not None
        table.add_row(name, format_bytes(dry), format_bytes(by_plan), _difference(by_plan, dry))
    table.add_row(
        "peak", format_bytes(peak.n_bytes), format_bytes(plan.peak_bytes), _difference(plan.peak_bytes, peak.n_bytes)
    )
    print_table(table)


def _difference(plan: float, dry: float) -> str:
    if plan > 10 * dry:
        return f"+{format_bytes(plan - dry)}"  # a ratio to a number near 0 is not informative
    return f"{plan / dry - 1:+.1%}" if dry else ""


def _print_largest(record: RankRecord) -> None:
    console.print()
    table = columns("largest at the peak", *LARGEST, left=1)
    for row in largest_rows(record):
        table.add_row(*row)
    print_table(table)


def _print_traffic(found: "DryRun", record: RankRecord) -> None:
    console.print()
    if not record.messages:
        print_text("no collectives and no messages")
        return
    plan = found.plans[record.rank]
    table = columns(*TRAFFIC, left=2)
    for row in traffic_rows(found, record):
        table.add_row(*row)
    print_table(table)
    flops = sum(record.flops.values())
    by_plan_of = "" if isinstance(plan, str) else f"; by the plan {plan.flops / 1e12:.4g}, the mean of all ranks"
    print_text(f"{flops / 1e12:.4g} TFLOP of matmuls and attention (not halved by the causal mask){by_plan_of}")


def _print_ranks(found: "DryRun") -> None:
    console.print()
    table = columns("rank", "peak", "in", "messages", left=0)
    for record in found.records:
        n_messages = sum(sums.calls for sums in record.sent.values())
        table.add_row(str(record.rank), format_bytes(record.peak.n_bytes), record.peak.action, str(n_messages))
    print_table(table)
    counts = checked(found.records)
    world_size = found.config.layout.layout().world_size
    of = "all ranks" if counts.ranks == world_size else f"{counts.ranks} of {world_size:,} ranks, one of each class"
    rules = "same collectives, order, counts and types; a receive for each send; no cycle if every call blocks"
    print_text(
        f"NCCL's rules {'are broken' if found.disagreements else 'hold'} over {counts.calls:,} calls of {of}, in "
        f"{counts.communicators:,} communicators, {counts.matched_sends:,} sends among them: {rules}"
    )


def _print_remedies(found: "DryRun") -> None:
    if found.remedies is None:
        return
    console.print()
    for each in found.remedies:
        print_text(f"fits with {each.change}: {format_bytes(each.needed_bytes)}")
    if not found.remedies:
        print_text(
            "none of the changes that were tried makes it fit; `shardwright plan` searches every layout of a cluster"
        )


def _print_messages(record: RankRecord) -> None:
    console.print()
    table = columns("action", "operation", "axis", "bytes", "type", "module", left=6)
    number: Counter[str] = Counter()
    for message in record.messages:
        if message.op != WAIT:
            number[message.op] += 1
            table.add_row(
                message.action,
                message.op,
                message.axis,
                str(message.n_bytes),
                message.dtype,
                message.module or "-",
            )
    print_table(table)
