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

from shardloom.cost.hardware import Cluster, cluster
from shardloom.cost.job import RECOMPUTE, Candidates, Job
from shardloom.cost.stack import MEGATRON_CORE, MEGATRON_CORE_FUSED_LOSS, Stack
from shardloom.model.sections import LatentAttentionSpec, MoESpec
from shardloom.model.spec import ModelSpec
from shardloom.plan.run import Run, Skipped

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
    name = f"{row['test']} {row['platform']}"
    if reason := why_skipped(row):
        return Skipped(number, "Megatron-LM functional tests", name, reason)
    peak_gib = float(row["mem_max_GiB"])
    job, candidates = _read(row)
    return Run(
        row=number,
        source=f"Megatron-LM functional tests, {'above' if peak_gib > SMALL_GIB else 'up to'} {SMALL_GIB:g} GiB",
        name=name,
        job=job,
        candidates=candidates,
        measured_step_s=None,
        measured_peak_gib=peak_gib,
        peak_rank="last",
    )


def why_skipped(row: Fields) -> str:
    """Why a row is not compared; empty if it is."""
    if not row["mem_max_GiB"]:
        return "no peak"
    if kind := OTHER_MODELS.get(row["source_file"].split("/")[3]):
        return kind
    if row["mtp"]:
        return "predicts a second token"
    return next((why for word, why in OTHER_RUNS.items() if word in row["test"]), "")


def _read(row: Fields) -> tuple[Job, Candidates]:
    gpus, tp, pp, cp = (int(float(row[name])) for name in ("n_gpus_from_recipe", "tp", "pp", "cp"))
    data = gpus // (tp * pp * cp)
    zero = 3 if row["fsdp"] else 1 if row["dist_opt"] else 0
    instances = 2 if "multi_dist_optimizer_instances" in row["test"] else 1
    shard = data // instances if zero else 1
    per_stage = int(float(row["layers_per_vpp"] or 0))
    layers = int(float(row["layers"]))
    each = next((each for word, each in STAGE_LAYERS.items() if word in row["test"]), ())
    virtual = len(each) // pp if each else layers // pp // per_stage if per_stage else 1
    job = Job(
        model=_model(row),
        cluster=_cluster(row, gpus),
        seq_len=int(float(row["seq"])),
        global_batch=int(float(row["gbs"])),
        precision="fp8" if row["fp8"] else "fp16" if row["fp16"] else "bf16",
        stack=_stack(row),
    )
    candidates = Candidates(
        pp=pp,
        schedule="interleaved-1f1b" if virtual > 1 else "1f1b",
        virtual_stages=virtual,
        stage_layers=(each or (layers // pp // virtual,) * pp * virtual) if pp > 1 else None,
        dp_replicate=np.array([data // shard]),
        dp_shard=np.array([shard]),
        cp=np.array([cp]),
        tp=np.array([tp]),
        # Experts cut over their own tp hold as much, and see as many rows, as over as many more ranks of ep.
        ep=np.array([int(row["ep"]) * int(float(row["etp"] or tp)) if row["experts"] else 1]),
        zero=np.array([zero]),
        sequence_parallel=np.array([bool(row["sp"]) and tp > 1]),
        micro_batch=np.array([int(row["mbs"])]),
        recompute=np.array([RECOMPUTE.index(row["recompute"] or "none")]),
    )
    return job, candidates


def _model(row: Fields) -> ModelSpec:
    hidden, heads = int(row["hidden"]), int(row["heads"])
    latent, test = bool(row["mla"]), row["test"]
    wide = 64 * (hidden * 8 // 3 // 64) if row["swiglu"] else 4 * hidden
    ffn = int(float(row["ffn"] or wide))
    moe = None
    if row["experts"]:
        width = int(float(row["moe_ffn"] or ffn))
        moe = MoESpec(
            n_experts=int(float(row["experts"])),
            top_k=int(float(row["topk"])),
            d_ffn=width,
            n_shared=int(latent),
            first_dense=int(latent),
            normalise=False,
            bias_rate=0.0,
        )
    head_dim = 128 if latent else hidden // heads
    return ModelSpec(
        n_layers=int(float(row["layers"])),
        d_model=hidden,
        n_heads=heads,
        n_kv_heads=int(float(row["kv_heads"] or heads)),
        head_dim=head_dim,
        d_ffn=ffn,
        vocab_size=int(float(row["vocab"] or 50257)),
        max_seq_len=int(float(row["seq"])),
        norm="rmsnorm" if latent else "layernorm",
        activation="swiglu" if row["swiglu"] else "gelu_tanh",
        positions="rope" if latent or "rope" in test else "learned",
        qk_norm="qk_layernorm" in test,
        bias=not (latent or moe or "disable_bias" in test),
        tied_embedding=not row["untie"],
        dropout=0.0 if latent else 0.1,
        moe=moe,
        latent_attention=LatentAttentionSpec(kv_rank=512, q_rank=1536, nope_dim=128, rope_dim=64, v_dim=128)
        if latent
        else None,
    )


def _stack(row: Fields) -> Stack:
    """The flags of a row that are choices of a program."""
    fused = "cross_entropy_loss_fusion" in row["test"] or row["mla"]
    return replace(MEGATRON_CORE_FUSED_LOSS if fused else MEGATRON_CORE, flash_attention=not _stores_scores(row))


def _stores_scores(row: Fields) -> bool:
    """Unfused attention by its flag, or that of the local implementation. Records of one cluster are older than the
    change of their tests to fused attention (README of the reference: stale copies)."""
    stale = "dracooci" in row["platform"] and not row["attn_backend"]
    return row["attn_backend"] in ("unfused", "local") or row["impl"] == "local" or stale


def _cluster(row: Fields, gpus: int) -> Cluster:
    name = next((name for name in ("gb200", "h100") if name in row["platform"]), "a100-80gb")
    return cluster(f"{name}:{gpus}/{gpus}")
