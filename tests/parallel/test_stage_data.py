"""Proves what data parallelism of pipeline stages gathers, reduces and holds, against the table in
parallel/data.py. That gradients are right: tests/training/test_pipeline.py.

P, G are the bytes of a stage's parameters and gradients, A its microbatches in a step, K its groups of parameters, of
which L are layers.
"""

from collections import Counter
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from shardwright.layout.layout import Layout
from shardwright.model.modules import end_rows
from shardwright.parallel.data import Sharded
from shardwright.parallel.observer import Observer, Running
from shardwright.parallel.pipeline.runner import Pipeline
from shardwright.schedule.actions import Action
from shardwright.split.stages import stage_layers
from tests.distributed import run_ranks
from tests.marks import prove, rest_prove
from tests.traffic import Traffic
from tests.training.worlds import RATE, SEQ_LEN, SPEC, build, local_batch

# Every dim that FSDP cuts is even, so that nothing is padded.
EVEN = replace(SPEC, n_layers=4, d_model=32, n_heads=4, n_kv_heads=2, d_ffn=48, vocab_size=32)
A, ELEMENT = 6, 8
ENGINES = {
    "zero 0": {"dp_replicate": 2},
    "zero 1": {"dp_shard": 2, "zero": 1},
    "zero 2": {"dp_shard": 2, "zero": 2},
    "zero 3, step": {"dp_shard": 2, "zero": 3},
    "zero 3, microbatch": {"dp_shard": 2, "zero": 3, "zero_pp_gather": "microbatch"},
}


def collectives_of_steps(layout: Layout, accumulation: int) -> list[dict[str, tuple[int, int]]]:
    """Calls and bytes of the collectives of the first two steps."""
    trainer = build(layout, torch.float64, EVEN)
    found = []
    for step in range(2):
        batch = local_batch(step, layout.data_rank(dist.get_rank()), layout.data_ranks, accumulation)
        with Traffic() as traffic:
            trainer.step(batch, step, RATE)
        kinds = traffic.calls.keys() - {"send", "recv", "small"}
        found.append({kind: (traffic.calls[kind], traffic.bytes[kind]) for kind in kinds})
    return found


def expected(layout: Layout, pp_rank: int) -> dict[str, tuple[int, int]]:
    """Calls and bytes of one step by the table, over the stages of a rank."""
    total: Counter[str] = Counter()
    for stage, layers in enumerate(stage_layers(EVEN, layout, SEQ_LEN)):
        if layout.ways[0][stage] != pp_rank:
            continue
        first, *last = (row.numel for row in end_rows(EVEN))
        ends = first * (stage == 0) + sum(last) * (stage == layout.n_stages - 1)
        blocks = EVEN.n_parameters - first - sum(last)
        each = {"layers": blocks * len(layers) // EVEN.n_layers * ELEMENT, "ends": ends * ELEMENT}
        groups = {"layers": len(layers), "ends": int(ends > 0)}
        for part in each:
            gathers, reductions = {0: (0, 0), 1: (1, 1), 2: (1, A), 3: (1, 1)}[layout.zero]
            if layout.zero == 3 and layout.zero_pp_gather == "microbatch":
                gathers, reductions = {"layers": 2 * A, "ends": A}[part], A
            total["allgather_base"] += gathers * groups[part]
            total["allgather_base bytes"] += gathers * each[part]
            total["reduce_scatter_base"] += reductions * groups[part]
            total["reduce_scatter_base bytes"] += reductions * each[part]
            total["allreduce bytes"] += each[part] if layout.zero == 0 else 0
        total["allreduce"] += layout.zero == 0
    kinds = ("allgather_base", "reduce_scatter_base", "allreduce")
    return {kind: (total[kind], total[f"{kind} bytes"]) for kind in kinds if total[kind]}


@pytest.mark.parametrize("schedule", rest_prove(["1f1b", "interleaved-1f1b"], "interleaved-1f1b"))
@pytest.mark.parametrize("engine", rest_prove(ENGINES, "zero 3, microbatch"))
def test_a_step_gathers_and_reduces_what_the_table_says_for_each_stage(engine: str, schedule: str):
    layout = Layout(pp=2, pp_schedule=schedule, **ENGINES[engine])
    for rank, (first, second) in enumerate(run_ranks(collectives_of_steps, 4, layout, A)):
        assert first == second == expected(layout, layout.coordinates(rank)["pp"])


@prove
def test_where_weights_come_later_norms_may_be_reduced_with_those_of_another_microbatch():
    layout = Layout(pp=2, pp_schedule="zb-h1", dp_shard=2, zero=2)
    first, last = (expected(layout, pp_rank) for pp_rank in (0, 1))
    found = run_ranks(collectives_of_steps, 4, layout, A)
    assert found[0][0] == first  # whose W follow their I
    calls, sent = found[2][0]["reduce_scatter_base"]
    assert calls == last["reduce_scatter_base"][0]
    # The last rank runs one W behind, so that one microbatch of A comes without gradients of its 2 x 2 + 1 norms.
    assert last["reduce_scatter_base"][1] - sent == 5 * EVEN.d_model * ELEMENT


@prove
def test_replicas_of_shards_are_summed_once_a_step():
    layout = Layout(pp=2, pp_schedule="zb-h1", dp_replicate=2, dp_shard=2, zero=2)
    single = replace(layout, dp_replicate=1)
    for rank, (found, _) in enumerate(run_ranks(collectives_of_steps, 8, layout, A)):
        table = expected(single, layout.coordinates(rank)["pp"])
        calls, sent = table["allgather_base"]
        assert found == table | {"allreduce": (calls, sent // 2)}


class Gathered(Observer):
    """How many layers of this rank are whole after each action."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.stages, self.counts = pipeline.stages, list[int]()

    def end(self, running: Running) -> None:
        if isinstance(running, Action):
            self.counts.append(self.look())

    def look(self) -> int:
        found = 0
        for stage in self.stages.values():
            assert isinstance(stage.engine, Sharded)
            for group in stage.engine.groups[1:]:
                assert isinstance(group, torch.nn.Module)
                found += not any(isinstance(parameter, DTensor) for parameter in group.parameters())
        return found


def gathered_layers(layout: Layout) -> tuple[list[int], int]:
    """How many layers of a rank are whole after each action of a step, and after the step."""
    trainer = build(layout, torch.float64, EVEN)
    runner = trainer.model.runner
    assert isinstance(runner, Pipeline)
    gathered = Gathered(runner)
    trainer.model.observers.add(gathered)
    trainer.step(local_batch(0, layout.data_rank(dist.get_rank()), 2, A), 0, RATE)
    return gathered.counts, gathered.look()


@pytest.mark.parametrize(
    ("engine", "between"),
    rest_prove(
        [("zero 1", 2), ("zero 2", 2), ("zero 3, step", 2), ("zero 3, microbatch", 0)],
        ("zero 3, step", 2),
        ("zero 3, microbatch", 0),
    ),
)
def test_layers_are_whole_until_the_last_backward_pass_or_never_between_two(engine: str, between: int):
    layout = Layout(pp=2, pp_schedule="zb-h1", **ENGINES[engine])
    for counts, after in run_ranks(gathered_layers, 4, layout):
        assert counts == [between] * (len(counts) - 1) + [0]
        assert len(counts) == 3 * A
        assert after == 0
