"""Dry runs beside published peaks: runs of torchtitan whose program is of our kind, FSDP2 that recomputes every layer.

    python benchmarks/published_peaks.py [--results FOLDER] [--write]

For each such row of the table that `shardwright plan evaluate` reads: the published peak, what the allocator had
reserved; the prediction of `plan` for torchtitan's stack; and what this system needs for the same model, layout and
batch, by its plan and by a dry run as on a GPU, with what both add for libraries and the allocator. These runs were
compiled and had matmuls in fp8, which keep no more; dry runs are eager and in bf16. Their loss is another one: it holds
more copies of the logits in fp32 than ours, which is why this system needs less. Dry runs are kept in --results;
`--write` writes the table to benchmarks/results.
"""

import argparse
import datetime
import json
from pathlib import Path
from statistics import fmean
from typing import Any

from shardwright.config import RunConfig, parse
from shardwright.dry_run.planned import planned
from shardwright.dry_run.run import How, dry_run, fullest_by_plan, needed_bytes
from shardwright.model.presets import resolve
from shardwright.planner.choice import choice_at
from shardwright.planner.evaluate import MEASURED_RUNS
from shardwright.planner.measured_run import Run
from shardwright.planner.runs import read_runs
from shardwright.units import GiB
from shardwright.verification.ranks import start_server

HERE = Path(__file__).parent
FAMILY, RECOMPUTED = "torchtitan", "full"


def of_our_kind() -> list[Run]:
    """The rows that a dry run is compared with."""
    runs = [each for each in read_runs(MEASURED_RUNS) if isinstance(each, Run)]
    return [
        each
        for each in runs
        if (each.measured.family, each.measured.recompute) == (FAMILY, RECOMPUTED) and each.measured.peak_mem_gib
    ]


def config_of(run: Run) -> RunConfig:
    """The run file of a row."""
    choice, row = choice_at(run.candidates, 0), run.measured
    preset = row.model.lower().replace("llama", "llama-")
    model: dict[str, Any] = {"preset": preset, "max_seq_len": max(row.seq_len, resolve(preset).max_seq_len)}
    return parse(
        {
            "out": "none",
            "steps": 2,
            "model": model,
            "data": {"path": "none"},
            "batch": {"seq_len": row.seq_len, "global_batch": row.global_batch, "micro_batch": choice.micro_batch},
            "layout": json.loads(json.dumps(choice.layout.settings())),
            "precision": {"compute": "bf16"},
        }
    )


def peaks(run: Run, folder: Path) -> tuple[float, float]:
    """GiB that this system needs for a row: by the plan, and by a dry run."""
    config, path = config_of(run), folder / f"{run.measured.id}.json"
    if not path.is_file():
        record = dry_run(config, How(1e15), fullest_by_plan(config), remedies=False).fullest
        told = {"rank": record.rank, "peak": record.peak.n_bytes, "needed": needed_bytes(config, record)}
        path.write_text(json.dumps(told), encoding="utf-8")
    told = json.loads(path.read_text(encoding="utf-8"))
    plan = planned(config, told["rank"])
    assert not isinstance(plan, str), plan
    return plan.peak_bytes / told["peak"] * told["needed"] / GiB, told["needed"] / GiB


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=Path("runs/published-peaks"))
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    start_server()
    given.results.mkdir(parents=True, exist_ok=True)
    lines = ["| row | ranks | layout | tokens | published GiB | plan, torchtitan | plan, ours | dry run, ours |"]
    lines += ["| --- | ---: | --- | ---: |" + " ---: |" * 4]
    off: dict[str, list[float]] = {"the plan for torchtitan": [], "the dry run": []}
    for run in of_our_kind():
        row, choice = run.measured, choice_at(run.candidates, 0)
        assert row.peak_mem_gib is not None
        theirs, (plan, dry) = run.predicted_peak_gib(), peaks(run, given.results)
        for errors, found in zip(off.values(), (theirs, dry), strict=True):
            errors.append(found / row.peak_mem_gib - 1)
        told = [f"{found:.1f} ({found / row.peak_mem_gib - 1:+.1%})" for found in (theirs, plan, dry)]
        tokens = f"{choice.micro_batch} x {row.seq_len:,}"
        lines.append(
            f"| {row.id}, {row.model} | {row.accelerators} | {choice.layout} | {tokens} | {row.peak_mem_gib:.1f} | "
            f"{' | '.join(told)} |"
        )
        print(lines[-1], flush=True)
    for name, errors in off.items():
        lines.append("")
        lines.append(
            f"{name[0].upper()}{name[1:]}: mean absolute difference {fmean(map(abs, errors)):.1%}, mean "
            f"{fmean(errors):+.1%}, over {len(errors)} rows."
        )
    print(*lines, sep="\n")
    if given.write:
        today = datetime.date.today()
        title = [f"# Dry runs beside published peaks, {today}", "", "`python benchmarks/published_peaks.py`", ""]
        path = HERE / "results" / f"published-peaks-{today}.md"
        path.write_text("\n".join([*title, *lines]) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
