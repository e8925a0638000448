"""Pairs of answers: records with a chosen and a rejected answer to the same prompt, for preference training."""

from typing import Any

from shardwright.data.chat import TRAINED_KEYS, BadConversation, ChatFormat, TextPiece, kind_in_words
from shardwright.data.template import ANSWER


class PairFormat(ChatFormat):
    """The rendering of records with a `chosen` and a `rejected` answer to the same prompt, as two documents in which
    only the answers count. The answers are texts after a `prompt`, or lists of messages: whole conversations, or the
    messages after a `prompt` of messages."""

    per_record = 2

    def documents(self, record: dict[str, Any]) -> list[list[TextPiece]]:
        """Return the documents of the chosen and of the rejected answer."""
        chosen, rejected = (self._answer(record, name) for name in ("chosen", "rejected"))
        if chosen == rejected:
            raise BadConversation("the chosen and the rejected answer are equal, so the pair prefers neither")
        rest = {key: value for key, value in record.items() if key not in ("prompt", "chosen", "rejected")}
        if isinstance(chosen, str) and isinstance(rejected, str):
            records = [{"prompt": record.get("prompt"), "completion": answer} for answer in (chosen, rejected)]
            return [self.pieces(rest | fields) for fields in records]
        if isinstance(chosen, str) or isinstance(rejected, str):
            raise BadConversation("one of 'chosen' and 'rejected' is a text, and the other a list of messages")
        prompt = record.get("prompt")
        if isinstance(prompt, str) and all(_role(answer[0]) == ANSWER for answer in (chosen, rejected)):
            prompt = [{"role": "user", "content": prompt}]
        if isinstance(prompt, list):
            chosen, rejected = [*prompt, *chosen], [*prompt, *rejected]
        elif prompt is not None:
            rest["prompt"] = prompt
        n_shared = next((n for n, (a, b) in enumerate(zip(chosen, rejected, strict=False)) if a != b), None)
        if n_shared is None:
            raise BadConversation("one of 'chosen' and 'rejected' starts with the whole other one; both need an answer")
        if roles := [role for answer in (chosen, rejected) if (role := _role(answer[n_shared])) not in (None, ANSWER)]:
            raise BadConversation(
                f"message {n_shared + 1}, the first that differs in 'chosen' and 'rejected', has the role "
                f"{roles[0]!r}; a pair has two answers to the same messages"
            )
        conversations = [[*map(_untrained, answer[:n_shared]), *answer[n_shared:]] for answer in (chosen, rejected)]
        return [self.pieces(rest | {"messages": messages}) for messages in conversations]

    def _answer(self, record: dict[str, Any], name: str) -> str | list[Any]:
        answer = record.get(name)
        if answer is None:
            raise BadConversation(f"no field {name!r}; there are: {', '.join(record) or 'none'}")
        if not isinstance(answer, str | list) or not answer:
            raise BadConversation(
                f"the field {name!r} is {kind_in_words(answer)}, neither a text nor a list of messages"
            )
        if isinstance(answer, str) and not isinstance(record.get("prompt"), str):
            raise BadConversation(f"the field {name!r} is a text, and there is no text 'prompt' that it answers")
        return answer


def _role(message: Any) -> Any:
    return message.get("role") if isinstance(message, dict) else None


def _untrained(message: Any) -> Any:
    """Return a message before the answer; an earlier answer is not trained on."""
    if not isinstance(message, dict) or message.get("role") != ANSWER:
        return message
    return {key: value for key, value in message.items() if key not in TRAINED_KEYS} | {"train": False}
