"""Proves that a run on shards that `data prepare` is still publishing takes the steps of a run on the complete folder,
also if prepare is killed and the run ends for lack of data and is resumed."""

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from shardwright.data.prepare import prepare
from shardwright.data.token_manifest import DataManifest
from tests.data.publications import OPTIONS, corpus, prepare_killed
from tests.training.runs import train, training, trajectory, write_run_file

pytestmark = pytest.mark.prove
ORDERED = ("--set", "data.order=shards", "--set", "evaluation.samples=4", "--set", "evaluation.every=4")
LONG = (*ORDERED, "--set", "steps=32", "--set", "batch.global_batch=32")
"""More steps than the samples of the first shards, and fewer than two epochs."""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return corpus(tmp_path_factory.mktemp("source") / "x.jsonl")


def arguments(source: Path, out: Path) -> Sequence[str]:
    options = [f"--{name.replace('_', '-')}={value}" for name, value in OPTIONS.items() if name != "publish"]
    command = [sys.executable, "-m", "shardwright", "data", "prepare", str(source), "--out", str(out)]
    return [*command, "--publish", *options]


@pytest.fixture(scope="module")
def complete(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run file of a run on the complete folder."""
    folder = tmp_path_factory.mktemp("complete")
    prepare(source, folder / "tokens", **OPTIONS)
    run_file = write_run_file(folder, folder / "tokens")
    train(run_file, *LONG)
    return run_file


def test_a_run_ends_with_a_sentence_where_the_shards_end_and_goes_on_to_the_same_numbers(
    source: Path, complete: Path, tmp_path: Path
):
    tokens = tmp_path / "tokens"
    prepare_killed(source, tokens)
    run_file = write_run_file(tmp_path, tokens)
    refused = train(run_file, expect=2)
    assert "`data prepare` has published 2 shards of train and not finished, and data.order='all'" in refused.stderr
    ended = train(run_file, *LONG, "--set", "data.wait_s=0", expect=2)
    assert "Traceback" not in ended.stderr
    assert "and `data prepare` has published" in ended.stderr
    assert "continue `data prepare`, then the run with --resume" in ended.stderr
    subprocess.run(arguments(source, tokens), check=True, capture_output=True)
    assert DataManifest.read(tokens).unfinished is None
    train(run_file, *LONG, "--resume")
    assert trajectory(run_file) == trajectory(complete)


def test_a_run_waits_for_a_prepare_that_is_killed_and_started_again(source: Path, complete: Path, tmp_path: Path):
    tokens = tmp_path / "tokens"
    prepare_killed(source, tokens)
    run_file = write_run_file(tmp_path, tokens)
    with training(run_file, *LONG) as run:
        run.wait_for(lambda: "waiting: the next step takes sample" in run.stdout)
        prepare_killed(source, tokens, 13_000)
        subprocess.run(arguments(source, tokens), check=True, capture_output=True)
        assert run.wait() == 0, run.stderr
    assert trajectory(run_file) == trajectory(complete)


def test_a_run_is_not_resumed_on_other_shards(source: Path, complete: Path, tmp_path: Path):
    out = shutil.copytree(complete.parent, tmp_path / "run")
    run_file = write_run_file(out, out / "tokens")
    shutil.rmtree(out / "tokens")
    text = source.read_text().splitlines(keepends=True)
    (tmp_path / "other.jsonl").write_text("".join(reversed(text)))
    tokenizer = complete.parent / "tokens" / "tokenizer.json"
    prepare(tmp_path / "other.jsonl", out / "tokens", **OPTIONS | {"tokenizer": tokenizer})
    refused = train(run_file, *LONG, "--set", "steps=34", "--resume", expect=2)
    assert "keep the sources that were trained on" in refused.stderr
