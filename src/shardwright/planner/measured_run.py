"""Convert a measured run into a job and a layout that the cost model can price, or give the reason why not."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from shardwright.cost import memory
from shardwright.cost.formats import FORMATS
from shardwright.cost.hardware import accelerator
from shardwright.cost.job import Candidates, Job
from shardwright.cost.recompute import FOREIGN_PARTS
from shardwright.cost.speed import ATTENTION, MEGATRON_CORE, PACKED_HEADS_BYTES, SCRIPTED_ROPE_BYTES
from shardwright.cost.stack import STACKS, Stack
from shardwright.layout.layout import Layout
from shardwright.model.sections import LatentAttentionSpec, MoESpec
from shardwright.model.spec import ModelSpec
from shardwright.planner.run_columns import MeasuredRun
from shardwright.planner.run_layout import candidates_of, cluster_of, priced_schedule, rule_problems, with_columns
from shardwright.schedule.registry import find
from shardwright.system.errors import InputError
from shardwright.system.units import GiB

PRECISIONS = {name: name for name in FORMATS} | {"fp8-tensor": "fp8"}
"""Cost model's name of each number format of a table."""
STACK = {"deepspeed": "megatron", "automodel": "fsdp-compiled", "other": "megatron-core"}
"""Software of a table that is priced as other software."""
FUSED_LOSS = {
    "megatron-core": "megatron-core-fused-loss",
    "fsdp": "fsdp-fused-loss",
    "fsdp-compiled": "fsdp-compiled-loss",
}
PARTS = {"core_attn": "attention", "mla_up_proj": "mla_up", "layernorm": "norms"} | {
    name: name for name in FOREIGN_PARTS
}
"""Modules that Megatron-Core recomputes, and their names in `layout.recompute_modules` or `cost.recompute`."""
DEEPSPEED = ("deepspeed", "gpt-neox")
OF_MEGATRON = ("megatron", *DEEPSPEED)
"""Stacks with the kernels of Megatron-LM of 2022."""
PYTORCH = ("fsdp", "fsdp-compiled", "automodel")
"""Stacks whose optimizer is PyTorch's AdamW, whose moments have the type of the weights that it updates."""
FLEX_SINCE = "2026"
"""First date from which recipes of Megatron-Core dispatch by DeepEP or HybridEP, for rows that do not state the
dispatch (Megatron-Bridge, scripts/performance/configs)."""
COMPILED_LOSS_SINCE = "2025"
"""First date from which the loss is compiled with the model, in trainers with torch.compile (torchtitan)."""
FLASH_2_SINCE = "2023-07"
"""First date of FlashAttention-2 (arXiv 2307.08691)."""
FSDP_2_SINCE = "2024-06"
"""First date of FSDP2 (`fully_shard` of PyTorch 2.4, torchtitan), which copies parameters from and to its messages."""
EARLY_STOP_SINCE = "2023-10"
"""First date from which `torch.utils.checkpoint` stops at the last tensor that the backward pass reads (2.1)."""
FUSED_NORMS_SINCE = "2025-10"
"""First date from which `nn.RMSNorm` of PyTorch is one CUDA kernel (2.9, `aten::_fused_rms_norm`)."""
CUDNN_SINCE = "2026"
"""First date from which PyTorch's own attention on Hopper is cuDNN's."""
CUDNN_9_SINCE = "2024-06"
"""First date from which Megatron-Core's attention on Hopper is cuDNN 9 instead of the package flash-attn: NeMo's
recipes switch cuDNN off until container 24.03.01 (NeMo-Framework-Launcher, launcher_scripts/conf/config.yaml)."""
GRAPHS_SINCE = "2025-05"
"""First date from which recipes of Megatron-Core run dense models on Blackwell as CUDA graphs (MLPerf Training 5.0)."""
FSDP_PIPELINES_SINCE = "2024-10"
"""First date from which `torch.distributed.pipelining` runs stages of FSDP2 (PyTorch 2.5); earlier rows have a pipeline
of their own."""
WHOLE_GRAPHS_SINCE = "2026-06"
"""First date from which Megatron-Core's recipes of mixtures in 4 and 8 bits in racks run a whole step as one CUDA
graph, overlap the messages of experts with passes of another micro-batch, multiply all experts in one kernel, and in
mxfp8 compute attention in 8 bits (Megatron-Bridge, function `_enable_hybridep_full_iteration_mxfp8` of
`perf_recipes/qwen/common.py`)."""
FP8_GATHERS_SINCE = "2024-06"
"""First date from which recipes of Megatron-Core in fp8-tensor gather weights in fp8 (MLPerf Training 4.0)."""
PERMUTED_BY_RANK = 8.0
"""`Speed.permute_bytes` of DeepEP and HybridEP. The receiver copies tokens for their experts, and sums them before they
are sent back; the sender does not sort."""
ELEMENT_BYTES = {"bf16": 2.0, "fp16": 2.0, "fp32": 4.0}


@dataclass(frozen=True, kw_only=True)
class PredictableRun:
    """A row of a table that can be predicted. `row`: its line. `assumed`: by the table and by the cost model."""

    row: int
    measured: MeasuredRun
    job: Job
    candidates: Candidates
    assumed: tuple[str, ...] = ()

    def predicted_peak_gib(self) -> float:
        """Return the peak of the memory model, in the same unit as `measured.peak_mem_gib`."""
        estimate = memory.estimate_memory(self.job, self.candidates)
        ranks = estimate.rank_bytes[0]
        if self.measured.peak_mem_from == "reserved":
            ranks = ranks + estimate.lost_bytes[0]
        peak = {"first": ranks[0], "last": ranks[-1]}.get(self.measured.peak_mem_rank, ranks.max())
        return float(peak) / GiB


@dataclass(frozen=True)
class SkippedRun:
    """A row that is not predicted, and the reason."""

    row: int
    measured: MeasuredRun
    reason: str


def prepared(line: int, row: MeasuredRun) -> PredictableRun | SkippedRun:
    """Prepare a row for its prediction; `line`: its line in the file."""
    if row.usable == "no":
        return SkippedRun(line, row, row.why_not)
    try:
        if reason := next(_not_priced(row), None):
            return SkippedRun(line, row, reason)
        # Schedules with a fixed number of stages do not name it.
        schedule = priced_schedule(row)
        virtual = row.virtual_stages if find(schedule).virtual_stages_tried else None
        piped = Layout(pp=row.pp, pp_schedule=schedule).changed(virtual_stages=virtual)
        job = Job(
            model=_model(row),
            cluster=cluster_of(row),
            seq_len=row.seq_len,
            global_batch=row.global_batch,
            precision=PRECISIONS[row.precision],
            stack=stack_of(row, accelerator(row.accelerator).die),
        )
        candidates = candidates_of(row, piped)
    except InputError as error:
        return SkippedRun(line, row, with_columns(error.problems[0]))
    if reason := next(rule_problems(job, candidates, piped), None):
        return SkippedRun(line, row, with_columns(reason))
    return PredictableRun(row=line, measured=row, job=job, candidates=candidates, assumed=tuple(_assumed(row)))


def _not_priced(row: MeasuredRun) -> Iterator[str]:
    """Yield the choices of the row for which the cost model has no figures or formulas.

    Raises InputError for an accelerator that is not listed.
    """
    die = accelerator(row.accelerator).die
    if row.offload != "none" and not accelerator(row.accelerator).host_bytes_per_s:
        yield f"offload={row.offload} has no price on {row.accelerator}, which has no host_gb_per_s; priced: none"
    yield from software_problems(row, die)
    if row.window:
        yield "sliding-window attention has no price"


def software_problems(row: MeasuredRun, die: str) -> Iterator[str]:
    """Yield the properties of the row's software that have no price on a die, with the valid ones."""
    if row.attention and die not in ATTENTION[row.attention]:
        priced = ", ".join(name for name, dies in ATTENTION.items() if die in dies)
        yield f"attention={row.attention} has no price on {row.accelerator}; priced there: {priced or 'none by name'}"
    if row.overlap_ep and (row.stack != "megatron-core" or not row.experts):
        without = "" if row.experts else " without experts"
        yield f"overlap_ep=1 has no price with stack {row.stack}{without}; priced with megatron-core and experts"
    if row.zero_pp_gather and row.stack not in PYTORCH:
        yield f"zero_pp_gather has no price with stack {row.stack}; priced with {', '.join(PYTORCH)}"
    if row.fused_norms is not None and row.stack != "fsdp":
        yield f"fused_norms has no price with stack {row.stack}; priced with fsdp"
    if row.bucket_parameters is not None and row.stack != "megatron-core":
        yield f"bucket_parameters has no price with stack {row.stack}; priced with megatron-core"
    if row.fused_loss and STACK.get(row.stack, row.stack) not in FUSED_LOSS:
        yield f"fused_loss=1 has no price with stack {row.stack}; priced with {', '.join(FUSED_LOSS)}"


def _core_attention(row: MeasuredRun) -> bool:
    """Return whether the row recomputes core attention, which is Megatron's "selective", given by the module's name."""
    return row.recompute == "selective:core_attn" and STACKS[STACK.get(row.stack, row.stack)].selective == "scores"


def _parts(row: MeasuredRun) -> tuple[str, ...]:
    """Return the parts of a layer that a row recomputes, converted from Megatron's names to a layout's names; empty if
    the row names none, or the core of attention alone in a stack whose selective recomputation is that."""
    kind, _, modules = row.recompute.partition(":")
    if kind != "selective" or not modules or _core_attention(row):
        return ()
    return tuple(PARTS[name] for name in modules.split("+"))


def _assumed(row: MeasuredRun) -> Iterator[str]:
    if row.note:
        yield row.note
    if row.stack == "nanotron" and row.pp > 1:
        yield "layers dealt by weights, as nanotron does"
    if row.moe_dispatch is None and _copies_by_node(row):
        yield "tokens of experts cross to a node once, as in recipes of that year"
    if row.attention is None and _attention(row, accelerator(row.accelerator).die) == "flash-attn":
        yield "attention of the package flash-attn, as in NeMo's recipes of that year"
    if row.overlap_ep is None and _overlaps_experts(row):
        yield "messages of experts overlap with another micro-batch, in one CUDA graph, as in recipes of that year"
    if (priced := priced_schedule(row)) != row.schedule:
        yield f"{row.schedule} of Megatron-LM is ZB-2p, a searched schedule: priced as {priced}"
    if row.stack in STACK:
        yield f"stack {row.stack} priced as {STACK[row.stack]}"


def _model(row: MeasuredRun) -> ModelSpec:
    latent, moe = None, None
    if row.mla_kv_rank is not None:
        latent = LatentAttentionSpec(
            kv_rank=row.mla_kv_rank,
            q_rank=row.mla_q_rank,
            nope_dim=row.mla_nope,
            rope_dim=row.mla_rope,
            v_dim=row.mla_v,
        )
    if row.experts is not None:
        moe = MoESpec(
            n_experts=row.experts,
            top_k=row.top_k,
            d_ffn=row.expert_ffn,
            n_shared=row.shared_experts,
            first_dense=row.dense_layers,
            # The score of the only expert is its weight.
            normalise=row.top_k > 1,
        )
    return ModelSpec(
        n_layers=row.layers,
        d_model=row.d_model,
        n_heads=row.heads,
        n_kv_heads=row.heads if latent else row.kv_heads,
        head_dim=latent.v_dim if latent else row.head_dim,
        d_ffn=row.d_ffn,
        vocab_size=row.vocab,
        max_seq_len=row.seq_len,
        norm="rmsnorm" if row.gated else "layernorm",
        activation="swiglu" if row.gated else "gelu_tanh",
        positions="learned" if row.positions == "learned" else "rope",
        rope_fraction=row.rotary_fraction,
        bias=row.bias,
        qk_norm=row.qk_norm,
        tied_embedding=row.tied,
        dropout=row.dropout,
        moe=moe,
        latent_attention=latent,
        mtp_modules=int(row.mtp),
    )


def stack_of(row: MeasuredRun, die: str) -> Stack:
    """Return the row's software on a die, with the kernels, types and overlaps that the row states."""
    name = STACK.get(row.stack, row.stack)
    fused = _fused_loss(row) if row.fused_loss is None else row.fused_loss
    stack = STACKS[FUSED_LOSS[name] if fused else name]
    speed = stack.speed
    speed = replace(speed, attention=_attention(row, die), graphs=_graphs(row, die), gathers_casts=_gathers_casts(row))
    if _fused_norms(row):
        speed = replace(speed, rmsnorm_bytes=speed.norm_bytes)
    if row.flash is not None:
        stack = replace(stack, flash_attention=row.flash)
    if row.stack in DEEPSPEED and row.precision == "fp16":
        speed = replace(speed, rope_bytes=SCRIPTED_ROPE_BYTES)
    if row.stack == "gpt-neox" and stack.flash_attention:
        speed = replace(speed, heads_bytes=PACKED_HEADS_BYTES)
    if row.grad_dtype is not None:
        speed = replace(speed, reduce_bytes=ELEMENT_BYTES[row.grad_dtype])
        stack = replace(stack, reduced_bytes=ELEMENT_BYTES[row.grad_dtype])
    if row.grad_dtype == "fp32" and row.stack in OF_MEGATRON:
        # The gradient of each micro-batch is written in 16 bits, read, and added to a sum in fp32. DeepSpeed's
        # BF16_Optimizer writes and reads a copy in fp32 before it adds (update_hp_grads), and all-reduces the sums.
        deepspeed = row.stack in DEEPSPEED and row.precision == "bf16"
        speed = replace(speed, sum_bytes=20.0 if deepspeed else 12.0)
        stack = replace(stack, sums_whole=deepspeed)
    if row.optimizer_dtype is not None:
        stack = replace(stack, state_bytes=ELEMENT_BYTES[row.optimizer_dtype])
    stack = _with_memory(row, stack)
    if row.overlap_tp is not None:
        # Without userbuffers Transformer Engine still reduces an input's gradient beside the weight gradients.
        speed = replace(speed, hides_tp=row.overlap_tp)
    if _overlaps_experts(row) if row.overlap_ep is None else row.overlap_ep:
        speed = replace(speed, hides_experts=True, groups_matmuls=True)
    if row.blocking_launches:
        speed = replace(speed, adds_launches=True)
    if row.bucket_parameters is not None:
        speed = replace(speed, bucket_elements=float(row.bucket_parameters), bucket_stated=True)
    if row.overlap_dp is not None:
        speed = replace(speed, hides_dp=row.overlap_dp, hides_sums=row.overlap_dp)
        if row.overlap_dp and speed.bucket_elements == inf:
            # One message of all parameters has no pass to overlap with: Megatron-LM's option came with buckets.
            speed = replace(speed, bucket_elements=MEGATRON_CORE.bucket_elements)
    if row.overlap_dp or _month(row.date) < FSDP_PIPELINES_SINCE:
        stack = replace(stack, reduces_after_pipelines=False)
    if _month(row.date) < FSDP_2_SINCE:
        speed = replace(speed, copies_parameters=False)
    if row.date < EARLY_STOP_SINCE:
        stack = replace(stack, stops_early=False)
    if _parts(row):
        stack = replace(stack, selective="parts", recomputed_parts=_parts(row))
    if _copies_by_node(row):
        speed = replace(speed, copies_by_node=True, permute_bytes=PERMUTED_BY_RANK)
    return replace(stack, speed=speed)


def _fused_loss(row: MeasuredRun) -> bool:
    return row.stack == "fsdp-compiled" and row.date >= COMPILED_LOSS_SINCE


def _fused_norms(row: MeasuredRun) -> bool:
    """Return whether an eager RMSNorm is one kernel: stated by the row, or by its date."""
    stated = row.fused_norms if row.fused_norms is not None else _month(row.date) >= FUSED_NORMS_SINCE
    return row.stack == "fsdp" and stated


def _with_memory(row: MeasuredRun, stack: Stack) -> Stack:
    """Return the stack with the types and shards of weights, gradients and logits that the row states."""
    master = row.master_dtype or (row.optimizer_dtype if row.stack in PYTORCH else None)
    if master in ("bf16", "fp16") and row.precision != "fp32":
        # A weight is its own master, and its gradient has its type.
        n_bytes = ELEMENT_BYTES[master]
        stack = replace(stack, master_bytes=n_bytes * stack.gathers_master, gradient_bytes=n_bytes)
    whole = row.whole_gradients
    if whole is None:  # FSDP2 adds the gradients of micro-batches in the type of their reduction only if they are whole
        whole = row.stack in PYTORCH and master == "bf16" and row.grad_dtype == "fp32"
    stack = replace(stack, accumulates_whole=whole)
    if row.offload.startswith("activations"):
        stack = replace(stack, offloaded_share=min(1.0, int(row.offload.partition(":")[2]) / row.layers))
    if row.logit_peak_bytes is not None:
        stack = replace(stack, logit_peak_bytes=row.logit_peak_bytes)
    by_matrix = (row.whole_logits and row.stack in PYTORCH) if row.tp_by_matrix is None else row.tp_by_matrix
    return replace(stack, shares_logits=not row.whole_logits, tp_by_matrix=by_matrix)


def _attention(row: MeasuredRun, die: str) -> str:
    """Return the attention kernel: stated by the row, or by stack and date; empty: the stack's own."""
    if row.attention is not None:
        return row.attention
    if row.stack == "automodel":
        return "cudnn"
    if _overlaps_experts(row) and row.precision == "mxfp8":
        return "cudnn-mxfp8"
    if row.stack == "megatron-core" and die == "h100" and row.date and _month(row.date) < CUDNN_9_SINCE:
        return "flash-attn"
    if row.stack in OF_MEGATRON and row.flash and die == "a100-80gb":
        return "fa1" if row.date < FLASH_2_SINCE else "fa2"
    if row.stack == "fsdp-compiled" or (row.stack == "fsdp" and row.date >= "2024"):
        return "cudnn" if die in ATTENTION["fa3"] and row.date >= CUDNN_SINCE else "fa2"
    return ""


def _month(date: str) -> str:
    """Return the month of a date; of a year alone, the last one."""
    return date if len(date) > len("2024") else f"{date}-12"


def _graphs(row: MeasuredRun, die: str) -> Any:
    """Return the parts of a step that are CUDA graphs: stated by the row, or as recipes of Megatron-Core have them: for
    dense models on Blackwell, and for mixtures in racks."""
    if row.cuda_graphs is not None:
        return row.cuda_graphs
    if row.stack != "megatron-core":
        return "none"
    if row.experts:
        whole = _overlaps_experts(row)
        return "step" if whole else "blocks" if (row.per_domain or 0) > 8 else "none"
    return "step" if die == "b200" and row.date >= GRAPHS_SINCE else "none"


def _overlaps_experts(row: MeasuredRun) -> bool:
    """Return whether the row's recipe is one of `WHOLE_GRAPHS_SINCE`. A pipeline needs several chunks on a rank."""
    in_rack = row.stack == "megatron-core" and bool(row.experts) and (row.per_domain or 0) > 8
    return (
        in_rack
        and row.precision in ("mxfp8", "nvfp4")
        and row.date >= WHOLE_GRAPHS_SINCE
        and ((row.pp or 1) == 1 or (row.virtual_stages or 1) > 1)
    )


def _gathers_casts(row: MeasuredRun) -> bool:
    """Return whether weights are gathered in the format of the matmuls: stated, or by stack and date."""
    if row.gather_dtype is not None:
        return row.gather_dtype == "fp8"
    return row.stack == "megatron-core" and row.precision == "fp8-tensor" and row.date >= FP8_GATHERS_SINCE


def _copies_by_node(row: MeasuredRun) -> bool:
    """Return whether a token crosses to a node once for all its experts there: stated by the row, or by its date."""
    if row.moe_dispatch is not None or not row.experts:
        return row.moe_dispatch in ("deepep", "hybridep")
    return row.stack == "megatron-core" and (row.date or "") >= FLEX_SINCE
