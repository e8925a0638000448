"""Initial values that do not depend on the layout: any box (slice) of a parameter from the seed and its name."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from shardwright.model.modules import row_of
from shardwright.model.quantised import fill_box
from shardwright.model.random import normal
from shardwright.model.spec import ModelSpec


def initial_values(
    spec: ModelSpec,
    seed: int,
    name: str,
    global_shape: Sequence[int],
    offsets: Sequence[int],
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    b_std: float = 0.0,
) -> Tensor:
    """Return the box [offsets, offsets + shape) of the initial values of the whole parameter `name`.

    Values are constant or normal, as the parameter's row says, and bit-equal for every partition into boxes. `b_std`:
    the standard deviation of the B and the magnitudes of adapters and of frozen biases, which are constant otherwise.
    With it a gradient of A is not zero in the first step, and an error in a frozen bias is seen.
    """
    row = row_of(spec, name)
    varied = row.adapter in ("b", "m") or (row.frozen and row.kind == "bias")
    std = row.std or (b_std if varied else 0.0)
    if std == 0:
        return torch.full(tuple(shape), row.fill, dtype=dtype, device=device)
    values = normal(seed, name, global_shape, offsets, shape, std, dtype, device)
    return values + row.fill if row.fill else values


Box = tuple[Tensor, Sequence[int]]
"""A shard of a parameter, and the index in the whole parameter where it starts."""


def whole(parameter: nn.Parameter) -> Box:
    """Return the whole parameter as a box."""
    return parameter, (0,) * parameter.dim()


@torch.no_grad()
def initialise(
    model: nn.Module,
    spec: ModelSpec,
    seed: int,
    box: Callable[[nn.Parameter], Box] = whole,
    b_std: float = 0.0,
) -> None:
    """Fill every parameter of a model, or this rank's `box` of it, with its initial values, in place. `b_std`: as for
    `initial_values`."""
    for name, parameter in model.named_parameters():
        local, offsets = box(parameter)
        row, shape = row_of(spec, name), tuple(parameter.shape)
        dtype, whole_shape = (torch.float32, row.shape) if row.stored else (local.dtype, shape)

        def values(at: Sequence[int], extent: Sequence[int]) -> Tensor:
            return initial_values(spec, seed, name, whole_shape, at, extent, dtype, local.device, b_std)  # noqa: B023

        fill_box(row, local, offsets, shape, values)
