"""What the tables of a hardware file have in common: kinds of values, and that unknown keys are errors."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field


class Table(BaseModel):
    """A table of a hardware file: unknown keys are errors, values are not coerced."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(gt=0, le=1)]
Count = Annotated[int, Field(ge=1)]
Peak = Literal["fp32", "tf32", "bf16", "fp16", "fp8", "mxfp8", "nvfp4"]
ByPrecision = dict[Peak, Positive]
CollectiveName = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "point_to_point"]
