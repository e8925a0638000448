"""A record of a step, and a run file, for the tests of metrics."""

from pathlib import Path

from shardwright.config import RunConfig, parse

RECORD = {
    "kind": "train",
    "step": 3,
    "loss": 2.5,
    "grad_norm": 0.5,
    "lr": 1e-3,
    "target_tokens": 100,
    "tokens_per_s": 12345.0,
    "tokens_per_s_per_device": 6172.5,
    "tflops_per_s_per_device": 0.5,
    "mfu": None,
    "memory_bytes": 2**30,
    "step_s": 0.2,
    "data_s": 0.001,
    "forward_backward_s": 0.15,
    "optimizer_s": 0.049,
}


def config(folder: Path, **metrics: object) -> RunConfig:
    return parse(
        {
            "out": str(folder),
            "steps": 9,
            "data": {"path": "x"},
            "batch": {"seq_len": 4, "global_batch": 1},
            "metrics": metrics,
        }
    )
