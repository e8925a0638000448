"""shardwright launch: write the job file of a run for a format."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shardwright.cli.common import (
    AsJson,
    Overrides,
    argument,
    filled,
    flag,
    option,
    output_problems,
    print_json,
    print_text,
    reading_verb,
    size_problems,
)
from shardwright.launching.jobs import JOB_FORMATS, JobFormat, LaunchJob, job_problems
from shardwright.system.errors import InputError, nearest
from shardwright.system.files import write_whole

if TYPE_CHECKING:
    from shardwright.config import RunConfig


@dataclass(frozen=True)
class LaunchOptions:
    """Arguments and options of `launch`."""

    run: Path = argument(..., "the run file, as the job finds it", "RUN.toml")
    on: str = option(..., ", ".join(JOB_FORMATS), "SCHEDULER")
    nodes: int | None = option(None, "machines [default: ranks / --per-node]", "N")
    per_node: int = option(8, "ranks of a machine, which are its GPUs", "N")
    cpus: int = option(8, "cores of a rank", "N")
    name: str | None = option(None, "of the job [default: the last part of the run's out]")
    time: str = option("24:00:00", "slurm: longest time of one job", "HH:MM:SS")
    grace: int = option(600, "slurm, kubernetes: seconds to save in, from SIGTERM to the end of the job", "S")
    max_restarts: int = option(3, "kubernetes, skypilot, ray: how often a failed job is started again", "N")
    activate: str = option(
        "source .venv/bin/activate", "slurm, skypilot: a shell line that makes shardwright available", "COMMAND"
    )
    image: str | None = option(None, "kubernetes: the container image")
    claim: str | None = option(None, "kubernetes: claim of the volume with run file, data and out")
    mount: str = option("/runs", "kubernetes: where it is mounted; the working directory")
    accelerator: str | None = option(None, "skypilot: the GPU, such as H100")
    set_: Overrides = None
    write: Path | None = option(None, "write the job file; otherwise it is printed", "FILE")
    overwrite: bool = flag("with --write, replace a file that exists")
    json: AsJson = False


@reading_verb
def launch(options: LaunchOptions) -> None:
    """Write the job file of a run for Slurm, Kubernetes, SkyPilot or Ray.

    The numbers of machines and ranks are checked against the layout. The job resumes from the newest checkpoint when it
    is started again, and has time to save when it is ended. Nothing is submitted.

    shardwright launch run.toml --on slurm --nodes 2 --write train.sbatch

    Exit codes: 0 written, 2 the input cannot be used.
    """
    from shardwright.config import load

    if options.on not in JOB_FORMATS:
        raise InputError(f"--on {options.on}: no such scheduler; {nearest(options.on, JOB_FORMATS)}")
    format = JOB_FORMATS[options.on]
    config = load(options.run, options.set_ or ())
    layout = config.layout.layout()
    sizes = {"--nodes": options.nodes, "--per-node": options.per_node, "--cpus": options.cpus, "--grace": options.grace}
    problems = size_problems(sizes) + output_problems("--write", options.write)
    problems += [f"--max-restarts {options.max_restarts}: 0 or more is needed"] * (options.max_restarts < 0)
    problems += [
        f"--{name} is missing; --on {options.on} needs it, such as --{name} {example}"
        for name, example in format.needs.items()
        if not getattr(options, name) and (name != "accelerator" or config.device != "cpu")
    ]
    if options.write is not None and options.write.exists() and not options.overwrite:
        problems.append(f"--write {options.write}: the file exists; --overwrite replaces it")
    if problems:
        raise InputError(*problems)
    job = _job(options, config, layout.world_size)
    if problems := list(job_problems(job, layout.world_size, str(layout))):
        raise InputError(*problems)
    _write(options, format, job)


def _name(out: str) -> str:
    """Return a name for the job of a run that writes to `out`."""
    name = re.sub(r"[^a-z0-9]+", "-", Path(out).name.lower()).strip("-") or "train"
    return (name if name[0].isalpha() else f"run-{name}")[:40].rstrip("-")


def _job(options: LaunchOptions, config: "RunConfig", world_size: int) -> LaunchJob:
    name, nodes = options.name or _name(config.out), options.nodes or max(1, world_size // options.per_node)
    return filled(
        LaunchJob, options, ("array",), name=name, nodes=nodes, gpus=config.device != "cpu", run_file=str(options.run),
        overrides=tuple(options.set_ or ()), grace_s=options.grace,
    )  # fmt: skip


def _write(options: LaunchOptions, format: JobFormat, job: LaunchJob) -> None:
    text = format.text(job)
    if options.write is not None:
        write_whole(options.write, text.encode())
    submit = format.submit.format(options.write or format.file_name)
    if options.json:
        ranks = job.nodes * job.per_node
        print_json({"on": format.name, "nodes": job.nodes, "ranks": ranks, "submit": submit, "text": text})
    elif options.write is None:
        print_text(text.rstrip("\n"))
    else:
        print_text(f"{job.nodes} x {job.per_node} ranks -> {options.write}")
        print_text(f"  {submit}")
