"""Turns conversations, and prompts with completions, into text; only the answers are trained on.

A record has `messages`, which a chat template renders as `apply_chat_template` of transformers does, or a `prompt` and
a `completion`, which are used unchanged. A known key of a record or message is used or refused, never ignored.
"""

import itertools
import os
import re
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from shardwright.data.template import ANSWER, MARKER, REASONING, TemplateRefusal
from shardwright.data.template_process import TemplateProcess
from shardwright.system.errors import DataError, nearest
from shardwright.system.files import find_inside, parse_json, read_text, reason

ROLES = ("system", "user", "assistant", "tool")
FURTHER_ROLES = ("developer", "function", "ipython")
TRAINED_KEYS = ("weight", "train", "training", "trainable", "train_on_turn", "loss", "loss_weight")
"""Keys, in published data sets, for whether a record or message is trained on: 0 or 1, false or true."""
READ_BY_TEMPLATE = ("tool_calls", "function_call", "refusal", "audio", "image", "images", "video", "videos")
"""Keys of a message that are content, so a template has to read them."""
MASK_KEYS = ("ignore", "loss_mask", "mask", "masked", "train_detail", "train_on_input", "train_on_inputs")
"""Keys for the same whose meaning differs between data sets: refused, in a record and in a message."""
REFUSED_KEYS = (
    *MASK_KEYS, "add_generation_prompt", "audio", "chat_template", "chosen", "continue_final_message", "conversations",
    "function_call", "functions", "image", "images", "parallel_tool_calls", "rejected", "system", "video", "videos",
)  # fmt: skip
READ_KEYS = ("messages", "prompt", "completion", "tools", "documents", "chat_template_kwargs", *TRAINED_KEYS)
TEMPLATE = "chat_template.jinja"
TOOL_TEMPLATE = "additional_chat_templates/tool_use.jinja"
CONFIG = "tokenizer_config.json"
TOKENS_MAP = "special_tokens_map.json"
TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
DATE = "SOURCE_DATE_EPOCH"
"""The environment variable of reproducible builds that sets the date that templates write."""


MOST_NAMES, LONGEST_NAME = 50, 60
"""Most fields without a reader and most control tokens that are kept by name, and the most characters of a name."""


class TextPiece(NamedTuple):
    """Text of a document. The boolean: whether its tokens are trained on, that is, predicted in the loss. `apart`:
    whether it is encoded on its own, so that no token spans its start."""

    text: str
    trained: bool
    apart: bool = False


class BadConversation(ValueError):
    """A record that is not a conversation with an answer, or that the template cannot render."""


@dataclass(frozen=True)
class ChatFormat:
    """The rendering of records: the tokenizer's template and the tokens that it may name. `template` is None if there
    is none, which is enough for `prompt` and `completion`; `tool_template` is for records with tools, if the tokenizer
    has two. `special_tokens` may not occur in a message. `now`: the date that templates write."""

    per_record: ClassVar[int] = 1
    """Documents of a record."""
    template: str | None = None
    tokens: tuple[tuple[str, str], ...] = ()
    special_tokens: tuple[str, ...] = ()
    tool_template: str | None = None
    now: float = field(default_factory=lambda: float(os.environ.get(DATE) or time.time()))
    markers: set[str] = field(default_factory=set, compare=False)
    """Control tokens that the template has written so far, recognised by their form."""
    unread: set[str] = field(default_factory=set, compare=False)
    """Fields of records and keys of messages that had a value so far and that nothing reads."""

    def pieces(self, record: dict[str, Any]) -> list[TextPiece]:
        """Return the pieces of a record in order; messages are encoded as one text. Raises BadConversation."""
        known = {key for key in REFUSED_KEYS if record.get(key) not in (None, [], {})}
        if known:
            raise BadConversation(f"the field {min(known)!r} is not read here and may not be ignored; remove it")
        trained = _trained(record, "the record")
        self._note_unread(key for key in record.keys() - {*READ_KEYS} if record[key] not in (None, [], {}, ""))
        if record.get("messages") is not None:
            return self._message_pieces(record, trained is not False)
        if missing := [name for name in ("prompt", "completion") if name not in record]:
            present = ", ".join(record) or "none"
            fields = "messages, and neither prompt nor completion" if len(missing) == 2 else missing[0]
            raise BadConversation(f"no field {fields}; there are: {present}")
        for name in ("prompt", "completion"):
            if not isinstance(record[name], str) or not record[name]:
                raise BadConversation(f"the field {name!r} is {kind_in_words(record[name])}, not a text")
        if given := [name for name in ("tools", "documents", "chat_template_kwargs") if record.get(name)]:
            raise BadConversation(
                f"the field {given[0]!r} is for messages, and the record has a prompt and a completion"
            )
        return [TextPiece(record["prompt"], False), TextPiece(record["completion"], trained is not False, True)]

    def documents(self, record: dict[str, Any]) -> list[list[TextPiece]]:
        """Return the documents of a record, each as `pieces`. Raises BadConversation."""
        return [self.pieces(record)]

    def _note_unread(self, keys: Iterable[str]) -> None:
        """Keep the names of fields that nothing reads: at most `MOST_NAMES`, each cut to `LONGEST_NAME`."""
        for key in keys:
            if len(self.unread) < MOST_NAMES:
                self.unread.add(key if len(key) <= LONGEST_NAME else f"{key[:LONGEST_NAME]}...")

    def prompt(self, text: str) -> str:
        """Return the text with which a model starts its answer to one message of a user.

        Raises DataError if there is no template, and BadConversation if it refuses the message.
        """
        if self._process is None:
            raise DataError("--chat: the tokenizer has no chat template; leave --chat out, or prepare data of messages")
        messages = [{"role": "user", "content": text}]
        _refuse_special(messages, "the prompt", self.special_tokens)
        try:
            return self._process.prompt(messages)
        except TemplateRefusal as error:
            raise BadConversation(str(error)) from None

    @property
    def named_tokens(self) -> dict[str, str]:
        """Return the tokens that the template names; a token that the tokenizer does not have is empty text."""
        return {name: text for name, text in self.tokens if self.template is not None and name in self.template}

    @cached_property
    def answer_end(self) -> str | None:
        """The special token that the template writes after an answer; None if it writes none."""
        if self.template is None:
            return None
        turns = [{"role": "user", "content": "0"}, {"role": ANSWER, "content": "0"}]
        try:
            [answer] = [piece.text for piece in self._message_pieces({"messages": turns}, True) if piece.trained]
        except (BadConversation, ValueError):  # it wants other roles; records say whether it can write them
            return None
        return next((token for token in self.special_tokens if answer.endswith(token)), None)

    @property
    def writes_date(self) -> bool:
        """Return whether the rendered text depends on `now`."""
        return any(
            "strftime_now" in template for template in (self.template, self.tool_template) if template is not None
        )

    def _message_pieces(self, record: dict[str, Any], trained: bool) -> list[TextPiece]:
        template, process = self.template, self._process
        given = _given(record, process.reads if process else frozenset())
        if given.get("tools") and self._tool_process is not None:
            template, process = self.tool_template, self._tool_process
        if template is None or process is None:
            raise DataError(
                "the tokenizer has no chat template, and a record has messages; give one with --chat-template FILE"
            )
        messages = _checked(record["messages"], template, self.special_tokens)
        self._note_unread(_unread_keys(messages, template))
        for name in ("tools", "documents"):
            _refuse_special(given.get(name), f"the field {name!r}", self.special_tokens)
        answers = [trained and _trained(m, f"message {n}") is not False for n, m in enumerate(messages, start=1)]
        try:
            text, spans = process.write(messages, answers, given)
        except TemplateRefusal as error:
            raise BadConversation(str(error)) from None
        if not text:
            raise BadConversation("the chat template writes nothing for it")
        for number, message in enumerate(messages, start=1):
            if isinstance(message.get("content"), list) and str(message["content"]) in text:
                raise BadConversation(
                    f"the chat template does not read the parts of message {number}; make it one text"
                )
        if len(self.markers) < MOST_NAMES:
            fresh = sorted(set(MARKER.findall(text)) - self.markers)[: MOST_NAMES - len(self.markers)]
            self.markers.update(marker for marker in fresh if not _holds(record, marker))
        places = sorted({0, len(text), *itertools.chain.from_iterable(spans)})
        return [
            TextPiece(text[begin:end], any(first <= begin < last for first, last in spans))
            for begin, end in itertools.pairwise(places)
        ]

    @cached_property
    def _process(self) -> TemplateProcess | None:
        return self._started(self.template)

    @cached_property
    def _tool_process(self) -> TemplateProcess | None:
        return self._started(self.tool_template)

    def _started(self, template: str | None) -> TemplateProcess | None:
        if template is None:
            return None
        tokens = {name: text for name, text in self.tokens if text}
        utc = bool(os.environ.get(DATE))
        return TemplateProcess(
            template=template, tokens=tokens, special_tokens=self.special_tokens, now=self.now, utc=utc
        )


def without_nulls(value: Any) -> Any:
    """Return a value of Arrow without its null keys: Arrow fills every key of a column into every row."""
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


def _given(record: dict[str, Any], reads: frozenset[str]) -> dict[str, Any]:
    """Return the template variables that a record sets. Raises BadConversation for one that the template does not
    read."""
    given: dict[str, Any] = {}
    if record.get("completion") is not None:
        raise BadConversation("it has messages and a completion; keep one of the two")
    prompt = record.get("prompt")
    if prompt is not None and not any(prompt in (message, message.get("content")) for message in _dicts(record)):
        raise BadConversation("it has messages and a prompt that is none of them; keep one of the two")
    for name in ("tools", "documents"):
        value = record.get(name)
        if isinstance(value, str):  # Arrow has no type for tools of different parameters, so data sets have JSON
            try:
                value = parse_json(value) if value.strip() else None
            except ValueError as error:
                raise BadConversation(f"the field {name!r} is a text but not JSON: {error}") from None
        if value is None:
            continue
        if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
            raise BadConversation(f"the field {name!r} is {kind_in_words(value)}, not a list of objects")
        given[name] = value
    extra = record.get("chat_template_kwargs") or {}
    if not isinstance(extra, dict):
        raise BadConversation(f"the field 'chat_template_kwargs' is {kind_in_words(extra)}, not an object")
    for name in [*(name for name, value in given.items() if value), *extra]:
        if reads and name not in reads:
            raise BadConversation(f"the chat template does not read {name!r}; remove it, or choose another template")
    if clash := {"messages", "add_generation_prompt", *given} & set(extra):
        raise BadConversation(f"'chat_template_kwargs' may not have {min(clash)!r}")
    return given | extra


def _checked(messages: Any, template: str, special_tokens: tuple[str, ...]) -> list[dict[str, Any]]:
    """Return `messages`, without nulls, if they are a conversation with an answer. Raises BadConversation."""
    if not isinstance(messages, list) or not messages:
        raise BadConversation(f"the field 'messages' is {kind_in_words(messages)}, not a list of messages")
    checked = []
    for number, given in enumerate(messages, start=1):
        if not isinstance(given, dict):
            raise BadConversation(f"message {number} is not an object with a role and a text, its content")
        message = {key: value for key, value in given.items() if value is not None}
        role = message.get("role")
        if role not in ROLES + FURTHER_ROLES and not re.search(f"['\"]{re.escape(str(role))}['\"]", template):
            raise BadConversation(f"message {number} has the role {role!r}; {nearest(str(role), ROLES)}")
        _check_content(message, f"message {number}")
        if masked := [key for key in MASK_KEYS if key in message]:
            raise BadConversation(
                f"message {number} has the key {masked[0]!r}, which is not read here and may not be ignored; use "
                f"'train', which is true or false"
            )
        for key in READ_BY_TEMPLATE:
            if message.get(key) and not re.search(rf"\b{key}\b", template):
                raise BadConversation(f"the chat template does not read {key!r}, which message {number} has")
        if any(message.get(key) for key in REASONING) and not re.search(rf"\b({'|'.join(REASONING)})\b", template):
            raise BadConversation(f"the chat template does not read the reasoning, which message {number} has")
        if role != ANSWER and _trained(message, f"message {number}"):
            raise BadConversation(
                f"message {number} is marked as trained on but is not an answer: its role is {role!r}"
            )
        _refuse_special(message, f"message {number}", special_tokens)
        checked.append(message)
    if not any(message["role"] == ANSWER for message in checked):
        raise BadConversation(f"no message has the role {ANSWER!r}, so there is no answer to train on")
    return checked


def _unread_keys(messages: list[dict[str, Any]], template: str) -> set[str]:
    """Return the keys of messages that have a value and that neither the template nor this module reads."""
    keys = {key for message in messages for key, value in message.items() if value not in ([], {}, "")}
    keys -= {"role", "content", *READ_BY_TEMPLATE, *REASONING, *TRAINED_KEYS}
    return {f"messages.{key}" for key in keys if not re.search(rf"\b{re.escape(key)}\b", template)}


def _check_content(message: dict[str, Any], where: str) -> None:
    content = message.get("content")
    calls = message.get("tool_calls")
    if calls is not None and not (isinstance(calls, list) and all(_is_call(call) for call in calls)):
        raise BadConversation(f"{where} has 'tool_calls' that are not a list of objects with the name of a function")
    if content is None and not (calls or any(message.get(key) for key in (*REASONING, "function_call"))):
        raise BadConversation(f"{where} is not an object with a role and a text, its content, and has no tool_calls")
    parts = content if isinstance(content, list) else []
    if content is not None and not isinstance(content, str | list):
        raise BadConversation(f"{where} is not an object with a role and a text, its content")
    for part in parts:
        if not isinstance(part, dict) or not isinstance(part.get("text"), str) or part.get("type", "text") != "text":
            kind = part.get("type") if isinstance(part, dict) else part
            raise BadConversation(f"{where} has a part of type {kind!r}; only parts of text can be trained on")


def _is_call(call: Any) -> bool:
    function = call.get("function", call) if isinstance(call, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)


def _dicts(record: dict[str, Any]) -> list[dict[str, Any]]:
    messages = record["messages"]
    return [message for message in messages if isinstance(message, dict)] if isinstance(messages, list) else []


def _trained(holder: dict[str, Any], where: str) -> bool | None:
    """Return whether a record or message is marked as trained on; None if it is not marked. Raises BadConversation."""
    marks = {key: holder[key] for key in TRAINED_KEYS if holder.get(key) is not None}
    for key, value in marks.items():
        if isinstance(value, str) or value not in (0, 1):
            raise BadConversation(f"{where} has {key} {value!r}; valid: 0, 1, false, true")
    if len(set(map(bool, marks.values()))) > 1:
        raise BadConversation(f"{where} contradicts itself: {', '.join(f'{k} {v!r}' for k, v in marks.items())}")
    return bool(next(iter(marks.values()))) if marks else None


def _refuse_special(value: Any, where: str, special_tokens: tuple[str, ...]) -> None:
    for token in special_tokens:
        if _holds(value, token):
            raise BadConversation(f"{where} contains {token!r}, a special token of the tokenizer")


def _holds(value: Any, text: str) -> bool:
    """Return whether a text occurs in any text of a JSON value."""
    if isinstance(value, str):
        return text in value
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return any(_holds(part, text) for part in parts)


def read_chat_format(tokenizer: Path | None, template: Path | None, special_tokens: tuple[str, ...]) -> ChatFormat:
    """Return the chat format of a tokenizer.json: the template and tokens from its folder, as in models of the hub, or
    the given `template`. Raises DataError for files that cannot be read."""
    if tokenizer is None:
        return ChatFormat(None if template is None else _read(template), (), special_tokens)
    folder = tokenizer.parent
    config = _settings(folder, CONFIG)
    text, for_tools = _templates(config.get("chat_template"), folder / CONFIG)
    if (beside := find_inside(folder, TEMPLATE, DataError)) is not None:
        text = _read(beside)
    if (beside := find_inside(folder, TOOL_TEMPLATE, DataError)) is not None:
        for_tools = _read(beside)
    if template is not None:
        text, for_tools = _read(template), None
    tokens = dict(_tokens(_settings(folder, TOKENS_MAP))) | dict(_tokens(config))
    absent = {name: "" for name in TOKEN_NAMES if name not in tokens}
    return ChatFormat(text, tuple((tokens | absent).items()), special_tokens, for_tools)


def _settings(folder: Path, name: str) -> dict[str, Any]:
    """Return the settings in a file next to a tokenizer; empty if the file is missing."""
    path = find_inside(folder, name, DataError)
    if path is None:
        return {}
    try:
        settings = parse_json(_read(path))
    except ValueError as error:
        raise DataError(f"{path}: not JSON: {error}") from None
    if not isinstance(settings, dict):
        raise DataError(f"{path}: not a JSON object, so not the settings of a tokenizer")
    return settings


def _templates(given: Any, path: Path) -> tuple[str | None, str | None]:
    """Return the default template and the template for records with tools; a tokenizer has one or several by name."""
    if given is None or isinstance(given, str):
        return given, None
    if isinstance(given, list) and all(isinstance(item, dict) for item in given):
        given = {item.get("name"): item.get("template") for item in given}
    if not isinstance(given, dict) or not all(isinstance(item, str) for pair in given.items() for item in pair):
        raise DataError(f"{path}: chat_template is {kind_in_words(given)}, and neither a text nor texts with names")
    return given.get("default"), given.get("tool_use")


def _tokens(config: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the named tokens that a template may use."""
    extra = config.get("extra_special_tokens")
    named = {name: config.get(name) for name in TOKEN_NAMES} | (extra if isinstance(extra, dict) else {})
    for name, given in named.items():
        value = given.get("content") if isinstance(given, dict) else given
        if isinstance(value, str):
            yield name, value


def _read(path: Path) -> str:
    try:
        return read_text(path)
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read: {reason(error)}") from None


def kind_in_words(value: Any) -> str:
    """Return the kind of a value of a record for errors: `a list`, or `empty`."""
    return "empty" if value in ("", []) else f"a {type(value).__name__}"
