"""Whole runs of `shardwright train` in processes of their own, with faults put into their workers.

Nothing of the product is replaced but one thing: where the launcher would fork a worker from a server of its own, which
takes seconds to start, it is forked from a process that has imported everything. The command, the launcher, the
workers, their files and the signals between them are the real ones. A fault is a function that is called by each rank
before it begins, with its number, and changes code there.
"""

import contextlib
import functools
import json
import multiprocessing
import multiprocessing.process
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwright.runs.records import EventRecord, read_events
from shardwright.system.signals import STOPPING, send_signal
from tests.distributed import context

Fault = Callable[[int], None]
LIMIT_S = 240.0
"""Seconds for a whole run: less than pytest's limit, and several times what a loaded machine took."""

RUN_FILE = """
steps = 20
seed = 3
device = "cpu"
model = {{ n_layers = 2, d_model = 16, n_heads = 2, n_kv_heads = 1, head_dim = 8, d_ffn = 24, vocab_size = 300, \
max_seq_len = 16, dropout = 0.1 }}
data = {{ path = "{tokens}" }}
batch = {{ seq_len = 16, global_batch = 4 }}
layout = {{ dp_shard = 2 }}
lr_schedule = {{ shape = "constant" }}
checkpoint = {{ every = 5 }}
metrics = {{ every = 1 }}
evaluation = {{ samples = 0 }}
"""


def write_run_file(folder: Path, tokens: Path) -> Path:
    """A run of 20 steps of a tiny model with dropout on 2 ranks; its `out` is FOLDER/out."""
    path = folder / "run.toml"
    path.write_text(f'out = "{folder / "out"}"' + RUN_FILE.format(tokens=tokens))
    return path


@dataclass
class Run:
    """A `shardwright train` that goes on, or has ended."""

    process: multiprocessing.process.BaseProcess
    folder: Path

    @property
    def stdout(self) -> str:
        return (self.folder / "stdout").read_text()

    @property
    def stderr(self) -> str:
        return (self.folder / "stderr").read_text()

    def wait(self, timeout_s: float = LIMIT_S) -> int:
        """The exit code; -9 is of one that SIGKILL has ended."""
        self.process.join(timeout_s)
        assert self.process.exitcode is not None, f"still going on after {timeout_s} s:\n{self.stdout}{self.stderr}"
        return self.process.exitcode

    def wait_for(self, what: Callable[[], bool], timeout_s: float = LIMIT_S) -> None:
        """Until something is so."""
        until = time.monotonic() + timeout_s
        while not what():
            assert self.process.exitcode is None, f"it ended:\n{self.stdout}{self.stderr}"
            assert time.monotonic() < until, f"not within {timeout_s} s:\n{self.stdout}{self.stderr}"
            time.sleep(0.01)

    def workers(self) -> list[int]:
        """Process ids of the workers, dead or alive, by rank."""
        return [int(path.read_text()) for path in sorted(self.folder.glob("pid-*"))]


@contextmanager
def training(
    run_file: Path,
    *arguments: str,
    fault: Fault | None = None,
    environment: dict[str, str] | None = None,
    torchrun: bool = False,
) -> Iterator[Run]:
    """`shardwright train RUN_FILE ARGUMENTS` from here to its end, or to that of the `with`.

    With `torchrun` its ranks are 2 processes of torchrun's agent, which restarts them once.
    """
    folder = run_file.parent / f"process-{time.monotonic_ns()}"
    folder.mkdir()
    for name in ("stdout", "stderr"):
        (folder / name).touch()
    command = [str(run_file), *arguments]
    process = context.Process(target=_command, args=(command, folder, fault, environment or {}, torchrun))
    process.start()
    run = Run(process, folder)
    try:
        yield run
    finally:
        for pid in (process.pid, *run.workers()):
            if pid is not None and is_alive(pid):
                send_signal(pid, signal.SIGKILL)
        process.join()


def train(run_file: Path, *arguments: str, fault: Fault | None = None, expect: int = 0, torchrun: bool = False) -> Run:
    """The same, waited for; the exit code has to be `expect`."""
    with training(run_file, *arguments, fault=fault, torchrun=torchrun) as run:
        code = run.wait()
        assert code == expect, f"exit code {code}\n{run.stdout}{run.stderr}"
    return run


def records(run_file: Path, out: str = "out") -> list[dict[str, Any]]:
    """The logged steps and evaluations of a run's metrics."""
    return [record for record in lines(run_file, out) if record["kind"] in ("train", "evaluation")]


def lines(run_file: Path, out: str = "out") -> list[dict[str, Any]]:
    """All lines of a run's metrics."""
    return [json.loads(line) for line in (run_file.parent / out / "metrics.jsonl").read_text().splitlines()]


def trajectory(run_file: Path, out: str = "out") -> list[tuple[int, float, float]]:
    """Step, loss and gradient norm of every line, to the last bit; none before the first."""
    if not (run_file.parent / out / "metrics.jsonl").exists():
        return []
    return [(r["step"], r["loss"], r["grad_norm"]) for r in records(run_file, out) if r["kind"] == "train"]


def events(run_file: Path, out: str = "out") -> list[EventRecord]:
    """What happened to the run, but for stragglers: where other programs load the cores, a rank is slower."""
    return [each for each in read_events(run_file.parent / out) if each.kind != "straggler"]


def checkpoints(run_file: Path, out: str = "out") -> list[str]:
    """What there is in the folder of checkpoints, partial ones too."""
    return sorted(path.name for path in (run_file.parent / out / "checkpoints").iterdir())


def checksums(run_file: Path, step: int, out: str = "out") -> dict[tuple[str, ...], str]:
    """The checksum of every shard of a checkpoint."""
    path = run_file.parent / out / "checkpoints" / f"step-{step:08d}" / "manifest.json"
    tensors = json.loads(path.read_text())["tensors"]
    return {
        (name, *map(str, shard["offsets"])): shard["xxh3_128"]
        for name, entry in tensors.items()
        for shard in entry["shards"]
    }


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that waits for its parent to notice its end does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def kill_itself() -> None:
    """What `kill -9` and the kernel out of memory do."""
    os.kill(os.getpid(), signal.SIGKILL)


def _command(
    command: Sequence[str], folder: Path, fault: Fault | None, environment: dict[str, str], torchrun: bool
) -> None:
    from shardwright.training import launch
    from shardwright.training import run as run_module

    _redirect(os.open(folder / "stdout", os.O_WRONLY | os.O_APPEND), 1)
    _redirect(os.open(folder / "stderr", os.O_WRONLY | os.O_APPEND), 2)
    os.environ.update(environment)
    _usual_signals()
    launch.fork = functools.partial(_forked, folder)
    if fault is not None:
        run_module.run = functools.partial(_run_with, fault, run_module.run)
    _leave_with(lambda: _torchrun(command, folder) if torchrun else _shardwright(command))


def _usual_signals() -> None:
    """As in a new interpreter that no handler was passed on to, also where the tests run under nohup, and where the
    server of forks was started with SIGINT blocked."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)
    for number in STOPPING:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


def _shardwright(command: Sequence[str]) -> None:
    import typer

    import shardwright.cli.train

    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(shardwright.cli.train.train)
    app(command)


def _torchrun(command: Sequence[str], folder: Path) -> None:
    """What `torchrun --standalone --nproc-per-node 2 --max-restarts 1` does, but for starting new interpreters."""
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=2,
        run_id="test",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        rdzv_configs={"is_host": True},
        max_restarts=1,
        monitor_interval=0.05,
        start_method="fork",
    )
    elastic_launch(config, _rank_of_torchrun)(command, folder)


def _rank_of_torchrun(command: Sequence[str], folder: Path) -> None:
    _usual_signals()
    (folder / f"pid-{os.environ['RANK']}").write_text(str(os.getpid()))
    try:
        _shardwright(command)
    except SystemExit as leaving:
        if code := leaving.code:
            _leave_with(lambda: sys.exit(code))
    # Of a function that went well the agent waits for the return, not for the end of its process.


def _forked(folder: Path, target: Callable[..., None], *args: Any) -> multiprocessing.process.BaseProcess:
    """`forks.fork`, from this process, which has the fault in it, in the place of a server that would first have to
    import everything."""
    sys.stdout.flush()
    process = multiprocessing.get_context("fork").Process(target=_worker, args=(folder, target, *args))
    process.start()
    return process


def _worker(folder: Path, target: Callable[..., None], connection: Any, store: Any, *args: Any) -> None:
    output, error, environment = args[:3]
    _close_all_but({0, 1, 2, connection.fileno(), output.number, error.number, store[1].number})
    (folder / f"pid-{environment['RANK']}").write_text(str(os.getpid()))
    target(connection, store, *args)


def _close_all_but(kept: set[int]) -> None:
    """As a new interpreter would: while a worker holds another's end of a connection, that one never sees it close."""
    for fd in map(int, os.listdir("/dev/fd")):
        if fd not in kept:
            with contextlib.suppress(OSError):
                os.close(fd)


def _run_with(fault: Fault, run: Callable[..., bool], config: Any, place: Any, **how: Any) -> bool:
    fault(place.rank)
    return run(config, place, **how)


def _redirect(source: int, target: int) -> None:
    os.dup2(source, target)
    os.close(source)


def _leave_with(work: Callable[[], Any]) -> None:
    """Do the work and end this process as Python would, but without the clean-up of the one it was forked from."""
    code = 0
    try:
        work()
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
