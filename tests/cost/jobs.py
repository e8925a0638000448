"""Jobs and layouts that the tests of this room price."""

from typing import Any

import numpy as np
from hypothesis import strategies as st

from shardwright.cost.hardware import cluster
from shardwright.cost.job import COLUMNS, Candidates, Job
from shardwright.layout.keys import KEYS
from shardwright.layout.layout import Layout
from shardwright.model.presets import resolve
from shardwright.model.spec import ModelSpec

AXES = ("dp_replicate", "dp_shard", "cp", "tp", "ep", "zero", "micro_batch", "recompute")


def job(model: str | ModelSpec = "llama-3.1-8b", on: str = "h100:64", **changes: Any) -> Job:
    """A job of 256 sequences of 4096 tokens."""
    spec = resolve(model) if isinstance(model, str) else model
    return Job(**{"model": spec, "cluster": cluster(on), "seq_len": 4096, "global_batch": 256} | changes)


def candidates(**values: Any) -> Candidates:
    """Layouts from numbers or lists of equal length; what is left out is 1, zero 0, recompute 0."""
    shared = {key: values.pop(key) for key in KEYS if key in values and key not in COLUMNS}
    if shared.get("zero_pp_gather") == "microbatch":
        shared["zero"] = 3
    n = max((len(value) for value in values.values() if isinstance(value, list)), default=1)
    arrays = {
        axis: np.broadcast_to(np.array(values.pop(axis, 0 if axis in ("zero", "recompute") else 1)), (n,)).astype(
            np.int64
        )
        for axis in AXES
    }
    sequence_parallel = np.broadcast_to(np.array(values.pop("sequence_parallel", arrays["tp"] > 1)), (n,))
    return Candidates(shared=Layout(**shared), **arrays, sequence_parallel=sequence_parallel, **values)


@st.composite
def layouts(draw: st.DrawFn, world: int = 64) -> Candidates:
    """One layout of llama-3.1-8b on `world` ranks, with 256 sequences a step."""
    pp = draw(st.sampled_from([1, 2, 4, 8]))
    schedules = ["1f1b", "afab", "interleaved-1f1b", "zb-h1", "zb-h2", "zb-v", "dualpipe-v"] if pp > 1 else ["1f1b"]
    schedule = draw(st.sampled_from(schedules))
    tp = draw(st.sampled_from([1, 2, 4, 8]))
    rest = world // pp // tp
    cp = draw(st.sampled_from([n for n in (1, 2, 4) if n <= rest]))
    zero = draw(st.integers(0, 3))
    data = rest // cp
    return candidates(
        pp=pp,
        pp_schedule=schedule,
        virtual_stages=2 if schedule == "interleaved-1f1b" else 1,
        dp_replicate=1 if zero else data,
        dp_shard=data if zero else 1,
        cp=cp,
        tp=tp,
        zero=zero,
        micro_batch=draw(st.sampled_from([1, 2])),
        recompute=draw(st.sampled_from([0, 2])),
    )
