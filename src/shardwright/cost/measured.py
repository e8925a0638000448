"""Rates that `shardwright measure` has measured on a machine, in the place of the constants fitted to published runs.

An accelerator of a hardware file has them by the number of ranks of a node that they were measured with, since ranks on
the processor of one host share its cores and its memory's bandwidth. Rates for more ranks than were measured follow
from the shares of the cores.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from shardwright.cost.calibration import OTHERS
from shardwright.cost.kinds import CONTEXT, DATA, TENSOR
from shardwright.cost.table import ByPrecision, Count, NotNegative, Positive, Table
from shardwright.split.buckets import LOGITS_TOGETHER
from shardwright.units import GiB

if TYPE_CHECKING:
    from shardwright.cost.job import Job

VERSION = 3
"""Of the tables below; a file of another version was written by another version of shardwright."""
Kernel = Literal[
    "norm_bytes", "rmsnorm_bytes", "residual_bytes", "heads_bytes", "rope_bytes", "gated_bytes", "gelu_bytes",
    "loss_bytes", "optimizer_bytes",
]  # fmt: skip


class MeasuredTable(Table):
    """How, when and with what a file was measured."""

    version: Count = Field(description=f"of these tables; this shardwright reads {VERSION}")
    date: str = Field(description="day of the measurement")
    shardwright: str = Field(description="version of shardwright")
    torch: str = Field(description="version of PyTorch")
    python: str = Field(description="version of Python")
    machine: str = Field(description="name of the processor or the accelerator")
    clock: Literal["wall", "cpu"] = Field(description="wall seconds, or CPU-seconds of a loaded machine")
    took_s: NotNegative = Field(description="seconds that the measurement took")


class GenerationTable(Table):
    """What a pass of `shardwright generate` takes on a processor beside its work, and the matmuls of few tokens."""

    layer_us: NotNegative = Field(description="of a layer in each pass, microseconds")
    pass_us: NotNegative = Field(description="of each pass: embedding, head, and choosing the batch, microseconds")
    request_us: NotNegative = Field(description="of each sequence in each pass, microseconds")
    sequence_us: NotNegative = Field(
        description="of each sequence in a layer of a decode pass, beside its heads, microseconds"
    )
    cached_share: Positive = Field(
        description="of the rate of matmuls in fp32, in attention of one token of each sequence to the cache"
    )
    head_us: NotNegative = Field(description="of each head of each sequence in a layer of a decode pass, microseconds")
    prompt_us: NotNegative = Field(description="of each prompt in each layer of the pass that reads it, microseconds")
    split_layer_us: NotNegative = Field(
        description="of a layer that is sharded over tp, without its collectives, microseconds"
    )
    split_pass_us: NotNegative = Field(
        description="of each pass that is sharded over tp, without its collectives, microseconds"
    )
    row_gb_per_s: Positive = Field(description="rate at which a matmul of one token reads its weights, GB/s")
    weights_gb_per_s: Positive = Field(
        description="rate at which a matmul of several tokens reads its weights, before it multiplies, GB/s"
    )


WORK = "work"
"""A key of `InStep`."""


class InStep(Table):
    """Measured time in a step, relative to kernels and messages that run alone."""

    work: Positive = Field(1.0, description="kernels, and the waiting of stages for each other")
    data_parallel: Positive = Field(1.0, description="messages of weights and gradients")
    tensor_parallel: Positive = Field(1.0, description="messages over tp")
    context_parallel: Positive = Field(1.0, description="messages over cp")


class RatesTable(Table):
    """Rates of one rank of a node of so many."""

    memory_gib: Positive = Field(description="GiB that a rank can have")
    process_gib: NotNegative = Field(description="GiB that a rank holds before any of a model")
    holes: list[NotNegative] = Field(
        default_factory=lambda: [0.0] * 4,
        min_length=4,
        max_length=4,
        description="bytes that the C library keeps for each byte of tensors of less than 32 MiB, by ZeRO stage; "
        "cost/holes.py",
    )
    tflops: ByPrecision = Field(description="best rate of a large matmul by precision, 1e12 FLOP/s")
    memory_gb_per_s: Positive = Field(description="bandwidth of a large copy, read and written, GB/s")
    ramp_k: NotNegative = Field(description="input features at which a matmul reaches half of that rate")
    partial_wave: NotNegative = Field(description="waves that a matmul takes longer than its tiles")
    attention_share: Positive = Field(description="rate of attention, forward, of wide heads and long sequences")
    attention_width: NotNegative = Field(description="head width at which attention reaches half of that rate")
    attention_length: NotNegative = Field(description="sequence length at which attention reaches half of that rate")
    attention_backward: Positive = Field(description="time of attention's backward pass, relative to the forward pass")
    launch_us: NotNegative = Field(description="to start the kernels of a layer forward, microseconds")
    launch_backward: NotNegative = Field(description="the same backward, relative to it")
    launch_ends: NotNegative = Field(description="those of embedding, head and loss, relative to a layer")
    step_us: NotNegative = Field(description="of a step beyond its work, microseconds")
    bucket_us: NotNegative = Field(description="to gather or reduce a block's parameters, beyond the collective")
    kernels: dict[Kernel, NotNegative] = Field(description="bytes moved for each element by our kernels; cost/speed.py")
    in_step: InStep = Field(
        default_factory=InStep, description="time in a step of the training program, relative to that alone"
    )
    generation: GenerationTable | None = Field(
        None, description="passes of shardwright generate, of a CPU; without them plan serve cannot price it"
    )


def of_ranks(tables: Mapping[str, RatesTable], ranks: int, cores: int | None) -> tuple[RatesTable, float] | None:
    """The rates of a rank where a node has so many: those of the largest measured number that is not larger, and the
    share of a core of the measured rank that each has, where they share `cores`."""
    if not tables:
        return None
    measured = sorted(map(int, tables))
    nearest = max((count for count in measured if count <= ranks), default=measured[0])
    share = min(1.0, max(nearest, cores) / ranks) if cores is not None else 1.0
    return tables[str(nearest)], share


def on_machine(job: "Job") -> "Job":
    """The job with the rates measured on its cluster's machine, if there are any. They are those of this system's eager
    stack; of a compiled one the matmuls and attention alone."""
    chip = job.cluster.accelerator
    if chip.rates is None:
        return job
    rates, share = chip.rates, chip.core_share
    fitted = replace(
        job.calibration,
        product_share={OTHERS: dict.fromkeys(("bf16", "fp8"), 1 / rates.in_step.work)},
        flash_share={OTHERS: rates.attention_share},
        ramp_k=rates.ramp_k,
        partial_wave=rates.partial_wave,
        flash_width=rates.attention_width,
        flash_length=rates.attention_length,
        flash_backward=rates.attention_backward,
        memory_share=1 / rates.in_step.work,
    )
    speed = replace(job.stack.speed, kernel_share=1.0, matmul_gain=1.0, flash_gain=1.0, by_die={})
    if not job.compiled:
        kernels: dict[str, Any] = {str(name): moved for name, moved in rates.kernels.items()}
        if "loss_bytes" in kernels:  # in the type that was measured
            kernels |= {"loss_cast_bytes": 0.0, "loss_over_tp_bytes": 0.0}
        speed = replace(
            speed,
            launch_s=rates.launch_us * 1e-6 / share,
            launch_backward=rates.launch_backward,
            head_launches=rates.launch_ends,
            step_s=rates.step_us * 1e-6 / share,
            bucket_s=rates.bucket_us * 1e-6 / share,
            **kernels,
        )
    if chip.on_host:
        messages = {
            DATA: rates.in_step.data_parallel, TENSOR: rates.in_step.tensor_parallel,
            CONTEXT: rates.in_step.context_parallel,
        }  # fmt: skip
        speed = replace(
            speed, in_step=messages, adds_launches=True, hides_dp=False, hides_tp_backward=False, message_s=0.0
        )
    stack = replace(job.stack, speed=speed, workspace_bytes=rates.process_gib * GiB)
    if chip.on_host:
        stack = replace(stack, holes=tuple(rates.holes), of_process=True, logits_together=LOGITS_TOGETHER)
    return replace(job, calibration=fitted, stack=stack)
