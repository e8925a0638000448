"""A dry run as JSON data."""

from typing import Any

from shardwright.dry_run.agreement import checked
from shardwright.dry_run.length import step_length
from shardwright.dry_run.planned import PlannedRank
from shardwright.dry_run.record import WAIT, Moment, RankRecord, RecordedMessage
from shardwright.dry_run.run import DryRun


def dry_run_data(found: DryRun) -> dict[str, Any]:
    """Return a dry run as a JSON-compatible dict. Bytes are integers; the plan's values are None, with a reason, if
    missing."""
    return {
        "fits": found.fits,
        "limit_bytes": found.how.limit_bytes,
        "needed_bytes": found.needed_bytes(found.fullest),
        "layout": found.config.layout.layout().settings(),
        "world_size": found.config.layout.layout().world_size,
        "compile_left_out": found.compile_left_out,
        "microbatches": found.config.accumulation,
        "microbatches_run": step_length(found.config).n_run,
        "fullest": found.fullest.rank,
        "ranks": [_rank(found, record) for record in found.records],
        "checked": checked(found.records)._asdict(),
        "disagreements": [
            {
                "what": each.what,
                "sentence": each.sentence,
                "sides": [
                    {"rank": rank, "message": None if side is None else _message(side)}
                    for rank, side in zip(each.ranks, each.sides, strict=True)
                ],
            }
            for each in found.disagreements
        ],
        "remedies": None if found.remedies is None else [vars(each) for each in found.remedies],
    }


def _rank(found: DryRun, record: RankRecord) -> dict[str, Any]:
    plan = found.plans[record.rank]
    return {
        "rank": record.rank,
        "peak": _moment(record.peak),
        "peak_of_kinds": record.peak_of_kinds,
        "host_bytes": record.host_bytes,
        "plan": _plan(plan),
        "groups": {name: {"dry_bytes": dry, "plan_bytes": by_plan} for name, dry, by_plan in found.groups(record)},
        "curve": [_moment(moment) for moment in record.curve],
        "largest": [block._asdict() for block in record.largest],
        "traffic": [
            {"axis": axis, "op": op, "calls": sums.calls, "bytes": sums.n_bytes}
            | ({} if by_plan is None else {"plan_calls": by_plan.calls, "plan_bytes": by_plan.n_bytes})
            for axis, op, sums, by_plan in found.traffic(record)
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
