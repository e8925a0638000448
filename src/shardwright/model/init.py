"""Initial values that do not depend on the layout: any box of a parameter from the seed and its name."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from shardwright.model.random import normal
from shardwright.model.spec import ModelSpec

_RESIDUAL_PROJECTIONS = ("attention.o.weight", "ffn.down.weight", "ffn.shared.down.weight", "ffn.experts.down")
_CONSTANT = (".bias", "norm.weight", "router.load")


def initial_std(spec: ModelSpec, name: str) -> float:
    """Standard deviation of the first values of parameter `name`; 0 for what begins constant.

    Matrices and embeddings get `init_std`; the projections that add to the residual stream get
    init_std / sqrt(2 L), L layers, so that the sum over the 2 L of them keeps its variance (GPT-2,
    Radford et al. 2019, section 2.3).
    """
    if name.endswith(_CONSTANT):
        return 0.0
    if name.endswith(_RESIDUAL_PROJECTIONS):
        return spec.init_std / math.sqrt(2 * spec.n_layers)
    return spec.init_std


def initial_values(
    spec: ModelSpec,
    seed: int,
    name: str,
    global_shape: Sequence[int],
    offsets: Sequence[int],
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
) -> Tensor:
    """The box [offsets, offsets + shape) of the initial value of the whole parameter `name`.

    Norm weights and a router's load are 1, biases 0, all else normal with `initial_std`; bit-equal for every way of
    cutting the parameter into boxes.
    """
    std = initial_std(spec, name)
    if std == 0:
        return torch.full(tuple(shape), float(not name.endswith(".bias")), dtype=dtype, device=device)
    return normal(seed, name, global_shape, offsets, shape, std, dtype, device)


@torch.no_grad()
def initialise(model: nn.Module, spec: ModelSpec, seed: int) -> None:
    """Fills every parameter of a whole model on one device with its initial values, in place."""
    for name, parameter in model.named_parameters():
        origin = [0] * parameter.dim()
        shape = parameter.shape
        values = initial_values(spec, seed, name, shape, origin, shape, parameter.dtype, parameter.device)
        parameter.copy_(values)
