"""Adapters in the files of peft: the names and shapes of their matrices, and adapter_config.json.

peft names A of a linear `base_model.model.LINEAR.lora_A.weight`, (r, in), and B `...lora_B.weight`, (out, r), with the
names of linears of `transformers`. Our A and B have these shapes, and B has our order of rows.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shardwright.hugging_face.adapter import PREFIX, SUFFIX_A, SUFFIX_B
from shardwright.hugging_face.architecture import Architecture
from shardwright.hugging_face.table import FileTensor, ParameterPart, file_tensors
from shardwright.model.modules import rows
from shardwright.model.spec import ModelSpec
from shardwright.system.errors import ConfigError


@dataclass(frozen=True)
class AdapterFiles:
    """The adapters of a model: each A and B as a tensor of peft's file, and the keys of adapter_config.json."""

    tensors: tuple[FileTensor, ...]
    config: dict[str, Any]


def adapted_matrices(architecture: Architecture, base: ModelSpec) -> dict[str, FileTensor]:
    """Return the tensor in the files of `transformers` of each matrix of a model, by our name, if it is one alone."""
    return {
        tensor.parts[0].name: tensor
        for tensor in file_tensors(architecture, base)
        if len(tensor.parts) == 1 and tensor.parts[0].expert is None and not tensor.copy
    }


def adapter_files(architecture: Architecture, spec: ModelSpec, base_path: str) -> AdapterFiles:
    """Return the files of the adapters of `spec`. `base_path`: the folder of the base, for adapter_config.json.

    Raises ConfigError if a matrix with an adapter is a part of a larger one in the files of `transformers`, such as
    Phi-3's qkv_proj, because peft has one adapter for it, and if the files do not have the matrix.
    """
    lora = spec.lora
    assert lora is not None
    matrices = adapted_matrices(architecture, replace(spec, lora=None))
    modules = {name: name.rpartition(".")[0] for name, row in rows(spec).items() if row.adapter == "a"}
    if problems := list(
        _without_matrix(architecture, spec, [m for m in modules.values() if f"{m}.weight" not in matrices])
    ):
        raise ConfigError(*problems)
    tensors: list[FileTensor] = []
    for module in modules.values():
        matrix = matrices[f"{module}.weight"]
        begin = PREFIX + matrix.name.removesuffix(".weight")
        shape = rows(spec)[f"{module}.lora_b"].shape
        part_a, part_b = (ParameterPart(f"{module}.{name}", None, n) for name, n in
                          (("lora_a", lora.rank), ("lora_b", shape[0])))  # fmt: skip
        shape_a = rows(spec)[f"{module}.lora_a"].shape
        tensors.append(FileTensor(begin + SUFFIX_A, (part_a,), shape_a))
        tensors.append(FileTensor(begin + SUFFIX_B, (part_b,), shape, order=matrix.order))
    adapted = {matrices[f"{module}.weight"].name.removesuffix(".weight") for module in modules.values()}
    first = matrices[f"{next(iter(modules.values()))}.weight"]
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_path,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "use_rslora": lora.rslora,
        "target_modules": _targets(adapted, matrices),
        "fan_in_fan_out": first.transposed,
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


def _without_matrix(architecture: Architecture, spec: ModelSpec, modules: Sequence[str]) -> Iterator[str]:
    """Yield the reason why peft cannot have the adapters of `modules`, for the first module of each reason."""
    fused = fused_matrices(architecture, replace(spec, lora=None))
    for module in [m for m in modules if f"{m}.weight" in fused][:1]:
        yield (
            f"{module} is a part of {fused[f'{module}.weight'].name} in the files of {architecture.class_name}, and "
            f"peft has one adapter for all of it; write the merged weights with --merge"
        )
    for module in [m for m in modules if f"{m}.weight" not in fused][:1]:
        yield (
            f"{module} is not in the files of {architecture.class_name}, so peft has no adapter for it; --merge writes "
            f"the merged weights of all matrices that are in the files"
        )


def _targets(adapted: set[str], matrices: dict[str, FileTensor]) -> list[str]:
    """Return peft's names of the targets: the last parts of names, if these name no other linear, else whole names."""
    last = {name.rpartition(".")[2] for name in adapted}
    linears = {matrix.name.removesuffix(".weight") for matrix in matrices.values() if len(matrix.shape) == 2}
    others = {name for name in linears - adapted if name.rpartition(".")[2] in last}
    return sorted(adapted if others else last)
