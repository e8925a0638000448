"""Proves that of prompts and answers the tokens of the answers, and no others, are trained on."""

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer
from typer.testing import CliRunner

from shardwright.cli.main import app
from shardwright.data import chat as module
from shardwright.data.batches import evaluation_batches
from shardwright.data.chat import BadConversation, ChatFormat, TextPiece
from shardwright.data.inspect import inspect
from shardwright.data.pairs import PairFormat
from shardwright.data.prepare import prepare
from shardwright.data.samples import PackedSamples, PairSamples
from shardwright.data.shards import open_split, verify_checksums
from shardwright.data.token_manifest import FORMAT_VERSION, DataManifest
from shardwright.data.tokenizer import train_bpe
from shardwright.system.errors import DataError

CHATML = """{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' }}
{%- if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}
{%- else %}{{ message['content'] + '<|im_end|>' }}{% endif %}
{{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
SPECIAL = ("<|im_start|>", "<|im_end|>")
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is 2 + 2?"},
    {"role": "assistant", "content": "4."},
    {"role": "user", "content": "And twice that?"},
    {"role": "assistant", "content": "It is 8,\nas 4 + 4 is."},
]


def test_the_names_of_fields_without_a_reader_have_a_bound() -> None:
    chat = ChatFormat("{% for m in messages %}<|{{ m.content }}|>{% endfor %}", special_tokens=("</s>",))
    for number in range(0, 3 * module.MOST_NAMES, 10):
        talk = [{"role": "user", "content": f"m{number}"}, {"role": "assistant", "content": "a", f"b{number}": 1}]
        chat.pieces({"messages": talk} | {f"{'x' * 100_000}{at}": 1 for at in range(number, number + 10)})
        chat.pieces({"messages": talk} | {f"k{at}": 1 for at in range(number, number + 10)})
    assert len(chat.unread) == module.MOST_NAMES >= len(chat.markers)
    assert max(map(len, chat.unread)) <= module.LONGEST_NAME + 3


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as those of models on the hub: tokenizer.json, and the chat template in tokenizer_config.json."""
    folder = tmp_path_factory.mktemp("model")
    trained = train_bpe([Path(module.__file__).read_text()], 300).tokenizer
    trained.add_special_tokens(list(SPECIAL))
    trained.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHATML, "eos_token": "<|im_end|>"}))
    return folder / "tokenizer.json"


def written(path: Path, *records: Any) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def answers(folder: Path, split: str = "train") -> list[list[str]]:
    """The texts that are trained on, of each document."""
    shown = inspect(folder, split, n=99)["documents"]
    return [[part["text"] for part in document["segments"] if part["trained"]] for document in shown]


def test_the_answers_of_a_conversation_and_the_token_that_ends_them_are_trained_on(tmp_path: Path, tokenizer: Path):
    source = written(tmp_path / "talks.jsonl", {"messages": TALK}, {"messages": TALK[1:3]})
    manifest = prepare(source, tmp_path / "talks", tokenizer=tokenizer, format="chat", validation=0)
    assert answers(tmp_path / "talks") == [["4.<|im_end|>", "It is 8,\nas 4 + 4 is.<|im_end|>"], ["4.<|im_end|>"]]
    whole = "".join(f"<|im_start|>{each['role']}\n{each['content']}<|im_end|>\n" for each in TALK)
    text = inspect(tmp_path / "talks", n=1)["documents"][0]["text"]
    assert text == whole + "<|endoftext|>"
    assert manifest.format_version == FORMAT_VERSION
    assert manifest.answer_end_id == Tokenizer.from_file(str(tokenizer)).token_to_id("<|im_end|>")
    assert (tmp_path / "talks" / "chat_template.jinja").read_text() == CHATML
    assert verify_checksums(tmp_path / "talks") == []
    flipped = tmp_path / "talks" / "train-00000.trained"
    flipped.write_bytes(flipped.read_bytes()[::-1])
    assert "train-00000.trained has the checksum" in verify_checksums(tmp_path / "talks")[0]


def test_a_completion_and_the_separator_that_ends_it_are_trained_on(tmp_path: Path):
    source = written(
        tmp_path / "pairs.jsonl",
        {"prompt": "What is 2 + 2? ", "completion": "4."},
        {"prompt": "Twice 4? ", "completion": "8."},
    )
    manifest = prepare(source, tmp_path / "pairs", format="chat", validation=0, vocab_size=300)
    assert manifest.answer_end_id is None
    assert answers(tmp_path / "pairs") == [["4.<|endoftext|>"], ["8.<|endoftext|>"]]


def test_no_token_of_a_prompt_is_a_target_of_a_packed_sample(tmp_path: Path, tokenizer: Path):
    records = [{"messages": TALK[: 3 + 2 * (i % 2)]} for i in range(12)]
    prepare(written(tmp_path / "t.jsonl", *records), tmp_path / "t", tokenizer=tokenizer, format="chat", validation=0)
    split = open_split(tmp_path / "t", "train")
    decode = Tokenizer.from_file(str(tokenizer)).decode
    for seq_len in (7, 16, 33):
        samples = PackedSamples(split, seq_len)
        targets: list[int] = []
        for i in range(len(samples)):
            tokens, mask = samples.read(i)
            targets += tokens[1:][mask].tolist()
        covered = len(samples) * seq_len + 1
        expected = split.tokens(1, covered - 1)[split.trained(1, covered - 1)].tolist()
        assert targets == expected
        said = decode(targets, skip_special_tokens=False).split("<|im_end|>")
        assert set(said[:-1]) == {"4.", "It is 8,\nas 4 + 4 is."}


@pytest.mark.prove
def test_ids_and_mask_are_those_of_transformers(tmp_path: Path, tokenizer: Path):
    from transformers import PreTrainedTokenizerFast

    theirs = PreTrainedTokenizerFast(tokenizer_file=str(tokenizer), eos_token="<|im_end|>")
    talks = [TALK, TALK[:3], TALK[1:], [*TALK, {"role": "user", "content": "Why?"}]]
    source = written(tmp_path / "t.jsonl", *({"messages": talk} for talk in talks))
    prepare(source, tmp_path / "ours", tokenizer=tokenizer, format="chat", validation=0)
    split = open_split(tmp_path / "ours", "train")
    for i, talk in enumerate(talks):
        found = theirs.apply_chat_template(
            talk, chat_template=CHATML, return_assistant_tokens_mask=True, return_dict=True, tokenize=True
        )
        start, end = split.document_start(i), split.document_start(i + 1) - 1
        assert split.tokens(start, end - start).tolist() == found["input_ids"]
        assert split.trained(start, end - start).tolist() == [bool(one) for one in found["assistant_masks"]]


BAD = {
    "message 1 has the role 'boss'; valid: assistant, system, tool, user": {
        "messages": [{"role": "boss", "content": "x"}]
    },
    "message 2 has the role 'asistant'; did you mean 'assistant'? --skip-bad": {
        "messages": [TALK[1], {"role": "asistant", "content": "x"}]
    },
    "no message has the role 'assistant', so there is no answer to train on": {"messages": [TALK[1]]},
    "message 1 is not an object with a role and a text": {"messages": ["hello"]},
    "the field 'messages' is empty, not a list of messages": {"messages": []},
    "message 1 contains '<|im_end|>', a special token": {"messages": [{"role": "user", "content": "<|im_end|>"}]},
    "no field prompt; there are: completion, id": {"completion": "x", "id": 3},
    "no field messages, and neither prompt nor completion; there are: text": {"text": "x"},
    "the field 'completion' is empty, not a text": {"prompt": "x", "completion": ""},
    "the field 'prompt' is a list, not a text": {"prompt": [TALK[1]], "completion": "x"},
}


@pytest.mark.parametrize("said", BAD)
def test_a_bad_record_is_named_with_what_is_wrong(tmp_path: Path, tokenizer: Path, said: str):
    source = written(tmp_path / "bad.jsonl", {"messages": TALK}, BAD[said])
    with pytest.raises(DataError) as caught:
        prepare(source, tmp_path / "out", tokenizer=tokenizer, format="chat")
    assert f"{source}:2: {said}" in str(caught.value)
    assert "--skip-bad leaves such records out" in str(caught.value)


def test_bad_records_are_left_out_and_counted_on_request(tmp_path: Path, tokenizer: Path):
    source = written(tmp_path / "bad.jsonl", {"messages": TALK}, *BAD.values())
    manifest = prepare(source, tmp_path / "out", tokenizer=tokenizer, format="chat", skip_bad=True, validation=0)
    assert manifest.source["bad"] == len(BAD)
    assert manifest.source["format"] == "chat"
    assert manifest.splits["train"].documents == 1


def test_messages_need_a_template_and_a_template_may_be_given(tmp_path: Path):
    source = written(tmp_path / "talks.jsonl", {"messages": TALK[1:3]})
    with pytest.raises(DataError, match="no chat template, and a record has messages; give one with --chat-template"):
        prepare(source, tmp_path / "out", format="chat", vocab_size=300)
    template = tmp_path / "plain.jinja"
    template.write_text(
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    prepare(source, tmp_path / "out", format="chat", chat_template=template, vocab_size=300, validation=0)
    assert answers(tmp_path / "out") == [["4.\n<|endoftext|>"]]
    template.write_text("{% for %}")
    with pytest.raises(DataError, match=r"^the chat template is not Jinja: line 1"):
        prepare(source, tmp_path / "bad", format="chat", chat_template=template, vocab_size=300)
    with pytest.raises(DataError, match="add --format chat"):
        prepare(source, tmp_path / "bad", chat_template=template, vocab_size=300)


def test_a_template_that_rewrites_earlier_answers_is_refused():
    forgets = "{% for m in messages %}{{ m.content if loop.last else '...' }}|{% endfor %}"
    with pytest.raises(BadConversation, match="renders message 3 differently"):
        ChatFormat(forgets).pieces({"messages": TALK})


def test_a_template_may_refuse_a_conversation_and_cannot_reach_python():
    refuses = ChatFormat("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(BadConversation, match="the chat template refuses it: roles must alternate"):
        refuses.pieces({"messages": TALK})
    reaches = ChatFormat("{{ messages.__class__.__mro__ }}")
    with pytest.raises(BadConversation, match="refuses it"):
        reaches.pieces({"messages": TALK})


def test_pieces_are_prompt_and_answer_in_turn():
    pieces = ChatFormat(CHATML, special_tokens=SPECIAL).pieces({"messages": TALK[1:3]})
    assert pieces == [
        TextPiece("<|im_start|>user\nWhat is 2 + 2?<|im_end|>\n<|im_start|>assistant\n", False),
        TextPiece("4.<|im_end|>", True),
        TextPiece("\n", False),
    ]


def test_conversations_come_from_parquet_too(tmp_path: Path, tokenizer: Path):
    import pyarrow as pa
    from pyarrow import parquet

    parquet.write_table(pa.table({"messages": [TALK, TALK[:3]], "id": [1, 2]}), tmp_path / "talks.parquet")
    prepare(tmp_path / "talks.parquet", tmp_path / "out", tokenizer=tokenizer, format="chat", validation=0)
    assert len(answers(tmp_path / "out")) == 2
    (tmp_path / "talk.txt").write_text("hello")
    with pytest.raises(DataError, match=r"conversations are records of \.jsonl"):
        prepare(tmp_path / "talk.txt", tmp_path / "text", tokenizer=tokenizer, format="chat")


def test_inspect_marks_the_tokens_that_are_trained_on(tmp_path: Path, tokenizer: Path):
    source = written(tmp_path / "talks.jsonl", {"messages": TALK}, {"messages": TALK[1:3]})
    typed = ["data", "prepare", str(source), "--out", str(tmp_path / "o"), "--tokenizer", str(tokenizer)]
    assert CliRunner().invoke(app, [*typed, "--format", "chat", "--validation", "0"]).exit_code == 0
    shown = CliRunner().invoke(app, ["data", "inspect", str(tmp_path / "o")]).stdout
    assert "<|im_start|>assistant\n⟦4.<|im_end|>⟧\n<|im_start|>user\nAnd twice that?" in shown
    n_answers = int(
        open_split(tmp_path / "o", "train").trained(0, open_split(tmp_path / "o", "train").document_start(1)).sum()
    )
    assert f"{n_answers} trained on" in shown
    packed = (
        CliRunner().invoke(app, ["data", "inspect", str(tmp_path / "o"), "--seq-len", "48", "--documents", "1"]).stdout
    )
    assert "train sample of 48 tokens 0: 49 tokens" in packed


def test_text_is_written_as_before_and_all_of_it_is_trained_on(prepared: Path):
    manifest = DataManifest.read(prepared)
    assert manifest.chat_template_sha256 is None
    assert not list(prepared.glob("*.trained"))
    assert np.all(open_split(prepared, "train").trained(0, 100))
    assert "segments" not in inspect(prepared, n=1)["documents"][0]


def pair_format(template: str | None = None) -> PairFormat:
    return PairFormat(template, special_tokens=SPECIAL)


def test_only_the_answers_of_a_pair_count_in_every_form_of_a_record():
    texts = {"prompt": "Is it?", "chosen": " Yes.", "rejected": " No."}
    assert pair_format().documents(texts) == [
        [TextPiece("Is it?", False), TextPiece(answer, True, True)] for answer in (" Yes.", " No.")
    ]
    asked, yes, no = TALK[:4], TALK[4], {"role": "assistant", "content": "No."}
    whole = pair_format(CHATML).documents({"chosen": [*asked, yes], "rejected": [*asked, no]})
    assert pair_format(CHATML).documents({"prompt": asked, "chosen": [yes], "rejected": [no]}) == whole
    question = {"role": "user", "content": "Is it?"}
    short = pair_format(CHATML).documents({"prompt": [question], "chosen": [yes], "rejected": [no]})
    assert pair_format(CHATML).documents({"prompt": "Is it?", "chosen": [yes], "rejected": [no]}) == short
    for pieces, answer in zip(whole, (yes, no), strict=True):
        assert "".join(piece.text for piece in pieces if piece.trained) == answer["content"] + "<|im_end|>"
        assert "4.<|im_end|>" in "".join(piece.text for piece in pieces if not piece.trained), "an earlier answer"


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"prompt": "a", "chosen": "b"}, "no field 'rejected'; there are: prompt, chosen"),
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "answer are equal, so the pair prefers neither"),
        ({"prompt": "a", "chosen": "b", "rejected": ""}, "the field 'rejected' is empty, neither a text nor a list"),
        ({"chosen": "b", "rejected": "c"}, "there is no text 'prompt' that it answers"),
        ({"prompt": "a", "chosen": "b", "rejected": TALK}, "is a text, and the other a list of messages"),
        ({"chosen": TALK, "rejected": TALK[:3]}, "starts with the whole other one; both need an answer"),
        ({"prompt": "a", "chosen": 1, "rejected": 2}, "the field 'chosen' is a int, neither"),
        (
            {"prompt": "a", "chosen": TALK, "rejected": TALK[:4] + TALK[2:3]},
            "messages and a prompt that is none of them",
        ),
        (
            {"chosen": TALK[1:3], "rejected": [{"role": "user", "content": "b"}, TALK[2]]},
            "message 1, the first that differs in 'chosen' and 'rejected', has the role 'user'; a pair has two answers",
        ),
    ],
    ids=["no rejected", "equal", "empty", "no prompt", "mixed", "prefix", "number", "prompt", "other prompts"],
)
def test_a_record_that_is_no_pair_is_told(record: dict[str, Any], words: str):
    with pytest.raises(BadConversation, match=words):
        pair_format(CHATML).documents(record)


def test_samples_of_pairs_have_whole_pairs_of_which_the_answers_count():
    lines = [{"prompt": "a" * (n % 3 + 1), "chosen": "bc", "rejected": "d" * (n % 4 + 1)} for n in range(9)]
    folder = Path(tempfile.mkdtemp())
    prepare(written(folder / "pairs.jsonl", *lines), folder / "tokens", vocab_size=257, format="preference",
            validation=0)  # fmt: skip
    split = open_split(folder / "tokens", "train")
    samples = PairSamples(split, 29)
    seen: list[int] = []
    ahead = evaluation_batches(samples, micro_batch=1, data_rank=0, data_ranks=1, vocab_size=257)
    for i, batch in zip(range(len(samples)), ahead, strict=True):
        tokens, mask = samples.read(i)
        assert batch.n_real_AB is not None
        assert int(batch.n_real_AB) == sum(len(split.document(answer)) for answer in samples.answers(i)) - 1
        lengths, answers = samples.documents(i), samples.answers(i)
        assert len(lengths) - len(answers) in (0, 1)
        assert sum(lengths) == 29
        begin = 0
        for document, length in zip(answers, lengths, strict=False):
            ids = split.document(document)
            n_answer = len(ids) - 1 - (document // 2 % 3 + 1) + 1  # with its separator
            part, counted = tokens[begin : begin + len(ids)], mask[begin : begin + len(ids) - 1]
            assert part.tolist() == ids.tolist()
            assert counted.tolist() == [False] * (len(ids) - 1 - n_answer) + [True] * n_answer
            begin += length
        assert not mask[begin:].any()
        seen += answers
    assert seen == list(range(18))
    with pytest.raises(DataError, match=r"pair 2 of the train split has 13 tokens, .* set batch.seq_len=12 or more"):
        PairSamples(split, 11)
