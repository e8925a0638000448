"""Steps of the training program on a small model, in layouts of every kind, to fit how much slower work and messages
are within a step, where ranks also compute, than alone."""

import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from shardwright.config import parse
from shardwright.cost.hardware import cluster
from shardwright.cost.hardware_file import WORK
from shardwright.cost.job import Job
from shardwright.cost.machine import on_machine
from shardwright.cost.pools import small_share
from shardwright.cost.speed import CONTEXT, DATA, TENSOR
from shardwright.cost.step import Estimate, estimate
from shardwright.measuring.clock import Kind
from shardwright.measuring.fit import not_negative
from shardwright.measuring.overheads import RunRanks, seconds_of
from shardwright.measuring.points import WholeStep
from shardwright.measuring.steps import run_file, run_steps

MODEL = {
    "preset": "debug", "n_layers": 4, "d_model": 320, "d_ffn": 960, "n_heads": 8, "n_kv_heads": 8, "head_dim": 40,
    "vocab_size": 2048, "max_seq_len": 192,
}  # fmt: skip
SEQ_LEN, SEQUENCES = 192, 4
"""Sequence length, and sequences of a step for each two ranks."""
Case = tuple[dict[str, Any], int]
"""A layout, as in a run file, and the sequences of a micro-batch."""
ALONE: tuple[Case, ...] = (({}, 1), ({}, 2))
OF_TWO: tuple[Case, ...] = (
    ({"pp": 2, "pp_schedule": "1f1b"}, 1),
    ({"dp_replicate": 2}, 2),
    ({"dp_shard": 2, "zero": 1}, 2),
    ({"dp_shard": 2, "zero": 3}, 1),
    ({"tp": 2}, 2),
    ({"tp": 2, "sequence_parallel": False}, 2),
    ({"cp": 2, "cp_method": "allgather"}, 2),
    ({"cp": 2, "cp_method": "ulysses"}, 2),
)
"""The measured layouts of one rank and of two ranks, the latter with replicas on all available ranks."""
STEPS, ROUNDS = 2, 3
PARTS = {DATA: "data_parallel", TENSOR: "tensor_parallel", CONTEXT: "context_parallel"}
"""Messages whose time is fitted: kind of work -> key of `cost.hardware_file.InStepFactors`."""
FIXED = ("launch", "stragglers")
"""Kinds that whole steps do not change."""


def cases_of(ranks: int) -> Iterator[Case]:
    """Yield the cases measured on `ranks` ranks."""
    for layout, micro_batch in ALONE if ranks == 1 else OF_TWO if ranks % 2 == 0 else ():
        rest = ranks // 2 if layout else 1
        more = {"dp_replicate": rest * layout.get("dp_replicate", 1)} if rest > 1 else {}
        yield layout | more, micro_batch


def table_of(layout: dict[str, Any], ranks: int, micro_batch: int) -> dict[str, Any]:
    """Return the run file of a step."""
    batch = {"seq_len": SEQ_LEN, "global_batch": SEQUENCES * max(1, ranks // 2), "micro_batch": micro_batch}
    return run_file(MODEL, batch, layout, "fp32")


def one_round(run_ranks: RunRanks, clock: Kind, threads_of: Mapping[int, int]) -> list[WholeStep]:
    """Measure a step of each layout for each number of ranks, with the number of threads from `threads_of`; each layout
    is run in its own world.

    The caller spreads rounds over all its measurements, and the layouts of all numbers of ranks alternate. Otherwise
    kernels and steps, or two layouts, could be measured at different machine speeds, when other programs or other
    guests of a virtual machine start and stop.
    """
    steps = []
    for ranks, threads in threads_of.items():
        for layout, micro_batch in cases_of(ranks):
            per_rank = run_ranks(run_steps, ranks, table_of(layout, ranks, micro_batch), STEPS, n_threads=threads)
            seconds = seconds_of(per_rank, clock) / (threads if clock == "cpu" else 1)
            steps.append(WholeStep(ranks, layout, micro_batch, seconds, max(rank.peak_bytes for rank in per_rank)))
    return steps


def medians(rounds: Sequence[Sequence[WholeStep]]) -> list[WholeStep]:
    """Return the steps of a round with the medians of all rounds."""
    return [
        replace(
            same[0],
            seconds=statistics.median(step.seconds for step in same),
            peak_bytes=int(statistics.median(step.peak_bytes for step in same)),
        )
        for same in zip(*rounds, strict=True)
    ]


def in_step(text: str, name: str, steps: Sequence[WholeStep], clock: str) -> dict[str, float]:
    """Fit, by key of `cost.hardware_file.InStepFactors`, how much longer work and messages take in these steps than
    predicted, by least squares of relative errors. `text`: a hardware file with the accelerator `name`. A kind without
    information in any step is omitted."""
    parts = [_predicted(text, name, step, clock) for step in steps]
    keys = [WORK, *PARTS.values()]
    columns = np.array([[part.get(key, 0.0) for key in keys] for part in parts])
    seconds = np.array([step.seconds for step in steps])
    rest = np.array([part["rest"] for part in parts])
    informative = (columns > 0).any(0)
    factors = not_negative(columns[:, informative] / seconds[:, None], 1 - rest / seconds)
    return {key: float(factor) for key, factor in zip(np.array(keys)[informative], factors, strict=True) if factor > 0}


def holes(text: str, name: str, steps: Sequence[WholeStep]) -> list[float]:
    """Fit the bytes that the C library keeps for each byte of small tensors, by ZeRO stage, by least squares of
    relative errors of the peak memory of these steps, beyond the process and the predicted tensors.

    `text`: a hardware file with accelerator `name`. Stage 2 is equal to stage 1, and a stage without a step to stage 0:
    the buffers of FSDP2 fragment the memory.
    """
    columns: dict[int, list[float]] = {}
    rest: dict[int, list[float]] = {}
    for step in steps:
        estimate = _estimate(text, name, step)
        memory, share = estimate.memory, small_share(estimate.job, estimate.candidates)[0]
        tensors = float((memory.rank_bytes - memory.kinds["workspace"]).max())
        stage = int(estimate.candidates.zero[0])
        columns.setdefault(stage, []).append(tensors * share / step.peak_bytes)
        rest.setdefault(stage, []).append(1 - float(memory.peak_bytes[0]) / step.peak_bytes)
    kept = {
        stage: float(not_negative(np.array(those)[:, None], np.array(rest[stage]))[0])
        for stage, those in columns.items()
    }
    return [kept.get(stage, kept[0]) for stage in (0, 1, 1, 3)]


def _predicted(text: str, name: str, step: WholeStep, clock: str) -> dict[str, float]:
    """Return the seconds of a step by key of `InStepFactors`, with "rest" for kinds that are not fitted. A rank that
    waits for other stages takes no CPU-seconds."""
    predicted: dict[str, float] = {"rest": 0.0}
    for kind, seconds in _estimate(text, name, step).parts_s.items():
        key = PARTS.get(kind, "rest" if kind in FIXED else WORK)
        if (kind, clock) != ("pipeline", "cpu"):
            predicted[key] = predicted.get(key, 0.0) + seconds
    return predicted


def _estimate(text: str, name: str, step: WholeStep) -> Estimate:
    config = parse(table_of(step.layout, step.ranks, step.micro_batch))
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
        file.write(text)
        file.flush()
        machine = cluster(f"{name}:{step.ranks}/{step.ranks}", Path(file.name))
    job = Job(
        model=config.spec(),
        cluster=machine,
        seq_len=SEQ_LEN,
        global_batch=config.batch.global_batch,
        precision="fp32",
    )
    return estimate(on_machine(job), config.layout.layout(), step.micro_batch)
