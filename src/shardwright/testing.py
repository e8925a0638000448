"""Compare a trainer of your own with one process, inside pytest: `verify_trainer`, the objects that a `Trainer` class
receives and returns, and a small decoder for it to train (docs/verify-trainers.md)."""

from shardwright.parallel.boxes import TensorShard
from shardwright.verification.trainers.adapter import StepBatch, World
from shardwright.verification.trainers.parity import verify_trainer
from shardwright.verification.trainers.pieces import Decoder, loss_sum

__all__ = ["Decoder", "StepBatch", "TensorShard", "World", "loss_sum", "verify_trainer"]
