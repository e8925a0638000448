"""Renders conversations by a chat template and finds the characters of their answers, in its own process.

The template sees the variables that `apply_chat_template` of transformers shows, so the text is the same. A
conversation is rendered once as a whole. If the template has `{% generation %}`, these blocks are the answers.
Otherwise an answer starts where the generation prompt ends, and ends where the conversation would end after it. Some
templates render an earlier turn differently when others follow (Qwen3 drops its thinking). So places are mapped from
the shorter conversations to the whole by marks, which are put at the end of each message and removed from the text.
"""

import json
import re
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any, NamedTuple

ANSWER = "assistant"
MARKER = re.compile(
    r"<\|[^|<>\s]+\|>|<\uff5c[^\uff5c<>\s]+\uff5c>|</?s>|<(?:bos|eos)>|<(?:start|end)_of_[a-z]+>|\[/?[A-Z_]{4,}\]"
)
"""The usual forms of control tokens."""
MOST_CHARACTERS = 2**26
REASONING = ("reasoning_content", "thinking", "reasoning")
"""The names of a message's reasoning; transformers shows a template the first two for any of them."""
# Noncharacters of Unicode, which no text has.
_MARK, _MARK_END, _BEGIN, _END = "\ufdd0", "\ufdd1", "\ufdd2", "\ufdd3"
_MARKS = re.compile(f"{_MARK}(\\d+){_MARK_END}")
Message = dict[str, Any]


class TemplateRefusal(ValueError):
    """The template refuses a conversation, or its answers cannot be found."""


class _MarkedText(NamedTuple):
    """A text without its marks, and the first place of each message's mark: gpt-oss repeats the name of a call in front
    of its result."""

    text: str
    places: dict[int, int]


class ChatTemplate:
    """A compiled template. `tokens`: the tokens that it may name; `special_tokens`: all of the tokenizer."""

    def __init__(self, source: str, tokens: dict[str, str], special_tokens: list[str], now: datetime) -> None:
        from jinja2 import meta, nodes
        from jinja2.exceptions import TemplateError
        from jinja2.ext import Extension
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        template = self

        class Generation(Extension):
            """`{% generation %}`, which marks the answers."""

            tags = {"generation"}  # noqa: RUF012 - Jinja declares it so

            def parse(self, parser: Any) -> Any:
                line = next(parser.stream).lineno
                body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
                template.has_generation = True
                return nodes.CallBlock(self.call_method("_between_marks"), [], [], body).set_lineno(line)

            def _between_marks(self, caller: Callable[[], str]) -> str:
                return f"{_BEGIN}{caller()}{_END}" if template._shows_generation else caller()

        def refuse(message: str) -> None:
            raise TemplateError(message)

        def tojson(value: Any, ensure_ascii: bool = False, indent: Any = None, **how: Any) -> str:
            return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **how)

        self.has_generation = self._shows_generation = False
        self._tokens = tokens
        ends = sorted(special_tokens, key=len, reverse=True)
        self._ends = re.compile("|".join([*map(re.escape, ends), MARKER.pattern]))
        self._units = re.compile(f"{self._ends.pattern}|<[^<>\\s]+>")
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = tojson
        environment.globals |= {"raise_exception": refuse, "strftime_now": now.strftime}
        self.reads = sorted(meta.find_undeclared_variables(environment.parse(source)))
        self._compiled = environment.from_string(source)

    def write(self, messages: list[Message], trained: list[bool], given: dict[str, Any]) -> tuple[str, list[list[int]]]:
        """Return the text of a conversation, and the places [start, end) of the answers whose `trained` is true.
        `given`: the other variables of the template. Raises TemplateRefusal."""
        messages = [_with_reasoning(message) for message in messages]
        text = self._render(messages, given)
        if not {_MARK, _MARK_END, _BEGIN, _END}.isdisjoint(text):
            raise TemplateRefusal(
                "it has one of U+FDD0 to U+FDD3, which are no characters; answers are marked with them here"
            )
        answers = [i for i, message in enumerate(messages) if message["role"] == ANSWER]
        if not any(trained[i] for i in answers):
            return text, []
        if not self.has_generation:
            places = self._places(messages, text, given)
            return text, [place for i, place in zip(answers, places, strict=True) if trained[i] and place[0] < place[1]]
        spans = self._generated(messages, text, given)
        if not all(trained[i] for i in answers):
            places = self._places(messages, text, given)
            for i, place in zip(answers, places, strict=True):
                spans = spans if trained[i] else [part for span in spans for part in _without(span, place)]
        return text, spans

    def prompt(self, messages: list[Message]) -> str:
        """Return the text of a conversation and of the start of the next answer. Raises TemplateRefusal."""
        return self._render(messages, {}, generation=True)

    def _generated(self, messages: list[Message], text: str, given: dict[str, Any]) -> list[list[int]]:
        self._shows_generation = True
        try:
            marked = self._render(messages, given)
        finally:
            self._shows_generation = False
        spans: list[list[int]] = []
        at = 0
        for part in re.split(f"([{_BEGIN}{_END}])", marked):
            if part == _BEGIN:
                spans.append([at, at])
            elif part == _END:
                spans[-1][1] = at
            else:
                at += len(part)
        if re.sub(f"[{_BEGIN}{_END}]", "", marked) != text:
            raise TemplateRefusal(
                "the chat template changes the text of its {% generation %} blocks after they are written"
            )
        if not spans:
            raise TemplateRefusal(
                "the chat template writes no {% generation %} block, so there is no answer to train on"
            )
        return [span for span in spans if span[0] < span[1]]

    def _places(self, messages: list[Message], text: str, given: dict[str, Any]) -> list[list[int]]:
        """Return the place of each answer in `text`, its end token included."""
        messages, whole = self._marked(messages, text, given)
        places: list[list[int]] = []
        for number, message in enumerate(messages):
            if message["role"] != ANSWER:
                continue
            begin = self._begin(whole, messages[:number], given)
            end = None if begin is None else self._end(whole, self._try(messages[: number + 1], given), number, begin)
            if begin is None or end is None or begin < (places[-1][1] if places else 0):
                raise TemplateRefusal(
                    f"the chat template renders message {number + 1} differently when others follow, or not at all, "
                    f"so its tokens cannot be found; choose another with --chat-template, or mark the answers in it "
                    f"with {{% generation %}}"
                )
            places.append([begin, end])
        return places

    def _begin(self, whole: _MarkedText, earlier: list[Message], given: dict[str, Any]) -> int | None:
        """Return the start of the answer to `earlier` in the whole: after the generation prompt."""
        before, prompt = self._try(earlier, given), self._try(earlier, given, generation=True)
        if prompt.text:
            in_prompt, in_whole = _anchor(prompt, whole, len(earlier) - 1) or (0, 0)
            shared = self._shared(prompt.text[in_prompt:], whole.text[in_whole:])
            # Only the generation prompt may differ: some templates start the answer's reasoning in it.
            if in_prompt + shared >= _n_common(before.text, prompt.text):
                return in_whole + shared
        generation = prompt.text[len(before.text) :] if prompt.text.startswith(before.text) else ""
        limit = whole.places.get(len(earlier), -1)
        at = whole.text.rfind(generation, 0, limit) if generation and limit >= 0 else -1
        if at >= 0:
            return at + len(generation)
        return None if earlier else 0

    def _end(self, whole: _MarkedText, until: _MarkedText, number: int, begin: int) -> int | None:
        """Return the end of answer `number`: of the conversation up to it, without white space after a token."""
        in_until, in_whole = _anchor(until, whole, number) or (0, 0)
        if in_whole < begin:  # the answer has no mark, so it has to occur unchanged in the whole
            if number in until.places:
                return None
            in_until, in_whole = in_until + begin - in_whole, begin
            if until.text[in_until - 1 : in_until] != whole.text[in_whole - 1 : in_whole]:
                return None
        end = in_whole + self._shared(until.text[in_until:], whole.text[in_whole:])
        answer = whole.text[begin:end]
        shown = answer.rstrip()
        ends = [match.end() for match in self._ends.finditer(shown)]
        end = begin + len(shown if ends and ends[-1] == len(shown) else answer)
        return end if end > begin else None

    def _shared(self, one: str, other: str) -> int:
        """Return the length of the common start of two texts, without a part of a token or tag."""
        n = _n_common(one, other)
        for text in (one, other):
            for match in self._units.finditer(text, max(0, n - 200), n + 200):
                if match.start() < n < match.end():
                    n = match.start()
        return n

    def _marked(self, messages: list[Message], text: str, given: dict[str, Any]) -> tuple[list[Message], _MarkedText]:
        """Return the messages with marks, if these do not change the template's output, and the whole text."""
        marked = [_with_mark(message, i) for i, message in enumerate(messages)]
        whole = self._try(marked, given)
        if whole.text != text:
            alone = ([*messages[:i], marked[i], *messages[i + 1 :]] for i in range(len(messages)))
            usable = [self._try(messages_with_mark, given).text == text for messages_with_mark in alone]
            marked = [marked[i] if usable[i] else message for i, message in enumerate(messages)]
            whole = self._try(marked, given)
        return (marked, whole) if whole.text == text else (messages, _MarkedText(text, {}))

    def _try(self, messages: list[Message], given: dict[str, Any], generation: bool = False) -> _MarkedText:
        """Render a part of a conversation; empty if the template refuses such a part."""
        if not messages and not generation:
            return _MarkedText("", {})
        try:
            marked = self._render(messages, given, generation)
        except TemplateRefusal:
            return _MarkedText("", {})
        parts, at = _MARKS.split(marked), 0
        places: dict[int, int] = {}
        for i, part in enumerate(parts):
            if i % 2:
                places.setdefault(int(part), at)
            else:
                at += len(part)
        return _MarkedText("".join(parts[::2]), places)

    def _render(self, messages: list[Message], given: dict[str, Any], generation: bool = False) -> str:
        variables = {"tools": None, "documents": None, **self._tokens, **given}
        try:
            blocks: list[str] = []
            n = 0
            for block in self._compiled.generate(messages=messages, add_generation_prompt=generation, **variables):
                blocks.append(block)
                n += len(block)
                if n > MOST_CHARACTERS:
                    raise TemplateRefusal(f"the chat template writes more than {MOST_CHARACTERS:,} characters")
            return "".join(blocks)
        except TemplateRefusal:
            raise
        except RecursionError:
            raise TemplateRefusal("the chat template refuses it: it calls itself too often") from None
        except MemoryError:
            raise TemplateRefusal("the chat template refuses it: it needs too much memory") from None
        except Exception as error:  # operators and filters of a template may raise any type
            raise TemplateRefusal(f"the chat template refuses it: {error}") from None


def _anchor(part: _MarkedText, whole: _MarkedText, last: int) -> tuple[int, int] | None:
    """Return the place, in `part` and in `whole`, of the last mark in `part` of a message up to `last`."""
    both = [(place, whole.places[i]) for i, place in part.places.items() if i <= last and i in whole.places]
    return max(both, default=None)


def _n_common(one: str, other: str) -> int:
    """Return the length of the common start of two texts."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[low:middle] == other[low:middle] else (low, middle - 1)
    return low


def _with_reasoning(message: Message) -> Message:
    reasoning = next((message[name] for name in REASONING if message.get(name) is not None), None)
    return message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _with_mark(message: Message, number: int) -> Message:
    """Return a message with a mark after the name of its last tool call, or after the last letter of its text: before
    white space, which a template may strip."""

    def mark(text: str) -> str:
        shown = text.rstrip()
        return f"{shown}{_MARK}{number}{_MARK_END}{text[len(shown) :]}"

    content, calls = message.get("content"), message.get("tool_calls")
    if isinstance(calls, list) and calls:
        function = calls[-1].get("function", calls[-1])
        named = function | {"name": mark(str(function.get("name", "")))}
        call = calls[-1] | {"function": named} if "function" in calls[-1] else named
        return message | {"tool_calls": [*calls[:-1], call]}
    if isinstance(content, str) and content.strip():
        return message | {"content": mark(content)}
    if isinstance(content, list) and content and str(content[-1].get("text", "")).strip():
        return message | {"content": [*content[:-1], content[-1] | {"text": mark(content[-1]["text"])}]}
    return message


def _without(span: list[int], place: list[int]) -> Iterator[list[int]]:
    """Yield the parts of `span` outside of `place`."""
    for part in ([span[0], min(span[1], place[0])], [max(span[0], place[1]), span[1]]):
        if part[0] < part[1]:
            yield part


def main() -> None:
    """Read settings and then conversations from the standard input, a line of JSON each, and answer each with a line.

    The limit of CPU time is reset before each line; the kernel ends the process that exceeds it.
    """
    settings = json.loads(sys.stdin.readline())
    resource.setrlimit(resource.RLIMIT_AS, (settings["memory_bytes"],) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    _limit_cpu(settings["cpu_s"])
    try:
        now = datetime.fromtimestamp(settings["now"], UTC if settings["utc"] else None)
        template = ChatTemplate(settings["template"], settings["tokens"], settings["special_tokens"], now)
        _answer({"reads": template.reads})
    except Exception as error:  # the parser may raise any type for a stranger's template
        line = getattr(error, "lineno", None)
        reason = getattr(error, "message", None) or str(error) or type(error).__name__
        _answer({"error": (f"line {line}: " if line else "") + reason})
        return
    for line in sys.stdin:
        _limit_cpu(settings["cpu_s"])
        try:
            messages, trained, given = json.loads(line)
            if trained is None:
                _answer({"text": template.prompt(messages)})
                continue
            text, spans = template.write(messages, trained, given)
            _answer({"text": text, "spans": spans})
        except (TemplateRefusal, MemoryError) as error:
            _answer({"error": str(error) or "the chat template refuses it: it needs too much memory"})


def _limit_cpu(cpu_s: int) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time()) + 1 + cpu_s, hard))


def _answer(answer: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()
