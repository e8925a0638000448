"""An extension of the runs of the GPU plan: writes the peaks of the allocator, and on request a profile.

`GPU_PROBE` names a file that has the peaks after each step, of the steps so far; RANK in its name is the rank.
`GPU_PROFILE` names one for a table of the kernels that took longest in the sixth step, and `GPU_TRACE` one for the
trace of that step. With `GPU_SAVES_NOTHING` the run writes no checkpoint: one of a large model takes longer than its
steps.
"""

import json
import os
from pathlib import Path
from typing import Any

import torch

from shardwright.training.checkpoint.store import CheckpointStore
from shardwright.training.saving import SaveCheckpoints
from shardwright.training.step import Trainer

PROFILED_STEP = 5

_step = Trainer.step


def probed_step(self: Trainer, batch: Any, step: int, rate: float) -> Any:
    """A step, after which the peaks of the allocator are written; nothing here waits for the device but a profile."""
    if step == PROFILED_STEP and "GPU_PROFILE" in os.environ:
        result = profiled(lambda: _step(self, batch, step, rate), os.environ["GPU_PROFILE"])
    else:
        result = _step(self, batch, step, rate)
    if "GPU_PROBE" in os.environ and self.device.type == "cuda":
        peaks = {
            "allocated_bytes": torch.cuda.max_memory_allocated(self.device),
            "reserved_bytes": torch.cuda.max_memory_reserved(self.device),
            "retries": torch.cuda.memory_stats(self.device)["num_alloc_retries"],
        }
        path = os.environ["GPU_PROBE"].replace("RANK", os.environ.get("RANK", "0"))
        Path(path).write_text(json.dumps(peaks))
    return result


def profiled(work: Any, path: str) -> Any:
    """The result of `work`, whose kernels are written to files."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        result = work()
        torch.cuda.synchronize()
    table = profile.key_averages().table(sort_by="self_device_time_total", row_limit=40, max_name_column_width=80)
    Path(path).write_text(table)
    if "GPU_TRACE" in os.environ:
        profile.export_chrome_trace(os.environ["GPU_TRACE"])
    return result


Trainer.step = probed_step  # type: ignore[method-assign]
if "GPU_SAVES_NOTHING" in os.environ:
    SaveCheckpoints.save = lambda *_: None  # type: ignore[method-assign]
    CheckpointStore.require_space = lambda *_: None  # type: ignore[method-assign]
