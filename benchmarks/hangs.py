"""Stops ranks of real runs with SIGSTOP, at random times and on several axes, and sees whether the right one is named.

    python benchmarks/hangs.py --trials 20
    python benchmarks/hangs.py --quiet-s 60        no fault: does a run with evaluation and saving end undisturbed?

Each trial is `shardwright train` with 4 local ranks on the CPU. One of them, drawn by chance, is stopped after a time
drawn by chance, once 8 steps are logged. Printed of each trial: the layout, the rank, the step and phase that were
named, and the seconds from the signal to the end of the command. A trial is good if exactly that rank is named, with
its host, step and phase, and the command leaves with code 3. What is said in one that is not is printed whole.
"""

import argparse
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from shardwright.data.prepare import prepare

LAYOUTS = {
    "dp": ["layout.dp_shard=4", "layout.zero=3"],
    "dp_replicate": ["layout.dp_replicate=4", "layout.zero=0"],
    "tp": ["layout.dp_shard=2", "layout.tp=2"],
    "pp": ["layout.dp_shard=2", "layout.pp=2"],
    "cp": ["layout.dp_shard=2", "layout.cp=2", "layout.zero=2"],
    "ep": ["layout.dp_shard=4", "layout.ep=2", "layout.zero=2", "model.preset='debug-moe'"],
}
RUN_FILE = """
steps = 1000000
device = "cpu"
model = {{ preset = "debug", vocab_size = 300 }}
data = {{ path = "{tokens}" }}
batch = {{ seq_len = 64, global_batch = 16 }}
checkpoint = {{ every = 10 }}
metrics = {{ every = 1 }}
evaluation = {{ every = 15, samples = 8 }}
"""


def logged(out: Path) -> int:
    """Steps that a run has logged."""
    path = out / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return sum(json.loads(line)["kind"] == "train" for line in lines)


def started(folder: Path, tokens: Path, settings: list[str]) -> tuple[subprocess.Popen[str], Path]:
    """A run in a folder of its own."""
    folder.mkdir()
    (folder / "run.toml").write_text(f'out = "{folder / "out"}"' + RUN_FILE.format(tokens=tokens))
    command = [sys.executable, "-m", "shardwright", "train", str(folder / "run.toml")]
    command += [word for setting in settings for word in ("--set", setting)]
    with (folder / "stdout").open("w") as stdout:
        run = subprocess.Popen(command, stdout=stdout, stderr=subprocess.PIPE, text=True)
    return run, folder / "out"


def trial(folder: Path, tokens: Path, axis: str, chance: random.Random, after_s: float) -> tuple[bool, float]:
    """Whether the rank that was stopped was named, and after how many seconds the run had ended."""
    run, out = started(folder, tokens, [*LAYOUTS[axis], f"faults.hang_after={after_s}"])
    while logged(out) < 8:
        assert run.poll() is None, run.stderr and run.stderr.read()
        time.sleep(0.05)
    time.sleep(chance.uniform(0.0, 3.0))
    rank = chance.randrange(4)
    pid = json.loads((out / "ranks" / f"rank-{rank}.json").read_text())["pid"]
    os.kill(pid, signal.SIGSTOP)
    stopped_s = time.monotonic()
    _, said = run.communicate(timeout=300)
    took_s = time.monotonic() - stopped_s
    found = re.search(
        rf"^error: no progress: rank {rank} holds up the others\n  rank {rank} is stopped .*; step (\d+), (\w+)", said
    )
    good = found is not None and run.returncode == 3 and os.uname().nodename in said
    told = f"step {found[1]}, {found[2]}" if found else said
    missed = re.search(r"never joined (.*)", said)
    print(f"{axis:>12}  rank {rank}  {took_s:6.1f} s  {'good' if good else 'BAD'}  {told}", flush=True)
    print(f"{'':>14}{missed[1] if missed else 'no collective of the others is pending'}", flush=True)
    return good, took_s


def main() -> None:
    """Run the trials and print what came of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--hang-after", type=float, default=5.0, help="faults.hang_after, seconds")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quiet-s", type=float, default=0.0, help="instead: one undisturbed run of so many seconds")
    options = parser.parse_args()
    chance = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        texts = folder / "texts"
        texts.mkdir()
        for i, path in enumerate(sorted(Path(__file__).parents[1].glob("src/**/*.py"))):
            (texts / f"{i}.txt").write_text(path.read_text())
        prepare(texts, folder / "tokens", vocab_size=300, validation=0.1)
        if options.quiet_s:
            run, out = started(folder / "quiet", folder / "tokens", [*LAYOUTS["dp"], "faults.hang_after=5"])
            time.sleep(options.quiet_s)
            n = logged(out)
            assert run.poll() is None, run.communicate()[1]
            run.send_signal(signal.SIGINT)
            run.wait()
            print(f"{n} steps in {options.quiet_s:g} s, with evaluations and checkpoints: no alarm")
            return
        axes = list(LAYOUTS)
        results = [
            trial(folder / str(i), folder / "tokens", axes[i % len(axes)], chance, options.hang_after)
            for i in range(options.trials)
        ]
    times = [took_s for _, took_s in results]
    print(
        f"{sum(good for good, _ in results)} of {len(results)} named right; seconds from SIGSTOP to the end of the "
        f"command: median {statistics.median(times):.1f}, largest {max(times):.1f} (hang_after {options.hang_after:g})"
    )


if __name__ == "__main__":
    main()
