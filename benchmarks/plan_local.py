"""What `plan --hardware` predicts for this machine beside steps of the training program that it runs.

    python benchmarks/plan_local.py mine.toml [--layouts 20] [--models 3] [--rounds 3] [--steps 4] [--write]

A hardware file that is not there is measured first, by `shardwright measure --out mine.toml`. Each round runs every
layout of every model, interleaved, as a world of fresh processes, and notes the median step of the rank that takes
longest, in the clock of the file, and the most resident memory of any rank. What a run has measured is kept in
--results, so that a benchmark that was ended goes on where it was. With CPU-seconds, in which a rank that waits takes
none, the prediction is without the idle time of pipelines, and layouts of more ranks than cores are left out. Printed
is every layout as it was measured, the mean absolute error of the step time and of the peak memory, and Spearman's rank
correlation of the step times of each model.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np

from shardwright.config import parse
from shardwright.cost.hardware import cluster
from shardwright.cost.job import Job
from shardwright.cost.machine import on_machine
from shardwright.cost.step import Estimate, estimate
from shardwright.system.files import parse_toml
from shardwright.system.units import MiB
from shardwright.verification.ranks import run_ranks, start_server


def _llama(n_layers: int, d_model: int, d_ffn: int, n_heads: int, n_kv_heads: int, vocab_size: int) -> dict[str, Any]:
    sizes = {"n_layers": n_layers, "d_model": d_model, "d_ffn": d_ffn, "n_heads": n_heads, "n_kv_heads": n_kv_heads}
    return {"preset": "debug", **sizes, "head_dim": d_model // n_heads, "vocab_size": vocab_size, "max_seq_len": 256}


MODELS = {
    "6M": _llama(6, 256, 768, 8, 4, 2048),
    "30M": _llama(8, 512, 1536, 8, 8, 4096),
    "14M": _llama(8, 384, 1024, 6, 6, 2048),
}
SEQ_LEN, GLOBAL_BATCH = 256, 4
# (layout, sequences of a micro-batch). The first ones differ most.
LAYOUTS: tuple[tuple[dict[str, Any], int], ...] = (
    ({}, 2),
    ({"dp_shard": 2, "zero": 1}, 2),
    ({"tp": 2}, 2),
    ({"pp": 2, "pp_schedule": "1f1b"}, 1),
    ({"dp_shard": 2, "zero": 3}, 1),
    ({"recompute": "full"}, 2),
    ({"cp": 2, "cp_method": "allgather"}, 2),
    ({"dp_replicate": 2}, 2),
    ({}, 1),
    ({"tp": 2, "sequence_parallel": False}, 2),
    ({"dp_shard": 2, "zero": 2}, 1),
    ({"cp": 2, "cp_method": "zigzag"}, 2),
    ({"cp": 2, "cp_method": "ulysses"}, 2),
    ({"pp": 2, "pp_schedule": "zb-h1"}, 1),
    ({"pp": 2, "pp_schedule": "afab"}, 2),
    ({}, 4),
    ({"dp_shard": 2, "zero": 3, "recompute": "full"}, 2),
    ({"tp": 2, "recompute": "full"}, 4),
    ({"loss_chunk_tokens": 128}, 2),
    ({"pp": 2, "pp_schedule": "interleaved-1f1b", "virtual_stages": 2}, 1),
    ({"tp": 2, "dp_shard": 2, "zero": 1}, 2),
    ({"pp": 2, "dp_replicate": 2, "pp_schedule": "1f1b"}, 1),
)


def run_file(model: str, number: int) -> dict[str, Any]:
    from shardwright.measuring.steps import run_file

    layout, micro_batch = LAYOUTS[number]
    batch = {"seq_len": SEQ_LEN, "global_batch": GLOBAL_BATCH, "micro_batch": micro_batch}
    return run_file(MODELS[model], batch, layout, "fp32")


def ranks_of(number: int) -> int:
    return int(np.prod([LAYOUTS[number][0].get(axis, 1) for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp")]))


def predicted(hardware: Path, model: str, number: int) -> Estimate:
    config = parse(run_file(model, number))
    name, ranks = next(iter(parse_toml(hardware.read_text())["accelerators"])), ranks_of(number)
    job = Job(
        model=config.spec(),
        cluster=cluster(f"{name}:{ranks}/{ranks}", hardware),
        seq_len=SEQ_LEN,
        global_batch=GLOBAL_BATCH,
        precision="fp32",
    )
    return estimate(on_machine(job), config.layout.layout(), config.batch.micro_batch)


def measure(model: str, number: int, steps: int) -> list[dict[str, Any]]:
    """One world of fresh processes: what each rank measured."""
    from shardwright.measuring.steps import run_steps
    from shardwright.system.processes import threads_of_a_rank

    ranks = ranks_of(number)
    found = run_ranks(
        run_steps, ranks, run_file(model, number), steps, timeout_s=900, n_threads=threads_of_a_rank(ranks)
    )
    return [asdict(each) for each in found]


def step_s(runs: list[list[dict[str, Any]]], clock: str) -> float:
    """The median over rounds of the median step of the slowest rank."""
    return statistics.median(max(statistics.median(rank[f"{clock}_s"]) for rank in ranks) for ranks in runs)


def report(hardware: Path, results: dict[str, list[list[dict[str, Any]]]], clock: str) -> str:
    lines = [
        "| model | layout | measured s | predicted s | error | measured MiB | predicted MiB | error |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    times: dict[str, list[tuple[float, float]]] = {}
    memory = []
    for key, runs in results.items():
        model, at = key.rsplit(" ", 1)
        found = predicted(hardware, model, int(at))
        seconds = found.step_s - (found.parts_s["pipeline"] if clock == "cpu" else 0.0)
        took, peak = step_s(runs, clock), max(rank["peak_bytes"] for ranks in runs for rank in ranks)
        times.setdefault(model, []).append((took, seconds))
        memory.append((peak, found.peak_bytes))
        layout, micro_batch = LAYOUTS[int(at)]
        words = ", ".join(f"{name} {value}" for name, value in layout.items()) or "one process"
        lines.append(
            f"| {model} | {words}, micro_batch {micro_batch} | {took:.3f} | {seconds:.3f} | "
            f"{seconds / took - 1:+.0%} | "
            f"{peak / MiB:.0f} | {found.peak_bytes / MiB:.0f} | {found.peak_bytes / peak - 1:+.0%} |"
        )
    every = [each for those in times.values() for each in those]
    lines.append(
        f"\nmean absolute error of the step time: {mean_error(every):.1%} ({len(every)} runs, {clock} seconds)"
    )
    lines.append(f"mean absolute error of the peak memory: {mean_error(memory):.1%}")
    for model, those in times.items():
        if len(those) > 2:
            lines.append(f"Spearman, {model}: {spearman(those):.2f} ({len(those)} layouts)")
    return "\n".join(lines)


def mean_error(pairs: list[tuple[float, float]]) -> float:
    return float(np.mean([abs(prediction / measured - 1) for measured, prediction in pairs]))


def spearman(pairs: list[tuple[float, float]]) -> float:
    ranks = [np.argsort(np.argsort([pair[side] for pair in pairs])) for side in (0, 1)]
    return float(np.corrcoef(*ranks)[0, 1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("hardware", type=Path, help="FILE.toml of shardwright measure")
    parser.add_argument("--layouts", type=int, default=20)
    parser.add_argument("--models", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4, help="counted steps of each run")
    parser.add_argument("--results", type=Path, help="FILE.json, by default beside the hardware file")
    parser.add_argument("--print", action="store_true", help="run nothing; print what --results has")
    parser.add_argument("--write", action="store_true", help="put the report into benchmarks/results/")
    options = parser.parse_args()
    if not options.hardware.exists():
        subprocess.run([sys.executable, "-m", "shardwright", "measure", "--out", str(options.hardware)], check=True)
    kept = options.results or options.hardware.with_suffix(".runs.json")
    clock = parse_toml(options.hardware.read_text())["measured"]["clock"]
    results: dict[str, list[list[dict[str, Any]]]] = json.loads(kept.read_text()) if kept.exists() else {}
    numbers = [n for n in range(len(LAYOUTS)) if clock == "wall" or ranks_of(n) <= (os.cpu_count() or 1)]
    wanted = [f"{model} {n}" for n in numbers[: options.layouts] for model in list(MODELS)[: options.models]]
    if not options.print:
        start_server()
        for round_ in range(options.rounds):
            for key in wanted:
                model, at = key.rsplit(" ", 1)
                if len(results.setdefault(key, [])) <= round_:
                    results[key].append(measure(model, int(at), options.steps))
                    kept.write_text(json.dumps(results))
                    print(f"round {round_ + 1}: {key}", file=sys.stderr, flush=True)
    text = report(options.hardware, {key: results[key] for key in wanted if results.get(key)}, clock)
    print(text)
    if options.write:
        path = Path(__file__).parent / "results" / f"plan-local-{date.today()}.md"
        path.write_text(f"# Predicted against measured on this machine, {date.today()}\n\n{text}\n")
        print(f"written to {path}")


if __name__ == "__main__":
    main()
