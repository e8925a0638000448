"""Number formats of matmuls: the peak at which they run, and the cost of casting 16-bit inputs to them.

Tensors of fp32 are multiplied in fp32, outside tensor cores, or in tf32, with 10 bits of mantissa (`precision.tf32`).

| format    | has a scale of its own   | cast: bytes moved for each element                                          |
| --------- | ------------------------ | --------------------------------------------------------------------------- |
| fp8       | a tensor                 | 5: read for the maximum (2), read again (2), written (1); 4 where kernels   |
|           |                          | that write half of the tensors, such as norms, also take the maximum        |
| fp8-row   | a row                    | 10: 2 + 2 + 1 along each dim, as a kernel's block holds no whole row        |
| fp8-block | 128 elements, 128 x 128  | 6: the same                                                                 |
| mxfp8     | 32 elements              | 4.06: one pass (2) writes it along both dims, each with a scale of 1 / 32   |
| nvfp4     | 16 elements              | 5.13: read for the tensor's maximum (2), then one pass (2) that writes it   |
|           |                          | along both dims (0.5 + 1 / 16 each)                                         |

`rate`: rate of its matmuls relative to matmuls with one scale a tensor. Sources: fp8-row: training Llama 3 8B with it
saves 0.52 of the time that one scale a tensor saves (torchtitan commit 7a04053: 5,760, 6,424 and 7,186 tokens/s), which
with 0.55 of the step in matmuls is 0.79 of the rate; fp8-block: 1.34 times the rate of bf16 (pytorch/ao pull request
3342, H100), compared with 1.77 for one scale a tensor (stas00/ml-engineering). mxfp8 and nvfp4 scale in the tensor
cores (NVIDIA Blackwell).
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class MatmulFormat:
    """`peak`: the precision of `hardware.toml` at whose rate it runs. `rate`: fraction of that rate which its kernels
    reach, relative to the best. `cast_bytes`: moved to cast an element from 16 bits, 0 for formats that need no cast.
    `wide`: the format of matmuls that do not use it, such as attention and the logits. `gathered_bytes`: of an element
    that is gathered over tp after its cast, with its share of a scale. The scale of a row needs no other rank either,
    but torchao's recipe gathers before it casts."""

    peak: str
    rate: float = 1.0
    cast_bytes: float = 0.0
    wide: str = ""
    gathered_bytes: float = 2.0
    fused_cast_bytes: float = 0.0

    def casts(self, fused: bool) -> float:
        """Return the bytes moved to cast an element, by a stack that fuses casts with other kernels or not."""
        return self.fused_cast_bytes if fused and self.fused_cast_bytes else self.cast_bytes

    @property
    def narrow(self) -> bool:
        """Return whether inputs have fewer than 16 bits."""
        return self.cast_bytes > 0


FORMATS = {
    "fp32": MatmulFormat("fp32"),
    "tf32": MatmulFormat("tf32"),
    "bf16": MatmulFormat("bf16"),
    "fp16": MatmulFormat("fp16"),
    "fp8": MatmulFormat("fp8", 1.0, 5.0, "bf16", 1.0, fused_cast_bytes=4.0),
    "fp8-row": MatmulFormat("fp8", 0.79, 10.0, "bf16"),
    "fp8-block": MatmulFormat("fp8", 0.76, 6.0, "bf16", 1.03),
    "mxfp8": MatmulFormat("mxfp8", 1.0, 4.06, "bf16", 1.03),
    "nvfp4": MatmulFormat("nvfp4", 1.0, 5.13, "bf16", 0.56),
}
TRAINED: dict[str, dict[str, str | bool]] = {
    "fp32": {"compute": "fp32"},
    "tf32": {"compute": "fp32", "tf32": True},
    "bf16": {"compute": "bf16"},
    "fp16": {"compute": "fp16"},
    "fp8": {"compute": "bf16", "fp8": "tensorwise"},
    "fp8-row": {"compute": "bf16", "fp8": "rowwise"},
    "fp8-block": {"compute": "bf16", "fp8": "blockwise"},
}
"""Formats in which `train` computes, and the keys of [precision] that select them."""
