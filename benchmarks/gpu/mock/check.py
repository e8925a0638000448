"""Run the whole CUDA path on devices that are not there, and hold all calls of NCCL against its rules.

    VENV/bin/python benchmarks/gpu/mock/check.py MOCK [--only PATTERN ...] [--keep FOLDER] [--list]

MOCK is the folder that build.py has filled. One line a configuration is printed as it ends; `--only 'fp8*' layout\\ tp`
runs some of them, so a check goes on where it was stopped with the names that are left. Exit code 1 if one is red.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
sys.path[:0] = [str(Path(__file__).parent), str(ROOT / "benchmarks/gpu"), str(ROOT / "src")]

from cases import CASES, Case  # noqa: E402
from nccl_log import read_log  # noqa: E402
from run_file import toml  # noqa: E402
from setting import start_on_mock  # noqa: E402

import shardwright.cli.main  # noqa: E402
import shardwright.cli.train  # noqa: E402
import shardwright.training.run  # noqa: E402

STEPS = 4
SEQ_LEN = 128
TIMEOUT_S = 900.0
AFTER_FAILURE_S = 5.0
"""Until ranks are ended that wait for one that failed."""
SHOWN_LINES = 12
"""Of the output of a command that failed."""


def run_file(case: Case, out: Path, tokens: Path) -> str:
    """The run file of a case, TOML."""
    settings: dict[str, Any] = {
        "out": str(out),
        "steps": STEPS,
        "device": "cuda",
        "extensions": [str(Path(__file__).parent / "rank.py")],
        "model.preset": "debug",
        "batch.seq_len": SEQ_LEN,
        "batch.global_batch": 16,
        "batch.micro_batch": 2,
        "metrics.every": 1,
        "evaluation.samples": 4,
        **case.settings,
    }
    settings["data.path"] = str(tokens.with_name(settings.get("data.path", tokens.name)))
    return toml(settings)


class Problem(Exception):
    """Why a case is red."""


def run(command: list[str], folder: Path, **more: str) -> None:
    """Run `shardwright COMMAND`; raises Problem with the end of its output if it fails."""
    process = subprocess.Popen(
        [sys.executable, "-m", "shardwright", *command],
        env={**os.environ, **more},
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise Problem(f"shardwright {command[0]} did not end within {TIMEOUT_S:g} s") from None
    if process.returncode:
        raise Problem(f"shardwright {command[0]}: exit code {process.returncode}\n" + last_lines(output))


def run_ranks(command: list[str], folder: Path, n_ranks: int, **more: str) -> None:
    """Run `shardwright COMMAND` as torchrun would, each rank a fork of this process, which has imported everything."""
    port = str(29500 + os.getpid() % 2000)
    ranks = {}
    for rank in range(n_ranks):
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(n_ranks)}
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        ranks[fork(command, folder, folder / f"rank-{rank}.txt", place | meeting | more)] = rank
    until_s, failed = time.monotonic() + TIMEOUT_S, ""
    while ranks:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid in ranks:
            rank, code = ranks.pop(pid), os.waitstatus_to_exitcode(status)
            if code and not failed:
                failed = f"rank {rank}: exit code {code}\n{last_lines((folder / f'rank-{rank}.txt').read_text())}"
                until_s = min(until_s, time.monotonic() + AFTER_FAILURE_S)
        elif time.monotonic() > until_s:
            for late in ranks:
                os.kill(late, signal.SIGKILL)
            failed = failed or f"ranks did not end within {TIMEOUT_S:g} s"
            until_s += TIMEOUT_S
        else:
            time.sleep(0.05)
    if failed:
        raise Problem(f"shardwright {command[0]}, {failed}")


def fork(command: list[str], folder: Path, output: Path, more: dict[str, str]) -> int:
    """Start `shardwright COMMAND` in a fork that writes to a file; its number."""
    sys.stdout.flush()
    if pid := os.fork():
        return pid
    code: object = 70
    try:
        os.environ.update(more)
        os.chdir(folder)
        for descriptor in (1, 2):
            os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
        shardwright.cli.main.app(command)
        code = 0
    except SystemExit as ended:
        code = ended.code or 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 70)


def last_lines(output: str) -> str:
    """The end of an output, indented."""
    return "\n".join(f"    {line[:220]}" for line in output.splitlines()[-SHOWN_LINES:])


def check(case: Case, folder: Path, tokens: Path) -> str:
    """Run a case in a folder; what its NCCL calls are, in words. Raises Problem if it is red."""
    log = folder / "nccl"
    log.mkdir(parents=True)
    (folder / "run.toml").write_text(run_file(case, folder / "run", tokens))
    devices = {"MOCK_DEVICES": str(case.devices)} | ({"MOCK_MAY_WAIT": "1"} if case.may_wait else {})
    train = ["train", "run.toml"]
    if case.launched:
        run(train, folder, MOCK_NCCL_LOG=str(log), **devices)
    else:
        run_ranks(train, folder, case.devices, MOCK_NCCL_LOG=str(log), **devices)
    metrics = (folder / "run/metrics.jsonl").read_text()
    if metrics.count('"loss"') < STEPS:
        raise Problem(f"the run has {metrics.count(chr(10))} lines of metrics for {STEPS} steps")
    logs = [log]
    for number, command in enumerate(case.then):
        logs.append(folder / f"nccl-{number}")
        logs[-1].mkdir()
        places = [each.replace("RUN", str(folder / "run")).replace("TOKENS", str(tokens)) for each in command]
        run(places, folder, MOCK_NCCL_LOG=str(logs[-1]), **devices)
    return "; ".join(filter(None, map(check_log, logs)))


def check_log(folder: Path) -> str:
    """The calls of NCCL in words; raises Problem where they break a rule."""
    log = read_log(folder)
    problems = [broken.sentence for broken in log.broken_rules()]
    if problems:
        raise Problem("calls of NCCL\n" + "\n".join(f"    {line}" for line in problems[:SHOWN_LINES]))
    if not log.n_calls:
        return ""
    return f"{log.n_calls} NCCL calls, {log.n_communicators} communicators, on {log.most_streams} streams each at most"


def prepare_tokens(folder: Path) -> Path:
    """The folders of data that `cases.py` names, made from Python files of the standard library; the first of them."""
    text = folder / "text"
    text.mkdir()
    for name in ("argparse", "ast", "calendar", "cgitb", "codecs", "copy", "csv", "datetime", "decimal", "dis"):
        source = Path(os.__file__).with_name(f"{name}.py")
        if source.exists():
            shutil.copy(source, text)
    run(["data", "prepare", "text", "--out", "tokens", "--vocab-size", "500", "--validation", "0.1"], folder)
    known = ["--tokenizer", "tokens/tokenizer.json", "--validation", "0.1"]
    answers = [{"prompt": "import ", "chosen": f"module_{n}", "rejected": f"thing {n}"} for n in range(400)]
    (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, answers)))
    run(["data", "prepare", "pairs.jsonl", "--out", "pairs", "--format", "preference", *known], folder)
    run(["data", "prepare", "text", "--out", "shards", "--publish", "--shard-tokens", "20000", *known], folder)
    return folder / "tokens"


def chosen(patterns: list[str] | None) -> Iterator[Case]:
    """The cases whose name matches a pattern, in their order; without patterns all."""
    for case in CASES:
        if not patterns or any(fnmatch(case.name, pattern) for pattern in patterns):
            yield case


def main() -> None:
    """Run the cases one after another and print a summary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mock", type=Path)
    parser.add_argument("--only", nargs="+", metavar="PATTERN", help="names of configurations; * matches any text")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="leave runs, outputs and logs of NCCL there")
    parser.add_argument("--list", action="store_true", help="print the names and end")
    options = parser.parse_args()
    start_on_mock(options.mock)
    cases = [*chosen(options.only)]
    if options.list or not cases:
        print("\n".join(case.name for case in (cases or CASES)))
        sys.exit(0 if options.list else f"no configuration is named {' or '.join(options.only)}")
    red = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = (options.keep or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(dir=folder))
        tokens = prepare_tokens(work)
        for case in cases:
            began_s, where = time.monotonic(), work / "runs" / case.name.replace(" ", "-")
            try:
                told = check(case, where, tokens)
            except Problem as problem:
                red.append(case.name)
                told = str(problem)
            mark = "RED" if case.name in red[-1:] else "ok "
            print(f"{mark} {case.name:36} {case.devices} {time.monotonic() - began_s:5.0f} s  {told}", flush=True)
            if options.keep is None:
                shutil.rmtree(where)
    print(f"{len(cases) - len(red)} of {len(cases)} configurations are green" + "".join(f"\n  red: {n}" for n in red))
    sys.exit(1 if red else 0)


if __name__ == "__main__":
    main()
