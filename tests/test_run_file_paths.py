"""Proves that relative paths of a run file are relative to its folder, those of --set to the working folder, and that
the run file kept with a run means the same from every folder."""

import os
from pathlib import Path

import pytest

from shardwright.config import load
from shardwright.config.reading import flat, resolved_toml
from shardwright.config.reference import keys
from shardwright.config.run_config import RunConfig
from shardwright.system import extensions
from shardwright.system.errors import ConfigError

RUN_FILE = """
out = "runs/a"
steps = 2
offload_path = "../states"
extensions = ["own.py", "json"]
model = { from = "hf" }
init = { weights = "hf" }
batch = { seq_len = 8, global_batch = 2 }
checkpoint = { resume = "runs/b/checkpoints/step-00000001", local = "local", local_every = 1, \
durable = "durable", every = 2 }
[[data.sources]]
path = "data/one"
weight = 1.0
[[data.sources]]
path = "s3://bucket/two"
weight = 1.0
"""
PATHS = {
    "out": "{here}/runs/a",
    "offload_path": "{above}/states",
    "extensions": ["{here}/own.py", "json"],
    "model.from": "{here}/hf",
    "init.weights": "{here}/hf",
    "checkpoint.resume": "{here}/runs/b/checkpoints/step-00000001",
    "checkpoint.local": "{here}/local",
    "checkpoint.durable": "{here}/durable",
}


@pytest.fixture
def run_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "above" / "here"
    (folder / "hf").mkdir(parents=True)
    (folder / "hf" / "model.toml").write_text('[model]\npreset = "debug"\n')
    (folder / "own.py").write_text("")
    monkeypatch.setattr(extensions, "_LOADED", [str(folder / "own.py"), "json"])  # what is only read imports no others
    (folder / "run.toml").write_text(RUN_FILE)
    return folder / "run.toml"


def flat_values(config: RunConfig) -> dict:
    return flat(config.model_dump())


def test_paths_of_a_run_file_are_relative_to_its_folder_wherever_it_is_read(run_file, tmp_path, monkeypatch):
    for working in (tmp_path, run_file.parent, tmp_path / "above"):
        monkeypatch.chdir(working)
        config = load(os.path.relpath(run_file))
        found = flat_values(config)
        for key, expected in PATHS.items():
            wanted = expected if isinstance(expected, list) else [expected]
            wanted = [each.format(here=run_file.parent, above=run_file.parent.parent) for each in wanted]
            values = found[key] if isinstance(expected, list) else [found[key]]
            assert [each if each == "json" else os.path.abspath(each) for each in values] == wanted, key
        assert [source.path for source in config.data.sources][1] == "s3://bucket/two"
        assert os.path.abspath(config.data.sources[0].path) == str(run_file.parent / "data" / "one")


def test_paths_of_set_are_relative_to_the_working_folder(run_file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = load(run_file, ["out=runs/c", "init.weights=above/here/hf", "checkpoint.resume=auto"])
    assert (config.out, config.init.weights, config.checkpoint.resume) == ("runs/c", "above/here/hf", "auto")


def test_the_kept_run_file_means_the_same_from_every_folder(run_file, tmp_path, monkeypatch):
    monkeypatch.chdir(run_file.parent.parent)
    (tmp_path / "kept.toml").write_text(resolved_toml(load("here/run.toml"), absolute=True))
    monkeypatch.chdir(tmp_path)
    config = load("kept.toml")
    assert config.out == str(run_file.parent / "runs" / "a")
    assert flat_values(load("above/here/run.toml")).keys() == flat_values(config).keys()
    assert not [v for k, v in flat_values(config).items() if k in PATHS and isinstance(v, str) and not os.path.isabs(v)]


def test_a_kept_run_file_of_an_earlier_version_is_relative_to_the_working_folder(run_file, tmp_path, monkeypatch):
    monkeypatch.chdir(run_file.parent)
    (tmp_path / "kept.toml").write_text(resolved_toml(load("run.toml")))
    assert load(tmp_path / "kept.toml").out == "runs/a"


def test_a_tilde_is_the_home_folder_in_a_run_file_and_in_set(run_file, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    run_file.write_text(RUN_FILE.replace("runs/a", "~/runs/a").replace("data/one", "~/one"))
    config = load(run_file, ["init.weights=~/w"])
    found = [config.out, config.data.sources[0].path, config.init.weights]
    assert found == [f"{tmp_path}/home/{name}" for name in ("runs/a", "one", "w")]


def test_a_moved_run_is_not_started_anew_in_its_old_place(run_file, tmp_path, monkeypatch):
    config = load(run_file)
    moved = tmp_path / "moved"
    moved.mkdir()
    (moved / "run.toml").write_text(resolved_toml(config, absolute=True))
    assert load(moved / "run.toml", started=True).out == config.out, "a copy of the run file alone"
    (moved / "metrics.jsonl").write_text("")
    with pytest.raises(ConfigError, match=rf"the run in this folder was moved .*; continue it by --set out={moved},"):
        load(moved / "run.toml", started=True)
    assert load(moved / "run.toml").out == config.out, "what is only read"
    assert load(moved / "run.toml", [f"out={moved}"], started=True).out == str(moved)
    Path(config.out).parent.mkdir()
    Path(config.out).symlink_to(moved)
    assert load(moved / "run.toml", started=True).out == config.out, "the same folder under another name"


def test_a_folder_in_place_of_a_run_file_is_an_error_with_the_file_that_is_meant(run_file, tmp_path):
    with pytest.raises(ConfigError, match=rf"the run file of the run in it is {run_file}"):
        load(run_file.parent)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=rf"is named with --model {tmp_path} in a plan"):
        load(tmp_path)


def test_every_key_that_names_a_folder_is_marked_as_a_path():
    """So that a new key cannot be left out: keys whose description begins with a folder, a file or a path."""
    named = {
        key.path.replace("data.sources.path", "data.path")
        for key in keys()
        if "folder" in key.description.split(";")[0].split(",")[0] and key.type.startswith("text")
    }
    assert named <= {*PATHS, "data.path", "data.cache", "checkpoint.resume"}
    assert {"out", "offload_path", "data.path", "init.weights", "model.from", "checkpoint.local"} <= named
