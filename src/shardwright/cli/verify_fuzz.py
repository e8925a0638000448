"""`shardwright verify --fuzz N`: random settings are verified, and those that fail are written as small run files."""

import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from shardwright.cli.common import console, error_console, print_json, say
from shardwright.cli.verify_text import MatrixLines, collect
from shardwright.errors import InputError, WorkerError

if TYPE_CHECKING:
    from shardwright.cli.verify import Options
    from shardwright.verification import Report, Verifier
    from shardwright.verification.fuzz import Drawn

MOST_SHRUNK = 3
"""So many of the settings that fail are made smaller, the first; the others are written as they were drawn."""
_OF_A_RUN_FILE = {
    "run_file": "draws its own models and layouts",
    "overrides": "changes a run file, and there is none",
    "overrides_b": "changes a run file, and there is none",
    "matrix": "takes the layouts of a run file's model",
    "full": "takes the true sizes of a run file; models are drawn at test size",
    "lr_schedule": "takes the rates of a run file, and there is none",
    "html": "shows the layouts of a run file",
}
_FLAGS = {"overrides": "--set", "overrides_b": "--set-b"}


@dataclass(frozen=True)
class Failed:
    """A setting that failed: its number, the report of the smallest that fails alike, its file, and whether it was
    made smaller."""

    number: int
    report: "Report"
    file: Path
    shrunk: bool


def wrong_options(options: "Options") -> list[str]:
    """What is wrong with the options beside --fuzz, or with those that need it."""
    n = options.fuzz
    if n is None:
        return [] if options.seed is None else [f"--seed {options.seed} goes with --fuzz N; add that, or leave it out"]
    wrong = [f"--fuzz {n}: a number of 1 or more is needed"] if n < 1 else []
    if options.seed is not None and options.seed < 0:
        wrong.append(f"--seed {options.seed}: a number of 0 or more is needed")
    for each in fields(options):
        if each.name in _OF_A_RUN_FILE and getattr(options, each.name) != each.default:
            flag = _FLAGS.get(each.name, f"--{each.name.replace('_', '-')}")
            given = str(options.run_file) if each.name == "run_file" else flag
            why = _OF_A_RUN_FILE[each.name]
            wrong.append(
                f"{given}: --fuzz {why}; leave one of the two out"
                if each.name == "run_file"
                else f"{given} with --fuzz: {flag} {why}; leave one of the two out"
            )
    if not os.access(".", os.W_OK):
        wrong.append(f"--fuzz writes what fails to {Path.cwd()}, which cannot be written; start it in another folder")
    return wrong


def fuzz(verifier: "Verifier", options: "Options") -> None:
    """Draw the settings, verify each, make the first that fail smaller and write all that fail."""
    from shardwright.verification.fuzz import draw, in_words

    assert options.fuzz is not None
    seed = options.seed or 0
    settings = [_as_asked(draw(seed, number), options) for number in range(options.fuzz)]
    names = [str(number) for number in range(options.fuzz)]
    remarks = [f"{each.layout}; {in_words(each.case)}" for each in settings]
    lines = None if options.json else MatrixLines(names, "setting", remarks)
    reports = collect(verifier, [(each.case, each.layout) for each in settings], lines)
    failed: list[Failed] = []
    for number in (number for number, report in enumerate(reports) if not report.equal):
        found = _smallest(verifier, number, reports[number], len(failed) < MOST_SHRUNK)
        failed.append(_written(seed, number, found, options, len(failed) < MOST_SHRUNK))
    if options.json:
        _print_document(settings, reports, failed, options)
    else:
        console.print()
        _print_verdict(settings, reports, failed, options)
    if any(report.crash for report in reports):
        raise typer.Exit(WorkerError.exit_code)
    if failed:
        raise typer.Exit(1)


def _as_asked(drawn: "Drawn", options: "Options") -> "Drawn":
    case = replace(
        drawn.case,
        steps=options.steps,
        dtype=options.dtype,
        evaluate=options.evaluate,
        compiled=options.compile,
    )
    return drawn._replace(case=case)


def _smallest(verifier: "Verifier", number: int, report: "Report", shrunk: bool) -> "Report":
    if not shrunk:
        return report
    from shardwright.verification.shrink import shrink

    with error_console.status(f"making setting {number} smaller") as status:
        return shrink(verifier, report, lambda line: status.update(f"making setting {number} smaller, {line}"))


def _written(seed: int, number: int, report: "Report", options: "Options", shrunk: bool) -> Failed:
    """A setting as a new file in the working folder: the first name that no file has."""
    from shardwright.verification.fuzz import run_file

    at = 1
    while True:
        path = Path(f"verify-fuzz-{seed}-{number}{f'-{at}' if at > 1 else ''}.toml")
        size = ", made smaller" if shrunk else ""
        remark = f"Setting {number} of `verify --fuzz` with seed {seed}{size}: {_command(path, options)}"
        try:
            with path.open("x", encoding="utf-8") as file:
                file.write(run_file(report.case, report.layout, remark))
            return Failed(number, report, path, shrunk)
        except FileExistsError:
            at += 1
        except OSError as error:
            raise InputError(f"{path} cannot be written: {error.strerror}; start it in another folder") from None


def _command(path: Path, options: "Options") -> str:
    """What verifies a written file as it was verified here."""
    words = ["shardwright", "verify", str(path), "--full"]
    usual: Any = type(options)
    for name in ("dtype", "steps"):
        if (value := getattr(options, name)) != getattr(usual, name):
            words += [f"--{name}", str(value)]
    if options.timeout_s != usual.timeout_s:
        words += ["--timeout", f"{options.timeout_s:g}"]
    words += [] if options.evaluate else ["--no-evaluate"]
    words += ["--compile"] if options.compile else []
    return shlex.join(words)


def _print_verdict(
    settings: "Sequence[Drawn]", reports: "Sequence[Report]", failed: Sequence[Failed], options: "Options"
) -> None:
    from shardwright.verification.fuzz import in_words

    refused = sum(each.refused for each in settings)
    say(f"{refused} that were drawn broke a rule of the model, the layout or the batch, and were drawn again")
    if not failed:
        console.print(f"[bold green]equal:[/] all {len(reports)} settings of seed {options.seed or 0}")
        return
    for crashed, words in ((False, "not equal"), (True, "failed")):
        if n := sum(not report.equal and bool(report.crash) == crashed for report in reports):
            console.print(f"[bold red]{words}:[/] {n} of {len(reports)} settings of seed {options.seed or 0}")
    for each in failed:
        console.print()
        size = "the smallest found that still fails" if each.shrunk else "as it was drawn"
        say(f"setting {each.number}, {size}: {each.report.layout}; {in_words(each.report.case)}")
        say(f"  {str(each.report).splitlines()[0]}")
        say(f"  {_command(each.file, options)}")


def _print_document(
    settings: "Sequence[Drawn]", reports: "Sequence[Report]", failed: Sequence[Failed], options: "Options"
) -> None:
    from shardwright.verification.fuzz import in_words

    files = {each.number: each for each in failed}
    documents = []
    for number, (drawn, report) in enumerate(zip(settings, reports, strict=True)):
        found = files.get(number)
        written = {
            "file": str(found.file) if found else "",
            "command": _command(found.file, options) if found else "",
            "smallest": str(found.report.layout) if found and found.shrunk else "",
        }
        documents.append({"number": number, "model": in_words(drawn.case)} | report.document() | written)
    print_json(
        {
            "equal": not failed,
            "seed": options.seed or 0,
            "refused": sum(each.refused for each in settings),
            "settings": documents,
        }
    )
