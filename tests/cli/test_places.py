"""Proves that every option that names a file or folder refuses pipes, devices, sockets, links to themselves or out of
their folder, and files without end. A reader does not wait for them, and a writer leaves them as they are. The options
are the parser's, so a new option cannot be left out."""

import json
import os
import signal
import socket
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from shardwright.cli.main import OF_TWO_WORDS, VERBS, _command, app
from shardwright.config import spec_of_folder
from shardwright.data.tokenizer import train_bpe
from shardwright.hugging_face.architecture import architecture_of
from shardwright.hugging_face.table import file_tensors
from tests.cli.test_mutated_input import write_files
from tests.marks import prove, rest_prove

HANGS_S = 120
"""Seconds after which a verb is taken to wait for a pipe without end; every command here takes a few."""
PLAN = "plan --model debug --cluster h100:1 --global-batch 8 --seq-len 64 --top 1"
FROM = "--from train.sh --cluster h100:32"
SERVE = "plan serve --cluster h100:8 --input-len 16 --output-len 16"
RL = "plan rl --cluster h100:1 --input-len 16 --output-mean 8 --output-max 16 --prompts 2 --group 2"
SCHEDULE = "schedule --schedule 1f1b --pp 2 --microbatches 2"
CHAT = "data prepare text --format chat --out made --tokenizer hf/tokenizer.json"
SWEEP = "sweep run.toml --grid steps=1,2"
MUP_CHECK = "mup-check run.toml --widths 64,128 --steps 1 --seeds 1"
DRYRUN = "dryrun run.toml --steps 2 --device-memory 1GiB"
READ = {
    "data inspect": {"directory": "data inspect PLACE"},
    "data prepare": {
        "source": "data prepare PLACE --out made --vocab-size 300",
        "--tokenizer": "data prepare text --out made --tokenizer PLACE",
        "--chat-template": f"{CHAT} --chat-template PLACE",
    },
    "plan": {
        "target": "plan PLACE --cluster h100:1",
        "runs": "plan evaluate PLACE",
        "--from": "plan --from PLACE --cluster h100:1",
        "--model": PLAN.replace("debug", "PLACE"),
        "--expert-load": f"{PLAN.replace('debug', 'debug-moe')} --expert-load PLACE",
        "--hardware": f"{PLAN} --hardware PLACE",
        "--explain": f"{PLAN} --explain PLACE",
        "--measured": "plan run.toml --cluster h100:1 --measured PLACE",
    },
    "plan diff": {
        "a": "plan diff PLACE run.toml --cluster h100:1",
        "b": "plan diff run.toml PLACE --cluster h100:1",
        "--hardware": "plan diff run.toml run.toml --cluster h100:1 --hardware PLACE",
    },
    "plan serve": {
        "run": f"{SERVE} PLACE",
        "--model": f"{SERVE} --model PLACE",
        "--hardware": f"{SERVE} --model debug --hardware PLACE",
    },
    "plan rl": {"--model": f"{RL} --model PLACE", "--hardware": f"{RL} --model debug --hardware PLACE"},
    "plan evaluate-serving": {"runs": "plan evaluate-serving PLACE"},
    "plan evaluate-rl": {"steps": "plan evaluate-rl PLACE"},
    "plan calibrate": {
        "logs": f"plan calibrate PLACE {FROM}",
        "--from": "plan calibrate train.log --from PLACE --cluster h100:32",
        "--model": f"plan calibrate train.log {FROM} --model PLACE",
        "--hardware": f"plan calibrate train.log {FROM} --hardware PLACE",
    },
    "plan explain-log": {
        "logs": f"plan explain-log PLACE {FROM}",
        "--from": "plan explain-log train.log --from PLACE --cluster h100:32",
        "--model": f"plan explain-log train.log {FROM} --model PLACE",
        "--hardware": f"plan explain-log train.log {FROM} --hardware PLACE",
    },
    "explore": {
        "run": "explore PLACE --static made",
        "--hardware": "explore run.toml --cluster h100:1 --static made --hardware PLACE",
    },
    "train": {"run_file": "train PLACE"},
    "sweep": {"run": "sweep PLACE --grid steps=1,2 --out made --show"},
    "launch": {"run": "launch PLACE --on slurm --nodes 1 --per-node 1"},
    "verify": {
        "run_file": "verify PLACE",
        "--trainer": "verify --trainer PLACE.py --world 1",
        "--reference": "verify --trainer trainer.py --world 1 --reference PLACE.py",
        "--from": "verify --from PLACE --cluster h100:32",
        "--model": f"verify {FROM} --model PLACE",
        "--hardware": f"verify {FROM} --hardware PLACE",
    },
    "mup-check": {"run": "mup-check PLACE"},
    "dryrun": {
        "run_file": DRYRUN.replace("run.toml", "PLACE"),
        "--from": "dryrun --from PLACE --cluster h100:32",
        "--model": f"dryrun {FROM} --model PLACE",
        "--hardware": f"dryrun {FROM} --hardware PLACE",
    },
    "schedule": {"--read": "schedule --read PLACE"},
    "watch": {"run_dir": "watch PLACE --once"},
    "report": {"run_dirs": "report PLACE"},
    "generate": {
        "model": "generate PLACE --prompt a",
        "--prompts": "generate hf --prompts PLACE",
        "--draft": "generate hf --prompt a --draft PLACE",
    },
    "eval": {"model": "eval PLACE", "--data": "eval hf --data PLACE"},
    "score": {
        "model": "score PLACE texts.jsonl",
        "file": "score hf PLACE",
        "--replay-experts": "score hf texts.jsonl --replay-experts PLACE.safetensors",
    },
    "import": {"source": "import PLACE --out made", "--base": "import hf --base PLACE --out made"},
    "export": {"source": "export PLACE --out made", "--tokenizer": "export hf --out made --tokenizer PLACE"},
    "merge": {"sources": "merge PLACE hf --out made"},
    "convert": {
        "source": "convert PLACE made --to dcp",
        "--model": "convert dcp made --to hf --model PLACE",
        "--run": "convert hf made --to shardwright --run PLACE",
    },
}
"""The command for each option that names a place to read; PLACE stands for the place."""
WRITTEN = {
    "quickstart": {"--out": "quickstart --steps 1 --out PLACE"},
    "data prepare": {"--out": "data prepare text --vocab-size 300 --out PLACE"},
    "plan": {"--write": f"{PLAN} --write PLACE.toml", "--html": f"{PLAN} --html PLACE.html"},
    "plan diff": {"--html": "plan diff run.toml run.toml --cluster h100:1 --html PLACE.html"},
    "plan serve": {"--html": f"{SERVE} --model debug --html PLACE.html"},
    "plan rl": {"--html": f"{RL} --model debug --html PLACE.html"},
    "plan calibrate": {"--write": f"plan calibrate train.log {FROM} --write PLACE.toml"},
    "generate": {"--record-experts": "generate hf --prompt a --record-experts PLACE.safetensors"},
    "score": {"--record-experts": "score hf texts.jsonl --record-experts PLACE.safetensors"},
    "explore": {"--static": "explore run.toml --cluster h100:1 --static PLACE"},
    "measure": {
        "--out": "measure --ranks 1 --budget 0.01 --overwrite --out PLACE.toml",
        "--html": "measure --ranks 1 --budget 0.01 --out made.toml --html PLACE.html",
    },
    "sweep": {
        "--out": f"{SWEEP} --on slurm --per-node 1 --out PLACE",
        "--draw": f"{SWEEP} --out made --show --draw PLACE.svg",
        "--html": f"{SWEEP} --out made --show --html PLACE.html",
    },
    "launch": {"--write": "launch run.toml --on slurm --nodes 1 --per-node 1 --overwrite --write PLACE"},
    "verify": {"--html": "verify run.toml --steps 1 --html PLACE.html"},
    "mup-check": {
        "--draw": f"{MUP_CHECK} --draw PLACE.svg",
        "--html": f"{MUP_CHECK} --html PLACE.html",
    },
    "dryrun": {
        "--html": f"{DRYRUN} --html PLACE.html",
        "--trace": f"{DRYRUN} --trace PLACE.json",
        "--snapshot": f"{DRYRUN} --snapshot PLACE.pickle",
    },
    "schedule": {
        "--csv": f"{SCHEDULE} --csv PLACE.csv",
        "--draw": f"{SCHEDULE} --draw PLACE.svg",
        "--html": f"{SCHEDULE} --html PLACE.html",
    },
    "report": {
        "--out": "report run --out PLACE.html",
        "--picture": "report run --picture PLACE.png",
        "--timeline": "report run --timeline PLACE.svg",
        "--trace": "report run --trace PLACE.json",
    },
    "import": {"--out": "import hf --out PLACE"},
    "export": {"--out": "export hf --out PLACE"},
    "merge": {"--out": "merge hf hf --out PLACE"},
    "convert": {"out": "convert hf PLACE --to dcp"},
}
"""The command for each option that names a place to write."""
EXTENSION = "schedule --extension PLACE.py"
"""One for all verbs, because `verb` of shardwright.cli.common adds the option."""
WORDS = {
    "--accelerator", "--activate", "--against", "--architecture", "--batch-stages", "--claim", "--clock",
    "--cluster", "--compare", "--count-as", "--device", "--device-memory", "--dtype", "--engine", "--explain",
    "--fix", "--generation-precision", "--glob", "--grid",
    "--host", "--host-memory", "--image", "--kv-precision", "--layout", "--link",
    "--lora", "--loss", "--max-shard-size", "--mount", "--name", "--network", "--on", "--operations",
    "--other-cluster", "--precision", "--prefer", "--price", "--prompt", "--ranks", "--rate", "--schedule",
    "--separator", "--sequences", "--set", "--set-b", "--shares", "--sort", "--split", "--stack", "--stop",
    "--text-key", "--time", "--times", "--to", "--tpot", "--ttft", "--widths", "target",
}  # fmt: skip
"""Options whose value is a word and names no place of this machine, except the options above."""


def options(command: Any, name: str) -> Iterator[tuple[str, str]]:
    """Yield the verb and the name of each option that takes a text or a path."""
    for below in getattr(command, "commands", {}):
        yield from options(command.commands[below], f"{name} {below}")
    for each in command.params if not getattr(command, "commands", None) else ():
        if any(kind in str(each.type_descriptor.annotation) for kind in ("Path", "str")):
            yield name, each.opts[0]


def test_every_option_that_can_name_a_place_takes_part():
    places = {(verb, option) for table in (READ, WRITTEN) for verb, each in table.items() for option in each}
    there = {pair for verb in (*VERBS, *OF_TWO_WORDS) for pair in options(_command(verb), verb)}
    assert places <= there
    assert {option for _, option in there - places} - {"--extension"} <= WORDS


def pipe(path: Path) -> None:
    os.mkfifo(path)


def bound_socket(path: Path) -> None:
    here = os.open(".", os.O_RDONLY)
    os.chdir(path.parent)  # the name of a socket is at most 107 bytes long
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(path.name)
    os.chdir(here)
    os.close(here)


def endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


def loop(path: Path) -> None:
    path.symlink_to(path.name)


def link_out(path: Path) -> None:
    (path.parent.parent / "mine").write_text("mine")
    path.symlink_to("../mine")


def terabyte(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(2**40)


def commands(table: dict[str, dict[str, str]], kinds: tuple[Callable[[Path], None], ...]) -> list[Any]:
    """Return each command with the first kind of place, which `make test` runs, and with two others for `make prove`.
    These rotate over the commands, so that every kind is covered."""
    first, *others = kinds
    every = [(verb, option, table[verb][option]) for verb in table for option in table[verb]]
    return [
        pytest.param(command, kind, id=f"{verb} {option} {kind.__name__}", marks=[prove] * (kind is not first))
        for at, (verb, option, command) in enumerate(every)
        for kind in (first, *(others[(at + turn) % len(others)] for turn in (0, 1)))
    ]


@contextmanager
def ends() -> Iterator[None]:
    """Raises AssertionError if the block waits without end."""

    def end(number: int, frame: FrameType | None) -> None:
        raise AssertionError(f"still waiting after {HANGS_S} s")

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(HANGS_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def kind_of(path: Path) -> tuple[int, str | None]:
    mode = os.lstat(path).st_mode
    return stat.S_IFMT(mode), os.readlink(path) if stat.S_ISLNK(mode) else None


def write_model(folder: Path) -> None:
    """Make the folder's config.json whole, and write weights for it."""
    config = json.loads((folder / "config.json").read_text()) | {"max_position_embeddings": 64, "rms_norm_eps": 1e-6}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").unlink()
    spec = spec_of_folder(folder)
    tensors = file_tensors(architecture_of(spec), spec)
    save_file({each.name: torch.ones(each.shape) for each in tensors}, folder / "model.safetensors")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "files"
    folder.mkdir()
    write_files(folder)
    write_model(folder / "hf")
    (folder / "hf/tokenizer.json").write_bytes(train_bpe(["a b c " * 50], 300).json_bytes)
    (folder / "trainer.py").write_text("class Trainer: ...\n")
    (folder / "texts.jsonl").write_text('{"text": "a b"}\n')
    monkeypatch.chdir(folder)
    return folder


def refused(folder: Path, command: str, make: Callable[[Path], None]) -> None:
    """Make a place, run the command; it ends with one sentence about the place, which is as it was."""
    (word,) = [each for each in command.split() if each.startswith("PLACE")]
    (folder / "odd").mkdir()
    place = folder / "odd" / word.replace("PLACE", "place")
    make(place)
    before = kind_of(place)
    with ends():
        result = CliRunner().invoke(app, command.replace("PLACE", str(folder / "odd/place")).split())
    assert (result.exit_code, "Traceback" in result.output) == (2, False), (result.output, result.exception)
    assert str(place) in " ".join(result.output.split())
    assert kind_of(place) == before
    mine = folder / "mine"
    assert not mine.exists() or mine.read_text() == "mine"


@pytest.mark.parametrize(("command", "make"), commands(READ, (pipe, endless, loop, bound_socket, terabyte)))
def test_a_place_to_read_that_is_no_file_is_refused(folder, command, make):
    refused(folder, command, make)


@pytest.mark.parametrize(("command", "make"), commands(WRITTEN, (bound_socket, link_out, loop, pipe)))
def test_a_place_to_write_that_is_no_file_is_refused_and_stays_what_it_is(folder, command, make):
    refused(folder, command, make)


@pytest.mark.parametrize(
    "command", rest_prove([each for verb in WRITTEN.values() for each in verb.values()], "export hf --out PLACE")
)
def test_a_url_to_write_to_is_refused_and_makes_no_folder_of_its_name(folder, command):
    with ends():
        result = CliRunner().invoke(app, command.replace("PLACE", "s3://bucket/place").split())
    assert (result.exit_code, "Traceback" in result.output) == (2, False), (result.output, result.exception)
    assert "s3:/bucket/place" in " ".join(result.output.split())
    assert not (folder / "s3:").exists()


@pytest.mark.parametrize("make", [pipe, endless, terabyte])
def test_an_extension_that_is_no_file_is_refused(folder, make):
    refused(folder, EXTENSION, make)
