"""Proves that a text of any length has the token ids of encoding it at once."""

import random
from pathlib import Path

import numpy as np
import pytest

from shardwright.data import encoding
from shardwright.data.encoding import Joiner, TextSection, continued, encode, windows
from shardwright.data.tokenizer import TextTokenizer, load_tokenizer
from tests.data import published_templates as published
from tests.marks import rest_prove

KINDS = ("byte-level", "split", "metaspace", "prepend")


def texts() -> dict[str, str]:
    rng = random.Random(0)
    words = published.QWEN_3.split()
    return {
        "lines": "\n".join(" ".join(rng.choices(words, k=9)) + "\n" * rng.randint(0, 3) for _ in range(900)),
        "one line": " ".join(rng.choices([*words, "caf\u00e9", "\U0001f600", "  "], k=9000)),
        "no spaces": "".join(rng.choices("ACGT", k=40_000)),
        "one letter": "a" * 30_001,
        "spaces": "x" + " " * 30_000 + "y",
    }


def joined(tokenizer: TextTokenizer, section: TextSection) -> tuple[list[int], list[bool]]:
    joiner, ids, trained = Joiner(tokenizer), [], []
    parts = list(windows(section))
    for part, encoded in zip(parts, encode(tokenizer, parts), strict=True):
        for more, mask in joiner.add(part, encoded):
            ids += more.tolist()
            trained += np.broadcast_to(mask, more.shape).tolist()
    return ids, trained


@pytest.mark.parametrize(
    ("kind", "text"),
    rest_prove(
        [(k, t) for k in KINDS for t in texts()],
        ("byte-level", "lines"),
        ("prepend", "one line"),
        ("split", "spaces"),
    ),
)
def test_a_long_text_has_the_ids_of_encoding_it_at_once(
    tmp_path: Path, kind: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoding, "WINDOW", 4096)
    monkeypatch.setattr(encoding, "CONTEXT", 512)
    monkeypatch.setattr(encoding, "AGREED", 128)
    tokenizer = load_tokenizer(published.tokenizer_file(tmp_path, kind, True), "</s>")
    whole = texts()[text]
    expected = tokenizer.tokenizer.encode(whole, add_special_tokens=False)
    for size in (997, len(whole)):
        pieces = [whole[at : at + size] for at in range(0, len(whole), size)]
        assert len(list(windows(TextSection(0, pieces)))) > 3
        assert joined(tokenizer, TextSection(0, pieces))[0] == expected.ids
    spans = ((100, 200), (3000, 9001), (20_000, 20_001))
    ids, trained = joined(tokenizer, TextSection(0, [whole], spans))
    assert ids == expected.ids
    overlaps = [any(start < b and end > a for a, b in spans) for start, end in expected.offsets]
    assert trained == overlaps


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", ["4.", " four", "\nx", "\U0001f600", "a", ".5"])
def test_a_completion_gets_no_false_space(tmp_path: Path, kind: str, text: str) -> None:
    tokenizer = load_tokenizer(published.tokenizer_file(tmp_path, kind, True), "</s>")
    ids, trained = joined(tokenizer, continued(0, text, ((0, len(text)),), tokenizer, False))
    assert all(trained)
    if kind in ("byte-level", "split"):
        assert tokenizer.decode(ids) == text
    first = tokenizer.tokenizer.id_to_token(ids[0])
    assert first.startswith("\u2581") == (text.startswith(" ") and kind in ("metaspace", "prepend"))


def test_short_and_long_texts_that_are_encoded_together_keep_their_order(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(published.tokenizer_file(tmp_path, "byte-level", True), "</s>")
    sections = [TextSection(0, ["a"]), TextSection(1, ["b c"], ((0, 1),)), TextSection(2, ["d"]), TextSection(3, ["e"])]
    parts = [part for section in sections for part in windows(section)]
    together = [encoded.ids for encoded in encode(tokenizer, parts)]
    assert together == [tokenizer.tokenizer.encode(part.text, add_special_tokens=False).ids for part in parts]
