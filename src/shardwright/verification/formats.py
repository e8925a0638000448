"""Number formats at test size: the loss scale of float16, the blocks of fp8, the options of an optimizer."""

from collections.abc import Sequence
from dataclasses import replace

from shardwright.config import OptimizerSection, PrecisionSection
from shardwright.layout.layout import Layout
from shardwright.model.number_formats import Fp8, block_of
from shardwright.model.spec import ModelSpec

LOSS_SCALING = PrecisionSection(compute="fp16", loss_scale=2.0**9, loss_scale_window=1, loss_scale_hysteresis=1)
"""For float16: the scale changes in every step. Gradients of models at test size overflow above 2^15 and more."""
OVERFLOW_STEP = 1
"""The step, 0-based, in which a gradient overflows in float16."""


def cut_fp8(fp8: Fp8 | None, spec: ModelSpec, layouts: Sequence[Layout]) -> Fp8 | None:
    """Return fp8 for a reduced model: some layers in it if there were some, and blocks that divide every shard."""
    if fp8 is None:
        return None
    fp8 = replace(fp8, skip_layers=min(fp8.skip_layers, (spec.n_layers - 1) // 2))
    return replace(fp8, block=min(block_of(spec, fp8, layout.tp) for layout in layouts))


def cut_optimizer(optimizer: OptimizerSection) -> OptimizerSection:
    """Return the optimizer for a reduced model: options that are sizes are limited to test size."""
    few = {
        key: type(option.default)(option.at_test_size)
        for key, option in optimizer.kind.options.items()
        if option.at_test_size < optimizer.options[key]
    }
    return optimizer.model_copy(update=few)


def no_fp8_in(dtype: str, fp8: Fp8) -> str:
    """Return why fp8 is compared only in float64, and the valid alternatives."""
    return (
        f"dtype={dtype!r} with precision.fp8={fp8.recipe!r}: a sum in another order is another number in {dtype}, "
        f"which may round to the next number of fp8, so that no bound would tell a bug from rounding; valid: "
        f"dtype='float64', or precision.fp8='none'"
    )


def no_fp8_with(compress_gradients: str, fp8: Fp8) -> str:
    """Return why fp8 and compressed gradients are compared separately, and the valid alternatives."""
    return (
        f"layout.compress_gradients={compress_gradients!r} with precision.fp8={fp8.recipe!r}: training can have both, "
        f"but weights after an update with rounded gradients are other numbers, which may round to the next number of "
        f"fp8, so that no bound would tell a bug from rounding; verify one, and then the other, with "
        f"--set precision.fp8=none and --set layout.compress_gradients=none"
    )
