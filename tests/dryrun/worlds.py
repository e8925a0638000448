"""Small runs that are recorded twice: as ranks of a real world on gloo, and dry."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.config import RunConfig, parse
from shardwright.data.batches import Batch
from shardwright.dry_run.program import CPU, dry_rank, record_steps
from shardwright.dry_run.record import RankRecord
from shardwright.parallel.expert import read_counts
from shardwright.training.build import build_model, build_trainer
from tests.distributed import run_ranks

DENSE = {
    "d_model": 64,
    "n_heads": 4,
    "n_kv_heads": 2,
    "head_dim": 16,
    "d_ffn": 96,
    "vocab_size": 160,
    "max_seq_len": 32,
}
MIXTURE = DENSE | {"moe": {"n_experts": 8, "top_k": 2, "d_ffn": 32, "n_shared": 1, "first_dense": 1}}
LATENT = MIXTURE | {
    "n_kv_heads": 4,
    "latent_attention": {"kv_rank": 24, "q_rank": 16, "nope_dim": 16, "rope_dim": 8, "v_dim": 16},
}
LINEAR = DENSE | {"linear_attention": {"n_k_heads": 2, "n_v_heads": 4, "k_dim": 12, "v_dim": 16, "full_interval": 2}}
OFFSET = DENSE | {"norm_offset": True, "norm_position": "both", "qk_norm": True}
MODELS = {
    "linear": LINEAR,
    "dense": DENSE,
    "mixture": MIXTURE,
    "latent": LATENT,
    "mtp": DENSE | {"mtp_modules": 1},
    "offset": OFFSET,
}
Counts = list[list[list[int]]]


Table = dict[str, Any]
"""A run file. Ranks are sent this and not what is parsed from it, some of whose types cannot be pickled."""


def run_file(model: str, layout: dict[str, Any], compute: str = "fp32", **more: Any) -> Table:
    """Three micro-batches of two sequences on each data rank, and three layers; in a pipeline four layers, and twice as
    many micro-batches as it has ranks."""
    data_ranks, piped = layout.get("dp_shard", 1) * layout.get("dp_replicate", 1), layout.get("pp", 1) > 1
    n = 2 * layout["pp"] if piped else 3
    table = {
        "out": "none",
        "steps": 10,
        "model": MODELS[model] | {"n_layers": 4 if piped else 3},
        "data": {"path": "none"},
        "batch": {"seq_len": 32, "global_batch": 2 * n * data_ranks, "micro_batch": 2},
        "layout": layout,
        "precision": {"compute": compute},
    }
    return table | more


def real_rank(table: Table) -> tuple[RankRecord, Counts]:
    """The record of this rank of a real world, and the numbers of rows that its experts have exchanged."""
    counts: Counts = []
    config = parse(table)

    def read(rows_2n: Tensor, n_rows: int) -> list[list[int]]:
        counts.append(read_counts(rows_2n, n_rows))
        return counts[-1]

    rank = dist.get_rank()
    model = build_model(config, CPU, compiled=False, read=read)
    trainer = build_trainer(config, model, CPU, compiled=False)
    record = record_steps(trainer, config, rank, lambda step, n: random_batch(config, rank, step, n), 2, gpu=False)
    del trainer
    return record, counts


def random_batch(config: RunConfig, rank: int, step: int, n_microbatches: int) -> Batch:
    """A batch of this rank's data rank: of as many micro-batches as a dry run has in the steps before the recorded one,
    of all in that."""
    layout = config.layout.layout()
    generator = torch.Generator().manual_seed(100 * step + layout.data_rank(rank))
    n_sequences = config.accumulation if step else n_microbatches
    n_sequences *= config.batch.micro_batch
    shape = (n_sequences, config.batch.seq_len)
    tokens_BT, targets_BT = (torch.randint(160, shape, generator=generator) for _ in range(2))
    return Batch.from_sequences(tokens_BT, targets_BT, torch.arange(n_sequences), config.batch.micro_batch)


def real_ranks(table: Table) -> list[RankRecord]:
    """The records of all ranks of a real world."""
    return [record for record, _ in run_ranks(real_rank, parse(table).layout.layout().world_size, table)]


def dry_with(table: Table, rank: int, counts: Counts) -> RankRecord:
    """The dry record of a rank with the numbers of rows of a real one."""
    left = list(counts)
    return dry_rank(parse(table), rank, gpu=False, read=lambda rows_2n, n_rows: left.pop(0))


def both(table: Table) -> tuple[list[RankRecord], dict[int, RankRecord]]:
    """The real records of all ranks, and by rank the dry ones of the first and the last; of a pipeline alone, whose
    ranks all differ, of every rank."""
    layout = parse(table).layout.layout()
    real = run_ranks(real_rank, layout.world_size, table)
    ranks = range(layout.world_size) if layout.world_size == layout.pp else sorted({0, layout.world_size - 1})
    dry = {rank: run_ranks(dry_with, 1, table, rank, real[rank][1])[0] for rank in ranks}
    return [record for record, _ in real], dry
