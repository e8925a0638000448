"""Faults in real runs of `shardwright train` on this machine, and what becomes of them.

    python benchmarks/chaos.py --kills 200 --flips 1000 --minutes 30 --log chaos.jsonl --write

Kills: SIGKILL of a rank, the launcher or the server that forks ranks, of runs on 2 ranks; a third of them at any time,
a third in a save, a third while ranks start. Each run then has to end with the weights, optimizer states, losses and
gradient norms of a run that nothing happened to, bit for bit, without a process or a file left over.

Restarts: the seconds from the kill of one of 2 ranks to the next step, so many times each: with --max-restarts, and
where the command is given again with --resume as soon as it has ended.

Flips: one bit of a random file of a checkpoint; to load it has to be refused, with the name of that file.

Chaos: 4 ranks (dp_replicate=2, tp=2) for so many minutes, with a fault after each gap (seconds, at least and at most):
a rank is killed (kill), stopped (stop), gives a loss that is no number (nan), is slower for 10 s (slow), has a bit of
its weights flipped (flip), or the disk is full for 6 steps, of which one saves (disk; a tmpfs, where this user may
mount one).
Where the command ends, it is given again with --resume. Then the same steps without a fault. Goodput is the time of the
steps that count, each once, over the time of all. The minutes are those of several runs of --part minutes each.

With --log what is done is kept in a file, and the same command goes on after it; --seconds ends a part.
"""

import argparse
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path

from chaos_runs import KilledRuns, Kills, TrainRun, flips, kills_of, restart_s, wait_for, write_tokens
from parts import Log, Record
from shardwright.system.ranks_at import RankState
from shardwright.system.signals import send_signal

LAYOUT = ["layout.dp_replicate=2", "layout.tp=2"]
POLICY = [
    "faults.hang_after=3",
    'faults.spike="stop"',
    "faults.spike_sigma=1000",  # a norm was 61 sigma off by itself, in the quiet run too; NaN always counts
    "faults.recheck=true",
    "faults.check_copies_every=5",
    'checkpoint.on_error="continue"',
    'checkpoint.async_mode="async"',
]
FAULTS = ("kill", "stop", "nan", "disk", "flip", "slow")
LASTS_S = 10.0
"""How long a rank is slow."""
DISK = "512m"
RESTARTS = {"restarted by the launcher": False, "the command given again at once": True}
"""Whether by hand."""


@dataclass
class Chaos:
    """What came of the faults of one long run."""

    faults: list[tuple[str, str, float]] = field(default_factory=list)
    """Kind, what was said of it, and the seconds until the next step."""
    given_again: int = 0
    wall_s: float = 0.0
    steps: int = 0
    useful_s: float = 0.0
    quiet_s: float = 0.0
    """Of the steps of the run without faults."""
    equal: bool = False
    orphans: int = 0


class Disturbed:
    """The run of 4 ranks, and the faults that are put into it."""

    def __init__(self, folder: Path, tokens: Path, seed: int, d_model: int) -> None:
        self.chance, self.asks = random.Random(seed), folder / "asks"
        self.asks.mkdir()
        self.disk = folder / "disk"
        self.disk.mkdir()
        mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", str(self.disk)]
        self.mounted = subprocess.run(mount, capture_output=True, check=False).returncode == 0
        extension = Path(__file__).with_name("chaos_faults.py")
        settings = [*LAYOUT, *POLICY, f'extensions=["{extension}"]']
        environment = {"CHAOS_FOLDER": str(self.asks)}
        out = self.disk / "out"
        self.run = TrainRun(folder / "chaos", tokens, 10**6, settings, d_model, environment, out)
        self.found = Chaos()

    def close(self) -> None:
        """End the run, if it goes on, and give the disk back."""
        if self.run.launcher is not None and self.run.ended() is None:
            self.run.seen()
            send_signal(self.run.pid, signal.SIGKILL)
            self.run.finish()
            self.run.orphans()
        if self.mounted:
            subprocess.run(["umount", "--lazy", str(self.disk)], check=False)

    def put(self, kind: str) -> None:
        """A fault, and what is said of it once a step is taken after it."""
        run, rank = self.run, self.chance.randrange(4)
        events, processes = len(run.events()), {pid for pid, _ in run.states().values()}
        pid, state = wait_for(self.all_states, "4 ranks")[rank]
        since_s, step = time.monotonic(), state.step
        if kind in ("kill", "stop"):
            os.kill(pid, signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
            run.next_step_of(processes)
        elif kind == "disk":
            self.fill_disk(step + 6)
        else:
            ask = self.asks / f"rank-{rank}.{kind}"
            ask.with_suffix(".new").write_text({"flip": str(self.chance.randrange(2**40)), "slow": "0.3"}.get(kind, ""))
            ask.with_suffix(".new").rename(ask)
            if kind == "slow":
                time.sleep(LASTS_S)
                ask.unlink()
            else:
                wait_for(lambda: not ask.exists() or run.ended() is not None, f"{kind} of rank {rank}")
                self.wait_beyond(step + (6 if kind == "flip" else 1))  # copies are compared every 5 steps
        processes = {pid for pid, _ in run.states().values()}
        if run.ended() is not None:
            self.found.given_again += 1
            run.start(resume=True)
            run.next_step_of(processes)
        new = [f"{each.kind}: {each.text.partition(chr(10))[0]}" for each in run.events()[events:]]
        self.found.faults.append((f"{kind} of rank {rank}", " | ".join(new), time.monotonic() - since_s))

    def all_states(self) -> dict[int, tuple[int, RankState]] | None:
        """Process and state of each rank; None while one has not reported."""
        assert self.run.ended() is None, f"the run ended before this fault\n{self.run.said[-3000:]}"
        states = self.run.states()
        return states if len(states) == 4 else None

    def wait_beyond(self, step: int) -> None:
        """Until that step is done, or the run has ended, or has gone back."""
        run = self.run
        wait_for(
            lambda: run.ended() is not None or any(state.step > step for _, state in run.states().values()),
            f"step {step}\n{run.said[-3000:]}",
            every_s=0.02,
        )

    def fill_disk(self, until: int) -> None:
        """Fill the disk until that step is done."""
        if not self.mounted:
            return
        ballast = self.disk / "ballast"
        with ballast.open("wb", buffering=0) as file, suppress(OSError):
            while file.write(bytes(2**16)):
                pass
        self.wait_beyond(until)
        ballast.unlink()


def chaos(
    folder: Path,
    tokens: Path,
    kinds: list[str],
    gap_s: tuple[float, float],
    seed: int,
    say: Callable[[str], None],
    d_model: int = 16,
) -> Chaos:
    """Put faults of these kinds into a run, each after a gap, stop it by SIGTERM, and repeat its steps without."""
    disturbed = Disturbed(folder, tokens, seed, d_model)
    run, found = disturbed.run, disturbed.found
    try:
        run.start()
        run.next_step_of(set())
        begin_s = time.monotonic()
        for kind in kinds:
            time.sleep(disturbed.chance.uniform(*gap_s))
            run.seen()
            disturbed.put(kind)
            say("{}: {} ({:.1f} s)".format(*found.faults[-1]))
        disturbed.wait_beyond(max(state.step for _, state in run.states().values()) + 3)
        os.kill(run.pid, signal.SIGTERM)
        code = run.finish()
        found.wall_s = time.monotonic() - begin_s
        assert code == 75, f"exit code {code}\n{run.said[-3000:]}"
        found.orphans = run.orphans()
        losses, state = run.losses(), run.state()
        found.steps, found.useful_s = len(losses), sum(each["step_s"] for each in run.logged())
    finally:
        disturbed.close()
    quiet = TrainRun(folder / "quiet-chaos", tokens, found.steps, LAYOUT, d_model)
    quiet.start()
    assert quiet.finish() == 0, quiet.said
    found.quiet_s = sum(each["step_s"] for each in quiet.logged())
    found.equal = quiet.losses() == losses and quiet.state() == state
    return found


def kills_in_words(found: Kills) -> list[str]:
    """Rows of the table."""
    n, runs = len(found.at), found.runs
    rows = [
        f"| kills at random points of steps, saves and starts: {n} in {runs} runs | runs that end bit-equal | "
        f"{runs - len(found.wrong)} of {runs} |",
        f"| | orphan processes; files left over | {found.orphans}; {', '.join(found.left_over) or 'none'} |",
        f"| | where | {', '.join(f'{k} {v}' for k, v in sorted(Counter(found.at).items()))} |",
    ]
    if found.seconds:
        most, median = max(found.seconds), statistics.median(found.seconds)
        rows.append(f"| kill of a rank to the next step | median, largest of {len(found.seconds)} | {median:.1f} s, ")
        rows[-1] += f"{most:.1f} s |"
    return rows


def restarts_in_words(found: Sequence[Record]) -> list[str]:
    """Rows of the table."""
    return [
        f"| kill of a rank to the next step, {how} | median, largest of {len(found)} | "
        f"{statistics.median(each[how] for each in found):.1f} s, {max(each[how] for each in found):.1f} s |"
        for how in RESTARTS
    ]


def chaos_in_words(runs: Sequence[Chaos]) -> list[str]:
    """Rows of the table, and what was said of each fault."""
    faults = [fault for found in runs for fault in found.faults]
    wall_s, steps = sum(found.wall_s for found in runs), sum(found.steps for found in runs)
    useful_s, quiet_s = (sum(getattr(found, name) for found in runs) for name in ("useful_s", "quiet_s"))
    equal, again = sum(found.equal for found in runs), sum(found.given_again for found in runs)
    return [
        f"| chaos on 4 ranks: {wall_s:.0f} s, {steps} steps, {len(faults)} faults, {len(runs)} runs | final weights, "
        f"optimizer states, losses | {equal} of {len(runs)} bit-equal |",
        f"| | goodput by the times of its own steps | {useful_s / wall_s:.1%} |",
        f"| | goodput by the steps of the quiet run | {quiet_s / wall_s:.1%} |",
        f"| | commands given again; orphans | {again}; {sum(found.orphans for found in runs)} |",
        "",
        "| fault | told | seconds to the next step |",
        "| --- | --- | --- |",
        *(f"| {kind} | {told.replace('|', ';')} | {took_s:.1f} |" for kind, told, took_s in faults),
    ]


def plan_of(minutes: float, gap_s: tuple[float, float], faults: Sequence[str], seed: int) -> list[str]:
    """As many faults as fit, each kind in turn, in another order each time."""
    chance, n = random.Random(seed), max(1, int(minutes * 60 / (sum(gap_s) / 2)))
    rounds = (chance.sample(faults, len(faults)) for _ in range(n))
    return [kind for each in rounds for kind in each][:n]


def main() -> int:
    """Run what is asked for and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--flips", type=int, default=200)
    parser.add_argument("--restarts", type=int, default=0, help="of each kind, one after the other")
    parser.add_argument("--minutes", type=float, default=0.0, help="of chaos")
    parser.add_argument("--part", type=float, default=5.0, help="minutes of a run of the chaos")
    parser.add_argument("--gap", type=float, nargs=2, default=(60.0, 120.0), metavar="S", help="between two faults")
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=FAULTS, help="of the chaos")
    parser.add_argument("--d-model", type=int, default=512, help="of the model of the chaos")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log", type=Path, help="what is done; the command goes on after it")
    parser.add_argument("--seconds", type=float, default=0.0, help="after which no further part is begun; 0: all are")
    parser.add_argument("--write", action="store_true", help="the table, to benchmarks/results/")
    options = parser.parse_args()

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    log, rows = Log(options.log, options.seconds), ["| what | measured | result |", "| --- | --- | --- |"]
    with tempfile.TemporaryDirectory(dir="/tmp") as name:  # a socket has no room for the name of a deep folder
        if not measured(options, log, Path(name)):
            return 0
    flipped, kills, restarts = log.select("flips"), kills_of(log.select("kills")), log.select("restarts")
    runs = [Chaos(**{key: value for key, value in each.items() if key != "kind"}) for each in log.select("chaos")]
    good = not kills.wrong and not kills.orphans and not kills.left_over and all(found.equal for found in runs)
    for each in flipped:
        good = good and each["named"] == each["n"]
        rows.append(f"| bit flips in a checkpoint | named | {each['named']} of {each['n']} |")
    rows += kills_in_words(kills) if kills.runs else []
    rows += restarts_in_words(restarts) if restarts else []
    rows += chaos_in_words(runs) if runs else []
    print("\n".join([*rows, *kills.wrong]))
    if options.write:
        path = Path(__file__).parent / "results" / f"chaos-{date.today()}.md"
        machine = f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} at the end"
        path.write_text(f"# Faults in real runs, {date.today()}\n\n{machine}\n\n" + "\n".join(rows) + "\n")
    return int(not good)


def say(text: str) -> None:
    """On the screen at once."""
    print(text, flush=True)


def measured(options: argparse.Namespace, log: Log, folder: Path) -> bool:
    """Do what is asked for and not done yet. Whether all is done."""
    tokens = write_tokens(folder)

    def flip(number: int) -> Record:
        run = TrainRun(folder / "whole", tokens, 5, ["layout.dp_shard=2"])
        run.start()
        assert run.finish() == 0, run.said
        missed = []
        for place, said in flips(run.last_checkpoint(), options.flips, options.seed):
            if place.partition(",")[0] not in said:
                missed.append(place)
                say(f"flip of {place} was not named: {said or 'it was loaded'}")
        return {"n": options.flips, "named": options.flips - len(missed)}

    killed_runs: list[KilledRuns] = []

    def kill(number: int) -> Record:
        killed_runs[:] = killed_runs or [KilledRuns(folder, tokens, options.seed)]
        before = kills_of(log.select("kills"))
        found = killed_runs[0].run(number, min(10, options.kills - len(before.at)))
        say(
            f"run {number + 1}, {len(before.at) + len(found.at)} kills so far: {len(found.wrong)} wrong, "
            f"{found.orphans} orphans, {found.left_over}"
        )
        return asdict(found)

    def restart(number: int) -> Record:
        found = {
            how: restart_s(folder / f"restart-{number}-{by_hand}", tokens, by_hand) for how, by_hand in RESTARTS.items()
        }
        say(f"restart {number + 1}: {found}")
        return found

    gap_s = options.gap[0], options.gap[1]
    kinds = plan_of(options.minutes, gap_s, options.faults, options.seed)
    n_parts = max(1, round(options.minutes / options.part))

    def disturb(number: int) -> Record:
        mine = kinds[number * len(kinds) // n_parts : (number + 1) * len(kinds) // n_parts]
        part = folder / f"part-{number}"
        part.mkdir()
        found = chaos(part, tokens, mine, gap_s, options.seed + number, say, options.d_model)
        say(f"part {number + 1} of {n_parts}: {'bit-equal' if found.equal else 'DIFFERENT'}, {found.wall_s:.0f} s")
        return asdict(found)

    return (
        (not options.flips or log.go_on("flips", bool, flip))
        and (not options.kills or log.go_on("kills", lambda done: len(kills_of(done).at) >= options.kills, kill))
        and (not options.restarts or log.go_on("restarts", lambda done: len(done) >= options.restarts, restart))
        and (not options.minutes or log.go_on("chaos", lambda done: len(done) >= n_parts, disturb))
    )


if __name__ == "__main__":
    sys.exit(main())
