"""Proves that of a folder whose files contradict each other the weights are those that `transformers` takes."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from shardwright.hugging_face.files import INDEX, WHOLE
from shardwright.hugging_face.reader import open_weights
from shardwright.system.errors import InputError
from shardwright.training.exporting import export
from shardwright.training.importing import import_weights

pytest.importorskip("transformers")

from tests.hugging_face.models import FAMILIES, logits_error, saved

HEAD = {"llama": ("model.embed_tokens.weight", "lm_head.weight"), "gpt2": ("transformer.wte.weight", "lm_head.weight")}


def tied(folder: Path, family: str) -> Path:
    """A model whose config.json ties the head to the embedding, with the embedding alone in its file."""
    saved(folder, FAMILIES[family])
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tie_word_embeddings": True}))
    tensors = load_file(folder / WHOLE)
    tensors.pop(HEAD[family][1], None)
    save_file(tensors, folder / WHOLE, {"format": "pt"})
    return folder


@pytest.mark.parametrize("family", HEAD)
@pytest.mark.parametrize("head", ["absent", "equal", "equal, wider", "one value differs", "alone"])
def test_of_a_tied_configuration_the_head_of_the_file_counts_as_in_transformers(tmp_path: Path, family: str, head: str):
    folder = tied(tmp_path / "hf", family)
    embedding_name, head_name = HEAD[family]
    tensors = load_file(folder / WHOLE)
    embedding = tensors[embedding_name].bfloat16().float()
    tensors[embedding_name] = embedding.clone()
    if head != "absent":
        tensors[head_name] = embedding.clone()
    if head == "equal, wider":
        tensors[embedding_name] = embedding.bfloat16()
    if head == "one value differs":
        tensors[head_name][-1, -1] += 1
    if head == "alone":
        del tensors[embedding_name]
    save_file(tensors, folder / WHOLE, {"format": "pt"})
    assert open_weights(folder).spec.tied_embedding == (head != "one value differs")
    assert logits_error(folder, folder, torch.float64) < 1e-12
    import_weights(folder, tmp_path / "imported")
    export(tmp_path / "imported", tmp_path / "exported", dtype="fp32")
    assert logits_error(folder, tmp_path / "imported", torch.float64) < 1e-12
    assert logits_error(tmp_path / "exported", folder, torch.float64) < 1e-12


def test_one_file_counts_before_an_older_index(tmp_path: Path):
    folder = saved(tmp_path / "hf", FAMILIES["llama"], max_shard_size="30KB")
    shards = sorted(folder.glob("model-*.safetensors"))
    saved(tmp_path / "newer", FAMILIES["qwen3"])
    for name in (WHOLE, "config.json"):
        (folder / name).write_bytes((tmp_path / "newer" / name).read_bytes())
    assert (folder / INDEX).is_file()
    assert logits_error(folder, folder, torch.float64) < 1e-12
    for shard in shards:  # save_pretrained deletes the older shards and leaves their index
        shard.unlink()
    assert logits_error(folder, folder, torch.float64) < 1e-12


def test_a_name_in_an_index_that_no_file_has_is_no_tensor_to_load(tmp_path: Path):
    folder = saved(tmp_path / "hf", FAMILIES["llama"], max_shard_size="30KB")
    index = json.loads((folder / INDEX).read_text())
    file = next(iter(index["weight_map"].values()))
    index["weight_map"]["model.layers.0.self_attn.rotary_emb.inv_freq"] = file
    (folder / INDEX).write_text(json.dumps(index))
    assert logits_error(folder, folder, torch.float64) < 1e-12


def test_of_a_tied_configuration_a_head_of_another_shape_is_refused_as_in_transformers(tmp_path: Path):
    folder = tied(tmp_path / "hf", "llama")
    path = folder / "model.safetensors"
    tensors = load_file(path)
    (embedding,) = [tensor for name, tensor in tensors.items() if "embed" in name]
    save_file(tensors | {"lm_head.weight": torch.ones(len(embedding) + 1, embedding.shape[1])}, path, {"format": "pt"})
    with pytest.raises(InputError, match=rf"lm_head.weight is \[{len(embedding) + 1}, "):
        open_weights(folder)
    transformers = pytest.importorskip("transformers")
    with pytest.raises(RuntimeError):
        transformers.AutoModelForCausalLM.from_pretrained(folder)
