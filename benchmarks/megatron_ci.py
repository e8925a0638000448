"""Convert the peaks that Megatron-LM's functional tests recorded to the columns of a table of measured runs.

    python benchmarks/megatron_ci.py RAW.csv > src/shardwright/planner/measured/megatron_ci.csv

RAW.csv has one row for each file of golden values, with the flags of its test's recipe. A peak is that of the last rank
of the world, which writes the log: in a pipeline the last rank of `pp`. What the raw table leaves empty is a default of
Megatron-LM's (`megatron/training/arguments.py`) or of its tests' recipes: the GPT-2 vocabulary of 50257, d_ffn of 4
d_model (8/3 of it, in steps of 64, with swiglu), dropout of 0.1 on activations and scores, learned positions, 8
accelerators. The recipes of models with latent attention set ranks 1536 and 512, heads of 128 + 64 and 128, one dense
layer first, a shared expert, rotary positions, and no dropout.

What the columns cannot say: LayerNorm beside a gated network (the table's reader takes RMSNorm, with d_model numbers
less in each norm), norms of queries and keys (stated in `note`), biases of attention in models with experts (0 here),
stages of 2, 4, 4 and 2 layers (not usable), step times of tests that run a few iterations of a small model (left out).
"""

import csv
import hashlib
import sys
from collections.abc import Mapping
from pathlib import Path

from shardwright.planner.run_columns import columns

Cells = Mapping[str, str]

SMALL_GIB = 2.0
"""Peaks up to here are a source of their own: what libraries take is a large part of them."""
OTHER_MODELS = {"bert": "encoder", "t5": "encoder and decoder", "hybrid": "Mamba layers", "nemotron": "Mamba layers"}
OTHER_MODELS |= {"mimo": "images beside text", "multimodal-llava": "images beside text"}
OTHER_RUNS = {
    "grpo": "reinforcement learning",
    "distill": "a teacher beside the model",
    "muon": "not Adam",
    "offloading": "activations go to the host",
    "tunable_overlap": "more micro-batches in flight than the schedule says",
    "a2a_ovlp": "two micro-batches at once",
    "deepseek_proxy": "sizes of its latent attention are not in the raw table",
    "pp2_mla": "sizes of its latent attention are not in the raw table",
    "defer_embedding_wgrad": "the head's weight gradients wait until the end, and what they need with them",
    "uneven_pipeline": "stages of 2, 4, 4 and 2 layers: no column says that",
}
ENDS = ("account_for_embedding_loss",)
"""Tests whose embedding and head each take the place of a layer: 6 layers on 4 ranks of 2 chunks."""
VIRTUAL_STAGES = {"account_for_embedding_loss": 2, "tp2_pp2_ep4_etp1": 4}
"""Where flags that are not in the raw table say so."""
LATENT = {"mla_q_rank": 1536, "mla_kv_rank": 512, "mla_nope": 128, "mla_rope": 64, "mla_v": 128}
ACCELERATORS = {"gb200": "gb200", "h100": "h100"}


def why_not(raw: Cells) -> str:
    """Why a row is not compared; empty if it is."""
    if not raw["mem_max_GiB"]:
        return "no peak"
    if kind := OTHER_MODELS.get(raw["source_file"].split("/")[3]):
        return kind
    if raw["mtp"]:
        return "predicts a second token"
    return next((why for word, why in OTHER_RUNS.items() if word in raw["test"]), "")


def converted(raw: Cells) -> dict[str, object]:
    """One row of the table; cells that are not set stay empty."""
    peak = raw["mem_max_GiB"]
    small = not peak or float(peak) <= SMALL_GIB
    row: dict[str, object] = {
        "id": f"megatron-ci-{hashlib.sha256(raw['source_file'].encode()).hexdigest()[:6]}",
        "source": "megatron-ci-small" if small else "megatron-ci",
        "family": "megatron-ci",
        "ref": f"NVIDIA/Megatron-LM@{raw['commit']} {raw['source_file']}",
        "usable": "yes",
        "model": f"{raw['test']} {raw['platform']}",
    }
    if reason := why_not(raw):
        return row | {"usable": "no", "why_not": reason}
    return row | _model(raw) | _machine(raw) | _layout(raw) | _peak(raw)


def _number(raw: Cells, column: str, default: int | None = None) -> int:
    text = raw[column]
    assert text or default is not None, (raw["test"], column)
    return int(float(text)) if text else default or 0


def _model(raw: Cells) -> dict[str, object]:
    hidden, heads, experts = _number(raw, "hidden"), _number(raw, "heads"), _number(raw, "experts", 0)
    latent, gated, test = bool(raw["mla"]), bool(raw["swiglu"]), raw["test"]
    ffn = _number(raw, "ffn", 64 * (hidden * 8 // 3 // 64) if gated else 4 * hidden)
    found: dict[str, object] = {
        "model_kind": "decoder",
        "layers": _number(raw, "layers"),
        "d_model": hidden,
        "heads": heads,
        "kv_heads": _number(raw, "kv_heads", heads),
        "head_dim": LATENT["mla_v"] if latent else hidden // heads,
        "d_ffn": ffn,
        "gated": int(gated),
        "vocab": _number(raw, "vocab", 50257),
        "tied": int(not raw["untie"]),
        "bias": int(not (latent or experts or "disable_bias" in test)),
        "positions": "rotary" if latent or "rope" in test else "learned",
        "dropout": "0" if latent else "0.1",
        "mtp": 0,
        "note": "norms of queries and keys" if "qk_layernorm" in test else "",
    }
    if latent:
        found |= LATENT
    if experts:
        found |= {
            "experts": experts,
            "top_k": _number(raw, "topk"),
            "expert_ffn": _number(raw, "moe_ffn", ffn),
            "shared_experts": int(latent),
            "dense_layers": int(latent),
        }
    return found


def _machine(raw: Cells) -> dict[str, object]:
    """The machine and the software."""
    platform, test = raw["platform"], raw["test"]
    # Records of this cluster are older than the change of their tests to fused attention.
    stale = "dracooci" in platform and not raw["attn_backend"]
    stored = raw["attn_backend"] in ("unfused", "local") or raw["impl"] == "local" or stale
    accelerator = next((name for word, name in ACCELERATORS.items() if word in platform), "a100-80")
    return {
        "accelerator": accelerator,
        "accelerators": _number(raw, "n_gpus_from_recipe", 8),
        "per_domain": 72 if accelerator == "gb200" else 8,
        "stack": "megatron-core",
        "te": int(raw["impl"] == "transformer_engine"),
        "precision": "fp8-tensor" if raw["fp8"] else "fp16" if raw["fp16"] else "bf16",
        "flash": int(not stored),
        "fused_loss": int("cross_entropy_loss_fusion" in test or bool(raw["mla"])),
    }


def _layout(raw: Cells) -> dict[str, object]:
    n, test = _number(raw, "n_gpus_from_recipe", 8), raw["test"]
    tp, pp, cp, ep = (_number(raw, axis, 1) for axis in ("tp", "pp", "cp", "ep"))
    data, layers = n // (tp * pp * cp), _number(raw, "layers")
    zero = 3 if raw["fsdp"] else 1 if raw["dist_opt"] else 0
    # Optimizer states of such a test are sharded inside each of two halves of the data ranks.
    shard = data // (2 if "multi_dist_optimizer_instances" in test else 1) if zero else 1
    per_stage = _number(raw, "layers_per_vpp", 0)
    virtual = layers // pp // per_stage if per_stage and pp > 1 else 1
    virtual = next((chunks for word, chunks in VIRTUAL_STAGES.items() if word in test), virtual)
    split = "ends" if any(word in test for word in ENDS) else "even"
    found: dict[str, object] = {
        "tp": tp,
        "sp": int(bool(raw["sp"]) and tp > 1),
        "cp": cp,
        "pp": pp,
        "virtual_stages": virtual,
        "schedule": "interleaved-1f1b" if virtual > 1 else "1f1b",
        "layer_split": split if pp > 1 else "",
        "ep": ep if raw["experts"] else 1,
        "etp": raw["experts"] and _number(raw, "etp", tp),
        "dp_replicate": data // shard,
        "dp_shard": shard,
        "zero": zero,
        "micro_batch": _number(raw, "mbs"),
        "global_batch": _number(raw, "gbs"),
        "seq_len": _number(raw, "seq"),
        "recompute": raw["recompute"] or "none",
        "offload": "none",
    }
    if raw["recompute"] == "selective" and raw["recompute_modules"]:
        found["recompute"] = "selective:" + "+".join(raw["recompute_modules"].strip("[]").split())
    return found


def _peak(raw: Cells) -> dict[str, object]:
    return {"peak_mem_gib": raw["mem_max_GiB"], "peak_mem_from": "allocated", "peak_mem_rank": "last"}


def main(path: Path) -> None:
    """Write the table to standard output."""
    with path.open(newline="", encoding="utf-8") as file:
        rows = [converted(raw) for raw in csv.DictReader(file)]
    writer = csv.DictWriter(sys.stdout, list(columns()), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
