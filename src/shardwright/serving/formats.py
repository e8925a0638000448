"""Number formats of a served model: bytes of its weights and of its cache, and the format in which matmuls compute.

A format with a scale for each block of elements stores the scales too:

| format | element | scales                                                        | bytes an element |
| ------ | ------- | ------------------------------------------------------------- | ---------------- |
| nvfp4  | 4 bits  | 8 bits for 16 elements (NVIDIA, Blackwell)                    | 0.5625           |
| mxfp4  | 4 bits  | 8 bits for 32 elements (OCP Microscaling Formats 1.0)         | 0.53125          |
| int4   | 4 bits  | 16 bits and a zero point of 4 bits for 128 (arXiv 2306.00978) | 0.51953          |

Matmuls of nvfp4 compute in nvfp4 where the accelerator has it. Without it, and with mxfp4, int4 (AWQ, GPTQ) and int8,
weights are cast to 16 bits while they are read, so that only reading them is faster (Marlin, arXiv 2408.11743).
Ignored: the work of these casts, and the scale of each row in int8.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shardwright.cost.hardware import Accelerator


@dataclass(frozen=True)
class ServingFormat:
    """`n_bytes`: of an element of a matrix with its scales. `computes`: formats of the matmuls, the first that the
    accelerator has is used. `wide`: of attention, the head and the residual stream."""

    n_bytes: float
    computes: tuple[str, ...]
    wide: str = "bf16"


FORMATS: Mapping[str, ServingFormat] = {
    "fp32": ServingFormat(4.0, ("fp32",), "fp32"),
    "bf16": ServingFormat(2.0, ("bf16",)),
    "fp16": ServingFormat(2.0, ("fp16",), "fp16"),
    "fp8": ServingFormat(1.0, ("fp8",)),
    "int8": ServingFormat(1.0, ("bf16", "fp16")),
    "nvfp4": ServingFormat(0.5 + 1 / 16, ("nvfp4", "bf16", "fp16")),
    "mxfp4": ServingFormat(0.5 + 1 / 32, ("bf16", "fp16")),
    "int4": ServingFormat(0.5 + 2.5 / 128, ("bf16", "fp16")),
}
"""Formats of weights, by name."""
CACHE_BYTES: Mapping[str, float] = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "fp8": 1.0, "int8": 1.0}
"""Bytes of an element of the cache by format. Keys and values in int8 are cast while attention reads them."""
CAST_WHEN_READ = ("int8",)
"""Formats of the cache that every accelerator can have, but not a measured processor."""


def computed_in(name: str, chip: Accelerator) -> str | None:
    """Return the format in which matmuls with weights of a format compute on an accelerator; None if it has none. On a
    measured processor nothing is cast."""
    if chip.on_host:
        return name if name in chip.flops_per_s else None
    return next((form for form in FORMATS[name].computes if form in chip.flops_per_s), None)


def weights_on(chip: Accelerator) -> list[str]:
    """Return the formats of weights that an accelerator can serve."""
    return [name for name in FORMATS if computed_in(name, chip)]


def caches_on(chip: Accelerator) -> list[str]:
    """Return the formats of the cache that an accelerator can have."""
    cast = () if chip.on_host else CAST_WHEN_READ
    return [name for name in CACHE_BYTES if name in cast or name in chip.flops_per_s]


_METHODS = {"fp8": "fp8", "fbgemm_fp8": "fp8", "mxfp4": "mxfp4", "awq": "int4", "gptq": "int4", "auto-round": "int4"}
"""Values of `quantization_config.quant_method` of transformers; the last three state their `bits`."""
_OF_BITS = {"int4": "int4", "int8": "int8", "float8": "fp8", "float4": "nvfp4"}
"""Formats by the type and the number of bits of an element."""
_OF_MODEL_OPT = {
    "FP8": "fp8",
    "FP8_PB_WO": "fp8",
    "FP8_PER_CHANNEL_PER_TOKEN": "fp8",
    "NVFP4": "nvfp4",
    "NVFP4_AWQ": "nvfp4",
    "W4A16_AWQ": "int4",
    "W4A8_AWQ": "int4",
}
"""Formats by ModelOpt's `quant_algo`."""
_MX_BLOCK = 32
"""Elements of a block of mxfp4 that share a scale; a block of nvfp4 has 16."""
_NAMES = r"fp8|nvfp4|mxfp4|awq|gptq|int4|int8"


def format_of_config(config: Mapping[str, Any]) -> str | None:
    """Return the format of the weights of a checkpoint by its config.json: the published quantisation, or fp16 if they
    were saved in fp16, otherwise bf16. Return None for a quantisation that no format has.

    Sources: quantization_config of transformers, compressed-tensors (`config_groups`, with `weights` of a `type` and
    `num_bits`) and ModelOpt (`quant_algo`). Every quantised layer is taken to have the format of the first group.
    """
    config = {**(config.get("text_config") or {}), **{key: value for key, value in config.items() if value is not None}}
    quantised = config.get("quantization_config")
    if quantised is None:
        return "fp16" if (config.get("dtype") or config.get("torch_dtype")) == "float16" else "bf16"
    method = str(quantised.get("quant_method", "")).lower()
    if method == "bitsandbytes":
        return "int8" if quantised.get("load_in_8bit") else None
    if method == "modelopt" or "quant_algo" in quantised:
        return _OF_MODEL_OPT.get(str(quantised.get("quant_algo")).upper())
    if method == "compressed-tensors":
        groups = quantised.get("config_groups")
        first = next(iter(groups.values()), None) if isinstance(groups, dict) else None
        weights = first.get("weights") if isinstance(first, dict) else None
        if not isinstance(weights, dict):
            return None
        form = _OF_BITS.get(f"{weights.get('type')}{weights.get('num_bits')}")
        return "mxfp4" if form == "nvfp4" and weights.get("group_size") == _MX_BLOCK else form
    form = _METHODS.get(method)
    return _OF_BITS.get(f"int{quantised.get('bits', 4)}") if form == "int4" else form


def format_of_name(name: str) -> str | None:
    """Return the format that the name of a published checkpoint ends with, as in Qwen3-235B-A22B-FP8, or None."""
    match = re.search(rf"[-_ ]({_NAMES})$", name.lower())
    return None if match is None else {"awq": "int4", "gptq": "int4"}.get(match[1], match[1])
