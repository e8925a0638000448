"""Run folders for the tests of `report`, as `shardwright train` leaves them, without training."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shardwright.config import parse, resolved_toml
from shardwright.runs.folder import timeline_path
from shardwright.schedule.actions import Action
from shardwright.schedule.build import build
from shardwright.schedule.simulate import Simulation, Times, simulate


def train_record(step: int, **changes: Any) -> dict[str, Any]:
    """A `train` record of a run at 1,000 tokens/s whose loss falls from 6."""
    return {
        "kind": "train",
        "step": step,
        "loss": 6.0 - 0.02 * step,
        "grad_norm": 0.5,
        "lr": 3e-4,
        "target_tokens": 64,
        "tokens_per_s": 1000.0,
        "tokens_per_s_per_device": 500.0,
        "tflops_per_s_per_device": 0.01,
        "mfu": None,
        "memory_bytes": 2**20,
        "step_s": 0.064,
        "data_s": 0.004,
        "forward_backward_s": 0.05,
        "optimizer_s": 0.01,
        **changes,
    }


def moe_record(step: int, **changes: Any) -> dict[str, Any]:
    """A `train` record of a model with two layers of experts, whose load evens out."""
    first, second = 1 + 5 / step, 1 + 10 / step
    told = {"load_max_over_mean": (first + second) / 2, "load_entropy": 0.9, "load_by_layer": [first, second]}
    return train_record(step, **told, **changes)


def started(step: int, layout: str = "2 ranks with ZeRO-3", keys: str = "dp_shard 2, zero 3") -> dict[str, Any]:
    """A `run` record of a start on another day for each step."""
    return {
        "kind": "run",
        "step": step,
        "layout": layout,
        "keys": keys,
        "lr_schedule": "cosine over 100 steps",
        "world_size": int(layout.split()[0]),
        "host": "node7",
        "device": "NVIDIA H200",
        "torch": "2.13.0",
        "shardwright": "0.1.0",
        "git_commit": "0123456789abcdef",
        "time": f"2026-11-{1 + step % 28:02d}T10:52:20+00:00",
    }


def evaluation(step: int, loss: float) -> dict[str, Any]:
    return {"kind": "evaluation", "step": step, "loss": loss}


def write_run(folder: Path, records: list[dict[str, Any]], *overrides: str) -> Path:
    """A run folder of 4 sequences of 16 tokens a step, 100 steps, 2 ranks, logged every 10."""
    folder.mkdir(parents=True, exist_ok=True)
    table = {
        "out": str(folder),
        "steps": 100,
        "data": {"path": "data"},
        "batch": {"seq_len": 16, "global_batch": 4},
        "layout": {"dp_shard": 2},
    }
    (folder / "run.toml").write_text(resolved_toml(parse(table, overrides)), encoding="utf-8")
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


def usual(folder: Path) -> Path:
    """Half of a run: five logged steps, two evaluations, two checkpoints and a half-written one."""
    train = [train_record(step) for step in range(10, 60, 10)]
    write_run(folder, [evaluation(0, 6.2), *train, evaluation(50, 5.1)])
    for name in ("step-00000050", "step-00000020", "step-00000060.partial"):
        (folder / "checkpoints" / name).mkdir(parents=True)
    return folder


PIPELINE = ("layout.dp_shard=1", "layout.pp=2")
"""Of a run folder: 2 stages of 2 layers, 4 microbatches a step, 1f1b."""
EPOCH_S = 1.7e9


def write_timeline(
    folder: Path, step: int, ranks: Sequence[Sequence[tuple[Action, float, float]]], zero_s: float = EPOCH_S
) -> None:
    """Add a step to the files of all ranks. `ranks`: of each, its actions with start and end, in seconds."""
    for rank, spans in enumerate(ranks):
        first = spans[0][1]
        actions = [[str(action), start - first, end - first] for action, start, end in spans]
        line = {"step": step, "rank": rank, "zero_s": zero_s + first, "actions": actions}
        path = timeline_path(folder, rank)
        path.parent.mkdir(exist_ok=True)
        with path.open("a") as file:
            file.write(json.dumps(line) + "\n")


def slow_messages(schedule: str = "1f1b") -> Simulation:
    """What 2 ranks do with 4 microbatches when a message takes half as long as F, a second."""
    return simulate(build(schedule, 2, 4), Times(forward=1.0, backward_input=1.0, weight=1.0, comm=0.5))


def usual_pipeline(folder: Path) -> Path:
    """Half of a run of a pipeline, with the actions of step 50, of which one in three seconds was spent on messages."""
    usual(folder)
    write_run(folder, [train_record(step) for step in range(10, 60, 10)], *PIPELINE)
    write_timeline(folder, 50, slow_messages().spans)
    return folder
