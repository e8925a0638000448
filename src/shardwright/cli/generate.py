"""shardwright generate: continue prompts with a trained model."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from shardwright.cli.common import (
    AsJson,
    Device,
    ModelArgument,
    device_problems,
    error_console,
    filled,
    flag,
    json_records,
    layout_of,
    numbered_lines,
    option,
    output_problems,
    print_json,
    print_text,
    reading_verb,
    size_problems,
)
from shardwright.system.console import visible
from shardwright.system.errors import InputError, collecting
from shardwright.system.files import is_text
from shardwright.system.units import counted, format_bytes, percent

if TYPE_CHECKING:
    from shardwright.generation.sampling import Sampling

LAYOUT_KEYS = ("tp", "pp", "cp", "cp_method", "ulysses_degree", "ep", "dp_replicate", "dp_shard")
"""The keys of the layout that apply without a backward pass."""

BATCH_INVARIANT = "log-probabilities of training, score and generate are equal in each bit, whatever the batch; slower"
RECORD_EXPERTS = "write the experts of each token in each layer with experts"
EXPERT_FILES = ".safetensors"


@dataclasses.dataclass(frozen=True)
class GenerateOptions:
    """Arguments and options of `generate`."""

    model: ModelArgument
    prompt: list[str] | None = option(None, "a text to continue; may be repeated")
    prompts: Path | None = option(
        None, 'a file of prompts: one a line, or for *.jsonl a {"prompt": "..."} a line', "FILE"
    )
    chat: bool = flag("each prompt is a message of a user: print the answer, by the chat template")
    max_tokens: int = option(80, "the most new tokens of each prompt")
    stop: list[str] | None = option(None, "a text that ends a continuation, and is not part of it; may be repeated")
    temperature: float | None = option(
        None, "0: always the most probable token; higher: more of the others [default: 0.8]"
    )
    top_p: float | None = option(None, "draw from the most probable tokens that together reach it [default: 1.0]")
    top_k: int | None = option(None, "draw from this many most probable tokens; 0: all [default: 40]")
    seed: int = option(0, "seed of the draws")
    greedy: bool = flag("always the most probable token; nothing is drawn")
    layout: str = option("", "degrees of the layout to run on, such as tp=2,pp=2", "KEY=VALUE,...")
    batch_size: int = option(16, "sequences that a replica of the model runs at once")
    draft: Path | None = option(
        None, "a smaller model of the same tokenizer that proposes tokens (speculative)", "MODEL"
    )
    draft_tokens: int = option(4, "proposals of the draft in each step")
    logprobs: bool = flag("with --json: the ids and the log-probability of each token, as `score` has")
    batch_invariant: bool = flag(BATCH_INVARIANT)
    record_experts: Path | None = option(None, RECORD_EXPERTS, "FILE.safetensors")
    device: Device = "auto"
    json: AsJson = False


@reading_verb
def generate(options: GenerateOptions) -> None:
    """Continue prompts with a run or a folder of transformers, on any layout.

    shardwright generate quickstart/run --prompt "import os"

    The tokens do not depend on the layout, on the batch or on the other prompts. Prompts are data to dp_shard and
    dp_replicate; ranks are started here as local processes on the CPU, or by torchrun or srun.
    """
    from shardwright.generation.generate import GenerationRequest, generate

    prompts, problems = _prompts(options)
    problems += _sampling_problems(options)
    if "" in (options.stop or ()):
        problems.append("--stop is empty, and would end every continuation at once; give a text or leave it out")
    problems += size_problems(
        {"--max-tokens": options.max_tokens, "--batch-size": options.batch_size, "--draft-tokens": options.draft_tokens}
    )
    if options.logprobs and options.draft is not None:
        problems.append(
            "--logprobs with --draft: a draft's tokens are checked without them; leave out the one or the other"
        )
    problems += output_problems("--record-experts", options.record_experts, EXPERT_FILES)
    if options.record_experts is not None and options.draft is not None:
        problems.append(
            "--record-experts with --draft: tokens of the draft may be rejected; leave out the one or the other"
        )
    if options.logprobs and not options.json:
        problems.append("--logprobs prints a number for each token; add --json")
    with collecting(problems):
        layout = layout_of(options.layout, LAYOUT_KEYS)
    problems += device_problems(options.device)
    if problems:
        raise InputError(*problems)
    answer = generate(
        filled(
            GenerationRequest, options, prompts=prompts, sampling=_sampling(options), layout=layout,
            stop=tuple(options.stop or ()), log_probs=options.logprobs,
        )
    )  # fmt: skip
    if answer is None:
        return
    if options.json:
        print_json(_without_absent(dataclasses.asdict(answer)) | {"tokens_per_s": answer.tokens_per_s})
        return
    for number, completion in enumerate(answer.completions, start=1):
        if len(answer.completions) > 1:
            typer.echo(f"--- prompt {number} of {len(answer.completions)}")
        print_text(visible(completion.text if options.chat else completion.prompt + completion.text))
    n_tokens = sum(completion.n_tokens for completion in answer.completions)
    error_console.print(
        f"[dim]{counted(n_tokens, 'token')}, {answer.tokens_per_s:.3g} a second; "
        f"cache {format_bytes(answer.cache_bytes)}"
        + (f"; {answer.accepted} of {answer.proposed} proposals accepted" if options.draft else "")
        + (f" ({percent(answer.accepted / answer.proposed)})" if answer.proposed else "")
    )


def _without_absent(answer: dict[str, Any]) -> dict[str, Any]:
    """Return an answer whose completions have tokens and log-probabilities only if they were asked for."""
    completions = [
        {key: value for key, value in completion.items() if value is not None} for completion in answer["completions"]
    ]
    return answer | {"completions": completions}


def _prompts(options: GenerateOptions) -> tuple[tuple[str, ...], list[str]]:
    """Return the prompts, and the problems of the options that give them."""
    given = list(options.prompt or ())
    if options.prompts is None:
        return tuple(given), [] if given else ["nothing to continue; give --prompt TEXT or --prompts FILE"]
    path, name = options.prompts, f"--prompts {options.prompts}"
    if path.suffix != ".jsonl":
        try:
            return (*given, *numbered_lines(path, name).values()), []
        except InputError as error:
            return (), list(error.problems)
    records, problems = json_records(path, name)
    for number, record in records.items():
        if not isinstance(record, dict) or not isinstance(record.get("prompt"), str):
            problems.append(f'{name}, line {number}: not an object with a text "prompt": {str(record)[:60]}')
        elif not is_text(record["prompt"]):
            problems.append(f"{name}, line {number}: half a surrogate pair is no text: {str(record)[:60]!r}")
        else:
            given.append(record["prompt"])
    return tuple(given), problems


def _sampling(options: GenerateOptions) -> "Sampling":
    from shardwright.generation.sampling import Sampling

    temperature = 0.8 if options.temperature is None else options.temperature
    return Sampling(
        None if options.greedy else temperature,
        40 if options.top_k is None else options.top_k,
        1.0 if options.top_p is None else options.top_p,
        options.seed,
    )


def _sampling_problems(options: GenerateOptions) -> list[str]:
    from shardwright.generation.sampling import sampling_problems

    problems = []
    drawing = {"--temperature": options.temperature, "--top-p": options.top_p, "--top-k": options.top_k}
    if options.greedy and (given := [name for name, value in drawing.items() if value is not None]):
        problems.append(
            f"--greedy draws nothing, so {', '.join(given)} would mean nothing; leave out the one or the other"
        )
    return problems + sampling_problems(
        options.temperature, options.top_k, options.top_p, lambda name, value: f"--{name.replace('_', '-')} {value}"
    )
