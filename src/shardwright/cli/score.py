"""shardwright score: the log-probabilities of given texts."""

import dataclasses
from pathlib import Path

import typer

from shardwright.cli.common import (
    AsJson,
    Device,
    ModelArgument,
    argument,
    device_problems,
    filled,
    flag,
    json_records,
    layout_of,
    option,
    output_problems,
    reading_verb,
    show,
    size_problems,
)
from shardwright.cli.generate import BATCH_INVARIANT, EXPERT_FILES, LAYOUT_KEYS, RECORD_EXPERTS
from shardwright.system.errors import InputError, collecting
from shardwright.system.files import open_regular, reason


@dataclasses.dataclass(frozen=True)
class ScoreOptions:
    """Arguments and options of `score`."""

    model: ModelArgument
    file: Path = argument(
        ...,
        'one object a line: {"text": "..."}, {"prompt": "...", "completion": "..."}, {"messages": [...]}, or '
        '{"prompt_tokens": [...], "tokens": [...]}',
        "FILE.jsonl",
    )
    layout: str = option("", "degrees of the layout to run on, such as tp=2,pp=2", "KEY=VALUE,...")
    batch_size: int = option(16, "sequences that a replica of the model runs at once")
    device: Device = "auto"
    check: bool = flag(
        "compare the log-probabilities of the trainer's forward pass, score, and token-by-token generate"
    )
    batch_invariant: bool = flag(BATCH_INVARIANT)
    record_experts: Path | None = option(None, RECORD_EXPERTS, "FILE.safetensors")
    replay_experts: Path | None = option(
        None, "give each token the experts of a file of --record-experts", "FILE.safetensors"
    )
    json: AsJson = False


@reading_verb
def score(options: ScoreOptions) -> None:
    """Compute the log-probability of each text, or of each answer given its prompt, on any layout.

    shardwright score quickstart/run texts.jsonl

    --json has the log-probability of each token. Texts are data to dp_shard and dp_replicate; ranks are started here as
    local processes on the CPU, or by torchrun or srun.

    With --check, exit codes: 0 the log-probabilities agree within the stated bound, which is 0 with --batch-invariant,
    1 they do not, 2 bad input.
    """
    from shardwright.generation.agreement import agreement_view
    from shardwright.generation.texts import TextScoreRequest, compare_texts, score_texts, scores_view

    problems = size_problems({"--batch-size": options.batch_size}) + device_problems(options.device)
    with collecting(problems):
        layout = layout_of(options.layout, LAYOUT_KEYS)
    problems += output_problems("--record-experts", options.record_experts, EXPERT_FILES)
    if options.check and (options.record_experts or options.replay_experts):
        problems.append("--check compares choices of the routers; leave out --record-experts and --replay-experts")
    if options.replay_experts is not None:
        try:
            open_regular(options.replay_experts).close()
        except OSError as error:
            problems.append(f"--replay-experts {options.replay_experts}: {reason(error)}")
    records, unread = json_records(options.file, str(options.file))
    problems += unread
    if problems:
        raise InputError(*problems)
    request = filled(TextScoreRequest, options, records=records, layout=layout)
    try:
        compared = compare_texts(request) if options.check else None
        scores = None if options.check else score_texts(request)
    except InputError as error:
        raise InputError(
            *(f"{options.file}, {problem}" if problem.startswith("line ") else problem for problem in error.problems)
        ) from None
    if compared is not None:
        show(agreement_view(compared), options.json, None)
        if not compared.holds:
            raise typer.Exit(1)
    if scores is not None:
        show(scores_view(scores), options.json, None)
