"""What each way to need less memory saves and costs, beside plain PyTorch that does the same, where it can.

    python benchmarks/memory_savers.py [--rounds 3] [--steps 6] [--only NAME ...] [--write]

The model of `plain.py`, fp32, one thread a rank; a step is one micro-batch of 16 sequences, so that activations are
most of the memory, as in training at scale. Each round runs every row, ours and the plain loop in turns, as fresh
processes; ratios are those within a round. Memory is the peak of resident memory in the counted steps (VmHWM, which the
process resets after the warm-up), less what was resident before the model was built, of the rank that has most. Offload
to the memory of the host saves none of it where there is no accelerator; `disk` does. The plain row of adamw-8bit needs
torchao. `--write` puts the result, with date and machine, into benchmarks/results/.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from datetime import date
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import overhead
import plain

WARMUP, MICRO_BATCH = 3, 16
ZERO_3 = {"layout.dp_shard": 2, "layout.zero": 3}


@dataclass(frozen=True)
class Row:
    """Settings of ours, the plain loop that does the same (None: PyTorch has none), and the row both are set beside."""

    settings: dict[str, Any] = field(default_factory=dict)
    plain: str | None = None
    beside: str = "none"

    @property
    def n_ranks(self) -> int:
        """Processes of a run."""
        return int(self.settings.get("layout.dp_shard", 1))


ROWS = {
    "none": Row({}, "none"),
    "recompute selective": Row({"layout.recompute": "selective"}, "recompute selective"),
    "recompute full": Row({"layout.recompute": "full"}, "recompute full"),
    "loss_chunk_tokens 512": Row({"layout.loss_chunk_tokens": 512}, "loss_chunk_tokens 512"),
    "offload_activations cpu": Row(
        {"layout.offload_activations": "cpu", "layout.offload_min_bytes": 65536}, "offload_activations cpu"
    ),
    "offload_optimizer cpu": Row({"layout.offload_optimizer": "cpu"}),
    "offload_optimizer disk": Row({"layout.offload_optimizer": "disk"}),
    "states in bf16": Row({"optimizer.state_dtype": "bf16"}),
    "adamw-8bit": Row({"optimizer.name": "adamw-8bit"}, "adamw-8bit" if find_spec("torchao") else None),
    "adafactor": Row({"optimizer.name": "adafactor"}, "adafactor"),
    "muon": Row({"optimizer.name": "muon"}, "muon"),
    "compute bf16": Row({"precision.compute": "bf16"}, "compute bf16"),
    "fp8 tensorwise": Row({"precision.compute": "bf16", "precision.fp8": "tensorwise"}, None, "compute bf16"),
    "zero 3": Row(ZERO_3, "zero 3"),
    "zero 3, parameters and states cpu": Row(
        ZERO_3 | {"layout.offload_parameters": "cpu", "layout.offload_optimizer": "cpu"},
        "zero 3, parameters and states cpu",
        "zero 3",
    ),
    "zero 3, gradients bf16": Row(ZERO_3 | {"layout.compress_gradients": "bf16"}, "zero 3, gradients bf16", "zero 3"),
    "zero 3, gradients int8": Row(ZERO_3 | {"layout.compress_gradients": "int8"}, None, "zero 3"),
    "zero 3, weights int8": Row(ZERO_3 | {"layout.compress_weights": "int8"}, None, "zero 3"),
}


def resident(kind: str) -> int:
    """Bytes: VmRSS, what is resident now, or VmHWM, the most since it was reset."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{kind}:"))
    return 1024 * int(line.split()[1])


def forget_peak() -> None:
    """VmHWM is VmRSS from now on."""
    Path("/proc/self/clear_refs").write_text("5")


def run_ours(row: Row, folder: Path, steps: int) -> tuple[list[float], int]:
    """CPU-seconds of each counted step of this rank, and its peak memory above that before the model."""
    import torch

    from shardwright.config import parse
    from shardwright.data.batches import Batches
    from shardwright.training import run, sources
    from shardwright.training.ranks import ProcessRank, place_from_environment

    stamps: list[float] = []

    class Stamped(Batches):
        def __next__(self) -> Any:
            stamps.append(time.process_time())
            if len(stamps) == WARMUP + 1:
                forget_peak()
            return super().__next__()

    sources.Batches = Stamped  # type: ignore[misc]
    torch.set_num_threads(1)
    # The step after the last counted one is there to end that one's span.
    table = overhead.run_file("single", folder / "tokens", folder / "run", WARMUP - overhead.WARMUP + steps + 1)
    table["batch"]["micro_batch"] = MICRO_BATCH // row.n_ranks
    table["checkpoint"] = {"every": 0}
    table["layout"] = {}
    for key, value in row.settings.items():
        section, _, name = key.partition(".")
        table.setdefault(section, {})[name] = value
    before = resident("VmRSS")
    run.run(parse(table), place_from_environment() or ProcessRank(), quiet=True)
    return [end - begin for begin, end in pairwise(stamps)][WARMUP:], resident("VmHWM") - before


def run_plain(row: Row, steps: int) -> tuple[list[float], int]:
    """The same of the plain loop."""
    assert row.plain is not None
    before = resident("VmRSS")
    times = plain.train("single", steps, WARMUP, saver=row.plain, micro_batch=MICRO_BATCH, warm=forget_peak)
    return [cpu_s for _, cpu_s in times], resident("VmHWM") - before


def child(who: str, name: str, folder: str, steps: str) -> None:
    row = ROWS[name]
    found = run_plain(row, int(steps)) if who == "plain" else run_ours(row, Path(folder), int(steps))
    print(json.dumps(found), flush=True)
    os._exit(0)  # leaving gloo in order is not part of what is measured


def measure(who: str, name: str, folder: Path, steps: int) -> tuple[float, float]:
    """CPU-seconds of a step over all ranks, and bytes of the rank with most."""
    ranks = overhead.launched([__file__, "--child", who, name, str(folder), str(steps)], ROWS[name].n_ranks)
    overhead.remove_run(folder)
    return sum(statistics.median(times) for times, _ in ranks), max(n_bytes for _, n_bytes in ranks)


Results = dict[tuple[str, str], list[tuple[float, float]]]


def table_of(results: Results) -> str:
    """Medians over rounds; ratios are to the row that a row is set beside, ours to ours and plain to plain."""
    lines = [
        "| setting | ours: MB | ratio | CPU-s a step | ratio | plain: MB | ratio | CPU-s a step | ratio | ratios to |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, row in ROWS.items():
        if ("ours", name) not in results:
            continue
        cells = []
        for who in ("ours", "plain"):
            found, base = results.get((who, name)), results.get((who, row.beside))
            if found is None:
                cells += ["", "", "", ""]
                continue
            assert base is not None
            cpu_s, n_bytes = (statistics.median(values) for values in zip(*found, strict=True))
            ratios = [mine[0] / theirs[0] for mine, theirs in zip(found, base, strict=True)]
            less = n_bytes / statistics.median(n_bytes for _, n_bytes in base)
            span = f" ({min(ratios):.2f} to {max(ratios):.2f})" if who == "ours" else ""
            cells += [f"{n_bytes / 1e6:.0f}", f"{less:.2f}", f"{cpu_s:.3f}", f"{statistics.median(ratios):.2f}{span}"]
        lines.append(f"| {name} | {' | '.join(cells)} | {row.beside} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6, help="counted steps of each run")
    parser.add_argument("--only", choices=ROWS, nargs="+", help="some rows, and what they are set beside")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(*options.child)
    chosen = set(options.only or ROWS)
    names = [name for name in ROWS if name in chosen | {ROWS[each].beside for each in chosen}]
    runs = [(who, name) for name in names for who in ("ours", "plain") if who == "ours" or ROWS[name].plain]
    results: Results = {run: [] for run in runs}
    with tempfile.TemporaryDirectory() as folder:
        overhead.write_tokens(Path(folder))
        for round_ in range(options.rounds):
            for (who, name), found in results.items():
                found.append(measure(who, name, Path(folder), options.steps))
            print(f"round {round_ + 1} of {options.rounds} done", file=sys.stderr)
    table = table_of(results)
    print(table)
    if options.write:
        path = overhead.HERE / "results" / f"memory-savers-{date.today()}.md"
        path.write_text(
            f"# Memory and CPU-seconds of what saves memory, {date.today()}\n\n{overhead.machine()}\n\n{table}\n"
        )
        print(f"written to {path}")


if __name__ == "__main__":
    main()
