"""Proves that `shardwright data` prepares and shows token shards, and leaves with the right code and words."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from shardwright.cli.data import app


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "x.jsonl"
    path.write_text("".join(json.dumps({"text": f"document {i} [/bold] of many"}) + "\n" for i in range(20)))
    return path


def test_prepare_then_inspect(source: Path, tmp_path: Path) -> None:
    done = run("prepare", source, "--out", tmp_path / "out", "--vocab-size", 280)
    assert done.exit_code == 0, done.output
    assert "train: " in done.output
    assert "vocabulary of 280" in done.output
    shown = run("inspect", tmp_path / "out", "--documents", 1, "--verify")
    assert shown.exit_code == 0, shown.output
    assert "document 0 [/bold] of many<|endoftext|>" in shown.output
    assert "train-00000.bin" in shown.output
    assert "All checksums are right." in shown.output


def test_json_is_one_document_for_machines(source: Path, tmp_path: Path) -> None:
    made = json.loads(run("prepare", source, "--out", tmp_path / "out", "--vocab-size", 300, "--json").stdout)
    shown = json.loads(run("inspect", tmp_path / "out", "--verify", "--json").stdout)
    assert made["splits"] == shown["splits"]
    assert made["fingerprint"] == shown["fingerprint"]
    assert shown["damage"] == []


def test_a_damaged_shard_answers_no(source: Path, tmp_path: Path) -> None:
    run("prepare", source, "--out", tmp_path / "out", "--vocab-size", 300)
    path = tmp_path / "out" / "train-00000.bin"
    path.write_bytes(b"\1" + path.read_bytes()[1:])
    done = run("inspect", tmp_path / "out", "--verify")
    assert done.exit_code == 1
    assert "damaged:" in done.output
    assert "train-00000.bin has the checksum" in done.output
    assert len(json.loads(run("inspect", tmp_path / "out", "--verify", "--json").stdout)["damage"]) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["prepare", "absent", "--out", "out"], "absent: there is no such file or folder"),
        (["prepare", "x.jsonl", "--out", "out", "--text-key", "body"], "no field 'body'; there are: text"),
        (["prepare", "x.jsonl", "--out", "out", "--validation", "2"], "validation=2.0 is not a fraction"),
        (["inspect", "absent"], "absent: there is no such data folder"),
        (["inspect", "."], "holds x.jsonl, but no manifest.json"),
    ],
)
def test_bad_input_leaves_with_2_and_one_line(
    source: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.chdir(source.parent)
    done = run(*arguments)
    assert done.exit_code == 2
    assert message in done.output
    assert done.output.startswith("error: ")
    assert not (source.parent / "out").exists()


def test_what_was_left_out_is_said(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "1.txt").write_text("fine")
    (tmp_path / "a" / "2.txt").write_bytes(b"caf\xe9")
    done = run("prepare", tmp_path / "a", "--out", tmp_path / "o", "--vocab-size", 300, "--encoding-errors", "skip")
    assert done.exit_code == 0, done.output
    assert "documents left out because they are not UTF-8 text: 1" in done.output
    assert "2.txt: byte 0xe9 at offset 3" in done.output
    assert "the source is one document, so there is no validation split" in done.output


def test_what_was_replaced_left_out_as_bad_or_validates_more_than_was_asked_is_said(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"text": "caf\xe9 \xe9"}\n{"text": \n' + b'{"text": "b"}\n' * 10)
    options = ("--vocab-size", 300, "--encoding-errors", "replace")
    refused = run("prepare", path, "--out", tmp_path / "o", *options)
    assert (refused.exit_code, "x.jsonl:2: not JSON" in refused.stderr) == (2, True)
    done = run("prepare", path, "--out", tmp_path / "o", *options, "--skip-bad")
    assert done.exit_code == 0, done.output
    assert "records left out because they are not JSON or have no text: 1" in done.output
    assert "x.jsonl:2: not JSON" in done.output
    assert "bytes that are not UTF-8 were replaced by U+FFFD in 2 places" in done.output
    assert "the validation split holds 1 of 11 documents (9.1%), and --validation asks for 1%" in done.output
    asked = run("prepare", path, "--out", tmp_path / "p", *options, "--skip-bad", "--validation", "0.1")
    assert "asks for" not in asked.output


def test_a_source_in_which_everything_is_bad_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text("{\n[]\n")
    done = run("prepare", tmp_path / "x.jsonl", "--out", tmp_path / "o", "--vocab-size", 300, "--skip-bad")
    assert done.exit_code == 2
    assert "there is no text in it (2 documents skipped; the first: " in done.output
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize("verb", ["prepare", "inspect"])
def test_help_has_an_example(verb: str) -> None:
    done = run(verb, "--help")
    assert done.exit_code == 0
    assert f"Example: shardwright data {verb}" in " ".join(done.output.split())
