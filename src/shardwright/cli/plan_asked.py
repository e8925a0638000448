"""The request of `shardwright plan`, from options and a run file, and its problems."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwright.cli.common import size_problems
from shardwright.cli.plan_goal import check_goal, training_goal
from shardwright.cli.plan_model import find_model
from shardwright.cli.plan_options import PRECISIONS, PlanOptions, measured_option_problems, plan_option_problems
from shardwright.cost.formats import FORMATS
from shardwright.system.errors import InputError, LayoutError, collecting, nearest

if TYPE_CHECKING:
    from shardwright.config import RunConfig
    from shardwright.cost.hardware import Cluster
    from shardwright.cost.job import Job
    from shardwright.model.spec import ModelSpec
    from shardwright.planner.choice import Choice, PricedLayout
    from shardwright.planner.space import FixedChoices
    from shardwright.planner.whole_run import TrainingGoal


@dataclass(frozen=True)
class PlanRequest:
    """The job to plan. `job`: with the rates of its machine if they were measured; `anywhere`: the same without them;
    `name`: the name of the model for people; `given`: the run file, if there is one; `config`: with the stage of its
    batch that needs most memory; `explained`: the layout of --explain; `fixed`: the values of --fix; `goal`: the whole
    run of --budget-tokens."""

    job: "Job"
    anywhere: "Job"
    name: str
    config: "RunConfig | None"
    given: "RunConfig | None"
    explained: "Choice | None"
    fixed: "FixedChoices | None"
    goal: "TrainingGoal | None"


def read_request(options: PlanOptions) -> PlanRequest:
    """Return the request of the options and the run file. Raises InputError with every problem of both at once."""
    target, model, cluster = options.target, options.model, options.cluster
    explains_file = options.explain is not None and options.explain.endswith(".toml")
    if explains_file and target is None and model is None:
        target = options.explain
    global_batch, seq_len, precision = options.global_batch, options.seq_len, options.precision
    problems = [*plan_option_problems(options), *measured_option_problems(options), *_contradictions(options, target)]
    config = given = None
    if target is not None and model is None and (given := _read(target, problems)) is not None:
        from shardwright.config.settle import fullest_stage_config

        config = fullest_stage_config(given)
        global_batch = config.batch.global_batch if global_batch is None else global_batch
        seq_len = config.batch.seq_len if seq_len is None else seq_len
        precision = config.precision.planned if precision is None else precision
    precision = (precision or "bf16").lower()
    if target is None and model is None and options.measured is None:
        problems.append("--model is missing; name a preset, such as llama-3.1-70b, give sizes, or name a run file")
    if cluster is None:
        problems.append("--cluster is missing; give accelerators and how many, such as h100:64")
    sizes = {"--global-batch": global_batch, "--seq-len": seq_len}
    problems += size_problems(sizes, needed=sizes if target is None and options.measured is None else ())
    document_tokens = _document_tokens(options, config, seq_len, problems)
    if precision not in PRECISIONS:
        what = "precision.compute=" if config is not None and config.precision.planned == precision else "--precision "
        problems.append(f"{what}{precision}: not one that is planned for; {nearest(precision, PRECISIONS)}")

    from shardwright.cost.machine import on_machine
    from shardwright.model.presets import resolve
    from shardwright.planner.choice import read
    from shardwright.planner.run_file import untrained
    from shardwright.planner.space import read_fixed

    if options.write is not None and precision in PRECISIONS:
        problems += untrained(precision)
    spec = planned_cluster = explained = fixed = goal = None
    with collecting(problems):
        explained = None if options.explain is None or explains_file else read(options.explain)
    with collecting(problems):
        fixed = None if options.fix is None else read_fixed(options.fix)
    with collecting(problems):
        goal = training_goal(options, given)
    with collecting(problems):
        if config is not None:
            spec = config.spec()
        elif model is not None:
            model, spec = find_model(model, seq_len, lambda name: (name, resolve(name)))
    with collecting(problems):
        planned_cluster = None if cluster is None else changed_cluster(cluster, options, options.link, options.network)
    problems += [] if planned_cluster is None or precision not in PRECISIONS else no_peak(planned_cluster, precision)
    with collecting(problems):
        spec = None if spec is None else with_adapters(spec, options.lora)
    if problems or spec is None or planned_cluster is None or global_batch is None or seq_len is None:
        raise InputError(*problems)
    name = model if model is not None else _model_name(config, spec)
    values: dict[str, Any] = {
        "model": spec,
        "cluster": planned_cluster,
        "seq_len": seq_len,
        "global_batch": global_batch,
        "precision": precision,
        "document_tokens": document_tokens,
    }
    job = _job(options, config, values)
    machine = on_machine(job)
    if explains_file:
        explained = _choice_of_file(
            str(options.explain), config if options.explain == target else None, machine, options
        )
    if options.budget_tokens is not None:  # not for stages of a run file, whose plan nobody may have asked for
        check_goal(goal, machine)
    return PlanRequest(machine, job, name, config, given, explained, fixed, goal)


def _contradictions(options: PlanOptions, target: str | None) -> Iterator[str]:
    """Yield the problems of options that exclude each other. `target`: the run file."""
    if options.stack is not None and options.write is not None:
        yield f"--stack {options.stack} with --write: a run file is for shardwright's own software; leave one out"
    if options.runs is not None:
        yield f"{options.runs}: a second argument goes with evaluate alone: shardwright plan evaluate {options.runs}"
    if target is not None and options.model is not None:
        yield f"--model {options.model} and {target}: both name a model; leave one out"


def _job(options: PlanOptions, config: "RunConfig | None", values: dict[str, Any]) -> "Job":
    """Return the job of `values`, of the run file and of the options. Raises InputError."""
    from shardwright.cost.job import Job
    from shardwright.planner.run_file import fp8_problems

    if config is None:
        job = Job(**values)
    else:
        from shardwright.config.settle import job_of

        job = replace(job_of(config), **values, reference_sequences=_reference_sequences(config, values["seq_len"]))
    if options.expert_load is not None:
        from shardwright.cost.expert_load import read_expert_load

        job = replace(job, expert_load=read_expert_load(options.expert_load, job.model))
    if options.stack is not None:
        from shardwright.planner.software import read_stack

        job = replace(job, stack=read_stack(options.stack, job))
    if problems := fp8_problems(job):
        raise InputError(*(f"--precision {job.precision}: {problem}" for problem in problems))
    return job


def with_adapters(spec: "ModelSpec", lora: str | None) -> "ModelSpec":
    """Return the model with the adapters of --lora. Raises InputError for adapters that the model cannot have."""
    if lora is None:
        return spec
    from shardwright.model.by_sizes import lora_of_text

    spec = replace(spec, lora=lora_of_text(lora))
    if problems := spec.lora_problems():
        raise InputError(*(f"--lora: {problem}" for problem in problems))
    return spec


def _choice_of_file(path: str, config: "RunConfig | None", job: "Job", options: PlanOptions) -> "Choice":
    """Return the layout of the run file given to --explain; `config`: the file if it was read. Raises InputError."""
    from shardwright.config import load
    from shardwright.config.settle import fullest_stage_config
    from shardwright.planner.search import limit_bytes

    return choice_of_run(config or fullest_stage_config(load(path)), job, limit_bytes(job, options.memory_margin))


def changed_cluster(text: str, options: PlanOptions, link: str | None, network: str | None) -> "Cluster":
    """Return a cluster, with another accelerator's links and another network if given, and named after the changes.
    Raises InputError for names that are in no hardware file."""
    from shardwright.cost.hardware import accelerator, cluster

    machine = cluster(text, options.hardware)
    try:
        if link is not None:
            accelerator(link, options.hardware)
            machine = replace(
                machine, inside=cluster(f"{link}:{machine.node_size}/{machine.node_size}", options.hardware).inside
            )
    except InputError as error:
        raise InputError(f"--link {link}: name an accelerator that has the link, such as h100-pcie; {error}") from None
    try:
        if network is not None:
            machine = machine.on(network, options.hardware)
    except InputError as error:
        raise InputError(f"--network {network}: {error}") from None
    try:
        if options.host_memory is not None:
            machine = machine.with_host_memory(options.host_memory)
    except InputError as error:
        raise InputError(f"--host-memory {options.host_memory}: {error}") from None
    changes = [f"{name}={value}" for name, value in (("link", link), ("network", network)) if value is not None]
    return replace(machine, name=", ".join([machine.name, *changes]))


def no_peak(cluster: "Cluster", precision: str) -> list[str]:
    """Return the problem of a precision if the peak of the cluster's accelerator in it is not known."""
    problem = cluster.accelerator.peak_problem(FORMATS[precision].peak)
    return [] if problem is None else [f"--precision {precision}: {problem}"]


def choice_of_run(config: "RunConfig", job: "Job", limit_bytes: float) -> "Choice":
    """Return the layout and micro-batch of the run file. recompute='auto' becomes the least recomputation that fits, or
    full if nothing fits."""
    from shardwright.config.settle import needs_memory
    from shardwright.cost.step import estimate
    from shardwright.planner.choice import Choice
    from shardwright.planner.recomputation import least_recomputation

    layout, micro_batch = config.layout.layout(), config.batch.micro_batch
    if not needs_memory(config):
        return Choice(layout, micro_batch)
    try:
        estimate(job, layout, micro_batch)
        return Choice(least_recomputation(job, layout, micro_batch, limit_bytes).layout, micro_batch)
    except LayoutError:
        return Choice(layout.changed(recompute="full"), micro_batch)


def priced_of(job: "Job", choice: "Choice") -> "PricedLayout":
    """Return the priced layout. Raises LayoutError with every reason why the layout cannot run this job on this
    cluster, or cannot be priced."""
    from shardwright.cost.step import estimate
    from shardwright.planner.choice import PricedLayout

    estimate(job, choice.layout, choice.micro_batch)
    return PricedLayout.from_choice(job, choice)


def _read(run_file: str, problems: list[str]) -> "RunConfig | None":
    """Return a run file, or add its problems to `problems` and return None."""
    if not Path(run_file).exists() and not run_file.endswith(".toml"):
        from shardwright.model.presets import PRESETS

        model = f"; a preset is named with --model {run_file}" if run_file in PRESETS else ""
        problems.append(
            f"{run_file}: no such run file{model or '; give one, or the word evaluate and a table of runs'}"
        )
        return None
    from shardwright.config import load

    try:
        return load(run_file)
    except InputError as error:
        problems += error.problems
        return None


def _document_tokens(
    options: PlanOptions, config: "RunConfig | None", seq_len: int | None, problems: list[str]
) -> float | None:
    """Return the mean length of a token's document, from the option or from the run file's data as mixed at the start;
    None if attention is over whole sequences. Adds problems to `problems`."""
    given = options.document_tokens
    if given is not None:
        if seq_len is not None and not 1 <= given <= seq_len:
            problems.append(
                f"--document-tokens {given:g} is not between 1 and the seq_len={seq_len} tokens of a sequence, which "
                f"cuts longer documents"
            )
        return given
    if config is None or config.data.attention != "document" or seq_len is None or seq_len < 1:
        return None
    from shardwright.config.mixture import mixtures_of, sources_of
    from shardwright.data.samples import samples_of
    from shardwright.data.shards import open_split
    from shardwright.split.documents import attended_tokens

    try:
        splits = [open_split(source.path, "train", config.data.token_cache) for source in sources_of(config.data)]
    except InputError as error:
        problems += [
            f"{problem}; or give the mean length of a document by --document-tokens" for problem in error.problems
        ]
        return None
    try:
        lengths = [samples_of(split, config.data, seq_len).document_lengths() for split in splits]
    except InputError:  # too little data for a sequence
        return None
    weights = mixtures_of(config.data)[0].weights
    parts = zip(weights, map(attended_tokens, lengths), strict=True)
    return sum(weight * tokens for weight, tokens in parts) / sum(weights)


def _reference_sequences(config: "RunConfig", seq_len: int) -> int:
    """Return the number of sequences that the reference scores before the first step; 0 if there is no reference, or
    the data cannot be read."""
    if not config.preference.has_reference:
        return 0
    from shardwright.config.mixture import sources_of
    from shardwright.data.samples import samples_of
    from shardwright.data.shards import open_split

    n = 0
    for split in ("train", "validation") if config.evaluation.samples else ("train",):
        for source in sources_of(config.data):
            with suppress(InputError):
                n += len(samples_of(open_split(source.path, split, config.data.token_cache), config.data, seq_len))
    return n


def _model_name(config: "RunConfig | None", spec: Any) -> str:
    from shardwright.model.presets import PRESETS

    assert config is not None
    preset = config.model.preset
    return preset if replace(spec, lora=None) == PRESETS[preset] else f"{preset}, changed"
