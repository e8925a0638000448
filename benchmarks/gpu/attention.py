"""Causal attention by each backend of PyTorch that the GPU has, forward and backward, in bf16.

    python benchmarks/gpu/attention.py

Prints a line of JSON: for each shape and backend the milliseconds of a forward and a backward pass, and the TFLOP/s of
both (3.5 times those of the forward pass, half of them masked, as FlashAttention counts).

Shapes: B batch, H heads, K heads of keys and values, T tokens, C width of a head.
"""

import json
import statistics
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

SHAPES = {"1.7b": (4, 32, 32, 4096, 64), "8b": (1, 32, 8, 8192, 128), "32k": (1, 32, 8, 32768, 64)}
BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
WARM_UP, TIMED = 3, 10


def time_ms(backend: SDPBackend, shape: tuple[int, int, int, int, int]) -> tuple[float, float]:
    """Milliseconds of a forward and of a backward pass, the medians."""
    n_batch, n_heads, n_kv_heads, n_tokens, width = shape
    q, k, v = (
        torch.randn(n_batch, n_tokens, heads, width, device="cuda", dtype=torch.bfloat16)
        .transpose(1, 2)
        .requires_grad_()
        for heads in (n_heads, n_kv_heads, n_kv_heads)
    )
    d_o = torch.randn(n_batch, n_tokens, n_heads, width, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
    forward_ms, backward_ms = [], []
    with sdpa_kernel(backend):
        for _ in range(WARM_UP + TIMED):
            marks = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
            marks[0].record()
            o = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=n_heads != n_kv_heads)
            marks[1].record()
            torch.autograd.grad(o, (q, k, v), d_o)
            marks[2].record()
            torch.cuda.synchronize()
            forward_ms.append(marks[0].elapsed_time(marks[1]))
            backward_ms.append(marks[1].elapsed_time(marks[2]))
    return statistics.median(forward_ms[WARM_UP:]), statistics.median(backward_ms[WARM_UP:])


def main() -> None:
    """Time and print."""
    found: dict[str, Any] = {}
    for shape_name, shape in SHAPES.items():
        n_batch, n_heads, _, n_tokens, width = shape
        forward_flops = 2 * n_batch * n_heads * n_tokens**2 * width
        for name, backend in BACKENDS.items():
            try:
                forward_ms, backward_ms = time_ms(backend, shape)
            except RuntimeError as error:
                found[f"{shape_name} {name}"] = str(error)[:100]
                continue
            rate = 3.5 * forward_flops / (forward_ms + backward_ms) / 1e9
            found[f"{shape_name} {name}"] = [round(forward_ms, 3), round(backward_ms, 3), round(rate)]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
