"""What tests of checkpoints share: saving and loading as every rank of a world, and comparing bits."""

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardwright.layout.layout import Layout
from shardwright.model.spec import ModelSpec
from shardwright.parallel.norm import as_part
from shardwright.system.errors import CheckpointError
from shardwright.training.checkpoint.manifest import DataRecord, TrainingProgress
from shardwright.training.checkpoint.saver import save
from shardwright.training.checkpoint.state import load, named_tensors, stored_tensors
from shardwright.training.checkpoint.store import CheckpointStore
from shardwright.training.offload.states import StoredTensor
from shardwright.training.step import Trainer
from tests.mutation import Mutation, mutated
from tests.training.worlds import RATE, SEED, SPEC, build, local_batch, whole

ONE, ZERO_3 = Layout(), Layout(dp_shard=2, zero=3)
DATA = DataRecord(
    seq_len=10,
    sequences="packed",
    mixture={
        "sources": [{"name": "book", "fingerprint": "f" * 64}],
        "stages": [{"from_step": 0, "from_sample": 0, "weights": [1]}],
    },
)
Logical = dict[str, Tensor]


def logical(trainer: Trainer) -> Logical:
    """Every tensor of the training state, whole."""
    stored = stored_tensors(trainer)
    return {name: whole(with_values(tensor, stored.get(name))) for name, tensor in named_tensors(trainer).items()}


def with_values(tensor: Tensor, stored: StoredTensor | None) -> Tensor:
    """A tensor, or what of it is on a disk, in memory."""
    if stored is None:
        return tensor
    if isinstance(tensor, DTensor):
        return as_part(stored.read(), tensor, tensor.device_mesh, tensor.placements)
    return stored.read()


def take_step(trainer: Trainer, layout: Layout, step: int) -> None:
    batch = local_batch(step, layout.data_rank(dist.get_rank()), layout.data_ranks, accumulation=2)
    trainer.forward_backward(batch, step)
    trainer.update(RATE)


def equal(found: Logical, expected: Logical) -> bool:
    """The same names, types and bits."""
    return found.keys() == expected.keys() and all(
        found[name].dtype == expected[name].dtype and torch.equal(found[name], expected[name]) for name in expected
    )


def save_ranks(folder: Path, layout: Layout, steps: int = 1, spec: ModelSpec = SPEC) -> Logical:
    """To be run on every rank: train, save under FOLDER, and say what was saved."""
    trainer = build(layout, torch.float32, spec)
    for step in range(steps):
        take_step(trainer, layout, step)
    progress = TrainingProgress(step=steps, samples=12 * steps, seed=SEED)
    save(CheckpointStore(folder, keep_last=9), trainer, progress, DATA, "steps = 1\n")
    return logical(trainer)


def hop(
    folder: Path,
    layout: Layout,
    step: int,
    spec: ModelSpec = SPEC,
    mutations: Sequence[Mutation] = (),
    run_toml: str = "",
) -> tuple[Logical | None, Logical]:
    """Take up the checkpoint after `step` steps, if that is not 0, take one more and save it."""
    with mutated(*mutations):
        trainer, store = build(layout, torch.float32, spec), CheckpointStore(folder, keep_last=99)
        loaded = None
        if step:
            assert load(store.path_of(step), trainer, DATA).progress == TrainingProgress(step, 12 * step, SEED)
            loaded = logical(trainer)
        take_step(trainer, layout, step)
        save(store, trainer, TrainingProgress(step + 1, 12 * (step + 1), SEED), DATA, run_toml)
        return loaded, logical(trainer)


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
