"""How many micro-batches and actions of a step a dry run takes. No torch."""

from shardwright.config import RunConfig
from shardwright.split.stages import step_schedule

_DIFFERENT = 3
"""Micro-batches of a step without a pipeline that can differ: the first, one between, and the last."""


def run_microbatches(config: RunConfig) -> int:
    """How many micro-batches of a step are run."""
    n = config.accumulation
    return n if config.layout.layout().pp > 1 else min(n, _DIFFERENT)


def n_actions(config: RunConfig, rank: int) -> int:
    """How many actions of the schedule a rank runs in the recorded step."""
    layout, n = config.layout.layout(), run_microbatches(config)
    if layout.pp == 1:
        return 2 * n
    schedule = step_schedule(config.model.spec(), layout, n, config.batch.seq_len)
    return len(schedule.ranks[layout.coordinates(rank)["pp"]])
