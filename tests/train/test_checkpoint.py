"""Proves that a checkpoint holds exactly what was trained, that any layout can take it up, that damage is seen.

Each test is a world of 1, 2 or 4 gloo ranks with a tiny model; what a rank meets, an error too, comes back from it.
"""

import json
import os
import pickle
import shutil
import types
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from shardloom.errors import CheckpointError, DamagedError
from shardloom.layout import Layout
from shardloom.model.spec import ModelSpec
from shardloom.train.checkpoint import state, storage
from shardloom.train.checkpoint.manifest import Progress
from shardloom.train.checkpoint.state import checkpoint_bytes, load, named_tensors, save
from shardloom.train.checkpoint.store import CheckpointStore
from shardloom.train.optimizer import build_optimizer
from shardloom.train.step import Trainer
from tests.distributed import run_ranks
from tests.mutation import Mutation, mutated
from tests.train.worlds import OPTIMIZER, RATE, SEED, SPEC, build, local_batch, whole

ONE, ZERO_3 = Layout(), Layout(dp_shard=2, zero=3)
DATA = {"fingerprint": "f" * 64, "seq_len": 10, "sequences": "packed"}
Logical = dict[str, Tensor]


def logical(trainer: Trainer) -> Logical:
    """Every tensor of the training state, whole."""
    return {name: whole(tensor) for name, tensor in named_tensors(trainer).items()}


def take_step(trainer: Trainer, layout: Layout, step: int) -> None:
    batch = local_batch(step, layout.data_rank(dist.get_rank()), layout.data_ranks, 1)
    trainer.forward_backward(batch, step)
    trainer.update(RATE)


def equal(found: Logical, expected: Logical) -> bool:
    """The same names, types and bits."""
    return found.keys() == expected.keys() and all(
        found[name].dtype == expected[name].dtype and torch.equal(found[name], expected[name]) for name in expected
    )


def save_ranks(folder: Path, layout: Layout, steps: int = 1) -> Logical:
    """To be run on every rank: train, save under FOLDER, and say what was saved."""
    trainer = build(layout, torch.float32)
    for step in range(steps):
        take_step(trainer, layout, step)
    progress = Progress(step=steps, samples=12 * steps, seed=SEED)
    save(CheckpointStore(folder, keep_last=9), trainer, progress, DATA, "steps = 1\n")
    return logical(trainer)


def load_ranks(
    path: Path,
    layout: Layout,
    mutations: tuple[Mutation, ...] = (),
    dtype: torch.dtype = torch.float32,
    spec: ModelSpec = SPEC,
    seed: int = SEED,
    data: dict[str, Any] | None = DATA,
) -> Logical | CheckpointError:
    """To be run on every rank: take up a checkpoint, and say what is there then, or the error."""
    with ExitStack() as stack:
        stack.enter_context(mutated(*mutations))
        trainer = build(layout, dtype, spec)
        trainer.seed = seed
        for tensor in named_tensors(trainer).values():
            tensor.detach().zero_()
        try:
            load(path, trainer, data)
        except CheckpointError as error:
            return error
        return logical(trainer)


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of two ranks under ZeRO-3."""
    folder = tmp_path_factory.mktemp("pristine")
    run_ranks(save_ranks, 2, folder, ZERO_3)
    return folder / "step-00000001"


@pytest.fixture
def saved(pristine: Path, tmp_path: Path) -> Path:
    """A copy of it, to be damaged."""
    return shutil.copytree(pristine, tmp_path / pristine.name)


def test_what_is_loaded_is_what_was_saved(tmp_path):
    expected, _ = run_ranks(save_ranks, 2, tmp_path, ZERO_3)
    assert len(expected) == 4 * 21, "itself, two moments and a step count for each of 21 parameters"
    for found in run_ranks(load_ranks, 2, tmp_path / "step-00000001", ZERO_3):
        assert equal(found, expected)


LAYOUTS = [
    ONE,
    Layout(dp_shard=2, zero=1),
    Layout(dp_shard=4, zero=3),
    Layout(dp_replicate=2, dp_shard=2, zero=2),
    Layout(dp_replicate=2),
    Layout(dp_shard=2, zero=2),
    Layout(dp_replicate=4),
    Layout(zero=3),
]


def hop(folder: Path, layout: Layout, step: int) -> tuple[Logical | None, Logical]:
    """Take up the checkpoint after `step` steps, if that is not 0, take one more and save it."""
    trainer, store = build(layout, torch.float32), CheckpointStore(folder, keep_last=99)
    loaded = None
    if step:
        assert load(store.path_of(step), trainer, DATA) == Progress(step, 12 * step, SEED)
        loaded = logical(trainer)
    take_step(trainer, layout, step)
    save(store, trainer, Progress(step + 1, 12 * (step + 1), SEED), DATA, "")
    return loaded, logical(trainer)


def test_any_layout_takes_up_bit_for_bit_what_any_other_has_saved(tmp_path):
    expected = None
    for step, layout in enumerate(LAYOUTS):
        for loaded, _ in (outcomes := run_ranks(hop, layout.world_size, tmp_path, layout, step)):
            assert expected is None or equal(loaded, expected), layout
        expected = outcomes[0][1]


@pytest.mark.parametrize("layout", [LAYOUTS[2], LAYOUTS[3], LAYOUTS[6]], ids=["sharded", "hybrid", "replicated"])
def test_every_byte_is_written_once_and_by_all_ranks_together(tmp_path, layout):
    expected = run_ranks(save_ranks, 4, tmp_path, layout)[0]
    folder = tmp_path / "step-00000001"
    files = sorted(folder.glob("*.safetensors"))
    assert len(files) == 4
    bodies = [path.stat().st_size - 8 - int.from_bytes(path.read_bytes()[:8], "little") for path in files]
    assert sum(bodies) == checkpoint_bytes(expected)
    assert min(bodies) > 0


def test_a_dim_smaller_than_the_number_of_ranks_is_saved_and_loaded(tmp_path):
    # 3 rows over 4 ranks: one rank holds nothing of the embedding and the head.
    spec = replace(SPEC, vocab_size=3, d_model=6, n_heads=1, head_dim=2, d_ffn=3)
    layout = Layout(dp_shard=4, zero=3)
    expected = run_ranks(save_untrained, 4, tmp_path, layout, spec)[0]
    for other in (layout, ONE, ZERO_3):
        for found in run_ranks(
            load_ranks, other.world_size, tmp_path / "step-00000001", other, (), torch.float32, spec
        ):
            assert equal(found, expected)


def save_untrained(folder: Path, layout: Layout, spec: ModelSpec) -> Logical:
    trainer = build(layout, torch.float32, spec)
    save(CheckpointStore(folder), trainer, Progress(1, 12, SEED), DATA, "")
    return logical(trainer)


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


def test_a_checkpoint_of_another_model_seed_or_data_is_refused_and_says_why(saved):
    def complaint(**named) -> str:
        order = {"dtype": torch.float32, "spec": SPEC, "seed": SEED, "data": DATA} | named
        errors = run_ranks(load_ranks, 2, saved, ZERO_3, (), *order.values())
        assert str(errors[0]) == str(errors[1])
        assert type(errors[0]) is CheckpointError, "it is whole, so an earlier one would be no better"
        return str(errors[0])

    assert "it is of another model: d_ffn=40, and this run has 48" in complaint(spec=replace(SPEC, d_ffn=48))
    assert "n_layers=2, and this run has 3" in complaint(spec=replace(SPEC, n_layers=3))
    assert f"seed={SEED} and this run has seed=6, so samples would repeat; set seed={SEED}" in complaint(seed=6)
    other = complaint(data=DATA | {"fingerprint": "0" * 64})
    assert "samples of fingerprint=ffffffffffff..., and this run cuts them with fingerprint=000000000000" in other
    assert "of seq_len=10, and this run cuts them with seq_len=20" in complaint(data=DATA | {"seq_len": 20})
    assert "sequences='documents'" in complaint(data=DATA | {"sequences": "documents"})
    dtype = complaint(dtype=torch.float64)
    assert "model/embedding.weight is float32 [31, 24], and this run has float64 [31, 24]" in dtype
    assert "61 more tensors differ" in dtype
    assert "is not a checkpoint: there is no such folder" in str(run_ranks(load_ranks, 1, saved / "no", ONE)[0])


def test_bug_23_a_dtype_that_is_cast_in_loading_would_be_seen(saved):
    # The check mutated away, float32 goes into float64 in silence; so it is the check that refuses.
    bug = (
        "shardloom.train.checkpoint.state",
        "_differences",
        "(saved.shape, saved.dtype) !=",
        "(saved.shape, dtype) !=",
    )
    for found in run_ranks(load_ranks, 2, saved, ZERO_3, (bug,), torch.float64):
        assert isinstance(found, dict)
        assert {tensor.dtype for name, tensor in found.items() if "/step/" not in name} == {torch.float64}
    assert all(
        isinstance(error, CheckpointError) for error in run_ranks(load_ranks, 2, saved, ZERO_3, (), torch.float64)
    )


def resumed_step(path: Path | None, decay: float, rate: float, mutations: tuple[Mutation, ...] = ()) -> Logical:
    """The state after a step at `decay` and `rate`, from a checkpoint or, if None, from the same state by training."""
    with ExitStack() as stack:
        stack.enter_context(mutated(*mutations))
        trainer = build(ZERO_3, torch.float32)
        if path is None:
            take_step(trainer, ZERO_3, 0)
            for group in trainer.optimizer.param_groups:
                group["weight_decay"] = decay if group["weight_decay"] else 0.0
        else:
            optimizer = build_optimizer(
                trainer.model.named_parameters.items(), OPTIMIZER.model_copy(update={"weight_decay": decay})
            )
            trainer.optimizer = optimizer
            state.load(path, trainer, DATA)
        batch = local_batch(1, ZERO_3.data_rank(dist.get_rank()), 2, 1)
        trainer.forward_backward(batch, 1)
        trainer.update(rate)
        return logical(trainer)


STALE = {
    "weight decay of the checkpoint": (
        "shardloom.train.checkpoint.state",
        "load",
        "return manifest.progress",
        "trainer.optimizer.param_groups[0]['weight_decay'] = 0.1; return manifest.progress",
    ),
    "rate of the step before": (
        "shardloom.train.step:Trainer",
        "update",
        "set_learning_rate(self.optimizer, rate)\n    self.optimizer.step()",
        "self.optimizer.step()\n    set_learning_rate(self.optimizer, rate)",
    ),
}


def test_the_first_step_after_a_resume_has_the_weight_decay_and_the_rate_of_the_run_file(saved):
    expected = run_ranks(resumed_step, 2, None, 0.7, 3e-3)[0]
    assert equal(run_ranks(resumed_step, 2, saved, 0.7, 3e-3)[0], expected)
    # It is a difference that shows.
    assert not equal(run_ranks(resumed_step, 2, saved, 0.1, 3e-3)[0], expected)


@pytest.mark.parametrize("bug", STALE)
def test_bug_24_a_parameter_group_that_is_stale_after_a_resume_is_seen(saved, bug):
    expected = run_ranks(resumed_step, 2, None, 0.7, 3e-3)[0]
    assert not equal(run_ranks(resumed_step, 2, saved, 0.7, 3e-3, (STALE[bug],))[0], expected)


def save_on_a_full_disk(folder: Path, free_bytes: int | None) -> str:
    """Save once; then with `free_bytes` on the disk, or where the disk fills up while rank 1 writes (None)."""
    trainer, store = build(ZERO_3, torch.float32), CheckpointStore(folder)
    save(store, trainer, Progress(1, 12, SEED), DATA, "")
    take_step(trainer, ZERO_3, 0)
    if free_bytes is not None:
        shutil.disk_usage = lambda path: types.SimpleNamespace(free=free_bytes)  # type: ignore[assignment]
    elif dist.get_rank() == 1:
        storage.save_file = write_half
    with pytest.raises(CheckpointError) as caught:
        save(store, trainer, Progress(2, 24, SEED), DATA, "")
    dist.barrier()
    assert caught.value.exit_code == 2
    return str(caught.value)


def write_half(tensors: dict[str, Tensor], path: Path) -> None:
    """What safetensors does and raises when the disk is full (seen on a tmpfs)."""
    path.write_bytes(b"half")
    raise storage.SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")


def test_a_disk_without_room_for_the_next_checkpoint_is_noticed_before_anything_is_written(tmp_path):
    for message in run_ranks(save_on_a_full_disk, 2, tmp_path / "run", 2**16):
        needed, free = "the next checkpoint takes 1.1", "has 64 KiB free"
        assert needed in message, message
        assert free in message, message
        assert f"the last good one is {tmp_path / 'run' / 'step-00000001'}" in message
    assert os.listdir(tmp_path / "run") == ["step-00000001"]
    assert isinstance(run_ranks(load_ranks, 1, tmp_path / "run" / "step-00000001", ONE)[0], dict)


def test_a_disk_that_fills_up_during_a_save_leaves_the_checkpoint_before_it(tmp_path):
    for message in run_ranks(save_on_a_full_disk, 2, tmp_path, None):
        assert (
            f"writing {tmp_path / 'step-00000002.partial'} (earlier checkpoints are untouched): the disk is" in message
        )
        assert "Traceback" not in message
    assert os.listdir(tmp_path) == ["step-00000001"]
    assert isinstance(run_ranks(load_ranks, 1, tmp_path / "step-00000001", ONE)[0], dict)


def test_a_bug_in_saving_is_not_passed_off_as_bad_input(tmp_path, monkeypatch):
    from torch.distributed.checkpoint.api import CheckpointException, _wrap_exception

    for cause, kind in ((KeyError("x"), CheckpointException), (PermissionError(13, "no"), CheckpointError)):
        try:
            raise cause
        except Exception as error:
            found = state._first_cause(CheckpointException("write", {1: _wrap_exception(error)}), "writing")
            assert isinstance(found, kind)


def publish(store: CheckpointStore, step: int) -> None:
    store.begin(step, 0)
    (store.partial_of(step) / "manifest.json").write_text(str(step))
    store.publish(step)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_last_checkpoints_are_kept(tmp_path):
    store = CheckpointStore(tmp_path, keep_last=2)
    for step in (5, 10, 100_000_000):
        publish(store, step)
    assert names(tmp_path) == ["step-00000010", "step-100000000"]
    assert store.published() == [tmp_path / "step-00000010", tmp_path / "step-100000000"]


def test_a_new_checkpoint_is_never_deleted_for_damaged_ones_of_later_steps(tmp_path):
    for step in (5, 10, 15):
        publish(CheckpointStore(tmp_path, keep_last=3), step)
    publish(CheckpointStore(tmp_path, keep_last=1), 7)
    assert names(tmp_path) == ["step-00000007"]


def test_what_a_killed_process_left_is_swept_and_what_it_had_moved_aside_is_put_back(tmp_path):
    store = CheckpointStore(tmp_path, keep_last=2)
    publish(store, 5)
    store.begin(10, 0)
    (tmp_path / "step-00000005").rename(tmp_path / "step-00000005.replaced.partial")
    assert store.published() == []
    store.sweep()
    assert names(tmp_path) == ["step-00000005"]
    publish(store, 5)
    assert names(tmp_path) == ["step-00000005"]


def test_a_checkpoint_has_its_name_only_when_it_is_whole(tmp_path, monkeypatch):
    store = CheckpointStore(tmp_path)
    seen = []
    rename = Path.rename

    def watch(self, target):
        seen.append((names(tmp_path), self.name, Path(target).name))
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", watch)
    publish(store, 5)
    assert seen == [(["step-00000005.partial"], "step-00000005.partial", "step-00000005")]
