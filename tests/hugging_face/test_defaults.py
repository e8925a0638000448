"""Proves that a key which a config.json leaves out has the default of `transformers`, in every architecture."""

import json

import pytest

from shardwright.hugging_face.architecture import Config, find
from shardwright.model.spec import ModelSpec
from shardwright.system.errors import InputError

pytest.importorskip("transformers")

from transformers import AutoConfig

from tests.hugging_face.models import FAMILIES, kept

NOT_READ = ("model_type", "architectures", "num_nextn_predict_layers")
"""Keys that name the architecture, and one that `transformers` has without running such a module."""


def spec_of(config: Config) -> ModelSpec | None:
    """The model of a configuration, None if it is refused."""
    try:
        return find(config).spec(config)
    except InputError:
        return None


@pytest.mark.parametrize("family", FAMILIES)
def test_each_key_left_out_has_the_default_of_transformers(family: str):
    check_defaults(family)


def check_defaults(family: str) -> None:
    config = json.loads((kept(family) / "config.json").read_text())
    stated = []
    for key in config:
        given = {name: value for name, value in config.items() if name != key}
        if key in NOT_READ or (found := spec_of(given)) is None:
            continue  # refused: nothing is assumed
        theirs = AutoConfig.for_model(**given).to_dict()
        if key in theirs:
            expected = spec_of(given | {key: theirs[key]})
            assert found == expected, f"{key} left out: {found}; transformers has {theirs[key]!r}: {expected}"
            stated.append(key)
    assert len(stated) > 5, stated


@pytest.mark.parametrize("family", ["llama", "qwen3"])  # the others refuse null
def test_a_null_number_of_key_and_value_heads_is_that_of_query_heads(family: str):
    config = json.loads((kept(family) / "config.json").read_text()) | {"num_key_value_heads": None}
    assert AutoConfig.for_model(**config).num_key_value_heads == config["num_attention_heads"]
    spec = spec_of(config)
    assert spec is not None
    assert spec.n_kv_heads == config["num_attention_heads"]


def test_the_default_number_of_key_and_value_heads_is_none_that_the_tests_models_have_by_chance():
    for family in ("llama", "qwen3", "qwen3-moe", "mixtral"):
        config = json.loads((kept(family) / "config.json").read_text()) | {
            "num_attention_heads": 64,
            "hidden_size": 128,
            "head_dim": 2,
        }
        del config["num_key_value_heads"]
        spec = spec_of(config)
        assert spec is not None
        assert spec.n_kv_heads == AutoConfig.for_model(**config).num_key_value_heads, family
