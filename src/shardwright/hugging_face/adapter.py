"""A LoRA adapter of peft next to the weights of a folder of `transformers`: the weights are read with it merged.

    W' = W + s B A,   s = alpha / rank, or with rslora alpha / sqrt(rank)

A is (rank, in), B is (out, rank). With use_dora the rows of W' are divided by their norms and multiplied by a magnitude
m, (out,). Only the box of B A that is read is computed, in 32 bits or wider; with use_dora its whole rows.

Sources: Hu et al., LoRA, arXiv 2106.09685, section 4.1; Kalajdzievski, arXiv 2312.03732, for the square root; Liu et
al., DoRA, arXiv 2402.09353.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from shardwright.hugging_face.files import ADAPTER, read_header
from shardwright.hugging_face.schema import read_object
from shardwright.model.lora_sizes import AdapterNames, LoraSpec
from shardwright.system.errors import CheckpointError, DamagedError, nearest
from shardwright.system.files import inside

ADAPTER_WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
SUFFIXES = AdapterNames(".lora_A.weight", ".lora_B.weight", ".lora_magnitude_vector")
Spans = Sequence[tuple[int, int]]
"""The first index and the end of a box in each dim."""
_UNUSED = {
    "auto_mapping", "base_model_name_or_path", "ensure_weight_tying", "exclude_modules", "fan_in_fan_out",
    "inference_mode", "init_lora_weights", "layers_pattern", "layers_to_transform", "lora_alpha", "lora_dropout",
    "megatron_config", "megatron_core", "peft_type", "peft_version", "qalora_group_size", "r", "rank_pattern",
    "revision", "target_modules", "task_type", "use_dora", "use_rslora",
}  # fmt: skip
"""Keys that need no check: read below, or without effect on the merged weights. The group size of
qalora has one only with use_qalora, which is refused."""
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Prefixes of `init_lora_weights` for which peft changes the base weights before it trains."""


class AdapterFile(BaseModel):
    """The keys of adapter_config.json that the merged weights depend on."""

    model_config = ConfigDict(strict=True, extra="allow")
    peft_type: str
    lora_alpha: float = Field(8)
    lora_dropout: float = Field(0.0, ge=0, lt=1)
    use_rslora: bool | None = False
    use_dora: bool | None = False
    init_lora_weights: bool | str | None = True


class MergedAdapter:
    """The adapter of a folder. `merged` reads a box of a matrix and returns it with the adapter."""

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
        self._alpha, self._rslora = config.get("lora_alpha", 8), bool(config.get("use_rslora"))
        self._dropout, self._dora = config.get("lora_dropout", 0.0), bool(config.get("use_dora"))
        self._transposed = transposed
        self._modules: dict[str, str] = {}
        """Name in the files of a matrix -> the prefix of the names of its A and B."""
        problems = []
        for name in sorted(self._tensors):
            suffix = next((suffix for suffix in SUFFIXES if name.endswith(suffix)), None)
            begin = name.removesuffix(suffix or "")
            module = begin.removeprefix(PREFIX)
            matrix = next((n for n in (f"{module}.weight", f"{module}.weight".partition(".")[2]) if n in shapes), None)
            if suffix is None or matrix is None:
                problems.append(f"{name} is not of a matrix of this model; {nearest(f'{module}.weight', shapes)}")
                continue
            self._modules[matrix] = begin
            problems += self._shape_problems(begin, matrix, shapes[matrix])
        if problems:
            raise CheckpointError(*(f"{path}: {problem}" for problem in dict.fromkeys(problems)))

    def _shape_problems(self, begin: str, matrix: str, shape: tuple[int, ...]) -> list[str]:
        a, b, magnitude = (self._tensors.get(begin + suffix) for suffix in SUFFIXES)
        if (magnitude is not None) != self._dora:
            return [f"{begin} has {'a' if magnitude is not None else 'no'} magnitude, with use_dora={self._dora}"]
        if a is None or b is None:
            return [f"{begin} has only one of A and B"]
        n_out, n_in = reversed(shape) if matrix in self._transposed else shape
        if a.dim() != 2 or not len(a) or a.shape[1] != n_in or b.shape != (n_out, len(a)):
            return [
                f"{begin}: A is {list(a.shape)} and B {list(b.shape)}, and {matrix} of {n_out} x {n_in} needs "
                f"[rank, {n_in}] and [{n_out}, rank]: the adapter is for another base"
            ]
        if magnitude is not None and magnitude.shape != (n_out,):
            return [
                f"{begin}: the magnitude is {list(magnitude.shape)}, and {matrix} of {n_out} x {n_in} needs [{n_out}]: "
                f"the adapter is for another base"
            ]
        return []

    def __contains__(self, matrix: str) -> bool:
        return matrix in self._modules

    @property
    def settings(self) -> dict[str, Any]:
        """Return the keys of [lora] in the adapter's config: alpha, rslora, dora, and dropout, which no run with DoRA
        has."""
        dropout = 0.0 if self._dora else float(self._dropout)
        return {"alpha": float(self._alpha), "rslora": self._rslora, "dora": self._dora, "dropout": dropout}

    @property
    def left_out(self) -> dict[str, str]:
        """Return the settings of the adapter that a run cannot have, each with its reason."""
        reason = "dropout of adapters with DoRA is not supported"
        return {f"lora_dropout={self._dropout}": reason} if self._dora and self._dropout else {}

    @property
    def matrices(self) -> list[str]:
        """Return the names in the files of the matrices that have an adapter."""
        return list(self._modules)

    def factors(self, matrix: str) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return A, (rank, in), B, (out, rank), and the magnitude, (out,), or None, of a matrix, with the outputs in
        the order of the files."""
        begin = self._modules[matrix]
        return (
            self._tensors[begin + SUFFIXES.a],
            self._tensors[begin + SUFFIXES.b],
            self._tensors.get(begin + SUFFIXES.magnitude),
        )

    def merged(self, matrix: str, read: Callable[[Spans], Tensor], spans: Spans) -> Tensor:
        """Return the box `spans` of a matrix with the adapter, in the type of the files. `read`: reads a box of the
        matrix without the adapter."""
        a_RD, b_FR, magnitude_F = self.factors(matrix)
        scale = LoraSpec(rank=len(a_RD), alpha=self._alpha, rslora=self._rslora).scale
        transposed = matrix in self._transposed
        rows, columns = reversed(spans) if transposed else spans
        low, high = columns if magnitude_F is None else (0, a_RD.shape[1])
        box = read([(low, high), rows]).T if transposed else read([rows, (low, high)])
        magnitude_F = None if magnitude_F is None else magnitude_F[slice(*rows)]
        merged = with_low_rank(box, a_RD[:, low:high], b_FR[slice(*rows)], scale, magnitude_F)
        merged = merged[:, columns[0] - low : columns[1] - low]
        return merged.T if transposed else merged


def with_low_rank(w_FD: Tensor, a_RD: Tensor, b_FR: Tensor, scale: float, magnitude_F: Tensor | None = None) -> Tensor:
    """Return W + s B A in the type of W, computed in 32 bits or wider. With a magnitude the rows, which have to be
    whole, have its elements as norms."""
    wide = torch.promote_types(torch.promote_types(a_RD.dtype, w_FD.dtype), torch.float32)
    merged_FD = w_FD.to(wide) + scale * (b_FR.to(wide) @ a_RD.to(wide))
    if magnitude_F is not None:
        norms_F = torch.linalg.vector_norm(merged_FD, dim=-1).clamp(min=torch.finfo(wide).tiny)
        merged_FD *= (magnitude_F.to(wide) / norms_F).unsqueeze(-1)
    return merged_FD.to(w_FD.dtype)


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
