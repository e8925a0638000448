"""Proves that the place that is told of a sample, its file, tokens and documents, holds what a rank trains on, for
every kind of data of a run."""

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardwright.config import parse
from shardwright.data.prepare import prepare
from shardwright.data.shards import open_split
from shardwright.runs.records import EventRecord, SamplePlace, append_event, read_events
from shardwright.training.checkpoint.manifest import TrainingProgress
from shardwright.training.sources import Sources

SEQ_LEN = 16
KINDS: dict[str, dict[str, Any]] = {
    "one folder": {"path": "words"},
    "documents as samples": {"path": "words", "sequences": "documents"},
    "conversations": {"path": "talks"},
    "a mixture": {"sources": [{"path": "words", "weight": 3}, {"path": "talks", "weight": 1}]},
}


def prepared(folder: Path) -> None:
    """Two folders of tokens of one tokenizer: texts of 20 to 340 tokens in shards of 100 or more, and answers."""
    texts = [" ".join(str(7919 * i * j) for j in range(2 + i % 40)) for i in range(60)]
    (folder / "texts").mkdir()
    for i, text in enumerate(texts):
        (folder / "texts" / f"{i}.txt").write_text(text)
    prepare(folder / "texts", folder / "words", vocab_size=300, validation=0.0, shard_tokens=100)
    talks = [{"prompt": f"{i} and {i}?", "completion": str(2 * i) * 9} for i in range(60)]
    (folder / "talks.jsonl").write_text("".join(json.dumps(each) + "\n" for each in talks))
    tokenizer = folder / "words" / "tokenizer.json"
    prepare(folder / "talks.jsonl", folder / "talks", tokenizer=tokenizer, validation=0.0, format="chat")


def tokens_there(place: SamplePlace) -> np.ndarray:
    """The tokens of a place, read from its file and those that follow."""
    file = Path(place.file)
    following = [path for path in sorted(file.parent.glob("train-*.bin")) if path >= file]
    return np.concatenate([np.fromfile(path, "<u2") for path in following])[place.token :][: place.n_tokens]


def check_places(*, kind: str = "one folder") -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepared(folder)
        data = json.loads(json.dumps(KINDS[kind]).replace('"path": "', f'"path": "{folder}/'))
        model = {"preset": "debug", "vocab_size": 300}
        batch = {"seq_len": SEQ_LEN, "global_batch": 4}
        config = parse(
            {"out": "run", "steps": 9, "model": model, "data": data, "batch": batch, "evaluation": {"samples": 0}}
        )
        sources = Sources(config)
        order = sources.order(TrainingProgress(0, 0, config.seed))
        places = sources.places(order, range(3, 99))
        assert [place.sample for place in places] == [*range(3, 99)]
        assert len({Path(place.file).parent for place in places}) == len(data.get("sources", [data]))
        for place, i in zip(places, order(np.arange(3, 99)), strict=True):
            tokens, _ = sources.train.read(int(i))
            there = tokens_there(place)
            assert np.array_equal(there, tokens[: len(there)])
            assert place.documents is not None
            first, last = place.documents
            split = open_split(Path(place.file).parent, "train")
            begin, end = split.document_start(first), split.document_start(last + 1)
            at = sources.train.origin(int(i))[1]
            assert begin <= at < split.document_start(first + 1)
            assert split.document_start(last) < at + place.n_tokens <= end


@pytest.mark.parametrize("kind", KINDS)
def test_the_place_of_a_sample_holds_its_tokens_and_is_of_its_documents(kind: str):
    check_places(kind=kind)


def test_an_event_holds_the_places_of_its_samples(tmp_path: Path):
    places = (
        SamplePlace(4, "data/train-00000.bin", 64, 17, (2, 3)),
        SamplePlace(5, "data/train-00000.bin", 80, 9, None),
    )
    append_event(tmp_path, EventRecord("skip", 2, "a spike", samples=places))
    append_event(tmp_path, EventRecord("save", 3, "saved"))
    assert [event.samples for event in read_events(tmp_path)] == [places, ()]
    assert str(places[0]) == "data/train-00000.bin, tokens 64 to 80, documents 2 to 3"
    assert str(places[1]) == "data/train-00000.bin, tokens 80 to 88"
    assert "samples" not in (tmp_path / "events.jsonl").read_text().splitlines()[1]
