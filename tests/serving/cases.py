"""What the tests of serving share: a small stand-in for measured constants, and models on machines."""

from dataclasses import replace
from typing import Any

from shardwright.cost.hardware import cluster
from shardwright.serving.engines import ServingEngine
from shardwright.serving.models import named
from shardwright.serving.rates import Rates, fitted
from shardwright.serving.search import ServingTask
from shardwright.serving.setting import Serving
from shardwright.serving.simulate import Scheduler

IDEAL = Rates(
    matmul_share=1.0, memory_share=1.0, cache_share=1.0, flash_share=1.0, cached_share=1.0, expert_share=1.0,
    layer_s=0.0, pass_s=0.0, prefill_s=0.0, launch_s=0.0, expert_launch_s=0.0, arrive_s=0.0, request_s=0.0,
    reduce_s=0.0, exchange_s=0.0, link_share=1.0,
)  # fmt: skip
"""Rates of the data sheet, and no waiting."""


def serving(model: str = "llama-3.1-8b", machine: str = "h100:1/1", rates: Rates | None = None, **more: Any) -> Serving:
    """A model on a machine with the usual engine's constants."""
    there = cluster(machine)
    usual = fitted()[0].rates("trtllm-1", there.accelerator.die)
    return Serving(model=named(model)[1], cluster=there, rates=rates or usual, **more)


def scheduler(
    max_batch: int = 8, max_tokens: int = 2048, cache_tokens: float = 1e6, accepted: float = 1.0, **engine: Any
) -> Scheduler:
    """The scheduler of an engine that has these values."""
    return Scheduler(ServingEngine("any", "any", max_tokens=max_tokens, **engine), max_batch, cache_tokens, accepted)


def task(model: str, machine: str, precision: str = "fp8", **more: Any) -> ServingTask:
    """Prompts of 2,048 tokens and answers of 512, unless said otherwise."""
    there = serving(model, machine, precision=precision, kv_precision=precision)
    return replace(ServingTask(serving=there, input_len=2048, output_len=512), **more)
