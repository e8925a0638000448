"""Models with adapters, layouts for them, and a run that is saved with adapters."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from shardwright.config import RunConfig, parse, resolved_toml
from shardwright.layout.layout import Layout
from shardwright.model.lora_sizes import LoraSpec
from shardwright.model.spec import ModelSpec
from shardwright.runs.folder import CHECKPOINTS
from shardwright.training.base_weights import base_record, fill_base
from shardwright.training.build import build_model, build_trainer
from shardwright.training.checkpoint.manifest import TrainingProgress
from shardwright.training.checkpoint.saver import save
from shardwright.training.checkpoint.store import CheckpointStore
from shardwright.training.step import Trainer
from shardwright.verification import Case
from shardwright.verification.case import PLAIN_SGD
from shardwright.verification.compare import Report
from tests.training.bugs.bug import EXPERTS, LATENT
from tests.training.checkpoints import DATA, Logical
from tests.training.test_switches import (
    BIASED_BOTH,
    COHERE,
    DEEPSEEK_V2,
    DENSE,
    EVERY_SECOND,
    LINEAR,
    LLAMA4,
    OFFSET,
    STARCODER,
    WINDOWS,
)
from tests.training.worlds import CASE, LONG, whole

LORA = LoraSpec(rank=3, alpha=6.0)
LAYOUTS = {
    "tp": Layout(tp=2, sequence_parallel=False),
    "sp": Layout(tp=2, sequence_parallel=True),
    "zero 3": Layout(dp_shard=2, zero=3),
    "pp": Layout(pp=2, pp_schedule="zb-h1"),
    "one rank": Layout(),
    "zero 0": Layout(dp_replicate=2),
    "zero 1": Layout(dp_shard=2, zero=1),
    "zero 2, hybrid": Layout(dp_replicate=2, dp_shard=2, zero=2),
    "cp": Layout(cp=2),
    "ulysses": Layout(cp=2, cp_method="ulysses"),
    "kv heads on two ranks": Layout(tp=4, sequence_parallel=True),
    "zero 3 of sp": Layout(tp=2, sequence_parallel=True, dp_shard=2, zero=3),
    "pp of sp": Layout(tp=2, sequence_parallel=True, pp=2, pp_schedule="1f1b"),
    "dualpipe": Layout(pp=2, pp_schedule="dualpipe"),
    "recompute": Layout(recompute="full"),
    "recompute of sp": Layout(tp=2, sequence_parallel=True, recompute="full"),
    "selective recompute": Layout(recompute="selective"),
    "parameters on the host": Layout(dp_shard=2, zero=3, offload_parameters="cpu", offload_optimizer="cpu"),
    "optimizer on the host": Layout(offload_optimizer="cpu"),
    "activations on the host": Layout(offload_activations="cpu"),
    "compressed": Layout(dp_replicate=2, compress_gradients="powersgd-2"),
}


def case_of(layout: Layout, spec: ModelSpec | None = None, lora: LoraSpec = LORA) -> Case:
    base = CASE if layout.cp * layout.tp == 1 and spec is None else LONG
    accumulation = 4 if layout.pp > 1 else 3
    micro_batch = base.global_batch // (accumulation * layout.data_ranks)
    return replace(base, spec=replace(spec or base.spec, lora=lora), micro_batch=micro_batch)


SP, TP, ZERO_3 = LAYOUTS["sp"], LAYOUTS["tp"], LAYOUTS["zero 3"]
ZERO_BUBBLE = LAYOUTS["pp"]
LATENT_HEADS = {"latent_attention": LATENT, "n_kv_heads": 4}
OF_ATTENTION, OF_FFN = replace(LORA, targets=("attention",)), replace(LORA, targets=("ffn",))
DROPPED, DORA = replace(LORA, dropout=0.3), replace(LORA, dora=True)
OF_EXPERTS = replace(LORA, targets=("attention", "experts"))
ROUTED = {"moe": EXPERTS}
TP_EP = Layout(tp=2, sequence_parallel=True, ep=2)
TIED = {"mtp_modules": 1, "tied_embedding": True}
LAST_ROUTED = {"n_layers": 4, "moe": replace(EXPERTS, first_dense=2)}
"""With adapters of ffn, the last two layers have no adapter, and so with pp = 2 the second stage has none."""
MODELS: dict[str, tuple[dict[str, Any], Layout, LoraSpec]] = {
    "experts, tp, ep": (ROUTED, Layout(tp=2, sequence_parallel=True, ep=2), OF_ATTENTION),
    "experts, zero 2, ep": (ROUTED, Layout(dp_shard=2, zero=2, ep=2), OF_ATTENTION),
    "shared experts, zero 3, ep": (DENSE, Layout(dp_shard=4, zero=3, ep=2), LORA),
    "shared experts, tp, ep": (DENSE, Layout(tp=2, sequence_parallel=True, ep=2), LORA),
    "shared experts, replicas of kv heads, selective": (
        DENSE,
        Layout(tp=4, sequence_parallel=True, recompute="selective"),
        LORA,
    ),
    "shared experts, MTP, pp": (EVERY_SECOND, ZERO_BUBBLE, LORA),
    "biases of experts, pp, cp, ep, full": (BIASED_BOTH, Layout(pp=2, cp=2, ep=2, recompute="full"), LORA),
    "latent attention and shared experts, tp, ep": (DEEPSEEK_V2, Layout(tp=2, sequence_parallel=True, ep=2), LORA),
    "latent attention, tp": (LATENT_HEADS, TP, LORA),
    "latent attention, sp": (LATENT_HEADS, SP, LORA),
    "latent attention, kv_down alone, sp": (LATENT_HEADS, SP, replace(LORA, targets=("kv_down",))),
    "latent attention, zero 3": (LATENT_HEADS, ZERO_3, LORA),
    "latent attention, pp": (LATENT_HEADS, ZERO_BUBBLE, LORA),
    "MTP and a tied embedding, pp": (TIED, Layout(pp=2), LORA),
    "MTP and a tied embedding, dualpipe": (TIED | {"n_layers": 5}, LAYOUTS["dualpipe"], LORA),
    "MTP, sp": ({"mtp_modules": 2}, SP, LORA),
    "linear attention, tp": (LINEAR, TP, LORA),
    "linear attention, ring, tp": (LINEAR, Layout(cp=2, cp_method="ring", tp=2, sequence_parallel=False), LORA),
    "linear attention, ulysses, zero 3, pp": (
        LINEAR,
        Layout(cp=2, cp_method="ulysses", zero=3, pp=2, pp_schedule="zb-h1"),
        LORA,
    ),
    "windows, sinks, tp": (WINDOWS, TP, LORA),
    "windows, sinks, zigzag, full": (WINDOWS, Layout(cp=2, cp_method="zigzag", recompute="full"), LORA),
    "parallel branches, tp": (COHERE, TP, LORA),
    "parallel branches, sp, ring, full": (
        COHERE,
        Layout(tp=2, sequence_parallel=True, cp=2, cp_method="ring", recompute="full"),
        LORA,
    ),
    "parallel branches, ffn alone, sp": (COHERE, SP, OF_FFN),
    "biases, replicas of kv heads": (STARCODER, Layout(tp=4, sequence_parallel=True), LORA),
    "norms over all heads, replicas of kv heads, full": (
        OFFSET,
        Layout(tp=4, sequence_parallel=True, recompute="full"),
        LORA,
    ),
    "chunks and scaled experts, tp, ep": (LLAMA4, Layout(tp=2, sequence_parallel=True, ep=2), LORA),
    "adapters of one expert a rank, zero 3": (
        {"moe": replace(EXPERTS, n_experts=2, top_k=2)},
        Layout(dp_shard=4, zero=3, ep=2),
        replace(OF_EXPERTS, rank=4),
    ),
    "dropout": ({}, Layout(), DROPPED),
    "dropout of shared experts and latent attention, tp, ep": (DEEPSEEK_V2, TP_EP, DROPPED),
    "dropout, biases, replicas of kv heads": (STARCODER, Layout(tp=4, sequence_parallel=True), DROPPED),
    "dropout, tp without token shards, zero 3": (
        {},
        Layout(tp=2, sequence_parallel=False, dp_shard=2, zero=3),
        DROPPED,
    ),
    "dropout, linear attention, ring, tp": (
        LINEAR,
        Layout(cp=2, cp_method="ring", tp=2, sequence_parallel=False),
        DROPPED,
    ),
    "dropout, zigzag, MTP, zero bubble": (
        {"mtp_modules": 1},
        Layout(cp=2, cp_method="zigzag", pp=2, pp_schedule="zb-h1"),
        replace(DROPPED, targets=("attention", "ffn", "projection")),
    ),
    "dropout, recomputation of sp and pp": (
        {"dropout": 0.1},
        Layout(tp=2, sequence_parallel=True, pp=2, pp_schedule="1f1b", recompute="full"),
        DROPPED,
    ),
    "dropout, latent attention that is computed again, sp, pp": (
        LATENT_HEADS,
        Layout(
            tp=2,
            sequence_parallel=True,
            pp=2,
            pp_schedule="1f1b",
            recompute="selective",
            recompute_modules=("norms", "mla_up", "activation"),
        ),
        DROPPED,
    ),
    "dropout, a base in nf4, sp, offload": (
        {},
        Layout(tp=2, sequence_parallel=True, offload_activations="cpu"),
        replace(DROPPED, base="nf4"),
    ),
    "DoRA, biases, tp": (STARCODER, TP, DORA),
    "DoRA, biases, replicas of kv heads": (STARCODER, Layout(tp=4, sequence_parallel=True), DORA),
    "DoRA, zero 3 of sp": ({}, LAYOUTS["zero 3 of sp"], DORA),
    "DoRA, recomputation of sp and pp": ({}, LAYOUTS["pp of sp"].changed(recompute="full"), DORA),
    "DoRA, zigzag, MTP, zero bubble": (
        {"mtp_modules": 1},
        Layout(cp=2, cp_method="zigzag", pp=2, pp_schedule="zb-h1"),
        replace(DORA, targets=("attention", "ffn", "projection")),
    ),
    "DoRA, tied embedding, dualpipe": (TIED | {"n_layers": 5}, LAYOUTS["dualpipe"], DORA),
    "DoRA, latent attention, tp": (LATENT_HEADS, TP, DORA),
    "DoRA, latent attention and shared experts, tp, ep": (DEEPSEEK_V2, TP_EP, DORA),
    "DoRA, linear attention, ring, tp": (
        LINEAR,
        Layout(cp=2, cp_method="ring", tp=2, sequence_parallel=False),
        DORA,
    ),
    "DoRA, shared experts, hybrid zero 2, ep": (DENSE, Layout(dp_replicate=2, dp_shard=2, zero=2, ep=2), DORA),
    "DoRA, all on the host, selective": (
        {},
        LAYOUTS["parameters on the host"].changed(offload_activations="cpu", recompute="selective"),
        DORA,
    ),
    "DoRA, no adapter in a stage, zero 1": (
        LAST_ROUTED,
        Layout(pp=2, dp_shard=2, zero=1),
        replace(DORA, targets=("ffn",)),
    ),
    "of experts": (ROUTED, Layout(), OF_EXPERTS),
    "of experts, sp": (ROUTED, SP, OF_EXPERTS),
    "of experts, tp, ep, selective": (DENSE, TP_EP.changed(recompute="selective"), OF_EXPERTS),
    "of experts, zero 1, ep": (ROUTED, Layout(dp_shard=2, zero=1, ep=2), OF_EXPERTS),
    "of experts, hybrid zero 2, ep": (ROUTED, Layout(dp_replicate=2, dp_shard=2, zero=2, ep=2), OF_EXPERTS),
    "of experts, zero 3, tp, ep": (ROUTED, TP_EP.changed(dp_shard=2, zero=3), OF_EXPERTS),
    "of experts with biases, pp, cp, ep, full": (BIASED_BOTH, Layout(pp=2, cp=2, ep=2, recompute="full"), OF_EXPERTS),
    "of experts, zero bubble, ep": (
        ROUTED,
        Layout(pp=2, pp_schedule="zb-h1", dp_shard=2, zero=1, ep=2),
        OF_EXPERTS,
    ),
    "of experts, MTP, pp": (EVERY_SECOND, ZERO_BUBBLE, OF_EXPERTS),
    "of experts, all on the host, ep": (
        ROUTED,
        Layout(dp_shard=2, zero=3, ep=2, offload_parameters="cpu", offload_optimizer="cpu", offload_activations="cpu"),
        OF_EXPERTS,
    ),
    "of scaled experts, tp, ep": (LLAMA4, TP_EP, OF_EXPERTS),
    "of experts of a base in nf4, tp, ep": (ROUTED, TP_EP, replace(OF_EXPERTS, base="nf4")),
    "of experts of a base in int8, zero 3, ep": (
        ROUTED,
        Layout(dp_shard=2, zero=3, ep=2),
        replace(OF_EXPERTS, base="int8"),
    ),
    "no adapter in the last stage": (LAST_ROUTED, Layout(pp=2), OF_FFN),
    "no adapter in a stage, zero 3": (LAST_ROUTED, Layout(pp=2, dp_shard=2, zero=3), OF_FFN),
    "no adapter in a stage, zero 1, ep": (LAST_ROUTED, Layout(pp=2, dp_shard=2, zero=1, ep=2), OF_FFN),
    "no adapter in a stage, zero 0": (LAST_ROUTED, Layout(pp=2, dp_replicate=2), OF_FFN),
    "no adapter in a stage, on the host": (
        LAST_ROUTED,
        Layout(pp=2, dp_shard=2, zero=3, offload_parameters="cpu", offload_optimizer="cpu"),
        OF_FFN,
    ),
}


def run_file(base: Path, out: Path, **changed: object) -> dict[str, object]:
    """A run of one step that adapts the weights in `base`."""
    table = {"out": str(out), "steps": 1, "device": "cpu", "data": {"path": "none"}, "lora": {"rank": 3}}
    table |= {"batch": {"seq_len": 16, "global_batch": 8}, "model": {"from": str(base)}}
    return table | {"init": {"weights": str(base)}} | changed


def adapting(config: RunConfig) -> Trainer:
    """Return the trainer of a run with adapters, with the weights of its base. Every rank calls this."""
    model, record = build_model(config, torch.device("cpu"), compiled=False), base_record(config)
    assert record is not None
    fill_base(model, record)
    return build_trainer(config, model, torch.device("cpu"), compiled=False, base=record)


def save_adapted(base: Path, folder: Path, tp: int = 2, **changed: object) -> Logical:
    """To be run on every rank: save a run's first checkpoint, and return the values of all its parameters."""
    config = parse(run_file(base, folder, layout={"tp": tp}, **changed))
    trainer = adapting(config)
    model = trainer.model
    save(
        CheckpointStore(folder / CHECKPOINTS), trainer, TrainingProgress(1, 8, config.seed), DATA, resolved_toml(config)
    )
    return {name: whole(parameter) for name, parameter in model.named_parameters.items()}


def error_before_adams_steps(report: Report) -> float:
    """Return the largest error of plain SGD and of everything up to the first step of Adam. Adam divides by the size of
    a gradient, so the small ones of a magnitude, which starts at zero, grow with their rounding in what follows."""
    quantities = [(row.quantity, row.error) for row in report.rows]
    return max(error for quantity, error in quantities if quantity.training == PLAIN_SGD or quantity.step <= 1)
