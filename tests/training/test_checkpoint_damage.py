"""Proves that a damaged checkpoint is an error on every rank that names file and tensor; loading runs no code."""

import itertools
import json
import os
import pickle
import re
import shutil
from collections import Counter
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.distributed_c10d as c10d
from hypothesis import given
from hypothesis import strategies as st

from shardwright.layout.layout import Layout
from shardwright.system.errors import CheckpointError, DamagedError
from shardwright.training.checkpoint.manifest import ShardRecord, TensorRecord, read_manifest
from shardwright.training.checkpoint.storage import read_shard
from tests.distributed import run_ranks
from tests.marks import prove
from tests.mutation import Mutation, mutated
from tests.training.checkpoints import ONE, ZERO_3, Logical, load_ranks, save_ranks


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
    return [str(path), name, "do not have the xxh3_128"]


def damage_the_header(folder: Path) -> list[str]:
    _, path = shard_of(folder)
    flip(path, 3)
    return [str(path), "is damaged and cannot be read (looking for "]


def damage_the_metadata_of_a_file(folder: Path) -> list[str]:
    """It changes no tensor, and shows that the disk does not keep what is written to it."""
    _, path = shard_of(folder)
    flip(path, path.read_bytes().index(b"format"))
    return [f"{path} is damaged: its metadata are {{'gormat': 'pt'}}"]


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


def write_a_manifest_nested_too_deeply(folder: Path) -> list[str]:
    (folder / "manifest.json").write_text("[" * 100_000 + "]" * 100_000)
    return [f"{folder / 'manifest.json'} is damaged: nested too deeply"]


def put_a_folder_in_the_place_of_the_manifest(folder: Path) -> list[str]:
    (folder / "manifest.json").unlink()
    (folder / "manifest.json").mkdir()
    return [f"{folder / 'manifest.json'} is damaged: it is a folder"]


def put_a_file_in_the_place_of_the_checkpoint(folder: Path) -> list[str]:
    shutil.rmtree(folder)
    folder.write_text("a checkpoint?")
    return [f"{folder} is a file, and a checkpoint is a folder"]


def change_the_run_file(folder: Path) -> list[str]:
    (folder / "run.toml").write_text("steps = 2\n")
    return [f"{folder / 'run.toml'} is damaged: it does not have the sha256 that the manifest gives"]


def name_another_type_in_the_header(folder: Path) -> list[str]:
    """The bytes are as they were, and read as integers."""
    name, path = shard_of(folder)
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    next(entry for key, entry in header.items() if key.partition("@")[0] == name)["dtype"] = "I32"
    changed = json.dumps(header, separators=(",", ":")).encode().ljust(length)
    path.write_bytes(content[:8] + changed + content[8 + length :])
    return [f"{path} is damaged: {name}", "is int32", "and the manifest says float32"]


def write_bytes(folder: Path) -> list[str]:
    (folder / "manifest.json").write_bytes(b"\xff\x00")
    return [f"{folder / 'manifest.json'} is damaged"]


@pytest.mark.parametrize(
    "damage",
    [
        damage_a_byte,
        damage_the_header,
        damage_the_metadata_of_a_file,
        truncate,
        remove,
        exchange,
        remove_the_manifest,
        truncate_the_manifest,
        change_a_number_in_the_manifest,
        lose_a_tensor_in_the_manifest,
        write_a_list,
        write_a_manifest_nested_too_deeply,
        put_a_folder_in_the_place_of_the_manifest,
        put_a_file_in_the_place_of_the_checkpoint,
        change_the_run_file,
        name_another_type_in_the_header,
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


Table = dict[str, Any]
SOME = "model/layers.1.ffn.down.weight"  # [24, 40], rows 0 to 11 and 12 to 23


def shards(table: Table, name: str = SOME) -> list[Table]:
    return table["tensors"][name]["shards"]


def exchange_two_tensors(table: Table) -> None:
    other = "model/layers.0.ffn.down.weight"
    table["tensors"][SOME], table["tensors"][other] = table["tensors"][other], table["tensors"][SOME]


def exchange_two_boxes(table: Table) -> None:
    first, second = shards(table)
    first["offsets"], second["offsets"] = second["offsets"], first["offsets"]


WRONG: dict[str, tuple[Callable[[Table], Any], str]] = {
    "overlap": (lambda t: shards(t)[1].update(offsets=[6, 0]), "do not cover each of its elements once"),
    "gap": (lambda t: shards(t)[1].update(shape=[11, 40]), "do not cover each of its elements once"),
    "missing shard": (lambda t: shards(t).pop(), "do not cover each of its elements once"),
    "shard twice": (lambda t: shards(t).append(shards(t)[0]), "do not cover each of its elements once"),
    "beyond the tensor": (lambda t: shards(t)[1].update(offsets=[13, 0]), "do not cover each of its elements once"),
    "as many elements of another box": (lambda t: shards(t)[1].update(shape=[10, 48]), "do not cover each"),
    "other dimensions": (lambda t: shards(t)[1].update(offsets=[12], shape=[480]), "do not cover each"),
    "negative offset": (lambda t: shards(t)[1].update(offsets=[-12, 0]), "greater than or equal to 0"),
    "absolute file": (lambda t: shards(t)[0].update(file="/etc/passwd"), "should match pattern"),
    "file of a folder above": (lambda t: shards(t)[0].update(file="../rank-00000.safetensors"), "should match pattern"),
    "parent folder": (lambda t: shards(t)[0].update(file=".."), "should match pattern"),
    "unknown type": (lambda t: t["tensors"][SOME].update(dtype="nn"), "'nn' is no type of torch"),
    "text for a step": (lambda t: t["progress"].update(step="1"), "progress.step: Input should be a valid integer"),
    "negative samples": (lambda t: t["progress"].update(samples=-1), "progress.samples"),
    "NaN samples": (lambda t: t["progress"].update(samples=float("nan")), "progress.samples"),
    "truth for a step": (lambda t: t["progress"].update(step=True), "progress.step"),
    "huge step": (lambda t: t["progress"].update(step=10**400), "progress.step"),
    "huge seed": (lambda t: t["progress"].update(seed=2**64), "progress.seed"),
    "no progress": (lambda t: t.pop("progress"), "progress: Field required"),
    "more keys": (lambda t: t.update(more=1), "more: Unexpected keyword argument"),
    "null tensors": (lambda t: t.update(tensors=None), "tensors: Input should be"),
    "list for a shard": (lambda t: t["tensors"][SOME].update(shards=[[]]), "tensors"),
    "no ranks": (lambda t: t.update(world_size=0), "world_size"),
    "weights that are all zero": (lambda t: t["data"]["mixture"]["stages"][0].update(weights=[0]), "no source has a"),
    "run file elsewhere": (lambda t: t.update(files={"../run.toml": "0" * 64}), "should match pattern"),
    "run file missing": (lambda t: t.update(files={"walk.toml": "0" * 64}), "walk.toml cannot be read"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_manifest_that_is_wrong_is_refused_though_its_checksum_is_right(saved, wrong):
    change, words = WRONG[wrong]
    rewritten(saved, change)
    with pytest.raises(DamagedError, match=re.escape(words)):
        read_manifest(saved)


@pytest.mark.parametrize(("other", "said"), [(3, "format 3"), ("4", "another format"), (10**40, "another format")])
def test_a_checkpoint_of_another_format_is_refused_and_is_not_damage(saved, other, said):
    rewritten(saved, lambda table: table.update(format=other))
    with pytest.raises(CheckpointError) as error:
        read_manifest(saved)
    assert not isinstance(error.value, DamagedError)
    assert str(error.value).endswith(f"is of {said}, of another version of shardwright; this one reads format 4")


BUGS = {
    "a shard is used whose bytes have another checksum": Mutation(
        "tests.training.test_checkpoint_damage:read_shard", "xxh3_128_of(shard) != record.xxh3_128", "False"
    ),
}


def reads_with_each_byte_changed(folder: Path, mutations: tuple[Mutation, ...]) -> int:
    """Saves a checkpoint, on 1 rank, and returns how many changes of a byte of one tensor in its file are not found."""
    with mutated(*mutations):
        save_ranks(folder, ONE)
        path = folder / "step-00000001"
        (record,) = read_manifest(path).tensors["model/norm.weight"].shards
        file, missed = path / record.file, 0
        content = file.read_bytes()
        length = int.from_bytes(content[:8], "little")
        begin, end = json.loads(content[8 : 8 + length])["model/norm.weight"]["data_offsets"]
        for at in range(8 + length + begin, 8 + length + end):
            flip(file, at)
            try:
                read_shard(path, "model/norm.weight", "float32", record)
                missed += 1
            except DamagedError:
                pass
            flip(file, at)
        return missed


def test_a_change_of_any_byte_of_a_shard_is_found(tmp_path):
    assert run_ranks(reads_with_each_byte_changed, 1, tmp_path, ()) == [0]


@prove
@pytest.mark.parametrize("name", BUGS)
def test_a_bug_of_checksums_is_seen(name, tmp_path):
    assert run_ranks(reads_with_each_byte_changed, 1, tmp_path, (BUGS[name],)) != [0]


@pytest.mark.parametrize("exchange", [exchange_two_tensors, exchange_two_boxes])
def test_shards_that_are_exchanged_in_the_manifest_are_found_in_their_files(saved, exchange):
    rewritten(saved, exchange)
    manifest = read_manifest(saved)
    record = manifest.tensors[SOME]
    for shard in record.shards:
        with pytest.raises(DamagedError, match="is damaged"):
            read_shard(saved, SOME, record.dtype, shard)


def rewritten(folder: Path, change: Callable[[Table], Any]) -> None:
    """Change a manifest, and give it the checksum of what it is now."""
    path = folder / "manifest.json"
    table = json.loads(path.read_text())
    table.pop("sha256")
    change(table)
    path.write_text(json.dumps(table | {"sha256": sha256(json.dumps(table, sort_keys=True).encode()).hexdigest()}))


@given(st.data())
def test_only_boxes_that_cover_a_tensor_once_are_whole(data):
    # Boxes of a tensor of few elements, drawn at random and as a cut of it; counted one element at a time.
    shape = data.draw(st.tuples(*[st.integers(1, 3)] * data.draw(st.integers(0, 3))))
    spans = [[(at, n) for at in range(whole + 1) for n in range(whole - at + 1)] for whole in shape]
    drawn = data.draw(st.lists(st.tuples(*map(st.sampled_from, spans)), max_size=4))
    if shape and data.draw(st.booleans()):
        cut = data.draw(st.integers(0, shape[0]))
        drawn = [((0, cut), *((0, n) for n in shape[1:])), ((cut, shape[0] - cut), *((0, n) for n in shape[1:]))]
    records = tuple(
        ShardRecord(tuple(at for at, _ in each), tuple(n for _, n in each), "file", "0" * 64) for each in drawn
    )
    covered = Counter(
        element for each in drawn for element in itertools.product(*(range(at, at + n) for at, n in each))
    )
    once = covered == Counter(itertools.product(*map(range, shape)))
    assert TensorRecord(shape, "float32", records).is_whole == once


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

    # Collectives of Python objects, too, unpickle what comes over the network.
    for module, name in ((pickle, "load"), (pickle, "loads"), (torch, "load"), (c10d, "_tensor_to_object")):
        setattr(module, name, refuse)
    return load_ranks(path, layout)


def save_without_pickle(folder: Path, layout: Layout) -> None:
    def refuse(*arguments, **named):
        raise AssertionError("an object of another rank was unpickled")

    c10d._tensor_to_object = refuse
    save_ranks(folder, layout)


def test_saving_never_unpickles_what_comes_from_other_ranks(tmp_path):
    run_ranks(save_without_pickle, 2, tmp_path, ZERO_3)
    assert (tmp_path / "step-00000001/manifest.json").is_file()


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
