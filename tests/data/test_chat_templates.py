"""Proves that conversations have the token ids of apply_chat_template, and that answers are found in them."""

# ruff: noqa: E501 - answers in a table

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardwright.data import template_process
from shardwright.data.chat import BadConversation, ChatFormat, TextPiece, read_chat_format, without_nulls
from shardwright.data.prepare import prepare
from shardwright.data.shards import open_split
from shardwright.data.tokenizer import load_tokenizer
from shardwright.system.errors import DataError
from tests.data import published_templates as published
from tests.marks import rest_prove

KINDS = ("byte-level", "split", "metaspace", "prepend")


def talks_for(template: str) -> dict[str, dict[str, Any]]:
    talks = dict(published.TALKS)
    if template in published.READS_TOOLS:
        talks |= published.TOOL_TALKS
    return talks


def write_lines(path: Path, records: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.mark.parametrize(
    ("template", "kind", "special"),
    rest_prove(
        [(t, k, s) for t in published.TEMPLATES for k in KINDS for s in (True, False)],
        *((t, KINDS[n % 4], n % 3 > 0) for n, t in enumerate(published.TEMPLATES)),
        ("llama-2", "prepend", True),
    ),
)
def test_ids_are_those_of_apply_chat_template(tmp_path: Path, template: str, kind: str, special: bool) -> None:
    from transformers import PreTrainedTokenizerFast

    tokenizer = published.tokenizer_file(tmp_path / "tokenizer", kind, special)
    names = json.loads(tokenizer.with_name("tokenizer_config.json").read_text())
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(tokenizer), **names)
    (tmp_path / "template.jinja").write_text(published.TEMPLATES[template])
    talks = talks_for(template)
    source = write_lines(tmp_path / "talks.jsonl", list(talks.values()))
    prepare(
        source, tmp_path / "out", tokenizer=tokenizer, format="chat", validation=0, separator="</s>",
        chat_template=tmp_path / "template.jinja",
    )  # fmt: skip
    split = open_split(tmp_path / "out", "train")
    for i, (name, talk) in enumerate(talks.items()):
        start, end = split.document_start(i), split.document_start(i + 1) - 1
        expected = theirs.apply_chat_template(
            talk["messages"], tools=talk.get("tools"), chat_template=published.TEMPLATES[template],
            return_assistant_tokens_mask="{% generation" in published.TEMPLATES[template],
        )  # fmt: skip
        assert split.tokens(start, end - start).tolist() == expected["input_ids"], name
        assert split.tokens(end, 1) == [split.separator_id]
        trained = split.trained(start, end - start)
        assert trained.any()
        if template == "generation":
            assert trained.tolist() == [bool(each) for each in expected["assistant_masks"]], name


@pytest.mark.parametrize("template", published.TEMPLATES)
def test_a_prompt_is_written_as_by_apply_chat_template(tmp_path: Path, template: str) -> None:
    from transformers import PreTrainedTokenizerFast

    tokenizer = published.tokenizer_file(tmp_path / "tokenizer", KINDS[0], True)
    (tmp_path / "template.jinja").write_text(published.TEMPLATES[template])
    names = json.loads(tokenizer.with_name("tokenizer_config.json").read_text())
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(tokenizer), **names)
    expected = theirs.apply_chat_template(
        [{"role": "user", "content": "2 + 2?"}], chat_template=published.TEMPLATES[template],
        add_generation_prompt=True, tokenize=False,
    )  # fmt: skip
    assert read_chat_format(tokenizer, tmp_path / "template.jinja", ()).prompt("2 + 2?") == expected


TRAINED = {
    "llama-2": {"one": [" 4. </s>"], "system": [" Hello, you. </s>", " \U0001f600 of course </s>"]},
    "chatml": {"one": ["4.<|im_end|>"], "same": ["go<|im_end|>"] * 3, "open": ["b<|im_end|>"]},
    "llama-3": {"tools": ['{"name": "weather", "parameters": {"city": "Z\u00fcrich"}}<|eot_id|>', "It is 20 \u00b0C.<|eot_id|>", "Where?<|eot_id|>"]},
    "mistral": {"tools": ['[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Z\u00fcrich"}}]</s>', " It is 20 \u00b0C.</s>", " Where?</s>"]},
    "qwen-3": {
        "one": ["<think>\n\n</think>\n\n4.<|im_end|>"],
        "thinking": ["4.<|im_end|>", "<think>\nmore\n</think>\n\n5.<|im_end|>"],
        "tools": ['<tool_call>\n{"name": "weather", "arguments": {"city": "Z\u00fcrich"}}\n</tool_call><|im_end|>', "It is 20 \u00b0C.<|im_end|>", "<think>\n\n</think>\n\nWhere?<|im_end|>"],
    },
    "gemma": {"one": ["4.<end_of_turn>"], "same": ["go<end_of_turn>"] * 3},
    "r1": {"one": ["4.</s>"], "thinking": ["\n\n4.</s>", "\n\n5.</s>"]},
    "harmony": {
        "one": ["<|channel|>final<|message|>4.<|return|></s>"],
        "tools": [' to=functions.weather<|channel|>commentary json<|message|>{"city": "Z\u00fcrich"}<|call|>', "<|channel|>final<|message|>It is 20 \u00b0C.", "<|channel|>final<|message|>Where?<|return|></s>"],
    },
    "plain": {"one": ["4.\n</s>"], "same": ["go\n", "go\n", "go\n</s>"]},
}  # fmt: skip


def trained_texts(folder: Path) -> list[list[str]]:
    """The runs of tokens that are trained on, of each document."""
    split, decode = open_split(folder, "train"), load_tokenizer(folder / "tokenizer.json", "</s>").decode
    found = []
    for i in range(split.n_documents):
        start, end = split.document_start(i), split.document_start(i + 1)
        ids, trained = split.tokens(start, end - start), split.trained(start, end - start)
        places = [0, *(np.flatnonzero(np.diff(trained)) + 1), end - start]
        found.append([decode(ids[a:b].tolist()) for a, b in itertools.pairwise(places) if trained[a]])
    return found


@pytest.mark.parametrize("template", TRAINED)
def test_the_answers_and_the_tokens_that_end_them_are_trained_on_once(tmp_path: Path, template: str) -> None:
    tokenizer = published.tokenizer_file(tmp_path / "tokenizer", "byte-level", True)
    (tmp_path / "template.jinja").write_text(published.TEMPLATES[template])
    talks = talks_for(template)
    source = write_lines(tmp_path / "talks.jsonl", [talks[name] for name in TRAINED[template]])
    prepare(
        source, tmp_path / "out", tokenizer=tokenizer, format="chat", validation=0, separator="</s>",
        chat_template=tmp_path / "template.jinja",
    )  # fmt: skip
    assert trained_texts(tmp_path / "out") == list(TRAINED[template].values())


def answers(template: str, record: dict[str, Any]) -> list[str]:
    pieces = ChatFormat(published.TEMPLATES[template], special_tokens=published.SPECIAL).pieces(record)
    return [piece.text for piece in pieces if piece.trained]


@pytest.mark.parametrize("template", ["chatml", "generation"])
@pytest.mark.parametrize(
    "no", [{"weight": 0}, {"train": False}, {"training": False}, {"loss": 0.0}, {"trainable": False}]
)
def test_messages_that_are_not_to_be_trained_on_are_not(template: str, no: dict[str, Any]) -> None:
    talk = [published.user("a"), published.said("b", **no), published.user("c"), published.said("d")]
    assert answers(template, {"messages": talk}) == ["d<|im_end|>"]
    assert answers(template, {"messages": talk} | no) == []
    pairs = ChatFormat().pieces({"prompt": "a", "completion": "b"} | no)
    assert pairs == [TextPiece("a", False), TextPiece("b", False, True)]


REFUSED = {
    "message 1 is marked as trained on but is not an answer": {"messages": [published.user("a") | {"weight": 1}, published.said("b")]},
    "message 2 has weight 0.5; valid: 0, 1, false, true": {"messages": [published.user("a"), published.said("b", weight=0.5)]},
    "message 2 has the key 'masked', which is not read here": {"messages": [published.user("a"), published.said("b", masked=True)]},
    "the field 'ignore' is not read here": {"ignore": False, "messages": [published.user("a"), published.said("b")]},
    "does not read 'tools'": {"tools": published.TOOLS, "messages": [published.user("a"), published.said("b")]},
    "does not read 'tool_calls', which message 2": {"messages": [published.user("a"), published.said("b", tool_calls=[published.CALL])]},
    "does not read the reasoning, which message 2": {"messages": [published.user("a"), published.said("b", reasoning_content="c")]},
    "the field 'functions' is not read here": {"functions": [{}], "messages": [published.user("a"), published.said("b")]},
    "does not read 'enable_thinking'": {"chat_template_kwargs": {"enable_thinking": False}, "messages": [published.user("a"), published.said("b")]},
    "message 1 has a part of type 'image_url'": {"messages": [{"role": "user", "content": [{"type": "image_url"}]}, published.said("b")]},
    "message 2 is not an object with a role and a text, its content, and has no tool_calls": {"messages": [published.user("a"), published.said(None)]},
    "it has one of U\\+FDD0 to U\\+FDD3, which are no characters": {"messages": [published.user("a"), published.said("x \ufdd00\ufdd1 y")]},
    "it has messages and a completion": {"completion": "b", "messages": [published.user("a"), published.said("b")]},
}  # fmt: skip


@pytest.mark.parametrize("reason", REFUSED)
def test_what_cannot_be_used_is_refused_and_not_left_unread(reason: str) -> None:
    with pytest.raises(BadConversation, match=reason):
        answers("chatml", REFUSED[reason])


def test_fields_that_nothing_reads_are_collected() -> None:
    chat = ChatFormat(published.CHATML, special_tokens=published.SPECIAL)
    chat.pieces(
        {"system_prompt": "x", "id": None, "messages": [published.user("a") | {"name": "n"}, published.said("b")]}
    )
    assert chat.unread == {"system_prompt", "messages.name"}


def test_nulls_of_arrow_are_removed_and_json_in_tools_is_read(tmp_path: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    tokenizer = published.tokenizer_file(tmp_path / "tokenizer", "byte-level", True)
    (tmp_path / "template.jinja").write_text(published.QWEN_3)
    talk = published.TOOL_TALKS["tools"]
    other = {"id": "x", "type": "function", "function": {"name": "time", "arguments": {"zone": "CET"}}}
    more = {"tools": None, "messages": [published.user("a"), published.said(None, tool_calls=[other])]}
    rows = [talk | {"tools": json.dumps(talk["tools"])}, more]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    assert parquet.read_table(tmp_path / "rows.parquet").to_pylist()[0]["messages"][0]["tool_calls"] is None
    folders = []
    for source in (tmp_path / "rows.parquet", write_lines(tmp_path / "rows.jsonl", [talk, without_nulls(more)])):
        folders.append(tmp_path / f"out{source.suffix}")
        prepare(source, folders[-1], tokenizer=tokenizer, format="chat", validation=0, separator="</s>",
                chat_template=tmp_path / "template.jinja")  # fmt: skip
    assert trained_texts(folders[0]) == trained_texts(folders[1])
    assert (folders[0] / "train-00000.bin").read_bytes() == (folders[1] / "train-00000.bin").read_bytes()


def test_a_control_token_that_the_tokenizer_lacks_is_reported(tmp_path: Path) -> None:
    tokenizer = published.tokenizer_file(tmp_path / "tokenizer", "byte-level", False)
    (tmp_path / "template.jinja").write_text(published.CHATML)
    source = write_lines(tmp_path / "talks.jsonl", [published.TALKS["one"]])
    manifest = prepare(source, tmp_path / "out", tokenizer=tokenizer, format="chat", validation=0, separator="</s>",
                       chat_template=tmp_path / "template.jinja")  # fmt: skip
    assert set(manifest.source["plain_markers"]) == {"<|im_start|>", "<|im_end|>"}
    assert min(manifest.source["plain_markers"].values()) > 1


def test_a_process_of_a_template_that_was_killed_is_answered_and_ends_without_an_error() -> None:
    process = template_process.TemplateProcess(template=published.CHATML, tokens={}, special_tokens=[], now=0, utc=True)
    process._process.kill()
    process._process.wait()
    for _ in range(2):
        with pytest.raises(DataError, match="choose another with --chat-template"):
            process.prompt([published.user("a")])
    template_process._end(process._process)


def test_the_date_of_a_template_can_be_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "86400")
    record = published.TALKS["one"]
    [first, *_] = ChatFormat(published.LLAMA_3, (("bos_token", "<s>"),), published.SPECIAL).pieces(record)
    assert "Today Date: 02 Jan 1970" in first.text


ENDLESS = {
    "loop": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "power": "{{ 9**(9**9) }}",
    "large power": "{% set n = messages | length %}{{ (9 + n) ** (10 ** 9 + n) }}",
    "range": "{{ range(10**9) | list }}",
    "recursion": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "memory": "{{ 'a' * 10**11 }}",
    "doubling": "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "width": "{{ 'a'.ljust(10**11) }}",
    "output": "{% for i in range(99999) %}{{ 'abcdefgh' * 999 }}{% endfor %}",
}


@pytest.mark.parametrize("template", rest_prove(ENDLESS, "power", "recursion", "memory"))
def test_a_template_is_bounded_in_time_and_memory(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_process, "CPU_S", 0)  # up to a second
    with pytest.raises((BadConversation, DataError), match=r"the chat template (takes more|refuses it|writes more)"):
        ChatFormat(ENDLESS[template]).pieces(published.TALKS["one"])
