"""Proves that a run on tokens at a URL takes the steps of a run on the folder, also if its mirror is lost."""

import shutil
from pathlib import Path

import pytest

from tests.marks import prove
from tests.training.object_store import s3
from tests.training.runs import Run, train, training, trajectory


def url_options(url: str, run_file: Path) -> tuple[str, ...]:
    """Arguments of a run on tokens at a URL, with a small cache."""
    return "--set", f"data.path={url}", "--set", f"data.cache={run_file.parent}/cache", "--set", "data.cache_gib=1e-4"


@prove
def test_a_run_on_tokens_at_a_url_is_that_on_the_folder(run_file: Path, tokens: Path, uninterrupted: Path):
    run = train(run_file, *url_options(f"file://{tokens}", run_file))
    assert trajectory(run_file) == trajectory(uninterrupted)
    assert "Traceback" not in run.stderr


@prove
def test_a_run_on_tokens_in_an_object_store_goes_on_without_its_mirror(
    run_file: Path, tokens: Path, uninterrupted: Path, monkeypatch: pytest.MonkeyPatch
):
    with s3(monkeypatch) as (system, environment):
        system.put(str(tokens), "bucket/tokens", recursive=True)

        def trained(*arguments: str, expect: int = 0) -> Run:
            options = url_options("s3://bucket/tokens", run_file)
            with training(run_file, *options, *arguments, environment=environment) as run:
                assert run.wait() == expect, run.stderr
            return run

        trained("--set", "steps=10")
        shutil.rmtree(run_file.parent / "cache")
        trained("--resume")
        assert trajectory(run_file) == trajectory(uninterrupted)
        [mirror] = (run_file.parent / "cache").iterdir()
        assert {path.name for path in mirror.iterdir()} == {path.name for path in tokens.iterdir()}
        system.rm("bucket/tokens/train-00000.bin")
        shutil.rmtree(run_file.parent / "cache")
        lost = trained("--set", "out=lost", expect=2)
        assert "s3://bucket/tokens/train-00000.bin: there is no such file" in lost.stderr
