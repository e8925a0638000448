"""What `shardwright plan` is asked for, from options and a run file, and what is wrong with it."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwright.errors import ConfigError, InputError, nearest

if TYPE_CHECKING:
    from shardwright.config import RunConfig
    from shardwright.cost.job import Job

PRECISIONS = ("fp32", "bf16", "fp16", "fp8")


@dataclass(frozen=True)
class Asked:
    """What is to be planned. `name`: of the model, as people call it; `config`: the run file, if there is one."""

    job: "Job"
    name: str
    config: "RunConfig | None"


def ask(
    target: str | None,
    runs: Path | None,
    model: str | None,
    cluster: str | None,
    global_batch: int | None,
    seq_len: int | None,
    precision: str | None,
    hardware: Path | None,
) -> Asked:
    """The job that the options and the run file describe. Raises InputError with every problem at once."""
    wrong: list[str] = []
    if runs is not None:
        wrong.append(f"{runs}: a second argument goes with evaluate alone: shardwright plan evaluate {runs}")
    if target is not None and model is not None:
        wrong.append(f"--model {model} and {target}: both name a model; leave one out")
    config = None
    if target is not None and model is None and (config := _read(target, wrong)) is not None:
        global_batch = config.batch.global_batch if global_batch is None else global_batch
        seq_len = config.batch.seq_len if seq_len is None else seq_len
        precision = config.precision.compute if precision is None else precision
    precision = (precision or "bf16").lower()
    if target is None and model is None:
        wrong.append("--model is missing; name a preset, such as llama-3.1-70b, or a run file")
    if cluster is None:
        wrong.append("--cluster is missing; give accelerators and how many, such as h100:64")
    sizes = {"--global-batch": global_batch, "--seq-len": seq_len}
    if target is None:
        wrong += [f"{option} is missing; give a number, 1 or more" for option, n in sizes.items() if n is None]
    wrong += [
        f"{option} {n}: a number of 1 or more is needed" for option, n in sizes.items() if n is not None and n < 1
    ]
    if precision not in PRECISIONS:
        what = "precision.compute=" if config is not None and config.precision.compute == precision else "--precision "
        wrong.append(f"{what}{precision}: not one that is planned for; {nearest(precision, PRECISIONS)}")

    from shardwright.cost.hardware import cluster as find_cluster
    from shardwright.cost.job import Job
    from shardwright.model.presets import resolve

    spec = found = None
    try:
        if config is not None:
            spec = config.model.spec()
        elif model is not None:
            spec = resolve(model)
    except ConfigError as error:
        wrong += error.problems
    try:
        found = None if cluster is None else find_cluster(cluster, hardware)
    except InputError as error:
        wrong += error.problems
    if found is not None and precision in PRECISIONS and precision not in found.accelerator.flops_per_s:
        has = ", ".join(found.accelerator.flops_per_s)
        wrong.append(f"--precision {precision}: the peak of {found.accelerator.name} in it is not known; known: {has}")
    if wrong or spec is None or found is None or global_batch is None or seq_len is None:
        raise InputError(*wrong)
    name = model if model is not None else _model_name(config, spec)
    job = Job(model=spec, cluster=found, seq_len=seq_len, global_batch=global_batch, precision=precision)
    return Asked(job, name, config)


def _read(run_file: str, wrong: list[str]) -> "RunConfig | None":
    """A run file; where it cannot be read, its problems are added to `wrong`."""
    if not Path(run_file).exists() and not run_file.endswith(".toml"):
        wrong.append(f"{run_file}: no such run file; give one, or the word evaluate and a table of runs")
        return None
    from shardwright.config import load

    try:
        return load(run_file)
    except InputError as error:
        wrong += error.problems
        return None


def _model_name(config: "RunConfig | None", spec: Any) -> str:
    from shardwright.model.presets import PRESETS

    assert config is not None
    preset = config.model.preset
    return preset if spec == PRESETS[preset] else f"{preset}, changed"


def check(
    job: "Job",
    memory_margin: float,
    top: int,
    explain: str | None,
    budget_tokens: float | None,
    write: Path | None,
    html: Path | None,
) -> None:
    """Raises InputError, before anything is searched, for options that cannot be used."""
    from shardwright.plan.run_file import PRECISIONS as WRITTEN
    from shardwright.plan.search import limit_bytes

    wrong = []
    try:
        limit_bytes(job, memory_margin)
    except InputError as error:
        wrong += error.problems
    if top < 1:
        wrong.append(f"--top {top}: a number of 1 or more is needed")
    if budget_tokens is not None and not 0 < budget_tokens < float("inf"):
        wrong.append(f"--budget-tokens {budget_tokens:g}: a number of tokens above 0 is needed, such as 15e12")
    if explain is not None and html is not None:
        wrong.append("--html shows what a search finds, and --explain searches nothing; leave one out")
    if write is not None and job.precision not in WRITTEN:
        wrong.append(f"--write with --precision {job.precision}: train computes in {' or '.join(WRITTEN)}")
    for option, path, suffix in (("--write", write, ".toml"), ("--html", html, ".html")):
        if path is None:
            continue
        if path.suffix.lower() != suffix:
            wrong.append(f"{option} {path}: it is named *{suffix}")
        elif not path.absolute().parent.is_dir():
            wrong.append(f"{option} {path}: there is no folder {path.parent}; make it first")
        elif path.is_dir():
            wrong.append(f"{option} {path}: that is a folder; name a file in it")
    if wrong:
        raise InputError(*wrong)
