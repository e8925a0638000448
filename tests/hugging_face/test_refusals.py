"""Proves that what is not supported or damaged is refused, with what is wrong and what is supported."""

import json
import os
import re
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from shardwright.hugging_face.architecture import ARCHITECTURES, architecture_of
from shardwright.hugging_face.files import INDEX, LENGTH, token_ids
from shardwright.hugging_face.reader import open_weights
from shardwright.model.presets import resolve
from shardwright.system.errors import InputError
from shardwright.training.exporting import export
from shardwright.training.importing import import_weights
from shardwright.training.weights import open_weights as open_any_weights

pytest.importorskip("transformers")

from tests.hugging_face.models import FAMILIES, saved, tensors


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("llama") / "hf", FAMILIES["llama"])


@pytest.fixture
def folder(llama: Path, tmp_path: Path) -> Path:
    """A copy of the folder that a test may damage."""
    copy = tmp_path / "hf"
    copy.mkdir()
    for path in llama.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    return copy


def refused(act: Callable[..., Any], *given: Any) -> str:
    with pytest.raises(InputError) as caught:
        act(*given)
    return str(caught.value)


def configured(folder: Path, **keys: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))
    return folder


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"model_type": "mamba"}, "model_type='mamba' is not supported; supported: cohere, cohere2, "),
        ({"architectures": ["LlamaForSequenceClassification"]}, "has no LlamaForCausalLM, the only supported one"),
        ({"hidden_act": "relu"}, "hidden_act='relu' is not supported for llama; valid: 'silu'"),
        ({"attention_bias": True}, "attention_bias=True and mlp_bias=False differ"),
        ({"hidden_size": "64", "rms_norm_eps": []}, "hidden_size='64' is not a whole number; it is model.d_model here"),
        ({"hidden_size": "64", "rms_norm_eps": []}, "rms_norm_eps=[] is not a number; it is model.norm_eps here"),
        (
            {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "layer_types": ["sliding_attention"]},
            "layer_types has 1 entries for num_hidden_layers=2; valid: one for each layer",
        ),
        ({"num_attention_heads": 0}, "num_attention_heads=0 is not positive"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings=1 is neither true nor false"),
        ({"num_hidden_layers": None}, "num_hidden_layers is missing; it is model.n_layers here"),
        ({"num_key_value_heads": 3}, "n_kv_heads=3 does not divide n_heads=4"),
        ({"quantization_config": {"quant_method": "gptq"}}, "the weights are quantised (gptq)"),
        ({"rope_parameters": {"rope_type": "axial", "factor": 2.0}}, "rope_scaling of type 'axial'"),
        ({"rope_parameters": {"rope_type": "longrope", "factor": 2.0}}, "short_factor: missing"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "betta": 1}}, "supported: betta"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
    ],
)
def test_a_configuration_that_is_not_supported_is_refused(folder: Path, keys: dict[str, Any], said: str):
    assert said in refused(open_weights, configured(folder, **keys))


def test_every_problem_of_a_configuration_is_said_at_once(folder: Path):
    lines = refused(open_weights, configured(folder, hidden_act="relu", attention_bias=True)).splitlines()
    assert len(lines) == 2
    lines = refused(open_weights, configured(folder, attention_bias=False, num_key_value_heads=3)).splitlines()
    assert len(lines) == 2
    lines = refused(open_weights, configured(folder, hidden_size="64")).splitlines()
    assert len(lines) == 2


def test_an_epsilon_that_transformers_does_not_use_for_latent_vectors_is_refused(tmp_path: Path):
    deepseek = configured(saved(tmp_path / "hf", FAMILIES["deepseek-v3"]), rms_norm_eps=1e-5)
    assert "rms_norm_eps=1e-05 is not supported for deepseek_v3; valid: 1e-06" in refused(open_weights, deepseek)


def changed(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> Path:
    path = folder / "model.safetensors"
    held = load_file(path)
    change(held)
    save_file(held, path)
    return folder


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda held: held.pop("model.norm.weight"), "model.norm.weight is missing"),
        (lambda held: held.update({"score.weight": torch.ones(2)}), "score.weight is not a tensor of this model"),
        (
            lambda held: held.update({"model.norm.weight": torch.ones(31)}),
            "model.norm.weight is [31], and config.json makes it [32]",
        ),
        (lambda held: held.update({"model.norm.weight": torch.ones(32).to(torch.float8_e4m3fn)}), "type F8_E4M3"),
    ],
    ids=["missing", "extra", "shape", "type"],
)
def test_tensors_that_are_not_those_of_the_model_are_refused(folder: Path, change: Any, said: str):
    assert said in refused(open_weights, changed(folder, change))


def test_only_the_first_of_many_problems_are_said(folder: Path):
    lines = refused(open_weights, configured(folder, num_hidden_layers=9)).splitlines()
    assert "model.layers.2.input_layernorm.weight is missing" in lines[0]
    assert lines[-1].endswith("and 59 more")


def test_frequencies_that_old_files_hold_are_left_out(folder: Path):
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    weights = open_weights(changed(folder, lambda held: held.update({name: torch.ones(6)})))
    assert list(weights.left_out) == [name]


def test_names_without_the_prefix_are_those_of_the_first_gpt2(tmp_path: Path):
    source = saved(tmp_path / "hf", FAMILIES["gpt2"])
    held = {name.removeprefix("transformer."): each for name, each in tensors(source).items()}
    held |= {"h.0.attn.bias": torch.ones(1, 1, 4, 4), "lm_head.weight": held["wte.weight"].clone()}
    save_file(held, source / "model.safetensors")
    weights = open_weights(source)
    assert set(weights.left_out) == {"h.0.attn.bias", "lm_head.weight"}
    q = weights.read("layers.0.attention.q.weight", (3, 0), (2, 32))
    assert torch.equal(q, held["h.0.attn.c_attn.weight"][:, 3:5].T)


def test_pickle_files_are_refused(folder: Path):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    said = refused(open_weights, folder)
    assert "pytorch_model.bin only, pickle files that can run any code" in said
    assert "safe_serialization=True" in said


def test_a_missing_shard_is_named(tmp_path: Path):
    source = saved(tmp_path / "hf", FAMILIES["llama"], max_shard_size="30KB")
    assert (source / INDEX).is_file()
    gone = sorted(source.glob("*.safetensors"))[1]
    gone.unlink()
    assert f"are missing: {gone.name}" in refused(open_weights, source)


@pytest.mark.parametrize("kept", [5, 100, 20_000])
def test_a_file_that_is_cut_off_is_damaged(folder: Path, kept: int):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    said = refused(open_weights, folder)
    assert "model.safetensors is damaged" in said


def test_a_folder_of_something_else_is_refused(tmp_path: Path):
    assert "has no config.json; supported architectures: llama" in refused(open_weights, tmp_path)
    assert "an id of the Hugging Face hub is OWNER/NAME" in refused(import_weights, "nowhere", tmp_path / "out")


def test_an_id_that_cannot_be_downloaded_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    import huggingface_hub

    def fail(*given: Any, **more: Any) -> None:
        raise ConnectionError("no route to host\nand more")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    [said] = refused(import_weights, "meta/llama", tmp_path / "out").splitlines()
    assert "cannot be downloaded from the Hugging Face hub (no route to host)" in said
    assert not (tmp_path / "out").exists()


def test_values_that_are_not_finite_are_refused(folder: Path, tmp_path: Path):
    held = load_file(folder / "model.safetensors")
    held["model.norm.weight"][3] = torch.nan
    held["model.layers.0.mlp.up_proj.weight"][0, :2] = torch.inf
    save_file(held, folder / "model.safetensors", {"format": "pt"})
    said = refused(import_weights, folder, tmp_path / "out")
    assert "values of norm.weight are NaN or infinite" in said
    assert re.search(r"2 of [\d,]+ values of layers.0.\S+ are NaN or infinite", said)
    assert not (tmp_path / "out").exists()


def test_a_place_that_is_taken_is_not_overwritten(folder: Path, tmp_path: Path):
    import_weights(folder, tmp_path / "out")
    assert "is there already" in refused(import_weights, folder, tmp_path / "out")
    assert "is there already" in refused(export, folder, tmp_path / "out")


def test_every_problem_of_an_export_is_said_at_once(tmp_path: Path):
    with pytest.raises(InputError) as caught:
        export(tmp_path / "nothing", tmp_path / "out", dtype="int8", max_shard_bytes=0)
    assert len(caught.value.problems) == 3


def test_a_model_that_transformers_does_not_have_is_refused_with_the_nearest(tmp_path: Path):
    said = refused(architecture_of, replace(resolve("debug-moe"), activation="relu2"))
    assert "transformers has no architecture for this model" in said
    assert "activation='relu2' is 'swiglu' there" in said


@pytest.mark.parametrize(
    ("preset", "name"),
    [
        ("llama-3.1-8b", "llama"),
        ("smollm2-135m", "llama"),
        ("qwen3-8b", "qwen3"),
        ("gpt2", "gpt2"),
        ("mixtral-8x7b", "mixtral"),
        ("qwen3-30b-a3b", "qwen3_moe"),
        ("deepseek-v3", "deepseek_v3"),
    ],
)
def test_presets_have_their_architecture(preset: str, name: str):
    assert architecture_of(resolve(preset)) is ARCHITECTURES[name]


def test_an_index_that_is_none_is_refused(folder: Path):
    (folder / "model.safetensors").unlink()
    for text, said in (
        ("[]", "holds no object of keys and values"),
        ("{}", "weight_map is missing"),
        ('{"weight_map": {"a": 1}}', "weight_map.a=1: input should be a valid string"),
    ):
        (folder / INDEX).write_text(text)
        assert said in refused(open_weights, folder)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('"rope_scaling": [1]', "rope_scaling=[1]: input should be"),
        ('"rope_parameters": "linear"', "rope_parameters='linear': input should be"),
        ('"model_type": ["llama"]', "model_type=['llama']: input should be a valid string"),
        ('"rope_parameters": {"rope_type": "linear", "factor": "x"}', "rope_parameters.factor='x'"),
        ('"rope_parameters": {"full_attention": {"rope_type": "yarn"}}', "of kinds of layers are not supported"),
        ('"rope_theta": NaN', "is damaged: NaN is no number of JSON"),
        ('"extra": {"any": [-Infinity]}', "is damaged: -Infinity is no number of JSON"),
        ('"rms_norm_eps": 1e999', "is damaged: 1e999 is too large"),
        ('"hidden_size": 1' + "0" * 400, "is too large for 64 bits"),
        ('"a": ' + "[" * 100_000 + "]" * 100_000, "is damaged: nested too deeply"),
        ('"transformers_weights": "x.safetensors"', "names other files of weights"),
        ('"torch_dtype": "bf17"', "torch_dtype='bf17': input should be 'auto', 'float64', "),
        ('"dtype": ["float32"]', "dtype=['float32']: input should be 'auto', 'float64', "),
        ('"torch_dtype": NaN', "is damaged: NaN is no number of JSON"),
        ('"eos_token_id": "2"', "eos_token_id='2': input should be a valid integer"),
        ('"eos_token_id": ["2", 3]', "eos_token_id='2': input should be a valid integer"),
        ('"eos_token_id": true', "eos_token_id=True: input should be a valid integer"),
        ('"eos_token_id": 2.5', "eos_token_id=2.5: input should be a valid integer"),
        ('"eos_token_id": NaN', "is damaged: NaN is no number of JSON"),
        ('"eos_token_id": -2', "config.json: eos_token_id=-2 is no token of a vocabulary of "),
        ('"eos_token_id": [1, 1000000]', "config.json: eos_token_id=1000000 is no token of a vocabulary of "),
        ('"bos_token_id": -1', "config.json: bos_token_id=-1 is no token of a vocabulary of "),
    ],
)
def test_a_configuration_of_other_types_is_one_sentence(folder: Path, text: str, said: str):
    path = folder / "config.json"
    path.write_text(path.read_text().rstrip().removesuffix("}") + f", {text}}}")
    assert said in refused(open_weights, folder)


def test_token_ids_of_a_text_config_count_where_the_file_has_none(folder: Path):
    path = folder / "config.json"
    config = {key: value for key, value in json.loads(path.read_text()).items() if not key.endswith("_token_id")}
    text = config | {"bos_token_id": 3, "eos_token_id": [1, 2]}
    (folder / "generation_config.json").unlink(missing_ok=True)
    path.write_text(json.dumps(config | {"bos_token_id": 1, "text_config": text}))
    assert token_ids(folder) == {"bos_token_id": 1, "eos_token_id": [1, 2]}
    path.write_text(json.dumps(config | {"text_config": text | {"eos_token_id": 1_000_000}}))
    assert "config.json: eos_token_id=1000000 is no token of a vocabulary of " in refused(open_weights, folder)


def test_a_padding_token_of_minus_one_is_none(folder: Path, tmp_path: Path):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"pad_token_id": -1, "eos_token_id": [1, 2]}))
    (folder / "generation_config.json").unlink(missing_ok=True)
    import_weights(folder, tmp_path / "out")
    ids = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert (ids["eos_token_id"], "pad_token_id" in ids) == ([1, 2], False)


@pytest.mark.parametrize(
    "text", ["[]", '{"eos_token_id": "2"}', '{"eos_token_id": [[2]]}', "nothing", '{"eos_token_id": -3}']
)
def test_a_generation_config_of_other_types_is_refused(folder: Path, tmp_path: Path, text: str):
    (folder / "generation_config.json").write_text(text)
    assert "generation_config.json" in refused(import_weights, folder, tmp_path / "out")


def with_header(path: Path, header: Any) -> None:
    """Replace the header of a safetensors file."""
    text = json.dumps(header).encode() if not isinstance(header, bytes) else header
    content = path.read_bytes()
    (length,) = LENGTH.unpack(content[: LENGTH.size])
    path.write_bytes(LENGTH.pack(len(text)) + text + content[LENGTH.size + length :])


@pytest.mark.parametrize(
    "entry",
    [
        1,
        [],
        {},
        {"dtype": "F32", "shape": "x", "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [1], "data_offsets": [0]},
        {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [1], "data_offsets": [None, 4]},
        {"dtype": "F32", "shape": [3], "data_offsets": [0, 4]},
        {"dtype": ["F32"], "shape": [1], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [10**30], "data_offsets": [0, 4]},
    ],
    ids=str,
)
def test_an_entry_of_a_header_of_other_types_is_damaged(folder: Path, entry: Any):
    path = folder / "model.safetensors"
    content = path.read_bytes()
    header = json.loads(content[LENGTH.size : LENGTH.size + LENGTH.unpack(content[: LENGTH.size])[0]])
    with_header(path, header | {"model.norm.weight": entry})
    assert "model.safetensors is damaged: " in refused(open_weights, folder)


def test_a_header_has_bounds_in_time_and_memory(folder: Path):
    path = folder / "model.safetensors"
    begin = time.process_time()
    for header in (
        {f"{number:x}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for number in range(50_000)},
        b"[" * 10**6,
        b'{"a": ' * 10**5,
    ):
        with_header(path, header)
        assert refused(open_weights, folder)
        (folder / "model.safetensors").write_bytes(LENGTH.pack(8) + b"{}      ")
    with path.open("wb") as file:
        file.write(LENGTH.pack(10**8))
        file.truncate(2 * 10**8)
    assert "at most 32 MiB are read" in refused(open_weights, folder)
    assert time.process_time() - begin < 20, "work that grows by the square of the tensors takes minutes"


@pytest.mark.parametrize("place", ["../outside.safetensors", "/absolute.safetensors", "link.safetensors"])
def test_weights_outside_of_the_folder_are_not_read(folder: Path, tmp_path: Path, place: str):
    outside = tmp_path / "outside.safetensors"
    (folder / "model.safetensors").rename(outside)
    (folder / "link.safetensors").symlink_to(outside)
    name = str(tmp_path / place[1:]) if place.startswith("/") else place
    (folder / INDEX).write_text(json.dumps({"weight_map": {"model.norm.weight": name}}))
    assert "only files of the folder itself are read" in refused(open_weights, folder)


def test_a_tokenizer_outside_of_the_folder_is_not_copied(folder: Path, tmp_path: Path):
    (tmp_path / "secret").write_text("{}")
    (folder / "tokenizer.json").symlink_to(tmp_path / "secret")
    assert "'tokenizer.json' is a link out of this folder" in refused(import_weights, folder, tmp_path / "out")


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "model.safetensors"])
def test_a_file_of_a_fixed_name_that_is_a_link_out_of_the_folder_is_not_read(folder: Path, tmp_path: Path, name: str):
    (tmp_path / "elsewhere").write_bytes((folder / name).read_bytes())
    (folder / name).unlink()
    (folder / name).symlink_to(tmp_path / "elsewhere")
    assert f"{name!r} is a link out of this folder" in refused(open_weights, folder)


def test_an_adapter_without_its_base_is_named(tmp_path: Path):
    (tmp_path / "adapter_config.json").write_text("{}")
    assert "without the weights of its base" in refused(open_any_weights, tmp_path)


def test_a_pipe_in_place_of_weights_does_not_block(folder: Path):
    for name in ("model.safetensors", "config.json"):
        (folder / name).unlink()
        os.mkfifo(folder / name)
        assert refused(open_weights, folder)
