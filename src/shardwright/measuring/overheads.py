"""Overheads of Python and the libraries in a step: steps of the training program on very small models."""

import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from shardwright.config import parse
from shardwright.measuring.clock import Kind, MeasuringClock, worst
from shardwright.measuring.points import Overheads
from shardwright.measuring.steps import MeasuredSteps, run_file, run_steps, selected
from shardwright.model.rotary import rotary_table
from shardwright.model.transformer import Block
from shardwright.training.build import build_model, build_trainer

FEW, MANY = 2, 8
"""Layers of two models; micro-batches of two steps."""
STEPS, ROUNDS = 8, 3
"""Steps of a run, and number of runs (the fastest counts, since other programs only add time)."""
SMALL_HEADS, SMALL_WIDTH = 2, 16
"""Heads of the small models, and their width."""
UPDATED_WIDTHS = {"cpu": (128, 512), "cuda": (2048, 4096)}
"""Widths of two models whose update is measured: on a GPU an update of 50M parameters takes as long as its launches."""
RunRanks = Callable[..., list[Any]]


def seconds_of(ranks: list[MeasuredSteps], clock: Kind) -> float:
    """Return the median step time of the slowest rank."""
    return worst([statistics.median(rank.cpu_s if clock == "cpu" else rank.wall_s) for rank in ranks])


def overheads(run_ranks: RunRanks, clock: Kind, device: str, message_s: float | None) -> tuple[Overheads, int]:
    """Compute overheads from differences between steps: with more layers, with more micro-batches, and sharded over two
    ranks. Also returns the peak bytes of a process with a very small model.

    A rank has one thread: the time to start several threads is part of the kernels, which are measured with them.
    `run_ranks`: as `verification.ranks.run_ranks`. `message_s`: seconds of a small collective over two ranks, or None.
    """
    peak_bytes: list[int] = []

    def step_s(layers: int, microbatches: int, **layout: Any) -> float:
        ranks = 2 if layout else 1
        table = run_file(small_model(layers), _batch(microbatches * ranks), layout, "fp32")
        runs = [run_ranks(run_steps, ranks, table, STEPS, device, n_threads=1) for _ in range(ROUNDS)]
        peak_bytes.extend(rank.peak_bytes for ranks in runs for rank in ranks)
        return min(seconds_of(ranks, clock) for ranks in runs)

    few, longer, most, deep = step_s(FEW, FEW), step_s(FEW, MANY), step_s(MANY, MANY), step_s(MANY, FEW)
    layers, microbatches = MANY - FEW, MANY - FEW
    layer_s = max(most - longer - (deep - few), 0.0) / (layers * microbatches)
    ends_s = max((longer - few) / microbatches - FEW * layer_s, 0.0)
    rest_s = max(few - FEW * (FEW * layer_s + ends_s), 0.0)
    (backward,) = run_ranks(backward_share, 1, device, n_threads=1)
    bucket_s = 0.0
    if message_s is not None:
        sharded = {"dp_shard": 2, "zero": 3}
        more = step_s(MANY, FEW, **sharded) - step_s(FEW, FEW, **sharded) - (deep - few)
        # A layer is gathered forward and backward, and its gradients reduced, in each micro-batch.
        bucket_s = max(more / (layers * FEW * 3) - message_s, 0.0)
    return Overheads(layer_s, ends_s, rest_s, backward, bucket_s), max(peak_bytes)


def small_model(layers: int) -> dict[str, Any]:
    """Return a model with negligible computation, as a section of a run file."""
    heads = {"n_heads": SMALL_HEADS, "n_kv_heads": SMALL_HEADS, "head_dim": SMALL_WIDTH}
    sizes = {"n_layers": layers, "d_model": SMALL_HEADS * SMALL_WIDTH, "d_ffn": 64, **heads}
    return {"preset": "debug", **sizes, "vocab_size": 64, "max_seq_len": 64}


def _batch(sequences: int) -> dict[str, int]:
    return {"seq_len": 16, "global_batch": sequences, "micro_batch": 1}


def backward_share(device: str) -> float:
    """Return the time of a small layer's backward pass relative to its forward pass, in one thread's CPU-seconds."""
    spec = parse(run_file(small_model(FEW), _batch(FEW), {}, "fp32")).spec()
    block = Block(spec, 0).to(device)
    x = torch.randn(1, 16, spec.d_model, device=device, requires_grad=True)
    positions = torch.arange(16, device=device)
    table = rotary_table(spec, positions, x.dtype)
    forward, backward = [], []
    for _ in range(30):
        times = [time.process_time()]
        y = block(x, positions, table).sum()
        times.append(time.process_time())
        y.backward()
        times.append(time.process_time())
        forward.append(times[1] - times[0])
        backward.append(times[2] - times[1])
    return statistics.median(backward) / max(statistics.median(forward), 1e-6)


def update_seconds(device: str, clock: Kind) -> list[tuple[int, float]]:
    """Return (parameters, seconds to clip their gradients and update them) of two models, on a single rank."""
    updates = []
    where = selected(device)
    time_of = MeasuringClock(where, clock)
    for width in UPDATED_WIDTHS[where.type]:
        sizes = {
            "n_layers": 2,
            "d_model": width,
            "d_ffn": 4 * width,
            "n_heads": 4,
            "n_kv_heads": 4,
            "head_dim": width // 4,
        }
        table = run_file({"preset": "debug", **sizes, "vocab_size": 512, "max_seq_len": 64}, _batch(1), {}, "fp32")
        config = parse(table)
        model = build_model(config, where, compiled=False)
        trainer = build_trainer(config, model, where, compiled=False)
        seconds = []
        for _ in range(7):
            for parameter in model.named_parameters.values():
                parameter.grad = torch.ones_like(parameter)
            begin = time_of.now()
            trainer.update(1e-4)
            seconds.append(time_of.now() - begin)
        updates.append((config.spec().n_parameters, statistics.median(seconds)))
        del trainer, model
        gc.collect()
    return updates
