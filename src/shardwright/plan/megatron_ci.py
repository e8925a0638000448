"""Megatron-LM's own functional tests as runs: their flags read into models and layouts, beside the peaks they recorded.

A peak is that of the last rank of the world, which writes the log: in a pipeline the last rank of `pp`. What the table
leaves empty is a default of Megatron-LM's (`megatron/training/arguments.py`) or of its tests' recipes:
the GPT-2 vocabulary of 50257, d_ffn of 4 d_model (two thirds of that with swiglu), dropout of 0.1 on activations and
scores, learned positions. The recipes of models with latent attention set ranks 1536 and 512, heads of 128 + 64 and
128, one dense layer first, a shared expert, rotary positions, and no dropout.
"""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from shardwright.cost.hardware import Cluster, cluster
from shardwright.cost.job import RECOMPUTE, Candidates, Job
from shardwright.cost.stack import MEGATRON_CORE, MEGATRON_CORE_FUSED_LOSS, Stack
from shardwright.errors import InputError
from shardwright.model.sections import LatentAttentionSpec, MoESpec
from shardwright.model.spec import ModelSpec
from shardwright.plan.run import Run, Skipped
from shardwright.plan.run_cells import Cells, Unusable, quoted
from shardwright.plan.run_check import check, check_experts

NEEDED = ("source_file", "test", "platform", "mem_max_GiB", "layers", "hidden", "heads", "seq", "mbs", "gbs")
"""Columns by which a table is known to be of this kind."""
SMALL_GIB = 2.0
"""Peaks up to here are a source of their own: what libraries take is a large part of them."""
Fields = Mapping[str, str]

OTHER_MODELS = {"bert": "encoder", "t5": "encoder and decoder", "hybrid": "Mamba layers", "nemotron": "Mamba layers"}
OTHER_MODELS |= {"mimo": "images beside text", "multimodal-llava": "images beside text"}
OTHER_RUNS = {
    "grpo": "reinforcement learning",
    "distill": "a teacher beside the model",
    "muon": "not Adam",
    "offloading": "activations go to the host",
    "tunable_overlap": "more microbatches in flight than the schedule says",
    "a2a_ovlp": "two microbatches at once",
    "deepseek_proxy": "sizes of its latent attention are not in the table",
    "pp2_mla": "sizes of its latent attention are not in the table",
    "defer_embedding_wgrad": "the head's weight gradients wait until the end, and what they need with them",
}
STAGE_LAYERS = {
    "uneven_pipeline": (2, 4, 4, 2),
    "account_for_embedding_loss": (0, 1, 1, 1, 1, 1, 1, 0),
    "tp2_pp2_ep4_etp1": (2,) * 8,
}
"""Layers of each stage by the recipes, where flags that are not in the table say so."""


def read_row(number: int, row: Fields) -> Run | Skipped:
    """One row; `number`: its line in the file."""
    cells = Cells(row)
    name = f"{cells.text('test')} {cells.text('platform')}"
    try:
        if reason := why_skipped(cells):
            raise Unusable(reason)
        peak_gib = cells.measured("mem_max_GiB")
        assert peak_gib is not None
        job, candidates = _read(cells)
        check(job, candidates)
    except Unusable as unusable:
        return Skipped(number, "Megatron-LM functional tests", name, str(unusable))
    except InputError as error:
        return Skipped(number, "Megatron-LM functional tests", name, error.problems[0])
    return Run(
        row=number,
        source=f"Megatron-LM functional tests, {'above' if peak_gib > SMALL_GIB else 'up to'} {SMALL_GIB:g} GiB",
        name=name,
        job=job,
        candidates=candidates,
        measured_step_s=None,
        measured_peak_gib=peak_gib,
        assumed=tuple(cells.assumed),
        peak_rank="last",
    )


def why_skipped(row: Cells) -> str:
    """Why a row is not compared; empty if it is."""
    if not row.text("mem_max_GiB"):
        return "no peak"
    folders = row.text("source_file").split("/")
    if kind := OTHER_MODELS.get(folders[3] if len(folders) > 3 else ""):
        return kind
    if row.flag("mtp"):
        return "predicts a second token"
    return next((why for word, why in OTHER_RUNS.items() if word in row.text("test")), "")


def _read(row: Cells) -> tuple[Job, Candidates]:
    gpus = row.number("n_gpus_from_recipe", 8, "n_gpus_from_recipe=8 (usual)")
    tp, pp, cp, ep = row.degrees("tp", "pp", "cp", "ep")
    if gpus % (tp * pp * cp):
        raise Unusable(f"tp {tp} x pp {pp} x cp {cp} = {tp * pp * cp} does not divide n_gpus_from_recipe={gpus}")
    data = gpus // (tp * pp * cp)
    zero = 3 if row.flag("fsdp") else 1 if row.flag("dist_opt") else 0
    instances = 2 if "multi_dist_optimizer_instances" in row.text("test") and zero else 1
    if data % instances:
        raise Unusable(f"{instances} instances of the optimizer do not divide {data} data ranks")
    shard = data // instances if zero else 1
    micro, total = row.number("mbs"), row.number("gbs")
    if total % (micro * data):
        raise Unusable(f"gbs={total} is not a multiple of mbs {micro} x {data} data ranks")
    virtual, stage_layers = _stages(row, pp)
    experts = row.number("experts", 0, least=0)
    if experts:
        check_experts(experts, ep)
    job = Job(
        model=_model(row, experts),
        cluster=_cluster(row, gpus),
        seq_len=row.number("seq"),
        global_batch=total,
        precision="fp8" if row.flag("fp8") else "fp16" if row.flag("fp16") else "bf16",
        stack=_stack(row),
    )
    recompute = row.text("recompute") or "none"
    if recompute not in RECOMPUTE:
        raise Unusable(f"recompute={quoted(recompute)} is not known; valid: {', '.join(RECOMPUTE)}")
    candidates = Candidates(
        pp=pp,
        schedule="interleaved-1f1b" if virtual > 1 else "1f1b",
        virtual_stages=virtual,
        stage_layers=stage_layers,
        dp_replicate=np.array([data // shard]),
        dp_shard=np.array([shard]),
        cp=np.array([cp]),
        tp=np.array([tp]),
        # Experts cut over their own tp hold as much, and see as many rows, as over as many more ranks of ep.
        ep=np.array([ep * row.number("etp", tp) if experts else 1]),
        zero=np.array([zero]),
        sequence_parallel=np.array([row.flag("sp") and tp > 1]),
        micro_batch=np.array([micro]),
        recompute=np.array([RECOMPUTE.index(recompute)]),
    )
    return job, candidates


def _stages(row: Cells, pp: int) -> tuple[int, tuple[int, ...] | None]:
    """Stages of a rank, and the layers of each."""
    if pp == 1:
        return 1, None
    layers, per_stage = row.number("layers"), row.number("layers_per_vpp", 0, least=0)
    each = next((each for word, each in STAGE_LAYERS.items() if word in row.text("test")), ())
    if each:
        return max(len(each) // pp, 1), each
    virtual = layers // pp // per_stage if per_stage else 1
    if not virtual or layers % (pp * virtual):
        raise Unusable(f"layers={layers} cannot be dealt to pp={pp} ranks in stages of {per_stage or 'as many'} layers")
    return virtual, (layers // pp // virtual,) * pp * virtual


def _model(row: Cells, experts: int) -> ModelSpec:
    hidden, heads = row.number("hidden"), row.number("heads")
    latent, gated, test = row.flag("mla"), row.flag("swiglu"), row.text("test")
    if hidden % heads:
        raise Unusable(f"heads={heads} does not divide hidden={hidden}")
    wide = 64 * (hidden * 8 // 3 // 64) if gated else 4 * hidden
    ffn = row.number("ffn", wide, "ffn=8/3 x hidden, gated" if gated else "ffn=4 x hidden")
    moe = None
    if experts:
        moe = MoESpec(
            n_experts=experts,
            top_k=row.number("topk"),
            d_ffn=row.number("moe_ffn", ffn, "moe_ffn=ffn"),
            n_shared=int(latent),
            first_dense=int(latent),
            normalise=False,
            bias_rate=0.0,
        )
    return ModelSpec(
        n_layers=row.number("layers"),
        d_model=hidden,
        n_heads=heads,
        n_kv_heads=row.number("kv_heads", heads),
        head_dim=128 if latent else hidden // heads,
        d_ffn=ffn,
        vocab_size=row.number("vocab", 50257, "vocab=50257 (GPT-2's)"),
        max_seq_len=row.number("seq"),
        norm="rmsnorm" if latent else "layernorm",
        activation="swiglu" if gated else "gelu_tanh",
        positions="rope" if latent or "rope" in test else "learned",
        qk_norm="qk_layernorm" in test,
        bias=not (latent or moe or "disable_bias" in test),
        tied_embedding=not row.flag("untie"),
        dropout=0.0 if latent else 0.1,
        moe=moe,
        latent_attention=LatentAttentionSpec(kv_rank=512, q_rank=1536, nope_dim=128, rope_dim=64, v_dim=128)
        if latent
        else None,
    )


def _stack(row: Cells) -> Stack:
    """The flags of a row that are choices of a program."""
    fused = "cross_entropy_loss_fusion" in row.text("test") or row.flag("mla")
    return replace(MEGATRON_CORE_FUSED_LOSS if fused else MEGATRON_CORE, flash_attention=not _stores_scores(row))


def _stores_scores(row: Cells) -> bool:
    """Unfused attention by its flag, or that of the local implementation. Records of one cluster are older than the
    change of their tests to fused attention (README of the reference: stale copies)."""
    backend = row.text("attn_backend")
    stale = "dracooci" in row.text("platform") and not backend
    return backend in ("unfused", "local") or row.text("impl") == "local" or stale


def _cluster(row: Cells, gpus: int) -> Cluster:
    name = next((name for name in ("gb200", "h100") if name in row.text("platform")), "a100-80gb")
    return cluster(f"{name}:{gpus}/{gpus}")
