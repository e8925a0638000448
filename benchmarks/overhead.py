"""What Shardwright's training loop costs beside loops written by hand in plain PyTorch (`plain.py`).

    python benchmarks/overhead.py [--rounds 5] [--steps 12] [--only NAME ...] [--anew] [--write]

Same model, same batch, same optimizer, fp32, one thread a rank. Ours on one process, data parallel on 2 and sharded
on 2 stand beside plain loops that do the same; tensor, context and pipeline parallelism beside the plain loop on one
process, for what they add is communication and work done twice. `moe` has 8 experts of half the width, 2 for a token,
so that it computes as much for a token as the dense model does, and stands beside a plain loop over the experts;
`moe-ep2`, the same with experts and samples dealt out over two ranks, beside our `moe`. Each round runs all of them,
interleaved, as fresh processes; the machine's drift then hits ours and theirs alike. What counts is the ratio of
CPU-seconds a step, summed over ranks, within a round. Ours does what the plain loops do not: counts target tokens over
the ranks, takes and clips the true gradient norm, balances the experts, reads token shards ahead, listens for signals,
logs. Below each of ours is its floor, what its matmuls, its attention and its collectives alone cost in the same
processes (`floor.py`), and the ratio of that to the same loop.

Each measurement is printed when it ends and kept in build/overhead.jsonl. A benchmark that was stopped continues from
there when it is started again with the same code, options and machine; `--anew` starts from the first round. `--write`
writes the table, with date and machine, to benchmarks/results/.
"""

import argparse
import hashlib
import json
import math
import os
import platform
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import date
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent
# Ours, and the plain loop it is set beside. Both sharded ones free and gather every block in both passes (ZeRO-3).
LAYOUTS: dict[str, dict[str, Any]] = {
    "single": {},
    "ddp": {"dp_replicate": 2},
    "fsdp": {"dp_shard": 2, "zero": 3},
    "tp2": {"tp": 2, "sequence_parallel": False},
    "tp2-sp": {"tp": 2, "sequence_parallel": True},
    "cp2-zigzag": {"cp": 2, "cp_method": "zigzag"},
    "cp2-ring": {"cp": 2, "cp_method": "ring"},
    "cp2-allgather": {"cp": 2, "cp_method": "allgather"},
    "cp2-ulysses": {"cp": 2, "cp_method": "ulysses"},
    "dp2-tp2": {"dp_replicate": 2, "tp": 2, "sequence_parallel": False},
    "pp2-afab": {"pp": 2, "pp_schedule": "afab"},
    "pp2-1f1b": {"pp": 2, "pp_schedule": "1f1b"},
    "pp2-zb-h1": {"pp": 2, "pp_schedule": "zb-h1"},
    "moe": {},
    "moe-ep2": {"dp_shard": 2, "ep": 2, "zero": 1},
}
PLAIN = ("single", "ddp", "fsdp", "moe")
WARMUP = 3
RECORDS = HERE.parent / "build" / "overhead.jsonl"


def run_file(kind: str, data: Path, out: Path, steps: int) -> dict[str, Any]:
    import plain

    moe = {"n_experts": plain.EXPERTS, "top_k": plain.TOP_K, "d_ffn": plain.EXPERT_FFN, "score": "sigmoid"}
    return {
        "out": str(out),
        "steps": WARMUP + steps,
        "device": "cpu",
        "model": {
            "preset": "debug",
            "n_layers": plain.LAYERS,
            "d_model": plain.WIDTH,
            "d_ffn": plain.FFN,
            "n_heads": plain.HEADS,
            "n_kv_heads": plain.KV_HEADS,
            "head_dim": plain.HEAD_DIM,
            "vocab_size": plain.VOCAB,
            "tied_embedding": False,
            **({"moe": moe} if kind.startswith("moe") else {}),
        },
        "data": {"path": str(data)},
        "batch": {
            "seq_len": plain.SEQ,
            "global_batch": plain.STEP_TOKENS // plain.SEQ,
            "micro_batch": plain.MICRO_BATCH,
        },
        "layout": LAYOUTS[kind],
        "optimizer": {"lr": 1e-3, "weight_decay": 0.01},
        "lr_schedule": {"shape": "constant"},
        "evaluation": {"samples": 0},
        "faults": {"hang_after": 0.0},  # a loaded machine is slow, and no rank hangs
    }


def ours(kind: str, data: Path, steps: int) -> dict[str, list[tuple[float, float]]]:
    """(wall, CPU) seconds of each step of a real run of ours, taken between the batches that it asks for, and of its
    floor, which the step after the last counted one is recorded for."""
    import torch

    from floor import Recorder
    from shardwright.config import parse
    from shardwright.data.batches import Batches
    from shardwright.training import run, sources
    from shardwright.training.ranks import ProcessRank, place_from_environment

    stamps: list[tuple[float, float]] = []
    floor: list[tuple[float, float]] = []
    recorder = Recorder()

    class Stamped(Batches):
        def __next__(self) -> Any:
            stamps.append((time.perf_counter(), time.process_time()))
            if len(stamps) == WARMUP + steps + 1:
                recorder.__enter__()
            if len(stamps) == WARMUP + steps + 2:
                recorder.__exit__(None, None, None)
                floor.extend([recorder.replay() for _ in range(WARMUP + steps)][WARMUP:])
            return super().__next__()

    sources.Batches = Stamped  # type: ignore[misc]
    torch.set_num_threads(1)
    table = run_file(kind, data, data.parent / "run", steps + 2)
    run.run(parse(table), place_from_environment() or ProcessRank(), quiet=True)
    spans = list(pairwise(stamps))[WARMUP : WARMUP + steps]
    return {"ours": [(after[0] - before[0], after[1] - before[1]) for before, after in spans], "floor": floor}


def child(who: str, kind: str, data: str, steps: int) -> None:
    if who == "plain":
        import plain

        times = {"plain": plain.train(kind, steps, WARMUP)}
    else:
        times = ours(kind, Path(data), steps)
    print(json.dumps(times), flush=True)
    os._exit(0)  # leaving gloo in order is not part of what is measured


def measure(who: str, kind: str, data: Path, steps: int) -> dict[str, dict[str, float]]:
    """One run as fresh processes: tokens/s from the best and the median step, CPU-seconds a step over all ranks; of
    `who`, and if that is ours, of its floor."""

    degrees = ("dp_replicate", "dp_shard", "tp", "cp", "pp")
    world = math.prod(LAYOUTS[kind].get(axis, 1) for axis in degrees)
    times = launched([__file__, "--child", who, kind, str(data), str(steps)], world)
    remove_run(data.parent)
    return {who: step_costs([rank[who] for rank in times]) for who in times[0]}


def step_costs(times: list[list[tuple[float, float]]]) -> dict[str, float]:
    import plain

    walls = [max(wall for wall, _ in step) for step in zip(*times, strict=True)]
    return {
        "tokens_per_s_best": plain.STEP_TOKENS / min(walls),
        "tokens_per_s_median": plain.STEP_TOKENS / statistics.median(walls),
        "cpu_s_per_step": sum(statistics.median(cpu for _, cpu in rank) for rank in times),
    }


def launched(arguments: list[str], world: int) -> list[Any]:
    """What each rank of a world of Python processes with these arguments prints last, as JSON."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = dict(os.environ, OMP_NUM_THREADS="1")
    if world > 1:
        environment |= {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command = [sys.executable, *arguments]
    ranks = [
        subprocess.Popen(
            command,
            env=environment | ({"RANK": str(r), "LOCAL_RANK": str(r)} if world > 1 else {}),
            stdout=subprocess.PIPE,
            text=True,
        )
        for r in range(world)
    ]
    return [json.loads(rank.communicate()[0].splitlines()[-1]) for rank in ranks]


def remove_run(folder: Path) -> None:
    """Remove what a run of ours has written."""
    shutil.rmtree(folder / "run", ignore_errors=True)


def write_tokens(folder: Path) -> Path:
    """A data folder of random tokens, through the project's own tools."""
    from shardwright.data.prepare import prepare

    rng = np.random.default_rng(0)
    words = ["".join(chr(97 + c) for c in rng.integers(0, 26, 6)) for _ in range(3000)]
    (folder / "text").mkdir()
    for i in range(20):
        (folder / "text" / f"{i}.txt").write_text(" ".join(rng.choice(words, 20_000)))
    prepare(folder / "text", folder / "tokens", vocab_size=2048)
    return folder / "tokens"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=12, help="counted steps of each run")
    parser.add_argument("--only", choices=LAYOUTS, nargs="+", help="some of ours, and what they are set beside")
    parser.add_argument("--anew", action="store_true", help="do not continue a benchmark that was stopped")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        who, kind, data, steps = options.child
        child(who, kind, data, int(steps))
    if options.anew:
        RECORDS.unlink(missing_ok=True)
    print(machine())
    table = summary(all_rounds(options.only or list(LAYOUTS), options.rounds, options.steps))
    print(f"\n{table}")
    RECORDS.unlink()
    if options.write:
        path = HERE / "results" / f"overhead-{date.today()}.md"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"# Overhead of the training loop, {date.today()}\n\n{machine()}\n\n{table}\n")
        print(f"written to {path}")


def all_rounds(kinds: list[str], rounds: int, steps: int) -> dict[str, list[dict[str, float]]]:
    """Return the measurements of each loop, one a round, and print each when it ends.

    Measurements that RECORDS contains are not repeated.
    """
    results: dict[str, list[dict[str, float]]] = {
        name: [] for kind in kinds for name in (beside(kind), f"ours {kind}", f"floor {kind}")
    }
    benchmark = {"machine": machine(), "code": fingerprint(), "kinds": kinds, "steps": steps}
    records = Records(RECORDS, benchmark)
    with tempfile.TemporaryDirectory() as folder:
        data = write_tokens(Path(folder))
        for round_ in range(rounds):
            print(f"round {round_ + 1} of {rounds}", flush=True)
            for loop in [name for name in results if not name.startswith("floor")]:
                who, kind = loop.split()
                measured = records.get(round_, loop)
                if measured is None:
                    measured = measure(who, kind, data, steps)
                    records.add(round_, loop, measured)
                for side, result in measured.items():
                    name = f"{side} {kind}"
                    if name in results:  # a loop that another is compared with has no row for its floor
                        results[name].append(result)
                        print(f"  {name:20} {line(name, results, round_)}", flush=True)
    return results


def line(name: str, results: dict[str, list[dict[str, float]]], round_: int) -> str:
    """Return the speed of a loop in one round and its ratio to the loop that it is compared with, if that ran."""
    result = results[name][round_]
    text = f"{result['tokens_per_s_median']:6.0f} tokens/s  {result['cpu_s_per_step']:6.3f} CPU-s a step"
    base = "" if name.startswith("plain") else beside(name.split()[1])
    if base in results:
        text += f"  {result['cpu_s_per_step'] / results[base][round_]['cpu_s_per_step']:.3f} of {base}"
    return text


class Records:
    """The measurements of a benchmark in a file of JSON lines; the first line says which benchmark it is."""

    def __init__(self, path: Path, benchmark: dict[str, Any]) -> None:
        self.path = path
        lines = path.read_text().split("\n")[:-1] if path.exists() else []  # without a line that was cut off
        self._known = {(each["round"], each["loop"]): each["measured"] for each in map(json.loads, lines[1:])}
        if lines and json.loads(lines[0]) == benchmark:
            print(f"{len(self._known)} measurements of {path} are not repeated")
            return
        self._known = {}
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(benchmark) + "\n")

    def get(self, round_: int, loop: str) -> dict[str, dict[str, float]] | None:
        return self._known.get((round_, loop))

    def add(self, round_: int, loop: str, measured: dict[str, dict[str, float]]) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps({"round": round_, "loop": loop, "measured": measured}) + "\n")


def fingerprint() -> str:
    """Return a hash of the package's code and of the loops that it is compared with."""
    files = sorted([*HERE.parent.glob("src/**/*.py"), HERE / "plain.py", HERE / "floor.py", HERE / "overhead.py"])
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:16]


def beside(kind: str) -> str:
    """What one of ours is set beside."""
    if kind == "moe-ep2":
        return "ours moe"
    return f"plain {kind if kind in PLAIN else 'single'}"


def summary(results: dict[str, list[dict[str, float]]]) -> str:
    lines = [
        "| loop | tokens/s best | tokens/s median | CPU-s a step, median | ratio: median (min to max) | to |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name, found in results.items():
        who, kind = name.split()
        ratio = to = ""
        if who != "plain" and beside(kind) in results:
            to = beside(kind)
            pairs = zip(found, results[to], strict=True)
            ratios = [mine["cpu_s_per_step"] / theirs["cpu_s_per_step"] for mine, theirs in pairs]
            ratio = f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
        lines.append(
            f"| {name} | {max(f['tokens_per_s_best'] for f in found):.0f} | "
            f"{statistics.median(f['tokens_per_s_median'] for f in found):.0f} | "
            f"{statistics.median(f['cpu_s_per_step'] for f in found):.3f} | {ratio} | {to} |"
        )
    return "\n".join(lines)


def machine() -> str:
    import torch

    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    facts = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    kernels = torch.backends.cpu.get_cpu_capability() + (" and AMX" if "amx_tile" in facts.get("flags", "") else "")
    versions = f"Python {platform.python_version()}, torch {torch.__version__}"
    cpu = facts.get("model name", platform.processor())
    return f"{cpu} ({kernels}), {os.cpu_count()} cores, {versions}, 1 thread a rank."


if __name__ == "__main__":
    main()
