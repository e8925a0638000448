"""Proves that input of any size ends in a short message: headers of many tensors, grids and lists without end, loops of
links."""

import json
import struct
from pathlib import Path

import pytest
from typer.testing import CliRunner

from shardwright.cli.main import app
from shardwright.data.prepare import prepare
from tests.marks import prove

RUN = """
out = "out"
steps = 2
data = { path = "tokens" }
batch = { seq_len = 16, global_batch = 1 }
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text(RUN)
    (tmp_path / "texts.jsonl").write_text('{"text": "a"}\n')
    for here, there in (("loop", "pool"), ("pool", "loop")):
        (tmp_path / here).symlink_to(there)
    return tmp_path


def refused(*words: str, told: str) -> None:
    result = CliRunner().invoke(app, list(words))
    assert result.exit_code == 2, result.output
    assert told in result.output, result.output
    assert len(result.output) < 2000
    assert not Path("made").exists()


@pytest.fixture
def many_tensors(folder: Path) -> Path:
    """A folder of transformers whose weights have 200,000 tensors that the model does not have."""
    (folder / "a.txt").write_text("a b c d " * 50)
    prepare(folder / "a.txt", folder / "tokens", vocab_size=258)
    hf = folder / "hf"
    hf.mkdir()
    config = {"model_type": "llama", "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    (hf / "config.json").write_text(
        json.dumps(
            config | {"vocab_size": 258, "intermediate_size": 32, "max_position_embeddings": 128, "rms_norm_eps": 1e-5}
        )
    )
    (hf / "tokenizer.json").write_bytes((folder / "tokens/tokenizer.json").read_bytes())
    tensors = {
        f"model.layers.{n}.w": {"dtype": "F32", "shape": [1], "data_offsets": [4 * n, 4 * n + 4]}
        for n in range(200_000)
    }
    header = json.dumps(tensors).encode()
    (hf / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(800_000))
    return hf


@prove
@pytest.mark.parametrize(
    "words",
    [
        ("merge", "hf", "hf", "--out", "made"),
        ("score", "hf", "texts.jsonl"),
        ("eval", "hf", "--data", "tokens"),
        ("import", "hf", "--out", "made"),
    ],
    ids=lambda words: words[0],
)
def test_weights_of_very_many_tensors_are_refused_in_a_few_lines(many_tensors: Path, words: tuple[str, ...]):
    refused(*words, told="and 200017 more" if words[0] == "merge" else "more")


MANY = "{}=" + ",".join(map(str, range(1, 20_000)))
DIGITS = "9" * 100_000
CASES = [
    (("sweep", "run.toml", "--grid", MANY.format("seed"), "--grid", MANY.format("steps"), "--out", "made"),
     "at most 1,000"),
    (("sweep", "run.toml", "--grid", f"seed={DIGITS}", "--out", "made"), "seed="),
    (("sweep", "run.toml", "--grid", f"{'a' * 100_000}=1", "--out", "made"), "--grid"),
    (("mup-check", "run.toml", "--widths", ",".join(map(str, range(16, 200_000)))), "--widths 65537: whole numbers"),
    (("mup-check", "run.toml", "--widths", DIGITS), "whole numbers from 1 to 65,536"),
    (("launch", "run.toml", "--on", "slurm", "--nodes", str(10**12)), "at most"),
    (("launch", "run.toml", "--on", DIGITS, "--nodes", "1"), "no such scheduler"),
    (("launch", "loop", "--on", "slurm", "--nodes", "1"), "loop"),
    (("sweep", "loop", "--grid", "seed=1", "--out", "made"), "loop"),
    (("mup-check", "loop"), "loop"),
    (("merge", "loop", "loop", "--out", "made"), "loop"),
    (("score", "loop", "texts.jsonl"), "loop"),
    (("merge", "run.toml", "run.toml", "--shares", MANY.removeprefix("{}="), "--out", "made"), "run.toml"),
]  # fmt: skip


@pytest.mark.parametrize(("words", "told"), CASES, ids=lambda part: part[0] if isinstance(part, tuple) else "")
def test_lists_without_end_and_loops_are_refused_in_a_few_lines(folder: Path, words: tuple[str, ...], told: str):
    refused(*words, told=told)
