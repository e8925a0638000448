"""Proves that models of `transformers` come in and go out: bit for bit, with their logits, and with the same tokens."""

import json
from pathlib import Path

import pytest
import torch

from shardwright.training.exporting import export
from shardwright.training.importing import import_weights
from shardwright.training.weights import open_weights
from tests.marks import prove, rest_prove

pytest.importorskip("transformers")

from tests.hugging_face.models import (
    FAMILIES,
    SCALINGS,
    deepseek_v3,
    logits_error,
    ours,
    saved,
    scaled,
    tensors,
    their_logits,
    theirs,
    tokens,
)

# Rounding of a few dozen operations one after another: 6e-8 each in float32, 1e-16 in float64.
TOLERANCES = {torch.float32: 1e-5, torch.float64: 1e-13}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_comes_in_and_goes_out_bit_for_bit(family: str, tmp_path: Path):
    check_round_trip(family, tmp_path)


def check_round_trip(family: str, folder: Path) -> None:
    source = saved(folder / "hf", FAMILIES[family])
    import_weights(source, folder / "weights")
    expected = tensors(source)
    for weights, shard_bytes in ((folder / "weights", 5 * 10**9), (source, 40_000)):
        export(weights, folder / f"out-{shard_bytes}", max_shard_bytes=shard_bytes)
        found = tensors(folder / f"out-{shard_bytes}")
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.equal(found[name], tensor), name
    assert open_weights(folder / "weights").spec == open_weights(folder / "out-40000").spec


@pytest.mark.parametrize("family", rest_prove(FAMILIES, "llama", "gpt2", "deepseek-v3"))
def test_logits_are_those_of_transformers(family: str, tmp_path: Path):
    check_logits(family, tmp_path)


def check_logits(family: str, folder: Path) -> None:
    source = saved(folder / "hf", FAMILIES[family])
    for dtype, tolerance in TOLERANCES.items():
        assert logits_error(source, source, dtype) < tolerance
    import_weights(source, folder / "weights")
    export(folder / "weights", folder / "out")
    for dtype, tolerance in TOLERANCES.items():  # config.json that we wrote says the same
        assert logits_error(folder / "out", folder / "weights", dtype) < tolerance
        found, expected = (their_logits(each, dtype, tokens()) for each in (folder / "out", source))
        assert torch.equal(found, expected)


@pytest.mark.parametrize("kind", rest_prove(SCALINGS, "yarn"))
def test_scaled_frequencies_are_those_of_transformers(kind: str, tmp_path: Path):
    check_scaling(kind, tmp_path)


def check_scaling(kind: str, folder: Path) -> None:
    source = saved(folder / "hf", lambda: scaled(kind))
    plain = saved(folder / "plain", FAMILIES["llama"])
    assert logits_error(source, source, torch.float64) < TOLERANCES[torch.float64]
    assert logits_error(source, plain, torch.float64) > 1e-3  # the same weights without scaling


@prove
def test_yarn_scales_the_scores_of_latent_attention(tmp_path: Path):
    source = saved(tmp_path / "hf", lambda: scaled("yarn, mscale", deepseek_v3))
    assert logits_error(source, source, torch.float64) < TOLERANCES[torch.float64]


@prove
@pytest.mark.parametrize("family", ["gpt2", "llama", "smollm2", "qwen3"])
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


def test_a_type_is_changed_when_asked_for_and_a_selection_bias_stays_wide(tmp_path: Path):
    source = saved(tmp_path / "hf", FAMILIES["deepseek-v3"])
    export(source, tmp_path / "out", dtype="bf16")
    before, found = tensors(source), tensors(tmp_path / "out")
    for name, tensor in found.items():
        wanted = before[name] if name.endswith("e_score_correction_bias") else before[name].bfloat16()
        assert torch.equal(tensor, wanted), name
    assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == "bfloat16"
