"""Compare a trainer of your own with one process, inside pytest: `verify_trainer`, and the objects that a `Trainer`
class receives and returns (docs/verify-trainers.md)."""

from shardwright.parallel.boxes import TensorShard
from shardwright.verification.trainers.adapter import StepBatch, World
from shardwright.verification.trainers.parity import verify_trainer

__all__ = ["StepBatch", "TensorShard", "World", "verify_trainer"]
