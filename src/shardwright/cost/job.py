"""What is to be predicted: a model, a cluster, a batch and a software stack; and the layouts, many at once.

Formulas of this room are numpy expressions over `Candidates`, so the same line prices one layout or ten thousand.
Shapes: n candidates, S stages of the pipeline in the order a microbatch meets them, R ranks of `pp`.
"""

from dataclasses import dataclass, fields, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from shardwright.cost.calibration import CALIBRATED, Calibration
from shardwright.cost.hardware import Cluster
from shardwright.cost.stack import SHARDWRIGHT, Stack
from shardwright.layout import KEYS, Layout
from shardwright.model.spec import ModelSpec
from shardwright.optimizers import OPTIMIZERS
from shardwright.schedule.registry import Kind

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

RECOMPUTE = ("none", "selective", "full")
"""What the backward pass computes again: nothing, what attention makes between its matrices (Korthikanti et al.,
arXiv 2205.05198, section 5), or every block. `Candidates.recompute` holds places in this list."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is trained, on what, and by which software.

    `seq_len` in tokens, `global_batch` in sequences. `precision`: of the matrix products, "fp32", "bf16", "fp16" or
    "fp8"; under the last three the master weights are fp32. `calibration`: the fitted constants of step times.
    `optimizer`: a name in `optimizers.OPTIMIZERS`.
    """

    model: ModelSpec
    cluster: Cluster
    seq_len: int
    global_batch: int
    precision: str = "bf16"
    stack: Stack = SHARDWRIGHT
    calibration: Calibration = CALIBRATED
    optimizer: str = "adamw"

    @property
    def n_optimizer_states(self) -> int:
        """Tensors that the optimizer keeps for each parameter."""
        return len(OPTIMIZERS[self.optimizer].state)

    @property
    def tokens(self) -> int:
        """Of a step, over all ranks."""
        return self.seq_len * self.global_batch

    @property
    def wide_precision(self) -> str:
        """Of what nobody does in fp8: attention's products and the logits."""
        return "bf16" if self.precision == "fp8" else self.precision

    @property
    def element_bytes(self) -> int:
        """Of an activation or a working weight; fp8 is used inside products alone, and what is kept has 16 bits."""
        return 4 if self.precision == "fp32" else 2


@dataclass(frozen=True, kw_only=True)
class Candidates:
    """n layouts, with the micro-batch of each. Keys of the layout that may differ between them have arrays here, of
    shape (n,); `shared` has the values of all other keys, and what it has of those with arrays means nothing.

    The fields mean what `Layout` says. The number of ranks need not be the same for all.
    """

    shared: Layout
    dp_replicate: Ints
    dp_shard: Ints
    cp: Ints
    tp: Ints
    ep: Ints
    zero: Ints
    sequence_parallel: NDArray[np.bool_]
    micro_batch: Ints
    recompute: Ints

    @staticmethod
    def of(layout: Layout, micro_batch: int, recompute: str | None = None) -> "Candidates":
        """One layout as an array of one. `recompute`: instead of the layout's, which knows no "selective"."""
        own = {name: getattr(layout, name) for name in COLUMNS if name in KEYS}
        own |= {"micro_batch": micro_batch, "recompute": RECOMPUTE.index(recompute or layout.recompute)}
        return Candidates(shared=layout, **{name: np.array([value]) for name, value in own.items()})

    def __len__(self) -> int:
        return len(self.tp)

    def take(self, rows: Ints | NDArray[np.bool_] | slice) -> "Candidates":
        """Some of them, by number or by a mask."""
        return replace(self, **{name: getattr(self, name)[rows] for name in COLUMNS})

    @property
    def pp(self) -> int:
        """Ranks of the pipeline."""
        return self.shared.pp

    @property
    def kind(self) -> Kind:
        """What is registered under the name of the schedule."""
        return self.shared.kind

    @cached_property
    def data_ranks(self) -> Ints:
        """Into how many parts a global batch is dealt."""
        return self.dp_replicate * self.dp_shard

    @cached_property
    def shards(self) -> Ints:
        """Over how many ranks ZeRO shares out a dense parameter's state: dp_shard x cp."""
        return self.dp_shard * self.cp

    @cached_property
    def copies(self) -> Ints:
        """Ranks whose gradients of a dense parameter are added up: data ranks x cp."""
        return self.data_ranks * self.cp

    @cached_property
    def expert_shards(self) -> Ints:
        """Over how many ranks ZeRO shares out an expert's state: dp_shard x cp x tp / ep.

        Other systems spread experts over replicas, too, so that ep is more than that; nothing is then left to share.
        """
        return np.maximum(self.dp_shard * self.cp * self.tp // self.ep, 1)

    @cached_property
    def world(self) -> Ints:
        """Number of ranks."""
        return self.pp * self.dp_replicate * self.dp_shard * self.cp * self.tp

    @cached_property
    def token_shards(self) -> Ints:
        """Parts of a sequence between a block's products: tp with sequence parallelism, else 1."""
        return np.where(self.sequence_parallel, self.tp, 1)

    def tokens(self, seq_len: int) -> Floats:
        """Of a microbatch on one rank of cp."""
        return self.micro_batch * seq_len / self.cp

    def microbatches(self, global_batch: int) -> Ints:
        """A data rank's in one step; the batch has to divide."""
        return global_batch // (self.micro_batch * self.data_ranks)


COLUMNS = tuple(each.name for each in fields(Candidates) if each.name != "shared")
"""The arrays of `Candidates`."""
