"""Named software stacks: what a training program keeps, fuses and overlaps, apart from its layout.

One set of choices serves every run of a stack; nothing here belongs to one table of measurements.
"""

from dataclasses import dataclass, replace
from typing import Literal

from shardwright.cost import speed
from shardwright.cost.speed import Speed
from shardwright.units import MiB


@dataclass(frozen=True, kw_only=True)
class Stack:
    """What a stack does by itself, whatever the layout.

    What it keeps, in bytes for each parameter of a model in 16 bits:
    `gradient_bytes`: of the buffer in which gradients add up; `master_bytes`: of the weights the optimizer changes;
    `state_bytes`: of an element of one optimizer state (Adam has two).
    `gathers_master`: under ZeRO-3 working weights exist only while gathered from the shards of the master weights.
    `weight_gradient_bytes`: of a product's weight gradient on its way to that buffer. Megatron's products add to it
    themselves, and make an empty one for autograd all the same.
    `step_bytes`: what the optimizer's step makes and frees.
    `reduced_bytes`: of a block's gradients on their way to their shards, under ZeRO-2 and ZeRO-3.

    What it keeps of a microbatch:
    `flash_attention`: attention never stores its square of scores. `dropout_masks`: it drops activations, and scores if
    stored, whatever the model says. `fused_gate`: silu(gate) is not kept beside gate. `keeps_gathered`: what a product
    reads is kept as gathered over tp, and not as token shards. `keeps_outputs`: a stage of a pipeline keeps what it has
    sent until its backward pass. `selective`: what selective recomputation leaves out: "scores" of attention; or all
    but the "products" that torchtitan lists, or those of them that the backward pass reads.
    `weighs_outputs`: what experts give is kept, to be weighted after them; else what their last matrix reads is
    weighted, and kept without the weight too where no kernel fused with a gate makes it again.
    `wide_router`: what a router reads is copied to fp32. `pads_values`: heads of values are made as wide as those of
    keys for a fused kernel (latent attention). `fp8_input_bytes`: of the kept input of a product in fp8;
    `fp8_weight_bytes`: of the copies of its weight, as it is and transposed, that stay for all microbatches.
    `logit_kept_bytes`, `logit_peak_bytes`: for each logit, from the loss to its backward pass, and at most in between;
    `logit_cut_bytes`: more than that at most, where the vocabulary is cut over tp.

    Beside tensors of the model: `vocabulary_multiple`: rows of embedding and head divide by this times tp.
    `workspace_bytes`: of libraries, `expert_workspace_bytes`: of grouped products on top. `fragmentation`: what the
    allocator reserves beyond what tensors take, as a share.
    """

    name: str
    about: str
    speed: Speed
    gradient_bytes: float = 4.0
    master_bytes: float = 4.0
    state_bytes: float = 4.0
    gathers_master: bool = False
    weight_gradient_bytes: float = 2.0
    reduced_bytes: float = 4.0
    step_bytes: float = 0.0
    flash_attention: bool = True
    dropout_masks: bool = False
    fused_gate: bool = True
    keeps_gathered: bool = False
    keeps_outputs: bool = False
    selective: Literal["scores", "products", "read products"] = "scores"
    weighs_outputs: bool = False
    wide_router: bool = False
    pads_values: bool = False
    fp8_input_bytes: float = 2.0
    fp8_weight_bytes: float = 0.0
    logit_kept_bytes: float = 4.0
    logit_peak_bytes: float = 6.0
    logit_cut_bytes: float = 0.0
    vocabulary_multiple: int = 0
    workspace_bytes: float = 64 * MiB
    expert_workspace_bytes: float = 0.0
    fragmentation: float = 0.05


SHARDWRIGHT = Stack(
    speed=speed.SHARDWRIGHT,
    name="shardwright",
    about="this system: FSDP2, explicit collectives, fused attention",
    gathers_master=True,
    fused_gate=False,
    keeps_outputs=True,
    weighs_outputs=True,
    wide_router=True,
    pads_values=True,
    logit_peak_bytes=12.0,
    logit_cut_bytes=-2.0,
)
MEGATRON = Stack(
    speed=speed.MEGATRON,
    name="megatron",
    about="Megatron-LM and Megatron-DeepSpeed until 2022: scores of attention are stored, gradients in fp32",
    flash_attention=False,
    dropout_masks=True,
    vocabulary_multiple=128,
)
MEGATRON_CORE = Stack(
    speed=speed.MEGATRON_CORE,
    name="megatron-core",
    about="Megatron-LM since 2023: fused attention, distributed optimizer, overlapped data-parallel communication",
    fp8_input_bytes=1.0,
    fp8_weight_bytes=2.0,
    vocabulary_multiple=128,
    workspace_bytes=96 * MiB,
    expert_workspace_bytes=128 * MiB,
)
MEGATRON_CORE_FUSED_LOSS = replace(
    MEGATRON_CORE,
    name="megatron-core-fused-loss",
    about="the same with --cross-entropy-loss-fusion, whose compiled steps copy logits where the others work in place",
    logit_peak_bytes=10.0,
)
FSDP = Stack(
    speed=speed.FSDP,
    name="fsdp",
    about="PyTorch FSDP: torchtitan, llm-foundry",
    gathers_master=True,
    step_bytes=4.0,
    fused_gate=False,
    keeps_gathered=True,
    keeps_outputs=True,
    selective="products",
    logit_peak_bytes=14.0,
    logit_cut_bytes=4.0,
)
FSDP_COMPILED = replace(
    FSDP,
    name="fsdp-compiled",
    about="the same under torch.compile, which fuses element-wise operations",
    speed=speed.COMPILED,
    fused_gate=True,
    selective="read products",
)
FSDP_COMPILED_LOSS = replace(
    FSDP_COMPILED,
    name="fsdp-compiled-loss",
    about="torchtitan under torch.compile since 2025: the loss is compiled too, and makes no copies of logits in fp32",
    logit_kept_bytes=2.0,
    logit_peak_bytes=6.0,
    logit_cut_bytes=0.0,
)

STACKS = {
    stack.name: stack
    for stack in (
        SHARDWRIGHT,
        MEGATRON,
        MEGATRON_CORE,
        MEGATRON_CORE_FUSED_LOSS,
        FSDP,
        FSDP_COMPILED,
        FSDP_COMPILED_LOSS,
    )
}
