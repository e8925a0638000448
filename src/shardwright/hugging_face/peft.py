"""Adapters in the files of peft: the names and shapes of their matrices, and adapter_config.json.

peft names A of a linear `base_model.model.LINEAR.lora_A.weight`, (r, in), and B `...lora_B.weight`, (out, r), with the
names of linears of `transformers`, and a magnitude of DoRA `...lora_magnitude_vector`, (out,). Ours have these shapes,
and B and the magnitude have our order of rows. Each expert has an A and
a B of its own where the files of the base have a tensor for each expert: `...mlp.experts.3.up_proj.lora_A.weight`.
transformers 5 stacks the experts in memory, and peft 0.21 converts these names to its `target_parameters` when it loads
them.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shardwright.hugging_face.adapter import PREFIX, SUFFIXES
from shardwright.hugging_face.architecture import Architecture
from shardwright.hugging_face.table import FileTensor, ParameterPart, file_tensors
from shardwright.model.lora_sizes import adapter_names
from shardwright.model.modules import rows
from shardwright.model.spec import ModelSpec
from shardwright.system.errors import ConfigError


@dataclass(frozen=True)
class AdapterFiles:
    """The adapters of a model: each A and B as a tensor of peft's file, and the keys of adapter_config.json."""

    tensors: tuple[FileTensor, ...]
    config: dict[str, Any]


Matrix = tuple[str, int | None]
"""The name of a parameter, and the number of the expert; None: no experts, or the matrices of all experts."""


def adapted_matrices(architecture: Architecture, base: ModelSpec) -> dict[Matrix, FileTensor]:
    """Return the tensor in the files of `transformers` of each matrix of a model, if it is one alone."""
    return {
        (tensor.parts[0].name, tensor.parts[0].expert): tensor
        for tensor in file_tensors(architecture, base)
        if len(tensor.parts) == 1 and not tensor.copy
    }


def adapter_files(architecture: Architecture, spec: ModelSpec, base_path: str) -> AdapterFiles:
    """Return the files of the adapters of `spec`. `base_path`: the folder of the base, for adapter_config.json.

    Raises ConfigError if a matrix with an adapter is a part of a larger one in the files of `transformers`, such as
    Phi-3's qkv_proj, because peft has one adapter for it, and if the files do not have the matrix.
    """
    lora = spec.lora
    assert lora is not None
    matrices = adapted_matrices(architecture, replace(spec, lora=None))
    of_model = rows(spec)
    targets = [name for name in of_model if adapter_names(name)[0] in of_model]
    adapted = {matrix: tensor for matrix, tensor in matrices.items() if matrix[0] in targets and len(tensor.shape) == 2}
    in_files = {name for name, _ in adapted}
    if problems := list(_without_matrix(architecture, spec, [name for name in targets if name not in in_files])):
        raise ConfigError(*problems)
    tensors: list[FileTensor] = []
    for (name, expert), matrix in adapted.items():
        begin = PREFIX + matrix.name.removesuffix(".weight")
        orders = None, matrix.order, matrix.order
        for ours, suffix, order in zip(adapter_names(name), SUFFIXES, orders, strict=True):
            if ours in of_model:
                shape = of_model[ours].shape if expert is None else of_model[ours].shape[1:]
                part = ParameterPart(ours, expert, shape[0])
                tensors.append(FileTensor(begin + suffix, (part,), shape, order=order))
    linears = {tensor.name.removesuffix(".weight"): expert for (_, expert), tensor in adapted.items()}
    both = {name.rpartition(".")[2]: name for name, expert in linears.items() if expert is not None}
    if of_all := [name for name, expert in linears.items() if expert is None and name.rpartition(".")[2] in both]:
        raise ConfigError(
            f"{of_all[0]} and {both[of_all[0].rpartition('.')[2]]} have adapters and the same last name, and peft "
            f"takes all matrices of that name for experts; write the merged weights with --merge"
        )
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_path,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "use_rslora": lora.rslora,
        "use_dora": lora.dora,
        "target_modules": _targets(set(linears), matrices.values()),
        "fan_in_fan_out": next(iter(adapted.values())).transposed,
        "bias": "none",
        "init_lora_weights": True,
        "inference_mode": True,
    }
    return AdapterFiles(tuple(tensors), config)


def fused_matrices(architecture: Architecture, base: ModelSpec) -> dict[str, FileTensor]:
    """Return the tensor in the files of `transformers` of each matrix that is only a part of it, by our name."""
    return {
        part.name: tensor
        for tensor in file_tensors(architecture, base)
        for part in (tensor.parts if len(tensor.parts) > 1 and len(tensor.shape) == 2 else ())
    }


def _without_matrix(architecture: Architecture, spec: ModelSpec, names: Sequence[str]) -> Iterator[str]:
    """Yield the reason why peft cannot have the adapters of some matrices, for the first matrix of each reason."""
    base, files = replace(spec, lora=None), f"in the files of {architecture.class_name}"
    fused = fused_matrices(architecture, base)
    of_experts = [tensor for tensor in file_tensors(architecture, base) if tensor.stacks_experts]
    stacked = {part.name: tensor.name for tensor in of_experts for part in tensor.parts}
    for name in [name for name in names if name in fused][:1]:
        yield (
            f"{name.removesuffix('.weight')} is a part of {fused[name].name} {files}, and peft has one adapter for all "
            f"of it; write the merged weights with --merge"
        )
    for name in [name for name in names if name in stacked][:1]:
        yield (
            f"{name} of all experts is in one tensor {files}, {stacked[name]}, for which adapters are not written; "
            f"write the merged weights with --merge"
        )
    for name in [name for name in names if name not in fused and name not in stacked][:1]:
        yield (
            f"{name.removesuffix('.weight')} is not {files}, so peft has no adapter for it; --merge writes the merged "
            f"weights of all matrices that are in the files"
        )


def _targets(adapted: set[str], matrices: Iterable[FileTensor]) -> list[str]:
    """Return peft's names of the targets: the last parts of names, if these name no other linear, else whole names."""
    last = {name.rpartition(".")[2] for name in adapted}
    linears = {matrix.name.removesuffix(".weight") for matrix in matrices if len(matrix.shape) == 2}
    others = {name for name in linears - adapted if name.rpartition(".")[2] in last}
    return sorted(adapted if others else last)
