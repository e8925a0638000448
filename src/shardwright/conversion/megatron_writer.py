"""Checkpoints of Megatron, written; `conversion.megatron` has the files of a checkpoint, and reads them."""

import argparse
import json
import re
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwright.conversion.dcp import DcpWriter, file_of
from shardwright.conversion.megatron import (
    BACKEND,
    COMMON,
    FIXED,
    FORMAT,
    LATEST,
    MASTERS,
    SHARDING,
    SIZES,
    router_arguments,
)
from shardwright.conversion.names import MEGATRON, MEGATRON_LAYERS, named_tensors_of
from shardwright.conversion.state import STEP, AdamWSettings, TrainingState
from shardwright.hugging_face.architecture import architecture_of
from shardwright.hugging_face.files import CONFIG
from shardwright.hugging_face.table import FileTensor
from shardwright.hugging_face.writer import tensor_of_file
from shardwright.system.errors import CheckpointError
from shardwright.training.weights import Weights

_MODULES = ("self_attention.linear_qkv", "self_attention.linear_proj", "self_attention.core_attention")
_DENSE_MODULES = ("mlp.linear_fc1", "mlp.linear_fc2")
"""Modules that have an entry `_extra_state`, empty without fp8; Megatron does not load a checkpoint without it."""


def write_megatron_state(state: TrainingState, out: Path) -> list[str]:
    """Write a training state as a checkpoint that Megatron loads on any number of ranks, with one tensor of a layer in
    memory at a time. Return remarks."""
    spec, tensors = state.spec, named_tensors_of(MEGATRON, state.spec)
    tag = str(state.step) if state.step else "release"  # Megatron takes no step 0
    folder = out / (f"iter_{state.step:07d}" if state.step else tag)
    folder.mkdir()
    writer = DcpWriter(folder)
    by_name: dict[str, list[FileTensor]] = {}
    for tensor in tensors:
        by_name.setdefault(re.sub(rf"^{re.escape(MEGATRON_LAYERS)}\d+\.", MEGATRON_LAYERS, tensor.name), []).append(
            tensor
        )
    kinds: dict[str, Weights] = {"": state.weights}
    if state.moments:
        kinds |= {f"optimizer.state.{MASTERS[0]}.": state.weights}
        kinds |= {f"optimizer.state.{kind}.": moments for kind, moments in state.moments.items()}
    for prefix, values in kinds.items():
        for name, layers in by_name.items():
            layers.sort(key=lambda tensor: _layer(tensor.name))
            stacked = name.startswith(MEGATRON_LAYERS)
            shape = (len(layers), *layers[0].shape) if stacked else layers[0].shape
            writer.write_tensor((prefix + name,), shape, _chunks(layers, values, stacked))
    for module in (*_MODULES, *(_DENSE_MODULES if spec.moe is None else ())):
        for layer in range(spec.n_layers):
            writer.write_object((f"{MEGATRON_LAYERS}{module}._extra_state/shard_{layer}_{spec.n_layers}",), [None])
    experts = 0 if spec.moe is None else spec.moe.n_experts
    for module in ("linear_fc1", "linear_fc2") if experts else ():
        for layer, expert in product(range(spec.n_layers), range(experts)):
            place = f"_extra_state/shard_{layer}.{expert}_{spec.n_layers}.{experts}"
            writer.write_object((f"{MEGATRON_LAYERS}mlp.experts.experts.{module}.{place}",), [None])
    writer.finish()
    (folder / COMMON).write_bytes(file_of(_common_of(state, tensors)))
    versions = {"sharded_backend": BACKEND, "sharded_backend_version": 1, "common_backend": "torch"}
    (folder / FORMAT).write_text(json.dumps(versions | {"common_backend_version": 1}))
    (out / LATEST).write_text(tag)
    (out / CONFIG).write_text(json.dumps(architecture_of(spec).config(spec), indent=2) + "\n")
    if not state.moments:
        return ["Megatron loads it with --no-load-optim"]
    remarks = ["Megatron loads it with --override-opt_param-scheduler: its schedule is not in the checkpoint"]
    if state.samples is None:
        remarks.append(
            "Megatron starts its schedule again, and computes its position in the data from the step: the number of "
            "samples is not known"
        )
    return remarks


def _common_of(state: TrainingState, tensors: list[FileTensor]) -> dict[str, Any]:
    """Return the content of common.pt."""
    spec, samples = state.spec, state.samples or 0
    arguments = argparse.Namespace(
        **{key: getattr(spec, field) for key, field in SIZES.items()},
        **FIXED,
        num_query_groups=spec.n_kv_heads,
        group_query_attention=spec.n_kv_heads != spec.n_heads,
        ffn_hidden_size=spec.d_ffn,
        max_position_embeddings=spec.max_seq_len,
        padded_vocab_size=spec.vocab_size,
        untie_embeddings_and_output_weights=not spec.tied_embedding,
        consumed_train_samples=samples,
        use_rope_scaling=spec.rope_scaling is not None,
        **({} if spec.moe is None else router_arguments(spec.moe)),
    )
    common: dict[str, Any] = {
        "args": arguments,
        "checkpoint_version": 3.0,
        "iteration": state.step or 0,
        "content_metadata": {"distrib_optim_sharding_type": SHARDING, "chained_optim_avoid_prefix": True},
    }
    if state.moments:
        common["optimizer"] = _optimizer(state, tensors)
        peak, decay = (
            max(getattr(settings, key) for settings in state.settings.values()) for key in ("peak_lr", "weight_decay")
        )
        common["opt_param_scheduler"] = {
            "max_lr": peak, "min_lr": 0.0, "lr_warmup_steps": 0, "lr_decay_steps": samples, "num_steps": samples,
            "lr_decay_style": "constant", "start_wd": decay, "end_wd": decay, "wd_incr_style": "constant",
            "wd_incr_steps": 0,
        }  # fmt: skip
    return common


def _layer(name: str) -> int:
    rest = name.removeprefix(MEGATRON_LAYERS)
    return int(rest.partition(".")[0]) if rest != name else -1


def _chunks(layers: list[FileTensor], values: Weights, stacked: bool) -> Iterator[tuple[tuple[int, ...], Tensor]]:
    for number, tensor in enumerate(layers):
        whole = tensor_of_file(tensor, values.read, getattr(torch, values.dtypes[tensor.parts[0].name]))
        yield ((number, *(0,) * whole.dim()), whole[None]) if stacked else ((0,) * whole.dim(), whole)


def _optimizer(state: TrainingState, tensors: list[FileTensor]) -> dict[Any, Any]:
    """Return the entry of the optimizer in common.pt; with experts, of two optimizers. Raises CheckpointError if
    parameters of a group differ in their settings."""
    groups: dict[tuple[bool, bool], AdamWSettings] = {}
    for tensor in tensors:
        is_flat = len(tensor.shape) == 1 or tensor.name.endswith(".bias")
        settings = groups.setdefault(
            (".experts.experts." in tensor.name, is_flat), state.settings[tensor.parts[0].name]
        )
        if any(state.settings[part.name] != settings for part in tensor.parts):
            raise CheckpointError(
                f"{state.weights.path}: AdamW's settings of {tensor.name} differ from the settings of others; Megatron "
                f"has one group for matrices, one for norms and biases, and both again for experts"
            )
        if is_flat and settings.weight_decay:
            raise CheckpointError(
                f"{state.weights.path}: weight decay of {tensor.name} is {settings.weight_decay:g}; Megatron has none "
                f"for norms and biases"
            )
    optimizers = [
        {
            "optimizer": {
                "param_groups": [
                    settings.group()
                    | {"wd_mult": float(not is_flat), "lr_mult": 1.0, "is_expert_parallel": experts, STEP: state.step}
                    | {"is_decoupled_lr": False, "default_config": True, "max_lr": settings.peak_lr, "min_lr": None}
                    for (experts, is_flat), settings in sorted(groups.items(), key=lambda item: item[0])
                    if experts == of_experts
                ]
            },
            "param_state_sharding_type": SHARDING,
        }
        for of_experts in sorted({experts for experts, _ in groups})
    ]
    return dict(enumerate(optimizers)) if len(optimizers) > 1 else optimizers[0]
