"""The section [precision] of the run file: the data type of matmuls, the loss scale of fp16, and fp8."""

import math
from typing import Annotated, Literal

from pydantic import Field, model_validator

from shardwright.config.sections import BrokenRules, NotNegative, Positive, RunFileSection
from shardwright.cost.formats import TRAINED
from shardwright.model.number_formats import Fp8, Fp8Recipe

_SCALE_KEYS = ("loss_scale", "loss_scale_window", "loss_scale_hysteresis", "min_loss_scale")
Scale = Annotated[float, Field(gt=0)]


class PrecisionSection(RunFileSection):
    """The type of matmuls, the loss scale of fp16, and compilation."""

    compute: Literal["fp32", "bf16", "fp16", "fp64"] = Field(
        "fp32",
        description="type of matmuls; with bf16 and fp16 the weights, the reduction of gradients and their "
        "accumulation stay in fp32; fp16 has a dynamic loss scale",
    )
    compile: bool = Field(False, description="compile each block, and the loss, with torch.compile")
    cuda_graphs: bool = Field(
        False,
        description="with compile, on one GPU in 16 bits: record the kernels of each block as a CUDA graph and launch "
        "them together; for models whose kernels take less time than their launches",
    )
    tf32: bool = Field(
        False,
        description="matmuls of fp32 tensors in TF32 on GPUs: some 7 times as fast, with 10 of 23 bits of a mantissa",
    )
    loss_scale: Scale = Field(
        2.0**16, description="fp16 only: the loss scale of the first step, a power of 2; gradients are divided by it"
    )
    loss_scale_window: Positive = Field(
        1000, description="fp16 only: steps without an overflow after which the loss scale is doubled"
    )
    loss_scale_hysteresis: Positive = Field(
        2,
        description="fp16 only: number of overflows after which the loss scale is halved; every overflow skips its "
        "step; counted from 0 again when the scale is doubled",
    )
    min_loss_scale: Scale = Field(1.0, description="fp16 only: the loss scale is not halved below this power of 2")

    fp8: Literal["none", Fp8Recipe] = Field(
        "none",
        description="compute the matmuls of the layers in fp8, except attention and routers, "
        "with a scale for each tensor, each row, or each block of 128; on a CPU the rounding alone",
    )
    fp8_skip_layers: NotNegative = Field(
        0, description="with fp8: how many first layers and as many last layers stay in `compute`"
    )
    fp8_weight_gradient: bool | None = Field(
        None,
        description="with fp8: whether gradients of weights are computed in fp8, too; if not given, they are, but not "
        "with blockwise, which has none",
    )

    fp8_experts: bool = Field(
        False,
        description="with fp8: routed experts are in fp8, too, except the gradients of their weights; by rounding "
        "alone on every device",
    )

    @property
    def fp8_settings(self) -> Fp8 | None:
        """Return which matmuls are in fp8, or None if no matmul is."""
        if self.fp8 == "none":
            return None
        wanted = self.fp8 != "blockwise" if self.fp8_weight_gradient is None else self.fp8_weight_gradient
        return Fp8(self.fp8, self.fp8_skip_layers, wanted, experts=self.fp8_experts)

    @property
    def in_words(self) -> str:
        """Return the data type of matmuls as text."""
        return self.compute if self.fp8 == "none" else f"{self.compute}, fp8 {self.fp8}"

    @property
    def planned(self) -> str:
        """Return the format that `plan` prices: the fp8 format if the other matmuls are in 16 bits."""
        if self.fp8 != "none" and self.compute in ("bf16", "fp16"):
            return next(name for name, keys in TRAINED.items() if keys.get("fp8") == self.fp8)
        return "tf32" if self.tf32 and self.compute == "fp32" else self.compute

    @model_validator(mode="after")
    def _fp8_is_possible(self) -> "PrecisionSection":
        if self.fp8 == "none" and (self.fp8_skip_layers or self.fp8_weight_gradient is not None or self.fp8_experts):
            raise BrokenRules(
                "precision.fp8_skip_layers, precision.fp8_weight_gradient and precision.fp8_experts go with "
                "precision.fp8, which is 'none'; leave them out, or set precision.fp8='tensorwise'"
            )
        if self.fp8 == "blockwise" and self.fp8_weight_gradient:
            raise BrokenRules(
                "precision.fp8_weight_gradient=true with precision.fp8='blockwise': a block would be 128 tokens, and "
                "which tokens those are depends on the layout; leave it out, or set precision.fp8='rowwise'"
            )
        return self

    @model_validator(mode="after")
    def _fp16_is_possible(self) -> "PrecisionSection":
        if problems := list(self._loss_scale_problems()):
            raise BrokenRules(*problems)
        return self

    def _loss_scale_problems(self) -> list[str]:
        """Return one sentence for each broken rule of the loss scale."""
        defaults = {name: type(self).model_fields[name].default for name in _SCALE_KEYS}
        given = [name for name in _SCALE_KEYS if getattr(self, name) != defaults[name]]
        if given and self.compute != "fp16":
            settings = ", ".join(f"precision.{name}={getattr(self, name):g}" for name in given)
            return [
                f"{settings} with precision.compute={self.compute!r}: only fp16 has a loss scale, since its smallest "
                f"number is 6e-8 where fp32 and bf16 go down to 1e-38; leave it out, or set precision.compute='fp16'"
            ]
        problems = []
        for name in ("loss_scale", "min_loss_scale"):
            value: float = getattr(self, name)
            below = 2.0 ** math.floor(math.log2(value))
            if value != below:
                problems.append(
                    f"precision.{name}={value:g} is no power of 2, so dividing gradients by it would round them; "
                    f"nearest: {below:g} or {2 * below:g}"
                )
        if self.min_loss_scale > self.loss_scale:
            problems.append(
                f"precision.min_loss_scale={self.min_loss_scale:g} is above precision.loss_scale={self.loss_scale:g}; "
                f"lower the one or raise the other"
            )
        return problems
