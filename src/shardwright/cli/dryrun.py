"""shardwright dryrun: run the real training program as any rank of any world, on fake tensors."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from shardwright.cli.common import (
    AsJson,
    Overrides,
    argument,
    flag,
    option,
    output_problems,
    print_text,
    progress,
    reading_verb,
    show,
)
from shardwright.cli.plan_from import load_run
from shardwright.cli.plan_options import FromOptions
from shardwright.system.errors import InputError

if TYPE_CHECKING:
    from shardwright.config import RunConfig
    from shardwright.dry_run.run import DryRun, DryRunSettings

ALL = "all"


@dataclass(frozen=True)
class DryrunOptions(FromOptions):
    """Arguments and options of `dryrun`."""

    run_file: Path | None = argument(None, "the run file, TOML; see examples/; its data is not read")
    overrides: Overrides = None
    rank: int | None = option(None, "the rank of the world; if not given, the fullest by the plan", "R")
    ranks: str | None = option(
        None, "one rank of each class that can differ, whose collectives and messages have to agree", "all"
    )
    steps: int = option(2, "steps to take; the last one is reported")
    device_memory: str | None = option(None, "memory of a rank's device, such as 80GiB; or name an accelerator", "SIZE")
    cluster: str | None = option(
        None, "the cluster as for `plan`, such as h100:64, or h100, for its accelerator's memory", "NAME[:COUNT]"
    )
    count_as: str = option("gpu", "gpu: with the kernels and the allocator of a GPU; cpu: as a rank on a CPU and gloo")
    imbalance: float = option(1.0, "rows of experts that the first rank of ep gets, over the mean", "X")
    remedies: bool = option(True, "if it does not fit, try changes of the layout", name="--remedies/--no-remedies")
    messages: bool = flag("list every collective and message in order")
    html: Path | None = option(None, "write one page with pictures", "FILE.html")
    trace: Path | None = option(None, "write actions, messages and memory for ui.perfetto.dev", "FILE.json")
    snapshot: Path | None = option(None, "write every allocation for pytorch.org/memory_viz", "FILE.pickle")
    json: AsJson = False


@reading_verb
def dryrun(options: DryrunOptions) -> None:
    """Run the real training program as any rank of any world, without a GPU, data or memory for the weights.

    The program takes steps on tensors without values, in a process group that sends nothing. The output
    shows the peak memory of the rank by kind, its place in the step, and the plan's prediction; the largest tensors at
    the peak; and the collectives and messages by axis. With --ranks all, ranks of every kind are run, and NCCL's rules
    are checked over the calls of all ranks: a broken rule would hang the cluster.

    shardwright dryrun examples/llama-3.1-8b.toml --cluster h100

    shardwright dryrun examples/llama-3.1-8b.toml --ranks all --device-memory 80GiB

    shardwright dryrun --from pretrain_llama.sh --cluster h100:64

    Exit codes: 0 fits, 1 does not fit or ranks do not agree, 2 the input cannot be used, 3 a dry run failed.
    """
    problems = _problems(options)
    if problems:
        raise InputError(*problems)
    from shardwright.verification.ranks import start_server

    start_server()  # it imports PyTorch while this process does not
    config = load_run(options, options.run_file, options.overrides or [], ("cluster", "hardware"))
    how = _how(config, options)
    with progress("running dry") as tell:
        result = _dry_run(config, how, options, tell)
    from shardwright.dry_run.view import dry_run_document

    written = [*_written(result, options)]
    show(dry_run_document(result, options.messages), options.json, options.html)
    if not options.json:
        for path in written:
            print_text(f"written to {path}")
    if not result.fits or result.disagreements:
        raise typer.Exit(1)


def _written(result: "DryRun", options: DryrunOptions) -> Iterator[Path]:
    """Write the requested records and yield the path of each."""
    from shardwright.dry_run.record import write_snapshot, write_trace

    if options.trace is not None:
        write_trace(result.records, options.trace)
        yield options.trace
    if options.snapshot is not None:
        write_snapshot(result.records, options.snapshot)
        yield options.snapshot


def _dry_run(
    config: "RunConfig", how: "DryRunSettings", options: DryrunOptions, tell: Callable[[str], None]
) -> "DryRun":
    from shardwright.dry_run.run import dry_run, fullest_by_plan

    rank = options.rank
    if rank is None and options.ranks is None:
        rank = fullest_by_plan(config)
    return dry_run(config, how, rank, options.remedies, tell)


def _problems(options: DryrunOptions) -> list[str]:
    """Return the problems of the options that can be found without the run file."""
    problems = output_problems("--html", options.html, ".html")
    problems += output_problems("--trace", options.trace, ".json")
    problems += output_problems("--snapshot", options.snapshot, ".pickle")
    if options.ranks not in (None, ALL):
        problems.append(f"--ranks {options.ranks}: valid: {ALL}; a single one is given by --rank")
    if options.ranks is not None and options.rank is not None:
        problems.append(f"--rank {options.rank} and --ranks {options.ranks}: leave one out")
    if options.device_memory is not None and options.cluster is not None:
        problems.append("--device-memory and --cluster both set the memory; leave one out")
    return problems


def _how(config: "RunConfig", options: DryrunOptions) -> "DryRunSettings":
    """Return the settings of the dry run. Raises InputError if the memory of a rank's device is not known."""
    from shardwright.dry_run.run import dry_run_settings
    from shardwright.system.units import GiB

    memory: str | float
    if options.device_memory is not None:
        memory = options.device_memory
    elif options.cluster is not None:
        memory = _cluster_memory(options.cluster, options.hardware, config.layout.layout().world_size)
    elif config.memory_gib is not None:
        memory = config.memory_gib * GiB
    else:
        raise InputError(
            "the memory of a rank's device is not known; give --device-memory 80GiB, --cluster h100, or memory_gib in "
            "the run file"
        )
    history = options.trace is not None or options.snapshot is not None
    return dry_run_settings(memory, options.count_as, options.steps, options.imbalance, history)


def _cluster_memory(text: str, hardware: Path | None, world_size: int) -> float:
    """Return the bytes of one accelerator of a cluster. Raises InputError for an unknown cluster, or if its number of
    accelerators is not the number of the layout's ranks."""
    from shardwright.cost.hardware import cluster

    machine = cluster(text if ":" in text else f"{text}:1/1", hardware)
    if ":" in text and machine.size != world_size:
        raise InputError(
            f"--cluster {text}: it has {machine.size:,} accelerators, and the layout of the run file {world_size:,} "
            f"ranks; valid: {text.partition(':')[0]}:{world_size}"
        )
    return machine.accelerator.memory_bytes
