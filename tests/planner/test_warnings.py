"""Proves that known anti-patterns are told, each where it stands, and that good layouts are left in peace."""

from dataclasses import replace

import pytest

from shardwright.cost.hardware import cluster
from shardwright.cost.job import Job
from shardwright.cost.stack import MEGATRON
from shardwright.model.presets import resolve
from shardwright.planner.choice import PricedLayout, read
from shardwright.planner.words import warnings

GOOD = Job(model=resolve("llama-3.1-8b"), cluster=cluster("h100:16"), global_batch=256, seq_len=8192)
MIXED = replace(GOOD, model=resolve("qwen3-30b-a3b"))
SHARDED = "dp_shard=16,zero=3,micro_batch=1"


def told(job: Job, text: str) -> list[str]:
    return warnings(PricedLayout.from_choice(job, read(text)))


@pytest.mark.parametrize("text", [SHARDED, "tp=8,dp_shard=2", "tp=4,pp=2,dp_shard=2,zero=1"])
def test_a_good_layout_is_left_in_peace(text: str):
    assert told(GOOD, text) == []


@pytest.mark.parametrize(
    ("job", "text", "parts"),
    [
        (GOOD, "tp=16", ["tp=16", "nodes of 8", "% of the step", "divisor of 8"]),
        (replace(GOOD, global_batch=8), "pp=8,dp_shard=2,zero=1", ["pp=8 has 4 micro-batches", "are idle for"]),
        (replace(GOOD, precision="fp16"), SHARDED, ["precision fp16", "by the loss scale", "bf16"]),
        (replace(GOOD, stack=MEGATRON), SHARDED, ["seq_len=8192 without flash attention", "megatron"]),
        (replace(GOOD, precision="fp32"), SHARDED, ["fp32", "flash attention"]),
        (replace(GOOD, seq_len=262144), "cp=16,zero=1", ["seq_len=262144", "rotary range of 131072"]),
        (replace(GOOD, seq_len=8191), SHARDED, ["seq_len=8191", "no multiple of 2", "cp", "8190 or 8192"]),
        (
            replace(GOOD, model=resolve("gpt2"), seq_len=2048),
            SHARDED,
            ["beyond the model's 1024 learned positions", "train refuses it", "new rows have to be learned"],
        ),
        (
            replace(MIXED, model=replace(MIXED.model, moe=replace(MIXED.model.moe, d_ffn=772))),
            "dp_shard=16,ep=16,zero=1",
            ["ep=16 without grouped matmuls", "772", "1544 bytes", "multiple of 8"],
        ),
    ],
    ids=["tp", "pp", "fp16", "flash", "fp32", "rotary", "odd", "learned", "experts"],
)
def test_an_anti_pattern_is_told_once(job: Job, text: str, parts: list[str]):
    found = told(job, text)
    assert len(found) == 1, found
    for part in parts:
        assert part in found[0]


def test_several_are_told_together():
    job = replace(GOOD, seq_len=262144, precision="fp16", global_batch=16)
    assert len(told(job, "tp=16")) == 3
