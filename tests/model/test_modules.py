"""The table of a model's parameters has the names, shapes and roles that the modules really have."""

from dataclasses import replace

import pytest
import torch

from shardwright.model.modules import FAMILIES, Family, attention, feed_forward, layer_rows, register, row_of, rows
from shardwright.model.presets import PRESETS
from shardwright.model.row import Row
from shardwright.model.spec import ModelSpec
from shardwright.model.transformer import Transformer
from shardwright.system.errors import ConfigError


def variants() -> dict[str, ModelSpec]:
    """Every preset, with what no preset has: the load of the step before, and queries made from the residual stream."""
    found = {name: replace(spec, n_layers=min(4, spec.n_layers)) for name, spec in PRESETS.items()}
    moe, deepseek = found["mixtral-8x7b"].moe, found["deepseek-v3"]
    assert moe is not None
    assert deepseek.latent_attention is not None
    batch = replace(moe, aux_loss=0.1, aux_scope="batch", bias_rate=0.0)
    found["batch-balanced"] = replace(found["mixtral-8x7b"], moe=batch)
    found["one-matrix-queries"] = replace(deepseek, latent_attention=replace(deepseek.latent_attention, q_rank=0))
    return found


@pytest.mark.parametrize(("name", "spec"), variants().items(), ids=variants())
def test_every_parameter_has_a_row_of_its_name_and_shape_and_no_row_is_left(name: str, spec: ModelSpec):
    with torch.device("meta"):
        model = Transformer(spec)
    held = {name: (tuple(p.shape), p.requires_grad) for name, p in model.named_parameters()}
    assert held == {name: (row.shape, row.trained) for name, row in rows(spec).items()}


def test_matmuls_that_read_one_tensor_are_named_by_it():
    table = layer_rows(PRESETS["llama-3.1-8b"], 0)
    assert [row.name for row in table if row.input == "attention_norm"] == [f"attention.{x}.weight" for x in "qkv"]
    assert [row.name for row in table if row.input == "ffn_norm"] == ["ffn.gate.weight", "ffn.up.weight"]


def test_stacked_matrices_are_told_apart():
    kv = row_of(PRESETS["deepseek-v3"], "layers.3.attention.kv_up.weight")
    assert (kv.heads, kv.parts) == (128, (("k_nope", 128), ("v", 128)))


def test_a_bias_behind_a_row_parallel_weight_is_whole_on_every_rank():
    spec = PRESETS["gpt2"]
    assert row_of(spec, "layers.0.attention.q.bias").split_dim == 0
    assert row_of(spec, "layers.0.attention.o.weight").split_dim == 1
    assert row_of(spec, "layers.0.attention.o.bias").split_dim is None


def test_weight_decay_leaves_out_norms_biases_and_what_is_not_trained():
    left_out = {name for name, row in rows(PRESETS["deepseek-v3"]).items() if not row.decays}
    assert {name.removeprefix("layers.3.") for name in left_out if name.startswith(("layers.3.", "norm"))} == {
        "attention_norm.weight",
        "attention.q_latent_norm.weight",
        "attention.kv_latent_norm.weight",
        "ffn_norm.weight",
        "ffn.router.bias",
        "norm.weight",
    }


def test_parts_that_do_not_fill_a_matrix_are_a_bug():
    with pytest.raises(AssertionError, match="parts have 6 rows, the matrix 8"):
        Row(name="q.weight", shape=(8, 4), kind="matrix", parts=(("q", 3),), heads=2)


def test_a_family_that_is_registered_twice_or_not_at_all_is_refused():
    with pytest.raises(ConfigError, match="'decoder' is registered already"):
        register(Family(name="decoder", help="", layer=lambda spec, layer: (), block="nowhere:Block"))
    (problem,) = replace(PRESETS["debug"], family="decodr").problems()
    assert problem == "family='decodr' is not known; did you mean 'decoder'?"


def test_rows_that_are_computed_together_agree_on_the_order_of_tokens(monkeypatch: pytest.MonkeyPatch):
    def layer(spec: ModelSpec, number: int):
        yield from attention(spec, input="norm")
        yield from feed_forward(spec, "ffn", spec.d_ffn, input="norm")

    family = Family(name="unordered", help="", layer=layer, block="nowhere:Block")
    monkeypatch.setitem(FAMILIES, family.name, family)
    with pytest.raises(
        ValueError, match=r"attention.q.weight and ffn.gate.weight read 'norm'.*valid: the same for both"
    ):
        layer_rows(replace(PRESETS["debug"], family="unordered"), 0)
