"""Fills the outputs in docs/plan.md and docs/serving.md, after a change of the planner or of its constants.

    python docs/make_plan.py

After a block of `sh` with one `shardwright plan` comes a block of `text` with what it prints. Where the block ends
with a line of dots, it holds the output before the list of others; where it begins with one, the last paragraph.
"""

import re
import shlex
from pathlib import Path

from typer.testing import CliRunner

from shardwright.cli.main import app

PAGES = tuple(Path(__file__).parent / name for name in ("plan.md", "serving.md"))
_SHOWN = re.compile(r"```sh\n(shardwright plan [^`]*)```\n\n```text\n(.*?)```\n", re.DOTALL)
_CUT = "...\n"


def page(path: Path) -> str:
    """A page with fresh outputs."""
    return _SHOWN.sub(_fresh, path.read_text(encoding="utf-8"))


def _fresh(block: re.Match[str]) -> str:
    arguments = shlex.split(block[1].replace("\\\n", " "))[1:]
    printed = CliRunner().invoke(app, arguments, env={"COLUMNS": "110"}).output
    lines = [line.rstrip() for line in printed.splitlines()]
    lines = [re.sub(r"searched in .*", "searched in seconds", line) for line in lines]
    text = "\n".join(lines) + "\n"
    if block[2].startswith(_CUT):
        text = _CUT + text.rpartition("\n\n")[2]
    elif block[2].endswith(_CUT):
        text = text.partition("\nThe best ")[0] + _CUT
    return f"```sh\n{block[1]}```\n\n```text\n{text}```\n"


if __name__ == "__main__":
    for each in PAGES:
        each.write_text(page(each), encoding="utf-8")
