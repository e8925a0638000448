"""What is to be predicted: a model, a cluster, a batch and a software stack; and the layouts, many at once.

Formulas of this room are numpy expressions over `Candidates`, so the same line prices one layout or ten thousand.
Shapes: n candidates, S stages of the pipeline in the order a microbatch meets them, R ranks of `pp`.
"""

from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwright.cost.calibration import CALIBRATED, Calibration
from shardwright.cost.hardware import Cluster
from shardwright.cost.stack import SHARDWRIGHT, Stack
from shardwright.layout import Layout
from shardwright.model.spec import ModelSpec

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
    """

    model: ModelSpec
    cluster: Cluster
    seq_len: int
    global_batch: int
    precision: str = "bf16"
    stack: Stack = SHARDWRIGHT
    calibration: Calibration = CALIBRATED

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
    """n layouts that share a pipeline, with the micro-batch and the recomputation of each; arrays have shape (n,).

    The fields mean what `Layout` says. The number of ranks need not be the same for all.
    """

    pp: int = 1
    schedule: str = "1f1b"
    virtual_stages: int = 1
    stage_layers: tuple[int, ...] | None = None
    zero_pp_gather: str = "step"
    cp_method: str = "zigzag"
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
        at = RECOMPUTE.index(recompute or layout.recompute)
        return Candidates(
            pp=layout.pp,
            schedule=layout.schedule,
            virtual_stages=layout.virtual_stages,
            stage_layers=layout.stage_layers,
            zero_pp_gather=layout.zero_pp_gather,
            cp_method=layout.cp_method,
            **{
                name: np.array([getattr(layout, name)], dtype=np.int64)
                for name in ("dp_replicate", "dp_shard", "cp", "tp", "ep", "zero")
            },
            sequence_parallel=np.array([layout.token_shards]),
            micro_batch=np.array([micro_batch], dtype=np.int64),
            recompute=np.array([at], dtype=np.int64),
        )

    def __len__(self) -> int:
        return len(self.tp)

    def take(self, rows: Ints | NDArray[np.bool_] | slice) -> "Candidates":
        """Some of them, by number or by a mask."""
        every = {each.name: getattr(self, each.name) for each in fields(self)}
        taken: dict[str, Any] = {name: at[rows] for name, at in every.items() if isinstance(at, np.ndarray)}
        return replace(self, **taken)

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
