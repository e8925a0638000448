"""Implements `shardwright generate`: checks the request, starts the ranks of its layout, continues the prompts."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
import torch.distributed as dist

from shardwright.data.chat import BadConversation, ChatFormat
from shardwright.generation.continuous import Batcher
from shardwright.generation.engine import GenerationEngine, LayoutEngine, WholeEngine
from shardwright.generation.expert_file import as_text, write_choices
from shardwright.generation.ranks import run_on_layout
from shardwright.generation.sampling import Sampling
from shardwright.generation.source import Source, Text, open_source
from shardwright.generation.speculative import Speculative
from shardwright.layout.layout import Layout
from shardwright.model.spec import ModelSpec
from shardwright.parallel.objects import gathered
from shardwright.split.rules import batch_invariance_problems, expert_call_problems, sequence_cuts
from shardwright.split.rules import problems as split_problems
from shardwright.system.errors import InputError
from shardwright.system.units import counted
from shardwright.training.ranks import ProcessRank, pick_device, place_from_environment
from shardwright.training.sources import tokenizer_file
from shardwright.verification.reduce import most_ranks


@dataclass(frozen=True)
class GenerationRequest:
    """The options of a generation. `model`: a run, a checkpoint or a folder of transformers; `prompts`: texts, or token
    ids; `batch_size`: sequences that a replica of the model runs at once, each in a row of its cache; `draft`: a model
    that proposes up to `draft_tokens` tokens a step (`speculative.py`)."""

    model: Path
    prompts: tuple[str | tuple[int, ...], ...]
    max_tokens: int = 80
    sampling: Sampling = field(default_factory=Sampling)
    layout: Layout = field(default_factory=Layout)
    batch_size: int = 16
    device: str = "auto"
    draft: Path | None = None
    draft_tokens: int = 4
    stop: tuple[str, ...] = ()
    """Texts that end a continuation where the first one occurs; the text is not part of it."""
    chat: bool = False
    """Whether each prompt is a user's message, which the chat template renders; the continuation is the answer."""
    log_probs: bool = False
    """Whether completions have the log-probability of each token; not with `draft`."""
    batch_invariant: bool = False
    """Whether log-probabilities are equal in each bit to the numbers of `score` and training."""
    record_experts: Path | None = None
    """The file to write the experts of the tokens to (`expert_file.py`); not with `draft`."""


@dataclass(frozen=True)
class Completion:
    """The continuation of one prompt. `ended`: "end of text", "stop" (at a `stop` text), "max_tokens", or
    "max_seq_len" of the model. `prompt_tokens`, `tokens`, `log_probs`: the ids, and the log-probability of each new
    token by the model itself, before temperature, top-k and top-p; None if they were not requested."""

    prompt: str
    text: str
    n_prompt_tokens: int
    n_tokens: int
    ended: str
    prompt_tokens: tuple[int, ...] | None = None
    tokens: tuple[int, ...] | None = None
    log_probs: tuple[float, ...] | None = None


@dataclass(frozen=True)
class GenerationResult:
    """`seconds`: from the first pass to the last, over all ranks; `cache_bytes`: keys and values of the first rank;
    `proposed`, `accepted`: tokens of the draft model."""

    completions: tuple[Completion, ...]
    seconds: float
    cache_bytes: int
    proposed: int = 0
    accepted: int = 0

    @property
    def tokens_per_s(self) -> float:
        return sum(completion.n_tokens for completion in self.completions) / self.seconds


@dataclass(frozen=True)
class _GenerationTask:
    """The input of every rank: the request, with prompts as token ids."""

    request: GenerationRequest
    prompts: Mapping[int, Sequence[int]]
    ends: frozenset[int]


@dataclass(frozen=True)
class _RankGeneration:
    """The output of a rank: the continuations of its prompts by their index, their log-probabilities if requested, and
    its numbers as in `GenerationResult`."""

    tokens: Mapping[int, Sequence[int]]
    log_probs: Mapping[int, Sequence[float]]
    seconds: float
    cache_bytes: int
    experts: Mapping[int, str]
    """As `expert_file.as_text` writes them; empty unless they are recorded."""
    proposed: int = 0
    accepted: int = 0


def generate(request: GenerationRequest) -> GenerationResult | None:
    """Continue the prompts; return None on every rank of torchrun or srun except the first.

    Raises InputError, with every problem at once, before anything is computed.
    """
    place = place_from_environment()
    source = open_source(request.model)
    request = replace(request, layout=without_training(request.layout, source.spec))
    layout = request.layout
    problems = layout_problems(source.spec, layout, place)
    if request.batch_invariant:
        problems += batch_invariance_problems(source.spec, layout)
    if request.record_experts is not None:
        problems += expert_call_problems(source.spec, layout)
    text = source.text()
    chat = source.chat() if request.chat else None
    ids = {index: _ids(prompt, text, chat) for index, prompt in enumerate(request.prompts)}
    problems += _prompt_problems(ids, source.spec)
    if request.draft is not None:
        problems += _draft_problems(request.draft, source.spec, text)
    if problems:
        raise InputError(*problems)
    task = _GenerationTask(request, ids, text.ends)
    if place is not None or layout.world_size > 1:
        done = run_on_layout(layout, request.device, _on_rank, task)
    else:
        done = _alone(task, pick_device(request.device, ProcessRank()))
    if place is not None and place.rank != 0:
        return None
    if request.record_experts is not None:
        write_choices(request.record_experts, {n + 1: experts for n, experts in done.experts.items()}, source.spec)
    return _answer(request, text, done, ids, source.spec)


def _ids(prompt: str | tuple[int, ...], text: Text, chat: ChatFormat | None) -> list[int]:
    """Return the token ids of a prompt, or of a user's message by its chat template."""
    if not isinstance(prompt, str):
        return list(prompt)
    if chat is None:
        return text.encode(prompt)
    try:
        return text.encode(chat.prompt(prompt), begins=False)
    except BadConversation as error:
        raise InputError(f"--chat: {prompt[:40]!r}: {error}") from None


def without_training(layout: Layout, spec: ModelSpec) -> Layout:
    """Return a layout of the same degrees for forward passes of few tokens: activations are not sharded by token,
    unless experts need it, and a rank of dp_shard has whole parameters from one pass to the next."""
    return replace(
        layout,
        sequence_parallel=layout.tp > 1 and spec.moe is not None,
        zero=1 if layout.dp_shard > 1 else 0,
    )


def layout_problems(
    spec: ModelSpec, layout: Layout, place: ProcessRank | None, seq_len: int | None = None
) -> list[str]:
    """Return why a model cannot run on a layout, or this machine cannot run all of its ranks, one sentence each.
    `seq_len`: the length of all sequences; by default passes are padded to a valid one."""
    if seq_len is None:
        seq_len = sequence_cuts(layout)
    problems = split_problems(spec, layout, seq_len)
    if place is None and layout.world_size > most_ranks():
        problems.append(
            f"the layout has {layout.world_size} ranks, and this machine can run {most_ranks()} at most; choose lower "
            f"degrees, or start it with torchrun or srun on more machines"
        )
    return problems


def _prompt_problems(ids: Mapping[int, Sequence[int]], spec: ModelSpec) -> list[str]:
    problems = []
    for index, tokens in ids.items():
        if not tokens:
            problems.append(f"prompt {index + 1} is empty; give it at least one character to continue from")
        elif len(tokens) >= spec.max_seq_len:
            problems.append(
                f"prompt {index + 1} has {counted(len(tokens), 'token')}, and max_seq_len={spec.max_seq_len} of the "
                f"model leaves no room for another; shorten it to {spec.max_seq_len - 1} tokens or fewer"
            )
        elif max(tokens) >= spec.vocab_size:
            problems.append(
                f"prompt {index + 1} has token id {max(tokens)}, outside of the model's vocabulary of "
                f"{spec.vocab_size}; the tokenizer is of another model"
            )
    return problems


def _draft_problems(draft: Path, spec: ModelSpec, text: Text) -> list[str]:
    """Return why a draft cannot propose tokens of the model; one without a tokenizer is assumed to have the same."""
    try:
        source = open_source(draft)
        draft_size = source.spec.vocab_size
        ids = source.text().tokenizer.get_vocab() if tokenizer_file(source.weights.path) else text.tokenizer.get_vocab()
    except InputError as error:
        return [f"--draft: {problem}" for problem in error.problems]
    if draft_size != spec.vocab_size:
        return [
            f"--draft {draft}: its vocabulary has {draft_size} tokens and the model's {spec.vocab_size}; a draft model "
            f"needs the same tokenizer"
        ]
    other = sorted(ids.items() ^ text.tokenizer.get_vocab().items())
    if not other:
        return []
    n_tokens = len({token for token, _ in other})
    return [
        f"--draft {draft}: {n_tokens} tokens, such as {other[0][0]!r}, have another id or none in its tokenizer or in "
        f"the model's; a draft model needs the same tokenizer"
    ]


def _on_rank(task: _GenerationTask, device: torch.device) -> _RankGeneration:
    """Continue the prompts of one rank of the layout; return the continuations of all ranks."""
    request, layout = task.request, task.request.layout
    source = open_source(request.model)
    model = source.on_rank(layout, device, batch_invariant=task.request.batch_invariant)
    data_rank = layout.data_rank(dist.get_rank())
    prompts = {index: ids for index, ids in task.prompts.items() if index % layout.data_ranks == data_rank}
    sizes = _cache_sizes(task, source, prompts)
    engine = LayoutEngine(model, device, *sizes, record_experts=request.record_experts is not None)
    done = _complete(task, engine, source, prompts, device)
    parts: list[_RankGeneration] = gathered(done, _RankGeneration)
    tokens = {index: ids for part in parts for index, ids in part.tokens.items()}
    log_probs = {index: values for part in parts for index, values in part.log_probs.items()}
    replicas = [parts[group[0]] for group in layout.groups("pp", "cp", "tp")]
    return replace(
        parts[0],
        tokens=tokens,
        log_probs=log_probs,
        experts={index: text for part in parts for index, text in part.experts.items()},
        seconds=max(part.seconds for part in parts),
        proposed=sum(part.proposed for part in replicas),
        accepted=sum(part.accepted for part in replicas),
    )


def _alone(task: _GenerationTask, device: torch.device) -> _RankGeneration:
    source = open_source(task.request.model)
    sizes = _cache_sizes(task, source, task.prompts)
    request = task.request
    engine = WholeEngine(
        source.whole(device),
        *sizes,
        batch_invariant=request.batch_invariant,
        record_experts=request.record_experts is not None,
    )
    return _complete(task, engine, source, task.prompts, device)


def _cache_sizes(task: _GenerationTask, source: Source, prompts: Mapping[int, Sequence[int]]) -> tuple[int, int, int]:
    """Return the rows of the cache, the positions of each, and the most tokens that are replaced by others."""
    longest = max(map(len, task.prompts.values())) + task.request.max_tokens
    n_ahead = task.request.draft_tokens if task.request.draft is not None else 0
    return max(1, min(task.request.batch_size, len(prompts))), min(longest, source.spec.max_seq_len), n_ahead


def _complete(
    task: _GenerationTask,
    engine: GenerationEngine,
    source: Source,
    prompts: Mapping[int, Sequence[int]],
    device: torch.device,
) -> _RankGeneration:
    request = task.request
    batcher = Batcher(
        engine, request.sampling, source.spec.max_seq_len, task.ends, log_probs={} if request.log_probs else None
    )
    batcher.experts = {} if engine.record_experts else None
    if request.stop:
        text = source.text()
        batcher.stops = lambda new: _cut(text.decode(new), request.stop)[1]
    speculative = None
    if request.draft is not None:
        draft = open_source(request.draft)
        drafting = WholeEngine(draft.whole(device), *_cache_sizes(task, draft, prompts))
        batcher.decode = speculative = Speculative(batcher, drafting, request.draft_tokens, drafting.cache.n_positions)
    began = time.perf_counter()
    tokens = batcher.complete(prompts, request.max_tokens)
    seconds = time.perf_counter() - began
    proposed, accepted = (speculative.proposed, speculative.accepted) if speculative else (0, 0)
    experts = {index: as_text(torch.cat(parts)) for index, parts in (batcher.experts or {}).items()}
    numbers = seconds, engine.cache.n_bytes, experts, proposed, accepted
    return _RankGeneration(tokens, batcher.log_probs or {}, *numbers)


def _answer(
    request: GenerationRequest, text: Text, done: _RankGeneration, ids: Mapping[int, Sequence[int]], spec: ModelSpec
) -> GenerationResult:
    completions = []
    for index, prompt in enumerate(request.prompts):
        new = done.tokens[index]
        # Decoded together, so that a character of several tokens, or a space between them, is kept.
        whole, begin = text.decode([*ids[index], *new]), text.decode(ids[index])
        if request.chat and new[-1] in text.ends:
            whole = text.decode([*ids[index], *new[:-1]])
        continuation, stopped = _cut(whole.removeprefix(begin), request.stop)
        if stopped:
            ended = "stop"
        elif new[-1] in text.ends:
            ended = "end of text"
        else:
            ended = "max_tokens" if len(new) == request.max_tokens else "max_seq_len"
        shown = prompt if isinstance(prompt, str) else begin
        scored = None
        if request.log_probs:
            scored = tuple(ids[index]), tuple(new), tuple(done.log_probs[index])
        completions.append(Completion(shown, continuation, len(ids[index]), len(new), ended, *(scored or ())))
    return GenerationResult(tuple(completions), done.seconds, done.cache_bytes, done.proposed, done.accepted)


def _cut(text: str, stop: Sequence[str]) -> tuple[str, bool]:
    """Return a text up to the first of the texts in `stop`, and whether there is one."""
    places = [at for end in stop if (at := text.find(end)) >= 0]
    return (text[: min(places)], True) if places else (text, False)
