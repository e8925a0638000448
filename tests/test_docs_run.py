"""Proves that every command of the documentation runs as typed: each page in a copy of the checkout, top to bottom.

What a reader has before is made here: texts, a tokenizer, prepared data and a short quickstart. Left out are commands
that need another machine, a cluster or the network, benchmarks of most of an hour, and those that `make` and CI run
themselves (`ELSEWHERE`).
"""

import gzip
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from shardwright.data import prepare as module
from tests.arcee_model import arcee_model
from tests.test_docs import PAGES, ROOT, blocks, name_of

ELSEWHERE = re.compile(
    r"\b(make|sbatch|squeue|scontrol|srun|node\d|hf:|pytest|overhead\.py|plan_local\.py|gpu\.py|pip install|nccl-tests"
    r"|shardwright explore(?! --static)|mpirun|aws|nvidia-smi|all_reduce_perf|git clone|source|shardwright\.lm_eval"
    r"|torch\.cuda\._memory_viz)\b"
    r"|#SBATCH|--install-completion|--trainer torchtitan"
)
TIMEOUT_S = 900


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the checkout with what a reader has made before."""
    folder = tmp_path_factory.mktemp("docs") / "shardwright"
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, tracked.split("\0")):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, folder / name)
    (folder / ".venv").symlink_to(sys.prefix)
    home = folder.parent / "home" / "books"
    source = Path(module.__file__).read_text()
    for where in (home, folder / "my-text"):
        where.mkdir(parents=True)
        for number in range(4):
            (where / f"{number}.txt").write_text(source[number * 2000 :])
    with gzip.open(folder / "corpus.jsonl.gz", "wt") as file:
        file.writelines(json.dumps({"text": source[start : start + 3000]}) + "\n" for start in range(0, 9000, 500))
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"content": [source, source[500:], source[1000:]]}), folder / "rows.parquet")
    for command in (
        "shardwright data prepare src --glob '*.py' --out data/python --vocab-size 512 --validation 0.1",
        "shardwright quickstart --steps 10",
    ):
        run(command, folder)
    (folder / "llama").mkdir()
    tokenizer = Tokenizer.from_file(str(folder / "data/python/tokenizer.json"))
    tokenizer.save(str(folder / "llama/tokenizer.json"))
    tokenizer.add_special_tokens(["</doc>"])
    tokenizer.save(str(folder / "mine.json"))
    for path in (ROOT / "tests" / "extend").glob("[!_t]*.*"):
        shutil.copyfile(path, folder / path.name)
    arcee_model().save_pretrained(folder / "afm")
    return folder


def run(command: str, folder: Path, shown: str = "", columns: int = 80, code: int = 0) -> str:
    """What a command prints that bash runs in `folder`; an assertion fails if it does not end with `code`.

    Exit code 1 of `plan` is an answer: nothing fits, or what is explained does not; so is that of `verify` with a bug.
    A page may show an error: `shown`.
    """
    environment = {
        **os.environ,
        "HOME": str(folder.parent / "home"),
        "PATH": f"{sys.prefix}/bin:{os.environ['PATH']}",
        "PYTHONPATH": str(folder / "src"),
        "OMP_NUM_THREADS": "1",
        "COLUMNS": str(columns),
    }
    done = subprocess.run(
        ["bash", "-e", "-o", "pipefail", "-c", command],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S,
    )  # fmt: skip
    answered = done.returncode == 1 and ("shardwright plan" in command or "verify_with_bug" in command)
    assert done.returncode == code or answered or "error:" in shown, f"$ {command}\n{done.stdout}{done.stderr}"
    return done.stdout + done.stderr


def commands(text: str) -> list[str]:
    """Of each `sh` block its commands, one a line but for loops, conditions, lines that go on and what runs in the
    background."""
    found = []
    for block in blocks(text, "sh"):
        whole = block.startswith(("#!", "if ")) or "for " in block or "<<" in block
        if whole or re.search(r"&$", block, re.MULTILINE):
            found.append(block + "\nwait" if "&" in block else block)
        else:
            found += block.replace("\\\n", " ").splitlines()
    return [command for command in found if command.strip() and not ELSEWHERE.search(command)]


@pytest.mark.commands
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("page", [page for page in PAGES if commands(page.read_text())], ids=name_of)
def test_every_command_of_a_page_runs_as_typed(page: Path, checkout: Path, tmp_path: Path):
    folder = tmp_path / "shardwright"
    shutil.copytree(checkout, folder, symlinks=True)
    shutil.copytree(checkout.parent / "home", tmp_path / "home")
    typed = commands(page.read_text())
    if any("--out data/python" in command for command in typed):
        shutil.rmtree(folder / "data/python")  # this reader makes it
    for name, program in SAVED.findall(page.read_text()):
        (folder / name).write_text(program)
    shown = {_one_line(command) for command, _ in SHOWN.findall(page.read_text())}
    refused = dict(REFUSED.findall(page.read_text()))
    codes = {_one_line(command): int(code) for command, code in EXITS_WITH.findall(page.read_text())}
    for command in typed:
        if _one_line(command) not in shown:
            printed = run(command, folder, refused.get(command, ""), code=codes.get(_one_line(command), 0))
            assert _words(refused.get(command, "")) in _words(printed)


SAVED = re.compile(r"Save this as `([^`]+)`.*?^```python\n(.*?)^```$", re.M | re.S)
REFUSED = re.compile(r"^```sh\n([^\n]+)\n```\n\s*```text\n(error:.*?)^```$", re.M | re.S)
"""A command that is refused, and the errors that the page shows below it."""
EXITS_WITH = re.compile(r"^```sh\n((?:[^\n]|(?<=\\)\n)*)\n```\n\nIt exits with (\d)\b", re.M)
"""A command and the exit code that the page states below it."""


SHOWN = re.compile(
    r"^```sh\n(shardwright (?:plan|schedule) (?:[^\n]|(?<=\\)\n)*)\n```\n\s*```text\n(.*?)^```$", re.M | re.S
)
"""A command whose output depends on nothing but the version, and the output that the page shows below it; it is run by
a test of its own."""


@pytest.mark.commands
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("page", [page for page in PAGES if SHOWN.search(page.read_text())], ids=name_of)
def test_what_a_page_shows_of_an_output_is_printed(page: Path, checkout: Path):
    for command, shown in SHOWN.findall(page.read_text()):
        missing = shown.splitlines()
        for columns in (80, 110):  # widths that pages are written with
            if missing:
                words = _words(run(command.replace("\\\n", " "), checkout, shown, columns))
                missing = [line for line in missing if line.strip() != "..." and _words(line) not in words]
        assert not missing, "\n".join([f"$ {command}", "does not print", *missing])


def _one_line(command: str) -> str:
    """Without what breaks it into lines."""
    return " ".join(command.replace("\\\n", " ").split())


def _words(text: str) -> str:
    """Without what depends on the machine, and how it is broken into lines."""
    return " ".join(re.sub(r"searched in [^\n]*", "searched", text).split())
