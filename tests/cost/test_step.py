"""A step's time: never under what physics allows, parts that add up, bounds that hold, and monotone in the hardware."""

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.cost.blocks import blocks
from shardwright.cost.calibration import CALIBRATED
from shardwright.cost.data_parallel import OverlappedPasses
from shardwright.cost.flops import executed_flops, model_flops
from shardwright.cost.hardware import Cluster
from shardwright.cost.idle import MOST_SIMULATED, StageTimes, busy, ends, makespans
from shardwright.cost.job import FULL, SELECTIVE, Candidates, Job
from shardwright.cost.layer import layer
from shardwright.cost.matmuls import layer_matmuls
from shardwright.cost.pipeline import stages
from shardwright.cost.rank_parameters import rank_parameters
from shardwright.cost.speed import MATMULS, Speed
from shardwright.cost.stack import STACKS
from shardwright.cost.step import data_parallel, step_time
from shardwright.model.presets import resolve
from shardwright.planner.software import read_stack
from shardwright.schedule.build import build
from shardwright.schedule.simulate import Times, simulate
from tests.cost.jobs import candidates, job, layouts

MODELS = ("llama-3.1-8b", "mixtral-8x7b", "deepseek-v3")


def seconds(of: Candidates, the_job: Job | None = None, *, simulated: bool = True) -> float:
    return float(step_time(the_job or job(), of, simulated=simulated).total_s[0])


def test_one_accelerator_takes_its_flops_over_what_it_reaches():
    alone = job(on="h100:1/1", global_batch=8)
    found = step_time(alone, candidates())
    flops = float(model_flops(alone).causal) * alone.tokens
    reached = flops / float(found.total_s[0])
    assert 0.3e15 < reached < 0.8e15  # What the field gets from an H100, whose peak is 0.989e15.
    assert float(found.parts["data parallel"][0]) == float(found.parts["tensor parallel"][0]) == 0


@given(layouts())
@settings(max_examples=60, deadline=None)
def test_no_step_is_faster_than_its_flops_at_peak(of: Candidates):
    the_job = job()
    flops = float(executed_flops(the_job, of).causal[0]) * the_job.tokens
    peak = 64 * the_job.cluster.accelerator.flops_per_s["bf16"]
    assert seconds(of) > flops / peak


@given(layouts(), st.sampled_from(sorted(STACKS)))
@settings(max_examples=40, deadline=None)
def test_parts_add_up_and_none_is_negative(of: Candidates, stack: str):
    found = step_time(job(stack=STACKS[stack]), of)
    assert float(found.total_s[0]) == pytest.approx(sum(float(part[0]) for part in found.parts.values()))
    assert all(float(part[0]) >= -1e-12 for part in found.parts.values())


@given(layouts(), st.sampled_from(["megatron", "shardwright"]), st.sampled_from(MODELS))
@settings(max_examples=80, deadline=None)
def test_the_bound_is_never_above_the_simulated_step(of: Candidates, stack: str, model: str):
    the_job = job(model, stack=STACKS[stack])
    assert seconds(of, the_job, simulated=False) <= seconds(of, the_job) * (1 + 1e-9)


@given(layouts(), st.sampled_from(["network", "memory", "inside", "peak"]), st.sampled_from(MODELS))
@settings(max_examples=120, deadline=None)
def test_twice_the_bandwidth_or_peak_never_slows(of: Candidates, what: str, model: str):
    slow = job(model)
    assert seconds(of, replace(slow, cluster=_doubled(slow.cluster, what))) <= seconds(of, slow) * (1 + 1e-9)


def _doubled(cluster: Cluster, what: str) -> Cluster:
    chip = cluster.accelerator
    if what == "network":
        return cluster.with_network(2 * cluster.node_bytes_per_s)
    if what == "inside":
        inside = cluster.inside
        return replace(
            cluster,
            inside=replace(
                inside, bytes_per_s=2 * inside.bytes_per_s, switch_bytes_per_s=2 * inside.switch_bytes_per_s
            ),
        )
    if what == "memory":
        return replace(cluster, accelerator=replace(chip, memory_bytes_per_s=2 * chip.memory_bytes_per_s))
    twice = {precision: 2 * peak for precision, peak in chip.flops_per_s.items()}
    return replace(cluster, accelerator=replace(chip, flops_per_s=twice))


@pytest.mark.parametrize("pipeline", [{}, {"pp": 4}, {"pp": 4, "pp_schedule": "interleaved-1f1b", "virtual_stages": 2}])
@pytest.mark.parametrize("model", ["llama-3.1-8b", "qwen3-30b-a3b"])
def test_many_layouts_at_once_cost_what_each_costs_alone(model: str, pipeline: dict[str, int]):
    data = 64 // pipeline.get("pp", 1)
    tp = [1, 2, 4, 8]
    shard = [data // n for n in tp]
    together = candidates(**pipeline, tp=tp, dp_shard=shard, zero=[1, 2, 3, 1], recompute=[0, 2, 0, 1])
    the_job = job(model)
    found = step_time(the_job, together).total_s
    for at in range(4):
        alone = candidates(**pipeline, tp=tp[at], dp_shard=shard[at], zero=[1, 2, 3, 1][at], recompute=[0, 2, 0, 1][at])
        assert seconds(alone, the_job) == pytest.approx(found[at], rel=1e-12)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_each_part_of_a_backward_pass_takes_at_least_its_launches(schedule: str):
    """Of a layer that takes next to no time, 0.5 ms of launches forward and 1.7 times as much backward, or half of that
    in each part of a split pass; a part with more work does not pay for the launches of the other."""
    stack = STACKS["shardwright"]
    stack = replace(stack, speed=replace(stack.speed, launch_s=0.5e-3, launch_backward=1.7))
    small = job("debug", seq_len=256, global_batch=8, stack=stack)
    (block,) = blocks(small.model)
    of = candidates(pp=2, pp_schedule=schedule)
    forward, backward, weight = (float(seconds[0]) for seconds in layer(small, of, block).totals)
    assert forward == pytest.approx(0.5e-3)
    if schedule == "zb-h1":
        assert backward == pytest.approx(0.425e-3)
        assert weight == pytest.approx(0.425e-3)
    else:
        assert backward + weight == pytest.approx(0.85e-3)
    large = job()
    (block,) = blocks(large.model)
    whole, split = (
        sum(float(seconds[0]) for seconds in layer(large, candidates(pp=2, pp_schedule=each), block).totals[1:])
        for each in ("1f1b", "zb-h1")
    )
    assert split == pytest.approx(whole)


def test_full_recomputation_costs_between_a_fifth_and_a_half():
    plain, again = (seconds(candidates(dp_shard=64, zero=1, recompute=recompute)) for recompute in (0, 2))
    assert 1.2 < again / plain < 1.5


def test_tp_over_nodes_is_slower_than_in_one():
    inside = candidates(tp=8, dp_shard=8, zero=1)
    over = candidates(tp=16, dp_shard=4, zero=1)
    assert seconds(over) > 1.2 * seconds(inside)


def test_more_microbatches_shrink_the_share_of_the_pipeline():
    shares = []
    for total in (64, 256, 1024):
        found = step_time(job(global_batch=total), candidates(pp=8, dp_shard=8, zero=1))
        shares.append(float(found.parts["pipeline"][0] / found.total_s[0]))
    assert shares[0] > shares[1] > shares[2] > 0


def test_the_bubble_of_a_pipeline_is_that_of_the_formula():
    # Stages of equal work and no messages, so that the schedule alone makes ranks wait: (p - 1) / (m + p - 1).
    of = candidates(pp=4)
    one = np.ones((1, 4))
    times = StageTimes(one, one, one, np.zeros(1))
    for m in (4, 8, 64):
        work = float(busy(of, times, np.array([m])).max())
        span = float(makespans(stages(job(), of).built_from, times, np.array([m]))[0])
        assert (span - work) / span == pytest.approx(3 / (m + 3))


@pytest.mark.parametrize("message", [0.01, 0.5])
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved-1f1b", "zb-h1", "zb-h2", "zb-v", "dualpipe", "dualpipe-v"])
def test_a_long_step_is_a_shorter_one_with_more_rounds_in_the_middle(schedule: str, message: float):
    virtual = 2 if schedule == "interleaved-1f1b" else 1
    of = candidates(pp=4, pp_schedule=schedule, virtual_stages=virtual)
    n_stages, m = of.shared.n_stages, 2000
    assert m * n_stages > 3 * MOST_SIMULATED
    rng = np.random.default_rng(0)
    f, i, w = (rng.uniform(0.5, 1.5, n_stages) for _ in range(3))
    times, count = StageTimes(f[None], i[None], w[None], np.array([message])), np.array([m])
    drawn = makespans(stages(job(), of).built_from, times, count)[0]
    full = simulate(build(schedule, 4, m, virtual), Times(tuple(f), tuple(i), tuple(w), message)).makespan
    assert drawn == pytest.approx(full, rel=1e-9)
    assert ends(of, times, busy(of, times, count)).max() <= full * (1 + 1e-9)


def test_a_long_step_of_a_searched_schedule_is_a_shorter_one_with_work_of_the_busiest_rank():
    of = candidates(pp=4, pp_schedule="auto")
    searched = stages(job(), of).built_from
    assert searched.times is not None
    each = [np.array([getattr(searched.times, name)]) for name in ("forward", "backward_input", "weight")]
    times = StageTimes(*each, np.zeros(1))
    for m, most in ((64, 1), (1000, 1.001)):
        assert (m * 4 > MOST_SIMULATED) == (most > 1)
        found = makespans(searched, times, np.array([m]))[0]
        whole = simulate(searched.schedule(m), searched.times).makespan
        assert found <= whole * (1 + 1e-9) <= found * most * (1 + 2e-9)


@pytest.mark.parametrize("zero", [2, 3])
def test_replicas_are_summed_over_once_a_step_however_many_microbatches(zero: int):
    more = []
    for replicas in (1, 8):
        of, nothing = candidates(dp_replicate=replicas, dp_shard=8, zero=zero), np.zeros((1, 1))
        beside = OverlappedPasses(nothing, nothing, nothing, nothing, nothing, 1)
        times = [float(data_parallel(job(), of, rank_parameters(job(), of), np.array([m]), beside)[0]) for m in (1, 8)]
        more.append(times[1] - times[0])
    assert more[1] == pytest.approx(more[0])


def _data_parallel_s(the_job: Job, of: Candidates, chunks: int, pass_s: float) -> float:
    """The exposed seconds next to passes of `pass_s` in 8 micro-batches, with windows of one pass for each chunk."""
    one, nothing = np.full((1, 1), pass_s), np.zeros((1, 1))
    beside = OverlappedPasses(one, one, nothing, one / pass_s, one / pass_s * chunks, chunks)
    return float(data_parallel(the_job, of, rank_parameters(the_job, of), np.array([8]), beside)[0])


def test_fsdp_in_a_pipeline_reduces_the_gradients_of_each_chunk_after_its_last_pass():
    """Passes are so long that they hide all but one of the 8 layers of a stage, and nothing slows them down."""
    stack = STACKS["fsdp"]
    stack = replace(stack, speed=replace(stack.speed, interference=0.0, copies_parameters=False))
    of, later = candidates(pp=4, dp_shard=16, zero=2), []
    for chunks in (1, 4):
        beside, after = (
            _data_parallel_s(job(stack=replace(stack, reduces_after_pipelines=after)), of, chunks, 100.0)
            for after in (False, True)
        )
        later.append(after - beside)
    assert later[0] == pytest.approx(later[1])
    shown = _data_parallel_s(job(stack=replace(stack, speed=replace(stack.speed, hides_dp=False))), of, 1, 100.0)
    # Reductions in fp32 are two of three bytes that are sent; the others are gathered in 16 bits.
    assert later[0] / (1 - 1 / 8) == pytest.approx(2 / 3 * shown, rel=0.05)


def test_messages_on_a_slow_network_slow_a_pass_as_long_as_on_the_usual_network():
    """Passes are so long that they hide all messages."""
    of, fsdp = candidates(dp_replicate=8, dp_shard=8, zero=3), STACKS["fsdp"]
    stacks = [replace(fsdp, speed=replace(fsdp.speed, interference=share)) for share in (0.0, 0.5)]
    slowed = []
    for network in ("", "@800Gb", "@6400Gb"):
        alone, beside = (_data_parallel_s(job(on="h100:64" + network, stack=each), of, 1, 1000.0) for each in stacks)
        slowed.append(beside - alone)
    assert slowed[1] == pytest.approx(slowed[0])
    assert slowed[2] < slowed[0]


def test_zero_3_that_frees_layers_after_each_forward_pass_of_a_pipeline_gathers_them_for_each_backward_pass():
    stack = replace(STACKS["fsdp"], speed=replace(STACKS["fsdp"].speed, hides_dp=False))
    once, again = (
        _data_parallel_s(job(stack=stack), candidates(pp=4, dp_shard=16, zero=3, zero_pp_gather=gather), 1, 1.0)
        for gather in ("step", "microbatch")
    )
    # 8 micro-batches gather 8 times in addition to once, in half of the bytes of the reduction.
    assert again == pytest.approx(once * (1 + 8 / 3), rel=0.15)


def test_the_bf16_optimizer_of_deepspeed_all_reduces_sums_in_fp32():
    """It sends 8 bytes a gradient and 2 a weight, where ZeRO-1 of Megatron sends 4 and 2."""
    of = candidates(dp_shard=64, zero=1)
    megatron, deepspeed = (read_stack(f"{name},date=2022,grad_dtype=fp32", job()) for name in ("megatron", "deepspeed"))
    sent = [_data_parallel_s(job(stack=stack), of, 1, 1.0) for stack in (megatron, deepspeed)]
    assert sent[1] / sent[0] == pytest.approx(10 / 6, rel=0.05)
    assert (megatron.speed.sum_bytes, deepspeed.speed.sum_bytes) == (12, 20)


@pytest.mark.parametrize(("chip", "on_shards", "busy"), [("h100", True, 16), ("b200", True, 1), ("h100", False, 0)])
def test_matmuls_beside_a_reduction_over_tp_have_fewer_multiprocessors(chip: str, on_shards: bool, busy: int):
    """F has fewer for the matmuls that tp splits by rows; those beside a gather, in F and in I, keep all of them."""
    spec, stack = resolve("llama-3.1-8b"), STACKS["megatron-core"]
    layout = candidates(tp=8, dp_shard=8, zero=1, sequence_parallel=[on_shards])
    alone, beside = (
        job(spec, f"{chip}:64", stack=replace(stack, speed=replace(stack.speed, hides_tp=hides)))
        for hides in (False, True)
    )
    before, after = (layer(one, layout, *blocks(spec)) for one in (alone, beside))
    of = alone.cluster
    chips = of.accelerator.multiprocessors
    fewer = replace(of, accelerator=replace(of.accelerator, multiprocessors=chips - busy))
    by_rows = [
        matmul
        for matmul in layer_matmuls(alone, layout, *blocks(spec), layout.tokens(alone.seq_len))
        if np.any(np.asarray(matmul.output_shards) > 1)
    ]
    assert len(by_rows) == 2 * on_shards
    longer = sum(
        float((matmul.seconds(replace(alone, cluster=fewer)) * chips / (chips - busy) - matmul.seconds(alone))[0])
        for matmul in by_rows
    )
    for name, expected in (("F", longer), ("I", 0.0), ("W", 0.0)):
        seconds, added = (float(one.parts[name][MATMULS][0]) for one in (before, after))
        assert added - seconds == pytest.approx(expected, rel=1e-6, abs=1e-12), name


def test_messages_of_experts_that_overlap_cost_their_exposed_part_and_the_slowdown():
    spec, of = resolve("mixtral-8x7b"), candidates(ep=8, dp_shard=64, zero=1)
    stack = STACKS["megatron-core"]
    shown, hidden = (
        layer(job(model=spec, stack=replace(stack, speed=replace(stack.speed, hides_experts=hides))), of, *blocks(spec))
        for hides in (False, True)
    )
    for name in ("F", "I"):
        sent = float(shown.parts[name]["expert parallel"][0])
        beside = sum(
            float(np.ravel(seconds)[0])
            for one in ("F" if name == "F" else "IW")
            for kind, seconds in hidden.parts[one].items()
            if kind not in ("expert parallel", "recomputation", "launch")
        )
        expected = max(sent - beside, 0) + stack.speed.interference * min(sent, beside)
        assert float(hidden.parts[name]["expert parallel"][0]) == pytest.approx(expected)
        assert 0 < expected < sent


@pytest.mark.parametrize(
    ("layout", "overlaps"),
    [
        ({"pp": 4}, False),
        ({"pp": 4, "pp_schedule": "interleaved-1f1b", "virtual_stages": 2}, True),
        ({"pp": 4, "pp_schedule": "dualpipe-v"}, True),
        ({"recompute": FULL}, False),
        ({"recompute": SELECTIVE}, True),
    ],
)
def test_messages_of_experts_overlap_where_a_rank_can_run_two_microbatches_at_once(layout: Any, overlaps: bool):
    spec, stack = resolve("mixtral-8x7b"), STACKS["megatron-core"]
    of = candidates(**{"ep": 8, "dp_shard": 8, "zero": 1} | layout)
    shown, hidden = (
        layer(job(model=spec, stack=replace(stack, speed=replace(stack.speed, hides_experts=hides))), of, *blocks(spec))
        for hides in (False, True)
    )
    assert (float(hidden.kind_s("expert parallel")[0]) < float(shown.kind_s("expert parallel")[0])) is overlaps


def test_a_mixture_without_shared_experts_sends_nothing_over_tp_of_its_own():
    spec, of = resolve("mixtral-8x7b"), candidates(tp=4, dp_shard=16, zero=1)
    plain, mixture = (
        layer(job(model=each), of, *blocks(each)).forward["tensor parallel"] for each in (replace(spec, moe=None), spec)
    )
    assert float(mixture[0]) == pytest.approx(float(plain[0]) / 2)


def test_zero_3_pays_for_its_gathers_where_the_network_is_slow():
    slow = job()
    slow = replace(slow, cluster=slow.cluster.with_network(slow.cluster.node_bytes_per_s / 40))
    of = candidates(dp_shard=[64, 64], zero=[1, 3], micro_batch=1)
    found = step_time(slow, of).parts["data parallel"]
    assert found[1] > 2 * found[0]


def test_experts_over_nodes_pay_for_their_tokens():
    the_job = job("qwen3-30b-a3b")
    of = candidates(dp_shard=[64, 64], ep=[8, 64], zero=[1, 1])
    inside, over = step_time(the_job, of).parts["expert parallel"]
    assert over > 1.5 * inside > 0


def test_one_host_launches_for_every_stack():
    for field in fields(Speed):
        if field.name in CALIBRATED.host:
            assert {getattr(stack.speed, field.name) for stack in STACKS.values()} == {CALIBRATED.host[field.name]}
    assert set(CALIBRATED.host) == {"launch_s", "launch_backward", "step_s"}


def test_every_stack_has_a_price_for_every_precision():
    for stack in STACKS.values():
        for precision in ("fp32", "bf16", "fp16", "fp8"):
            found = seconds(candidates(dp_shard=64, zero=3), job(stack=stack, precision=precision))
            assert np.isfinite(found)
            assert found > 0
