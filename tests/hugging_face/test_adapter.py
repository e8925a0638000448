"""Proves that a LoRA adapter of peft next to its base is read as the weights that peft merges."""

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from shardwright.hugging_face.reader import open_weights
from shardwright.system.errors import CheckpointError

pytest.importorskip("transformers")

from tests.hugging_face.models import FAMILIES, saved

NAMES = {
    "llama": ("model.layers.1.self_attn.q_proj", "layers.1.attention.q.weight"),
    "gpt2": ("transformer.h.1.mlp.c_fc", "layers.1.ffn.up.weight"),
}
RANK, ALPHA = 4, 3.0


def with_adapter(
    folder: Path, module: str, shape: tuple[int, ...], magnitude_F: torch.Tensor | None = None, **keys: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Write the files that peft writes for one matrix of `shape`, (out, in); return A and B."""
    (n_out, n_in), begin = shape, f"base_model.model.{module}"
    a_RD, b_FR = torch.randn(RANK, n_in), torch.randn(n_out, RANK)
    tensors = {f"{begin}.lora_A.weight": a_RD, f"{begin}.lora_B.weight": b_FR}
    if magnitude_F is not None:
        tensors[f"{begin}.lora_magnitude_vector"] = magnitude_F
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "bias": "none"} | keys
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return a_RD, b_FR


@pytest.mark.parametrize("family", NAMES)
@pytest.mark.parametrize("rslora", [False, True])
def test_any_box_of_a_matrix_is_a_box_of_the_merged_matrix(family: str, rslora: bool, tmp_path: Path):
    folder = saved(tmp_path / "hf", FAMILIES[family])
    module, name = NAMES[family]
    base = open_weights(folder)
    shape = base.shapes[name]
    before = base.read(name, (0, 0), shape)
    a_RD, b_FR = with_adapter(folder, module, shape, use_rslora=rslora)
    scale = ALPHA / (RANK**0.5 if rslora else RANK)
    expected, weights = before + scale * b_FR @ a_RD, open_weights(folder)
    torch.testing.assert_close(weights.read(name, (0, 0), shape), expected)
    torch.testing.assert_close(weights.read(name, (2, 1), (3, 5)), expected[2:5, 1:6])
    other = name.replace("layers.1", "layers.0")
    assert torch.equal(weights.read(other, (0, 0), shape), base.read(other, (0, 0), shape))


@pytest.mark.parametrize("family", NAMES)
def test_any_box_of_a_matrix_with_dora_comes_from_its_whole_rows(family: str):
    check_boxes_with_dora(family)


def check_boxes_with_dora(family: str) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder = saved(Path(temporary) / "hf", FAMILIES[family])
        module, name = NAMES[family]
        base = open_weights(folder)
        shape = base.shapes[name]
        before, magnitude_F = base.read(name, (0, 0), shape), torch.rand(shape[0]) + 0.5
        a_RD, b_FR = with_adapter(folder, module, shape, magnitude_F, use_dora=True)
        expected, weights = torch.nn.functional.normalize(before + ALPHA / RANK * b_FR @ a_RD), open_weights(folder)
        expected *= magnitude_F.unsqueeze(1)
        torch.testing.assert_close(weights.read(name, (0, 0), shape), expected)
        torch.testing.assert_close(weights.read(name, (2, 1), (3, 5)), expected[2:5, 1:6])


@pytest.mark.parametrize(
    ("magnitude", "dora", "said"),
    [
        (None, True, "q_proj has no magnitude, with use_dora=True"),
        (48, False, "q_proj has a magnitude, with use_dora=False"),
        (47, True, r"the magnitude is \[47\], and .* needs \[48\]: the adapter is for another base"),
    ],
)
def test_a_magnitude_that_does_not_fit_is_refused(magnitude: int | None, dora: bool, said: str, tmp_path: Path):
    folder = saved(tmp_path / "hf", FAMILIES["llama"])
    magnitude_F = None if magnitude is None else torch.ones(magnitude)
    with_adapter(folder, NAMES["llama"][0], open_weights(folder).shapes[NAMES["llama"][1]], magnitude_F, use_dora=dora)
    with pytest.raises(CheckpointError, match=said):
        open_weights(folder)


def test_settings_that_are_null_are_false_as_in_peft(tmp_path: Path):
    folder = saved(tmp_path / "hf", FAMILIES["llama"])
    module, name = NAMES["llama"]
    base = open_weights(folder)
    shape = base.shapes[name]
    a_RD, b_FR = with_adapter(folder, module, shape, use_rslora=None, use_dora=None)
    expected = base.read(name, (0, 0), shape) + ALPHA / RANK * b_FR @ a_RD
    torch.testing.assert_close(open_weights(folder).read(name, (0, 0), shape), expected)


@pytest.mark.parametrize("family", NAMES)
def test_weights_are_those_that_peft_merges(family: str, tmp_path: Path):
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    folder = saved(tmp_path / "hf", FAMILIES[family])
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    settings = peft.LoraConfig(
        r=RANK, lora_alpha=ALPHA, target_modules=[NAMES[family][0].rpartition(".")[2]], init_lora_weights=False,
        fan_in_fan_out=family == "gpt2",
    )  # fmt: skip
    adapted = peft.get_peft_model(model, settings)
    adapted.save_pretrained(folder)
    merged = adapted.merge_and_unload().state_dict()
    _, name = NAMES[family]
    weights = open_weights(folder)
    theirs = merged[f"{NAMES[family][0]}.weight"]
    ours = weights.read(name, (0, 0), weights.shapes[name])
    torch.testing.assert_close(ours, theirs.T if family == "gpt2" else theirs)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"peft_type": "IA3"}, "peft_type='IA3' is not supported"),
        ({"lora_bias": True}, "lora_bias=True is not supported"),
        ({"init_lora_weights": "pissa"}, "changed the base weights"),
    ],
)
def test_settings_that_are_not_supported_are_refused(keys: dict[str, Any], said: str, tmp_path: Path):
    folder = saved(tmp_path / "hf", FAMILIES["llama"])
    with_adapter(folder, NAMES["llama"][0], open_weights(folder).shapes[NAMES["llama"][1]], **keys)
    with pytest.raises(CheckpointError, match=said):
        open_weights(folder)


def test_an_adapter_for_another_base_is_refused(tmp_path: Path):
    folder = saved(tmp_path / "hf", FAMILIES["llama"])
    module, name = NAMES["llama"]
    n_out, n_in = open_weights(folder).shapes[name]
    with_adapter(folder, module, (n_out, n_in + 8))
    with pytest.raises(CheckpointError, match="the adapter is for another base"):
        open_weights(folder)
    with_adapter(folder, module.replace("q_proj", "q_prj"), (n_out, n_in))
    with pytest.raises(CheckpointError, match="q_proj"):
        open_weights(folder)
    with_adapter(folder, module, (n_out, n_in))
    one = dict(list(load_file(folder / "adapter_model.safetensors").items())[:1])
    save_file(one, folder / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match="has only one of A and B"):
        open_weights(folder)
    (folder / "adapter_config.json").unlink()
    (folder / "adapter_config.json").symlink_to(tmp_path / "elsewhere.json")
    with pytest.raises(CheckpointError, match=r"adapter_config.json"):
        open_weights(folder)
