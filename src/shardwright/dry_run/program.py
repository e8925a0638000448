"""Run steps of the training program as one rank, on fake or real tensors, and record the last step."""

import gc
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwright.config import RunConfig
from shardwright.data.batches import Batch, DocumentsAB
from shardwright.dry_run.length import ShortenedStep, step_length
from shardwright.dry_run.places import ModuleLocator
from shardwright.dry_run.record import RankRecord
from shardwright.dry_run.recorder import OperationRecorder
from shardwright.dry_run.watch import watched
from shardwright.model.device_type import assumed
from shardwright.model.spec import ModelSpec
from shardwright.parallel.expert import ReadCounts
from shardwright.parallel.microbatch import Microbatch
from shardwright.split.stages import schedule_problems
from shardwright.system.torch_private import (
    FakeTensorMode,
    few_empty_shards,
    replaced_rms_norm,
    start_fake_world,
    storage_id,
    tree_leaves,
)
from shardwright.training.build import build_model, build_trainer
from shardwright.training.step import Trainer

CPU = torch.device("cpu")


def dry_rank(
    config: RunConfig,
    rank: int,
    *,
    gpu: bool,
    steps: int = 2,
    imbalance: float = 1.0,
    history: bool = False,
    read: ReadCounts | None = None,
    on_action: Callable[[], None] = lambda: None,
    length: ShortenedStep | None = None,
) -> RankRecord:
    """Return the last of `steps` steps of `rank`, on a fake process group and fake tensors.

    It must run in its own process, in which no process group was used, since PyTorch caches results for the device
    meshes of a world. `gpu`: use the kernels and the allocator of a GPU instead of a CPU. `read`: the numbers of rows
    that ranks of ep exchange; `balanced` by default. `on_action`: called when an action of the recorded step starts.
    `length`: as in `record_steps`.
    """
    layout = config.layout.layout()
    if dist.is_initialized():
        dist.destroy_process_group()
    start_fake_world(rank, layout.world_size)
    fake = FakeTensorMode(allow_non_fake_inputs=True)

    def fill(part: nn.Module, spec: ModelSpec, seed: int, device: torch.device, _: torch.device) -> None:
        with fake:
            part.to_empty(device=device)

    read = read or balanced(layout.ep, layout.coordinates(rank)["ep"], imbalance)
    with assumed("cuda") if gpu else nullcontext(), few_empty_shards():
        model = build_model(config, CPU, compiled=False, fill=fill, read=read)
        with fake:
            trainer = build_trainer(config, model, CPU, compiled=False, opened=_NoFile)
            with fused_norms() if gpu else nullcontext():
                return record_steps(
                    trainer, config, rank, lambda _, n: empty_batch(config, n), steps, gpu, history, on_action, length
                )


class _NoFile:
    """A file of optimizer states without content; a recorder counts the requests."""

    def __init__(self, folder: Path, n_bytes: int) -> None:
        pass

    def read(self, at: int, into: memoryview, direct: bool = False) -> None:
        pass

    def write(self, at: int, data: memoryview, direct: bool = False) -> None:
        pass


def fused_norms() -> AbstractContextManager[None]:
    """During the block, `F.rms_norm` allocates like a GPU's kernel; a CPU runs several operations, which keep more."""
    return replaced_rms_norm(lambda x, shape, weight=None, eps=None: _FusedNorm.apply(x, weight))


class _FusedNorm(torch.autograd.Function):
    """RMSNorm without values, as `aten._fused_rms_norm` on a GPU: it keeps its input and one number a row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None) -> Tensor:
        scales = x.new_empty((*x.shape[:-1], 1), dtype=torch.promote_types(x.dtype, torch.float32))
        ctx.save_for_backward(x, weight, scales)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), None if weight is None else torch.empty_like(weight)


def record_steps(
    trainer: Trainer,
    config: RunConfig,
    rank: int,
    batch: Callable[[int, int], Batch],
    steps: int,
    gpu: bool,
    history: bool = False,
    on_action: Callable[[], None] = lambda: None,
    length: ShortenedStep | None = None,
) -> RankRecord:
    """Take steps on `batch(step, number of micro-batches)` and record the last, which is not the first. `length`: the
    micro-batches of the last step to run; by default from `step_length`."""
    rate, layout = config.optimizer.lr, config.layout.layout()
    n_microbatches = config.accumulation
    length = length or step_length(config)
    fewest = next(n for n in range(1, n_microbatches + 1) if not schedule_problems(layout, n))
    for step in range(steps - 1):
        trainer.step(batch(step, fewest), step, rate)
    gc.collect()
    last = batch(steps - 1, length.n_run)
    left_out = n_microbatches - len(last.tokens_ABT)
    repeats = length.repeats[layout.coordinates(rank)["pp"]] if left_out else {}
    with (
        ModuleLocator(trainer.model.parts) as places,
        OperationRecorder(layout, rank, places, gpu, on_action) as recorder,
    ):
        tensors = last.tokens_ABT, last.targets_ABT, last.sample_ids_AB
        for tensor in tensors:
            recorder.mark(tensor, "activations")
            whole_bytes = recorder.rounded(n_microbatches * tensor[0].nbytes)
            recorder.hold(whole_bytes - recorder.rounded(tensor.nbytes), "activations")
        count_omitted = partial(_count_omitted_data, recorder, tensors, left_out)
        with watched(trainer, recorder, count_omitted):
            recorder.begin("begin")
            trainer.step(last, steps - 1, rate)
        return recorder.record(repeats, history)


def _count_omitted_data(
    recorder: OperationRecorder, batch: Iterable[Tensor], left_out: int, microbatches: Sequence[Microbatch]
) -> None:
    """Make the recorder hold the tensors that the trainer derives from the omitted micro-batches' data: parts of
    sequences with cp, the tokens that MTP modules read, positions in documents. `batch`: the source tensors."""
    if not left_out:
        return
    given = {storage_id(tensor.untyped_storage()) for tensor in batch}
    n_run, of_each = len(microbatches), 0
    of_storage: dict[int, tuple[int, set[int], set[int]]] = {}
    for at, microbatch in enumerate(microbatches):
        positions = None if microbatch.documents is None else microbatch.documents.positions_BT
        for tensor in tree_leaves((*microbatch._replace(documents=None), positions)):
            if isinstance(tensor, Tensor) and (name := storage_id(tensor.untyped_storage())) not in given:
                _, owners, offsets = of_storage.setdefault(name, (tensor.untyped_storage().nbytes(), set(), set()))
                owners.add(at)
                offsets.add(int(tensor.storage_offset()))
    for n_bytes, owners, offsets in of_storage.values():
        if len(owners) == 1:
            of_each += recorder.rounded(n_bytes)
        elif len(offsets) == n_run:  # one tensor, which contains a part for each micro-batch
            n_all = n_bytes * (n_run + left_out) // n_run
            recorder.hold(recorder.rounded(n_all) - recorder.rounded(n_bytes), "temporaries")
    recorder.hold(of_each * left_out // n_run, "temporaries")


def empty_batch(config: RunConfig, n_microbatches: int) -> Batch:
    """Return a batch of one data rank without padding; on fake tensors it has no values."""
    shape_AB = (n_microbatches, config.batch.micro_batch)
    seq_len = config.batch.seq_len
    tokens_ABT = torch.zeros(*shape_AB, seq_len, dtype=torch.int64)
    documents: DocumentsAB | None = None
    if config.data.attention == "document":
        documents = tuple(tuple((seq_len,) for _ in range(shape_AB[1])) for _ in range(shape_AB[0]))
    references = None
    if config.preference.kind != "none":
        documents = tuple(((seq_len - seq_len // 2, seq_len // 2),) * shape_AB[1] for _ in range(shape_AB[0]))
        references = (((0.0, 0.0),) * shape_AB[1],) * shape_AB[0]
    ids_AB, n_targets = torch.zeros(shape_AB, dtype=torch.int64), tokens_ABT.numel()
    return Batch(tokens_ABT, tokens_ABT.clone(), ids_AB, n_targets, documents, references_AB=references)


def balanced(n_ranks: int, rank: int, imbalance: float) -> ReadCounts:
    """Return numbers of rows for ep: every rank sends `imbalance` times the mean to the first rank, and equal parts of
    the rest to the other ranks. `rank`: this rank of ep."""

    def read(rows_2n: Any, n_rows: int) -> list[list[int]]:
        to = shares(n_rows, n_ranks, imbalance)
        return [to, [to[rank]] * n_ranks]

    return read


def shares(n_rows: int, n_ranks: int, imbalance: float) -> list[int]:
    """Return `n_rows` split over ranks: `imbalance` times the mean for the first, then equal parts up to a
    remainder."""
    first = min(n_rows, round(n_rows * imbalance / n_ranks)) if n_ranks > 1 else n_rows
    per_rank, more = divmod(n_rows - first, max(1, n_ranks - 1))
    return [first, *(per_rank + (number < more) for number in range(n_ranks - 1))]
