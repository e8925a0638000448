"""Implements `shardwright score`: the log-probabilities of given texts and answers under a model, on any layout."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from shardwright.data.chat import BadConversation, ChatFormat
from shardwright.data.encoding import answer_sections, encode_sections
from shardwright.generation.agreement import PathAgreement, compare_paths
from shardwright.generation.expert_file import read_choices, write_choices
from shardwright.generation.generate import layout_problems, without_training
from shardwright.generation.score import ScoreRequest, score
from shardwright.generation.source import Text, open_source
from shardwright.layout.layout import Layout
from shardwright.model.spec import ModelSpec
from shardwright.split.rules import batch_invariance_problems, expert_call_problems
from shardwright.system.errors import InputError
from shardwright.system.files import is_text
from shardwright.system.units import counted
from shardwright.training.ranks import place_from_environment
from shardwright.view.document import COUNT, NUMBER, WORDS, Column, Note, Quantity, Table, VerbDocument

_VALUE = Quantity("{:.4f}".format)
_SHOWN = 48
"""Most characters of a text in the table."""


@dataclass(frozen=True)
class TextScoreRequest:
    """The options of `score`. `model`: a run, a checkpoint or a folder of transformers; `records`: by their line, a
    `text`; a `prompt` and a `completion`; `messages`, as `data prepare` reads them; or `prompt_tokens` and `tokens`, as
    `generate --logprobs --json` writes them. `batch_size`: sequences that a replica of the model runs at once."""

    model: Path
    records: Mapping[int, Any]
    layout: Layout = field(default_factory=Layout)
    batch_size: int = 16
    device: str = "auto"
    batch_invariant: bool = False
    record_experts: Path | None = None
    """The file to write the experts of the tokens to (`expert_file.py`)."""
    replay_experts: Path | None = None
    """The file of the experts that the tokens get, whatever the routers choose."""


@dataclass(frozen=True)
class TokenScore:
    """A token and its log-probability given the tokens before, in nats; None for a token of a prompt, and for the first
    of a text, before which there is nothing."""

    id: int
    text: str
    log_prob: float | None


@dataclass(frozen=True)
class TextScore:
    """The log-probability of one record: the sum over its `n_tokens` scored tokens, in nats. `greedy`: whether each of
    them, and of the tokens between them, is the most probable one."""

    line: int
    log_prob: float
    n_tokens: int
    greedy: bool
    tokens: tuple[TokenScore, ...]

    @property
    def log_prob_per_token(self) -> float:
        return self.log_prob / self.n_tokens


def score_texts(request: TextScoreRequest) -> list[TextScore] | None:
    """Score each record in the order of lines; return None on every rank of torchrun or srun except the first.

    Raises InputError, with every problem at once, before anything is computed.
    """
    place, text = place_from_environment(), open_source(request.model).text()
    to_score, is_scored = _score_request(request)
    scores = score(to_score)
    if place is not None and place.rank != 0:
        return None
    if request.record_experts is not None:
        choices = {
            line: result.experts
            for line, result in zip(sorted(to_score.sequences), scores, strict=True)
            if result.experts is not None
        }
        write_choices(request.record_experts, choices, open_source(request.model).spec)
    return [
        _text_score(line, tokens, is_scored[line], len(tokens) - n, result.log_probs, result.greedy, text)
        for (line, (tokens, n)), result in zip(sorted(to_score.sequences.items()), scores, strict=True)
    ]


def compare_texts(request: TextScoreRequest) -> PathAgreement | None:
    """Compare the ways to score the records, as `agreement.compare_paths`. Raises InputError as `score_texts`."""
    to_score, _ = _score_request(request)
    return compare_paths(to_score)


def _score_request(request: TextScoreRequest) -> tuple[ScoreRequest, dict[int, list[bool]]]:
    """Return the tokens to score by line, and which tokens of each line count. Raises InputError with every problem."""
    source = open_source(request.model)
    layout = without_training(request.layout, source.spec)
    problems = layout_problems(source.spec, layout, place_from_environment())
    if request.batch_invariant:
        problems += batch_invariance_problems(source.spec, layout)
    if request.record_experts is not None or request.replay_experts is not None:
        problems += expert_call_problems(source.spec, layout)
    text, chat = source.text(), cache(source.chat)  # read when the first record needs it
    ids: dict[int, list[int]] = {}
    is_scored: dict[int, list[bool]] = {}
    for line, record in request.records.items():
        try:
            ids[line], is_scored[line] = _tokens_of(record, text, chat)
            _check(ids[line], is_scored[line], source.spec)
        except BadConversation as error:
            problems.append(f"line {line}: {error}")
    if problems:
        raise InputError(*problems)
    firsts = {line: scored.index(True, 1) for line, scored in is_scored.items()}
    sequences = {line: (tokens, len(tokens) - firsts[line]) for line, tokens in ids.items()}
    replay = None
    if request.replay_experts is not None:
        n_tokens = {line: len(tokens) for line, tokens in ids.items()}
        replay = read_choices(request.replay_experts, n_tokens, source.spec)
    options = request.batch_size, request.device, request.batch_invariant, request.record_experts is not None, replay
    return ScoreRequest(request.model, sequences, layout, *options), is_scored


def _tokens_of(record: Any, text: Text, chat: Callable[[], ChatFormat]) -> tuple[list[int], list[bool]]:
    """Return the token ids of a record, and which of them are scored. `chat`: called for a record that needs the chat
    format. Raises BadConversation."""
    if not isinstance(record, dict):
        raise BadConversation("not an object with a text, or a prompt and a completion")
    if "tokens" in record:
        prompt, tokens = record.get("prompt_tokens") or [], record["tokens"]
        for name, given in (("prompt_tokens", prompt), ("tokens", tokens)):
            if not isinstance(given, list) or not all(type(token) is int and token >= 0 for token in given):
                raise BadConversation(f"the field {name!r} is not a list of token ids")
        return [*prompt, *tokens], [False] * len(prompt) + [True] * len(tokens)
    if isinstance(whole := record.get("text"), str):
        tokens = text.encode(_encodable(whole))
        return tokens, [True] * len(tokens)
    if record.get("messages") is not None and chat().template is None:
        raise BadConversation("the tokenizer has no chat template for its messages; give a prompt and a completion")
    pieces = chat().pieces(record)
    texts, trained, apart = zip(*pieces, strict=True)
    begin: list[int] = []
    if any(apart) and text.begins:  # a prompt starts as in `generate`
        begin = text.encode("")
    sections = answer_sections(0, [_encodable(part) for part in texts], trained, any(apart), text, closed=True)
    ids, is_scored = encode_sections(text, sections)
    return begin + ids.tolist(), [False] * len(begin) + is_scored.tolist()


def _encodable(text: str) -> str:
    if not is_text(text):
        raise BadConversation("half a surrogate pair is no text")
    return text


def _check(ids: Sequence[int], is_scored: Sequence[bool], spec: ModelSpec) -> None:
    """Raise BadConversation for tokens that the model cannot score."""
    if not any(is_scored[1:]):
        raise BadConversation(f"it has {counted(len(ids), 'token')} and none to score: the first token follows nothing")
    if len(ids) > spec.max_seq_len + 1:
        raise BadConversation(
            f"it has {counted(len(ids), 'token')}, and max_seq_len={spec.max_seq_len} of the model allows "
            f"{spec.max_seq_len + 1} at most; shorten it"
        )
    if max(ids) >= spec.vocab_size:
        raise BadConversation(
            f"it has token id {max(ids)}, outside of the model's vocabulary of {spec.vocab_size}; the tokenizer is of "
            f"another model"
        )


def _text_score(
    line: int,
    ids: Sequence[int],
    is_scored: Sequence[bool],
    first: int,
    log_probs: Sequence[float],
    greedy: bool,
    text: Text,
) -> TextScore:
    values = [
        value if counts else None
        for value, counts in zip([None] * first + list(log_probs), [False] + list(is_scored[1:]), strict=True)
    ]
    scored = [value for value in values if value is not None]
    tokens = tuple(TokenScore(token, text.decode([token]), value) for token, value in zip(ids, values, strict=True))
    return TextScore(line, math.fsum(scored), len(scored), greedy, tokens)


def scores_view(scores: Sequence[TextScore]) -> VerbDocument:
    """Return the scores as a table; the JSON document has each token."""
    columns = [
        Column("line", NUMBER),
        Column("tokens", COUNT),
        Column("log-probability", _VALUE),
        Column("per token", _VALUE),
        Column("scored text", WORDS),
    ]
    rows = [
        (result.line, result.n_tokens, result.log_prob, result.log_prob_per_token, _beginning(result.tokens))
        for result in scores
    ]
    total, n_tokens = math.fsum(result.log_prob for result in scores), sum(result.n_tokens for result in scores)
    note = Note(f"{counted(n_tokens, 'token')}, log-probability {total / n_tokens:.5f} a token (natural logarithm)")
    data = {
        "texts": [
            {
                "line": result.line,
                "log_prob": result.log_prob,
                "log_prob_per_token": result.log_prob_per_token,
                "n_tokens": result.n_tokens,
                "greedy": result.greedy,
                "tokens": [vars(token) for token in result.tokens],
            }
            for result in scores
        ],
        "log_prob_per_token": total / n_tokens,
        "n_tokens": n_tokens,
    }
    return VerbDocument("Log-probabilities", data, [Table(columns, rows), note])


def _beginning(tokens: Sequence[TokenScore]) -> str:
    text = "".join(token.text for token in tokens if token.log_prob is not None).replace("\n", "\\n")
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
