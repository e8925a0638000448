"""shardwright verify: compare the layout of a run file with one process."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from shardwright.cli.common import (
    AsJson,
    Overrides,
    argument,
    console,
    error_console,
    filled,
    flag,
    option,
    output_problems,
    print_text,
    progress,
    reading_verb,
    show,
)
from shardwright.cli.plan_from import run_reader
from shardwright.cli.plan_options import FromOptions
from shardwright.system.errors import InputError, WorkerError, nearest
from shardwright.system.units import format_seconds
from shardwright.view.terminal import TableStream

if TYPE_CHECKING:
    from shardwright.config import RunConfig
    from shardwright.layout.layout import Layout
    from shardwright.verification import Case, Report, Verifier
    from shardwright.verification.case import CaseStage
    from shardwright.verification.compare import RankedLayout


DAY_S = 24 * 3600.0


@dataclass(frozen=True)
class VerifyOptions(FromOptions):
    """Arguments and options of `verify`."""

    run_file: Path | None = argument(None, "the run file, TOML; see examples/")
    overrides: Overrides = None
    against: str = option("single", "single: one process in plain PyTorch; for a second layout see --set-b")
    overrides_b: list[str] | None = option(
        None,
        "compare with a second layout instead: the run file with these changes (of layout.* and "
        "batch.micro_batch) in addition to the changes of --set; may be repeated",
        "KEY=VALUE",
        name="--set-b",
    )
    steps: int = option(3, "optimizer steps to take", min=1)
    dtype: str = option(
        "float64",
        "float64, float32, or bfloat16 or float16 (matmuls in it, weights and sums in float32); float64 "
        "separates a bug from rounding best",
    )
    matrix: int | None = option(
        None,
        "every valid layout of N ranks for this model, instead of the run file's own; with --trainer, every "
        "way to distribute N ranks over its axes",
        "N",
        min=1,
        max=64,
    )
    html: Path | None = option(None, "write one page with the errors of each layer and step", "FILE.html")
    full: bool = flag("the true sizes of model and batch, not reduced to test size")
    evaluate: bool = option(
        True, "compare the loss of an evaluation between two steps, too", name="--evaluate/--no-evaluate"
    )
    compile: bool = flag("compile the layout's blocks and loss, as precision.compile does")
    lr_schedule: bool = flag(
        "learning rates of the run file's [lr_schedule], shortened from its steps to --steps; by default lr, "
        "lr / 2 and 3/4 lr in turn"
    )
    timeout_s: float | None = option(
        None,
        "seconds a layout may take; if not given, 300, and with --full a day",
        name="--timeout",
        min=1,
        max=7 * DAY_S,
    )
    trainer: str | None = option(
        None,
        "verify the class Trainer of this file, which is executed, instead of a layout; or the adapter of a "
        "released system, such as accelerate. --set changes model.*, batch.*, seed, the trainer's axes and its "
        "options; see docs/verify-trainers.md",
        "TRAINER.py|NAME",
    )
    world: int | None = option(None, "with --trainer: the number of ranks; 4 if not given", "N", min=1, max=64)
    reference: str | None = option(
        None,
        "with --trainer: the class Trainer that runs in one process; if not given, the class of --trainer",
        "REFERENCE.py",
    )
    json: AsJson = False


@reading_verb
def verify(options: VerifyOptions) -> None:
    """Prove that a layout computes the same losses, gradients and parameters as one process.

    The layout of the run file and one process in plain PyTorch train the same model for a few steps, from the same
    seed on the same random batch with ragged loss masks; once with plain SGD, once with the run file's optimizer.
    Compared are the loss and the gradient norm of each step, the loss of an evaluation, every parameter's gradient of
    each step, every parameter at the beginning and in the end, and, bit for bit, everything that more than one rank
    holds. Where something differs, axes are switched off one by one to find the culprit.

    Ranks are processes on this machine's CPU; no accelerator and no data are needed. Model and batch are reduced to
    test size, in a way that keeps what decides how they can be partitioned.

    shardwright verify examples/debug.toml --set layout.dp_shard=2 --set layout.zero=3

    shardwright verify examples/debug.toml --matrix 4

    shardwright verify --from pretrain_llama.sh --cluster h100:64

    shardwright verify --trainer examples/trainers/ddp.py --world 4

    Exit codes: 0 equal, 1 not equal, 2 the input cannot be used, 3 a rank crashed or hung.
    """
    if options.trainer is not None:
        _trainer(options.trainer, options)
        return
    if options.world is not None or options.reference is not None:
        raise InputError("--world and --reference are options of --trainer; add --trainer TRAINER.py")
    from shardwright.verification.ranks import start_server

    start_server()  # it imports PyTorch while this process does
    configs = _configs(options)
    from shardwright.verification import Verifier
    from shardwright.verification.verifier import TIMEOUT_S
    from shardwright.verification.view import sizes

    timeout_s = options.timeout_s or (DAY_S if options.full else TIMEOUT_S)
    with Verifier(timeout_s=timeout_s) as verifier:
        if options.matrix is not None:
            _matrix(verifier, _matrix_cases(configs[0], options.matrix, options), options)
        elif _is_too_large(configs, options):
            _reduced(verifier, _settled(configs[0]), options)
        else:
            configs = [_settled(config) for config in configs]
            sides = _sides(configs, options)
            second = sides[1] if options.overrides_b is not None else None
            _one(verifier, *sides[0], second, options, [sizes(configs[0], sides[0][0])])


def _settled(config: "RunConfig") -> "RunConfig":
    """Return the run file with "auto" recomputation resolved, for this machine unless `memory_gib` is set."""
    from shardwright.config.settle import needs_memory, settled
    from shardwright.system.processes import share_bytes

    if not needs_memory(config):
        return config
    shown, chosen = settled(config, share_bytes(config.layout.layout().world_size))
    error_console.print(f"recompute auto: {chosen} of a rank")
    return shown


def _is_too_large(configs: "Sequence[RunConfig]", options: VerifyOptions) -> bool:
    """Return whether one layout is verified that has more ranks than this machine can run."""
    from shardwright.verification.reduce import most_ranks

    return len(configs) == 1 and not options.full and configs[0].layout.layout().world_size > most_ranks()


def _reduced(verifier: "Verifier", config: "RunConfig", options: VerifyOptions) -> None:
    """Verify the layout with fewer ranks on each axis."""
    from shardwright.verification.reduce import most_ranks, reduced
    from shardwright.verification.view import sizes

    pairs, why = reduced(_true_case(config, options), config.layout.layout(), most_ranks())
    if len(pairs) == 1:
        _one(verifier, *pairs[0], None, options, [why, sizes(config, pairs[0][0])])
        return
    if not options.json:
        print_text(why)
    _matrix(verifier, pairs, options)


def _matrix_cases(config: "RunConfig", world_size: int, options: VerifyOptions) -> "list[tuple[Case, Layout]]":
    """Return the case to train and the layout, for each layout of `world_size` ranks."""
    from shardwright.model.number_formats import replica_problems
    from shardwright.verification.cut_case import cut_each
    from shardwright.verification.matrix import layouts

    lengths = dict.fromkeys(stage.seq_len for stage in config.batch.schedule.stages)
    chosen, true = layouts(config.spec(), world_size, *lengths), _true_case(config, options)
    if true.fp8 is not None:
        chosen = [layout.changed(compress_gradients="none", compress_weights="none") for layout in chosen]
    chosen = [layout for layout in chosen if not [*replica_problems(true.spec, layout, true.fp8)]]
    if not config.optimizer.kind.can_offload:
        chosen = [layout.changed(offload_optimizer="none") for layout in chosen]
    chosen = list(dict.fromkeys(chosen))
    if options.full:
        chosen = [layout for layout in chosen if true.shares(layout)]
    if not chosen:
        raise InputError(
            f"--matrix {world_size}: no layout of {world_size} ranks fits this model and batch; try another N"
        )
    return [(true, layout) for layout in chosen] if options.full else cut_each(true, chosen)


def _sides(configs: "Sequence[RunConfig]", options: VerifyOptions) -> "list[tuple[Case, Layout]]":
    """Return the case to train and the layout to verify, for each run file."""
    from shardwright.verification.cut_case import cut, cut_layout

    chosen = [config.layout.layout() for config in configs]
    # Both sides train on one global batch, which is reduced for the side with the larger micro-batches.
    true = _true_case(max(configs, key=lambda config: config.batch.micro_batch), options)
    case = true if options.full else cut(true, chosen)
    cases = [
        replace(
            case,
            micro_batch=config.batch.micro_batch if options.full else min(config.batch.micro_batch, case.micro_batch),
            stages=_stages(case, _true_case(config, options), options),
        )
        for config in configs
    ]
    if not options.full:
        chosen = [cut_layout(layout, true, case) for layout in chosen]
    return list(zip(cases, chosen, strict=True))


def _stages(case: "Case", own: "Case", options: VerifyOptions) -> "tuple[CaseStage, ...]":
    """Return the stages of the batch of one side: the stages of `case` with the micro-batches of its own run file."""
    if options.full or len(case.stages) != len(own.stages):
        return own.stages
    pairs = zip(case.stages, own.stages, strict=True)
    return tuple(cut._replace(micro_batch=min(cut.micro_batch, true.micro_batch)) for cut, true in pairs)


def _true_case(config: "RunConfig", options: VerifyOptions) -> "Case":
    from shardwright.verification.case import case_of

    return case_of(
        config,
        steps=options.steps,
        dtype=options.dtype,
        evaluate=options.evaluate,
        compiled=options.compile,
        lr_schedule=options.lr_schedule,
    )


def dtype_problems(dtype: str) -> list[str]:
    """Return a sentence if `dtype` is not one that can be compared, otherwise nothing."""
    from shardwright.verification.case import DTYPES

    return [] if dtype in DTYPES else [f"--dtype {dtype}: not one that can be compared; {nearest(dtype, DTYPES)}"]


def _configs(options: VerifyOptions) -> "list[RunConfig]":
    """Return the run file, and its second form if there is one. Raises InputError with every problem of the options and
    of the run file."""
    from shardwright.config import flat

    overrides, overrides_b = options.overrides or [], options.overrides_b
    problems = output_problems("--html", options.html, ".html")
    if options.against != "single":
        problems.append(
            f"--against {options.against}: valid is single; to compare with another layout use --set-b KEY=VALUE"
        )
    problems += dtype_problems(options.dtype)
    if overrides_b is not None and options.matrix is not None:
        problems.append("--set-b names a second layout and --matrix compares all with one process; leave one out")
    configs: list[RunConfig] = []
    try:
        read = run_reader(options, options.run_file)
    except InputError as error:
        raise InputError(*problems, *error.problems) from None
    for changes in [overrides] if overrides_b is None else [overrides, [*overrides, *overrides_b]]:
        try:
            configs.append(read(changes))
        except InputError as error:
            problems += [problem for problem in error.problems if problem not in problems]
    if len(configs) == 2:
        one, two = (flat(config.model_dump()) for config in configs)
        changed = [key for key in one if one[key] != two[key]]
        if other := [key for key in changed if not key.startswith("layout.") and key != "batch.micro_batch"]:
            problems.append(
                f"--set-b changes {', '.join(other)}, which makes it another training, not another layout of the same; "
                f"valid: layout.* and batch.micro_batch; put the change into --set, where it holds for both"
            )
    if problems:
        raise InputError(*problems)
    return configs


def _trainer(trainer: str, options: VerifyOptions) -> None:
    """Verify the trainer of a file."""
    from shardwright.verification.ranks import start_server

    start_server("" if trainer.endswith(".py") else f"shardwright.verification.trainers.{trainer}")
    from shardwright.verification.trainers.parity import TrainerJob, TrainerVerifier
    from shardwright.verification.verifier import TIMEOUT_S
    from shardwright.verification.view import batch_sizes

    _check_options_of_trainer(options)
    timeout_s, n_ranks = options.timeout_s or TIMEOUT_S, options.matrix or options.world or 4
    job = filled(TrainerJob, options, world_size=n_ranks, overrides=options.overrides or [], timeout_s=timeout_s)
    if options.matrix is None:
        with error_console.status("starting") as status:
            report = job.report(status.update)
        _show(report, [batch_sizes(report.case)], options)
        return
    settings, left_out = job.settings(every=True)
    with TrainerVerifier(timeout_s=job.timeout_s) as verifier:
        with progress("running the reference twice"):
            verifier.check_reference(settings[0][0])
        _matrix(verifier, settings, options, left_out)


def _check_options_of_trainer(options: VerifyOptions) -> None:
    """Raise InputError for options that cannot be combined with --trainer."""
    problems = output_problems("--html", options.html, ".html")
    if options.dtype not in ("float64", "float32"):
        problems.append(f"--dtype {options.dtype}: a trainer is compared in its own matmuls; valid: float64, float32")
    given = {
        "--set-b": options.overrides_b is not None,
        "--compile": options.compile,
        "--lr-schedule": options.lr_schedule,
        "--no-evaluate": not options.evaluate,
        "--against": options.against != "single",
        **dict.fromkeys(options.given(), True),
    }
    problems += [f"{name} is for layouts of a run file; leave it out with --trainer" for name in given if given[name]]
    if options.matrix is not None and options.world is not None:
        problems.append(
            f"--matrix {options.matrix} is the number of ranks of each layout; leave out --world {options.world}"
        )
    if options.full and options.run_file is None:
        problems.append("--full: there is no run file to take the sizes from; name one, or use --set model.*")
    if problems:
        raise InputError(*problems)


def _one(
    verifier: "Verifier",
    case: "Case",
    layout: "Layout",
    against: "tuple[Case, Layout] | None",
    options: VerifyOptions,
    sizes: Sequence[str],
) -> None:
    from shardwright.verification.verifier import find_culprit

    with progress(f"running {layout.world_size} ranks and the reference") as verifier.tell:
        report = verifier.parity(case, layout, against)
    if not report.equal:
        with error_console.status("looking for the culprit") as status:
            report = replace(report, culprit=find_culprit(verifier, report, status.update))
    _show(report, sizes, options)


def _show(report: "Report", sizes: Sequence[str], options: VerifyOptions) -> None:
    """Show the report of one layout or trainer. Exits with 1 if it is not equal."""
    from shardwright.verification.view import report_document

    show(report_document(report, sizes), options.json, options.html)
    if not report.equal:
        raise typer.Exit(1)


def _matrix(
    verifier: "Verifier",
    pairs: "Sequence[tuple[Case, RankedLayout]]",
    options: VerifyOptions,
    left_out: "Sequence[tuple[RankedLayout, str]]" = (),
) -> None:
    from shardwright.verification.view import matrix_document, matrix_table

    stream = None if options.json else TableStream(matrix_table(), console)
    reports = collect(verifier, pairs, [str(layout) for _, layout in pairs], stream)
    if stream is not None:
        console.print()
    n_ranks = pairs[0][1].world_size
    name = options.trainer or options.run_file or " ".join(map(str, options.from_ or []))
    document = matrix_document(reports, f"{name}: layouts of {n_ranks} ranks", left_out)
    show(document, options.json, options.html)
    if any(report.crash for report in reports):
        raise typer.Exit(WorkerError.exit_code)
    if not all(report.equal for report in reports):
        raise typer.Exit(1)


def collect(
    verifier: "Verifier", pairs: "Sequence[tuple[Case, RankedLayout]]", names: Sequence[str], stream: TableStream | None
) -> "list[Report]":
    """Return the report of each case and layout. `stream`, if given, prints a row for each report when it is done."""
    from shardwright.verification.view import matrix_row

    reports: list[Report] = []
    began_s = time.monotonic()
    with error_console.status(f"0 of {len(pairs)}") as status:
        for name, report in zip(names, verifier.parities(pairs), strict=True):
            reports.append(report)
            if stream is not None:
                stream.add(matrix_row(report, name))
            left_s = (time.monotonic() - began_s) / len(reports) * (len(pairs) - len(reports))
            status.update(f"{len(reports)} of {len(pairs)}, {format_seconds(left_s)} left")
    return reports
