"""Stops ranks of real runs with SIGSTOP, in every phase of a step and on several axes, and sees whether the right one
is named in time; and runs without a fault, in which none may be named.

    python benchmarks/hangs.py --trials 50 --log hangs.jsonl
    python benchmarks/hangs.py --quiet-s 3600 --load 2 --log quiet.jsonl

Each trial is `shardwright train` with local ranks on the CPU. Once every phase has been timed a few times, one rank
drawn by chance is stopped in the phase whose turn it is; where that does not come within 5 s, in the one it is in. A
trial is good if exactly that rank is named, with its host, step and phase, the command leaves with code 3, and the
event comes no later than 5 s after the learned limit: when the first of the ranks is longer in its phase than it may
(`ranks_at.RankState.limit_s`: 5 times the longest that the phase has taken, and at least faults.hang_after). Told
besides is whether it came within 5 s and the time of a step. What is said in a trial that is not good is printed whole.

Quiet: the seconds are shared by the layouts, and a run whose layers are compiled. Each evaluates every 4 steps and
saves every 3. `--load` keeps so many cores busy with other processes meanwhile. A run in which a rank is named, or that
ends, is an alarm.

With `--log` what is done is kept in a file, a JSON object a line, and the same command goes on after it: trial number N
is the same whenever it is run. `--seconds` ends a part.
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
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from chaos_runs import children, wait_for
from parts import Log, Record
from shardwright.data.prepare import prepare
from shardwright.runs.records import EventRecord, read_events
from shardwright.system.ranks_at import PHASES_SEEN, RanksFolder, is_dead
from shardwright.system.signals import send_signal

PHASES = tuple(phase for phase in PHASES_SEEN if phase != "start")
BEGIN_AT = 18
"""Steps after which evaluating and saving have been timed, too."""
WITHIN_S = 5.0
RUN_FILE = """
steps = 1000000
device = "cpu"
model = {{ preset = "debug", vocab_size = 300 }}
data = {{ path = "{tokens}" }}
batch = {{ seq_len = 64, global_batch = 16 }}
checkpoint = {{ every = 3 }}
metrics = {{ every = 1 }}
evaluation = {{ every = 4, samples = 8 }}
"""


def layouts(n: int) -> dict[str, list[str]]:
    """The layouts of `n` ranks, by the axis that they are there for."""
    half = f"layout.dp_shard={n // 2}"
    return {
        "dp": [f"layout.dp_shard={n}", "layout.zero=3"],
        "dp_replicate": [f"layout.dp_replicate={n}", "layout.zero=0"],
        "tp": [half, "layout.tp=2"],
        "pp": [half, "layout.pp=2"],
        "cp": [half, "layout.cp=2", "layout.zero=2"],
        "ep": [f"layout.dp_shard={n}", "layout.ep=2", "layout.zero=2", "model.preset='debug-moe'"],
    }


class Run:
    """A `shardwright train` in a folder of its own."""

    def __init__(self, folder: Path, tokens: Path, settings: list[str], hang_after_s: float) -> None:
        folder.mkdir()
        self.folder, self.out = folder, folder / "out"
        (folder / "run.toml").write_text(f'out = "{self.out}"' + RUN_FILE.format(tokens=tokens))
        command = [sys.executable, "-m", "shardwright", "train", str(folder / "run.toml")]
        settings = [*settings, f"faults.hang_after={hang_after_s}"]
        command += [word for setting in settings for word in ("--set", setting)]
        with (folder / "said").open("w") as said:
            self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=said)

    @property
    def said(self) -> str:
        """What it has written to stderr."""
        return (self.folder / "said").read_text()

    def logged(self) -> list[Record]:
        """The `train` records so far."""
        path = self.out / "metrics.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        records = [json.loads(line) for line in lines if line.endswith("\n")]
        return [record for record in records if record["kind"] == "train"]

    def reach(self, step: int, timeout_s: float) -> None:
        """Wait until so many steps are logged. AssertionError where the run ends before, or they are not in time."""
        wait_for(lambda: self.process.poll() is not None or len(self.logged()) >= step, f"step {step}", timeout_s, 0.05)
        assert self.process.poll() is None, self.said

    def hang(self) -> EventRecord | None:
        """The event of a hang, if there is one."""
        return next((each for each in read_events(self.out) if each.kind == "hang"), None)

    def end(self) -> None:
        """End all of its processes, however they are."""
        by_parent, found, new = children(), list[int](), [self.process.pid]
        while new:
            found += new
            new = [pid for each in new for pid in by_parent.get(each, [])]
        for pid in found:
            if not is_dead(pid):
                send_signal(pid, signal.SIGKILL)
        self.process.wait()


def trial(run: Run, n_ranks: int, axis: str, phase: str, chance: random.Random) -> Record:
    """What came of stopping a rank."""
    run.reach(BEGIN_AT, 600.0)
    time.sleep(chance.uniform(0.0, 1.0))
    rank, states = chance.randrange(n_ranks), RanksFolder(run.out)
    who = states.identity(rank)
    assert who is not None
    until = time.monotonic() + 5.0
    while time.monotonic() < until and (state := states.state(rank)) is not None and state.phase != phase:
        time.sleep(0.0002)
    os.kill(who.pid, signal.SIGSTOP)
    since_s = time.monotonic()
    limit_s = 0.0

    def ended() -> bool:
        nonlocal limit_s
        if there := [state for each in range(n_ranks) if (state := states.state(each)) is not None]:
            limit_s = min(state.since_s + state.limit_s for state in there) - since_s
        return run.hang() is not None or run.process.poll() is not None

    wait_for(ended, f"a hang\n{run.said}", 700.0, 0.02)
    took_s = time.monotonic() - since_s
    event = run.hang()
    wait_for(lambda: run.process.poll() is not None, "the end of the command", 120.0, 0.05)
    step_s = statistics.median(each["step_s"] for each in run.logged()[1:])
    told = rf"^error: no progress: rank {rank} holds up the others\n  rank {rank} is stopped .*; step (\d+), (\w+)"
    found, said = re.search(told, run.said), run.said
    right = found is not None and event is not None and event.rank == rank and run.process.returncode == 3
    good = right and os.uname().nodename in said and took_s <= WITHIN_S + max(limit_s, 0.0)
    missed = re.search(r"never joined (.*)", said)
    return {
        "axis": axis,
        "rank": rank,
        "asked": phase,
        "phase": found[2] if found else None,
        "named_s": took_s,
        "limit_s": limit_s,
        "step_s": step_s,
        "right": right,
        "good": good,
        "missed": missed[1] if missed else "no collective of the others is pending",
        "said": "" if good else said,
    }


def told(record: Record) -> str:
    """A line on a trial."""
    verdict = "good" if record["good"] else "LATE" if record["right"] else "BAD"
    return (
        f"{record['axis']:>12}  rank {record['rank']}  {record['phase'] or record['asked']:<16}  named after "
        f"{record['named_s']:5.1f} s (limit {record['limit_s']:.1f}, step {record['step_s']:.2f})  {verdict}\n"
        f"{'':>14}{record['missed']}{chr(10) * bool(record['said'])}{record['said']}"
    )


def quiet(run: Run, axis: str, seconds: float) -> Record:
    """What came of a run without a fault."""
    run.reach(1, 1200.0)
    until = time.monotonic() + seconds
    while time.monotonic() < until and run.process.poll() is None and run.hang() is None:
        time.sleep(0.5)
    event, code = run.hang(), run.process.poll()
    if code is None and event is None:
        run.process.send_signal(signal.SIGINT)
        code = run.process.wait(600.0)
    return {"axis": axis, "steps": len(run.logged()), "code": code, "good": code == 75 and run.hang() is None} | (
        {"said": run.said} if event is not None or code != 75 else {}
    )


@contextmanager
def loaded(n: int) -> Iterator[None]:
    """So many processes that compute all the time."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(n)]
    try:
        yield
    finally:
        for each in busy:
            each.kill()
            each.wait()


def main() -> int:
    """Run what is asked for and print what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--hang-after", type=float, default=3.0, help="faults.hang_after, seconds")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--quiet-s", type=float, default=0.0, help="instead: undisturbed runs of so many seconds in all"
    )
    parser.add_argument("--load", type=int, default=0, help="processes that keep cores busy meanwhile")
    parser.add_argument("--axes", nargs="+", choices=layouts(2), default=list(layouts(2)))
    parser.add_argument("--log", type=Path, help="what is done; the command goes on after it")
    parser.add_argument("--seconds", type=float, default=0.0, help="after which no further trial is begun; 0: all are")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    log, settings = Log(options.log, options.seconds), layouts(options.ranks)
    with tempfile.TemporaryDirectory() as name, loaded(options.load):
        folder = Path(name)
        texts = folder / "texts"
        texts.mkdir()
        for i, path in enumerate(sorted(Path(__file__).parents[1].glob("src/**/*.py"))):
            (texts / f"{i}.txt").write_text(path.read_text())
        prepare(texts, folder / "tokens", vocab_size=300, validation=0.1)

        def one(number: int) -> Record:
            chance = random.Random(f"{options.seed} {number}")
            axis = options.axes[number % len(options.axes)]
            phase = PHASES[number // len(options.axes) % len(PHASES)]
            run = Run(folder / str(number), folder / "tokens", settings[axis], options.hang_after)
            try:
                record = trial(run, options.ranks, axis, phase, chance)
            finally:
                run.end()
            print(told(record), flush=True)
            return record

        kinds = {axis: settings[axis] for axis in options.axes} | {
            "compiled": [*settings["dp"], "precision.compile=true"]
        }

        def one_quiet(number: int) -> Record:
            axis = list(kinds)[number]
            run = Run(folder / str(number), folder / "tokens", kinds[axis], options.hang_after)
            try:
                record = quiet(run, axis, options.quiet_s / len(kinds))
            finally:
                run.end()
            print(f"{axis:>12}  {record['steps']} steps  {'no alarm' if record['good'] else 'ALARM'}", flush=True)
            print(record.get("said", ""), end="", flush=True)
            return record

        if options.quiet_s:
            done = log.go_on("quiet", lambda found: len(found) >= len(kinds), one_quiet)
        else:
            done = log.go_on("trial", lambda found: len(found) >= options.trials, one)
    if not done:
        return 0
    found = log.select("quiet" if options.quiet_s else "trial")
    good = sum(record["good"] for record in found)
    if options.quiet_s:
        n_steps = sum(record["steps"] for record in found)
        print(f"{good} of {len(found)} runs without an alarm; {n_steps} steps in {options.quiet_s:g} s")
    else:
        print(summary(found, good, options.hang_after))
    return int(good < len(found))


def summary(found: list[Record], good: int, hang_after_s: float) -> str:
    """The line below the trials."""
    right = [each for each in found if each["right"]]
    times, strictly = [each["named_s"] for each in found], [each["named_s"] - each["step_s"] for each in right]
    return (
        f"{len(right)} of {len(found)} named right, {good} of them within {WITHIN_S:g} s and the learned limit, "
        f"{sum(each <= WITHIN_S for each in strictly)} within {WITHIN_S:g} s and the time of a step; seconds from "
        f"SIGSTOP until named: median {statistics.median(times):.1f}, largest {max(times):.1f} (hang_after "
        f"{hang_after_s:g})"
    )


if __name__ == "__main__":
    sys.exit(main())
