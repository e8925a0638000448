"""Proves that modules of multi-token prediction come in and go out: bit for bit, in the format of DeepSeek-V3's files,
and with the logits that its block has in `transformers`."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwright.hugging_face.architecture import architecture_of
from shardwright.hugging_face.float64 import Float64
from shardwright.hugging_face.table import file_tensors
from shardwright.training.exporting import export
from shardwright.training.importing import import_weights
from shardwright.training.weights import by_reason, open_weights

pytest.importorskip("transformers")

from safetensors.torch import load_file, save_file

from tests.hugging_face.models import deepseek_v3, kept, ours, qwen3_next, saved, tensors, theirs, tokens

LAYERS, WIDTH = 3, 32


def test_tensors_of_qwen3_next_that_transformers_ignores_are_named_in_one_line(tmp_path: Path):
    file = saved(tmp_path / "hf", qwen3_next) / "model.safetensors"
    more = {f"mtp.{name}.weight": torch.ones(WIDTH) for name in ("fc", "norm", "layers.0.input_layernorm")}
    save_file(load_file(file) | more, file, {"format": "pt"})
    weights = import_weights(tmp_path / "hf", tmp_path / "weights")
    (line,) = by_reason(weights.left_out)
    assert line == "mtp.fc.weight and 2 more (transformers has no module of multi-token prediction for Qwen3-Next)"


def with_module(folder: Path) -> Path:
    """A folder as DeepSeek-V3 is published: a module behind the last layer, with copies of embedding and head."""
    saved(folder, lambda: deepseek_v3(num_nextn_predict_layers=1))
    longer = load_file(
        saved(folder / "longer", lambda: deepseek_v3(num_hidden_layers=LAYERS + 1)) / "model.safetensors"
    )
    here = load_file(folder / "model.safetensors")
    module = f"model.layers.{LAYERS}"
    here |= {name: tensor for name, tensor in longer.items() if name.startswith(module)}
    generator = torch.Generator().manual_seed(7)
    for name in ("enorm", "hnorm", "shared_head.norm"):
        here[f"{module}.{name}.weight"] = 1 + 0.3 * torch.randn(WIDTH, generator=generator)
    here[f"{module}.eh_proj.weight"] = torch.randn(WIDTH, 2 * WIDTH, generator=generator) / WIDTH**0.5
    here[f"{module}.embed_tokens.weight"] = here["model.embed_tokens.weight"].clone()
    here[f"{module}.shared_head.head.weight"] = here["lm_head.weight"].clone()
    save_file(here, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_a_module_comes_in_and_goes_out_bit_for_bit(tmp_path: Path):
    source = with_module(tmp_path / "hf")
    import_weights(source, tmp_path / "weights")
    assert open_weights(tmp_path / "weights").spec.mtp_modules == 1
    export(tmp_path / "weights", tmp_path / "out")
    found, expected = tensors(tmp_path / "out"), tensors(source)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
    assert json.loads((tmp_path / "out" / "config.json").read_text())["num_nextn_predict_layers"] == 1


@torch.no_grad()
def test_the_logits_of_a_module_are_those_of_its_block_in_transformers(tmp_path: Path):
    source = with_module(tmp_path / "hf")
    tokens_BT = tokens(2, 12)
    ahead_BT = tokens_BT.roll(-1, 1)
    model = ours(open_weights(source), torch.float64)
    _, found_BTV = model(tokens_BT, ahead_KBT=ahead_BT[None])
    of = {name: tensor.double() for name, tensor in tensors(source).items()}
    with Float64():
        expected_BTV = expected_logits(source, of, tokens_BT, ahead_BT)
    torch.testing.assert_close(found_BTV, expected_BTV, rtol=0, atol=1e-11)


def expected_logits(source: Path, of: dict[str, Tensor], tokens_BT: Tensor, ahead_BT: Tensor) -> Tensor:
    """Equations 21 to 23 of DeepSeek-V3 around the layer of `transformers` that the module's tensors fill."""
    module = f"model.layers.{LAYERS}"
    hf = theirs(source, torch.float64)
    last: list[Tensor] = []
    hf.model.norm.register_forward_pre_hook(lambda _, inputs: last.append(inputs[0]))
    hf(tokens_BT)
    block: nn.Module = deepseek_v3(num_hidden_layers=LAYERS + 1).double().eval().model.layers[LAYERS]
    block.load_state_dict(theirs(source / "longer", torch.float64).model.layers[LAYERS].state_dict())

    def norm(name: str, x: Tensor) -> Tensor:
        return F.rms_norm(x, (WIDTH,), of[f"{module}.{name}.weight"], 1e-6)

    embedded = norm("enorm", of["model.embed_tokens.weight"][ahead_BT])
    x_BTD = F.linear(torch.cat([embedded, norm("hnorm", last[0])], -1), of[f"{module}.eh_proj.weight"])
    places_1T = torch.arange(tokens_BT.shape[1])[None]
    y = block(x_BTD, position_embeddings=hf.model.rotary_emb(x_BTD, places_1T), position_ids=places_1T)
    y_BTD = y[0] if isinstance(y, tuple) else y
    return F.linear(norm("shared_head.norm", y_BTD), of["lm_head.weight"])


def test_a_number_of_modules_without_their_weights_is_none(tmp_path: Path):
    """As `transformers` saves a model that it has loaded without them."""
    source = saved(tmp_path / "hf", lambda: deepseek_v3(num_nextn_predict_layers=1))
    assert open_weights(source).spec == open_weights(kept("deepseek-v3")).spec


def test_an_architecture_without_a_place_for_modules_is_written_without_them():
    without = open_weights(kept("llama")).spec
    spec = replace(without, mtp_modules=1)
    architecture = architecture_of(spec)
    assert architecture.model_type == "llama"
    assert file_tensors(architecture, spec) == file_tensors(architecture, without)
