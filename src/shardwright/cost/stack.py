"""Named software stacks: their memory, fused kernels and overlaps, independent of the layout.

One set of choices holds for all runs of a stack; none is fitted to a single table of measurements.
"""

from dataclasses import dataclass, replace
from typing import Literal

from shardwright.cost import speed
from shardwright.cost.hardware import Accelerator
from shardwright.cost.speed import Speed
from shardwright.split.compression import LOGITS_TOGETHER_ON_GPU
from shardwright.system.units import MiB


@dataclass(frozen=True, kw_only=True)
class Stack:
    """The properties of a stack that determine memory, the same for all layouts.

    Parameters, gradients and optimizer states, in bytes for each parameter of a model in 16 bits: `gradient_bytes`: of
    the buffer in which gradients are accumulated; `master_bytes`: of the master weights; `state_bytes`: of an element
    of one optimizer state (Adam has two). `gathers_master`: with ZeRO-3 working weights exist only while gathered from
    the shards of the master weights. `weight_gradient_bytes`: of the weight gradient of one matmul before it is added
    to that buffer. Megatron-LM's matmuls accumulate into the buffer themselves, but still allocate an empty gradient
    for autograd. `keeps_gradients`: that buffer exists for the whole step, else from the first backward pass to the
    update. `reduces_once_in_pipelines`: with a pipeline, ZeRO-2 reduces the gradients of a stage once a step, after its
    last micro-batch (`torch.distributed.pipelining` sets FSDP's gradient sync for that one alone), and keeps them whole
    until then; `reduces_after_pipelines`: with ZeRO-1 to 3 it reduces the gradients of a stage after the stage's last
    backward pass, and the next pass waits for it (`_root_post_backward_final_callback` there). Then ZeRO-3 with
    `layout.zero_pp_gather` "microbatch" frees layers after each forward pass, and gathers them for each backward pass,
    which leaves them whole (FSDP2's `reshard_after_forward`; torchtitan switches it off with a pipeline).
    `sums_whole`: ZeRO-1 all-reduces gradients instead of reduce-scattering them (DeepSpeed's BF16_Optimizer).
    `gathers_in_loss`: ZeRO-3 has a gathered block and the next one while the loss is computed, too. `step_bytes`:
    temporary buffers of the optimizer. `reduced_bytes`: of a block's gradients in the reduce-scatter, with ZeRO-2 and
    ZeRO-3. `accumulates_whole`: ZeRO-2 and ZeRO-3 reduce gradients after the last micro-batch of a step alone, and keep
    them whole until then, in the type of the reduction (FSDP2's `set_requires_gradient_sync`).

    Activations of a micro-batch: `flash_attention`: attention does not store its scores; `scores_in_kernel`: for
    every kind of layer and type, otherwise they are in memory, some rows at a time, where `model.pieces` gives a
    reason. `dropout_masks`: masks for activations,
    and for scores if stored, are kept for every model. `fused_gate`: silu(gate) is not kept in addition to
    gate. `keeps_gathered`: the inputs of matmuls are kept as gathered over tp, not as token shards; `waits_gathered`:
    the tensors for weight gradients are kept so between I and W. `keeps_outputs`: a pipeline stage keeps its output
    until its backward pass. `receives_ahead`: it has a buffer for each message that it receives in a step
    (`torch.distributed.pipelining`). `selective`: activations that selective recomputation does not keep: "scores" of
    attention; or all except the outputs of the "products" (matmuls) in torchtitan's list, or all except the product
    outputs that the backward pass reads, with the outputs of the all-to-alls of experts, and with eager products
    nothing of a mixture's attention; or the "parts" that a layout names (cost/recompute.py), or, if there are any,
    `recomputed_parts`. `stops_early`: full
    recomputation ends with the last tensor that the backward pass reads, as `torch.utils.checkpoint` does.
    `frees_inputs`: the backward pass of a network frees the input of its last matmul before the gradients of the
    tensors from which it was computed exist. `weighs_outputs`: the outputs of experts are kept, since they are
    multiplied by the router's weights; otherwise the inputs of the experts' last matrices are, and are also kept
    unweighted if no kernel fused with a gate recomputes them. `wide_router`: the router's input is copied to fp32.
    `widens_norms`: eager norms with an offset keep a copy of their input in fp32 instead of their input.
    `pads_values`: value heads are padded to the width of key heads for a fused kernel (latent attention).
    `fp8_input_bytes`: of the kept input of a matmul in fp8; `fp8_weight_bytes`: of the fp8 copies of its weight, plain
    and transposed, that are kept for all micro-batches; `keeps_casts`: weights are cast once a step, and the casts are
    kept. `casts_again`: in fp8 the backward pass computes again the norms and the inner activations that it casts
    (cost/activations.py). `logit_kept_bytes`, `logit_peak_bytes`: for each logit, kept from the loss to its backward
    pass, and the maximum in between; `logit_cut_bytes`: added to that maximum if the vocabulary is sharded over tp.
    `shares_logits`: tp shards the vocabulary of the logits; else each of its ranks gathers all logits for the loss.
    `tp_by_matrix`: each column-parallel matrix gathers its input over tp itself, and reduces the gradient of its input
    itself; each rank of tp has the whole embedding, and without token shards the whole head (plans of PyTorch's
    `ColwiseParallel` and `RowwiseParallel`). `merges_gathers`: then matrices that read one tensor share its gather,
    since torch.compile merges equal nodes of its graph.
    `offloaded_share`: of layers whose activations are on the host with `layout.offload_activations`.
    `logits_together`: the loss overwrites logits with their gradient. Instead of that maximum it has a copy in fp32 of
    this number of logits at a time, and no copy of logits in fp32; 0: it does not overwrite them. `compiles_loss`: then
    with two copies, of logits in fp32 too, unless they are sharded.

    `expands_heads`: keys, values and their gradients have all query heads in the backward pass of attention over a ring
    of cp, and where a kernel needs equal heads (`model.pieces`).
    `pads_rows`: a parameter is sharded by rows, which are padded to a multiple of the ranks and sent so (FSDP2).

    Other memory: `vocabulary_multiple`: the vocabulary is padded to a multiple of this times tp. `workspace_bytes`: of
    libraries, in addition to `workspaces` of matmuls, each as large as the accelerator's; `expert_workspaces`: more of
    these, with experts, whose matmuls run in streams of their own. `fragmentation`: bytes that the allocator reserves
    beyond the tensors, as a fraction; `again_fragmentation`: added to it if whole blocks are recomputed without a
    pipeline: their forward passes leave pieces in which neither logits nor gradients fit; `pools`: beyond the sum of
    the peaks of its pools (cost/pools.py). `of_process`: on a CPU, where the allocator is the C library, the workspace
    is the memory of the process, outside of the fraction, and the fraction is `holes` of small tensors, by ZeRO stage
    (cost/pools.py).
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
    keeps_gradients: bool = True
    reduces_once_in_pipelines: bool = True
    reduces_after_pipelines: bool = False
    sums_whole: bool = False
    accumulates_whole: bool = False
    gathers_in_loss: bool = True
    step_bytes: float = 0.0
    flash_attention: bool = True
    scores_in_kernel: bool = True
    dropout_masks: bool = False
    fused_gate: bool = True
    keeps_gathered: bool = False
    keeps_outputs: bool = False
    receives_ahead: bool = False
    waits_gathered: bool = False
    selective: Literal["scores", "products", "read products", "parts"] = "scores"
    recomputed_parts: tuple[str, ...] = ()
    stops_early: bool = False
    pads_rows: bool = False
    expands_heads: bool = False
    frees_inputs: bool = False
    weighs_outputs: bool = False
    wide_router: bool = False
    widens_norms: bool = False
    pads_values: bool = False
    fp8_input_bytes: float = 2.0
    fp8_weight_bytes: float = 0.0
    keeps_casts: bool = False
    casts_again: bool = False
    logit_kept_bytes: float = 4.0
    logit_peak_bytes: float = 6.0
    logit_cut_bytes: float = 0.0
    shares_logits: bool = True
    tp_by_matrix: bool = False
    merges_gathers: bool = False
    offloaded_share: float = 1.0
    logits_together: float = 0.0
    compiles_loss: bool = False
    vocabulary_multiple: int = 0
    workspace_bytes: float = 64 * MiB
    workspaces: int = 0
    expert_workspaces: int = 0
    fragmentation: float = 0.05
    again_fragmentation: float = 0.0
    pools: bool = False
    of_process: bool = False
    holes: tuple[float, ...] = (0.0,) * 4

    def reduces_each_microbatch(self, pp: int) -> bool:
        """Return whether ZeRO-2 reduces gradients after each micro-batch, with `pp` ranks in the pipeline."""
        return not self.accumulates_whole and (pp == 1 or not self.reduces_once_in_pipelines)

    def library_bytes(self, chip: Accelerator, *, experts: bool) -> float:
        """Return the bytes of all workspaces on an accelerator, of a model with or without experts."""
        count = self.workspaces + self.expert_workspaces * experts
        return self.workspace_bytes + count * chip.workspace_bytes


SHARDWRIGHT = Stack(
    speed=speed.SHARDWRIGHT,
    name="shardwright",
    about="this system: FSDP2, explicit collectives, fused attention, other kernels eager",
    gathers_master=True,
    keeps_gradients=False,
    reduces_once_in_pipelines=False,
    gathers_in_loss=False,
    scores_in_kernel=False,
    fused_gate=False,
    keeps_outputs=True,
    waits_gathered=True,
    weighs_outputs=True,
    wide_router=True,
    widens_norms=True,
    pads_values=True,
    selective="parts",
    stops_early=True,
    pads_rows=True,
    expands_heads=True,
    frees_inputs=True,
    logit_kept_bytes=2.0,
    logits_together=LOGITS_TOGETHER_ON_GPU,
    fragmentation=0.01,
    again_fragmentation=0.03,
    pools=True,
)
SHARDWRIGHT_COMPILED = replace(
    SHARDWRIGHT,
    name="shardwright-compiled",
    about="the same with precision.compile: element-wise operations of a block, and the loss, fused",
    compiles_loss=True,
    fused_gate=True,
    casts_again=True,
    speed=speed.SHARDWRIGHT_COMPILED,
)
MEGATRON = Stack(
    speed=speed.MEGATRON,
    name="megatron",
    about="Megatron-LM and Megatron-DeepSpeed until 2022: scores of attention are stored, gradients in fp32",
    flash_attention=False,
    dropout_masks=True,
    vocabulary_multiple=128,
)
GPT_NEOX = replace(
    MEGATRON,
    name="gpt-neox",
    about="GPT-NeoX: Megatron's parallelism on DeepSpeed, most kernels eager",
    speed=speed.GPT_NEOX,
)
MEGATRON_CORE = Stack(
    speed=speed.MEGATRON_CORE,
    name="megatron-core",
    about="Megatron-LM since 2023: fused attention, distributed optimizer, overlapped data-parallel communication",
    fp8_input_bytes=1.0,
    fp8_weight_bytes=2.0,
    keeps_casts=True,
    vocabulary_multiple=128,
    workspace_bytes=76 * MiB,
    workspaces=1,
    expert_workspaces=4,
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
    reduces_after_pipelines=True,
    stops_early=True,
    step_bytes=4.0,
    fused_gate=False,
    keeps_gathered=True,
    keeps_outputs=True,
    receives_ahead=True,
    selective="products",
    logit_peak_bytes=14.0,
    logit_cut_bytes=4.0,
)
FSDP_FUSED_LOSS = replace(
    FSDP,
    name="fsdp-fused-loss",
    about="the same with a compiled loss alone, as torchtitan's recipes of mixtures have it",
    logit_kept_bytes=2.0,
    logit_peak_bytes=6.0,
    logit_cut_bytes=0.0,
)
FSDP_COMPILED = replace(
    FSDP,
    name="fsdp-compiled",
    about="the same under torch.compile, which fuses element-wise operations",
    speed=speed.COMPILED,
    fused_gate=True,
    merges_gathers=True,
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

NANOTRON = replace(
    FSDP,
    name="nanotron",
    about="nanotron: eager kernels as FSDP's, its own tensor and pipeline parallelism without overlap",
    speed=speed.NANOTRON,
    gradient_bytes=6.0,
    keeps_gathered=False,
    logit_cut_bytes=0.0,
    gathers_master=False,
    reduces_after_pipelines=False,
    receives_ahead=False,
    stops_early=False,
    selective="scores",
)
"""Nanotron accumulates gradients in fp32. Next to them are the gradients of a whole stage in 16 bits: in the buckets of
DistributedDataParallel or, with ZeRO-1, until a backward pass ends (`optim/gradient_accumulator.py`); they are counted
for the whole step. Its column-parallel matrices gather their inputs over tp again in the backward pass
(`tp_recompute_allgather`), and its loss over a sharded vocabulary has no more copies of logits than over a whole one
(`_ShardedCrossEntropy`)."""

STACKS = {
    stack.name: stack
    for stack in (
        SHARDWRIGHT,
        SHARDWRIGHT_COMPILED,
        MEGATRON,
        GPT_NEOX,
        MEGATRON_CORE,
        MEGATRON_CORE_FUSED_LOSS,
        FSDP,
        FSDP_FUSED_LOSS,
        FSDP_COMPILED,
        FSDP_COMPILED_LOSS,
        NANOTRON,
    )
}
