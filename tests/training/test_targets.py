"""Proves that a step without a token that counts is skipped, that experts leave padding out of a run, that `eval RUN`
gives the validation loss of the run, and that data of another tokenizer is refused."""

import json
import random
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from typer.testing import CliRunner

from shardwright.cli.main import app
from shardwright.config import load
from shardwright.data.batches import Batch
from shardwright.data.prepare import prepare
from shardwright.data.shards import open_split
from shardwright.data.tokenizer import tokenizer_difference
from shardwright.system.errors import InputError
from shardwright.training.exporting import export
from shardwright.training.start import start
from shardwright.training.step import Trainer
from tests.training.runs import RUN_FILE, checksums, events, records, train, write_run_file


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of documents of 12 tokens in `out`, on `tokens`; the data of another tokenizer in `other`."""
    folder = tmp_path_factory.mktemp("targets")
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghij", k=rng.randint(1, 8))) for _ in range(2000)]
    lines = [" ".join(words[i : i + 1 + i % 5]) for i in range(0, len(words), 6)]
    (folder / "lines.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    prepare(folder / "lines.jsonl", folder / "tokens", vocab_size=300, validation=0.3)
    prepare(folder / "lines.jsonl", folder / "other", vocab_size=290, validation=0.3)
    text = 'out = "out"' + RUN_FILE.format(tokens="tokens").replace("samples = 0", "samples = 7")
    text = text.replace("seq_len = 16,", "seq_len = 12,").replace("dp_shard = 2", "dp_shard = 1")
    (folder / "run.toml").write_text(text.replace('path = "tokens"', 'path = "tokens", sequences = "documents"'))
    start(load(folder / "run.toml", ["steps=3"]), quiet=True)
    export(folder / "out", folder / "hf")
    return folder


def run(*arguments: object, code: int = 0) -> str:
    result = CliRunner().invoke(app, [str(each) for each in arguments])
    assert result.exit_code == code, result.output + result.stderr
    return result.stdout if code == 0 else result.stderr


def test_eval_of_a_run_gives_its_validation_loss(folder: Path):
    lines = [json.loads(line) for line in (folder / "out" / "metrics.jsonl").read_text().splitlines()]
    logged = [line["loss"] for line in lines if line["kind"] == "evaluation"][-1]
    found = json.loads(run("eval", folder / "out", "--samples", 7, "--json"))
    assert found["loss"] == pytest.approx(logged, rel=1e-6)
    assert (found["seq_len"], found["n_samples"]) == (12, 7)
    assert 0 < found["n_tokens"] < 7 * 12, "padding does not count"
    packed = json.loads(run("eval", folder / "out", "--samples", 7, "--sequences", "packed", "--json"))
    assert packed["n_tokens"] == 7 * 12
    assert "--data is missing" in run("eval", folder / "hf", code=2)


def test_eval_of_a_run_on_shards_evaluates_the_shard_that_the_run_does(folder: Path):
    prepare(folder / "lines.jsonl", folder / "shards", vocab_size=300, validation=0.3, shard_tokens=600)
    text = (folder / "run.toml").read_text().replace('path = "tokens"', 'path = "shards", order = "shards"')
    text = text.replace('out = "out"', 'out = "by-shards"').replace("samples = 7", "samples = 1000")
    (folder / "by-shards.toml").write_text(text)
    start(load(folder / "by-shards.toml", ["steps=1"]), quiet=True)
    lines = [json.loads(line) for line in (folder / "by-shards" / "metrics.jsonl").read_text().splitlines()]
    logged = [line["loss"] for line in lines if line["kind"] == "evaluation"][-1]
    result = json.loads(run("eval", folder / "by-shards", "--json"))
    assert result["loss"] == pytest.approx(logged, rel=1e-6)
    whole = json.loads(run("eval", folder / "by-shards", "--data", folder / "shards", "--json"))
    assert whole["n_samples"] > result["n_samples"] > 0
    assert whole["loss"] != pytest.approx(logged, rel=1e-6)


def test_a_run_with_experts_on_documents_does_not_depend_on_seq_len(folder: Path, tmp_path: Path):
    splits = [open_split(folder / "tokens", name) for name in ("train", "validation")]
    longest = max(int(split.document_lengths().max()) for split in splits)
    moe = {"n_experts": 4, "top_k": 2, "d_ffn": 16, "aux_loss": 0.5, "z_loss": 0.1, "capacity_factor": 1.0}
    settings = ["steps=2", f"model.max_seq_len={longest + 20}", *(f"model.moe.{key}={moe[key]}" for key in moe)]
    logged = []
    for seq_len in (longest - 1, longest + 20):
        out = tmp_path / str(seq_len)
        start(load(folder / "run.toml", [*settings, f"batch.seq_len={seq_len}", f"out={out}"]), quiet=True)
        lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        logged.append([line for line in lines if line["kind"] in ("train", "evaluation")])
    quantities = ("loss", "grad_norm", "balance_loss", "z_loss", "dropped_fraction", "load_max_over_mean")
    for short, long in zip(*logged, strict=True):
        for quantity in quantities if short["kind"] == "train" else ("loss",):
            assert long[quantity] == pytest.approx(short[quantity], rel=1e-5), quantity


@pytest.mark.parametrize("key", ["init.weights", "model.from"])
@pytest.mark.parametrize("model", ["out", "hf"])
def test_data_of_another_tokenizer_is_refused_by_every_verb(folder: Path, tmp_path: Path, key: str, model: str):
    settings = [f"{key}={folder / model}", f"data.path={folder / 'other'}", f"out={tmp_path / 'out'}", "steps=1"]
    text = (folder / "run.toml").read_text().replace("\nmodel = {", "\n# model = {") if key == "model.from" else None
    run_file = folder / f"{model}-{key}.toml"
    run_file.write_text(text or (folder / "run.toml").read_text())
    with pytest.raises(InputError, match="other' was not prepared with the tokenizer of"):
        start(load(run_file, settings), quiet=True)
    said = run("eval", folder / model, "--data", folder / "other", code=2)
    assert "was not prepared with the tokenizer of the model (" in said
    start(load(run_file, [*settings, "data.other_tokenizer=true"]), quiet=True)


def test_a_token_that_only_one_tokenizer_adds_and_another_layout_of_the_file_make_no_difference(folder, tmp_path):
    ours = folder / "tokens" / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(ours))
    tokenizer.add_special_tokens(["<pad>"])
    tokenizer.save(str(tmp_path / "padded.json"))
    (tmp_path / "plain.json").write_text(json.dumps(json.loads(ours.read_text())))
    for name in ("padded.json", "plain.json"):
        assert tokenizer_difference(tmp_path / name, ours) is None
        assert tokenizer_difference(ours, tmp_path / name) is None
    table = json.loads(ours.read_text())
    vocabulary = table["model"]["vocab"]
    first, second = list(vocabulary)[20:22]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (tmp_path / "swapped.json").write_text(json.dumps(table))
    assert "token " in str(tokenizer_difference(ours, tmp_path / "swapped.json"))


def no_targets_in_step_3(rank: int) -> None:
    step = Trainer.step

    def without(self, batch, at, rate):
        if at == 2:
            batch.targets_ABT.fill_(-100)
            batch = Batch(batch.tokens_ABT, batch.targets_ABT, batch.sample_ids_AB, 0, batch.documents_AB)
        return step(self, batch, at, rate)

    Trainer.step = without


def test_a_step_without_a_target_is_skipped_and_said(tokens: Path, tmp_path: Path):
    run_file = write_run_file(tmp_path, tokens)
    settings = ("--set", "steps=3", "--set", "checkpoint.every=2", "--set", "checkpoint.keep_last=9")
    done = train(run_file, *settings, fault=no_targets_in_step_3)
    assert "step 3 skipped: none of its 4 sequences has a token that counts" in done.stdout
    assert [record["step"] for record in records(run_file)] == [1, 2]
    assert ("skip", 3) in [(each.kind, each.step) for each in events(run_file)]
    assert checksums(run_file, 3) == checksums(run_file, 2)
