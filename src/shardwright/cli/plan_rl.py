"""shardwright plan rl: the time of a step of GRPO, the split of the accelerators and both layouts."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from shardwright.cli.common import (
    AsJson,
    error_console,
    flag,
    option,
    output_problems,
    reading_verb,
    show,
    size_problems,
)
from shardwright.cli.plan_options import PRECISIONS
from shardwright.system.errors import InputError, collecting, nearest

if TYPE_CHECKING:
    from shardwright.rl.answers import AnswerLengths
    from shardwright.rl.step import RLTask


MOST_ANSWERS = 100_000
MOST_STEPS = 64


@dataclass(frozen=True)
class PlanRLOptions:
    """Options of `plan rl`."""

    model: str | None = option(None, "as for plan, such as llama-3.1-8b", "NAME|FILE|SIZES")
    cluster: str | None = option(None, "accelerators and how many, such as h100:8", "NAME:COUNT")
    prompts: int | None = option(None, "prompts of a step", "N")
    group: int | None = option(None, "answers to each prompt", "N")
    input_len: int | None = option(None, "mean tokens of a prompt", "N")
    output_mean: int | None = option(None, "mean tokens of an answer", "N")
    output_p95: int | None = option(
        None, "tokens that 95 of 100 answers do not exceed; if not given, a usual tail", "N"
    )
    output_max: int | None = option(None, "tokens at which an answer is cut", "N")
    updates: int = option(1, "optimizer steps for the answers of a step", "N")
    off_policy: int = option(0, "steps by which answers may be older than the trained policy; 0: on policy", "K")
    generate_on: int | None = option(
        None, "accelerators that only generate; 0: all train too. If not given, searched in up to 8 parts", "N"
    )
    no_reference: bool = flag("no reference model scores the answers (no KL penalty)")
    precision: str = option("bf16", "of matmuls in training, as for plan", "NAME")
    generation_precision: str = option("bf16", "of weights in generation", "NAME")
    engine: str = option("vllm", "the engine that generates, as for plan serve", "NAME")
    stack: str | None = option(None, "the software that trains, as for plan, such as megatron-core", "NAME")
    hardware: Path | None = option(None, "your accelerators and clusters", "FILE.toml")
    lora: str | None = option(
        None, "train and send adapters instead of all weights, as for plan: rank=16", "rank=N[,KEY=VALUE]"
    )
    explain: bool = flag("also print every formula of the fastest step with its numbers")
    html: Path | None = option(None, "write one page", "FILE.html")
    json: AsJson = False


@reading_verb
def plan_rl(options: PlanRLOptions) -> None:
    """Find the fastest way to run a step of GRPO: which accelerators generate, which train, and both layouts.

    A step generates answers of different lengths, scores them by the policy and a reference, trains the policy, and
    sends its weights to the engine. Priced are shared accelerators, and separate ones: up to 7 splits of the cluster in
    equal parts, of whole nodes if it has several. --generate-on prices any other split.

    shardwright plan rl --model llama-3.1-8b --cluster h100:8 --prompts 64 --group 16 --input-len 256 --output-mean 1000
    --output-max 4096

    Exit codes: 0 found, 1 nothing fits, 2 the input cannot be used.
    """
    task, name = read_task(options)
    from shardwright.report.rl_view import rl_document
    from shardwright.rl.search import search
    from shardwright.system.control_groups import usable_cores

    with error_console.status("pricing splits of the accelerators"):
        result = search(task, options.generate_on, usable_cores())
    show(rl_document(result, name, options.explain), options.json, options.html)
    if not result.best:
        raise typer.Exit(1)


def read_task(options: PlanRLOptions) -> "tuple[RLTask, str]":
    """Return the step to price and the model's name. Raises InputError with every problem at once."""
    from shardwright.cli.plan_asked import no_peak, with_adapters
    from shardwright.cli.plan_model import find_machine, find_model, length_problems
    from shardwright.cost.job import Job
    from shardwright.planner.software import read_stack
    from shardwright.rl.step import RLTask
    from shardwright.serving.engines import ENGINES
    from shardwright.serving.formats import weights_on
    from shardwright.serving.models import named
    from shardwright.serving.rates import fitted
    from shardwright.serving.setting import Serving

    problems = _number_problems(options)
    spec, name = None, options.model or ""
    lengths = {"--input-len": options.input_len or 0, "--output-max": options.output_max or 0}
    length, engines = sum(lengths.values()), {engine.name: engine for engine in ENGINES}
    problems += [
        f"{option} {value}: not one that {why}; {nearest(value, known)}"
        for option, value, known, why in (
            ("--engine", options.engine, engines, "constants are known for"),
            ("--precision", options.precision, PRECISIONS, "is planned for"),
        )
        if value not in known
    ]
    with collecting(problems):
        if options.model is None:
            problems.append("--model is missing; name a preset, such as llama-3.1-8b")
        else:
            name, spec = find_model(options.model, length, named)
            spec = with_adapters(spec, options.lora)
    machine = find_machine(options.cluster, options.hardware, problems)
    if machine is not None:
        if options.precision in PRECISIONS:
            problems += no_peak(machine, options.precision)
        weights = weights_on(machine.accelerator)
        if options.generation_precision not in weights:
            problems.append(f"--generation-precision {options.generation_precision}: valid here: {', '.join(weights)}")
        problems += _split_problems(options, machine.size)
    problems += [] if spec is None else length_problems(name, spec, lengths)
    with collecting(problems):
        answers = None if problems else _answers(options)
    if problems or spec is None or machine is None or answers is None:
        raise InputError(*problems)
    assert options.prompts is not None
    assert options.group is not None
    assert options.input_len is not None
    job = Job(model=spec, cluster=machine, seq_len=length, global_batch=1, precision=options.precision)
    if options.stack is not None:
        job = replace(job, stack=read_stack(options.stack, job))
    rates = fitted()[0].rates(options.engine, machine.accelerator.die)
    serving = Serving(
        model=replace(spec, lora=None), cluster=machine, rates=rates, precision=options.generation_precision
    )
    task = RLTask(
        job=job, serving=serving, engine=engines[options.engine], prompt_len=options.input_len, answers=answers,
        n_answers=options.prompts * options.group, n_updates=options.updates, off_policy_steps=options.off_policy,
        reference=not options.no_reference,
    )  # fmt: skip
    return task, name


def _answers(options: PlanRLOptions) -> "AnswerLengths":
    """Return the distribution of lengths. Raises InputError for a tail that it cannot have."""
    from shardwright.rl.answers import AnswerLengths

    assert options.output_mean is not None
    assert options.output_max is not None
    if options.output_p95 is None:
        return AnswerLengths(options.output_mean, options.output_max)
    return AnswerLengths.with_tail(options.output_mean, options.output_p95, options.output_max)


def _number_problems(options: PlanRLOptions) -> list[str]:
    sizes = {
        "--prompts": options.prompts, "--group": options.group, "--input-len": options.input_len,
        "--output-mean": options.output_mean, "--output-max": options.output_max, "--updates": options.updates,
        "--output-p95": options.output_p95,
    }  # fmt: skip
    problems = size_problems(sizes, needed=("--prompts", "--group", "--input-len", "--output-mean", "--output-max"))
    mean, most = options.output_mean, options.output_max
    if mean is not None and most is not None and mean >= most > 0:
        valid = f"valid: 1 to {most - 1}" if most > 1 else "valid: an --output-max of 2 or more"
        problems.append(f"--output-mean {mean}: not below --output-max {most}; {valid}")
    n = (options.prompts or 0) * (options.group or 0)
    if n > MOST_ANSWERS:
        problems.append(
            f"--prompts {options.prompts} x --group {options.group} = {n:,} answers: at most {MOST_ANSWERS:,}"
        )
    elif n > 0 and options.updates > 0 and n % options.updates:
        problems.append(f"--updates {options.updates} does not divide {n:,} answers (--prompts x --group)")
    if not 0 <= options.off_policy <= MOST_STEPS:
        problems.append(f"--off-policy {options.off_policy}: valid: 0 to {MOST_STEPS}")
    return problems + output_problems("--html", options.html, ".html")


def _split_problems(options: PlanRLOptions, size: int) -> list[str]:
    """Return the problems of the accelerators that only generate, of `size`."""
    number = options.generate_on
    if number is not None and not 0 <= number < size:
        why = "a number of accelerators is needed" if number < 0 else f"0 of {size} accelerators are left to train"
        valid = f"0 to {size - 1}" if size > 1 else "0"
        return [f"--generate-on {number}: {why}; valid: {valid}"]
    if options.off_policy and size == 1:
        return [f"--off-policy {options.off_policy} needs accelerators for both, and the cluster has 1"]
    if number == 0 and options.off_policy:
        return [f"--generate-on 0 with --off-policy {options.off_policy}: valid: 1 to {size - 1}, or --off-policy 0"]
    return []
