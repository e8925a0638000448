"""Proves that tokenizers trained here are lossless, and any tokenizer.json is used as a corpus needs."""

import json
import os
import re
import sys
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors

from shardwright.data.tokenizer import LONGEST_WORD, TextTokenizer, load_tokenizer, short_words, train_bpe
from shardwright.system.console import stderr_dropped_on_error
from shardwright.system.errors import DataError

TEXTS = ["The quick brown fox jumps over the lazy dog.\n", "def f(x):\n    return x + 1\n"] * 20
BPE = train_bpe(TEXTS, 300)


def word_tokenizer(path: Path, *special: str, cut_at: int = 0) -> Path:
    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1, "b": 2}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in special])
    if cut_at:
        tokenizer.enable_truncation(cut_at)
        tokenizer.enable_padding(length=cut_at)
        tokenizer.post_processor = processors.TemplateProcessing("</s> $A", special_tokens=[("</s>", 3)])
    tokenizer.save(str(path))
    return path


def test_text_comes_back_exactly() -> None:
    (ids,) = BPE.encode_batch(["The lazy dog"])
    assert BPE.decode(ids.tolist()) == "The lazy dog"
    assert BPE.vocab_size == 300
    assert BPE.separator_id == 0


def test_no_word_of_the_library_is_longer_than_a_token_may_be_whichever_spaces_a_text_has() -> None:
    spaces = [letter for letter in map(chr, range(sys.maxunicode + 1)) if letter.isspace()]
    for text in ["ACGT" * 300, *(f"{space}!" * 600 for space in spaces), *(space * 600 for space in spaces)]:
        words = [word for part in short_words(text) for word in BPE.tokenizer.pre_tokenizer.pre_tokenize_str(part)]
        assert max(end - begin for _, (begin, end) in words) <= LONGEST_WORD, repr(text[:2])


@given(st.text())
def test_any_text_comes_back_exactly(text: str) -> None:
    (ids,) = BPE.encode_batch([text])
    assert BPE.decode(ids.tolist()) == text
    assert ids.dtype == np.uint32


def test_a_separator_written_in_a_text_ends_no_document(tmp_path: Path) -> None:
    text = "GPT-2 uses <|endoftext|> between documents"
    (tmp_path / "tokenizer.json").write_bytes(BPE.json_bytes)
    for tokenizer in (BPE, load_tokenizer(tmp_path / "tokenizer.json")):
        (ids,) = tokenizer.encode_batch([text])
        assert tokenizer.separator_id not in ids
        assert tokenizer.decode(ids.tolist()) == text


def test_training_is_deterministic_and_reads_no_more_than_the_sample() -> None:
    read: list[int] = []

    def stream() -> object:
        for i in range(1000):
            read.append(i)
            yield f"text {i} " * 10

    one = train_bpe(stream(), 280, sample_bytes=2000)  # type: ignore[arg-type]
    assert len(read) < 40
    assert one.json_bytes == train_bpe(stream(), 280, sample_bytes=2000).json_bytes  # type: ignore[arg-type]


def test_a_vocabulary_below_the_bytes_is_an_error() -> None:
    with pytest.raises(DataError, match="vocab_size=100 is below 257 = 256 bytes"):
        train_bpe(TEXTS, 100)


def test_a_tokenizer_that_cuts_pads_and_adds_does_none_of_it_here(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(word_tokenizer(tmp_path / "t.json", "</s>", cut_at=4))
    (ids,) = tokenizer.encode_batch(["a b " * 10])
    assert ids.tolist() == [1, 2] * 10
    assert (tokenizer.separator, tokenizer.separator_id, tokenizer.vocab_size) == ("</s>", 3, 4)


def test_the_separator_is_found_chosen_or_asked_for(tmp_path: Path) -> None:
    def load(*special: str, separator: str | None = None) -> TextTokenizer:
        return load_tokenizer(word_tokenizer(tmp_path / "t.json", *special), separator)

    assert load("<|im_end|>", "</s>").separator == "</s>"
    assert load("<|im_end|>", "</s>", separator="<|im_end|>").separator_id == 3
    with pytest.raises(DataError, match=r"choose with --separator; its special tokens: <pad>, <eod>"):
        load("<pad>", "<eod>")
    with pytest.raises(DataError, match=r"'<eof>' is not in its vocabulary; did you mean '<eod>'"):
        load("<pad>", "<eod>", separator="<eof>")


def test_a_file_that_is_no_tokenizer_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text('{"a": 1}')
    with pytest.raises(DataError, match=r"x\.json: not a tokenizer\.json"):
        load_tokenizer(tmp_path / "x.json")
    with pytest.raises(DataError, match="cannot be read: No such file"):
        load_tokenizer(tmp_path / "absent.json")
    with pytest.raises(DataError, match=r"a folder, not a tokenizer; pass the file"):
        load_tokenizer(tmp_path)


def test_a_word_is_trained_on_in_parts_of_bounded_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library takes time by the square of a word's length: 58 CPU-seconds for 0.3 MB of DNA in one word."""
    seen: list[str] = []
    train = Tokenizer.train_from_iterator

    def watched(self: Tokenizer, texts: Iterable[str], trainer: object) -> None:
        seen.extend(texts)
        train(self, seen, trainer)

    monkeypatch.setattr("shardwright.data.tokenizer.Tokenizer.train_from_iterator", watched, raising=False)
    dna, blank = "ACGT" * 5000, " " * 3000
    tokenizer = train_bpe([f"{dna} and{blank}more", "short words as they are"], 300)
    assert "".join(seen) == f"{dna} and{blank}more" + "short words as they are"
    assert max(len(word) for text in seen for word in re.findall(r"\S+|\s+", text)) <= 256
    assert seen[-1] == "short words as they are"
    assert tokenizer.decode(tokenizer.encode_batch([dna])[0].tolist()) == dna


def test_a_tokenizer_whose_rules_fail_on_a_text_is_refused(tmp_path: Path) -> None:
    rules = json.loads(train_bpe(["a text"], 257).json_bytes)
    rules["normalizer"] = {"type": "Replace", "pattern": {"Regex": "(a+)+$"}, "content": "x"}  # exponential time
    (tmp_path / "tokenizer.json").write_text(json.dumps(rules))
    with pytest.raises(DataError, match="the rules of the tokenizer fail on a text"):
        load_tokenizer(tmp_path / "tokenizer.json").encode_batch(["a" * 40 + "!"])


def test_a_panic_of_the_library_prints_no_trace_of_its_own(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    rules = json.loads(train_bpe(["a text"], 257).json_bytes)
    rules["pre_tokenizer"] = {"type": "FixedLength", "length": 0}  # chunks of no character
    (tmp_path / "tokenizer.json").write_text(json.dumps(rules))
    with pytest.raises(DataError, match="the rules of the tokenizer fail on a text: chunk size must be non-zero"):
        load_tokenizer(tmp_path / "tokenizer.json").encode_batch(["a text"])
    assert capfd.readouterr() == ("", "")
    with stderr_dropped_on_error():
        os.write(2, b"a warning of a library")
    assert capfd.readouterr() == ("", "a warning of a library")
