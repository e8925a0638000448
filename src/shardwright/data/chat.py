"""Prompts and answers: a record into text of which only the answers are trained on.

A record has `messages`, each with a role and a text, which a chat template writes out; or a `prompt` and a
`completion`, which are text as they stand. Templates are Jinja, as in the tokenizers of the Hugging Face hub. They run
in Jinja's sandbox, without the date of today, so that the same record gives the same text at any time.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from shardwright.errors import DataError, nearest
from shardwright.files import parse_json, read_text, reason

ROLES = ("system", "user", "assistant", "tool")
ANSWER = "assistant"
TEMPLATE = "chat_template.jinja"
CONFIG = "tokenizer_config.json"


class Piece(NamedTuple):
    """Text of a document, and whether its tokens are trained on: predicted in the loss."""

    text: str
    trained: bool


class BadConversation(ValueError):
    """A record that is no conversation with an answer, or that the template cannot write."""


@dataclass(frozen=True)
class ChatFormat:
    """How records become text: the template and the tokens it may name, both of the tokenizer. `template` is None where
    there is none, which is enough for `prompt` and `completion`; `special_tokens` may not stand in a message."""

    template: str | None = None
    tokens: tuple[tuple[str, str], ...] = ()
    special_tokens: tuple[str, ...] = ()

    def pieces(self, record: dict[str, Any]) -> list[Piece]:
        """The pieces of a record in order. Raises BadConversation."""
        if "messages" in record:
            return self._of_messages(_checked(record["messages"], self.special_tokens))
        if missing := [name for name in ("prompt", "completion") if name not in record]:
            there = ", ".join(record) or "none"
            told = "messages, and neither prompt nor completion" if len(missing) == 2 else missing[0]
            raise BadConversation(f"no field {told}; there are: {there}")
        for name in ("prompt", "completion"):
            if not isinstance(record[name], str) or not record[name]:
                raise BadConversation(f"the field {name!r} is {_kind(record[name])}, not a text")
        return [Piece(record["prompt"], False), Piece(record["completion"], True)]

    @property
    def named_tokens(self) -> dict[str, str]:
        """The tokens that the template names; the text of one that the tokenizer does not have is empty."""
        return {name: text for name, text in self.tokens if self.template is not None and name in self.template}

    @property
    def answer_end(self) -> str | None:
        """The special token that the template writes behind an answer; None where it writes none."""
        if self.template is None:
            return None
        turns = [{"role": "user", "content": "0"}, {"role": ANSWER, "content": "0"}]
        try:
            [answer] = [piece.text for piece in self._of_messages(turns) if piece.trained]
        except BadConversation:  # it wants other roles; records say whether it can write them
            return None
        return next((token for token in self.special_tokens if answer.endswith(token)), None)

    def _of_messages(self, messages: list[dict[str, Any]]) -> list[Piece]:
        whole, done, found = self._render(messages, False), 0, []
        for number, message in enumerate(messages):
            if message["role"] != ANSWER:
                continue
            begin = self._render(messages[:number], True)
            end = self._render(messages[: number + 1], False)
            if not (end.startswith(begin) and whole.startswith(end) and len(begin) >= done):
                raise BadConversation(
                    f"the chat template writes message {number + 1} in another way when it is an answer to come, or "
                    f"when others follow, so its tokens cannot be told; choose another with --chat-template"
                )
            answer = end[len(begin) :]
            # What a template writes after the token that ends an answer is never generated.
            if (shown := answer.rstrip()).endswith(self.special_tokens):
                answer = shown
            found += [Piece(whole[done : len(begin)], False), Piece(answer, True)]
            done = len(begin) + len(answer)
        return [piece for piece in (*found, Piece(whole[done:], False)) if piece.text]

    def _render(self, messages: list[dict[str, Any]], generation: bool) -> str:
        from jinja2 import TemplateError

        template = self._compiled
        try:
            return str(
                template.render(messages=messages, add_generation_prompt=generation, **dict(self.tokens))
                if messages or generation
                else ""
            )
        except (TemplateError, TypeError, ValueError) as error:
            raise BadConversation(f"the chat template refuses it: {error}") from None

    @cached_property
    def _compiled(self) -> Any:
        from jinja2 import TemplateSyntaxError, nodes
        from jinja2.exceptions import TemplateError
        from jinja2.ext import Extension
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        class Generation(Extension):
            """`{% generation %}` of transformers, which marks the answers; they are found here without it."""

            tags = {"generation"}  # noqa: RUF012 - Jinja declares it so

            def parse(self, parser: Any) -> Any:
                line = next(parser.stream).lineno
                body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
                return nodes.Scope(body).set_lineno(line)

        def refuse(message: str) -> None:
            raise TemplateError(message)

        if self.template is None:
            raise DataError(
                "the tokenizer has no chat template, and a record has messages; give one with --chat-template FILE"
            )
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = lambda value, **how: json.dumps(value, ensure_ascii=False, **how)
        environment.globals["raise_exception"] = refuse
        try:
            return environment.from_string(self.template)
        except TemplateSyntaxError as error:
            raise DataError(f"the chat template is not Jinja: line {error.lineno}: {error.message}") from None


def _checked(messages: Any, special_tokens: tuple[str, ...]) -> list[dict[str, Any]]:
    """`messages` if they are a conversation with an answer. Raises BadConversation."""
    if not isinstance(messages, list) or not messages:
        raise BadConversation(f"the field 'messages' is {_kind(messages)}, not a list of messages")
    for number, message in enumerate(messages, start=1):
        if not isinstance(message, dict) or not isinstance(message.get("content"), str):
            raise BadConversation(f"message {number} is not an object with a role and a text, its content")
        if (role := message.get("role")) not in ROLES:
            raise BadConversation(f"message {number} has the role {role!r}; {nearest(str(role), ROLES)}")
        if token := next((token for token in special_tokens if token in message["content"]), None):
            raise BadConversation(f"message {number} holds {token!r}, a special token of the tokenizer")
    if not any(message["role"] == ANSWER for message in messages):
        raise BadConversation(f"no message has the role {ANSWER!r}, so there is no answer to train on")
    return messages


def read_chat_format(tokenizer: Path | None, template: Path | None, special_tokens: tuple[str, ...]) -> ChatFormat:
    """The format of conversations of a tokenizer.json: the template and tokens that its folder has, as models of the
    hub have them; or the `template` given. Raises DataError for files that cannot be read."""
    config: dict[str, Any] = {}
    text = None
    if tokenizer is not None:
        if (beside := tokenizer.with_name(CONFIG)).is_file():
            try:
                config = parse_json(_read(beside))
            except ValueError as error:
                raise DataError(f"{beside}: not JSON: {error}") from None
            if not isinstance(config, dict):
                raise DataError(f"{beside}: not the settings of a tokenizer: no JSON object")
            text = _default_template(config.get("chat_template"))
        if (beside := tokenizer.with_name(TEMPLATE)).is_file():
            text = _read(beside)
    if template is not None:
        text = _read(template)
    return ChatFormat(text, tuple(_tokens(config)), special_tokens)


def _default_template(found: Any) -> str | None:
    """Of several templates, which some models have, the one called default."""
    if isinstance(found, list):
        return next((str(each["template"]) for each in found if each["name"] == "default"), None)
    return found if isinstance(found, str) else None


def _tokens(config: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
        value = config.get(name)
        value = value.get("content") if isinstance(value, dict) else value
        yield name, value if isinstance(value, str) else ""


def _read(path: Path) -> str:
    try:
        return read_text(path)
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read: {reason(error)}") from None


def _kind(value: Any) -> str:
    return "empty" if value in ("", []) else f"a {type(value).__name__}"
