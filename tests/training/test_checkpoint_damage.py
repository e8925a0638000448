"""Proves that a damaged checkpoint is an error on every rank that names file and tensor; loading runs no code."""

import json
import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch

from shardwright.errors import CheckpointError, DamagedError
from shardwright.layout import Layout
from tests.distributed import run_ranks
from tests.training.checkpoints import ZERO_3, Logical, load_ranks, save_ranks


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def shard_of(folder: Path) -> tuple[str, Path]:
    """A tensor, and the file that holds its last shard: what rank 1 reads."""
    tensors = json.loads((folder / "manifest.json").read_text())["tensors"]
    name = "model/layers.1.ffn.down.weight"
    return name, folder / tensors[name]["shards"][-1]["file"]


def position_of(path: Path, name: str) -> int:
    """A byte in the middle of a tensor of a safetensors file."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    start, end = next(entry["data_offsets"] for key, entry in header.items() if key.partition("@")[0] == name)
    return 8 + length + (start + end) // 2


def damage_a_byte(folder: Path) -> list[str]:
    name, path = shard_of(folder)
    flip(path, position_of(path, name))
    return [str(path), name, "do not have the sha256"]


def damage_the_header(folder: Path) -> list[str]:
    _, path = shard_of(folder)
    flip(path, 3)
    return [str(path), "is damaged and cannot be read (looking for "]


def truncate(folder: Path) -> list[str]:
    _, path = shard_of(folder)
    os.truncate(path, path.stat().st_size - 1)
    return [str(path), "is damaged and cannot be read (looking for "]


def remove(folder: Path) -> list[str]:
    _, path = shard_of(folder)
    path.unlink()
    return [f"{path} is missing; it should hold "]


def exchange(folder: Path) -> list[str]:
    """Both files are whole, but each has the other's name."""
    files = [folder / f"rank-0000{rank}.safetensors" for rank in range(2)]
    contents = [path.read_bytes() for path in files]
    for path, content in zip(files, reversed(contents), strict=True):
        path.write_bytes(content)
    return ["rank-0000", "damaged"]


def remove_the_manifest(folder: Path) -> list[str]:
    (folder / "manifest.json").unlink()
    return [f"{folder} is not a whole checkpoint: it has no manifest.json"]


def truncate_the_manifest(folder: Path) -> list[str]:
    os.truncate(folder / "manifest.json", 500)
    return [f"{folder / 'manifest.json'} is damaged"]


def change_a_number_in_the_manifest(folder: Path) -> list[str]:
    """It would repeat samples, and no checksum of a tensor could tell."""
    path = folder / "manifest.json"
    path.write_text(path.read_text().replace('"samples": 12', '"samples": 13'))
    return [f"{path} is damaged: its content does not have the sha256"]


def lose_a_tensor_in_the_manifest(folder: Path) -> list[str]:
    path = folder / "manifest.json"
    table = json.loads(path.read_text())
    table["tensors"].pop("model/norm.weight")
    path.write_text(json.dumps(table))
    return [f"{path} is damaged"]


def write_a_list(folder: Path) -> list[str]:
    (folder / "manifest.json").write_text("[1, 2]")
    return [f"{folder / 'manifest.json'} is damaged"]


def write_bytes(folder: Path) -> list[str]:
    (folder / "manifest.json").write_bytes(b"\xff\x00")
    return [f"{folder / 'manifest.json'} is damaged"]


@pytest.mark.parametrize(
    "damage",
    [
        damage_a_byte,
        damage_the_header,
        truncate,
        remove,
        exchange,
        remove_the_manifest,
        truncate_the_manifest,
        change_a_number_in_the_manifest,
        lose_a_tensor_in_the_manifest,
        write_a_list,
        write_bytes,
    ],
)
def test_damage_is_an_error_on_every_rank_that_names_file_and_tensor(saved, damage):
    words = damage(saved)
    errors = run_ranks(load_ranks, 2, saved, ZERO_3)
    for error in errors:
        assert isinstance(error, DamagedError), error
        assert all(word in str(error) for word in words), error
    assert str(errors[0]) == str(errors[1])


def test_a_shard_is_checked_against_the_manifest_and_not_only_against_itself(saved):
    # A file of another run: whole, with the same names and shapes, and wrong.
    _, path = shard_of(saved)
    other = saved.parent / "other"
    run_ranks(save_ranks, 2, other, ZERO_3, 2)
    shutil.copy(other / "step-00000002" / path.name, path)
    assert all(isinstance(error, DamagedError) for error in run_ranks(load_ranks, 2, saved, ZERO_3))


class Bomb:
    """Unpickled, it makes a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return (os.mkdir, (str(self.path),))


def load_without_pickle(path: Path, layout: Layout) -> Logical | CheckpointError:
    def refuse(*arguments, **named):
        raise AssertionError("a checkpoint was unpickled")

    # Collectives of Python objects between the ranks pickle in memory, by pickle.Unpickler.
    for module, name in ((pickle, "load"), (pickle, "loads"), (torch, "load")):
        setattr(module, name, refuse)
    return load_ranks(path, layout)


def test_loading_never_unpickles_what_lies_in_the_folder(saved, tmp_path):
    sprung = tmp_path / "sprung"
    bomb = pickle.dumps(Bomb(sprung))
    pickle.loads(pickle.dumps(Bomb(tmp_path / "armed")))
    assert (tmp_path / "armed").is_dir(), "the bomb would work"
    # The names under which PyTorch's own checkpoints hold pickles.
    for name in (".metadata", "__0_0.distcp", "data.pkl", "rank-00000.pt"):
        (saved / name).write_bytes(bomb)
    assert all(isinstance(found, dict) for found in run_ranks(load_without_pickle, 2, saved, ZERO_3))
    for name in ("rank-00000.safetensors", "manifest.json"):
        (saved / name).write_bytes(bomb)
        assert all(isinstance(found, DamagedError) for found in run_ranks(load_without_pickle, 2, saved, ZERO_3))
    assert not sprung.exists()
