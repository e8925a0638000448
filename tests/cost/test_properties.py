"""Proves of random layouts what has to hold for all of them: longer sequences need no less memory, and faster chips
take no longer. Stages are fixed, since the split of the layers depends on the length."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from shardwright.cost import memory
from shardwright.cost.hardware import Cluster, cluster
from shardwright.cost.job import Candidates, Job
from shardwright.cost.stack import STACKS
from shardwright.cost.step import step_time
from shardwright.layout.layout import Layout
from shardwright.model.presets import resolve
from shardwright.schedule.registry import find, names
from shardwright.split.rules import problems
from shardwright.split.stages import schedule_problems, stage_layers
from shardwright.system.errors import LayoutError
from tests.mutation import Mutation, mutated

MICROBATCHES = 8
SHORTEST, LONGEST = 2048, 65536
SCHEDULES = [name for name in names() if not find(name).searched]
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
MANY = settings(max_examples=1000, deadline=None)


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
    return Candidates.from_layout(layout, 1)


def job_of(model: str, candidates: Candidates, seq_len: int, microbatches: int = MICROBATCHES, **more: Any) -> Job:
    size = int(candidates.world[0])
    spec = replace(resolve(model), max_seq_len=LONGEST)
    batch = microbatches * int(candidates.data_ranks[0])
    where = cluster(f"h100:{size}/{min(size, 8)}")
    return Job(model=spec, cluster=where, seq_len=seq_len, global_batch=batch, **more)


@pytest.mark.prove
@MANY
@given(MODELS, LAYOUTS, st.sampled_from([2048, 4096, 8192, 16384, 32768]))
def test_memory_does_not_fall_as_sequences_grow(model: str, keys: dict[str, Any], seq_len: int):
    candidates = drawn(model, keys)
    short, long = (
        memory.estimate_memory(job_of(model, candidates, each * seq_len), candidates).rank_bytes for each in (1, 2)
    )
    assert (long >= short).all()


FASTER = st.fixed_dictionaries(
    {name: st.sampled_from([1.0, 1.0, 1.0, 1.01, 1.3, 2.0, 10.0]) for name in ("peak", "memory", "inside", "network")}
)


def faster(chip: Cluster, times: dict[str, float]) -> Cluster:
    """A cluster with higher rates, each times its factor."""
    accelerator, inside = chip.accelerator, chip.inside
    peaks = {precision: times["peak"] * peak for precision, peak in accelerator.flops_per_s.items()}
    memory = times["memory"] * accelerator.memory_bytes_per_s
    inside = replace(
        inside,
        bytes_per_s=times["inside"] * inside.bytes_per_s,
        switch_bytes_per_s=times["inside"] * inside.switch_bytes_per_s,
    )
    accelerator = replace(accelerator, flops_per_s=peaks, memory_bytes_per_s=memory)
    return replace(chip.with_network(times["network"] * chip.node_bytes_per_s), accelerator=accelerator, inside=inside)


@pytest.mark.prove
@MANY
@given(
    MODELS,
    LAYOUTS,
    st.sampled_from(sorted(STACKS)),
    st.sampled_from(["bf16", "fp8"]),
    st.sampled_from([8, 64, 1024]),
    st.sampled_from([1.0, 1.0, 0.1, 0.01]),
    FASTER,
)
def test_a_faster_chip_is_never_slower(
    model: str,
    keys: dict[str, Any],
    stack: str,
    precision: str,
    microbatches: int,
    slow: float,
    times: dict[str, float],
):
    """Also with slow links, where messages are longer than what they overlap with, and in steps so long that not every
    micro-batch is simulated."""
    candidates = drawn(model, keys)
    job = job_of(model, candidates, 4096, microbatches, stack=STACKS[stack], precision=precision)
    job = replace(job, cluster=faster(job.cluster, {"peak": 1.0, "memory": 1.0, "inside": slow, "network": slow}))
    before, after = (
        float(step_time(each, candidates).total_s[0])
        for each in (job, replace(job, cluster=faster(job.cluster, times)))
    )
    assert after <= before * (1 + 1e-9)


PLAIN = {"peak": 1.0, "memory": 1.0, "inside": 1.0, "network": 1.0}
SLOW_LINKS = PLAIN | {"inside": 0.1, "network": 0.1}
OVER_TP = "shardwright.cost.messages:_OverTp._hidden_by"
BUGS: dict[str, tuple[list[Mutation], str, str, int, dict[str, Any], dict[str, float]]] = {
    "each message over tp is hidden by a pass of its own, also by weight gradients that come later": (
        [
            Mutation(OVER_TP, "self.candidates.kind.splits_backward", "False"),
            Mutation(OVER_TP, "overlaps[beside_i] = 'I'", "overlaps.update({(each,): 'I' for each in beside_i})"),
        ],
        "megatron-core",
        "llama-3.1-8b",
        128,
        {"tp": 8, "pp": 2, "pp_schedule": "zb-h1", "dp_shard": 2, "zero": 1},
        {"peak": 2.0},
    ),
    "what is longer than a pass is added to the pipeline of all ranks": (
        [
            Mutation(
                "shardwright.cost.data_parallel:_exposed_s",
                "f.messages_beside_passes - f.slack",
                "f.messages_beside_passes - 0 * f.slack",
            )
        ],
        "shardwright",
        "qwen3-30b-a3b",
        16,
        {"pp": 4, "pp_schedule": "interleaved-1f1b", "virtual_stages": 2, "dp_shard": 2, "zero": 1},
        {"peak": 2.0},
    ),
}


@pytest.mark.parametrize("name", BUGS)
def test_a_faster_chip_is_slower_where_messages_overlap_with_what_is_not_there(name: str):
    bugs, stack, model, microbatches, keys, times = BUGS[name]
    candidates = Candidates.from_layout(Layout(**keys), 1)
    job = job_of(model, candidates, 4096, microbatches, stack=STACKS[stack])
    slow = replace(job, cluster=faster(job.cluster, SLOW_LINKS))
    fast = replace(slow, cluster=faster(slow.cluster, PLAIN | times))

    def gain() -> float:
        return float(step_time(slow, candidates).total_s[0] / step_time(fast, candidates).total_s[0] - 1)

    assert gain() >= -1e-9
    with mutated(*bugs):
        assert gain() < -1e-4
