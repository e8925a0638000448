"""Proves that no verb answers a mistyped number or a damaged file with a traceback, work without end or half of its
output: each takes arguments that are right but for one, and files with a few bytes or a value changed, or that are no
files."""

import json
import os
import random
import signal
import struct
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from shardwright.cli.main import OF_TWO_WORDS, VERBS, app
from shardwright.conversion.dcp import DcpWriter
from shardwright.planner.evaluate import MEASURED_RUNS
from shardwright.rl.measured import PUBLISHED
from shardwright.runs.folder import now
from shardwright.runs.records import (
    CheckpointRecord,
    EvaluationRecord,
    EventRecord,
    StartRecord,
    TrainRecord,
    append_event,
    as_record,
)
from shardwright.serving.evaluate import MEASUREMENTS
from shardwright.training.checkpoint.manifest import CheckpointManifest, TrainingProgress

OTHER_SYSTEMS = Path(__file__).parents[2] / "examples/other-systems"
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
MIXTURE_PLAN = ("plan", "--model", "debug-moe", "--cluster", "h100:2", "--global-batch", "4", "--seq-len", "64")
SERVE = ("plan", "serve", "--model", "llama-3.1-8b", "--cluster", "h100:8", "--input-len", "16", "--output-len", "16")
RL = ("plan", "rl", "--model", "debug", "--cluster", "h100:2", "--input-len", "16", "--output-mean", "8",
      "--output-max", "32", "--prompts", "2", "--group", "2")  # fmt: skip
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
    (*PLAN, "--top", "1", "--budget-tokens", "1e9", "--price", "h100=2.5", "--operations", "failures=2,save_every=9"),
    (*PLAN, "--explain", "dp_shard=8,micro_batch=1"),
    (*PLAN, "--fix", "offload_optimizer=cpu", "--host-memory", "1GB", "--top", "1"),
    (*RL, "--updates", "2", "--output-p95", "24", "--generate-on", "1", "--off-policy", "1"),
    (*SERVE, "--top", "3", "--draft-tokens", "2", "--acceptance", "0.5", "--price", "2"),
    ("verify", "RUN", "--steps", "1", "--timeout", "0", "--matrix", "99"),
    ("data", "inspect", "TOKENS", "--documents", "1", "--seq-len", "8"),
    ("data", "prepare", "TEXT", "--out", "OUT", "--vocab-size", "300", "--validation", "2", "--shard-tokens", "100"),
    ("measure", "--ranks", "0", "--budget", "0.05"),
    ("generate", "NOTHING", "--prompt", "a", "--max-tokens", "4", "--seed", "1", "--top-k", "3", "--temperature", "1"),
    ("eval", "NOTHING", "--data", "TOKENS", "--seq-len", "8", "--samples", "3", "--micro-batch", "2"),
    ("export", "NOTHING", "--out", "OUT", "--max-shard-size", "5GB"),
    ("convert", "RUN_DIR", "OUT", "--to", "dcp"),
    ("merge", "RUN_DIR", "NOTHING", "--out", "OUT", "--shares", "0.5,0.5"),
    ("merge", "RUN_DIR", "--last", "2", "--out", "OUT"),
    ("train", "RUN", "--set", "steps=2"),
    ("sweep", "RUN", "--grid", "steps=2", "--grid", "nothing=2", "--out", "OUT", "--per-node", "2", "--cpus", "1"),
    ("mup-check", "RUN", "--widths", "8", "--steps", "1", "--seeds", "1"),
    (
        "launch",
        "RUN",
        "--on",
        "none",
        "--nodes",
        "2",
        "--per-node",
        "4",
        "--cpus",
        "1",
        "--grace",
        "9",
        "--max-restarts",
        "1",
    ),
    ("dryrun", "RUN", "--rank", "9", "--steps", "1", "--device-memory", "1GiB"),
    ("quickstart", "--out", "RUN", "--steps", "3"),
    ("watch", "RUN_DIR", "--once", "--every", "2"),
    ("plan", "diff", "RUN", "RUN", "--cluster", "h100:8"),
)
"""Right but for one word, which is wrong so that no command begins to train."""
READERS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("run.toml", ("train", "RUN")),
    ("run.toml", ("plan", "RUN", "--cluster", "nothing:8")),
    ("run.toml", ("plan", "diff", "RUN", "RUN", "--cluster", "h100:8")),
    ("run.toml", ("dryrun", "RUN", "--rank", "9")),
    ("run.toml", ("verify", "RUN", "--matrix", "99")),
    ("run/metrics.jsonl", ("report", "RUN_DIR")),
    ("run/metrics.jsonl", ("watch", "RUN_DIR", "--once")),
    ("run/metrics.jsonl", ("plan", "RUN", "--measured", "RUN_DIR", "--cluster", "h100:1")),
    ("run/events.jsonl", ("report", "RUN_DIR", "--json")),
    ("run/events.jsonl", ("watch", "RUN_DIR", "--once")),
    ("run/run.toml", ("report", "RUN_DIR", "--json")),
    ("run/checkpoints/step-00000002/manifest.json", ("generate", "RUN_DIR", "--prompt", "a")),
    ("run/checkpoints/step-00000002/manifest.json", ("export", "RUN_DIR", "--out", "OUT")),
    ("run/checkpoints/step-00000002/manifest.json", ("convert", "RUN_DIR", "OUT", "--to", "dcp")),
    ("run/checkpoints/step-00000002/manifest.json", ("merge", "RUN_DIR", "HF", "--out", "OUT")),
    ("dcp/.metadata", ("convert", "DCP", "OUT", "--to", "hf")),
    ("tokens/manifest.json", ("data", "inspect", "TOKENS")),
    ("tokens/manifest.json", ("eval", "RUN_DIR", "--data", "TOKENS")),
    ("runs.csv", ("plan", "evaluate", "RUNS", "--json")),
    ("serving.csv", ("plan", "evaluate-serving", "SERVED", "--json")),
    ("steps.csv", ("plan", "evaluate-rl", "STEPS", "--json")),
    ("hf/config.json", ("import", "HF", "--out", "OUT")),
    ("hf/generation_config.json", ("import", "HF", "--out", "OUT")),
    ("hf/model.safetensors", ("import", "HF", "--out", "OUT")),
    ("hf/model.safetensors.index.json", ("import", "HF", "--out", "OUT")),
    ("train.log", ("plan", "calibrate", "LOG", "--from", "SCRIPT", "--cluster", "h100:32", "--write", "OUT_TOML")),
    ("train.log", ("plan", "explain-log", "LOG", "--from", "SCRIPT", "--cluster", "h100:32")),
    ("loads.json", (*MIXTURE_PLAN, "--expert-load", "LOADS")),
    ("prompts.jsonl", ("generate", "NOTHING", "--prompts", "PROMPTS")),
    ("prompts.jsonl", ("score", "NOTHING", "PROMPTS")),
    ("hardware.toml", (*PLAN, "--hardware", "HARDWARE", "--top", "1")),
)
"""Files, and verbs that read them."""
SETTINGS = (
    "steps", "seed", "batch.seq_len", "batch.global_batch", "batch.micro_batch", "data.prefetch", "layout.tp",
    "layout.pp", "layout.cp", "layout.ep", "layout.dp_shard", "layout.dp_replicate", "layout.virtual_stages",
    "layout.stage_layers", "model.n_layers", "model.d_model", "model.n_heads", "model.n_kv_heads", "model.vocab_size",
    "model.mtp_modules", "model.rope_theta", "optimizer.lr", "checkpoint.every", "checkpoint.keep_last",
    "checkpoint.retries", "evaluation.samples", "faults.hang_after", "metrics.every", "out", "data.path",
    "init.weights",
)  # fmt: skip
RUN = 'out = "{out}"\nsteps = 2\ndata = {{ path = "{out}/no-tokens" }}\nbatch = {{ seq_len = 16, global_batch = 4 }}\n'
HARDWARE = """
[networks.my-roce]
share = 0.75
start_us = 8.4
latency_us = 14.0
half_mib = 0.1

[clusters.mine]
accelerator = "h100"
node_size = 8
network = "my-roce"
gbit_per_s_per_node = 3200
"""
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
    b"NaN",
    b"1e999",
    b"\xef\xbb\xbf",
    "\u2028".encode(),
    "\u202e".encode(),
    b"\xed\xa0\x80",
    b'"a\\ud800b"',
    b'"../x"',
)
VALUES: tuple[Any, ...] = (
    None, True, 0, 0.0, -1, 1.5, 10**17, 10**30, 10**400, 1e308, 5e-324, float("nan"), float("inf"), "", "x", "../x",
    "/etc/passwd", "a\u2028b", "\u202e", "\ud800", "9999-12-31T23:59:59-14:00", [], {}, [1], ["a", 1], [[]], {"a": 1},
)  # fmt: skip
"""What may stand in the place of any value of a JSON document."""


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
    places |= {
        "PROMPTS": "prompts.jsonl",
        "RUN_DIR": "run",
        "RUNS": "runs.csv",
        "SERVED": "serving.csv",
        "STEPS": "steps.csv",
        "HF": "hf",
        "DCP": "dcp",
        "HARDWARE": "hardware.toml",
        "LOADS": "loads.json",
        "LOG": "train.log",
        "SCRIPT": "train.sh",
        "OUT_TOML": "made.toml",
    }
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


def write_files(folder: Path) -> None:
    """A run file whose data are missing, some text, a folder of a run, tables, weights without weights, and so on."""
    (folder / "text").mkdir()
    (folder / "text/a.txt").write_text("a b c " * 50)
    (folder / "tokens").mkdir()
    (folder / "tokens/manifest.json").write_text(json.dumps({"format": 1, "shards": [], "vocab_size": 300}))
    (folder / "run.toml").write_text(RUN.format(out=folder / "out"))
    run, last = folder / "run", folder / "run/checkpoints/step-00000002"
    last.mkdir(parents=True)
    (run / "run.toml").write_text(RUN.format(out=run))
    records = [
        StartRecord(0, "1 rank", "", "constant", 1, "here", "cpu", "2.13", "0.1"),
        *(TrainRecord(step, 5.0, 1.0, 1e-3, 64, 9.0, 9.0, 0.1, None, 100, 0.1, 0.01, 0.08, 0.01) for step in (1, 2)),
        EvaluationRecord(2, 5.0, now()),
        CheckpointRecord(2, 0.1, 0.2, 1000, now()),
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(as_record(each)) + "\n" for each in records))
    append_event(run, EventRecord("save", 2, "saved"))
    progress, model = TrainingProgress(2, 8, 0), {"n_layers": 2}
    CheckpointManifest(progress, model, None, 1, {}).write(last)
    for name, path in (("runs.csv", MEASURED_RUNS), ("serving.csv", MEASUREMENTS), ("steps.csv", PUBLISHED)):
        (folder / name).write_text("".join(path.read_text().splitlines(keepends=True)[:4]))
    (folder / "hf").mkdir()
    config = {"model_type": "llama", "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    (folder / "hf/config.json").write_text(json.dumps(config | {"vocab_size": 300, "intermediate_size": 32}))
    (folder / "hf/generation_config.json").write_text(json.dumps({"eos_token_id": [2, 3], "bos_token_id": 1}))
    header = json.dumps({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    (folder / "hf/model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"0000")
    (folder / "hf/model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "model.safetensors"}}))
    (folder / "dcp").mkdir()
    writer = DcpWriter(folder / "dcp")
    writer.write_tensor(("model", "embed_tokens.weight"), (2, 2), [((0, 0), torch.ones(2, 2))])
    writer.write_object(("train_state", "step"), 3)
    writer.finish()
    (folder / "dcp/config.json").write_bytes((folder / "hf/config.json").read_bytes())
    for made, example in (("train.log", "megatron_llama3_8b.log"), ("train.sh", "megatron_llama3_8b.sh")):
        (folder / made).write_bytes((OTHER_SYSTEMS / example).read_bytes())
    (folder / "loads.json").write_text(json.dumps({"tokens_by_expert": [[3, 1, 2, 2, 4, 1, 1, 2]]}))
    (folder / "prompts.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    (folder / "hardware.toml").write_text(HARDWARE)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Files that verbs read."""
    write_files(tmp_path)
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
    """Some bytes put in, taken out or changed, or a value of a line or a document of JSON."""
    if draw.random() < 0.5:
        with suppress(ValueError):
            return json.dumps(with_another_value(draw, json.loads(content))).encode()
        lines = content.splitlines(keepends=True)
        number = draw.randrange(len(lines))
        with suppress(ValueError):
            lines[number] = json.dumps(with_another_value(draw, json.loads(lines[number]))).encode() + b"\n"
            return b"".join(lines)
    at, n = draw.randrange(len(content)), draw.randrange(3)
    return content[:at] + draw.choice(BYTES) + content[at + n :]


def with_another_value(draw: random.Random, document: Any) -> Any:
    """A JSON document in which one value, at any depth, is another."""
    if not isinstance(document, dict | list) or not document or draw.random() < 0.1:
        return draw.choice(VALUES)
    key = draw.choice(list(document)) if isinstance(document, dict) else draw.randrange(len(document))
    changed = document.copy()
    changed[key] = with_another_value(draw, document[key])
    return changed


def put_in_place(draw: random.Random, path: Path, whole: bytes) -> None:
    """Write a damaged file, or one time in eight something that is no file, or has no end, in its place."""
    kind = draw.randrange(24)
    if kind > 2:
        path.write_bytes(damaged(draw, whole))
        return
    path.unlink()
    if kind == 0:
        os.mkfifo(path)
    elif kind == 1:
        path.symlink_to("/dev/zero")
    else:
        with path.open("wb") as file:
            file.truncate(2**40)


def damaged_files(folder: Path, numbers: Iterable[int]) -> None:
    """Damage a file in one way each, by a number; a verb that reads it answers."""
    for number in numbers:
        name, arguments = READERS[number % len(READERS)]
        whole = (folder / name).read_bytes()
        put_in_place(random.Random(number), folder / name, whole)
        try:
            answers(folder, list(arguments))
        finally:
            (folder / name).unlink()
            (folder / name).write_bytes(whole)
            for made in ("run/report.html", "run/curves.png", "made.toml"):
                (folder / made).unlink(missing_ok=True)


def test_numbers_that_are_none_or_too_large_are_answered(folder):
    for arguments in random.Random(2).sample(numbers(), 25):
        answers(folder, arguments)


def test_damaged_files_are_answered(folder):
    damaged_files(folder, range(2 * len(READERS)))


def test_every_verb_takes_part():
    given = {command[0] for command in COMMANDS} | {command[0] for _, command in READERS}
    assert given == set(VERBS) - {"explore"}  # which ends when it is told to; tests/explore damages its input
    assert {" ".join(command[:2]) for _, command in READERS} | {"plan serve", "plan rl"} >= set(OF_TWO_WORDS)
