"""shardwright verify: does the layout of a run file compute what one process computes?"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardwright.cli.common import (
    AsJson,
    Overrides,
    columns,
    console,
    error_console,
    print_json,
    print_table,
    say,
    verb,
)
from shardwright.config import RunConfig, load
from shardwright.errors import InputError, nearest

if TYPE_CHECKING:
    from shardwright.layout import Layout
    from shardwright.verification import Case, Report, Verifier


@dataclass(frozen=True)
class Options:
    """Arguments and options of the verb."""

    run_file: Annotated[Path, typer.Argument(help="the run file, TOML; see examples/")]
    overrides: Overrides = None
    against: Annotated[
        str, typer.Option("--against", help="single: one process in plain PyTorch; for a second layout see --set-b")
    ] = "single"
    overrides_b: Annotated[
        list[str] | None,
        typer.Option(
            "--set-b",
            metavar="KEY=VALUE",
            help="compare with a second layout instead: the run file with these changes (of layout.* and "
            "batch.micro_batch) on top of those of --set; may be repeated",
        ),
    ] = None
    steps: Annotated[int, typer.Option(min=1, help="optimizer steps to take")] = 3
    dtype: Annotated[
        str,
        typer.Option(
            help="float64, float32, or bfloat16 (matmuls in bfloat16, weights and sums in float32); float64 tells a "
            "bug from rounding best"
        ),
    ] = "float64"
    matrix: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, help="every valid layout of N ranks for this model, instead of the run file's own"
        ),
    ] = None
    full: Annotated[
        bool, typer.Option("--full", help="the true sizes of model and batch, not reduced to test size")
    ] = False
    timeout_s: Annotated[float, typer.Option("--timeout", min=1, help="seconds a layout may take")] = 300.0
    json: AsJson = False


@verb
def verify(options: Options) -> None:
    """Prove that a layout computes what one process computes.

    The layout of the run file and one process in plain PyTorch train the same model for a few steps, from the same
    seed on the same random batch with ragged loss masks; once with SGD, once with the run file's optimizer. Compared
    are the loss and the gradient norm of each step, every parameter's gradient of each step, every parameter at the
    beginning and in the end, and, bit for bit, everything that more than one rank holds. Where something differs,
    axes are switched off one by one to find the culprit.

    Ranks are processes on this machine's CPU; no accelerator and no data are needed. Model and batch are reduced to
    test size, in a way that keeps what decides how they can be partitioned.

    shardwright verify examples/debug.toml --set layout.dp_shard=2 --set layout.zero=3

    shardwright verify examples/debug.toml --matrix 4

    Exit codes: 0 equal, 1 not equal, 2 the input cannot be used, 3 a rank crashed or hung.
    """
    configs = _configs(options)
    from shardwright.verification import Verifier

    cases, chosen = _cases(configs, options)
    with Verifier(timeout_s=options.timeout_s) as verifier:
        if options.matrix is not None:
            _matrix(verifier, cases[0], chosen, options.json)
        else:
            sides = list(zip(cases, chosen, strict=True))
            second = sides[1] if options.overrides_b is not None else None
            _one(verifier, *sides[0], second, options.json, _sizes(configs[0], cases[0]))


def _cases(configs: Sequence[RunConfig], options: Options) -> "tuple[list[Case], list[Layout]]":
    """What is trained, for each run file, and the layouts that are verified: one for each run file, or the matrix."""
    from shardwright.verification import cut
    from shardwright.verification.case import case_of, cut_layout
    from shardwright.verification.matrix import layouts

    config, full, matrix = configs[0], options.full, options.matrix
    chosen = [each.layout.layout() for each in configs]
    if matrix is not None:
        chosen = layouts(config.model.spec(), matrix, config.batch.seq_len)
        if full:
            true_case = case_of(config)
            chosen = [each for each in chosen if true_case.shares(each)]
        if not chosen:
            raise InputError(f"--matrix {matrix}: no layout of {matrix} ranks fits this model and batch; try another N")
    steps, dtype = options.steps, options.dtype
    # Both sides train on one global batch: it is reduced for the side with the larger micro-batches.
    coarse = max(configs, key=lambda each: each.batch.micro_batch)
    true = case_of(coarse, steps=steps, dtype=dtype)
    case = true if full else cut(true, chosen)
    cases = [
        replace(case, micro_batch=each.batch.micro_batch if full else min(each.batch.micro_batch, case.micro_batch))
        for each in configs
    ]
    if not full:
        chosen = [cut_layout(layout, true, case) for layout in chosen]
    return cases, chosen


def _configs(options: Options) -> list[RunConfig]:
    """The run file, and its second form if there is one. Raises InputError with everything that is wrong with the
    options and with the run file."""
    from shardwright.verification.case import DTYPES

    overrides, overrides_b = options.overrides or [], options.overrides_b
    wrong = []
    if options.against != "single":
        wrong.append(
            f"--against {options.against}: valid is single; to compare with another layout use --set-b KEY=VALUE"
        )
    if options.dtype not in DTYPES:
        wrong.append(f"--dtype {options.dtype}: not one that can be compared; {nearest(options.dtype, DTYPES)}")
    if overrides_b is not None and options.matrix is not None:
        wrong.append("--set-b names a second layout and --matrix compares all with one process; leave one out")
    configs = []
    for each in [overrides] if overrides_b is None else [overrides, [*overrides, *overrides_b]]:
        try:
            configs.append(load(options.run_file, each))
        except InputError as error:
            wrong += [problem for problem in error.problems if problem not in wrong]
    if len(configs) == 2:
        one, two = (_flat(config.model_dump()) for config in configs)
        changed = [key for key in one if one[key] != two[key]]
        if other := [key for key in changed if not key.startswith("layout.") and key != "batch.micro_batch"]:
            wrong.append(
                f"--set-b changes {', '.join(other)}, which makes it another training, not another layout of the same; "
                f"valid: layout.* and batch.micro_batch; put the change into --set, where it holds for both"
            )
    if wrong:
        raise InputError(*wrong)
    return configs


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return found


def _one(
    verifier: "Verifier",
    case: "Case",
    layout: "Layout",
    against: "tuple[Case, Layout] | None",
    json: bool,
    sizes: str,
) -> None:
    from shardwright.verification.culprit import find_culprit

    with error_console.status(f"running {layout.world_size} ranks and the reference"):
        report = verifier.parity(case, layout, against)
    if not report.equal:
        with error_console.status("looking for the culprit") as status:
            report = replace(report, culprit=find_culprit(verifier, report, status.update))
    if json:
        print_json(report.document())
    else:
        _print(report, sizes)
    if not report.equal:
        raise typer.Exit(1)


def _matrix(verifier: "Verifier", case: "Case", chosen: Sequence["Layout"], json: bool) -> None:
    reports: list[Report] = []
    with error_console.status("") as status:
        for number, layout in enumerate(chosen, 1):
            status.update(f"{number} of {len(chosen)}: {layout}")
            reports.append(verifier.parity(case, layout))
    unequal = [report for report in reports if not report.equal]
    if json:
        print_json({"equal": not unequal, "layouts": [report.document() for report in reports]})
    else:
        if unequal:
            console.print(f"[bold red]not equal:[/] {len(unequal)} of {len(reports)} layouts")
            for report in unequal:
                say(f"  {report.layout}")
            say("for the culprit, verify one of them by its own --set layout...")
        else:
            console.print(f"[bold green]equal:[/] all {len(reports)} layouts of {chosen[0].world_size} ranks")
        console.print()
        _print_matrix(reports)
    if unequal:
        raise typer.Exit(1)


def _sizes(config: RunConfig, case: "Case") -> str:
    spec, whole = case.spec, config.model.spec()
    sizes = (
        f"{spec.n_layers} layers, d_model {spec.d_model}, {spec.n_heads} query and {spec.n_kv_heads} kv heads, "
        f"d_ffn {spec.d_ffn}, vocabulary {spec.vocab_size}; {case.global_batch} sequences of {case.seq_len} tokens a "
        f"step, {case.steps} step{'s' * (case.steps > 1)}, {case.dtype}"
    )
    return sizes if spec == whole else f"reduced to {sizes} (--full for the true sizes)"


def _print(report: "Report", sizes: str) -> None:
    """The verdict and the culprit, and then what was compared."""
    failing = sorted((row for row in report.rows if not row.equal), key=lambda row: -row.excess)
    said, count = "losses, norms, gradients and parameters", len(report.rows)
    if report.equal:
        console.print(f"[bold green]equal:[/] {count} {said}", soft_wrap=True)
    else:
        replicas = f", and {len(report.differing)} of {report.n_replicated} replicas" if report.differing else ""
        console.print(f"[bold red]not equal:[/] {len(failing)} of {count} {said}{replicas}", soft_wrap=True)
        say(f"culprit: {report.culprit}")
    console.print()
    console.print(f"[bold]{report.layout}[/] against [bold]{report.against}[/]", soft_wrap=True)
    say(sizes)
    console.print()
    table = columns("compared", "worst at", "step", "error", "tolerance", "equal", left=2)
    table.columns[-1].justify = "left"
    shown = report.worst_of_each()
    for row in shown + [row for row in failing if row not in shown][:8]:
        table.add_row(
            f"{row.quantity.kind}, {row.quantity.training}",
            row.name or "-",
            str(row.quantity.step),
            f"{row.error:.1e}",
            f"{row.tolerance:.1e}",
            "yes" if row.equal else "[bold red]no[/]",
        )
    print_table(table)
    if (hidden := len([row for row in failing if row not in shown]) - 8) > 0:
        console.print(f"and {hidden} more that are not equal; all of them with --json")
    console.print()
    if report.differing:
        console.print(f"[bold red]{len(report.differing)} of {report.n_replicated} replicas differ between ranks[/]")
        for line in report.differing[:8]:
            say(f"  {line}")
    elif report.n_replicated:
        say(f"{report.n_replicated} tensors and numbers that several ranks hold: the same bits on all of them")
    for reason in dict.fromkeys(row.reason for row in report.rows):
        say(f"tolerance: {reason}")
    say("error: ||a - b|| / ||b|| of a tensor, |a - b| / |b| of a number, b the reference")


def _print_matrix(reports: Sequence["Report"]) -> None:
    table = columns("layout", "worst at", "error", "tolerance", "replicas", "", left=2)
    table.columns[-1].justify = "left"
    for report in reports:
        worst = report.worst
        replicas = f"{len(report.differing)} differ" if report.differing else f"{report.n_replicated}"
        table.add_row(
            str(report.layout),
            f"{worst.quantity.kind} {worst.name}".strip(),
            f"{worst.error:.1e}",
            f"{worst.tolerance:.1e}",
            replicas,
            "equal" if report.equal else "[bold red]not equal[/]",
        )
    print_table(table)
    for reason in dict.fromkeys(row.reason for report in reports for row in report.rows):
        say(f"tolerance: {reason}")
