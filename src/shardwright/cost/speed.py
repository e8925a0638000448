"""How a software stack's kernels and messages run: what it fuses, what it overlaps, what the processor costs.

One set of numbers serves every run of a stack. Bytes are those moved for each element of 16 bits, inputs read and
results written, forward; they follow from how an operation is cut into kernels.
"""

from dataclasses import dataclass, replace
from typing import Any

from shardwright.cost.calibration import CALIBRATED, Calibration


@dataclass(frozen=True, kw_only=True)
class Speed:
    """What a stack does in time, whatever the layout. `kind`: the name by which its numbers were fitted.

    Element-wise operations, bytes an element: `norm_bytes` of a layernorm, `rmsnorm_bytes` of an RMSNorm, which takes
    several kernels where it is not fused, `residual_bytes` of adding a branch (with its bias), `dropout_bytes` of
    dropping from a branch, `heads_bytes` of laying out queries, keys, values and results, `rope_bytes` of the rotation,
    `gated_bytes` of silu(gate) x up, for each element of the result, `gelu_bytes` of gelu, `permute_bytes` of sorting
    tokens by expert and back, `loss_bytes` of the loss, for each logit, forward and backward together.

    Overlap: `hides_tp_backward`: sums over tp run beside the products for weights; `hides_tp`: products and sums are
    cut into pieces that run side by side; `hides_dp`: data-parallel communication runs beside the passes it belongs
    to; `interference`: share of a hidden message's time by which it slows what it is hidden behind;
    `blocking_sends`: a rank of `pp` waits for its messages, each of which takes `message_s` beside its bytes;
    `scatters_messages`: ranks of tp send a part each of what all have.

    `kernel_share`: of the bandwidth that fused kernels reach, what these do. `flash_gain`: rate of attention
    beside the kernels of 2023 and 2024 that `flash_share` was fitted to. FlashAttention-2 as it is in PyTorch today
    comes to 335 TFLOP/s forward and backward on H100 (arXiv 2307.08691, section 4.1), 1.4 times that; later ones to
    more (FlashAttention-3, arXiv 2407.08608, figure 5).

    The processor: `launch_s`: seconds to start all kernels of one layer forward, `launch_backward`: how many times that
    backward; `step_s`: once a step.

    `reduce_bytes`: of a gradient on its way, 2 where gradients of 16 bits are summed as they are, whatever they are
    kept in afterwards; `optimizer_bytes`: moved for each parameter by Adam.
    """

    kind: str = "shardwright"
    norm_bytes: float = 4.0
    rmsnorm_bytes: float = 4.0
    residual_bytes: float = 6.0
    dropout_bytes: float = 1.0
    heads_bytes: float = 4.0
    rope_bytes: float = 4.0
    gated_bytes: float = 6.0
    gelu_bytes: float = 4.0
    permute_bytes: float = 12.0
    loss_bytes: float = 16.0
    hides_tp_backward: bool = False
    hides_tp: bool = False
    hides_dp: bool = True
    interference: float = 0.2
    blocking_sends: bool = False
    scatters_messages: bool = False
    message_s: float = 20e-6
    flash_gain: float = 1.0
    kernel_share: float = 1.0
    launch_s: float = 0.5e-3
    launch_backward: float = 1.7
    step_s: float = 10e-3
    reduce_bytes: float = 2.0
    optimizer_bytes: float = 38.0

    def calibrated(self, by: Calibration) -> "Speed":
        """With the numbers that were fitted for this stack."""
        fitted: dict[str, Any] = dict(by.stacks.get(self.kind, {}))
        return replace(self, **fitted)


MEGATRON = Speed(
    kind="megatron", hides_dp=False, blocking_sends=True, scatters_messages=True, loss_bytes=30.0
).calibrated(CALIBRATED)
MEGATRON_CORE = Speed(
    kind="megatron-core", hides_tp_backward=True, hides_tp=True, flash_gain=1.7, reduce_bytes=4.0
).calibrated(CALIBRATED)
FSDP = Speed(
    kind="fsdp", rmsnorm_bytes=20.0, rope_bytes=20.0, gated_bytes=10.0, loss_bytes=36.0, reduce_bytes=4.0
).calibrated(CALIBRATED)
COMPILED = Speed(kind="fsdp-compiled", reduce_bytes=4.0).calibrated(CALIBRATED)
SHARDWRIGHT = Speed(kind="shardwright", hides_tp_backward=True, flash_gain=1.4, reduce_bytes=4.0).calibrated(CALIBRATED)
