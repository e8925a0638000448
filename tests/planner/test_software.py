"""Proves that `plan --stack` prices software as a row of a table of measured runs does."""

from dataclasses import replace

import pytest

from shardwright.cost.data_messages import groups
from shardwright.cost.hardware import cluster
from shardwright.cost.job import Candidates, Job
from shardwright.cost.machine import derivatives
from shardwright.cost.passes import reached_bytes_per_s
from shardwright.cost.rank_parameters import rank_parameters
from shardwright.cost.stack import STACKS
from shardwright.cost.step import step_time
from shardwright.layout.layout import Layout
from shardwright.model.presets import resolve
from shardwright.planner.software import read_stack
from shardwright.system.errors import InputError


def job(hardware: str = "h100:8", precision: str = "bf16", model: str = "llama-3.1-8b") -> Job:
    return Job(model=resolve(model), cluster=cluster(hardware), global_batch=8, seq_len=32768, precision=precision)


def seconds(text: str, **given: str) -> float:
    """Seconds of a step of 8B with ZeRO-1 on 8 accelerators."""
    of = job(**given)
    candidates = Candidates.from_layout(Layout(dp_shard=8, zero=1), micro_batch=1)
    return float(step_time(replace(of, stack=read_stack(text, of)), candidates).total_s[0])


@pytest.mark.parametrize("text", ["fsdp", "fsdp-compiled", "fsdp-compiled,attention=fa2", "megatron-core,date=2024-05"])
@pytest.mark.parametrize("on", ["h100:8", "b200:8"])
def test_a_factor_of_attention_changes_the_part_of_attention_with_every_kernel(text: str, on: str):
    """The derivative by the logarithm of each constant is about the share of the step that depends on it."""
    the_job = job(on)
    the_job = replace(the_job, stack=read_stack(text, the_job))
    of = Candidates.from_layout(Layout(dp_shard=8, zero=1), micro_batch=1)
    time = step_time(the_job, of)
    share = float(time.parts["attention"][0] / time.total_s[0])
    assert share > 0.2
    assert derivatives(the_job, of)[1] == pytest.approx(share, abs=0.03)


def test_software_without_a_date_is_the_newest():
    assert seconds("fsdp-compiled") == seconds("fsdp-compiled,attention=cudnn")
    assert seconds("fsdp-compiled,date=2025") == seconds("fsdp-compiled,attention=fa2") > seconds("fsdp-compiled")
    before_cudnn = seconds("megatron-core,date=2024-05")
    assert before_cudnn == seconds("megatron-core,attention=flash-attn") > seconds("megatron-core,date=2024-06")
    assert seconds("nanotron") == seconds("nanotron,attention=flash-attn") < seconds("nanotron,attention=fa2")
    assert seconds("megatron-core", hardware="b200:8") == seconds("megatron-core,cuda_graphs=step", hardware="b200:8")
    assert seconds("fsdp") == seconds("fsdp,fused_norms=1") == seconds("fsdp,fused_norms=1,date=2026")
    assert seconds("fsdp,date=2025-09,attention=fa2") == seconds("fsdp,fused_norms=0,attention=fa2")
    narrow = {"precision": "fp8"}
    assert seconds("megatron-core", **narrow) < seconds("megatron-core,gather_dtype=bf16", **narrow)


def test_a_fused_rmsnorm_moves_the_bytes_of_a_layernorm():
    """Two norms of a layer: 36 bytes an element in eager kernels, 4 in one, and 1.5 times that backward."""
    of = job()
    one, many = (replace(of, stack=read_stack(f"fsdp,fused_norms={fused}", of)) for fused in (1, 0))
    candidates = Candidates.from_layout(Layout(dp_shard=8, zero=1), micro_batch=1)
    elementwise = [float(step_time(each, candidates).parts["element-wise"][0]) for each in (one, many)]
    moved = of.model.n_layers * 2 * of.seq_len * of.model.d_model * (36 - 4)
    rate = reached_bytes_per_s(one)
    assert elementwise[1] - elementwise[0] == pytest.approx(2.5 * moved / rate, rel=0.01)


def attention_s(text: str, model: str, hardware: str) -> float:
    """Seconds of attention in a step on 8 accelerators."""
    of = job(hardware, model=model)
    candidates = Candidates.from_layout(Layout(dp_shard=8, zero=1), micro_batch=1)
    return float(step_time(replace(of, stack=read_stack(text, of)), candidates).parts["attention"][0])


@pytest.mark.parametrize(
    ("kernel", "model", "hardware", "rate"),
    [
        ("cudnn-fp8", "llama-3.1-8b", "b200:8", 1.13),
        ("cudnn-fp8", "llama-3.1-8b", "h200:8", 0.9),
        ("cudnn-fp8", "deepseek-v3", "b200:8", 1.13 * 1.48),
        ("cudnn-mxfp8", "llama-3.1-8b", "b200:8", 1.0),
        ("cudnn-mxfp8", "deepseek-v3", "b200:8", 1.34),
    ],
)
def test_attention_in_8_bits_has_its_measured_rate_relative_to_16_bits(
    kernel: str, model: str, hardware: str, rate: float
):
    wide, narrow = (attention_s(f"megatron-core,attention={name}", model, hardware) for name in ("cudnn", kernel))
    assert wide / narrow == pytest.approx(rate, rel=1e-3)


@pytest.mark.parametrize(
    ("text", "rope", "residual", "heads", "gated"),
    [
        ("megatron", 20, 6, 4, 6),
        ("deepspeed", 20, 6, 4, 6),
        ("gpt-neox,flash=0", 20, 10, 4, 10),
        ("gpt-neox,flash=1", 20, 10, 28, 10),
    ],
)
def test_eager_kernels_of_megatron_deepspeed_and_gpt_neox_move_the_bytes_of_their_source(
    text: str, rope: float, residual: float, heads: float, gated: float
):
    speed = read_stack(text, job()).speed
    assert (speed.rope_bytes, speed.residual_bytes, speed.heads_bytes, speed.gated_bytes) == (
        *(rope, residual, heads, gated),
    )
    scripted = read_stack(text, job(precision="fp16")).speed.rope_bytes
    assert scripted == (20 if text == "megatron" else 12)
    eager = STACKS["fsdp"].speed.kernel_share if text.startswith("gpt-neox") else 1.0
    assert speed.kernel_share == eager


def test_stored_scores_have_the_rate_of_fused_kernels_in_eager_stacks_too():
    eager, fused = (attention_s(f"{name},flash=0", "llama-3.1-8b", "a100-80:8") for name in ("gpt-neox", "megatron"))
    assert eager == pytest.approx(fused)


def test_a_host_that_waits_for_each_kernel_adds_all_launches_to_a_step():
    of = job()
    times = [
        step_time(replace(of, stack=read_stack(f"deepspeed,flash=1,blocking_launches={flag}", of)), candidates)
        for candidates in [Candidates.from_layout(Layout(dp_shard=8, zero=1), micro_batch=1)]
        for flag in (0, 1)
    ]
    speed = STACKS["megatron"].speed
    launches = of.model.n_layers * speed.launch_s * (1 + speed.launch_backward)
    assert float(times[0].parts["launch"][0]) == 0
    assert float(times[1].parts["launch"][0]) == pytest.approx(launches)


def test_without_userbuffers_megatron_core_reduces_gradients_of_inputs_beside_gradients_of_weights():
    of = job()
    candidates = Candidates.from_layout(Layout(tp=8, sequence_parallel=True), micro_batch=1)
    in_pieces, without = (read_stack(f"megatron-core,overlap_tp={flag}", of) for flag in (1, 0))
    exposed = replace(without, speed=replace(without.speed, hides_tp_backward=False))
    times = [
        float(step_time(replace(of, stack=stack), candidates).parts["tensor parallel"][0])
        for stack in (in_pieces, without, exposed)
    ]
    assert times[0] < times[1] < 0.9 * times[2]


def test_recipes_that_overlap_the_messages_of_experts_multiply_all_experts_in_one_kernel():
    of = job("gb200:72", "mxfp8", "deepseek-v3")
    for text, date, whole in (("", "2026-05", False), ("", "2026-06", True), (",overlap_ep=1", "2026-05", True)):
        speed = read_stack(f"megatron-core,date={date}{text}", of).speed
        assert (speed.hides_experts, speed.groups_matmuls) == (whole, whole)
    assert read_stack("megatron-core,date=2026-06", of).speed.attention == "cudnn-mxfp8"


@pytest.mark.parametrize(("parameters", "messages"), [(None, 201), (768_000_000, 11), (10**12, 1), (1, 198)])
def test_a_message_has_the_stated_parameters_and_at_least_a_tensor(parameters: int | None, messages: int):
    of = job()
    text = "megatron-core" if parameters is None else f"megatron-core,bucket_parameters={parameters}"
    of = replace(of, stack=read_stack(text, of))
    candidates = Candidates.from_layout(Layout(dp_shard=8, zero=1), micro_batch=1)
    (dense,) = groups(of, candidates, rank_parameters(of, candidates))
    assert dense.calls[0] == messages


def test_one_message_of_a_step_has_no_pass_to_overlap_with():
    """The weights and gradients of a step in one message each are exposed as a whole, and slow no pass down."""
    of = job()
    candidates = Candidates.from_layout(Layout(dp_shard=8, zero=1), micro_batch=1)
    for parameters, messages in ((10**12, 1), (768_000_000, 11)):
        stack = read_stack(f"megatron-core,bucket_parameters={parameters}", of)
        alone = replace(stack, speed=replace(stack.speed, hides_dp=False))
        exposed, all_s = (
            float(step_time(replace(of, stack=one), candidates).parts["data parallel"][0]) for one in (stack, alone)
        )
        slowed = stack.speed.interference * (1 - 1 / messages)
        assert exposed == pytest.approx(all_s * (1 / messages + slowed))


def test_messages_over_shards_and_over_replicas_are_one_piece_each_of_one_bucket():
    """Of one bucket the reduce-scatter and the all-reduce are one message each: neither has a pass to overlap with."""
    of = job()
    candidates = Candidates.from_layout(Layout(dp_replicate=2, dp_shard=4, zero=1), micro_batch=1)
    exposed, alone = (
        float(step_time(replace(of, stack=read_stack(text, of)), candidates).parts["data parallel"][0])
        for text in (
            f"megatron-core,bucket_parameters={10**12}",
            f"megatron-core,bucket_parameters={10**12},overlap_dp=0",
        )
    )
    assert exposed == pytest.approx(alone)


def test_stated_overlap_of_megatron_lm_takes_less_time_than_none():
    of = job()
    candidates = Candidates.from_layout(Layout(dp_shard=8, zero=1), micro_batch=1)
    beside, alone = (
        float(step_time(replace(of, stack=read_stack(f"megatron,overlap_dp={flag}", of)), candidates).total_s[0])
        for flag in (1, 0)
    )
    assert beside < alone


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("megatron-lm", "stack 'megatron-lm' is not known; valid: megatron, megatron-core, deepspeed, gpt-neox"),
        ("fsdp,atention=fa2", "'atention' is not a key of a stack; did you mean 'attention'"),
        ("fsdp,attention=fa9", "attention='fa9': valid: fa1, fa2, fa3, fa4, cudnn, cudnn-fp8, cudnn-mxfp8, flash-attn"),
        ("fsdp,attention=fa4", "attention=fa4 has no price on h100; priced there: fa2, fa3, cudnn, cudnn-fp8"),
        ("fsdp,overlap_ep=1", "overlap_ep=1 has no price with stack fsdp without experts; priced with megatron-core"),
        ("megatron-core,overlap_ep=1", "overlap_ep=1 has no price with stack megatron-core without experts; priced"),
        ("megatron,fused_loss=1", "fused_loss=1 has no price with stack megatron; priced with megatron-core, fsdp"),
        ("fsdp-compiled,fused_norms=1", "fused_norms has no price with stack fsdp-compiled; priced with fsdp"),
        ("fsdp,cuda_graphs", "cuda_graphs='': valid: none, blocks, step"),
        ("fsdp,date=soon", "date='soon': valid: YYYY or YYYY-MM"),
    ],
)
def test_a_stack_that_cannot_be_priced_is_refused_with_the_valid_values(text: str, said: str):
    with pytest.raises(InputError) as error:
        read_stack(text, job())
    assert f"--stack {text}: {said}" in error.value.problems[0]
