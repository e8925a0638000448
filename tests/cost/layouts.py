"""Short ways to write a job and a layout for tests of `cost`."""

from dataclasses import replace

from shardwright.cost.hardware import cluster
from shardwright.cost.job import Candidates, Job
from shardwright.cost.stack import SHARDWRIGHT, Stack
from shardwright.layout.layout import Layout
from shardwright.model.presets import resolve
from shardwright.model.spec import ModelSpec

CLUSTER = cluster("h100:8")
GPT = replace(resolve("gpt-22b"), dropout=0.1)


def job(
    model: str | ModelSpec = "llama-3.1-8b",
    stack: Stack = SHARDWRIGHT,
    seq_len: int = 4096,
    global_batch: int = 64,
    precision: str = "bf16",
) -> Job:
    """A job on one node; memory does not depend on the cluster."""
    spec = resolve(model) if isinstance(model, str) else model
    return Job(
        model=spec, cluster=CLUSTER, seq_len=seq_len, global_batch=global_batch, precision=precision, stack=stack
    )


def one(micro_batch: int = 1, recompute: str | None = None, **layout: int | bool | str) -> Candidates:
    """The candidate of one layout."""
    return Candidates.from_layout(Layout(**{"sequence_parallel": False} | layout), micro_batch, recompute)  # type: ignore[arg-type]
