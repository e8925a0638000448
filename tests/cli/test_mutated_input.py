"""Proves that no verb answers a mistyped number or a damaged file with a traceback, work without end or half of its
output: each takes arguments that are right but for one, and files with a few bytes changed."""

import random
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import pytest
from typer.testing import CliRunner

from shardwright.cli.main import app

CPU_S = 20
"""CPU-seconds that a verb may take, however loaded the machine is."""
NUMBERS = (
    "-1",
    "0",
    "1e9",
    "1000000000",
    str(10**17),
    str(10**30),
    "9" * 5000,
    "nan",
    "-inf",
    "",
    "\x1b[31m",
    "٣",
    "1,1",
)
PLAN = ("plan", "--model", "debug", "--cluster", "h100:8", "--global-batch", "16", "--seq-len", "64")
SERVE = ("plan", "serve", "--model", "llama-3.1-8b", "--cluster", "h100:8", "--input-len", "16", "--output-len", "16")
COMMANDS: tuple[tuple[str, ...], ...] = (
    ("schedule", "--schedule", "1f1b", "--pp", "4", "--microbatches", "8"),
    (
        "schedule",
        "--schedule",
        "zb-h1",
        "--pp",
        "4",
        "--microbatches",
        "8",
        "--comm",
        "0.1",
        "--kept-for-weight",
        "0.5",
    ),
    ("schedule", "--schedule", "interleaved-1f1b", "--pp", "4", "--microbatches", "8", "--virtual-stages", "2"),
    (*PLAN, "--top", "3", "--memory-margin", "0.1", "--budget-tokens", "1e9"),
    (*PLAN, "--explain", "dp_shard=8,micro_batch=1"),
    (*SERVE, "--top", "3", "--draft-tokens", "2", "--acceptance", "0.5", "--price", "2"),
    ("verify", "RUN", "--steps", "1", "--timeout", "0", "--matrix", "99"),
    ("data", "inspect", "TOKENS", "--documents", "1", "--seq-len", "8"),
    ("data", "prepare", "TEXT", "--out", "OUT", "--vocab-size", "300", "--validation", "2", "--shard-tokens", "100"),
    ("measure", "--ranks", "0", "--budget", "0.05"),
    ("generate", "NOTHING", "--prompt", "a", "--max-tokens", "4", "--seed", "1", "--top-k", "3", "--temperature", "1"),
    ("eval", "NOTHING", "--data", "TOKENS", "--seq-len", "8", "--samples", "3", "--micro-batch", "2"),
    ("export", "NOTHING", "--out", "OUT", "--max-shard-size", "5GB"),
    ("train", "RUN", "--set", "steps=2"),
    ("dryrun", "RUN", "--rank", "9", "--steps", "1"),
)
"""Right but for one word, which is wrong so that no command begins to train."""
SETTINGS = (
    "steps", "seed", "batch.seq_len", "batch.global_batch", "batch.micro_batch", "data.prefetch", "layout.tp",
    "layout.pp", "layout.cp", "layout.ep", "layout.dp_shard", "layout.dp_replicate", "layout.virtual_stages",
    "layout.stage_layers", "model.n_layers", "model.d_model", "model.n_heads", "model.n_kv_heads", "model.vocab_size",
    "model.mtp_modules", "model.rope_theta", "optimizer.lr", "checkpoint.every", "checkpoint.keep_last",
    "checkpoint.retries", "evaluation.samples", "faults.hang_after", "metrics.every", "out", "data.path",
    "init.weights",
)  # fmt: skip
RUN = 'out = "{out}"\nsteps = 2\ndata = {{ path = "{out}/no-tokens" }}\nbatch = {{ seq_len = 16, global_batch = 4 }}\n'
BYTES = (
    b"\x00",
    b"\xff",
    b"[" * 5000,
    b"9" * 5000,
    b"a." * 50_000 + b"a = 1\n",
    b'"""',
    b"\x1b[31m",
    b"\n[",
    b"= ",
    b"",
)


@contextmanager
def bounded_work() -> Iterator[None]:
    """Raises AssertionError where the block takes more than CPU_S of this process."""

    def end(number: int, frame: FrameType | None) -> None:
        raise AssertionError(f"more than {CPU_S} s of CPU time")

    before = signal.signal(signal.SIGVTALRM, end)
    signal.setitimer(signal.ITIMER_VIRTUAL, CPU_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def answers(folder: Path, arguments: list[str]) -> None:
    """Run a verb; it must end with an exit code that it has, in words, and leave all of its output or none."""
    places = {"RUN": "run.toml", "TEXT": "text", "TOKENS": "tokens", "OUT": "made", "NOTHING": "nothing"}
    given = [str(folder / places[each]) if each in places else each for each in arguments]
    there = sorted(path.name for path in folder.iterdir())
    with bounded_work():
        result = CliRunner().invoke(app, given)
    shown = [each[:60] for each in arguments]
    problem = result.exception if result.exception and not isinstance(result.exception, SystemExit) else None
    assert problem is None, (shown, repr(problem))
    assert result.exit_code in (0, 1, 2), (shown, result.exit_code, result.output[-500:])
    assert "Traceback" not in result.output, shown
    assert "\x1b" not in result.output, shown
    if result.exit_code:
        assert sorted(path.name for path in folder.iterdir()) == there, shown
        assert result.exit_code == 1 or "error: " in result.output, (shown, result.output)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run file whose data are missing, some text, and a folder of tokens that is damaged."""
    (tmp_path / "text").mkdir()
    (tmp_path / "text/a.txt").write_text("a b c " * 50)
    (tmp_path / "tokens").mkdir()
    (tmp_path / "tokens/manifest.json").write_text("{}")
    (tmp_path / "run.toml").write_text(RUN.format(out=tmp_path / "out"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def numbers() -> list[list[str]]:
    """Every command with each of its numbers replaced by each of NUMBERS, and every setting of a run file."""
    found = []
    for command in COMMANDS:
        for at, word in enumerate(command):
            if at > 1 and word[:1].isdecimal():
                found += [[*command[:at], number, *command[at + 1 :]] for number in NUMBERS]
    found += [["train", "RUN", "--set", f"{key}={number}"] for key in SETTINGS for number in NUMBERS]
    return found


def damaged(draw: random.Random, content: bytes) -> bytes:
    """Some bytes put in, taken out or changed."""
    at, n = draw.randrange(len(content)), draw.randrange(3)
    return content[:at] + draw.choice(BYTES) + content[at + n :]


def damaged_run_files(folder: Path, n: int) -> None:
    """Damage the run file in `n` ways; `train` and `plan` answer each."""
    draw, whole = random.Random(1), (folder / "run.toml").read_bytes()
    for number in range(n):
        (folder / "run.toml").write_bytes(damaged(draw, whole))
        answers(folder, [["train", "RUN"], ["plan", "RUN", "--cluster", "nothing:8"]][number % 2])


def test_numbers_that_are_none_or_too_large_are_answered(folder):
    for arguments in random.Random(2).sample(numbers(), 25):
        answers(folder, arguments)


def test_damaged_run_files_are_answered(folder):
    damaged_run_files(folder, 20)
