"""shardwright mup-check: do activations change as much in wide models as in narrow ones?"""

from dataclasses import dataclass
from pathlib import Path

import typer

from shardwright.cli.common import AsJson, Overrides, argument, option, output_problems, progress, reading_verb, show
from shardwright.system.errors import InputError

MOST_WIDTH = 2**16


@dataclass(frozen=True)
class MupCheckOptions:
    """Arguments and options of `mup-check`."""

    run: Path = argument(..., "the run file; its data is not read", "RUN.toml")
    overrides: Overrides = None
    widths: str = option("64,128,256,512", "values of d_model; heads and d_ffn grow in proportion", "N,N,...")
    steps: int = option(4, "optimizer steps of each model", min=1, max=1000)
    seeds: int = option(2, "models of each width, whose changes are averaged", min=1, max=100)
    draw: Path | None = option(None, "write the picture", "FILE.svg")
    html: Path | None = option(None, "write a page with the table and picture", "FILE.html")
    json: AsJson = False


@reading_verb
def mup_check(options: MupCheckOptions) -> None:
    """Check a parametrisation: do activations change as much in wide models as in narrow ones?

    Models of the given widths, otherwise as the run file has them, take a few steps on the CPU with the run's optimizer
    and its peak learning rate. With muP ([mup] of the run file) the change of each activation does not depend on the
    width, and the best learning rate of a narrow model is the best of a wide one.

    shardwright mup-check run.toml --set mup.base_width=64 --draw changes.svg

    Exit codes: 0 flat, 1 not flat, 2 the input cannot be used.
    """
    from shardwright.config import load
    from shardwright.system.files import write_whole

    widths = _widths(options.widths)
    problems = output_problems("--draw", options.draw, ".svg")
    problems += output_problems("--html", options.html, ".html")
    if problems:
        raise InputError(*problems)
    config = load(options.run, options.overrides or ())
    from shardwright.verification.coordinates import check_coordinates
    from shardwright.verification.view import coordinates_document, coordinates_svg

    spec = config.spec()
    with progress("widths") as update:
        result = check_coordinates(spec, config.optimizer, widths, options.steps, options.seeds, update)
    if options.draw is not None:
        write_whole(options.draw, coordinates_svg(result).encode())
    others = () if options.draw is None else (options.draw,)
    show(coordinates_document(result, spec, config.optimizer.lr), options.json, options.html, *others)
    if not result.flat:
        raise typer.Exit(1)


def _widths(text: str) -> tuple[int, ...]:
    """Return the widths of an option in ascending order. Raises InputError."""
    parts = [part.strip() for part in text.split(",")]
    invalid = [part for part in parts if not (part.isdecimal() and len(part) < 9 and 0 < int(part) <= MOST_WIDTH)]
    if invalid:
        raise InputError(
            f"--widths {invalid[0][:40]}: whole numbers from 1 to {MOST_WIDTH:,} are needed, such as 64,128,256,512"
        )
    widths = tuple(sorted({int(part) for part in parts}))
    if len(widths) < 2:
        raise InputError(f"--widths {text}: two different widths or more are needed, for a slope")
    return widths
