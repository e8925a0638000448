"""Proves that models of `transformers` come in and go out: bit for bit, with their logits, and with the same tokens."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import pytest
import torch

from shardwright.hugging_face import gpt_oss, llama
from shardwright.hugging_face.architecture import ARCHITECTURES, architecture_of
from shardwright.hugging_face.table import file_tensors
from shardwright.hugging_face.writer import write_weights
from shardwright.model.modules import rows
from shardwright.system.errors import InputError
from shardwright.training import importing
from shardwright.training.exporting import export
from shardwright.training.importing import import_weights
from shardwright.training.weights import Weights, open_weights
from tests.marks import prove, rest_prove

pytest.importorskip("transformers")

from tests.hugging_face.models import (
    FAMILIES,
    SCALINGS,
    deepseek_v3,
    kept,
    logits_error,
    ours,
    saved,
    scaled,
    tensors,
    their_logits,
    their_rounding,
    theirs,
    tokens,
)

TOLERANCES = {torch.float32: 1e-5, torch.float64: 1e-13}
"""Largest errors of logits relative to the largest logit: rounding of a few dozen operations one after another, 6e-8
each in float32, 1e-16 in float64. Kernels differ between CPUs: where the logits of transformers in float32 are further
from its own in float64 (3e-5 for qwen3-next on one CPU), twice that distance is allowed."""


@pytest.mark.parametrize("family", rest_prove(FAMILIES, "gpt2", "deepseek-v3"))
def test_a_model_comes_in_and_goes_out_bit_for_bit(family: str):
    with TemporaryDirectory() as folder:
        comes_in_and_goes_out(family, Path(folder))


def type_of(folder: Path) -> str:
    return str(json.loads((folder / "config.json").read_text())["model_type"])


def comes_in_and_goes_out(family: str, folder: Path) -> None:
    source = kept(family)
    import_weights(source, folder / "weights")
    expected = tensors(source)
    for weights, shard_bytes in ((folder / "weights", 5 * 10**9), (source, 40_000)):
        export(weights, folder / f"out-{shard_bytes}", max_shard_bytes=shard_bytes, architecture=type_of(source))
        found = tensors(folder / f"out-{shard_bytes}")
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.equal(found[name], tensor), name
    assert open_weights(folder / "weights").spec == open_weights(folder / "out-40000").spec


@pytest.mark.parametrize("family", rest_prove(FAMILIES, "llama"))
def test_logits_are_those_of_transformers(family: str):
    for dtype, tolerance in TOLERANCES.items():
        allowed = max(tolerance, 2 * their_rounding(kept(family))) if dtype == torch.float32 else tolerance
        assert logits_error(kept(family), kept(family), dtype) < allowed


@pytest.mark.parametrize("family", rest_prove(["qwen3-moe, dense layers", "qwen2-moe"], "qwen2-moe"))
def test_the_layers_with_experts_are_those_of_transformers(family: str):
    spec = open_weights(kept(family)).spec
    of_experts = [name for name in tensors(kept(family)) if ".mlp.experts." in name]
    expected = [any(f".layers.{layer}." in name for name in of_experts) for layer in range(spec.n_layers)]
    assert [spec.has_experts(layer) for layer in range(spec.n_layers)] == expected
    assert set(expected) == {False, True}


@prove
@pytest.mark.parametrize("family", FAMILIES)
def test_the_configuration_that_is_written_says_the_same(family: str, tmp_path: Path):
    import_weights(kept(family), tmp_path / "weights")
    export(tmp_path / "weights", tmp_path / "out", architecture=type_of(kept(family)))
    for dtype in TOLERANCES:
        found, expected = (their_logits(each, dtype, tokens()) for each in (tmp_path / "out", kept(family)))
        assert torch.equal(found, expected)


@pytest.mark.parametrize("kind", rest_prove(SCALINGS, "yarn"))
def test_scaled_frequencies_are_those_of_transformers(kind: str):
    assert logits_error(kept(kind), kept(kind), torch.float64) < TOLERANCES[torch.float64]
    assert logits_error(kept(kind), kept("llama"), torch.float64) > 1e-3  # the same weights without scaling


@pytest.mark.parametrize("family", ["gpt2", "deepseek-v3", "glm4", "granite-moe"])
def test_any_box_is_that_of_the_whole_parameter(family: str):
    with TemporaryDirectory() as folder, patch.object(importing, "BLOCK_BYTES", 700):
        import_weights(kept(family), Path(folder) / "weights")
        boxes_are_those_of_the_whole(open_weights(kept(family)))
        boxes_are_those_of_the_whole(open_weights(Path(folder) / "weights"))


def test_transposed_tensors_of_all_experts_are_read_as_they_are_written(tmp_path: Path):
    table = replace(
        ARCHITECTURES["mixtral"],
        choices=ARCHITECTURES["mixtral"].choices | gpt_oss.CHOICES | {"attention_sinks": False},
        layer=llama.ATTENTION | gpt_oss.EXPERTS,
    )
    whole = open_weights(kept("mixtral")).spec
    assert whole.moe is not None
    spec = replace(whole, activation="swiglu_clamped", moe=replace(whole.moe, bias=True))
    torch.manual_seed(0)
    values = {name: torch.randn(row.shape) for name, row in rows(spec).items()}

    def read(name: str, offsets: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
        return values[name][tuple(slice(o, o + n) for o, n in zip(offsets, shape, strict=True))]

    stored = file_tensors(table, spec)
    write_weights(tmp_path, stored, {each.name: "float32" for each in stored}, read, 10**9, lambda *_: None)
    (tmp_path / "config.json").write_text(json.dumps(table.config(spec)))
    gate_up, gate = tensors(tmp_path)["model.layers.1.mlp.experts.gate_up_proj"], values["layers.1.ffn.experts.gate"]
    assert torch.equal(gate_up[2, :, 6], gate[2, 3])
    with patch.dict(ARCHITECTURES, {"mixtral": table}):
        weights = open_weights(tmp_path)
        boxes_are_those_of_the_whole(weights)
        for name, expected in values.items():
            assert torch.equal(weights.read(name, (0,) * expected.dim(), expected.shape), expected), name


def boxes_are_those_of_the_whole(weights: Weights) -> None:
    for name, shape in weights.shapes.items():
        whole = weights.read(name, (0,) * len(shape), shape)
        for begin, end in ((0, 2), (1, 3), (2, 3)):  # thirds of every dim
            spans = [(n * begin // 3, n * end // 3) for n in shape]
            box = weights.read(name, [low for low, _ in spans], [high - low for low, high in spans])
            assert torch.equal(box, whole[tuple(slice(*span) for span in spans)]), name


@prove
def test_yarn_scales_the_scores_of_latent_attention(tmp_path: Path):
    source = saved(tmp_path / "hf", lambda: scaled("yarn, mscale", deepseek_v3))
    assert logits_error(source, source, torch.float64) < TOLERANCES[torch.float64]


@prove
@pytest.mark.parametrize(
    "family",
    [
        "gpt2",
        "llama",
        "smollm2",
        "qwen2",
        "gemma",
        "smollm3",
        "qwen3",
        "olmo2",
        "olmoe",
        "granite",
        "phi3",
        "glm4",
        "starcoder2",
        "qwen2-moe",
        "deepseek-v2",
        "granite-moe",
        "glm-4.5",
    ],
)
def test_an_export_generates_the_tokens_that_we_generate(family: str, tmp_path: Path):
    source = saved(tmp_path / "hf", FAMILIES[family])
    import_weights(source, tmp_path / "weights")
    export(tmp_path / "weights", tmp_path / "out")
    prompt_BT = tokens(1, 8)
    hf = theirs(tmp_path / "out", torch.float32)
    expected = hf.generate(prompt_BT, max_new_tokens=24, do_sample=False, eos_token_id=None, pad_token_id=0)
    model, found = ours(open_weights(tmp_path / "weights"), torch.float32), prompt_BT
    for _ in range(24):
        found = torch.cat((found, model(found)[:, -1:].argmax(-1)), 1)
    assert found.tolist() == expected.tolist()


def test_one_wide_shared_expert_is_several_narrow_ones():
    spec = open_weights(kept("qwen2-moe")).spec
    assert spec.moe is not None
    several = replace(spec, moe=replace(spec.moe, n_shared=3, d_shared=0, first_dense=1, dense_layers=()))
    one = replace(spec, moe=replace(spec.moe, n_shared=1, d_shared=60, first_dense=0, dense_layers=(0,)))
    assert several.n_parameters == one.n_parameters
    written = ARCHITECTURES["qwen2_moe"].config(several)
    assert (written["shared_expert_intermediate_size"], written["mlp_only_layers"]) == (60, [0])
    assert written == architecture_of(several).config(one)


def test_an_architecture_that_does_not_fit_is_refused_with_the_reason(tmp_path: Path):
    with pytest.raises(
        InputError, match="--architecture olmo2: the model is another: norm_position='before' is 'after'"
    ):
        export(kept("phi3"), tmp_path / "out", architecture="olmo2")
    with pytest.raises(InputError, match=r"--architecture ph3: not known; .*phi3"):
        export(kept("phi3"), tmp_path / "out", architecture="ph3")


def test_a_type_is_changed_when_asked_for_and_a_selection_bias_stays_wide():
    with TemporaryDirectory() as folder:
        changes_the_type(Path(folder) / "out")


def changes_the_type(out: Path) -> None:
    export(kept("deepseek-v3"), out, dtype="bf16")
    before, found = tensors(kept("deepseek-v3")), tensors(out)
    for name, tensor in found.items():
        wanted = before[name] if name.endswith("e_score_correction_bias") else before[name].bfloat16()
        assert torch.equal(tensor, wanted), name
    assert json.loads((out / "config.json").read_text())["torch_dtype"] == "bfloat16"
