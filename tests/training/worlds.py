"""A tiny model and a ragged batch that tests train for a few steps, on any layout."""

import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from shardwright.config import OptimizerSection
from shardwright.data.batches import Batch
from shardwright.layout.layout import Layout
from shardwright.model.spec import ModelSpec
from shardwright.parallel.boxes import gather_whole
from shardwright.training.step import Trainer
from shardwright.verification import rank as verify_rank
from shardwright.verification.case import DTYPES, Case
from shardwright.verification.reference import train_alone
from shardwright.verification.trace import RankTrace, Trace, TracedQuantity
from tests.distributed import run_ranks
from tests.mutation import Mutation, mutated

SPEC = ModelSpec(
    n_layers=2,
    d_model=24,
    n_heads=3,
    n_kv_heads=1,
    head_dim=8,
    d_ffn=40,
    vocab_size=31,
    max_seq_len=16,
    norm="rmsnorm",
    norm_eps=1e-5,
    activation="swiglu",
    positions="rope",
    rope_theta=1e4,
    rope_scaling=None,
    qk_norm=False,
    bias=False,
    tied_embedding=False,
    dropout=0.0,
    init_std=0.3,
)
GLOBAL_BATCH, SEQ_LEN, STEPS, SEED, RATE = 24, 10, 3, 5, 2e-3
OPTIMIZER = OptimizerSection(lr=RATE, weight_decay=0.1)
CASE = Case(SPEC, SEQ_LEN, GLOBAL_BATCH, seed=SEED, optimizer=OPTIMIZER, steps=STEPS)
EVEN = replace(SPEC, n_heads=4, n_kv_heads=2, d_model=32)  # splits over two ranks of tp or cp
LONG = replace(CASE, spec=EVEN, seq_len=12)  # and so does the sequence
NO_SUM_OF_COPIES = Mutation("shardwright.parallel.model:sum_replica_gradients", "parts and group is not None", "False")
"""Known bug 11: gradients of norms on token shards are not summed. docs/verify_with_bug.py shows it without pytest."""


def case(layout: Layout, accumulation: int, dtype: str = "float64", spec: ModelSpec = SPEC) -> Case:
    """CASE with that many microbatches a step."""
    return replace(CASE, spec=spec, micro_batch=GLOBAL_BATCH // (layout.data_ranks * accumulation), dtype=dtype)


def in_few_micro_batches(case: Case, layout: Layout) -> Case:
    """The case with two micro-batches a step on each data rank, twice as many as ranks in a pipeline: enough to show
    how they are summed. Each more would cost every collective of a step once more."""
    accumulation = 2 * layout.pp
    return replace(case, micro_batch=max(1, case.global_batch // (layout.data_ranks * accumulation)))


def local_batch(step: int, data_rank: int, data_ranks: int, accumulation: int) -> Batch:
    """One data rank's share of a step, as data/batches.py deals it."""
    layout = Layout(dp_replicate=data_ranks)
    return verify_rank.local_batch(case(layout, accumulation), layout, data_rank, step)


def build(layout: Layout, dtype: torch.dtype, spec: ModelSpec = SPEC, compute: torch.dtype | None = None) -> Trainer:
    """The trainer of this rank."""
    name = next(name for name, types in DTYPES.items() if types == (dtype, compute or dtype))
    return verify_rank.build_trainer(replace(CASE, spec=spec, dtype=name), layout, "adamw")


def train_mutated(mutations: tuple[Mutation, ...], case: Case, layout: Layout, folder: Path) -> RankTrace:
    """What verify runs on each rank, with bugs put into our code."""
    with mutated(*mutations):
        return verify_rank.train_rank(case, layout, folder)


def train_alone_mutated(mutations: tuple[Mutation, ...], case: Case, folder: Path) -> RankTrace:
    """The reference of verify with bugs put into our code, of which it runs a part: the model."""
    with mutated(*mutations):
        return train_alone(case, folder)


@dataclass
class Outcome:
    """Loss and raw gradients of each step."""

    losses: list[float]
    gradients: list[dict[str, Tensor]]


def one_process(dtype: torch.dtype) -> Outcome:
    """The reference of verify on CASE: plain PyTorch, the whole batch in one forward pass."""
    with tempfile.TemporaryDirectory() as folder:
        name = next(name for name, types in DTYPES.items() if types == (dtype, dtype))
        trace = Trace(Path(folder), run_ranks(train_alone, 1, replace(CASE, dtype=name), Path(folder)))
        steps = range(1, STEPS + 1)
        gradients = [TracedQuantity("gradient", "adamw", step) for step in steps]
        return Outcome(
            [trace.scalars[TracedQuantity("loss", "adamw", step)] for step in steps],
            [{name: found for name in trace.shapes if (found := trace.tensor(g, name)) is not None} for g in gradients],
        )


def whole(tensor: Tensor | None) -> Tensor:
    """A plain copy of a tensor, gathered if it is sharded."""
    assert tensor is not None
    return gather_whole(tensor)


def relative_error(found: Tensor, expected: Tensor) -> float:
    """||found - expected|| / ||expected||."""
    return float((found - expected).norm() / expected.norm())
