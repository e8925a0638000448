"""Dry runs beside published peaks, of runs whose program is of our kind.

    python benchmarks/published_peaks.py [--results FOLDER] [--write]

For each such row of the tables that `shardwright plan evaluate` reads: the published peak; the prediction of `plan` for
the software of the row; and what this system needs for the same model, layout and batch, by its plan and by a dry run
as on a GPU. Dry runs are kept in --results; `--write` writes the tables to benchmarks/results.

torchtitan: FSDP2 that recomputes every layer. Their peak is what the allocator had reserved, so plan and dry run add
what they add for libraries and the allocator. These runs were compiled and had matmuls in fp8, which keep no more; dry
runs are eager and in bf16. Their loss is another one: it holds copies of the logits in fp32, and ours none.

Megatron-LM's functional tests: dense models in bf16 with flash attention, one row of each layout. Their peak is that of
the tensors of the last rank of pp. Their loss works in place on logits in fp32, ours in place on logits in bf16, and in
models this small the logits are most of the memory.
"""

import argparse
import datetime
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from shardwright.config import RunConfig, parse
from shardwright.dry_run.planned import planned
from shardwright.dry_run.run import DryRunSettings, dry_run, fullest_by_plan
from shardwright.model.presets import resolve
from shardwright.planner.choice import choice_at
from shardwright.planner.evaluate import MEASURED_RUNS
from shardwright.planner.measured_run import PredictableRun
from shardwright.planner.run_columns import MeasuredRun
from shardwright.planner.runs import read_runs
from shardwright.system.units import GiB
from shardwright.verification.ranks import start_server

HERE = Path(__file__).parent


def _is_torchtitan(row: MeasuredRun) -> bool:
    return (row.family, row.recompute) == ("torchtitan", "full")


def _is_megatron(row: MeasuredRun) -> bool:
    kind = (row.recompute, row.precision, row.flash, row.fused_loss, row.cp)
    return kind == ("none", "bf16", True, False, 1) and row.experts is None and not row.gated and not row.note


@dataclass(frozen=True)
class Source:
    """Published rows. `table`: their file; `kept`: which of them are compared; `preset`: of a row's model."""

    name: str
    table: Path
    kept: Callable[[MeasuredRun], bool]
    preset: Callable[[MeasuredRun], str]

    def runs(self) -> Iterator[PredictableRun]:
        """One row of each model and layout."""
        seen = set()
        for run in read_runs(self.table):
            if isinstance(run, PredictableRun) and run.measured.peak_mem_gib and self.kept(run.measured):
                key = (run.job.model, str(choice_at(run.candidates, 0)), run.job.global_batch)
                if key not in seen:
                    seen.add(key)
                    yield run


SOURCES = (
    Source("torchtitan", MEASURED_RUNS, _is_torchtitan, lambda row: row.model.lower().replace("llama", "llama-")),
    Source("Megatron-LM", MEASURED_RUNS.with_name("megatron_ci.csv"), _is_megatron, lambda _: "gpt2"),
)


def config_of(run: PredictableRun, preset: str) -> RunConfig:
    """The run file of a row."""
    choice, row = choice_at(run.candidates, 0), run.measured
    known = asdict(resolve(preset))
    model: dict[str, Any] = {"preset": preset}
    if preset == "gpt2":
        model |= {key: value for key, value in asdict(run.job.model).items() if value != known[key]}
    model["max_seq_len"] = max(row.seq_len, known["max_seq_len"])
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


def peaks(run: PredictableRun, preset: str, folder: Path) -> tuple[float, float]:
    """GiB that this system needs for a row, as that was measured: by the plan, and by a dry run."""
    config, path = config_of(run, preset), folder / f"{run.measured.id}.json"
    layout = config.layout.layout()
    if not path.is_file():
        last = run.measured.peak_mem_rank == "last"
        rank = layout.rank_at({"pp": layout.pp - 1}) if last else fullest_by_plan(config)
        result = dry_run(config, DryRunSettings(1e15), rank, remedies=False)
        record = result.fullest
        entry = {"rank": record.rank, "peak": record.peak.n_bytes, "needed": result.needed_bytes(record)}
        path.write_text(json.dumps(entry), encoding="utf-8")
    entry = json.loads(path.read_text(encoding="utf-8"))
    plan = planned(config, entry["rank"])
    assert not isinstance(plan, str), plan
    n_bytes = entry["needed" if run.measured.peak_mem_from == "reserved" else "peak"]
    return plan.peak_bytes / entry["peak"] * n_bytes / GiB, n_bytes / GiB


def table_of(source: Source, folder: Path) -> Iterator[str]:
    """The rows of a source, and how far off they are."""
    yield f"| row | ranks | layout | tokens | published GiB | plan, {source.name} | plan, ours | dry run, ours |"
    yield "| --- | ---: | --- | ---: |" + " ---: |" * 4
    off: dict[str, list[float]] = {f"the plan for {source.name}": [], "our dry run": []}
    for run in source.runs():
        row, choice = run.measured, choice_at(run.candidates, 0)
        assert row.peak_mem_gib is not None
        theirs, (plan, dry) = run.predicted_peak_gib(), peaks(run, source.preset(row), folder)
        for errors, found in zip(off.values(), (theirs, dry), strict=True):
            errors.append(found / row.peak_mem_gib - 1)
        told = [f"{found:.2f} ({found / row.peak_mem_gib - 1:+.1%})" for found in (theirs, plan, dry)]
        tokens = f"{choice.micro_batch} x {row.seq_len:,}"
        yield (
            f"| {row.id}, {row.model} | {row.accelerators} | {choice.layout} | {tokens} | {row.peak_mem_gib:.2f} | "
            f"{' | '.join(told)} |"
        )
    for name, errors in off.items():
        yield ""
        yield (
            f"{name[0].upper()}{name[1:]} against the published peak: mean absolute difference "
            f"{fmean(map(abs, errors)):.1%}, mean {fmean(errors):+.1%}, over {len(errors)} rows."
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=Path("runs/published-peaks"))
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    start_server()
    given.results.mkdir(parents=True, exist_ok=True)
    lines = [
        f"# Dry runs beside published peaks, {datetime.date.today()}",
        "",
        "`python benchmarks/published_peaks.py`",
    ]
    for source in SOURCES:
        lines += ["", f"## {source.name}", ""]
        for line in table_of(source, given.results):
            print(line, flush=True)
            lines.append(line)
    if given.write:
        path = HERE / "results" / f"published-peaks-{datetime.date.today()}.md"
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
