"""Proves that `[model] from` takes the sizes of any folder with a model, and that nothing else may contradict them."""

import tomllib
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from shardwright.config import parse, resolved_toml
from shardwright.hugging_face.reader import open_weights
from shardwright.model.presets import resolve
from shardwright.model.sections import RopeScaling
from shardwright.system.errors import ConfigError
from shardwright.training.importing import import_weights

pytest.importorskip("transformers")

from tests.hugging_face.models import kept

REST = {"out": "x", "steps": 1, "data": {"path": "x"}, "batch": {"seq_len": 4, "global_batch": 4}}


def section(**model: Any) -> Any:
    return parse(REST | {"model": model})


def refused(**model: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        section(**model)
    return str(caught.value)


@pytest.mark.parametrize("family", ["llama 3", "gpt2", "deepseek-v3"])
def test_the_sizes_are_those_of_the_folder_and_are_kept_with_the_run(family: str, tmp_path: Path):
    import_weights(kept(family), tmp_path / "weights")
    expected = open_weights(kept(family)).spec
    for folder in (kept(family), tmp_path / "weights"):
        config = section(**{"from": str(folder)})
        assert config.spec() == expected
        text = resolved_toml(config)
        assert "from =" not in text
        assert parse(tomllib.loads(text)).model.spec() == expected


def test_what_contradicts_the_folder_is_refused_and_what_does_not_is_taken():
    llama = str(kept("llama"))
    said = refused(**{"from": llama, "n_layers": 3, "norm_eps": 1e-6, "dropout": 0.1})
    assert sorted(line.split()[2] for line in said.splitlines()) == ["model.n_layers=3", "model.norm_eps=1e-06"]
    assert "give one" in refused(**{"from": llama, "preset": "debug"})
    longer = {"max_seq_len": 256, "rope_theta": 1e4, "rope_scaling": {"kind": "linear", "factor": 4.0}, "dropout": 0.1}
    spec = section(**{"from": llama, **longer}).model.spec()
    assert (spec.max_seq_len, spec.rope_theta, spec.dropout) == (256, 1e4, 0.1)
    assert spec.rope_scaling == RopeScaling(kind="linear", factor=4.0)
    assert "model.max_seq_len=256 contradicts" in refused(**{"from": str(kept("gpt2")), "max_seq_len": 256})


def test_another_kind_of_scaling_takes_nothing_of_that_of_the_preset():
    yarn = {"kind": "yarn", "factor": 4.0, "original_max_seq_len": 131072}
    assert section(preset="llama-3.1-8b", rope_scaling=yarn).model.spec().rope_scaling == RopeScaling(**yarn)
    changed = section(preset="llama-3.1-8b", rope_scaling={"factor": 4.0}).model.spec().rope_scaling
    assert changed == RopeScaling(factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_seq_len=8192)
    assert resolve("llama-3.1-8b").rope_scaling != changed
    wrong = refused(rope_scaling={"kind": "linear", "factor": 2.0, "beta_fast": 8.0})
    assert "model.rope_scaling.beta_fast=8.0 is not used by rope_scaling.kind='linear'" in wrong
    assert "model.rope_scaling.original_max_seq_len: missing" in refused(rope_scaling={"kind": "yarn", "factor": 2.0})


def test_a_folder_without_a_model_is_refused(tmp_path: Path):
    assert "holds no model; give a folder of transformers" in refused(**{"from": str(tmp_path)})
    assert "is no folder" in refused(**{"from": str(tmp_path / "nowhere")})


def test_the_optimizer_is_kept_only_with_weights():
    with pytest.raises(ConfigError, match="optimizer=true goes with"):
        parse(REST | {"init": {"optimizer": True}})


def test_on_the_command_line_a_folder_takes_the_place_of_a_preset_and_a_preset_that_of_a_folder():
    llama = str(kept("llama 3"))
    of_preset, of_folder = REST | {"model": {"preset": "debug"}}, REST | {"model": {"from": llama}}
    assert parse(deepcopy(of_preset), [f"model.from={llama}"]).model.spec() == open_weights(kept("llama 3")).spec
    assert parse(deepcopy(of_folder), ["model.preset=debug"]).model.spec() == resolve("debug")
    with pytest.raises(ConfigError, match="both name a model"):
        parse(deepcopy(of_preset) | {"model": {"preset": "debug", "from": llama}}, ["steps=2"])
