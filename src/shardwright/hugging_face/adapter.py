"""A LoRA adapter of peft next to the weights of a folder of `transformers`: the weights are read with it merged.

    W' = W + s B A,   s = alpha / rank, or with rslora alpha / sqrt(rank)

A is (rank, in), B is (out, rank). Sources: Hu et al., LoRA, arXiv 2106.09685, section 4.1; Kalajdzievski, arXiv
2312.03732, for the square root. Only the box of B A that is read is computed, in 32 bits or wider.
"""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from shardwright.hugging_face.files import ADAPTER, read_header
from shardwright.hugging_face.schema import read_object
from shardwright.model.lora_sizes import LoraSpec
from shardwright.system.errors import CheckpointError, DamagedError, nearest
from shardwright.system.files import inside

ADAPTER_WEIGHTS = "adapter_model.safetensors"
PREFIX, SUFFIX_A, SUFFIX_B = "base_model.model.", ".lora_A.weight", ".lora_B.weight"
_UNUSED = {
    "auto_mapping", "base_model_name_or_path", "ensure_weight_tying", "exclude_modules", "fan_in_fan_out",
    "inference_mode", "init_lora_weights", "layers_pattern", "layers_to_transform", "lora_alpha", "lora_dropout",
    "megatron_config", "megatron_core", "peft_type", "peft_version", "qalora_group_size", "r", "rank_pattern",
    "revision", "target_modules", "task_type", "use_rslora",
}  # fmt: skip
"""Keys that need no check: read below, or without effect on the merged weights. The group size of
qalora has one only with use_qalora, which is refused."""
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Begins of `init_lora_weights` for which peft changes the base weights before it trains."""


class AdapterFile(BaseModel):
    """The keys of adapter_config.json that the merged weights depend on."""

    model_config = ConfigDict(strict=True, extra="allow")
    peft_type: str
    lora_alpha: float = Field(8)
    lora_dropout: float = Field(0.0, ge=0, lt=1)
    use_rslora: bool = False
    init_lora_weights: bool | str | None = True


class MergedAdapter:
    """The adapter of a folder. `merged` adds boxes of s B A."""

    def __init__(self, folder: Path, shapes: Mapping[str, tuple[int, ...]], transposed: Collection[str]) -> None:
        """`shapes`: name in the files of each matrix of the base -> its shape there; `transposed`: the matrices that
        are stored as (in, out).

        Raises CheckpointError for settings that are not supported, and for an adapter of another base."""
        config = read_object(inside(folder, ADAPTER), AdapterFile, CheckpointError)
        if problems := _unsupported(config):
            raise CheckpointError(*(f"{folder / ADAPTER}: {problem}" for problem in problems))
        path = inside(folder, ADAPTER_WEIGHTS, DamagedError)
        read_header(path)
        try:
            self._tensors = load_file(path)
        except (SafetensorError, OSError) as error:
            raise DamagedError(f"{path} cannot be read: {error}") from None
        self._alpha, self._rslora = config.get("lora_alpha", 8), config.get("use_rslora", False)
        self._dropout = config.get("lora_dropout", 0.0)
        self._transposed = transposed
        self._modules: dict[str, str] = {}
        """Name in the files of a matrix -> the begin of the names of its A and B."""
        problems = []
        for name in sorted(self._tensors):
            module = name.removeprefix(PREFIX).removesuffix(SUFFIX_A).removesuffix(SUFFIX_B)
            matrix = next((n for n in (f"{module}.weight", f"{module}.weight".partition(".")[2]) if n in shapes), None)
            if not name.endswith((SUFFIX_A, SUFFIX_B)) or matrix is None:
                problems.append(f"{name} is not of a matrix of this model; {nearest(f'{module}.weight', shapes)}")
                continue
            begin = name.removesuffix(SUFFIX_A).removesuffix(SUFFIX_B)
            self._modules[matrix] = begin
            problems += self._shape_problems(begin, matrix, shapes[matrix])
        if problems:
            raise CheckpointError(*(f"{path}: {problem}" for problem in dict.fromkeys(problems)))

    def _shape_problems(self, begin: str, matrix: str, shape: tuple[int, ...]) -> list[str]:
        a, b = self._tensors.get(begin + SUFFIX_A), self._tensors.get(begin + SUFFIX_B)
        if a is None or b is None:
            return [f"{begin} has only one of A and B"]
        n_out, n_in = reversed(shape) if matrix in self._transposed else shape
        if a.dim() != 2 or not len(a) or a.shape[1] != n_in or b.shape != (n_out, len(a)):
            return [
                f"{begin}: A is {list(a.shape)} and B {list(b.shape)}, and {matrix} of {n_out} x {n_in} needs "
                f"[rank, {n_in}] and [{n_out}, rank]: the adapter is for another base"
            ]
        return []

    def __contains__(self, matrix: str) -> bool:
        return matrix in self._modules

    @property
    def settings(self) -> dict[str, Any]:
        """Return the keys of [lora] in the adapter's config: alpha, rslora and dropout."""
        return {"alpha": float(self._alpha), "rslora": self._rslora, "dropout": float(self._dropout)}

    @property
    def matrices(self) -> list[str]:
        """Return the names in the files of the matrices that have an adapter."""
        return list(self._modules)

    def factors(self, matrix: str) -> tuple[Tensor, Tensor]:
        """Return A, (rank, in), and B, (out, rank), of a matrix, with the rows of B as in the files."""
        begin = self._modules[matrix]
        return self._tensors[begin + SUFFIX_A], self._tensors[begin + SUFFIX_B]

    def merged(self, matrix: str, box: Tensor, spans: Any) -> Tensor:
        """Return the box `spans` of a matrix, given without the adapter, with the adapter, in the type of the box."""
        a_RD, b_FR = self.factors(matrix)
        scale = LoraSpec(rank=len(a_RD), alpha=self._alpha, rslora=self._rslora).scale
        if matrix not in self._transposed:
            rows, columns = (slice(*span) for span in spans)
            return with_low_rank(box, a_RD[:, columns], b_FR[rows], scale)
        columns, rows = (slice(*span) for span in spans)
        return with_low_rank(box.T, a_RD[:, columns], b_FR[rows], scale).T


def with_low_rank(w_FD: Tensor, a_RD: Tensor, b_FR: Tensor, scale: float) -> Tensor:
    """Return W + s B A in the type of W, computed in 32 bits or wider."""
    wide = torch.promote_types(torch.promote_types(a_RD.dtype, w_FD.dtype), torch.float32)
    return (w_FD.to(wide) + scale * (b_FR.to(wide) @ a_RD.to(wide))).to(w_FD.dtype)


def _unsupported(config: Mapping[str, Any]) -> list[str]:
    problems = []
    if config["peft_type"] != "LORA":
        problems.append(f"peft_type={config['peft_type']!r} is not supported; supported: 'LORA'")
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_CHANGES_BASE):
        problems.append(
            f"init_lora_weights={start!r} changed the base weights, which are not saved with the adapter; save it with "
            f"path_initial_model_for_weight_conversion of peft"
        )
    for key, value in sorted(config.items()):
        if key not in _UNUSED and value not in (None, False, "none", [], {}, 0):
            problems.append(f"{key}={value!r} is not supported; merge the adapter with the merge_and_unload of peft")
    return problems
