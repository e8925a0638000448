"""Fills the outputs of `shardwright plan` in the pages below, after a change of the planner or of its constants.

    python docs/make_plan.py [PAGE.md ...]

After a block of `sh` whose last line is a `shardwright plan` comes a block of `text` with what it prints. Where that
block ends with a line of dots, and has no other, it holds the output before the list of others; where it only begins
with one, the last paragraph. With dots in between it is an excerpt, whose lines are found again, in this order, by what
they are about; one that is not there any more is an error, and has to be chosen anew by hand, as do the sentences
beside it.

Between `<!-- families -->` and `<!-- end of families -->` comes the table of errors by family, of all packaged tables.
"""

import argparse
import re
import shlex
from contextlib import chdir
from pathlib import Path
from tempfile import TemporaryDirectory

from typer.testing import CliRunner

from shardwright.cli.main import app
from shardwright.planner.evaluate import MEASURED_RUNS, UNSEEN_RUNS, WHOLE_RUNS, PlanErrorSummary, evaluate

HERE = Path(__file__).parent
PAGES = ("plan.md", "plan-rl.md", "serving.md", "choosing.md", "cluster.md", "profiling.md", "troubleshooting.md")
_SHOWN = re.compile(
    r"```sh\n((?:(?!```)[^\n]*\n)*?)(shardwright plan (?!evaluate)(?:(?!```).)*?)\n```\n\n```text\n(.*?)```\n",
    re.DOTALL,
)
_FAMILIES = re.compile(r"(?<=<!-- families -->\n).*?(?=<!-- end of families -->)", re.DOTALL)
_CUT = "..."
_OTHERS = "Of the fastest "
_LAYOUT = re.compile(r"[a-z_]+=\S+")


def page(path: Path) -> str:
    """A page with fresh outputs."""
    text = _FAMILIES.sub(lambda _: _families(), path.read_text(encoding="utf-8"))
    return _SHOWN.sub(lambda block: _fresh(path, block), text)


def _families() -> str:
    """The errors of each family of the packaged tables, and whether constants were fitted to it."""
    lines = ["| family | quantity | rows | error | bias | left out | inside | fitted |", "| --- " * 8 + "|"]
    for table, fitted in ((MEASURED_RUNS, "yes"), (UNSEEN_RUNS, "no"), (WHOLE_RUNS, "no")):
        lines += [_family(each, fitted) for each in evaluate(table).families if each.group != "all"]
    return "\n".join(lines) + "\n"


def _family(found: PlanErrorSummary, fitted: str) -> str:
    left_out = "" if found.left_out is None else f"{found.left_out:.1%}"
    inside = "" if found.inside is None else f"{found.inside:.0%}"
    fitted = fitted if found.quantity == "step time" else "no"
    cells = (found.group, found.quantity, found.n, f"{found.mean_absolute:.1%}", f"{found.bias:+.1%}", left_out, inside)
    return "| " + " | ".join(map(str, (*cells, fitted))) + " |"


def _fresh(path: Path, block: re.Match[str]) -> str:
    before, command, shown = block.groups()
    arguments = shlex.split(command.replace("\\\n", " "))[1:]
    files = re.findall(r"cat > (\S+) <<'END'\n(.*?)END\n", before, re.DOTALL)
    with TemporaryDirectory() as folder, chdir(folder if files else "."):
        for name, text in files:
            Path(name).write_text(text, encoding="utf-8")
        printed = CliRunner().invoke(app, arguments, env={"COLUMNS": "110"}).output.rstrip()
    lines = [re.sub(r"searched in .*", "searched in seconds", line.rstrip()) for line in printed.splitlines()]
    old = shown.splitlines()
    cuts = [number for number, line in enumerate(old) if line == _CUT]
    if cuts == [0]:
        lines = [_CUT, *lines[max(number for number, line in enumerate(lines) if not line) + 1 :]]
    elif cuts == [len(old) - 1]:
        end = next((n for n, line in enumerate(lines) if line.startswith(_OTHERS)), None)
        if end is None:
            raise SystemExit(f"{path.name}, {command}: no list of others, which starts with: {_OTHERS}")
        lines = [*lines[:end], _CUT]
    elif cuts:
        lines = _excerpt(f"{path.name}, {command}", old, lines)
    return f"```sh\n{before}{command}\n```\n\n```text\n" + "\n".join(lines) + "\n```\n"


def _excerpt(where: str, shown: list[str], fresh: list[str]) -> list[str]:
    """The lines of `fresh` about what those of `shown` are, in the same order, and the lines of dots between them."""
    found: list[str] = []
    at = -1
    for line in shown:
        if line in ("", _CUT):
            found.append(line)
            continue
        if line.startswith("  "):  # what an alternative differs in, and why
            at += 1
        else:
            about = _about(line)
            at = next((n for n in range(at + 1, len(fresh)) if _about(fresh[n]) & about), -1)
            if at < 0:
                raise SystemExit(f"{where}: no line any more like: {line}")
        found.append(fresh[at])
    return found


def _about(line: str) -> set[str]:
    """What a line is about: the kinds of an alternative, such as `full recomputation`, the title of a row, a layout, or
    its first words."""
    if _LAYOUT.fullmatch(line):
        return {"a layout"}
    alternative = re.match(r"(.*?): (?:[+-][\d.]+%|does not fit)", line)
    if alternative:
        return set(alternative[1].split("; "))
    title = re.match(r"(\S.*?)  ", line)
    return {title[1] if title else re.sub(r"[\d.,]+", "", " ".join(line.split()[:2])).rstrip("%:")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="*", default=PAGES, metavar="PAGE.md")
    for name in parser.parse_args().pages:
        (HERE / name).write_text(page(HERE / name), encoding="utf-8")


if __name__ == "__main__":
    main()
