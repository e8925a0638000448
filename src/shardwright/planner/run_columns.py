"""The columns of a table of measured runs, with their meanings and valid cells.

`docs/measured-runs.md` is generated from this list. An empty cell was not stated by the source and is None here,
unless the column's help gives it a meaning.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from decimal import Decimal
from functools import cache
from typing import Any

from shardwright.cost.hardware import accelerator
from shardwright.schedule import registry
from shardwright.schedule.named import ONE_F_ONE_B
from shardwright.system.errors import InputError

MODULES = ("core_attn", "layernorm", "mlp", "moe", "moe_act", "mla_up_proj", "shared_experts")
"""Modules that `recompute` may list, by Megatron's names."""


@dataclass(frozen=True)
class RunColumn:
    """A column of a table. `rule`: description of the valid cells. `valid`: checks a cell that is not empty. `convert`:
    converts it to a value. `empty`: the meaning of an empty cell. `needed`: when a cell may not be empty: "always", in
    usable rows ("usable"), in usable rows with a pipeline ("pp"), and in rows with experts ("experts"), with latent
    attention ("mla") or with a peak ("peak"). `optional`: a table may lack the column, as if its cells were empty."""

    help: str
    rule: str
    valid: Callable[[str], object]
    convert: Callable[[str], Any]
    empty: Any = None
    needed: str = ""
    optional: bool = False

    def read(self, text: str) -> Any:
        """Return the value of a cell. Raises ValueError with the rule that the cell breaks."""
        if text and not self.valid(text):
            raise ValueError(f"valid: {self.rule}")
        return self.convert(text) if text else self.empty


def _column(*column: Any) -> Any:
    return field(metadata={"column": RunColumn(*column)})


def text_column(help: str, needed: str = "") -> Any:
    """Return a column of text."""
    return _column(help, "text", len, str, "", needed)


def choice_column(
    help: str,
    *words: str,
    needed: str = "",
    empty: str | None = None,
    form: tuple[str, str] = ("", ""),
    optional: bool = False,
) -> Any:
    """Return a column whose cells are one of some words or have a form, given as (examples, pattern)."""
    rule = ", ".join(filter(None, (*words, form[0])))
    return _column(help, rule, lambda cell: cell in words or re.fullmatch(form[1], cell), str, empty, needed, optional)


def decimal_column(
    help: str, low: float, high: float, needed: str = "", *, empty: float | None = None, optional: bool = False
) -> Any:
    """Return a column of decimals from `low` to `high`."""
    bounds = " to ".join(f"{Decimal(str(end)):,f}" for end in (low, high))
    form = r"[0-9]{1,15}(\.[0-9]{1,20})?"
    return _column(
        help,
        f"a decimal from {bounds}",
        lambda cell: re.fullmatch(form, cell) and low <= float(cell) <= high,
        float,
        empty,
        needed,
        optional,
    )


def whole_column(help: str, high: int, needed: str = "", *, low: int = 1, optional: bool = False) -> Any:
    """Return a column of whole numbers from `low` to `high`."""
    return _column(
        help,
        f"a whole number from {low} to {high:,}",
        lambda cell: re.fullmatch("[0-9]{1,15}", cell) and low <= int(cell) <= high,
        int,
        None,
        needed,
        optional,
    )


def flag_column(help: str, needed: str = "", empty: bool | None = None, *, optional: bool = False) -> Any:
    """Return a column of 0 and 1."""
    return _column(help, "0, 1", ("0", "1").__contains__, "1".__eq__, empty, needed, optional)


def accelerator_column(help: str, others: str = "; rows with other names are skipped") -> Any:
    """Return a column of accelerators. `others`: the rule for names that are not listed."""
    return _column(help, f"a name of hardware.toml{others}", len, _listed_name, None, "usable")


def _listed_name(cell: str) -> str:
    """Return the name of hardware.toml for an alias; a name that is not listed is returned as it is."""
    try:
        return accelerator(cell).name
    except InputError:
        return cell


@dataclass(frozen=True, kw_only=True)
class MeasuredRun:
    """A row of a table: one published run."""

    id: str = text_column("stable name of the row, which no other row has", "always")
    source: str = text_column("short name of the publication; errors are averaged over the rows of one", "always")
    family: str = text_column("sources that belong together")
    ref: str = text_column("where the numbers stand: file, commit, table")
    date: str = text_column("of the software, YYYY or YYYY-MM")
    usable: str = choice_column("whether the run can be compared with a prediction", "yes", "no", needed="always")
    why_not: str = text_column("why it cannot, where usable is no")
    model: str = text_column("name as published; only printed", "always")

    model_kind: str = choice_column(
        "decoder; hybrid has other layers beside attention. A usable row is a decoder",
        *("decoder", "hybrid", "lora", "vlm"),
        needed="usable",
    )
    layers: int = whole_column("transformer layers", 1000, "usable")
    d_model: int = whole_column("width of the residual stream", 1_000_000, "usable")
    heads: int = whole_column("query heads", 100_000, "usable")
    kv_heads: int = whole_column("key and value heads", 100_000, "usable")
    head_dim: int = whole_column("width of a head; need not be d_model / heads", 100_000, "usable")
    d_ffn: int = whole_column("inner width of a dense feed-forward network", 1_000_000, "usable")
    gated: bool = flag_column(
        "1: a feed-forward network of three matrices (SwiGLU), RMSNorm; 0: two, LayerNorm", "usable"
    )
    vocab: int = whole_column("rows of the embedding, without padding", 10_000_000, "usable")
    tied: bool = flag_column("1: the head uses the embedding's matrix. Empty: 0", empty=False)
    bias: bool = flag_column("1: linear layers have biases. Empty: 0", empty=False)
    positions: str = choice_column("position encoding. Empty: rotary", "learned", "rotary", empty="rotary")
    qk_norm: bool = flag_column(
        "1: queries and keys of each head have an RMSNorm (Qwen3). Empty: 0", empty=False, optional=True
    )
    rotary_fraction: float = decimal_column(
        "part of a head that is rotated. Empty: 1", 0.01, 1, empty=1.0, optional=True
    )
    dropout: float = decimal_column("probability. Empty: 0", 0, 0.99, empty=0.0)
    window: int | None = whole_column("tokens of sliding-window attention. Empty: none", 10_000_000)
    windowed_layers: int | None = whole_column("layers that have it", 1000)
    experts: int | None = whole_column("experts of a layer. Empty: a dense model", 10_000)
    top_k: int = whole_column("experts that a token goes to", 10_000, "experts")
    expert_ffn: int = whole_column("inner width of an expert", 1_000_000, "experts")
    shared_experts: int = whole_column("experts of that width that every token goes through", 1000, "experts", low=0)
    dense_layers: int = whole_column(
        "first layers that have a dense network instead of experts", 1000, "experts", low=0
    )
    mtp: bool = flag_column("1: a further layer predicts a second token. Empty: 0", empty=False)
    mla_q_rank: int = whole_column(
        "latent attention: rank of queries, 0: none. All five empty: none", 1_000_000, "mla", low=0
    )
    mla_kv_rank: int | None = whole_column("rank of keys and values", 1_000_000, "mla")
    mla_nope: int = whole_column("elements of a query or key head without positions", 100_000, "mla")
    mla_rope: int = whole_column("elements of it with positions", 100_000, "mla")
    mla_v: int = whole_column("width of a value head", 100_000, "mla")

    accelerator: str = accelerator_column("kind of accelerator")
    accelerators: int = whole_column("how many the run had", 1_000_000, "usable")
    per_domain: int = whole_column(
        "accelerators that one NVLink domain holds. A run is spread evenly over as few as hold it", 100_000, "usable"
    )
    link_gbs: float | None = decimal_column(
        "GB/s that one accelerator reaches inside its domain; not used", 0.01, 100_000
    )
    network: str | None = choice_column(
        "between domains. Empty: the accelerator's usual", "infiniband", "roce", "efa", "ethernet"
    )
    network_gbs: float | None = decimal_column(
        "GB/s of one accelerator between domains. Empty: as usual", 0.01, 100_000
    )

    stack: str = choice_column(
        "training software: megatron is Megatron-LM to 2022, megatron-core what came after, deepspeed "
        "Megatron-DeepSpeed, gpt-neox GPT-NeoX, fsdp PyTorch FSDP in eager mode, automodel FSDP2 with Transformer "
        "Engine's kernels",
        *("megatron", "megatron-core", "deepspeed", "gpt-neox", "fsdp", "fsdp-compiled", "nanotron", "automodel"),
        "other",
        needed="usable",
    )
    te: bool | None = flag_column("1: kernels of Transformer Engine or equal ones; not used")
    precision: str = choice_column(
        "of matmuls; fp8 by what has a scale of its own: a tensor, a row, a block",
        *("fp32", "bf16", "fp16", "fp8-tensor", "fp8-row", "fp8-block", "mxfp8", "nvfp4"),
        needed="usable",
    )
    flash: bool | None = flag_column("1: attention never stores its scores. Empty: as usual with the stack")
    fused_loss: bool | None = flag_column(
        "1: the loss makes no copy of the logits in fp32. Empty: as usual with the stack"
    )

    attention: str | None = choice_column(
        "kernel of fused attention; flash-attn: FlashAttention-2 of that package; cudnn-fp8, cudnn-mxfp8: cuDNN in 8 "
        "bits. Empty: by stack and date",
        *("fa1", "fa2", "fa3", "fa4", "cudnn", "cudnn-fp8", "cudnn-mxfp8", "flash-attn"),
        optional=True,
    )
    cuda_graphs: str | None = choice_column(
        "parts of a step that are replayed as CUDA graphs; blocks: layers without their experts. Empty: by stack, "
        "accelerator and date",
        *("none", "blocks", "step"),
        optional=True,
    )
    blocking_launches: bool = flag_column(
        "1: the host waits for each kernel (CUDA_LAUNCH_BLOCKING). Empty: 0", empty=False, optional=True
    )
    fused_norms: bool | None = flag_column(
        "1: an RMSNorm is one kernel; 0: a kernel for each of its operations, as in eager mode where a norm is written "
        "in Python. Empty: as usual with the stack; with fsdp by date",
        optional=True,
    )
    gather_dtype: str | None = choice_column(
        "type in which ZeRO gathers weights; fp8: the format of the matmuls. Empty: by stack, precision and date",
        *("bf16", "fp8"),
        optional=True,
    )

    bucket_parameters: int | None = whole_column(
        "parameters of a message of gradients or gathered weights, at least a tensor (Megatron-Core's bucket_size). "
        "Empty: as usual with the stack",
        10**12,
        optional=True,
    )

    tp: int = whole_column("tensor parallelism", 100_000, "usable")
    sp: bool = flag_column("1: sequence parallelism over tp; 0 if tp is 1", "usable")
    cp: int = whole_column("context parallelism", 100_000, "usable")
    cp_method: str | None = choice_column(
        "ring: in an order that balances causal attention (zigzag). Empty: ring", "ring", "allgather", "ulysses"
    )
    pp: int = whole_column("pipeline parallelism", 128, "usable")
    virtual_stages: int = whole_column("chunks of layers on one rank of pp; 1 without interleaving", 1000, "usable")
    schedule: str = choice_column(
        f"of the pipeline; {ONE_F_ONE_B.name} if pp is 1",
        *registry.names(),
        needed="usable",
    )
    layer_split: str | None = choice_column(
        "even: each chunk has as many layers; ends: the first and the last have one less; uneven: neither divides. "
        "Empty: pp is 1",
        *("even", "ends", "uneven"),
        needed="pp",
    )
    ep: int = whole_column("expert parallelism; 1 for a dense model", 100_000, "usable")
    etp: int | None = whole_column("tensor parallelism inside an expert. Empty: as tp", 1000)
    dp_replicate: int = whole_column("replicas of a group of dp_shard", 1_000_000, "usable")
    dp_shard: int = whole_column("data ranks that shard state, without those of cp", 1_000_000, "usable")
    zero: int = whole_column("ZeRO stage", 3, "usable", low=0)
    micro_batch: int = whole_column("sequences of one pass on one data rank", 10_000_000, "usable")
    global_batch: int = whole_column("sequences of a step", 10_000_000, "usable")
    seq_len: int = whole_column("tokens of a sequence", 10_000_000, "usable")
    recompute: str = choice_column(
        "full: every layer; selective: what the stack calls so; selective:a+b: modules of each layer "
        f"({', '.join(MODULES)}); partial:N: N layers in full",
        *("none", "full", "selective"),
        needed="usable",
        form=("selective:a+b, partial:N", "selective:({0})([+]({0}))*|partial:[0-9]{{1,4}}".format("|".join(MODULES))),
    )
    offload: str = choice_column(
        "activations:N: those of N layers go to the host. Empty: none",
        *("none", "optimizer"),
        empty="none",
        form=("activations:N", "activations:[0-9]{1,4}"),
    )
    overlap_tp: bool | None = flag_column(
        "1: tp communication runs beside matmuls, in pieces; 0: with megatron-core only reductions of the gradients of "
        "inputs do, beside weight gradients. Empty: as usual with the stack"
    )
    overlap_dp: bool | None = flag_column("the same of data-parallel communication")
    overlap_ep: bool | None = flag_column(
        "1: messages of experts overlap with passes of another micro-batch, and one kernel multiplies all experts. "
        "Empty: by stack, accelerator, precision and date",
        optional=True,
    )
    zero_pp_gather: str | None = choice_column(
        "ZeRO-3 of PyTorch in a pipeline gathers layers once a step, or for each backward pass. Empty: step",
        *("step", "microbatch"),
        optional=True,
    )
    moe_dispatch: str | None = choice_column("priced as alltoall", "alltoall", "deepep", "hybridep")
    grad_dtype: str | None = choice_column(
        "type in which gradients are summed over data ranks. Empty: as usual with the stack", "bf16", "fp16", "fp32"
    )
    optimizer_dtype: str | None = choice_column("type of Adam's moments. Empty: fp32", "bf16", "fp16", "fp32")
    master_dtype: str | None = choice_column(
        "type of the weights that the optimizer updates. Empty: fp32; with PyTorch's AdamW (fsdp, fsdp-compiled, "
        "automodel) the type of its moments",
        *("bf16", "fp32"),
        optional=True,
    )
    whole_gradients: bool | None = flag_column(
        "1: ZeRO-2 and ZeRO-3 reduce gradients after the last micro-batch alone, and keep them whole until then. "
        "Empty: 0; 1 with PyTorch's FSDP, bf16 weights and gradients in fp32",
        optional=True,
    )
    whole_logits: bool = flag_column(
        "1: each rank of tp has the logits of the whole vocabulary", empty=False, optional=True
    )
    tp_by_matrix: bool | None = flag_column(
        "1: each column-parallel matrix gathers its input over tp, and reduces its gradient, by itself; each rank of "
        "tp has the whole embedding, and without sp the whole head (a ColwiseParallel for each matrix). Empty: 0; "
        "with PyTorch's FSDP as `whole_logits`",
        optional=True,
    )
    loss_chunk_tokens: int | None = whole_column(
        "tokens whose logits exist at a time. Empty: all", 10_000_000, optional=True
    )
    logit_peak_bytes: float | None = decimal_column(
        "most bytes for each logit in the loss: logits, copies and gradients together. Empty: as usual with the stack",
        1,
        100,
        optional=True,
    )

    step_time_s: float | None = decimal_column("seconds of an optimizer step", 1e-6, 10**9)
    step_time_from: str | None = choice_column("what was published", "stated", "tokens_per_s", "tflops", "mfu")
    peak_mem_gib: float | None = decimal_column("peak memory of one accelerator, GiB", 1e-6, 10**9)
    peak_mem_from: str = choice_column("taken by tensors, or by the allocator", "allocated", "reserved", needed="peak")
    peak_mem_rank: str = choice_column("whose peak, by its rank of pp", "most", "first", "last", needed="peak")
    tokens: float | None = decimal_column("tokens of the whole run", 1, 10**15, optional=True)
    save_every: int | None = whole_column(
        "steps between checkpoints of the whole run. Empty: the best interval", 10**9, optional=True
    )
    days: float | None = decimal_column(
        "days of the whole run, with its interruptions; accelerator-hours / accelerators / 24 where hours were "
        "published",
        1e-3,
        10**5,
        optional=True,
    )
    note: str = text_column("what is assumed or special; printed")


@cache
def columns(row: Any = MeasuredRun) -> dict[str, RunColumn]:
    """Return the columns of a kind of row by name, in the order of a table."""
    return {column.name: column.metadata["column"] for column in fields(row)}
