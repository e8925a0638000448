"""Runs under a real Slurm on this machine: a controller and two nodes on loopback, and the batch file of
`docs/launch.md`.

    apt-get install --no-install-recommends slurm-wlm munge
    python benchmarks/slurm.py --write

The batch file stands as in the docs but for the numbers of its `#SBATCH` lines; 2 nodes of 2 ranks train a tiny model
on CPUs (dp_shard=2 over the nodes, tp=2 inside). Each trial has to end with the weights, optimizer states, losses and
gradient norms of the same run in local workers that nothing happened to, bit for bit.

plain    nothing happens
limit    jobs of 2 minutes, to whose ranks Slurm sends SIGTERM 30 s (and up to 60 s more) before the end: they save,
         and the job queues itself again, twice; then its limit is raised to an hour
kill     SIGKILL of a rank; the job queues itself again as the snippet of `docs/faults.md` says
drain    `scontrol update State=DRAIN` of a node in mid-run
down     `scontrol update State=DOWN` of a node in mid-run, and later State=RESUME
lost     all processes of a node are killed at once, Slurm's too; later its daemon is started again
fewer    as down, with `faults.min_ranks=2`; the node does not come back, and the waiting job is replaced by one of
         `sbatch --nodes=1`. Not bit-equal, as sums are of fewer ranks
cancel   `scancel` in mid-run: the job has to end and not to be queued again

Slurm of Debian needs no account of its own: all runs as this user, in a folder that is deleted at the end.
"""

import argparse
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from chaos_runs import TrainRun, wait_for, write_tokens
from slurm_cluster import NODES, TASKS, Cluster, Job, missing

DOCS = Path(__file__).parents[1] / "docs"
LAYOUT = ["layout.dp_shard=2", "layout.tp=2"]
STEPS = 24
STEPS_OF_LIMIT = 100
SLOW_S = 1.5
"""How much longer a step takes while a trial waits for what is to happen in it."""


@dataclass(frozen=True)
class Found:
    """What came of a trial."""

    trial: str
    seen: str
    seconds: float
    good: bool


def code_blocks(page: str) -> list[str]:
    """The shell code of a page of the docs."""
    return re.findall(r"```sh\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)


def batch_file(restarts: bool = False, **options: str) -> str:
    """The batch file of the docs with the numbers of this Slurm; `restarts`: with the snippet of docs/faults.md; and
    with other `options`."""
    text = next(block for block in code_blocks("launch.md") if "#SBATCH" in block)
    here = {"ntasks_per_node": str(TASKS), "gpus_per_node": str(TASKS), "cpus_per_task": "1", "time": "1:00:00"}
    for name, value in (here | options).items():
        option = f"#SBATCH --{name.replace('_', '-')}="
        text, n = re.subn(rf"^{option}.*$", option + value, text, flags=re.MULTILINE)
        assert n == 1, option
    if restarts:
        condition = r"^if \[ \"\$code\".*?^fi$"
        snippet = next(block for block in code_blocks("faults.md") if "SLURM_RESTART_COUNT" in block)
        text, n = re.subn(condition, lambda _: snippet.strip(), text, flags=re.MULTILINE | re.DOTALL)
        assert n == 1, text
    return text


class Trials:
    """What the trials share: a cluster, tokens, and runs that nothing happened to."""

    def __init__(self, folder: Path, cluster: Cluster) -> None:
        self.folder, self.cluster, self.tokens = folder, cluster, write_tokens(folder)
        self._quiet: dict[int, TrainRun] = {}

    def run(self, name: str, text: str, steps: int = STEPS, slow: bool = True, keys: str = "") -> tuple[TrainRun, Job]:
        """A run that is submitted with the text of a batch file; `slow`: its steps take `SLOW_S` longer."""
        run = TrainRun(self.folder / name, self.tokens, steps, [])
        extension = Path(__file__).with_name("chaos_faults.py")
        with (run.folder / "run.toml").open("a") as file:
            file.write("layout = { dp_shard = 2, tp = 2 }\n" + f'extensions = ["{extension}"]\n' + keys)
        if slow:
            (run.folder / "rank-0.slow").write_text(str(SLOW_S))
        activate = run.folder / ".venv" / "bin" / "activate"
        activate.parent.mkdir(parents=True)
        source = Path(__file__).parents[1] / "src"
        activate.write_text(
            f'export PATH="{Path(sys.executable).parent}:$PATH" PYTHONPATH="{source}" CHAOS_FOLDER="{run.folder}"\n'
        )
        (run.folder / "train.sbatch").write_text(text)
        return run, self.cluster.submit(run.folder / "train.sbatch")

    def quiet(self, steps: int) -> TrainRun:
        """The same run in local workers."""
        if steps not in self._quiet:
            run = self._quiet[steps] = TrainRun(self.folder / f"quiet-{steps}", self.tokens, steps, LAYOUT)
            run.start()
            assert run.finish() == 0, run.said
        return self._quiet[steps]

    def complete(self, run: TrainRun, job: Job, steps: int = STEPS) -> str:
        """Wait for the end of a job, and compare; what was seen."""
        seen = job.wait(ENDS)
        assert seen["JobState"] == "COMPLETED", f"the job ended as {seen['JobState']}\n{log(run)}"
        assert seen["ExitCode"] == "0:0", seen
        quiet = self.quiet(steps)
        assert run.losses() == quiet.losses(), "losses differ"
        assert run.state() == quiet.state(), "weights or optimizer states differ"
        return f"queued again {seen['Restarts']} times, {steps} steps, exit code 0, bit-equal"


ENDS = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "BOOT_FAIL", "OUT_OF_MEMORY")


def log(run: TrainRun) -> str:
    """The output of a run's jobs."""
    return "".join(path.read_text(errors="replace") for path in sorted(run.folder.glob("shardwright-*.log")))


def wait_for_step(run: TrainRun, step: int) -> None:
    """Until a run has logged a step."""
    wait_for(lambda: len(run.logged()) >= step, f"step {step}\n{log(run)}", every_s=0.1)


def be_quick(run: TrainRun) -> None:
    """From now on its steps take no longer than they need."""
    (run.folder / "rank-0.slow").unlink()


def plain(trials: Trials) -> str:
    run, job = trials.run("plain", batch_file(), slow=False)
    return trials.complete(run, job)


def limit(trials: Trials) -> str:
    run, job = trials.run("limit", batch_file(time="2", signal="TERM@30"), STEPS_OF_LIMIT)
    wait_for(lambda: int(job.fields()["Restarts"]) >= 2 or job.state in ENDS, log(run), every_s=1.0)
    if job.state not in ENDS:
        trials.cluster.command("scontrol", "update", f"JobId={job.number}", "TimeLimit=60")
    be_quick(run)
    seen = trials.complete(run, job, STEPS_OF_LIMIT)
    stopped = re.findall(r"stopped at step (\d+) of \d+, as asked", log(run))
    assert len(stopped) == int(job.fields()["Restarts"]), log(run)
    assert "exit code 75" in log(run), log(run)
    return f"stopped by SIGTERM after steps {', '.join(stopped)}, exit code 75 each; {seen}"


def kill(trials: Trials) -> str:
    run, job = trials.run("kill", batch_file(restarts=True))
    wait_for_step(run, 8)
    os.kill(run.states()[2][0], signal.SIGKILL)
    since_s = time.monotonic()
    wait_for(lambda: job.fields()["Restarts"] == "1" or job.state in ENDS, log(run), every_s=0.2)
    took_s = time.monotonic() - since_s
    be_quick(run)
    codes = re.findall(r"srun: error: [\d.]+: (tasks? [\d,-]+: .*)", log(run))
    return f"{'; '.join(codes)}; queued again after {took_s:.0f} s; {trials.complete(run, job)}"


def drain(trials: Trials) -> str:
    run, job = trials.run("drain", batch_file())
    wait_for_step(run, 8)
    trials.cluster.update_node(NODES[1], "DRAIN")
    step = len(run.logged())
    wait_for_step(run, step + 5)
    assert job.state == "RUNNING", job.fields()
    be_quick(run)
    seen = trials.complete(run, job)
    trials.cluster.update_node(NODES[1], "RESUME")
    return f"the job went on to its end on the drained node; {seen}"


def down(trials: Trials) -> str:
    run, job = trials.run("down", batch_file())
    wait_for_step(run, 8)
    trials.cluster.update_node(NODES[1], "DOWN")
    return _without_a_node(trials, run, job, lambda: trials.cluster.update_node(NODES[1], "RESUME"))


def lost(trials: Trials) -> str:
    run, job = trials.run("lost", batch_file(restarts=True))
    wait_for_step(run, 8)
    trials.cluster.kill_node(NODES[1])
    return _without_a_node(trials, run, job, lambda: trials.cluster.start_node(NODES[1]))


def _without_a_node(trials: Trials, run: TrainRun, job: Job, mend: Callable[[], None]) -> str:
    """A job that has lost a node waits for it, and goes on when it is back."""
    since_s = time.monotonic()
    wait_for(lambda: job.fields()["Restarts"] != "0" or job.state in ENDS, log(run), every_s=0.2)
    seen = f"queued again after {time.monotonic() - since_s:.0f} s"
    wait_for(lambda: job.fields()["Reason"] not in ("None", "BeginTime"), f"{job.fields()}\n{log(run)}", 120.0, 0.5)
    fields = job.fields()
    assert fields["JobState"] == "PENDING", f"{fields}\n{log(run)}"
    seen += f", waited for the node ({fields['Reason']})"
    mend()
    be_quick(run)
    return f"{seen}; after its return {trials.complete(run, job)}"


def fewer(trials: Trials) -> str:
    run, job = trials.run("fewer", batch_file(), keys=f"faults = {{ min_ranks = {TASKS} }}\n")
    wait_for_step(run, 8)
    trials.cluster.update_node(NODES[1], "DOWN")
    wait_for(lambda: job.fields()["Restarts"] == "1" or job.state in ENDS, log(run), every_s=0.2)
    job.wait(["PENDING"])
    trials.cluster.command("scancel", str(job.number))
    job = trials.cluster.submit(run.folder / "train.sbatch", "--nodes=1")
    be_quick(run)
    fields = job.wait(ENDS)
    trials.cluster.update_node(NODES[1], "RESUME")
    assert fields["JobState"] == "COMPLETED", f"{fields}\n{log(run)}"
    assert fields["NodeList"] == NODES[0], fields
    changed = re.search(r"layout\.dp_shard 2 to 1", log(run))
    assert changed, log(run)
    mine, quiet = run.losses(), trials.quiet(STEPS).losses()
    assert [step for step, *_ in mine] == [step for step, *_ in quiet]
    apart = max(abs(a[1] - b[1]) / b[1] for a, b in zip(mine, quiet, strict=True))
    assert apart < 1e-4, f"losses differ by {apart:.1g} of their value"
    seen = f"queued again; after scancel and sbatch --nodes=1 it went on with {TASKS} ranks on 1 node ({changed[0]})"
    return f"{seen}, exit code 0, losses within {apart:.0e} of their value"


def cancel(trials: Trials) -> str:
    run, job = trials.run("cancel", batch_file(restarts=True))
    wait_for_step(run, 8)
    trials.cluster.command("scancel", str(job.number))
    fields = job.wait(ENDS)
    time.sleep(5.0)
    fields = job.fields()
    assert (fields["JobState"], fields["Restarts"]) == ("CANCELLED", "0"), f"{fields}\n{log(run)}"
    saved = re.search(r"stopped at step \d+", log(run))
    return f"ended, not queued again; {saved[0] + ' and saved' if saved else 'not saved'}"


TRIALS = {each.__name__: each for each in (plain, limit, kill, drain, fewer, down, lost, cancel)}


def tried(name: str, trials: Trials) -> Found:
    """A trial, with the nodes as they were once it is over."""
    since_s = time.monotonic()
    try:
        seen, good = TRIALS[name](trials), True
    except (AssertionError, KeyError, IndexError, OSError) as error:
        seen, good = f"{type(error).__name__}: {error}", False
    took_s = time.monotonic() - since_s
    trials.cluster.restore()
    return Found(name, seen, took_s, good)


def table(found: list[Found]) -> str:
    """The results as Markdown."""
    rows = ["| trial | seen | seconds | as it should be |", "| --- | --- | --- | --- |"]
    for each in found:
        seen = each.seen.partition("\n")[0].replace("|", ";")
        rows.append(f"| {each.trial} | {seen} | {each.seconds:.0f} | {'yes' if each.good else 'NO'} |")
    return "\n".join(rows)


def write(version: str, trials: list[str], found: list[Found]) -> None:
    """The results so far, to benchmarks/results."""
    path = Path(__file__).parent / "results" / f"slurm-{date.today()}.md"
    machine = f"{version}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} at the end"
    command = f"python benchmarks/slurm.py --trials {' '.join(trials)} --write"
    path.write_text(f"# Runs under Slurm, {date.today()}\n\n{machine}\n\n`{command}`\n\n{table(found)}\n")


def main() -> None:
    """Run the trials and print what came of them; exit code 1 if one is not as it should be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", nargs="+", choices=TRIALS, default=list(TRIALS), metavar="NAME")
    parser.add_argument("--write", action="store_true", help="the table, to benchmarks/results/")
    options = parser.parse_args()
    if lacking := missing():
        print(
            f"skipped: {', '.join(lacking)} not found; on Debian: "
            f"apt-get install --no-install-recommends slurm-wlm munge"
        )
        return
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    signal.signal(signal.SIGHUP, lambda number, frame: sys.exit(128 + number))
    found = []
    with tempfile.TemporaryDirectory(prefix="slurm-", dir="/tmp") as name:
        folder = Path(name) / "cluster"
        folder.mkdir()
        Path(name).chmod(0o755)
        with Cluster(folder) as cluster:
            version = cluster.command("sinfo", "--version").strip()
            trials = Trials(Path(name), cluster)
            for each in options.trials:
                found.append(tried(each, trials))
                print(f"{each}: {found[-1].seen} ({found[-1].seconds:.0f} s)", flush=True)
                if options.write:
                    write(version, options.trials, found)
    print(table(found))
    if not all(each.good for each in found):
        sys.exit(1)


if __name__ == "__main__":
    main()
