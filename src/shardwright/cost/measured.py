"""Tables of a hardware file: their common part, and the rates that `shardwright measure` has measured on a machine,
which replace the constants fitted to published runs.

An accelerator of a hardware file has rates by the number of ranks of a node that they were measured with, since ranks
on the processor of one host share its cores and its memory's bandwidth. Rates for more ranks than were measured follow
from the shares of the cores.
"""

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

VERSION = 3
"""Version of the tables below. A file with another version was written by another version of shardwright."""
Kernel = Literal[
    "norm_bytes", "rmsnorm_bytes", "residual_bytes", "heads_bytes", "rope_bytes", "gated_bytes", "gelu_bytes",
    "loss_bytes", "optimizer_bytes",
]  # fmt: skip


class HardwareTable(BaseModel):
    """A table of a hardware file: unknown keys are errors, values are not coerced."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(gt=0, le=1)]
Count = Annotated[int, Field(ge=1)]
Peak = Literal["fp32", "tf32", "bf16", "fp16", "fp8", "mxfp8", "nvfp4"]
ByPrecision = dict[Peak, Positive]
CollectiveName = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "point_to_point"]


class MeasuredTable(HardwareTable):
    """How, when and with which software a file was measured."""

    version: Count = Field(description=f"of these tables; this shardwright reads {VERSION}")
    date: str = Field(description="day of the measurement")
    shardwright: str = Field(description="version of shardwright")
    torch: str = Field(description="version of PyTorch")
    python: str = Field(description="version of Python")
    machine: str = Field(description="name of the processor or the accelerator")
    clock: Literal["wall", "cpu"] = Field(description="wall seconds, or CPU-seconds of a loaded machine")
    took_s: NotNegative = Field(description="seconds that the measurement took")


class GenerationTable(HardwareTable):
    """The overhead of a pass of `shardwright generate` on a processor, and the rates of matmuls of few tokens."""

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
"""A key of `InStepFactors`."""


class InStepFactors(HardwareTable):
    """Measured time in a step, relative to kernels and messages that run alone."""

    work: Positive = Field(1.0, description="kernels, and the waiting of stages for each other")
    data_parallel: Positive = Field(1.0, description="messages of weights and gradients")
    tensor_parallel: Positive = Field(1.0, description="messages over tp")
    context_parallel: Positive = Field(1.0, description="messages over cp")


class RatesTable(HardwareTable):
    """Rates of one rank of a node with a given number of ranks."""

    memory_gib: Positive = Field(description="GiB that a rank can have")
    process_gib: NotNegative = Field(description="GiB that a rank holds before any of a model")
    holes: list[NotNegative] = Field(
        default_factory=lambda: [0.0] * 4,
        min_length=4,
        max_length=4,
        description="bytes that the C library keeps for each byte of tensors of less than 32 MiB, by ZeRO stage; "
        "cost/pools.py",
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
    in_step: InStepFactors = Field(
        default_factory=InStepFactors, description="time in a step of the training program, relative to that alone"
    )
    generation: GenerationTable | None = Field(
        None, description="passes of shardwright generate, of a CPU; without them plan serve cannot price it"
    )


def node_rates(tables: Mapping[str, RatesTable], ranks: int, cores: int | None) -> tuple[RatesTable, float] | None:
    """Return the rates of a rank of a node with `ranks` ranks, and the share of a core of the measured rank that each
    has, if they share `cores`. The rates are those measured with the most ranks up to `ranks`."""
    if not tables:
        return None
    measured = sorted(map(int, tables))
    nearest = max((count for count in measured if count <= ranks), default=measured[0])
    share = min(1.0, max(nearest, cores) / ranks) if cores is not None else 1.0
    return tables[str(nearest)], share
