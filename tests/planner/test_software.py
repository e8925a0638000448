"""Proves that `plan --stack` prices software as a row of a table of measured runs does."""

from dataclasses import replace

import pytest

from shardwright.cost.hardware import cluster
from shardwright.cost.job import Candidates, Job
from shardwright.cost.machine import derivatives
from shardwright.cost.passes import reached_bytes_per_s
from shardwright.cost.step import step_time
from shardwright.layout.layout import Layout
from shardwright.model.presets import resolve
from shardwright.planner.software import read_stack
from shardwright.system.errors import InputError


def job(hardware: str = "h100:8", precision: str = "bf16") -> Job:
    return Job(
        model=resolve("llama-3.1-8b"), cluster=cluster(hardware), global_batch=8, seq_len=32768, precision=precision
    )


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


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("megatron-lm", "stack 'megatron-lm' is not known; valid: megatron, megatron-core, deepspeed, fsdp"),
        ("fsdp,atention=fa2", "'atention' is not a key of a stack; did you mean 'attention'"),
        ("fsdp,attention=fa9", "attention='fa9': valid: fa1, fa2, fa3, fa4, cudnn, flash-attn"),
        ("fsdp,attention=fa4", "attention=fa4 has no price on h100; priced there: fa2, fa3, cudnn, flash-attn"),
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
