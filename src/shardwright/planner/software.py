"""The software of a planned run as text, such as `megatron-core,date=2025-10,cuda_graphs=none`.

The keys are columns of a table of measured runs, with the same meanings, valid values and defaults.
"""

import re
from typing import Any

from shardwright.cost.job import Job
from shardwright.cost.stack import Stack
from shardwright.planner.measured_run import PRECISIONS, software_problems, stack_of
from shardwright.planner.run_columns import MeasuredRun, columns
from shardwright.system.errors import InputError, nearest

KEYS = (
    *("date", "flash", "attention", "fused_loss", "fused_norms", "cuda_graphs", "blocking_launches", "gather_dtype"),
    *("bucket_parameters", "overlap_tp", "overlap_dp", "overlap_ep", "moe_dispatch", "grad_dtype", "optimizer_dtype"),
    *("master_dtype", "whole_gradients", "whole_logits", "tp_by_matrix", "logit_peak_bytes"),
)
"""The columns that describe software alone."""
NEWEST = "9999"
"""Date of software without a stated date: later than every default by date."""


def read_stack(text: str, job: Job) -> Stack:
    """Return the software that the text describes, on the job's accelerators; without `date`, the newest.

    Raises InputError for an unknown stack or key, for a value that is not valid, and for an attention kernel that the
    accelerator does not have.
    """
    name, *pairs = (part.strip() for part in text.split(","))
    values: dict[str, Any] = {key: column.empty for key, column in columns().items()}
    values |= {
        "accelerator": job.cluster.accelerator.name,
        "per_domain": job.cluster.node_size,
        "recompute": "none",
        "offload": "none",
    }
    values |= {"precision": {cost: table for table, cost in PRECISIONS.items()}[job.precision], "date": NEWEST}
    values |= {"experts": None if job.model.moe is None else job.model.moe.n_experts}
    problems = (
        [] if columns()["stack"].valid(name) else [f"stack {name!r} is not known; valid: {columns()['stack'].rule}"]
    )
    values["stack"] = name
    for pair in pairs:
        key, _, value = pair.partition("=")
        if key not in KEYS:
            problems.append(f"{key!r} is not a key of a stack; {nearest(key, KEYS)}")
            continue
        if not value or (key == "date" and not re.fullmatch("[0-9]{4}(-[0-9]{2})?", value)):
            problems.append(f"{key}={value!r}: valid: {'YYYY or YYYY-MM' if key == 'date' else columns()[key].rule}")
            continue
        try:
            values[key] = columns()[key].read(value)
        except ValueError as error:
            problems.append(f"{key}={value!r}: {error}")
    row, die = MeasuredRun(**values), job.cluster.accelerator.die
    problems += [] if problems else list(software_problems(row, die))
    if problems:
        raise InputError(*(f"--stack {text}: {problem}" for problem in problems))
    return stack_of(row, die)
