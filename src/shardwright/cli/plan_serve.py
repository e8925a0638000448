"""shardwright plan serve: how to serve a model on a cluster, without a GPU, and why."""

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from shardwright.cli.common import (
    AsJson,
    argument,
    error_console,
    flag,
    option,
    output_problems,
    reading_verb,
    show,
    size_problems,
)
from shardwright.system.errors import InputError, nearest

if TYPE_CHECKING:
    from shardwright.cost.hardware import Cluster
    from shardwright.model.spec import ModelSpec
    from shardwright.serving.engines import ServingEngine
    from shardwright.serving.rates import Rates
    from shardwright.serving.search import ServingTask
    from shardwright.serving.setting import Degrees

_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0}
_RATES = {"s": 1.0, "min": 1 / 60, "h": 1 / 3600}


@dataclass(frozen=True)
class PlanServeOptions:
    """Arguments and options of `plan serve`."""

    run: Path | None = argument(None, "a run file, or the folder of a run, whose model is served", "RUN")
    model: str | None = option(
        None,
        "a preset, or another served model, such as llama-3.1-70b; or config.json of transformers, or sizes, "
        "as for plan",
        "NAME|FILE|SIZES",
    )
    cluster: str | None = option(None, "accelerators and how many, such as h100:8", "NAME:COUNT")
    input_len: int | None = option(None, "tokens of a prompt", "N")
    output_len: int | None = option(None, "tokens of an answer", "N")
    concurrency: int | None = option(None, "requests that are there at a time, over the whole cluster", "N")
    rate: str | None = option(None, "requests that arrive, such as 5/s or 300/min", "N/s")
    ttft: str | None = option(None, "limit of the time to the first token, such as 1s or 500ms", "TIME")
    tpot: str | None = option(None, "limit of the time of each further token, such as 40ms", "TIME")
    precision: str | None = option(
        None,
        "of weights and matmuls: bf16, fp16, fp8, fp32, nvfp4; or of weights alone, computed in 16 bits: "
        "mxfp4, int4 (AWQ, GPTQ), int8; if not given the format of the published weights (quantization_config of "
        "config.json, or the end of a name such as Qwen3-235B-A22B-FP8), otherwise bf16, and fp32 for generate",
        "NAME",
    )
    kv_precision: str | None = option(
        None,
        "of the cache of keys and values: bf16, fp16, fp8, fp32, int8; if not given the format of "
        "--precision, and 16 bits with --precision nvfp4, mxfp4, int4 or int8, or with the format of published "
        "weights",
        "NAME",
    )
    engine: str | None = option(
        None,
        "whose constants are taken, see docs/serving.md; if not given trtllm-1, and on a CPU that "
        "`shardwright measure` has measured generate",
        "NAME",
    )
    separate: bool = flag("also plan prefill and decode on separate accelerators")
    draft_tokens: int = option(0, "speculative decoding: tokens that are drafted in each pass", "N")
    acceptance: float | None = option(None, "share of drafted tokens that are accepted, 0 to 1", "X")
    draft_cost: float = option(0.05, "time of drafting one token, as a share of a pass of the model", "X")
    price: float | None = option(None, "of an accelerator for an hour: adds the cost of a million tokens", "X")
    explain: str | None = option(
        None, "instead of searching, show every formula for this layout, such as tp=4,batch=32", "LAYOUT"
    )
    hardware: Path | None = option(None, "your accelerators and clusters", "FILE.toml")
    top: int = option(10, "how many of the best layouts to list", "N")
    html: Path | None = option(None, "write one page with the Pareto curve", "FILE.html")
    json: AsJson = False


@reading_verb
def plan_serve(options: PlanServeOptions) -> None:
    """Find how to serve a model: which tp, pp, ep and dp attention, how many instances, how many requests at a time.

    Every layout that fills the cluster is priced with every batch that fits: memory of weights and cache, time of
    prefill and decode. The most promising ones are simulated, request by request, and have to keep the limits for 95 of
    100 requests.

    shardwright plan serve --model llama-3.1-70b --cluster h100:8 --input-len 2048 --output-len 512 --precision fp8

    shardwright plan serve quickstart/run --hardware mine.toml --cluster mine:2 --input-len 32 --output-len 64

    Exit codes: 0 found, 1 nothing fits or keeps the limits, 2 the input cannot be used.
    """
    task, name = read_task(options)
    if options.explain is not None:
        _explain(task, name, options)
        return
    from shardwright.serving.search import search, smaller_need
    from shardwright.serving.separate import separate
    from shardwright.serving.view import serving_document

    with error_console.status("pricing every layout"):
        result = search(task, options.top)
        apart = separate(task, result.layouts) if options.separate else None
        remedies = [] if result.options else list(smaller_need(task))
    document = serving_document(result, name, apart, options.separate, remedies)
    show(document, options.json, options.html)
    if not result.best:
        raise typer.Exit(1)


def read_task(options: PlanServeOptions) -> "tuple[ServingTask, str]":
    """Return the serving task and the model's name. Raises InputError with every problem at once."""
    from shardwright.cli.plan_model import find_machine
    from shardwright.serving.engines import GENERATE
    from shardwright.serving.search import ServingTask, Speculation
    from shardwright.serving.setting import Serving

    problems = _number_problems(options)
    ttft_s, tpot_s = (
        _read(problems, "--ttft", options.ttft, _SECONDS),
        _read(problems, "--tpot", options.tpot, _SECONDS),
    )
    rate = _read(problems, "--rate", options.rate, _RATES, per=True)
    name, model = _model(options, problems)
    machine = find_machine(options.cluster, options.hardware, problems)
    engine = _engine(options, machine, problems)
    precision, of_weights = options.precision or "bf16", "--precision"
    if options.precision is None and machine is not None and machine.accelerator.on_host:
        precision = "fp32"
    elif options.precision is None and model is not None:
        precision, of_weights = _published(options, problems), "--precision (of the published weights)"
    # Weights in blocks, in int8 or published in fp8 say nothing about the cache, which engines keep in 16 bits.
    own = {"fp32", "bf16", "fp16", *({"fp8"} if options.precision else ())}
    narrow = "bf16" if machine is None or "bf16" in machine.accelerator.flops_per_s else "fp16"
    kv = options.kv_precision or (precision if precision in own else narrow)
    precisions = {of_weights: precision} | ({"--kv-precision": kv} if options.kv_precision else {})
    way_out = "" if options.precision else f"; give --precision {narrow} to plan for weights converted to {narrow}"
    problems += [
        problem + way_out * problem.startswith(of_weights) for problem in _precision_problems(precisions, machine)
    ]
    if engine is GENERATE and options.separate:
        problems.append("--separate: generate reads prompts and decodes on the same ranks; leave it out")
    if problems or model is None or machine is None or options.input_len is None or options.output_len is None:
        raise InputError(*problems)
    rates = _rates(engine, machine)
    serving = Serving(model=model, cluster=machine, rates=rates, precision=precision, kv_precision=kv)
    speculation = Speculation()
    if options.draft_tokens:
        speculation = Speculation(options.draft_tokens, options.acceptance or 0.0, options.draft_cost)
    task = ServingTask(
        serving=serving, input_len=options.input_len, output_len=options.output_len, engine=engine,
        concurrency=options.concurrency, rate_per_s=rate, ttft_s=ttft_s or math.inf, tpot_s=tpot_s or math.inf,
        speculation=speculation, price_per_hour=options.price,
    )  # fmt: skip
    return task, name


def _published(options: PlanServeOptions, problems: list[str]) -> str:
    """Return the format in which the weights of the model were published. Adds problems to `problems`."""
    from shardwright.cli.plan_model import published_config
    from shardwright.serving.formats import FORMATS, format_of_config, format_of_name

    if options.model is None:
        return "bf16"
    config = published_config(options.model)
    if config is None:
        return format_of_name(options.model) or "bf16"
    stored = format_of_config(config)
    if stored is None:
        problems.append(
            f"--model {options.model}: its quantization_config is of no format that is planned for; give --precision; "
            f"valid: {', '.join(FORMATS)}"
        )
    return stored or "bf16"


def _engine(options: PlanServeOptions, machine: "Cluster | None", problems: list[str]) -> "ServingEngine":
    """Return the engine whose constants are used. Adds problems to `problems`."""
    from shardwright.serving.engines import ENGINES, GENERATE, USUAL

    chip = None if machine is None else machine.accelerator
    on_host = chip is not None and chip.on_host
    engines = {engine.name: engine for engine in (*ENGINES, GENERATE)}
    chosen = engines.get(options.engine or (GENERATE if on_host else USUAL).name)
    if chosen is None:
        hint = nearest(options.engine or "", engines)
        problems.append(f"--engine {options.engine}: not one that constants are known for; {hint}")
    elif chip is None:
        return chosen
    elif on_host and chosen is not GENERATE:
        problems.append(f"--engine {chosen.name}: that engine runs on GPUs, and {chip.name} is a CPU; valid: generate")
    elif on_host and (chip.rates is None or chip.rates.generation is None):
        problems.append(
            f"--hardware {options.hardware}: {chip.name} was measured without the passes of generate; measure it "
            f"again: shardwright measure --out {options.hardware} --overwrite"
        )
    elif chosen is GENERATE and not on_host:
        problems.append(
            f"--engine generate: it is priced on a CPU that `shardwright measure --out mine.toml` has measured, with "
            f"--hardware mine.toml --cluster mine:COUNT, and {chip.name} is none; valid here: "
            + ", ".join(engine.name for engine in ENGINES)
        )
    return chosen or USUAL


def _rates(engine: "ServingEngine", machine: "Cluster") -> "Rates":
    """Return the constants of an engine on a machine."""
    from shardwright.serving.engines import GENERATE
    from shardwright.serving.host import rates_of
    from shardwright.serving.rates import fitted

    if engine is GENERATE and machine.accelerator.rates is not None:
        return rates_of(machine.accelerator.rates)
    return fitted()[0].rates(engine.name, machine.accelerator.die)


def _model(options: PlanServeOptions, problems: list[str]) -> "tuple[str, ModelSpec | None]":
    """Return the model's name and the model. Adds problems to `problems`."""
    from shardwright.cli.plan_model import find_model, length_problems
    from shardwright.serving.models import named

    given = options.model or options.run
    if given is None:
        problems.append("--model is missing; name a preset, such as llama-3.1-70b, or a run")
        return "", None
    if options.model is not None and options.run is not None:
        problems.append(f"--model {options.model} and {options.run}: both name a model; leave one out")
    try:
        name, model = _run_model(given) if isinstance(given, Path) else find_model(given, options.input_len, named)
    except InputError as error:
        problems += error.problems
        return str(given), None
    lengths = {"--input-len": options.input_len or 0, "--output-len": options.output_len or 0}
    problems += length_problems(name, model, lengths)
    return name, model


def _run_model(path: Path) -> "tuple[str, ModelSpec]":
    """Return the model of a run file or of a run folder, named by its path."""
    from shardwright.config import load, load_kept
    from shardwright.runs.folder import RUN_FILE

    file = path / RUN_FILE if path.is_dir() else path
    if not file.exists():
        way_out = f"it has no {RUN_FILE}" if path.is_dir() else "there is no such file or folder"
        raise InputError(f"{path}: {way_out}; name a run file, the folder of a run, or a preset with --model")
    return str(path), (load_kept(path) if path.is_dir() else load(file)).spec()


def _precision_problems(precisions: dict[str, str], machine: "Cluster | None") -> list[str]:
    """Return the problems of `precisions`, name -> precision."""
    from shardwright.serving.formats import CACHE_BYTES, FORMATS, caches_on, weights_on

    problems = []
    for name, precision in precisions.items():
        of_cache = name == "--kv-precision"
        planned = CACHE_BYTES if of_cache else FORMATS
        if precision not in planned:
            problems.append(f"{name} {precision}: not one that is planned for; {nearest(precision, planned)}")
        elif machine is not None:
            has = (caches_on if of_cache else weights_on)(machine.accelerator)
            if precision not in has:
                known = ", ".join(has)
                problems.append(f"{name} {precision}: {machine.accelerator.name} has no {precision}; it has {known}")
    return problems


def _number_problems(options: PlanServeOptions) -> list[str]:
    sizes = {
        "--input-len": options.input_len,
        "--output-len": options.output_len,
        "--concurrency": options.concurrency,
        "--top": options.top,
    }
    problems = size_problems(sizes, needed=("--input-len", "--output-len"))
    if options.concurrency is not None and options.rate is not None:
        problems.append("--concurrency and --rate both set the number of requests; leave one out")
    if options.draft_tokens < 0:
        problems.append(f"--draft-tokens {options.draft_tokens}: a number of 0 or more is needed")
    if options.draft_tokens > 0 and options.acceptance is None:
        problems.append("--draft-tokens goes with --acceptance X, the share of drafted tokens that are accepted")
    if options.acceptance is not None and not 0 <= options.acceptance <= 1:
        problems.append(f"--acceptance {options.acceptance:g}: a share from 0 to 1 is needed")
    if options.acceptance is not None and options.draft_tokens == 0:
        problems.append("--acceptance goes with --draft-tokens N; give both, or leave it out")
    if not 0 <= options.draft_cost < math.inf:
        problems.append(f"--draft-cost {options.draft_cost:g}: a share of 0 or more is needed")
    if options.price is not None and not 0 < options.price < math.inf:
        problems.append(f"--price {options.price:g}: a price above 0 is needed")
    if options.explain is not None and options.html is not None:
        problems.append("--html shows what a search finds, and --explain searches nothing; leave one out")
    return problems + output_problems("--html", options.html, ".html")


def _read(
    problems: list[str], option: str, text: str | None, units: dict[str, float], per: bool = False
) -> float | None:
    """Return a number with a unit, or add the problem of a text that is not one to `problems`."""
    if text is None:
        return None
    form = re.fullmatch(rf"\s*(\d+(?:\.\d+)?|\.\d+)\s*{'/' if per else ''}\s*([a-z]+)\s*", text)
    if form is None or form[2] not in units or not float(form[1]) > 0:
        slash = "/" if per else ""
        problems.append(
            f"{option} {text}: a number above 0 with its unit is needed: {', '.join(f'5{slash}{u}' for u in units)}"
        )
        return None
    return float(form[1]) * units[form[2]]


def _explain(task: "ServingTask", name: str, options: PlanServeOptions) -> None:
    from shardwright.planner.explain import lines
    from shardwright.report.plan_view import formula_parts
    from shardwright.serving.explain import explain
    from shardwright.serving.view import task_notes
    from shardwright.view.document import VerbDocument

    degrees, batch = _layout(options.explain or "", task)
    entries = explain(task, degrees, batch)
    data = {"model": name, "layout": degrees._asdict(), "batch": batch, "formulas": [vars(e) for e in entries]}
    parts = [*task_notes(task, name, 1), *formula_parts(lines(entries))]
    show(VerbDocument(f"{name}: {degrees}", data, parts), options.json, None)


def _layout(text: str, task: "ServingTask") -> "tuple[Degrees, int]":
    """Return the layout and batch of --explain. Raises InputError with every problem."""
    from shardwright.serving.search import layouts
    from shardwright.serving.setting import Degrees

    values = {"tp": 1, "pp": 1, "dp": 1, "ep": 1, "batch": 1}
    problems = []
    for item in filter(None, (part.strip() for part in text.split(","))):
        key, _, value = item.partition("=")
        if key not in values or not value.isdecimal() or int(value) < 1:
            problems.append(f"--explain {item}: write key=number with {', '.join(values)}, such as tp=4,batch=32")
        else:
            values[key] = int(value)
    if problems:
        raise InputError(*problems)
    batch = values.pop("batch")
    degrees = Degrees(**values)
    every = [layout.degrees for layout in layouts(task.serving.model, task.serving.cluster)]
    if degrees not in every:
        raise InputError(
            f"--explain {text}: not a layout of {task.serving.cluster.name}; valid: "
            + "; ".join(map(str, every[:12])) + ("; ..." if len(every) > 12 else "")
        )  # fmt: skip
    return degrees, batch
