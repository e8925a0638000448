"""Adapters of a run in the files of peft, merged into their base, and adapters of peft as the start of a run."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from shardwright.hugging_face.adapter import ADAPTER_WEIGHTS, MergedAdapter, with_low_rank
from shardwright.hugging_face.architecture import Architecture, architecture_of
from shardwright.hugging_face.files import ADAPTER
from shardwright.hugging_face.peft import adapted_matrices, adapter_files, fused_matrices
from shardwright.hugging_face.reader import HuggingFaceWeights
from shardwright.hugging_face.writer import TensorToWrite, tensor_of_file, write_safetensors
from shardwright.model.lora_sizes import LoraSpec, adapter_names
from shardwright.model.modules import layer_rows, row_of, rows, within_layer
from shardwright.model.quantised import fill_box
from shardwright.model.spec import ModelSpec
from shardwright.system.errors import CheckpointError, InputError
from shardwright.system.files import inside, new_folder
from shardwright.training.importing import is_free, write_weights_folder
from shardwright.training.weights import (
    AdaptedWeights,
    Weights,
    count_not_finite,
    fingerprint,
    frozen_names,
    not_finite_in_words,
    open_weights,
    record_of_base,
)

BASE = "shardwright_base"
"""Key of the file's metadata with the fingerprint of the base's values."""
_ENDING = re.compile("[._]lora_(a|b|magnitude)$")
"""The end of the name of A, B or a magnitude, which follows the name of the matrix."""


class BaseWithAdapters:
    """The weights W + s B A of a run with adapters, with DoRA times m / |W + s B A|, in the type of the base, computed
    in 32 bits or wider. If the run quantises its base (`lora.base`), W are the values that the adapters were trained
    on.

    Raises CheckpointError if the files of the base are quantised.
    """

    def __init__(self, weights: AdaptedWeights) -> None:
        assert weights.spec.lora is not None
        base = weights.base
        if isinstance(base, HuggingFaceWeights) and base.quantised:
            raise CheckpointError(
                f"{base.path} has weights in mxfp4, into which adapters cannot be merged; write the adapters alone "
                f"with --adapter"
            )
        self.path, self.spec = weights.path, replace(weights.spec, lora=None)
        self._weights, self._scale = weights, weights.spec.lora.scale
        model_rows = rows(self.spec)
        self.shapes = {name: shape for name, shape in weights.shapes.items() if name in model_rows}
        self.dtypes = {name: weights.dtypes[name] for name in self.shapes}
        self.left_out = weights.left_out

    def read(self, name: str, offsets: Sequence[int], shape: Sequence[int]) -> Tensor:
        """Return a box of a parameter, as `Weights.read`."""
        name_a, name_b, name_m = adapter_names(name)
        if name_m in self._weights.shapes and shape[-1] < self.shapes[name][-1]:
            whole_rows = self.read(name, (*offsets[:-1], 0), (*shape[:-1], self.shapes[name][-1]))
            return whole_rows[..., offsets[-1] : offsets[-1] + shape[-1]]
        box = _read_base(self._weights, name, offsets, shape)
        if name_a not in self._weights.shapes:
            return box
        rank = self._weights.shapes[name_a][-2]
        a_RD = self._weights.read(name_a, (*offsets[:-2], 0, offsets[-1]), (*shape[:-2], rank, shape[-1]))
        b_FR = self._weights.read(name_b, (*offsets[:-1], 0), (*shape[:-1], rank))
        magnitude_F = None
        if name_m in self._weights.shapes:
            magnitude_F = _norms(box) + self._weights.read(name_m, offsets[:-1], shape[:-1])
        return with_low_rank(box, a_RD, b_FR, self._scale, magnitude_F)

    def describe(self) -> str:
        """Return a description in one line."""
        return f"{self._weights.describe()}, merged"


def _read_base(weights: AdaptedWeights, name: str, offsets: Sequence[int], shape: Sequence[int]) -> Tensor:
    """Return a box of a parameter of the base as the run has it: quantised, if `lora.base` is."""
    box = torch.empty(tuple(shape), dtype=getattr(torch, weights.dtypes[name]))
    fill_box(row_of(weights.spec, name), box, offsets, weights.shapes[name], partial(weights.read, name))
    return box


def _norms(rows_FD: Tensor) -> Tensor:
    """Return the norms of whole rows in 32 bits or wider, (F,)."""
    wide = torch.promote_types(rows_FD.dtype, torch.float32)
    return torch.linalg.vector_norm(rows_FD, dim=-1, dtype=wide)


def _read_for_peft(weights: AdaptedWeights, name: str, offsets: Sequence[int], shape: Sequence[int]) -> Tensor:
    """Return a box of an adapter as peft has it: a magnitude of DoRA with the norms of the base's rows."""
    value = weights.read(name, offsets, shape)
    matrix = f"{_ENDING.sub('', name)}.weight"
    if name != adapter_names(matrix).magnitude:
        return value
    return value + _norms(_read_base(weights, matrix, (*offsets, 0), (*shape, weights.shapes[matrix][-1])))


def adapted(source: str | Path) -> AdaptedWeights:
    """Return the weights of a run with adapters, or of one of its checkpoints. Raises CheckpointError for others."""
    weights = open_weights(source)
    if not isinstance(weights, AdaptedWeights):
        raise CheckpointError(f"{weights.path} has no adapters; leave --adapter and --merge out to write its weights")
    return weights


def export_adapter(source: str | Path, out: Path, architecture: str | None = None) -> int:
    """Write the adapters of a run to the new folder `out` as peft reads them, and return their bytes.

    `architecture`: as for `training.exporting.export`. Raises ConfigError for a model without an architecture in
    `transformers`, and for matrices that are parts of larger ones there; CheckpointError for a run without adapters.
    """
    weights = adapted(source)
    path = str(weights.base.path)
    written = _architecture_of(weights.base, replace(weights.spec, lora=None), architecture)
    files = adapter_files(written, weights.spec, path)
    named = {tensor.name: tensor for tensor in files.tensors}
    entries = [
        TensorToWrite(name, weights.dtypes[tensor.parts[0].name], tensor.shape)
        for name, tensor in sorted(named.items())
    ]

    def make(entry: TensorToWrite) -> Tensor:
        tensor = tensor_of_file(named[entry.name], partial(_read_for_peft, weights), getattr(torch, entry.dtype))
        if n := count_not_finite(tensor):
            raise InputError(
                f"{not_finite_in_words(weights.path, n, tensor.numel(), entry.name)}; take an earlier checkpoint"
            )
        return tensor

    with new_folder(out, is_free, CheckpointError) as fresh:
        (fresh / ADAPTER).write_text(json.dumps(files.config, indent=2, sort_keys=True) + "\n")
        of_base = fingerprint(weights.base, frozen_names(weights.spec), of_values=True)
        write_safetensors(fresh / ADAPTER_WEIGHTS, entries, make, {BASE: of_base})
    return sum(entry.n_bytes for entry in entries)


def _architecture_of(base: Weights, spec: ModelSpec, model_type: str | None = None) -> Architecture:
    """Return the architecture whose names the adapters of a base have: of files of `transformers` their own."""
    if isinstance(base, HuggingFaceWeights) and model_type is None:
        return base.folder.architecture
    return architecture_of(spec, model_type)


class ImportedAdapter:
    """An adapter of peft under our names, for a base. `spec`: the model with these adapters.

    Raises CheckpointError for an adapter of another base, for one whose targets or ranks differ between layers, and for
    one that breaks a rule of [lora].
    """

    def __init__(self, folder: Path, base: Weights) -> None:
        self.path = folder
        plain = replace(base.spec, lora=None)
        architecture = _architecture_of(base, plain)
        matrices = adapted_matrices(architecture, plain)
        of_file = {tensor.name: (part, tensor) for part, tensor in matrices.items() if len(tensor.shape) == 2}
        transposed = {name for name, (_, tensor) in of_file.items() if tensor.transposed}
        fused = {tensor.name: tensor for tensor in fused_matrices(architecture, plain).values()}
        shapes = {name: tensor.shape for name, (_, tensor) in of_file.items()}
        shapes |= {name: tensor.shape for name, tensor in fused.items()}
        transposed |= {name for name, tensor in fused.items() if tensor.transposed}
        given = MergedAdapter(folder, shapes, transposed)
        self.left_out = given.left_out
        if several := next((fused[matrix] for matrix in given.matrices if matrix in fused), None):
            parts = " and ".join(part.name for part in several.parts)
            raise CheckpointError(
                f"{folder}: {several.name} is {parts} in a run, and one adapter for all of it cannot be trained; "
                f"merge the adapter with the merge_and_unload of peft"
            )
        self._tensors: dict[str, Tensor] = {}
        of_experts: dict[str, dict[int, Tensor]] = {}
        for matrix in given.matrices:
            (name, expert), tensor = of_file[matrix]
            a_RD, *by_output = given.factors(matrix)
            order = slice(None) if tensor.order is None else list(tensor.order)
            b_FR, magnitude_F = (None if value is None else value[order] for value in by_output)
            if magnitude_F is not None and expert is None:
                magnitude_F = magnitude_F - _norms(base.read(name, (0, 0), base.shapes[name]))
            ours = (a_RD, b_FR, magnitude_F)
            for ours_name, value in zip(adapter_names(name), ours, strict=True):
                if value is None:
                    continue
                if expert is None:
                    self._tensors[ours_name] = value
                else:
                    of_experts.setdefault(ours_name, {})[expert] = value
        self._tensors |= {name: _stacked(folder, plain, name, given) for name, given in of_experts.items()}
        self.spec = replace(plain, lora=_lora(folder, plain, self._tensors, given.settings))
        self.shapes = {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}
        self.dtypes = {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in self._tensors.items()}
        with safe_open(inside(folder, ADAPTER_WEIGHTS), framework="pt") as file:
            stated = (file.metadata() or {}).get(BASE)
        if stated not in (None, fingerprint(base, frozen_names(self.spec), of_values=True)):
            raise CheckpointError(
                f"{folder} is an adapter for other weights than {base.path}; give its base with --base"
            )

    def read(self, name: str, offsets: Sequence[int], shape: Sequence[int]) -> Tensor:
        """Return a box of an adapter's matrix, as `Weights.read`."""
        spans = zip(offsets, shape, strict=True)
        return self._tensors[name][tuple(slice(first, first + n) for first, n in spans)]

    def describe(self) -> str:
        """Return a description in one line."""
        return f"the adapter in {self.path}"


def _stacked(folder: Path, spec: ModelSpec, name: str, of_experts: Mapping[int, Tensor]) -> Tensor:
    """Return A or B of all experts from the matrices of each."""
    assert spec.moe is not None
    if missing := set(range(spec.moe.n_experts)) - set(of_experts):
        raise CheckpointError(
            f"{folder}: there is no adapter for expert {min(missing)} of {_ENDING.sub('', name)}, and all experts of a "
            f"run have one; merge the adapter with the merge_and_unload of peft"
        )
    if len({value.shape for value in of_experts.values()}) > 1:
        raise CheckpointError(
            f"{folder}: the adapters of the experts of {name} have several ranks, and all of a run have one rank; "
            f"merge the adapter with the merge_and_unload of peft"
        )
    return torch.stack([of_experts[expert] for expert in range(spec.moe.n_experts)])


def _lora(folder: Path, spec: ModelSpec, tensors: Mapping[str, Tensor], settings: Mapping[str, Any]) -> LoraSpec:
    """Return the section [lora] of the adapters of a base, with the `settings` of their files."""
    ranks = {tensor.shape[-2] for name, tensor in tensors.items() if name.endswith("lora_a")}
    if len(ranks) != 1:
        raise CheckpointError(
            f"{folder}: its adapters have the ranks {', '.join(map(str, sorted(ranks)))}, and all of a run have one "
            f"rank; merge the adapter with the merge_and_unload of peft"
        )
    matrices = {_ENDING.sub("", within_layer(name)) for name in tensors}
    lora = LoraSpec(rank=ranks.pop(), targets=tuple(sorted(matrices)), **settings)
    # transformers has no multi-token prediction modules, which come after the layers: their adapters are new.
    wanted = {
        f"layers.{layer}.{row.name}"
        for layer in range(spec.n_layers)
        for row in layer_rows(replace(spec, lora=lora), layer)
        if row.adapter
    }
    if missing := sorted(wanted - set(tensors)):
        raise CheckpointError(
            f"{folder}: there is no adapter for {_ENDING.sub('', missing[0])}, and all layers of a run have the same "
            f"targets; merge the adapter with the merge_and_unload of peft"
        )
    if problems := replace(spec, lora=lora).lora_problems():
        raise CheckpointError(
            *(
                f"{folder}: no run trains this adapter, merge it with the merge_and_unload of peft: {problem}"
                for problem in problems
            )
        )
    return lora


def import_adapter(folder: str | Path, base: str | Path, out: Path) -> ImportedAdapter:
    """Write an adapter of peft for the weights `base` to the new folder `out`, with which a run with [lora] starts.

    Raises InputError with all problems of an adapter that is not supported, damaged, or of another base.
    """
    weights = open_weights(base)
    if isinstance(weights, AdaptedWeights):
        raise CheckpointError(
            f"{base} has adapters itself; give their base with --base {weights.base.path}, or export it with --merge "
            f"first"
        )
    given = ImportedAdapter(Path(folder), weights)
    write_weights_folder(given, folder, out, base=record_of_base(weights, given.spec))
    return given
