"""Proves of random layouts what has to hold for all of them: longer sequences need no less memory. Stages are fixed,
since the split of the layers depends on the length."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from shardwright.cost import memory
from shardwright.cost.hardware import cluster
from shardwright.cost.job import Candidates, Job
from shardwright.errors import LayoutError
from shardwright.layout import Layout
from shardwright.model.presets import resolve
from shardwright.schedule.registry import find, names
from shardwright.split.rules import problems
from shardwright.split.stages import schedule_problems, stage_layers

MICROBATCHES = 8
SHORTEST, LONGEST = 2048, 65536
SCHEDULES = [name for name in names() if find(name).priced]
LAYOUTS = st.fixed_dictionaries(
    {
        "tp": st.sampled_from([1, 2, 4, 8]),
        "pp": st.sampled_from([1, 2, 4]),
        "cp": st.sampled_from([1, 2, 4]),
        "dp_shard": st.sampled_from([1, 2, 8]),
        "zero": st.sampled_from([0, 1, 2, 3]),
        "ep": st.sampled_from([1, 4]),
        "pp_schedule": st.sampled_from(SCHEDULES),
        "cp_method": st.sampled_from(["zigzag", "ring", "allgather", "ulysses"]),
        "recompute": st.sampled_from(["none", "selective", "full"]),
        "loss_chunk_tokens": st.sampled_from([0, 1024]),
        "sequence_parallel": st.booleans(),
    }
)
MODELS = st.sampled_from(["llama-3.1-8b", "gpt-7.5b", "mixtral-8x7b", "qwen3-30b-a3b"])
MANY = settings(max_examples=500, deadline=None)


def drawn(model: str, keys: dict[str, Any]) -> Candidates:
    """A layout with its stages fixed; a draw that no layout or model allows is left out."""
    spec = resolve(model)
    one = (
        {"pp_schedule": "1f1b"} if keys["pp"] == 1 else {"virtual_stages": 2} if "inter" in keys["pp_schedule"] else {}
    )
    one |= {"cp_method": "zigzag"} if keys["cp"] == 1 else {}
    one |= {"sequence_parallel": True} if keys["tp"] == 1 else {}
    try:
        layout = Layout(**keys | one)
        assume(not [*problems(spec, layout, SHORTEST), *schedule_problems(layout, MICROBATCHES)])
        if layout.pp > 1:
            layout = layout.changed(stage_layers=tuple(map(len, stage_layers(spec, layout, SHORTEST))))
    except LayoutError:
        assume(False)
    return Candidates.of(layout, 1)


def job_of(model: str, candidates: Candidates, seq_len: int) -> Job:
    size = int(candidates.world[0])
    spec = replace(resolve(model), max_seq_len=LONGEST)
    batch = MICROBATCHES * int(candidates.data_ranks[0])
    return Job(model=spec, cluster=cluster(f"h100:{size}/{min(size, 8)}"), seq_len=seq_len, global_batch=batch)


@pytest.mark.prove
@MANY
@given(MODELS, LAYOUTS, st.sampled_from([2048, 4096, 8192, 16384, 32768]))
def test_memory_does_not_fall_as_sequences_grow(model: str, keys: dict[str, Any], seq_len: int):
    candidates = drawn(model, keys)
    short, long = (memory.of(job_of(model, candidates, each * seq_len), candidates).rank_bytes for each in (1, 2))
    assert (long >= short).all()
