"""The speed of a software stack: fused kernels, overlapped communication, kernel launches.

One set of numbers holds for all runs of a stack. Bytes are the bytes moved in the forward pass for each element of 16
bits, inputs read and outputs written; they follow from the kernels into which an operation is divided.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import ceil, inf
from typing import Any, Literal

from shardwright.cost.calibration import CALIBRATED, OTHERS, Calibration

MATMULS, ELEMENTWISE, TENSOR, CONTEXT, EXPERT, DATA, HOST = (
    "matmuls",
    "element-wise",
    "tensor parallel",
    "context parallel",
    "expert parallel",
    "data parallel",
    "copies to and from the host",
)
"""Kinds of work, the parts of a step's time."""


@dataclass(frozen=True, kw_only=True)
class Speed:
    """The properties of a stack that determine times, the same for all layouts. `kind`: its name in the calibration.

    Element-wise operations, bytes an element: `norm_bytes` of a layernorm; `rmsnorm_bytes` of an RMSNorm, which takes
    several kernels if it is not fused; `residual_bytes` of a residual addition (with its bias); `dropout_bytes` of
    dropout; `heads_bytes` of permuting queries, keys, values and outputs; `rope_bytes` of rotary embedding;
    `gated_bytes` of silu(gate) x up, for each element of the output; `gelu_bytes` of gelu; `permute_bytes` of sorting
    tokens by expert and back; `loss_bytes` of the loss, for each logit, forward and backward together. If `loss_bytes`
    is for logits in fp32, 16-bit logits add `loss_cast_bytes`, and 16-bit logits over tp add `loss_over_tp_bytes`.

    Overlap: `hides_tp_backward`: reductions over tp overlap with the weight gradients; `hides_tp`: matmuls and
    collectives are split into pieces that overlap; `reduces_on`: multiprocessors that then reduce the result of a
    matmul over tp, and that the matmul does not use; `hides_dp`: data-parallel communication overlaps with the forward
    and backward passes; `hides_sums`: the all-reduces of gradients without ZeRO do, even without `hides_dp`;
    `interference`: slowdown of the computation, as a fraction of the time of the communication
    that overlaps with it; `blocking_sends`: a rank of `pp` waits for its messages, and each takes `message_s` in
    addition to the transfer; `scatters_messages`: each rank of tp sends a part of an activation that all of them have;
    `copies_by_node`: tokens of experts cross to a node once, and are sent to a rank once (DeepEP, HybridEP).
    `hides_experts`: messages of experts overlap with the passes of another micro-batch (Megatron-Core's
    `overlap_moe_expert_parallel_comm`).
    `copies_tokens`: collectives on token shards copy the whole tensor, since PyTorch's send along the first dim alone;
    with `hides_tp` only gradients of inputs are copied, which are sums over matrices and in no piece, since its
    kernels read the shards (`torch._inductor.fx_passes.micro_pipeline_tp`).
    `gathers_narrow`: inputs of matmuls of fewer than 16 bits are cast before they are gathered over tp, if the format
    has a scale that all ranks can compute (Transformer Engine; torchtitan with one scale a tensor). `fuses_casts`:
    casts move `MatmulFormat.fused_cast_bytes`.

    Experts: `groups_matmuls`: the matmuls of all experts are one kernel (torch._grouped_mm), not one for each expert
    (Transformer Engine's GroupedLinear); `waits_for_counts`: the host reads the number of tokens of each expert, and
    then launches the rest of the layer, while no kernel runs.

    `merge_bytes`: moved for each element of attention's output and each rank of cp except one, if gathered keys and
    values are read block by block, and results merged by their log-sum-exp: by PyTorch in fp32, a cast (6), a
    difference (12), a product (8) and a difference (12).

    `sum_bytes`: moved for each element of a weight's gradient when it is added to a sum in fp32, for each micro-batch.

    `matmul_gain`: rate of matmuls relative to PyTorch's of the same die and format (Transformer Engine and hand-tuned
    settings choose kernels by trial). `kernel_share`: bandwidth of the stack's element-wise kernels relative to fused
    kernels. `flash_gain`: rate of attention relative to the kernels of 2023 to which `flash_share` is fitted.
    FlashAttention-2 in today's PyTorch reaches 335 TFLOP/s forward and backward on H100 (arXiv 2307.08691, section
    4.1),
    1.4 times the rate of 2023; later kernels reach more (FlashAttention-3, arXiv 2407.08608, figure 5).

    Host: `launch_s`: seconds to launch all kernels of one layer forward; `launch_backward`: the same backward, relative
    to it; `adds_launches`: launches take the time of the device itself, since it is the host, or since the host waits
    for each kernel (CUDA_LAUNCH_BLOCKING); then `head_launches`:
    launches of embedding, head and loss relative to a layer; `step_s`: overhead of a step; `bucket_s`: to gather or
    reduce the parameters of a message, beyond the collective; `part_s`: to copy a rank's part of a gathered tensor to
    its place, if each is copied alone. `in_step`: by kind of work, the time of its messages in a step relative to their
    time alone (1 if absent); computation on the same processor slows them down.

    `attention`: the kernel of `ATTENTION` whose rate replaces `flash_gain` on the dies listed there, and which computes
    heads of `kernel_width`; empty: the stack's own. `attention_share`: fraction of the rate in 16 bits that a kernel
    reaches; 0: `flash_gain` times the fitted one.
    `latent_gain`: rate with latent attention, whose heads are wider for keys than for values, relative to other heads.
    `graphs`: parts of a step that are replayed as CUDA graphs, whose launches the host does not repeat: "none",
    "blocks" (a layer, without its experts), "step" (experts too). `gathers_casts`: ZeRO gathers weights in the format
    of the matmuls, where the format has one scale a tensor or a block, instead of in 16 bits.

    `by_die`: numbers that replace this stack's numbers on a die.

    `copies_parameters`: after a gather each parameter is copied out of the message, and before a reduction each
    gradient is cast into it, by kernels that run alone (FSDP2; FSDP1's parameters are views of the message).

    `bucket_elements`: parameters whose gradients are reduced, or which are gathered, in one message; 0: one block, as
    FSDP does; infinite: all of a rank. Megatron-Core has at least a million for each rank, unless its `bucket_size` is
    stated (`bucket_stated`). A message has at least one tensor.

    `reduce_bytes`: of an element in gradient reductions, 2 if 16-bit gradients are reduced without a cast, even if they
    are accumulated in fp32; `optimizer_bytes`: moved for each parameter by Adam.
    """

    kind: str = "shardwright"
    norm_bytes: float = 4.0
    rmsnorm_bytes: float = 4.0
    residual_bytes: float = 6.0
    dropout_bytes: float = 1.0
    heads_bytes: float = 4.0
    rope_bytes: float = 4.0
    gated_bytes: float = 6.0
    gelu_bytes: float = 4.0
    permute_bytes: float = 12.0
    loss_bytes: float = 16.0
    loss_cast_bytes: float = 0.0
    loss_over_tp_bytes: float = 0.0
    hides_tp_backward: bool = False
    hides_tp: bool = False
    reduces_on: int = 0
    hides_dp: bool = True
    hides_sums: bool = False
    interference: float = 0.2
    blocking_sends: bool = False
    scatters_messages: bool = False
    message_s: float = 20e-6
    copies_by_node: bool = False
    copies_tokens: bool = False
    copies_parameters: bool = False
    hides_experts: bool = False
    gathers_narrow: bool = False
    fuses_casts: bool = False
    groups_matmuls: bool = True
    waits_for_counts: bool = False
    sum_bytes: float = 0.0
    merge_bytes: float = 0.0
    flash_gain: float = 1.0
    kernel_share: float = 1.0
    matmul_gain: float = 1.0
    launch_s: float = 0.5e-3
    launch_backward: float = 1.7
    adds_launches: bool = False
    head_launches: float = 0.0
    step_s: float = 10e-3
    bucket_s: float = 0.0
    part_s: float = 0.0
    in_step: Mapping[str, float] = field(default_factory=dict, hash=False)
    attention: str = ""
    attention_share: float = 0.0
    latent_gain: float = 1.0
    graphs: Literal["none", "blocks", "step"] = "none"
    gathers_casts: bool = False
    by_die: Mapping[str, Mapping[str, float]] = field(default_factory=dict, hash=False)
    bucket_elements: float = 0.0
    bucket_stated: bool = False
    reduce_bytes: float = 2.0
    optimizer_bytes: float = 38.0

    def slowdown(self, kind: str) -> float:
        """Return the time of messages of a kind of work in a step, relative to their time alone."""
        return self.in_step.get(kind, 1.0)

    def on(self, die: str) -> "Speed":
        """Return this stack on accelerators of a die."""
        given: dict[str, Any] = dict(self.by_die.get(die, {}))
        kernel = ATTENTION.get(self.attention, {})
        given |= kernel.get(die, kernel.get(OTHERS, {}))
        return replace(self, **given) if given else self

    def kernel_width(self, width: float) -> float:
        """Return the width to which the attention kernel pads a head of `width` elements: FlashAttention-1 to 32, 64 or
        128 (`run_fmha_fwd`), FlashAttention-2 to a multiple of 32 (`HEADDIM_SWITCH`). Others are assumed not to pad."""
        if self.attention == "fa1":
            return next((padded for padded in (32.0, 64.0, 128.0) if width <= padded), width)
        return ceil(width / 32) * 32.0 if self.attention in ("fa2", "flash-attn") else width

    def calibrated(self, by: Calibration) -> "Speed":
        """Return this stack with its fitted numbers."""
        fitted: dict[str, Any] = {**by.host, **by.stacks.get(self.kind, {})}
        return replace(self, **fitted)


FLASH_2 = 1.4
"""`flash_gain` of FlashAttention-2 in PyTorch since 2024."""
FLASH_2_A100 = 1.92
"""`flash_gain` of FlashAttention-2 on A100, where `flash_share` is the rate of FlashAttention-1: the mean ratio of both
at 2,048 to 8,192 tokens (arXiv 2307.08691, figure 4)."""
FLASH_2_B200 = 0.734 * FLASH_2 * CALIBRATED.flash_share["h100"]
"""Share of FlashAttention-2 on B200, where it runs the instructions of H100: the rate on H100 times 148 / 132
multiprocessors, relative to the rates of matmuls in 16 bits on both dies."""
CUDNN_B200 = CALIBRATED.stacks["megatron-core"]["flash_gain"]
"""`flash_gain` of cuDNN on B200, the kernel of Megatron-Core there: "tuned attention" of docs/cost-model.md."""


def _gain(value: float) -> dict[str, float]:
    return {"attention_share": 0.0, "flash_gain": value}


def _share(value: float) -> dict[str, float]:
    return {"attention_share": value, "flash_gain": 1.0}


ATTENTION: dict[str, dict[str, dict[str, float]]] = {
    "fa1": {"a100-80gb": _gain(1.0)},
    "fa2": {
        "a100-80gb": _gain(FLASH_2_A100),
        "h100": _gain(FLASH_2),
        "b200": _share(FLASH_2_B200),
        OTHERS: _gain(FLASH_2),
    },
    "fa3": {"h100": _share(0.735)},
    "fa4": {"b200": _gain(1.14 * CUDNN_B200)},
    "cudnn": {"h100": _share(0.735), "b200": _gain(CUDNN_B200)},
    "cudnn-fp8": {
        "h100": _share(0.9 * 0.735),
        "b200": {**_gain(1.13 * CUDNN_B200), "latent_gain": 1.48},
    },
    "cudnn-mxfp8": {"b200": {**_gain(CUDNN_B200), "latent_gain": 1.34}},
    "flash-attn": {"h100": _share(0.52)},
}
"""Rates of attention kernels on the dies that have them: a share of the rate in 16 bits where the kernel was measured
or its rate is published, otherwise a gain relative to `Calibration.flash_share` of the die.

On A100 `flash_share` is the rate of FlashAttention-1. cuDNN on H100 was measured on an H200
(benchmarks/results/gpu-2026-11-27.md); FlashAttention-3 is as fast there from 4,096 tokens on (arXiv 2407.08608,
figures 5 and 6). "flash-attn" is FlashAttention-2 of the package flash-attn at its published rates (arXiv 2307.08691,
figures 4 and 7). FlashAttention-4 takes 1.05 to 1.3 times less than cuDNN 9.13 (arXiv 2603.05451). "cudnn-fp8" has one
scale a tensor, "cudnn-mxfp8" one for 32 elements. Their rates relative to bf16 are medians of NVIDIA's own measurements
with cuDNN 9.17 to 9.22, forward and backward with a causal mask, at 4,096 and 8,192 tokens (cudnn-frontend,
benchmark/sdpa_benchmark_training): 1.13 and 1.00 on GB200 and GB300 with heads of 128, 1.67 and 1.34 with latent
attention's heads of 192 and 128, and 0.90 and none on H200.
"""
AMPERE = {"a100-80gb": ATTENTION["fa2"]["a100-80gb"]}
"""Rates of today's PyTorch on A100: FlashAttention-2."""
MEGATRON = Speed(
    kind="megatron",
    hides_dp=False,
    blocking_sends=True,
    scatters_messages=True,
    rope_bytes=20.0,
    loss_bytes=30.0,
    bucket_elements=inf,
).calibrated(CALIBRATED)
"""Rotary embedding in eager kernels: two products (8 bytes an element), a negated half (2), a concatenation (4) and a
sum (6)."""
SCRIPTED_ROPE_BYTES = 12.0
"""`rope_bytes` in fp16, where TorchScript fuses the products and the sum of Megatron-DeepSpeed and GPT-NeoX: 6 bytes an
element, a negated half (2) and a concatenation (4). In bf16 it does not (`apply_rotary_pos_emb_torch` there)."""
PACKED_HEADS_BYTES = 28.0
"""`heads_bytes` of GPT-NeoX with fused attention: queries, keys and values are copied from [s, b] to [b, s] and
concatenated (8 bytes an element each), and the output is copied back (4)."""
MEGATRON_CORE = Speed(
    kind="megatron-core",
    hides_tp_backward=True,
    hides_tp=True,
    reduces_on=16,
    by_die={"b200": {"reduces_on": 1}},
    flash_gain=1.7,
    reduce_bytes=4.0,
    bucket_elements=4e7,
    gathers_narrow=True,
    fuses_casts=True,
    groups_matmuls=False,
    waits_for_counts=True,
    sum_bytes=8.0,
).calibrated(CALIBRATED)
"""Transformer Engine reduces the results of a layer's two row-parallel matmuls on 16 multiprocessors, and gives the
matmuls the others (`pytorch/module/base.py`, method "pipeline"; NeMo's recipes for H100 state 8 to 24). Recipes for
B200 use copy engines and 1 (`tp_overlap_configs/userbuffers.py`)."""
FSDP = Speed(
    kind="fsdp",
    copies_parameters=True,
    rmsnorm_bytes=36.0,
    rope_bytes=20.0,
    gated_bytes=10.0,
    loss_bytes=36.0,
    reduce_bytes=4.0,
    merge_bytes=38.0,
).calibrated(CALIBRATED)
"""Eager kernels. An RMSNorm in 16 bits is a cast to fp32 (6 bytes an element), a square (8), a mean (4), a product with
the reciprocal root (8), a cast (6) and a product with the weight (4). `nn.RMSNorm` of PyTorch 2.9 and later is one
kernel, as a LayerNorm is (column `fused_norms` of a table of runs)."""
GPT_NEOX = replace(MEGATRON, kernel_share=FSDP.kernel_share, residual_bytes=10.0, gated_bytes=10.0)
"""Eager kernels, also of a residual addition: a bias (4 bytes an element) and a sum (6). Ignored: with parallel
branches their outputs are reduced over tp together."""
NANOTRON = replace(
    FSDP,
    kind="nanotron",
    copies_parameters=False,
    rmsnorm_bytes=4.0,
    rope_bytes=4.0,
    flash_gain=FLASH_2,
    by_die={**AMPERE, "h100": ATTENTION["flash-attn"]["h100"]},
    hides_dp=False,
    hides_sums=True,
    blocking_sends=True,
    part_s=10e-6,
)
"""Nanotron's norms and rotary embedding are fused kernels (TritonRMSNorm, flash_attn's RotaryEmbedding), and its
attention is the package flash-attn (`flash_attn_varlen_func`), not PyTorch's own copy of FlashAttention-2. Without ZeRO
PyTorch's DistributedDataParallel overlaps the all-reduces of gradients with the backward pass. ZeRO-1 gathers
all weights in one message, and its host copies the part of each rank of each tensor alone (`all_gather_coalesced`).
A copy takes PyTorch 4 us on a CPU, and about as much again to launch the kernel."""
COMPILED = Speed(
    kind="fsdp-compiled",
    copies_parameters=True,
    flash_gain=FLASH_2,
    by_die=AMPERE,
    reduce_bytes=4.0,
    gathers_narrow=True,
    fuses_casts=True,
    merge_bytes=38.0,
    copies_tokens=True,
).calibrated(CALIBRATED)
HOPPER = {
    "matmul_gain": 0.99 / CALIBRATED.product_share["h100"]["bf16"],
    "kernel_share": 0.918 / CALIBRATED.memory_share,
    **ATTENTION["cudnn"]["h100"],
}
"""Rates of PyTorch 2.11 on an H200, which no fit to other software moves: a step of 1.7B has 229 ms of matmuls (266 ms
at a share of 0.855), and 68 ms of attention by cuDNN, which PyTorch selects there; with element-wise kernels at 0.918
of their best bandwidth four runs take within 4 % of their plans (benchmarks/results/gpu-2026-11-27.md)."""
SHARDWRIGHT_COMPILED = Speed(
    kind="shardwright-compiled",
    copies_parameters=True,
    hides_tp_backward=True,
    flash_gain=FLASH_2,
    by_die={**AMPERE, "h100": HOPPER},
    reduce_bytes=4.0,
    loss_bytes=36.0,
    loss_cast_bytes=6.0,
    loss_over_tp_bytes=42.0,
).calibrated(CALIBRATED)
# Of the loss (parallel/loss.py), what each kernel reads and writes for each logit, w = 4 bytes of fp32 and e = 2:
#   fp32, in place   amax w; less the largest 2 w; exp 2 w; sum w; times the factor 2 w; in I times the gradient 2 w
#   16 bits          amax e; cast e + w; less the largest 2 w; exp 2 w; sum w; times the factor 2 w; cast back w + e;
#                    in I cast, times the gradient, cast back 2 (w + e) + 2 w
#   16 bits over tp  the exponentials are computed once more, when their sums are known: e + w + 4 w
# 40, 62 and 84. Compiled, the kernels that torch.compile makes of it (PyTorch 2.13), where tp has none:
#   fp32             amax w; exp and its sum 2 w; times the factor 2 w; copy into the logits 2 w; in I as above 2 w
#   16 bits          amax e; exp and its sum e + w; times the factor 2 w; copy into the logits w + e; in I as above
# 36 and 42. Ignored: over tp in fp32, 4 more.
SHARDWRIGHT = replace(
    SHARDWRIGHT_COMPILED,
    kind="shardwright",
    rmsnorm_bytes=9.0,
    rope_bytes=36.0,
    gated_bytes=11.5,
    loss_bytes=40.0,
    loss_cast_bytes=22.0,
    loss_over_tp_bytes=22.0,
).calibrated(CALIBRATED)
