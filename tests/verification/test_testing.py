"""Proves that a Trainer of a test file, whose weight is sharded by hand, is compared inside pytest."""

from collections.abc import Mapping

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwright.model.spec import ModelSpec
from shardwright.system.errors import InputError
from shardwright.testing import StepBatch, TensorShard, World, verify_trainer
from shardwright.verification.trainers.rank import _check_shard
from tests.marks import prove


class Trainer:
    """A table of logits, the rows of each rank's tokens."""

    AXES = ("tp",)

    def __init__(self, spec: ModelSpec, world: World) -> None:
        self.data_rank, self.data_ranks = 0, 1
        self.rank, self.vocab_size, self.n_rows = world.rank, spec.vocab_size, spec.vocab_size // world.size
        self.rows = nn.Parameter(torch.randn(self.n_rows, spec.vocab_size))

    def shard(self, tensor: Tensor | None) -> TensorShard:
        assert tensor is not None
        return TensorShard(tensor, (self.n_rows * self.rank, 0), (self.vocab_size, self.vocab_size))

    def load(self, weights: Mapping[str, Tensor]) -> None:
        self.rows.data.copy_(weights["table"].chunk(self.vocab_size // self.n_rows)[self.rank])

    def step(self, batch: StepBatch) -> float:
        self.rows.grad, total = None, 0.0
        for tokens, targets in batch.micro_batches:
            local = torch.where((tokens // self.n_rows == self.rank)[..., None], self.rows[tokens % self.n_rows], 0.0)
            whole = local.detach().clone()
            dist.all_reduce(whole)
            logits = local + (whole - local.detach())
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
            (loss / batch.n_targets).backward()
            total += loss.item() / batch.n_targets
        assert self.rows.grad is not None
        self.rows.data -= batch.lr * self.rows.grad
        return total

    def gradients(self) -> dict[str, TensorShard]:
        return {"table": self.shard(self.rows.grad)}

    def parameters(self) -> dict[str, TensorShard]:
        return {"table": self.shard(self.rows)}


@prove
def test_a_trainer_whose_weight_is_sharded_by_hand_is_equal_and_what_it_ignores_is_listed():
    report = verify_trainer(Trainer, 2, steps=2)
    assert report.equal, report.culprit
    assert str(report.layout) == "tp 2"
    assert report.not_compared == ["clipping, since the trainer never reads batch.clip_norm"]


class Renamed(Trainer):
    """A class that a file's name `Trainer` does not find."""


def test_a_class_of_another_name_is_refused():
    with pytest.raises(InputError, match="class Renamed: a class is found by its file and the name Trainer"):
        verify_trainer(Renamed, 2)


def test_a_shard_outside_of_its_tensor_is_refused():
    for offsets in ((3, 0), (0,), (-1, 0)):
        with pytest.raises(InputError, match=r"the shard \(2, 4\) of table at .* is not within its tensor \(4, 4\)"):
            _check_shard("gradients()", "table", TensorShard(torch.zeros(2, 4), offsets, (4, 4)))
