"""Measure matmuls, attention, element-wise operations and copies on this rank's device."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call

from shardwright.data.samples import IGNORE
from shardwright.measuring.clock import MeasuringClock
from shardwright.measuring.points import AttentionPoint, CopyPoint, KernelPoint, MatmulPoint
from shardwright.model.attention import causal_attention
from shardwright.model.feed_forward import gelu_tanh, swiglu
from shardwright.model.norm import RMSNorm
from shardwright.model.rotary import rotate
from shardwright.parallel.loss import bound, loss_sum
from shardwright.training.device import DTYPES

MATMULS = (  # (tokens, features in, features out): sizes of small models on a CPU, and of large ones on a GPU
    (128, 128, 384), (512, 128, 128), (128, 256, 768), (512, 256, 256), (512, 256, 768), (512, 768, 256),
    (1024, 256, 2048), (512, 512, 512), (256, 512, 1536), (1024, 512, 1536), (1024, 1536, 512), (512, 1024, 1024),
    (512, 512, 4096),
)  # fmt: skip
OTHERS = ((512, 256, 768), (512, 512, 512))
"""Shapes in all precisions except the first."""
ON_GPU = 8
"""Factor by which the sizes on a GPU are larger."""
HEAD, VOCABULARY = 64, 8
"""Width of a head; size of the vocabulary relative to the width of the model."""
FORWARD_AND_BACKWARD = 2.5
"""Time of an element-wise operation forward and backward in the cost model, in units of the forward pass."""


def matmuls(clock: MeasuringClock, precisions: tuple[str, ...]) -> Iterator[MatmulPoint]:
    """Measure a linear layer's three matmuls (forward pass and both gradients) in training's memory layouts."""
    factor = ON_GPU if clock.device.type == "cuda" else 1
    for number, precision in enumerate(precisions):
        # The dependence of the rate on shape is measured in the first precision.
        for m, k, n in ((factor * size for size in shape) for shape in (OTHERS if number else MATMULS)):
            x, w, g = (_random(clock, *shape, precision=precision) for shape in ((m, k), (n, k), (m, n)))
            yield MatmulPoint(precision, m, k, n, clock.seconds(partial(F.linear, x, w)))
            yield MatmulPoint(precision, m, n, k, clock.seconds(partial(torch.mm, g, w)))
            yield MatmulPoint(precision, k, m, n, clock.seconds(partial(torch.mm, g.t(), x)))


def attention(clock: MeasuringClock, precision: str) -> Iterator[AttentionPoint]:
    """Measure attention by length and head width, with queries, keys and values in the memory layout of the model."""
    gpu = clock.device.type == "cuda"
    for length in (1024, 2048, 4096, 8192) if gpu else (64, 128, 256, 512, 1024):
        for width in (64, 128) if gpu else (16, 32, 64, 128):
            if not gpu and length * width > 512 * 64 and width != 64:
                continue
            batch, heads = (max(1, 16384 // length), 16) if gpu else (max(1, 256 // length), 4)
            q, k, v = (_random(clock, batch, length, heads, width, precision=precision) for _ in range(3))
            with torch.no_grad():
                forward = clock.seconds(partial(_attended, q, k, v))
            both = clock.seconds(_with_gradient(_attended, q, k, v))
            yield AttentionPoint(batch, length, heads, width, forward, max(both - forward, 0.0))


def _attended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return causal_attention(q, k, v).flatten(-2)


def kernels(clock: MeasuringClock, precision: str) -> Iterator[KernelPoint]:
    """Measure the element-wise operations of the model, with their backward pass, at two sizes."""
    gpu = clock.device.type == "cuda"
    e = DTYPES[precision].itemsize / 2
    for tokens, features in ((8192, 4096), (16384, 4096)) if gpu else ((512, 256), (1024, 512)):
        for name, (operation, given) in _operations(clock, tokens, features, precision).items():
            seconds = clock.seconds(_with_gradient(operation, *given))
            # The cost model counts the loss forward and backward alike, and its logits in fp32 in any precision.
            passes, widths = (1.0, 1.0) if name == "loss_bytes" else (FORWARD_AND_BACKWARD, e)
            yield KernelPoint(name, float(given[0].numel()), passes, widths, seconds)


_Operation = tuple[Callable[..., Tensor], tuple[Tensor, ...]]


def _operations(clock: MeasuringClock, tokens: int, features: int, precision: str) -> dict[str, _Operation]:
    """Return, by field of `cost.speed.Speed`, the operation and its tensors; the first one's elements are counted."""
    x, other = (_random(clock, 1, tokens, features, precision=precision) for _ in range(2))
    weight, bias = torch.ones_like(x[0, 0]), torch.zeros_like(x[0, 0])
    heads = x.view(1, tokens, -1, HEAD)
    table = _random(clock, 2, tokens, 1, HEAD, precision=precision)
    logits = _random(clock, 1, tokens, VOCABULARY * features, precision=precision)
    targets = torch.randint(0, VOCABULARY * features, (1, tokens), device=clock.device)
    cross_entropy = bound(range(VOCABULARY * features), IGNORE, None, compiled=False)
    shape, rms_norm = (features,), RMSNorm(features, eps=1e-5)
    return {
        "norm_bytes": (lambda x, w, b: F.layer_norm(x, shape, w, b), (x, weight, bias)),
        "rmsnorm_bytes": (lambda x, w: functional_call(rms_norm, {"weight": w}, x), (x, weight)),
        "residual_bytes": (lambda x, y: x + y, (x, other)),
        "rope_bytes": (lambda x: rotate(x, table), (heads,)),
        "gated_bytes": (swiglu, (x, other)),
        "gelu_bytes": (gelu_tanh, (x,)),
        "loss_bytes": (lambda x: loss_sum(cross_entropy, x, targets), (logits,)),
    }


def copies(clock: MeasuringClock) -> Iterator[CopyPoint]:
    """Measure copies by size."""
    for n_bytes in (2**16, 2**20, 2**24, 2**26) if clock.device.type == "cpu" else (2**20, 2**26, 2**30):
        x = torch.zeros(n_bytes // 4, device=clock.device)
        y = torch.empty_like(x)
        yield CopyPoint(n_bytes, clock.seconds(partial(y.copy_, x)))


def _with_gradient(operation: Callable[..., Tensor], *given: Tensor) -> Callable[[], object]:
    """Return the operation with its forward and backward pass."""
    leaves = [x.detach().requires_grad_() for x in given]
    ahead = torch.ones_like(operation(*leaves))

    def both() -> None:
        torch.autograd.grad(operation(*leaves), leaves, ahead)

    return both


def _random(clock: MeasuringClock, *shape: int, precision: str) -> Tensor:
    return torch.randn(shape, device=clock.device).to(DTYPES[precision])
