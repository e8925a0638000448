"""Two hosts on this machine, a run of `shardwright train` over both under torchrun, and one fault in link or hosts.

    python benchmarks/two_hosts.py
    python benchmarks/two_hosts.py --trials cut killed --ranks 2 --write

A host is a network namespace (`ip netns`) with a host name, process ids and a monotonic clock of its own. A veth pair
joins the two: the interface of each has another name and an address of 10.213.0.0/24. The folder of the run is on the
disk that both see. Needs root, and util-linux's `unshare`.

quiet        no fault: losses, gradient norms, weights and optimizer states are those of local workers, bit for bit
slow         the link delays each packet (netem), or where the kernel has no netem, carries 4 Mbit/s (tbf): no alarm
blink        the link is down for 2 s in mid-step, less than faults.hang_after: the run goes on, bit-equal
cut          the link goes down in mid-step and stays down: the ranks of both hosts end; with it up again `--resume` is
             bit-equal
rank         a rank of the second host is killed in mid-step, with `--max-restarts 3`: both torchruns start their ranks
             again, and the run is bit-equal
vanished     the link goes down and the second host is killed, as when its power fails: the first ends
killed       all processes of the second host are killed in mid-step: the first ends; `--resume` is bit-equal
lost         the same with local checkpoints (`checkpoint.local`, a folder of each host), and that of the second host is
             deleted: `--resume` goes on from what the first host has of both, newer than any in `out`, and is bit-equal
killed-first as killed, of the first host, where the store of torchrun is: the second ends
elastic      `--nnodes 1:2` and faults.min_ranks: the second host is killed, the first goes on alone, the second comes
             back, and the run is on both again; its losses are to rounding those of the quiet run
"""

import argparse
import math
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path

from chaos_runs import TrainRun, wait_for, write_tokens
from hosts import Link, why_not
from shardwright.runs.folder import step_of
from shardwright.runs.records import read_events

FAULT_AT = 17
"""Logged steps after which a fault comes."""
HANG_AFTER_S = 5.0
HOST = "{host}"
"""In a setting, the name of the host it is given to."""
RANKS_END_WITHIN_S = 60.0
"""For the ranks of both hosts to end after a fault."""
TORCHRUN_ENDS_WITHIN_S = 60.0
"""For a torchrun to end after its ranks; what it does itself is told, and no trial is bad for it."""
WAIT_S = 300.0
"""For a run to come to its end, or to a step."""
TOLERANCE = 1e-5
"""Relative, of losses in float32 whose sums are taken in another order."""


class OnHosts(TrainRun):
    """A run of `shardwright train` on two hosts, each with a torchrun."""

    def set_hosts(self, link: Link, ranks: int, nodes: str, max_restarts: int) -> "OnHosts":
        """Set where it is to run, with `ranks` on each host, before `begin`."""
        self.link, self.ranks, self.nodes, self.max_restarts = link, ranks, nodes, max_restarts
        return self

    def begin(self, *which: int) -> None:
        """Type the command on these hosts, or on both."""
        train = ["-m", "shardwright", "train", str(self.folder / "run.toml"), "--resume"]
        train += [word for setting in self.settings for word in ("--set", setting)]
        elastic = self.nodes != "2"
        for i in which or (0, 1):
            host = self.link.hosts[i]
            where = ["--nnodes", self.nodes, "--nproc-per-node", str(self.ranks), "--local-addr", host.address]
            where += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{self.link.hosts[0].address}:29500"]
            where += ["--rdzv-id", "1", "--rdzv-conf", f"is_host={int(i == 0)}" + ",last_call_timeout=10" * elastic]
            where += ["--max-restarts", str(self.max_restarts)]
            host.environment = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"} if elastic else {}  # docs/faults.md
            of_host = [word.replace(HOST, host.name) for word in train]
            host.start([sys.executable, "-m", "torch.distributed.run", *where, *of_host], self.said_of(i))

    def said_of(self, i: int) -> Path:
        """The file of a host's output."""
        return self.folder / f"said-{self.link.hosts[i].name}"

    @property
    def said(self) -> str:
        """All output so far."""
        return "\n".join(self.said_of(i).read_text() for i in (0, 1) if self.said_of(i).exists())

    def codes(self) -> list[int | None]:
        """Exit codes of the two torchruns, None of one that goes on."""
        return [host.process.poll() if host.process else None for host in self.link.hosts]

    def reach(self, step: int, starts: Sequence[int] | None = None) -> None:
        """Wait until a step is logged; `starts`: in the last of starts on so many ranks each."""

        def reached() -> bool:
            if all(code is not None for code in self.codes()):
                raise AssertionError(f"both hosts have ended with {self.codes()} before step {step} in starts {starts}")
            logged = self.logged()
            return bool(logged) and logged[-1]["step"] >= step and (starts is None or self.starts() == starts)

        wait_for(reached, f"step {step} in starts {starts}", WAIT_S, 0.02)

    def starts(self) -> list[int]:
        """Ranks of each start so far."""
        begun = [each for each in read_events(self.out) if each.kind in ("start", "restart")]
        return [int(found[1]) for each in begun if (found := re.search(r", on (\d+) rank", each.text))]

    def wait_ended(self, which: Sequence[int] = (0, 1), timeout_s: float = WAIT_S) -> tuple[list[float], list[float]]:
        """Seconds until the ranks of each of these hosts have ended, and until its torchrun has; infinity for what does
        not end, which is then killed."""
        since_s = time.monotonic()
        ranks_s, agent_s = dict.fromkeys(which, math.inf), dict.fromkeys(which, math.inf)
        while time.monotonic() < since_s + timeout_s and math.inf in agent_s.values():
            now_s = time.monotonic() - since_s
            for i in which:
                if agent_s[i] == math.inf and self.codes()[i] is not None:
                    agent_s[i] = now_s
                if ranks_s[i] == math.inf and not self.link.hosts[i].ranks():
                    ranks_s[i] = now_s
            time.sleep(0.1)
        for i in which:
            self.link.hosts[i].kill()
        return list(ranks_s.values()), list(agent_s.values())


@dataclass
class Seen:
    """What came of a trial: of each check what it was and whether it is so, the seconds, and the exit codes."""

    checks: list[tuple[str, bool]] = field(default_factory=list)
    seconds: list[str] = field(default_factory=list)
    codes: list[str] = field(default_factory=list)

    def check(self, what: str, good: bool) -> None:
        self.checks.append((what, good))

    @property
    def good(self) -> bool:
        return all(good for _, good in self.checks)

    def row(self, name: str) -> str:
        """Of the table."""
        told = "; ".join(what if good else f"NOT: {what}" for what, good in self.checks)
        cells = [name, told, ", ".join(self.seconds), ", ".join(self.codes), "ok" if self.good else "BAD"]
        return f"| {' | '.join(cells)} |"


class Trials:
    """The trials, and the quiet run of local workers that they are compared with."""

    def __init__(self, folder: Path, link: Link, ranks: int, steps: int) -> None:
        self.folder, self.link, self.ranks, self.steps = folder, link, ranks, steps
        self.tokens = write_tokens(folder)
        self.settings = [f"layout.dp_shard={2 * ranks}", "layout.zero=3", "batch.micro_batch=1"]
        self.settings.append(f"faults.hang_after={HANG_AFTER_S:g}")
        self.local = TrainRun(folder / "local", self.tokens, self.steps, self.settings)
        self.local.start()
        assert self.local.finish(600.0) == 0, self.local.said

    def begun(self, name: str, *settings: str, nodes: str = "2", max_restarts: int = 0) -> OnHosts:
        """A run that has begun on both hosts."""
        run = OnHosts(self.folder / name, self.tokens, self.steps, [*self.settings, *settings])
        run.set_hosts(self.link, self.ranks, nodes, max_restarts).begin()
        return run

    def equal(self, run: OnHosts, seen: Seen) -> None:
        """Check that a run came to what the local one did."""
        same = run.losses() == self.local.losses() and run.state() == self.local.state()
        seen.check("losses, gradient norms, weights and optimizer states bit-equal to local workers", same)

    def resumed(self, run: OnHosts, seen: Seen) -> None:
        """The command again on both hosts, to the end of the run."""
        run.begin()
        _, took_s = run.wait_ended()
        seen.seconds.append(f"resumed {max(took_s):.0f}")
        seen.codes.append(_codes(run))
        seen.check("resumed to its end", run.codes() == [0, 0])
        if run.codes() == [0, 0]:
            self.equal(run, seen)

    def ended(self, run: OnHosts, seen: Seen, which: Sequence[int] = (0, 1)) -> None:
        """Wait for these hosts to end after a fault, and look at what they say."""
        ranks_s, agents_s = run.wait_ended(which, TORCHRUN_ENDS_WITHIN_S)
        names = [self.link.hosts[i].name for i in which]
        for name, of_ranks_s, of_agent_s in zip(names, ranks_s, agents_s, strict=True):
            agent = f"{of_agent_s:.1f}" if of_agent_s < math.inf else f"not within {TORCHRUN_ENDS_WITHIN_S:g}"
            seen.seconds.append(f"{name}: ranks {of_ranks_s:.1f}, torchrun {agent}")
        seen.codes.append(_codes(run))
        seen.check(f"ranks end in {RANKS_END_WITHIN_S:g} s", max(ranks_s) < RANKS_END_WITHIN_S)
        seen.check("exit code 1 of each torchrun that ends", all(run.codes()[i] in (1, -9) for i in which))
        texts = [run.said_of(i).read_text() for i in which]
        seen.check("no traceback of ours", not any(map(traceback_of_ours, texts)))
        seen.check("no process left over", not any("processes are left over" in text for text in texts))
        for name, text in zip(names, texts, strict=True):
            told = first_error(text)
            seen.check(f"{name} says: {told or 'nothing'}", bool(told))

    def quiet(self) -> Seen:
        seen, since_s = Seen(), time.monotonic()
        run = self.begun("quiet")
        run.wait_ended()
        return self._undisturbed(run, seen, since_s)

    def slow(self) -> Seen:
        seen, since_s = Seen(), time.monotonic()
        by = self.link.slow()
        seen.check(by or "neither netem nor tbf here", bool(by))
        try:
            run = self.begun("slow")
            run.wait_ended(timeout_s=600.0)
        finally:
            self.link.fast()
        return self._undisturbed(run, seen, since_s)

    def blink(self) -> Seen:
        seen, since_s = Seen(), time.monotonic()
        run = self.begun("blink")
        run.reach(FAULT_AT)
        self.link.set("down")
        time.sleep(2.0)
        self.link.set("up")
        run.wait_ended()
        return self._undisturbed(run, seen, since_s)

    def _undisturbed(self, run: OnHosts, seen: Seen, since_s: float) -> Seen:
        seen.seconds.append(f"{time.monotonic() - since_s:.0f} s in all")
        seen.codes.append(_codes(run))
        seen.check("both hosts end well", run.codes() == [0, 0])
        seen.check("no event but start and saves", not run.events())
        if run.codes() == [0, 0]:
            self.equal(run, seen)
        return seen

    def cut(self) -> Seen:
        seen, run = Seen(), self.begun("cut")
        run.reach(FAULT_AT)
        self.link.set("down")
        try:
            self.ended(run, seen)
        finally:
            self.link.set("up")
        self.resumed(run, seen)
        return seen

    def rank(self) -> Seen:
        seen, run = Seen(), self.begun("rank", max_restarts=3)
        run.reach(FAULT_AT)
        os.kill(self.link.hosts[1].ranks()[-1], signal.SIGKILL)
        since_s = time.monotonic()
        run.reach(FAULT_AT, [2 * self.ranks] * 2)
        seen.seconds.append(f"next step after {time.monotonic() - since_s:.1f}")
        run.wait_ended()
        seen.codes.append(_codes(run))
        seen.check("ended well on both", run.codes() == [0, 0])
        if run.codes() == [0, 0]:
            self.equal(run, seen)
        return seen

    def vanished(self) -> Seen:
        seen, run = Seen(), self.begun("vanished")
        run.reach(FAULT_AT)
        self.link.set("down")
        self.link.hosts[1].kill()
        self.ended(run, seen, [0])
        self.link.set("up")
        return seen

    def killed(self) -> Seen:
        return self._killed(1)

    def killed_first(self) -> Seen:
        return self._killed(0)

    def _killed(self, victim: int) -> Seen:
        seen, run = Seen(), self.begun(f"killed-{victim}")
        run.reach(FAULT_AT)
        self.link.hosts[victim].kill()
        self.ended(run, seen, [1 - victim])
        self.resumed(run, seen)
        return seen

    def lost(self) -> Seen:
        seen, local = Seen(), self.folder / "local-of"
        run = self.begun("lost", f"checkpoint.local={local}/{HOST}", "checkpoint.local_every=2")
        run.reach(FAULT_AT)
        self.link.hosts[1].kill()
        self.ended(run, seen, [0])
        shutil.rmtree(local / self.link.hosts[1].name)
        in_out = run.last_checkpoint()
        self.resumed(run, seen)
        begun = [each for each in read_events(run.out) if each.kind == "start"][-1]
        told = begun.text.replace(str(local), "LOCAL")
        seen.check(f"{told}; newest in out: {in_out.name}", str(local) in begun.text and begun.step > step_of(in_out))
        return seen

    def elastic(self) -> Seen:
        seen = Seen()
        run = self.begun("elastic", f"faults.min_ranks={self.ranks}", nodes="1:2", max_restarts=3)
        run.reach(FAULT_AT)
        self.link.hosts[1].kill()
        since_s = time.monotonic()
        both, alone = 2 * self.ranks, self.ranks
        run.reach(FAULT_AT, [both, alone])
        seen.seconds.append(f"alone after {time.monotonic() - since_s:.1f}")
        run.begin(1)
        since_s = time.monotonic()
        run.reach(FAULT_AT, [both, alone, both])
        seen.seconds.append(f"on both again after {time.monotonic() - since_s:.1f}")
        run.wait_ended()
        seen.codes.append(_codes(run))
        seen.check("ended well on both", run.codes() == [0, 0])
        seen.check(f"ranks of its starts: {run.starts()}", run.starts() == [both, alone, both])
        ours, theirs = run.losses(), self.local.losses()
        steps = [step for step, _, _ in ours]
        seen.check(f"steps 1 to {self.steps} each once", steps == list(range(1, self.steps + 1)))
        if steps == [step for step, _, _ in theirs]:
            off = max(abs(mine / other - 1) for (_, mine, _), (_, other, _) in zip(ours, theirs, strict=True))
            seen.check(f"losses differ from the quiet run's by {off:.1e} at most", off < TOLERANCE)
        return seen


def _codes(run: OnHosts) -> str:
    return " ".join("killed" if code == -9 else str(code) for code in run.codes())


def traceback_of_ours(text: str) -> bool:
    """Whether an output has a traceback with a frame of Shardwright; the stacks that a hang is told with are none."""
    frames = (re.match(r"(?:.*\n)?(?:(?:\S+ )?[ \t]+.*\n)*", part) for part in text.split("Traceback (most recent")[1:])
    return any("/shardwright/" in found[0] for found in frames if found)


def first_error(text: str) -> str:
    """The first line of ours that tells of an error, with the one below; else that of torchrun's exception."""
    found = re.search(r"^(?:\[\S+\]:)?(error: .*(?:\n  .*)?)", text, re.MULTILINE)
    found = found or re.search(r"^(torch\S+Error: .*)(?!.*^torch\S+Error: )", text, re.MULTILINE | re.DOTALL)
    return " / ".join(line.strip()[:200] for line in found[1].splitlines()[:2]).replace("|", ";") if found else ""


NAMES = ("quiet", "slow", "blink", "cut", "rank", "vanished", "killed", "lost", "killed-first", "elastic")


def main() -> int:
    """Run the trials and print what came of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", nargs="+", choices=NAMES, default=NAMES)
    parser.add_argument("--ranks", type=int, default=1, help="of each host")
    parser.add_argument("--steps", type=int, default=150, help="of each run")
    parser.add_argument("--keep", type=Path, help="run in this folder, and leave it there")
    parser.add_argument("--write", action="store_true", help="the table, to benchmarks/results/")
    options = parser.parse_args()
    if reason := why_not():
        print(f"skipped: {reason}")
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    rows = ["| trial | seen | seconds | exit codes | |", "| --- | --- | --- | --- | --- |"]
    good = True
    with tempfile.TemporaryDirectory() as name, Link() as link:
        folder = options.keep or Path(name)
        folder.mkdir(exist_ok=True)
        trials = Trials(folder, link, options.ranks, options.steps)
        print("\n".join(rows), flush=True)
        for each in options.trials:
            trial: Callable[[], Seen] = getattr(trials, each.replace("-", "_"))
            try:
                seen = trial()
            except AssertionError as error:
                seen = Seen([(str(error), False)])
            for host in link.hosts:
                host.kill()
            good = good and seen.good
            rows.append(seen.row(each))
            print(rows[-1], flush=True)
    if options.write:
        command = " ".join(["python", "benchmarks/two_hosts.py", *sys.argv[1:]])
        machine = f"{os.cpu_count()} cores, Linux {os.uname().release}, load {os.getloadavg()[0]:.1f} at the end"
        path = Path(__file__).parent / "results" / f"two-hosts-{date.today()}.md"
        path.write_text(f"# Two hosts, {date.today()}\n\n`{command}`\n\n{machine}\n\n" + "\n".join(rows) + "\n")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
