"""shardwright plan calibrate: narrow the predictions for a cluster and its software by training logs."""

import re
import shlex
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from shardwright.cli.common import AsJson, argument, flag, option, print_text, reading_verb, show
from shardwright.cli.plan_asked import plan_option_problems
from shardwright.cli.plan_options import FromOptions, PlanOptions
from shardwright.system.errors import InputError

if TYPE_CHECKING:
    from shardwright.cost.hardware import Cluster
    from shardwright.planner.choice import PricedLayout
    from shardwright.readers.logs import TrainingLog


@dataclass(frozen=True)
class LogOptions(FromOptions):
    """Arguments and options of the verbs that read a training log."""

    logs: list[Path] = argument(..., "training logs of one run or of equal runs", "LOG...")
    json: AsJson = False


@dataclass(frozen=True)
class CalibrateOptions(LogOptions):
    """Arguments and options of `plan calibrate`."""

    write: Path | None = option(None, "write the cluster as a file for plan --hardware", "FILE.toml")
    overwrite: bool = flag("with --write, replace a file that exists")

    def plan_options(self) -> PlanOptions:
        return replace(super().plan_options(), write=self.write, overwrite=self.overwrite)


@dataclass(frozen=True)
class LoggedRun:
    """The layout of a run with its logs. `cluster`: with its calibration by earlier logs, if any."""

    name: str
    priced: "PricedLayout"
    cluster: "Cluster"
    logs: "list[TrainingLog]"


def read_logged_run(options: LogOptions) -> LoggedRun:
    """Return the priced configuration and its logs. Raises InputError with file and line of every problem."""
    from shardwright.planner.choice import PricedLayout
    from shardwright.readers.logs import batch_problems, read_log

    if not options.from_:
        raise InputError("--from is missing; name the configuration of the run, or run.toml of a run of Shardwright")
    given = options.plan_options()
    if problems := plan_option_problems(given):
        raise InputError(*problems)
    if _is_run_file(options.from_[0]):
        from shardwright.cli.plan_asked import choice_of_run, priced_of, read_request
        from shardwright.planner.search import MARGIN, limit_bytes

        request = read_request(replace(given, target=str(options.from_[0]), from_=None, write=None, overwrite=False))
        assert request.config is not None
        choice = choice_of_run(request.config, request.job, limit_bytes(request.job, MARGIN))
        system, cluster, priced = "Shardwright", request.anywhere.cluster, priced_of(request.job, choice)
    else:
        from shardwright.cli.plan_from import read_run

        run, cluster, _ = read_run(options.from_, given)
        system, priced = run.system.name, PricedLayout.from_choice(run.job(cluster), run.choice)
    logs = [read_log(path, system) for path in options.logs]
    if problems := [problem for log in logs for problem in batch_problems(log, priced.job)]:
        raise InputError(*problems)
    return LoggedRun(system, priced, cluster, logs)


def _is_run_file(path: Path) -> bool:
    """Return whether a file is a run file of Shardwright: no other system's TOML has a section [batch] or [layout]."""
    from shardwright.system.files import parse_toml, read_text

    if path.suffix != ".toml":
        return False
    try:
        return bool({"batch", "layout"} & parse_toml(read_text(path)).keys())
    except (OSError, ValueError):
        return False


@reading_verb
def plan_calibrate(options: CalibrateOptions) -> None:
    """Narrow the predictions for a cluster and its software by training logs.

    The steps of the logs are compared with the prediction of the configuration. The output shows which constants of
    the cost model (matmuls, attention, kernels, network, host) the logs determine, with their intervals before and
    after. --write writes the cluster as a hardware file, with which plan predicts it. A log that determines nothing,
    because it has few steps or their times vary, changes nothing. Nothing that is read is executed.

    shardwright plan calibrate train.log --from train_gpt.sh --cluster h100:64 --write ours.toml

    shardwright plan --from other.sh --hardware ours.toml --cluster ours:64

    Exit codes: 0 calibrated, 1 the logs determine nothing, 2 the input cannot be used.
    """
    from shardwright.cost.hardware_file import name_of_file
    from shardwright.planner.log_calibration import calibrate
    from shardwright.readers.logs import joined_times, step_times
    from shardwright.report.log_view import calibration_view

    run = read_logged_run(options)
    times = [step_times(log, run.priced.job) for log in run.logs]
    step_s, noise = joined_times(times)
    result = calibrate(run.priced, run.cluster, step_s, noise)
    if options.write is not None and result.informs:
        from shardwright.system.files import write_whole

        logs = [f"{log.path.name}: {measured.n_steady} steps" for log, measured in zip(run.logs, times, strict=True)]
        known = run.cluster.calibrated.get(result.kind)
        if known is not None and (again := set(known.logs) & set(logs)):
            raise InputError(f"--hardware {options.hardware}: {run.cluster.name} is calibrated by {', '.join(again)}")
        table = result.table([*(known.logs if known else []), *logs])
        calibrated = {**run.cluster.calibrated, result.kind: table}
        text = _hardware_text(replace(run.cluster, calibrated=calibrated), options.write, options.hardware)
        write_whole(options.write, text.encode("utf-8"))
    show(calibration_view(run.name, run.priced, run.logs, times, result), options.json, None)
    if not result.informs:
        raise typer.Exit(1)
    if options.write is not None and not options.json:
        cluster = f"{name_of_file(options.write)}:{run.cluster.size}"
        print_text(f"written to {options.write}; plan with --hardware {options.write} --cluster {cluster}")


def _hardware_text(cluster: "Cluster", path: Path, hardware: Path | None) -> str:
    """Return a hardware file with the cluster, after the tables of `hardware`. Raises InputError if these have another
    cluster with its name."""
    from shardwright.config import as_toml
    from shardwright.cost.hardware_file import name_of_file
    from shardwright.system.files import parse_toml, read_text
    from shardwright.system.units import GiB

    name, mark = name_of_file(path), "# A cluster calibrated by training logs: "
    before = "" if hardware is None else read_text(hardware)
    before = re.sub(rf"{mark}{name}\n.*?(?={mark}|\Z)", "", before, flags=re.DOTALL)
    values = {
        "accelerator": cluster.accelerator.name,
        "node_size": cluster.node_size,
        "network": cluster.across.name,
        "gbit_per_s_per_node": cluster.node_bytes_per_s * 8 / 1e9,
        **({"host_memory_gib": cluster.host_memory_bytes / GiB} if cluster.host_memory_bytes else {}),
    }
    lines = [f"{mark}{name}", f"# Written by `{shlex.join(['shardwright', *sys.argv[1:]])}`.", f"[clusters.{name}]"]
    lines += [f"{key} = {as_toml(value)}" for key, value in values.items()]
    for kind, table in cluster.calibrated.items():
        lines += ["", f"[clusters.{name}.calibrated.{kind}]"]
        lines += [f"{key} = {as_toml(value)}" for key, value in table.model_dump().items()]
    text = "\n".join([*([before] if before.strip() else []), *lines]) + "\n"
    try:
        parse_toml(text)
    except ValueError:
        raise InputError(f"--write {path}: {hardware} has a cluster {name!r}; name another file") from None
    return text
