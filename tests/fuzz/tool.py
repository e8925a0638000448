"""Verify random settings, and write those that fail as small run files.

    python -m tests.fuzz 20 --seed 7

Run it in the root of the repository. A setting is a model, a batch and an optimizer at test size, and a layout of 2 to
8 ranks. The settings that fail are shrunk and written to the working folder as fuzz-SEED-NUMBER.toml.

Exit codes: 0 all settings are equal, 1 some are not, 2 the input cannot be used, 3 ranks crashed or hung.
"""

import os
import shlex
import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from shardwright.cli import verify
from shardwright.cli.common import AsJson, console, error_console, print_json, print_text, reading_verb
from shardwright.cli.verify import collect
from shardwright.system.errors import InputError, WorkerError
from shardwright.system.signals import on_signals
from shardwright.verification import Report, Verifier
from shardwright.verification.verifier import TIMEOUT_S
from shardwright.verification.view import matrix_table
from shardwright.view.terminal import TableStream
from tests.fuzz.settings import DrawnSetting, draw, in_words, run_file
from tests.fuzz.shrink import shrink

MOST_SHRUNK = 3
"""How many of the settings that fail are shrunk, the first ones; the others are written as drawn."""


@dataclass(frozen=True)
class FuzzOptions:
    """Arguments and options of the tool. The defaults that `verify` has too are those of `verify`."""

    n: Annotated[int, typer.Argument(metavar="N", min=1, max=100_000, help="the number of settings")]
    seed: Annotated[int, typer.Option(metavar="S", min=0, help="a setting follows from this and its number")] = 0
    steps: Annotated[int, typer.Option(min=1, help="optimizer steps")] = verify.VerifyOptions.steps
    dtype: Annotated[str, typer.Option(help="as of verify; float64 tells a bug from rounding best")] = (
        verify.VerifyOptions.dtype
    )
    evaluate: Annotated[
        bool, typer.Option("--evaluate/--no-evaluate", help="compare the loss of an evaluation between two steps, too")
    ] = verify.VerifyOptions.evaluate
    compile: Annotated[bool, typer.Option("--compile", help="compile the blocks and the loss")] = (
        verify.VerifyOptions.compile
    )
    timeout_s: Annotated[
        float, typer.Option("--timeout", min=1, max=7 * verify.DAY_S, help="seconds a setting may take")
    ] = TIMEOUT_S
    json: AsJson = False


@dataclass(frozen=True)
class FailedSetting:
    """A setting that failed: its number, the report of the smallest setting that fails alike, its file, and whether it
    was shrunk."""

    number: int
    report: Report
    file: Path
    shrunk: bool


@reading_verb
def fuzz(options: FuzzOptions) -> None:
    """Draw the settings, verify each, shrink the first that fail and write all that fail."""
    if problems := verify.dtype_problems(options.dtype):
        raise InputError(*problems)
    if not os.access(".", os.W_OK):
        raise InputError(f"{Path.cwd()} cannot be written, and settings that fail are written there")
    with on_signals(signal.default_int_handler), Verifier(timeout_s=options.timeout_s) as verifier:
        settings = [_as_asked(draw(options.seed, number), options) for number in range(options.n)]
        names = [f"{number}  {each.layout}; {in_words(each.case)}" for number, each in enumerate(settings)]
        stream = None if options.json else TableStream(matrix_table("setting"), console)
        reports = collect(verifier, [(each.case, each.layout) for each in settings], names, stream)
        failed: list[FailedSetting] = []
        for number in (number for number, report in enumerate(reports) if not report.equal):
            shrunk = len(failed) < MOST_SHRUNK
            report = _smallest(verifier, number, reports[number]) if shrunk else reports[number]
            failed.append(FailedSetting(number, report, _write(number, report, options, shrunk), shrunk))
    if options.json:
        _print_document(settings, reports, failed, options)
    else:
        console.print()
        _print_verdict(settings, reports, failed, options)
    if any(report.crash for report in reports):
        raise typer.Exit(WorkerError.exit_code)
    if failed:
        raise typer.Exit(1)


def _as_asked(drawn: DrawnSetting, options: FuzzOptions) -> DrawnSetting:
    case = replace(
        drawn.case, steps=options.steps, dtype=options.dtype, evaluate=options.evaluate, compiled=options.compile
    )
    return drawn._replace(case=case)


def _smallest(verifier: Verifier, number: int, report: Report) -> Report:
    with error_console.status(f"shrinking setting {number}") as status:
        return shrink(verifier, report, lambda line: status.update(f"shrinking setting {number}, {line}"))


def _write(number: int, report: Report, options: FuzzOptions, shrunk: bool) -> Path:
    """Write a setting as a new file in the working folder, under the first name that no file has."""
    at = 1
    while True:
        path = Path(f"fuzz-{options.seed}-{number}{f'-{at}' if at > 1 else ''}.toml")
        size = ", shrunk" if shrunk else ""
        remark = f"Setting {number} of `python -m tests.fuzz` with seed {options.seed}{size}: {_command(path, options)}"
        try:
            with path.open("x", encoding="utf-8") as file:
                file.write(run_file(report.case, report.layout, remark))
            return path
        except FileExistsError:
            at += 1
        except OSError as error:
            raise InputError(f"{path} cannot be written: {error.strerror}") from None


def _command(path: Path, options: FuzzOptions) -> str:
    """Return the command that verifies a written file as it was verified here."""
    words = ["shardwright", "verify", str(path), "--full"]
    for name in ("dtype", "steps"):
        if (value := getattr(options, name)) != getattr(verify.VerifyOptions, name):
            words += [f"--{name}", str(value)]
    if options.timeout_s != FuzzOptions.timeout_s:
        words += ["--timeout", f"{options.timeout_s:g}"]
    words += [] if options.evaluate else ["--no-evaluate"]
    words += ["--compile"] if options.compile else []
    return shlex.join(words)


def _print_verdict(
    settings: Sequence[DrawnSetting], reports: Sequence[Report], failed: Sequence[FailedSetting], options: FuzzOptions
) -> None:
    refused = sum(each.refused for each in settings)
    print_text(f"{refused} that were drawn broke a rule of the model, the layout or the batch, and were drawn again")
    if not failed:
        console.print(f"[bold green]equal:[/] all {len(reports)} settings of seed {options.seed}")
        return
    for crashed, words in ((False, "not equal"), (True, "failed")):
        if n := sum(not report.equal and bool(report.crash) == crashed for report in reports):
            console.print(f"[bold red]{words}:[/] {n} of {len(reports)} settings of seed {options.seed}")
    for each in failed:
        console.print()
        size = "the smallest found that still fails" if each.shrunk else "as it was drawn"
        print_text(f"setting {each.number}, {size}: {each.report.layout}; {in_words(each.report.case)}")
        print_text(f"  {str(each.report).splitlines()[0]}")
        print_text(f"  {_command(each.file, options)}")


def _print_document(
    settings: Sequence[DrawnSetting], reports: Sequence[Report], failed: Sequence[FailedSetting], options: FuzzOptions
) -> None:
    written = {each.number: each for each in failed}
    documents = []
    for number, (drawn, report) in enumerate(zip(settings, reports, strict=True)):
        each = written.get(number)
        documents.append(
            {"number": number, "model": in_words(drawn.case)}
            | report.document()
            | {
                "file": str(each.file) if each else "",
                "command": _command(each.file, options) if each else "",
                "smallest": str(each.report.layout) if each and each.shrunk else "",
            }
        )
    refused = sum(each.refused for each in settings)
    print_json({"equal": not failed, "seed": options.seed, "refused": refused, "settings": documents})


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
app.command(help=__doc__)(fuzz)
