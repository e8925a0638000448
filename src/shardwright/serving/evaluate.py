"""Predicted against measured, for published measurements of serving."""
from pathlib import Path

import numpy as np

from shardwright.serving.measured import Case
from shardwright.serving.memory import largest_batch
from shardwright.serving.setting import Serving, Settings

MEASUREMENTS = Path(__file__).with_name("published") / "inference_runs.csv"


def full_batch(case: Case, serving: Serving, settings: Settings) -> float:
    """Requests in a batch at maximum load: as many as fit, at most what the engine takes at once."""
    fits = largest_batch(serving, settings, case.input_len + case.output_len, case.engine.max_tokens)
    return max(1.0, min(float(fits[0]), case.requests or case.engine.max_batch, case.engine.max_batch * case.degrees.dp))
