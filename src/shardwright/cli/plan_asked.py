"""The request of `shardwright plan`, from options and a run file, and its problems."""

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardwright.cli.common import AsJson, ConfigurationFiles, wrong_place, wrong_sizes
from shardwright.cli.plan_model import find_model
from shardwright.cost.formats import FORMATS
from shardwright.system.errors import InputError, LayoutError, nearest

if TYPE_CHECKING:
    from shardwright.config import RunConfig
    from shardwright.cost.hardware import Cluster
    from shardwright.cost.job import Job
    from shardwright.planner.choice import Choice, PricedLayout
    from shardwright.planner.space import FixedChoices

PRECISIONS = tuple(FORMATS)
WITH_MEASURED = (
    *("target", "cluster", "hardware", "link", "network"),
    *("document_tokens", "memory_margin", "measured", "json"),
)
"""The options that are valid with --measured: they describe the run and the machine that it ran on."""


@dataclass(frozen=True)
class PlanOptions:
    """Arguments and options of `plan`."""

    target: Annotated[
        str | None,
        typer.Argument(
            metavar="RUN.toml|evaluate",
            help="a run file, whose model, batch and precision are taken; or the word evaluate, to compare predictions "
            "with the measured runs of a table",
        ),
    ] = None
    runs: Annotated[
        Path | None,
        typer.Argument(
            metavar="RUNS.csv",
            help="evaluate only: a table of measured runs; those that come with shardwright if not given",
        ),
    ] = None
    from_: ConfigurationFiles = None
    model: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|SIZES",
            help="a preset, such as llama-3.1-70b; config.json of transformers; or a few sizes, such as "
            "n_layers=32,d_model=4096,n_heads=32,d_ffn=11008,vocab_size=32000, and any other key of a run file's model "
            "section, such as n_kv_heads=8,moe.n_experts=8,moe.top_k=2,moe.d_ffn=4096",
        ),
    ] = None
    cluster: Annotated[
        str | None,
        typer.Option(
            metavar="NAME:COUNT",
            help="accelerators and how many, such as h100:64; h100:64/4@800Gb: 4 a node, 800 Gbit/s each to the others",
        ),
    ] = None
    global_batch: Annotated[int | None, typer.Option(metavar="N", help="sequences of a step, over all ranks")] = None
    seq_len: Annotated[int | None, typer.Option(metavar="N", help="tokens of a sequence")] = None
    document_tokens: Annotated[
        float | None,
        typer.Option(
            metavar="N",
            help="attention within documents: the mean length of a token's document, sum L^2 / sum L over documents of "
            "L tokens, as `data inspect --seq-len` prints; from the data of a run file with data.attention='document' "
            "if not given",
        ),
    ] = None
    precision: Annotated[
        str | None,
        typer.Option(metavar="NAME", help=f"type of the matmuls: {', '.join(PRECISIONS)}; bf16 if not given"),
    ] = None
    stack: Annotated[
        str | None,
        typer.Option(
            metavar="NAME[,KEY=VALUE]",
            help="price another training software, such as megatron-core,date=2025-10,cuda_graphs=none; keys as the "
            "columns of docs/measured-runs.md: date, attention, cuda_graphs, gather_dtype, fused_loss, moe_dispatch",
        ),
    ] = None
    link: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="links inside a node as those of this accelerator, such as h100-pcie"),
    ] = None
    network: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="another kind of network between nodes, at the same line rate, such as roce"),
    ] = None
    compare: Annotated[
        list[str] | None,
        typer.Option(
            metavar="CLUSTER",
            help="search on this cluster too, such as h200:64, or on the same one with link=NAME or network=NAME, and "
            "print a line for each; may be repeated",
        ),
    ] = None
    hardware: Annotated[
        Path | None, typer.Option(metavar="FILE.toml", help="your accelerators, networks and clusters")
    ] = None
    host_memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="memory of each node's host, such as 2TB, which limits what layouts keep there; that of the hardware "
            "file if not given",
        ),
    ] = None
    memory_margin: Annotated[
        float, typer.Option(metavar="X", help="share of the accelerator's memory to keep free")
    ] = 0.1
    top: Annotated[int, typer.Option(metavar="N", help="how many of the best layouts to list")] = 10
    explain: Annotated[
        str | None,
        typer.Option(
            metavar="LAYOUT|RUN.toml",
            help="instead of searching, show every formula for this layout, such as "
            "tp=8,pp=4,micro_batch=1; keys of a run file's layout section; or for the layout of a run file",
        ),
    ] = None
    measured: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN_FOLDER",
            help="instead of searching, compare the plan of the run file's layout with its run in this folder, term by "
            "term",
        ),
    ] = None
    fix: Annotated[
        str | None,
        typer.Option(
            metavar="KEYS",
            help="search only layouts with these values, such as tp=8,pp=1; keys as for --explain",
        ),
    ] = None
    prefer: Annotated[
        str | None,
        typer.Option(
            metavar="fastest|simplest|cheapest",
            help="which layout is recommended: fastest; simplest, fewest axes at most 25 % slower; cheapest, fewest "
            "accelerator-hours on all accelerators or a part of them; if not given, of those that tie with the "
            "fastest, one with headroom in memory and the fewest axes and settings",
        ),
    ] = None
    budget_tokens: Annotated[
        float | None,
        typer.Option(metavar="N", help="tokens of the whole run, such as 15e12: adds days and accelerator-hours"),
    ] = None
    write: Annotated[
        Path | None, typer.Option(metavar="FILE.toml", help="write the layout as a run file for train and verify")
    ] = None
    overwrite: Annotated[bool, typer.Option("--overwrite", help="with --write, replace a file that exists")] = False
    html: Annotated[Path | None, typer.Option(metavar="FILE.html", help="write one page with pictures")] = None
    json: AsJson = False


@dataclass(frozen=True)
class PlanRequest:
    """The job to plan. `job`: with the rates of its machine if they were measured; `anywhere`: the same without them;
    `name`: the name of the model for people; `config`: the run file, if there is one; `explained`: the layout of
    --explain; `fixed`: the values of --fix."""

    job: "Job"
    anywhere: "Job"
    name: str
    config: "RunConfig | None"
    explained: "Choice | None"
    fixed: "FixedChoices | None"


def read_request(options: PlanOptions) -> PlanRequest:
    """Return the request of the options and the run file. Raises InputError with every problem of both at once."""
    target, model, cluster = options.target, options.model, options.cluster
    explains_file = options.explain is not None and options.explain.endswith(".toml")
    if explains_file and target is None and model is None:
        target = options.explain
    global_batch, seq_len, precision = options.global_batch, options.seq_len, options.precision
    wrong = wrong_options(options) + _wrong_measured(options)
    if options.stack is not None and options.write is not None:
        wrong.append(
            f"--stack {options.stack} with --write: a run file is for shardwright's own software; leave one out"
        )
    if options.runs is not None:
        wrong.append(
            f"{options.runs}: a second argument goes with evaluate alone: shardwright plan evaluate {options.runs}"
        )
    if target is not None and model is not None:
        wrong.append(f"--model {model} and {target}: both name a model; leave one out")
    config = None
    if target is not None and model is None and (config := _read(target, wrong)) is not None:
        global_batch = config.batch.global_batch if global_batch is None else global_batch
        seq_len = config.batch.seq_len if seq_len is None else seq_len
        precision = config.precision.planned if precision is None else precision
    precision = (precision or "bf16").lower()
    if target is None and model is None and options.measured is None:
        wrong.append("--model is missing; name a preset, such as llama-3.1-70b, give sizes, or name a run file")
    if cluster is None:
        wrong.append("--cluster is missing; give accelerators and how many, such as h100:64")
    sizes = {"--global-batch": global_batch, "--seq-len": seq_len}
    wrong += wrong_sizes(sizes, needed=sizes if target is None and options.measured is None else ())
    document_tokens = _document_tokens(options, config, seq_len, wrong)
    if precision not in PRECISIONS:
        what = "precision.compute=" if config is not None and config.precision.planned == precision else "--precision "
        wrong.append(f"{what}{precision}: not one that is planned for; {nearest(precision, PRECISIONS)}")

    from shardwright.cost.job import Job
    from shardwright.cost.machine import on_machine
    from shardwright.model.presets import resolve
    from shardwright.planner.choice import read
    from shardwright.planner.run_file import untrained
    from shardwright.planner.space import read_fixed

    if options.write is not None and precision in PRECISIONS:
        wrong += untrained(precision)
    spec = found = explained = fixed = None
    try:
        explained = None if options.explain is None or explains_file else read(options.explain)
    except InputError as error:
        wrong += error.problems
    try:
        fixed = None if options.fix is None else read_fixed(options.fix)
    except InputError as error:
        wrong += error.problems
    try:
        if config is not None:
            spec = config.model.spec()
        elif model is not None:
            model, spec = find_model(model, seq_len, lambda name: (name, resolve(name)))
    except InputError as error:
        wrong += error.problems
    try:
        found = None if cluster is None else changed_cluster(cluster, options, options.link, options.network)
    except InputError as error:
        wrong += error.problems
    wrong += [] if found is None or precision not in PRECISIONS else no_peak(found, precision)
    if wrong or spec is None or found is None or global_batch is None or seq_len is None:
        raise InputError(*wrong)
    name = model if model is not None else _model_name(config, spec)
    values: dict[str, Any] = {
        "model": spec,
        "cluster": found,
        "seq_len": seq_len,
        "global_batch": global_batch,
        "precision": precision,
        "document_tokens": document_tokens,
    }
    if config is None:
        job = Job(**values)
    else:
        from shardwright.config.settle import job_of

        job = replace(job_of(config), **values)
    if options.stack is not None:
        from shardwright.planner.software import read_stack

        job = replace(job, stack=read_stack(options.stack, job))
    machine = on_machine(job)
    if explains_file:
        explained = _choice_of_file(
            str(options.explain), config if options.explain == target else None, machine, options
        )
    return PlanRequest(machine, job, name, config, explained, fixed)


def _choice_of_file(path: str, config: "RunConfig | None", job: "Job", options: PlanOptions) -> "Choice":
    """Return the layout of the run file given to --explain; `config`: the file if it was read. Raises InputError."""
    from shardwright.config import load
    from shardwright.planner.search import limit_bytes

    return choice_of_run(config or load(path), job, limit_bytes(job, options.memory_margin))


def changed_cluster(text: str, options: PlanOptions, link: str | None, network: str | None) -> "Cluster":
    """Return a cluster, with another accelerator's links and another network if given, and named after the changes.
    Raises InputError for names that are in no hardware file."""
    from shardwright.cost.hardware import accelerator, cluster

    found = cluster(text, options.hardware)
    try:
        if link is not None:
            accelerator(link, options.hardware)
            found = replace(
                found, inside=cluster(f"{link}:{found.node_size}/{found.node_size}", options.hardware).inside
            )
    except InputError as error:
        raise InputError(f"--link {link}: name an accelerator that has the link, such as h100-pcie; {error}") from None
    try:
        if network is not None:
            found = found.on(network, options.hardware)
    except InputError as error:
        raise InputError(f"--network {network}: {error}") from None
    try:
        if options.host_memory is not None:
            found = found.with_host_memory(options.host_memory)
    except InputError as error:
        raise InputError(f"--host-memory {options.host_memory}: {error}") from None
    changes = [f"{name}={value}" for name, value in (("link", link), ("network", network)) if value is not None]
    return replace(found, name=", ".join([found.name, *changes]))


def no_peak(cluster: "Cluster", precision: str) -> list[str]:
    """Return the problem of a precision if the peak of the cluster's accelerator in it is not known."""
    known = cluster.accelerator.flops_per_s
    if FORMATS[precision].peak in known:
        return []
    name = cluster.accelerator.name
    return [f"--precision {precision}: the peak of {name} in it is not known; known: {', '.join(known)}"]


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


def _read(run_file: str, wrong: list[str]) -> "RunConfig | None":
    """Return a run file, or add its problems to `wrong` and return None."""
    if not Path(run_file).exists() and not run_file.endswith(".toml"):
        from shardwright.model.presets import PRESETS

        model = f"; a preset is named with --model {run_file}" if run_file in PRESETS else ""
        wrong.append(f"{run_file}: no such run file{model or '; give one, or the word evaluate and a table of runs'}")
        return None
    from shardwright.config import load

    try:
        return load(run_file)
    except InputError as error:
        wrong += error.problems
        return None


def _document_tokens(
    options: PlanOptions, config: "RunConfig | None", seq_len: int | None, wrong: list[str]
) -> float | None:
    """Return the mean length of a token's document, from the option or from the run file's data as mixed at the start;
    None if attention is over whole sequences. Adds problems to `wrong`."""
    given = options.document_tokens
    if given is not None:
        if seq_len is not None and not 1 <= given <= seq_len:
            wrong.append(
                f"--document-tokens {given:g} is not between 1 and the seq_len={seq_len} tokens of a sequence, which "
                f"cuts longer documents"
            )
        return given
    if config is None or config.data.attention != "document" or seq_len is None or seq_len < 1:
        return None
    from shardwright.config.mixture import mixtures_of, sources_of
    from shardwright.data.samples import attended_tokens, packed_lengths
    from shardwright.data.shards import open_split

    try:
        splits = [open_split(source.path, "train") for source in sources_of(config.data)]
    except InputError as error:
        wrong += [
            f"{problem}; or give the mean length of a document by --document-tokens" for problem in error.problems
        ]
        return None
    lengths = [packed_lengths(split.document_lengths(), seq_len) for split in splits]
    if not all(map(len, lengths)):
        return None
    weights = mixtures_of(config.data)[0].weights
    parts = zip(weights, map(attended_tokens, lengths), strict=True)
    return sum(weight * tokens for weight, tokens in parts) / sum(weights)


def _model_name(config: "RunConfig | None", spec: Any) -> str:
    from shardwright.model.presets import PRESETS

    assert config is not None
    preset = config.model.preset
    return preset if spec == PRESETS[preset] else f"{preset}, changed"


def wrong_options(options: PlanOptions) -> list[str]:
    """Return the problems of the options that do not describe the job."""
    from shardwright.planner.search import margin_problems
    from shardwright.planner.simplicity import PREFERENCES

    target, write, html, budget_tokens = options.target, options.write, options.html, options.budget_tokens
    wrong = margin_problems(options.memory_margin) + wrong_sizes({"--top": options.top})
    if budget_tokens is not None and not 0 < budget_tokens < float("inf"):
        wrong.append(f"--budget-tokens {budget_tokens:g}: a number of tokens above 0 is needed, such as 15e12")
    if options.prefer is not None and options.prefer not in PREFERENCES:
        wrong.append(f"--prefer {options.prefer}: not a preference; {nearest(options.prefer, PREFERENCES)}")
    if options.explain is not None and options.prefer is not None:
        wrong.append(
            "--prefer says which layout of a search is recommended, and --explain searches nothing; leave one out"
        )
    if options.explain is not None and html is not None:
        wrong.append("--html shows what a search finds, and --explain searches nothing; leave one out")
    if options.explain is not None and options.fix is not None:
        wrong.append("--fix restricts what is searched, and --explain searches nothing; leave one out")
    alone = [
        f"--{name}" for name in ("explain", "write", "html", "budget_tokens") if getattr(options, name) is not None
    ]
    if options.compare and alone:
        others = " and ".join(alone).replace("_", "-")
        wrong.append(f"--compare prints a line for each cluster; leave out {others}, or plan one cluster with them")
    if options.overwrite and write is None:
        wrong.append("--overwrite goes with --write FILE.toml; give both, or leave it out")
    if write is not None and target is not None and write.resolve() == Path(target).resolve():
        wrong.append(f"--write {write}: that is the run file that is read; name another")
    elif write is not None and write.is_file() and not options.overwrite:
        wrong.append(f"--write {write}: the file exists; name another, or add --overwrite to replace it")
    wrong += wrong_place("--write", write, {".toml": "it is named"})
    return wrong + wrong_place("--html", html, {".html": "it is named"})


def _wrong_measured(options: PlanOptions) -> list[str]:
    """Return the problems of the options given with --measured."""
    if options.measured is None:
        return []
    wrong = []
    if options.target is None:
        wrong.append(
            f"--measured {options.measured}: name the run file whose plan it is compared with, such as "
            f"{options.measured / 'run.toml'}"
        )
    given = [each.name for each in fields(options) if getattr(options, each.name) != each.default]
    if others := " and ".join(f"--{name.replace('_', '-')}" for name in given if name not in WITH_MEASURED):
        wrong.append(f"--measured compares the run file as it is with its run; leave out {others}")
    return wrong
