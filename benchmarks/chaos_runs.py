"""A `shardwright train` in processes of its own, as `chaos.py` disturbs it: its ranks, its files, what it came to."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardwright.data.prepare import prepare
from shardwright.runs.folder import CHECKPOINTS, published
from shardwright.runs.records import EventRecord, read_events
from shardwright.system.ranks_at import RanksFolder, RankState, is_dead
from shardwright.system.signals import send_signal

RUN_FILE = """
out = "{out}"
steps = {steps}
seed = 3
device = "cpu"
model = {{ n_layers = 2, d_model = {d_model}, n_heads = 2, n_kv_heads = 2, head_dim = 8, d_ffn = {d_model}, \
vocab_size = 300, max_seq_len = 32, dropout = 0.1 }}
data = {{ path = "{tokens}" }}
batch = {{ seq_len = 32, global_batch = 8 }}
lr_schedule = {{ shape = "constant" }}
checkpoint = {{ every = 5 }}
metrics = {{ every = 1 }}
evaluation = {{ samples = 0 }}
"""
WAIT_S = 900.0
"""For what comes within seconds on a machine that is not loaded, and in minutes where much else runs."""
Process = tuple[int, str]
"""Its id, and when it began: ids are used again."""


def wait_for(what: Callable[[], Any], told: str, timeout_s: float = WAIT_S, every_s: float = 0.005) -> Any:
    """The first value of `what` that counts as true."""
    until = time.monotonic() + timeout_s
    while not (found := what()):
        assert time.monotonic() < until, f"not within {timeout_s:g} s: {told}"
        time.sleep(every_s)
    return found


def write_tokens(folder: Path) -> Path:
    """Token shards of this project's source, with a vocabulary of 300."""
    texts = folder / "texts"
    texts.mkdir()
    for i, path in enumerate(sorted(Path(__file__).parents[1].glob("src/**/*.py"))[:40]):
        (texts / f"{i}.txt").write_text(path.read_text())
    prepare(texts, folder / "tokens", vocab_size=300, validation=0.0)
    return folder / "tokens"


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat after the name; none for a process that is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def began(pid: int) -> str:
    """When a process began, in ticks since the machine did."""
    found = _stat(pid)
    return found[19] if found else ""


def children() -> dict[int, list[int]]:
    """Of each process of the machine those that it started."""
    found: dict[int, list[int]] = {}
    for path in Path("/proc").iterdir():
        if path.name.isdigit() and (stat := _stat(int(path.name))) and stat[0] != "Z":
            found.setdefault(int(stat[1]), []).append(int(path.name))
    return found


@dataclass
class TrainRun:
    """`shardwright train` on the ranks of a layout, in a folder of its own."""

    folder: Path
    tokens: Path
    steps: int
    settings: list[str]
    d_model: int = 16
    environment: dict[str, str] = field(default_factory=dict)
    out: Path = Path()
    """As FOLDER/out if it is not given."""
    max_restarts: int = 100_000
    launcher: subprocess.Popen[bytes] | None = None
    known: set[Process] = field(default_factory=set)
    """Processes of the run that were ever seen."""

    def __post_init__(self) -> None:
        self.folder.mkdir()
        (self.folder / "tmp").mkdir()
        if self.out == Path():
            self.out = self.folder / "out"
        text = RUN_FILE.format(out=self.out, steps=self.steps, tokens=self.tokens, d_model=self.d_model)
        (self.folder / "run.toml").write_text(text)

    def start(self, resume: bool = False) -> None:
        """Type the command."""
        command = [sys.executable, "-m", "shardwright", "train", str(self.folder / "run.toml")]
        command += [word for setting in self.settings for word in ("--set", setting)]
        command += ["--max-restarts", str(self.max_restarts), *(["--resume"] if resume else [])]
        environment = os.environ | {"TMPDIR": str(self.folder / "tmp")} | self.environment
        with (self.folder / "said").open("ab") as said:
            self.launcher = subprocess.Popen(command, stdout=said, stderr=said, env=environment)

    @property
    def pid(self) -> int:
        """That of the launcher."""
        assert self.launcher is not None
        return self.launcher.pid

    @property
    def said(self) -> str:
        """All output so far."""
        return (self.folder / "said").read_text()

    def ended(self) -> int | None:
        """The exit code, if the command has ended."""
        assert self.launcher is not None
        return self.launcher.poll()

    def seen(self) -> tuple[list[int], list[int]]:
        """Processes of the launcher that live: the servers that it forks ranks from, and these ranks."""
        by_parent = children()
        first = by_parent.get(self.pid, [])
        ranks = [pid for server in first for pid in by_parent.get(server, [])]
        self.known |= {(pid, began(pid)) for pid in (self.pid, *first, *ranks)}
        return [server for server in first if by_parent.get(server)], ranks

    def living(self) -> list[Process]:
        """Processes of the run that are there still."""
        return [(pid, start) for pid, start in self.known if not is_dead(pid) and began(pid) == start]

    def states(self) -> dict[int, tuple[int, RankState]]:
        """Process and state of each rank that has reported and lives."""
        folder, found = RanksFolder(self.out), {}
        for rank in range(8):
            who, state = folder.identity(rank), folder.state(rank)
            if who is not None and state is not None and not is_dead(who.pid):
                found[rank] = (who.pid, state)
        return found

    def next_step_of(self, others: set[int]) -> bool:
        """Wait until rank 0, in another process than those of `others`, has taken a step; False where the run ended."""
        first: dict[int, int] = {}

        def taken() -> bool:
            if self.ended() is not None:
                return True
            pid, state = self.states().get(0, (0, None))
            if state is None or pid in others or state.phase == "start":
                return False
            return state.step > first.setdefault(pid, state.step)

        wait_for(taken, f"a step after a restart\n{self.said[-3000:]}")
        return self.ended() is None

    def finish(self, timeout_s: float = 3600.0) -> int:
        """Waits for the end; the exit code."""
        assert self.launcher is not None
        return self.launcher.wait(timeout_s)

    def events(self) -> list[EventRecord]:
        """Those of faults."""
        return [each for each in read_events(self.out) if each.kind not in ("start", "save")]

    def orphans(self, wait_s: float = 30.0) -> int:
        """Processes that have not ended so many seconds after the launcher; they are ended here."""
        until = time.monotonic() + wait_s
        while self.living() and time.monotonic() < until:
            time.sleep(0.05)
        left = self.living()
        for pid, _ in left:
            send_signal(pid, signal.SIGKILL)
        return len(left)

    def left_over(self, quiet: "TrainRun") -> list[str]:
        """Files that a run without faults does not leave, and that are no logs of a restart."""
        here, there = ({*_files(run.out, "out/"), *_files(run.folder / "tmp", "tmp/")} for run in (self, quiet))
        return sorted(name for name in here - there if not name.startswith("out/logs/restart-"))

    def state(self) -> dict[tuple[str, ...], str]:
        """Checksum of each shard of the last checkpoint: weights and optimizer states."""
        tensors = json.loads((self.last_checkpoint() / "manifest.json").read_text())["tensors"]
        return {
            (name, *map(str, shard["offsets"])): shard["xxh3_128"]
            for name, entry in tensors.items()
            for shard in entry["shards"]
        }

    def last_checkpoint(self) -> Path:
        """The newest that is published."""
        return published(self.out / CHECKPOINTS)[-1]

    def logged(self) -> list[dict[str, Any]]:
        """The `train` records, each step once."""
        path = self.out / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [record for record in map(json.loads, lines) if record["kind"] == "train"]

    def losses(self) -> list[tuple[int, float, float]]:
        """Step, loss and gradient norm of each step."""
        return [(each["step"], each["loss"], each["grad_norm"]) for each in self.logged()]


def _files(folder: Path, prefix: str) -> set[str]:
    """Files, and folders that are empty."""
    there = (path for path in folder.rglob("*") if not path.is_dir() or not any(path.iterdir()))
    return {prefix + str(path.relative_to(folder)) for path in there}


@dataclass
class Kills:
    """What came of kills: how many, at what, and what they did wrong; seconds from each to the next step."""

    at: list[str] = field(default_factory=list)
    runs: int = 0
    wrong: list[str] = field(default_factory=list)
    orphans: int = 0
    left_over: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)


def killed(run: TrainRun, chance: random.Random, moment: str, found: Kills) -> bool:
    """Kill a process of a run: at any time, in a save, or while ranks start. Whether it was still going on."""
    if moment == "any":
        time.sleep(chance.uniform(0.0, 0.6))
    elif moment == "start":
        time.sleep(chance.uniform(0.0, 1.0))
    else:
        saving = lambda: [1 for _, state in run.states().values() if state.phase == "checkpoint"]  # noqa: E731
        wait_for(lambda: saving() or run.ended() is not None, "a save", every_s=0.0005)
        time.sleep(chance.uniform(0.0, 0.01))
    wait_for(lambda: run.seen()[1] or run.ended() is not None, "ranks")
    servers, ranks = run.seen()
    before = {pid for pid, _ in run.states().values()}
    if run.ended() is not None or not ranks:
        return False
    victim = chance.choice(["rank"] * 8 + ["launcher"] + ["server"])
    pid = {"rank": chance.choice(ranks), "launcher": run.pid, "server": servers[0] if servers else run.pid}[victim]
    phases = [state.phase for of, state in run.states().values() if of == pid] or ["start"]
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return run.ended() is None
    since_s = time.monotonic()
    found.at.append(f"{victim} in {phases[0]}" if victim == "rank" else victim)
    if victim == "launcher" or pid == run.pid:
        run.finish()
        found.orphans += run.orphans()
        run.start(resume=True)
    if moment != "start" and victim == "rank" and run.next_step_of(before):
        found.seconds.append(time.monotonic() - since_s)
    return True


class KilledRuns:
    """Runs of `steps` steps on 2 ranks whose processes are killed, each compared with one that nothing happened to;
    every second one saves asynchronously."""

    def __init__(self, folder: Path, tokens: Path, seed: int, steps: int = 60) -> None:
        self.folder, self.tokens, self.seed, self.steps = folder, tokens, seed, steps
        self.layout = ["layout.dp_shard=2"]
        self.quiet = TrainRun(folder / "quiet", tokens, steps, self.layout)
        self.quiet.start()
        self.quiet.seen()
        assert self.quiet.finish() == 0, self.quiet.said

    def run(self, number: int, n: int) -> Kills:
        """Run number `number`, with up to `n` kills."""
        chance, found = random.Random(f"{self.seed} {number}"), Kills(runs=1)
        settings = [*self.layout, *(['checkpoint.async_mode="async"'] if number % 2 else [])]
        run = TrainRun(self.folder / f"kills-{number}", self.tokens, self.steps, settings)
        run.start()
        run.next_step_of(set())
        for _ in range(n):
            if not killed(run, chance, chance.choice(("any", "save", "start")), found):
                break
        while (code := run.finish()) == -9:
            run.start(resume=True)
        run.orphans(0.0)
        if code != 0 or run.state() != self.quiet.state() or run.losses() != self.quiet.losses():
            found.wrong.append(f"run {number}: exit code {code}, not equal to the quiet run\n{run.said[-4000:]}")
        found.orphans += run.orphans()
        found.left_over += run.left_over(self.quiet)
        return found


def restart_s(folder: Path, tokens: Path, by_hand: bool) -> float:
    """Seconds from the kill of one of 2 ranks to the next step: with `--max-restarts`, or the command given again with
    `--resume` as soon as it has ended."""
    run = TrainRun(folder, tokens, 10**6, ["layout.dp_shard=2"], max_restarts=0 if by_hand else 100_000)
    run.start()
    wait_for(lambda: published(run.out / CHECKPOINTS), f"a checkpoint\n{run.said[-3000:]}")
    before = {pid for pid, _ in run.states().values()}
    run.seen()
    os.kill(run.states()[1][0], signal.SIGKILL)
    since_s = time.monotonic()
    if by_hand:
        run.finish()
        run.start(resume=True)
    goes_on = run.next_step_of(before)
    took_s = time.monotonic() - since_s
    assert goes_on, run.said[-3000:]
    run.seen()
    os.kill(run.pid, signal.SIGTERM)
    run.finish()
    run.orphans()
    return took_s


def kills_of(records: Sequence[Mapping[str, Any]]) -> Kills:
    """What came of several runs together."""
    total = Kills()
    for each in records:
        total.at += each["at"]
        total.runs += each["runs"]
        total.wrong += each["wrong"]
        total.orphans += each["orphans"]
        total.left_over += each["left_over"]
        total.seconds += each["seconds"]
    return total


def flips(checkpoint: Path, n: int, seed: int) -> Iterator[tuple[str, str]]:
    """Flip one bit of a file of a checkpoint, try to load it, flip it back; `n` times. Yields the place and what was
    said; nothing where it was loaded."""
    from contextlib import nullcontext

    import torch
    import torch.distributed as dist

    from shardwright.config import load as load_run_file
    from shardwright.system.errors import CheckpointError
    from shardwright.training.build import build_model, build_trainer
    from shardwright.training.checkpoint.state import load
    from shardwright.training.ranks import ProcessRank, process_group

    config, chance = (
        load_run_file(checkpoint / "run.toml", [f"layout.{axis}=1" for axis in ("dp_replicate", "dp_shard", "tp")]),
        random.Random(seed),
    )
    device = torch.device("cpu")
    files = sorted(path for path in checkpoint.iterdir() if path.is_file())
    sizes = [path.stat().st_size for path in files]
    with nullcontext() if dist.is_initialized() else process_group(ProcessRank(), device):
        trainer = build_trainer(config, build_model(config, device, compiled=False), device, compiled=False)
        load(checkpoint, trainer, None)
        for _ in range(n):
            (path,) = chance.choices(files, sizes)
            content = path.read_bytes()
            at, bit = chance.randrange(len(content)), chance.randrange(8)
            damaged = bytearray(content)
            damaged[at] ^= 1 << bit
            path.write_bytes(damaged)
            try:
                load(checkpoint, trainer, None)
                said = ""
            except CheckpointError as error:
                said = str(error)
            finally:
                path.write_bytes(content)
            yield f"{path.name}, byte {at}, bit {bit}", said
        load(checkpoint, trainer, None)
        del trainer
