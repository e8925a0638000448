"""Proves that weights in mxfp4 are read as transformers reads them, bit for bit, whole and in boxes."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from shardwright.hugging_face.architecture import find
from shardwright.hugging_face.reader import from_mxfp4
from shardwright.system.errors import InputError
from shardwright.training.importing import import_weights
from shardwright.training.weights import open_weights
from tests.hugging_face.published import PUBLISHED

pytest.importorskip("transformers")

from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from tests.hugging_face.models import gpt_oss, saved, tensors
from tests.hugging_face.test_families import boxes_are_those_of_the_whole

N_EXPERTS, WIDE, INNER = 4, 64, 96


def packed(n_out: int, n_in: int, seed: int) -> dict[str, torch.Tensor]:
    """Blocks and scales of the experts' matrices, with all bytes and with scales from 2^-30 to 2^30."""
    generator = torch.Generator().manual_seed(seed)
    shape = (N_EXPERTS, n_out, n_in // 32)
    blocks = torch.randint(256, (*shape, 16), dtype=torch.uint8, generator=generator)
    return {"blocks": blocks, "scales": torch.randint(97, 158, shape, dtype=torch.uint8, generator=generator)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small gpt-oss in bf16 whose experts' matrices are in mxfp4, as the published files have them."""
    path = saved(
        tmp_path_factory.mktemp("mxfp4") / "hf",
        lambda: gpt_oss(hidden_size=WIDE, intermediate_size=INNER, num_hidden_layers=2).bfloat16(),
    )
    held = tensors(path)
    for layer in range(2):
        for name, (n_out, n_in) in {"gate_up_proj": (2 * INNER, WIDE), "down_proj": (WIDE, INNER)}.items():
            whole = f"model.layers.{layer}.mlp.experts.{name}"
            del held[whole]
            held |= {f"{whole}_{kind}": part for kind, part in packed(n_out, n_in, layer + n_out).items()}
    save_file(held, path / "model.safetensors")
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    (path / "config.json").write_text(json.dumps(config))
    return path


def test_numbers_are_those_of_transformers_bit_for_bit():
    numbers_are_those_of_transformers()


def numbers_are_those_of_transformers() -> None:
    """All 256 bytes with all 255 scales that are numbers."""
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 16, 16).repeat(255, 1, 1)
    scales = torch.arange(255, dtype=torch.uint8)[:, None].expand(255, 16).contiguous()
    expected = convert_moe_packed_tensors(blocks[None], scales[None]).transpose(1, 2)[0]
    assert torch.equal(from_mxfp4(blocks, scales).view(torch.int16), expected.contiguous().view(torch.int16))


def test_a_model_in_mxfp4_is_imported_as_transformers_reads_it(folder: Path, tmp_path: Path):
    import_weights(folder, tmp_path / "weights")
    weights, held = open_weights(tmp_path / "weights"), tensors(folder)
    experts = "model.layers.1.mlp.experts"
    gate_up, down = (
        convert_moe_packed_tensors(held[f"{experts}.{name}_blocks"], held[f"{experts}.{name}_scales"])
        for name in ("gate_up_proj", "down_proj")
    )
    expected = {"gate": gate_up[..., ::2].mT, "up": gate_up[..., 1::2].mT, "down": down.mT}
    for name, values in expected.items():
        ours = f"layers.1.ffn.experts.{name}"
        assert weights.dtypes[ours] == "bfloat16"
        assert torch.equal(weights.read(ours, (0, 0, 0), values.shape), values), name


def test_any_box_of_mxfp4_is_that_of_the_whole_parameter(folder: Path):
    boxes_are_those_of_the_whole(open_weights(folder))


@pytest.mark.parametrize(
    ("name", "shape", "dtype", "said"),
    [
        ("down_proj_scales", None, torch.uint8, "model.layers.1.mlp.experts.down_proj is missing"),
        (
            "down_proj_scales",
            (4, 64, 2),
            torch.uint8,
            "down_proj_scales is [4, 64, 2], and config.json makes it [4, 64, 3]",
        ),
        ("down_proj_blocks", (4, 64, 3, 8), torch.uint8, "down_proj_blocks is [4, 64, 3, 8], and config.json makes it"),
        ("down_proj_blocks", (4, 64, 3, 16), torch.bfloat16, "down_proj_blocks is bfloat16, and a tensor in mxfp4 has"),
        ("down_proj_scales", (4, 64, 3), torch.float32, "down_proj_scales is float32, and a tensor in mxfp4 has bytes"),
    ],
)
def test_blocks_and_scales_that_do_not_fit_are_refused(
    folder: Path, tmp_path: Path, name: str, shape: tuple[int, ...] | None, dtype: torch.dtype, said: str
):
    held = tensors(folder)
    del held[f"model.layers.1.mlp.experts.{name}"]
    if shape is not None:
        held[f"model.layers.1.mlp.experts.{name}"] = torch.zeros(shape, dtype=dtype)
    save_file(held, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    with pytest.raises(InputError) as refused:
        open_weights(tmp_path)
    assert said in str(refused.value)


def test_mxfp4_is_read_for_gpt_oss_alone():
    mxfp4 = {"quantization_config": {"quant_method": "mxfp4"}}
    config = PUBLISHED["gpt-oss-20b"][0] | mxfp4
    assert find(config).spec(config).n_parameters == PUBLISHED["gpt-oss-20b"][1]
    for name, other in (("olmo2-7b", mxfp4), ("gpt-oss-20b", {"quantization_config": {"quant_method": "fp8"}})):
        config = PUBLISHED[name][0] | other
        with pytest.raises(InputError, match="the weights are quantised"):
            find(config).spec(config)
