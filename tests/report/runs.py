"""Run folders for the tests of `report`, as `shardloom train` leaves them, without training."""

import json
from pathlib import Path
from typing import Any

from shardloom.config import parse, resolved_toml


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
