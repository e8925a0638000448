"""Uneven loads of experts: the load of the busiest rank of ep, for which the other ranks wait, and dropped tokens.

The load of an expert is its tokens divided by the mean of the experts of its layer. With a coefficient of variation c,
loads are independent normal variables of mean 1. A rank of ep with E / ep experts has a mean load of standard deviation
c / sqrt(E / ep). The expected largest of n such loads is 1 + c / sqrt(E / ep) z(n), with Blom's approximation
z(n) = Phi^-1((n - 3/8) / (n + 1/4)) (Blom, 1958). A token goes to K different experts, so the load of a rank is at most
min(ep, E / K). With a capacity factor C, an expert computes at most C, and drops the mean of max(load - C, 0).
Ignored: the memory and the element-wise operations of the busiest rank, and layers whose busiest ranks differ.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from random import Random
from statistics import NormalDist, fmean

import numpy as np
from numpy.typing import NDArray

from shardwright.model.sections import MoESpec
from shardwright.model.spec import ModelSpec
from shardwright.split.placement import Order, home, place, rank_loads
from shardwright.system.errors import InputError
from shardwright.system.files import parse_json, read_bytes, reason

USUAL_CV = 0.3
"""The coefficient of variation whose cost a plan with even loads shows."""
LARGEST_CV = 10.0
KEY = "tokens_by_expert"
_DRAWN = 16
"""Layers that stand for loads of a given coefficient of variation, to place their experts."""


@dataclass(frozen=True)
class UnevenLoad:
    """`cv`: coefficient of variation of the loads; `by_layer`: the loads of the experts of each layer, mean 1, instead.
    `text`: as it was given."""

    text: str
    cv: float = 0.0
    by_layer: tuple[tuple[float, ...], ...] = ()

    def busiest(self, moe: MoESpec, ep: NDArray[np.int64], *, placed: bool) -> NDArray[np.float64]:
        """Return the load of the busiest rank for each degree of ep, (n,), as a multiple of the mean. `placed`: experts
        are placed on ranks by their load (`split/placement.py`)."""
        degrees, at = np.unique(ep, return_inverse=True)
        return np.array([_busiest(self, moe, int(degree), placed) for degree in degrees])[at]

    def moved(self, moe: MoESpec, ep: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the experts that the rank of ep with the most leaving experts sends when experts are placed by their
        load for the first time, (n,): a mean over layers."""
        degrees, at = np.unique(ep, return_inverse=True)
        return np.array([_moved(self, moe, int(degree)) for degree in degrees])[at]

    def dropped(self, moe: MoESpec) -> float:
        """Return the fraction of the tokens of experts that is dropped; 0 without a capacity."""
        if not moe.capacity_factor:
            return 0.0
        if self.by_layer:
            return fmean(max(load - moe.capacity_factor, 0.0) for layer in self.by_layer for load in layer)
        if not self.cv:
            return max(1 - moe.capacity_factor, 0.0)
        normal, z = NormalDist(), (moe.capacity_factor - 1) / self.cv
        return self.cv * (normal.pdf(z) - z * (1 - normal.cdf(z)))


@lru_cache  # a search asks for the same degrees of ep in each group of layouts
def _busiest(load: UnevenLoad, moe: MoESpec, ep: int, placed: bool) -> float:
    """Return `UnevenLoad.busiest` for one degree of ep. With a coefficient of variation, a placement is the mean over
    `_DRAWN` layers of drawn normal loads, whose experts are placed by these loads."""
    if load.by_layer:
        orders = _placed(load, moe, ep) if placed else [home(moe.n_experts)] * len(load.by_layer)
        return _mean_busiest(load.by_layer, orders, moe, ep)
    deviations = NormalDist().inv_cdf((ep - 0.375) / (ep + 0.25))
    unplaced = 1 + load.cv / (moe.n_experts / ep) ** 0.5 * deviations
    unplaced = min(unplaced, ep, moe.n_experts / moe.top_k, moe.capacity_factor or np.inf)
    return min(_mean_busiest(_layers(load, moe), _placed(load, moe, ep), moe, ep), unplaced) if placed else unplaced


@lru_cache
def _moved(load: UnevenLoad, moe: MoESpec, ep: int) -> float:
    """Return `UnevenLoad.moved` for one degree of ep."""
    before = np.array(home(moe.n_experts))
    return fmean(int((before != after).reshape(ep, -1).sum(1).max()) for after in np.array(_placed(load, moe, ep)))


@lru_cache
def _placed(load: UnevenLoad, moe: MoESpec, ep: int) -> list[Order]:
    """Return the order of each of `_layers` after its experts have been placed by these loads."""
    before, together = home(moe.n_experts), moe.movable_together
    return [place(layer, before, ep, together) for layer in _layers(load, moe)]


@lru_cache
def _layers(load: UnevenLoad, moe: MoESpec) -> Sequence[Sequence[float]]:
    """Return the loads of the experts of each layer, with a mean of 1: the given ones, or `_DRAWN` layers of them."""
    if load.by_layer:
        return load.by_layer
    random = Random(0)
    drawn = [[max(0.0, random.gauss(1, load.cv)) for _ in range(moe.n_experts)] for _ in range(_DRAWN)]
    return [[expert / (fmean(layer) or 1.0) for expert in layer] for layer in drawn]


def _mean_busiest(layers: Sequence[Sequence[float]], orders: Sequence[Order], moe: MoESpec, ep: int) -> float:
    """Return the load of the busiest rank of each layer / its mean expert's load of 1, on average over layers."""
    limit = moe.capacity_factor or np.inf
    return fmean(
        float(rank_loads([min(load, limit) for load in layer], order, ep).max()) / (moe.n_experts // ep)
        for layer, order in zip(layers, orders, strict=True)
    )


def read_expert_load(text: str, spec: ModelSpec) -> UnevenLoad:
    """Return the loads that `cv=0.3` or a JSON file describes. The file is an object whose `tokens_by_expert` has a
    list of tokens for each layer with experts, or one list for all of them.

    Raises InputError if the model has no experts, and for a text or a file that does not describe its experts.
    """
    what = f"--expert-load {text}"
    if spec.moe is None:
        raise InputError(f"{what}: the model has no experts; leave it out")
    if text.startswith("cv="):
        try:
            cv = float(text.removeprefix("cv="))
        except ValueError:
            cv = -1.0
        if not 0 <= cv <= LARGEST_CV:
            raise InputError(f"{what}: valid: a number from 0 to {LARGEST_CV:g}, such as cv=0.3, or a JSON file")
        return UnevenLoad(text, cv)
    try:
        layers = parse_json(read_bytes(Path(text)))[KEY]
        loads = np.array(layers, dtype=np.float64)
    except OSError as error:
        raise InputError(f"{what}: {reason(error)}; valid: cv=0.3, or a JSON file with {KEY}") from None
    except (ValueError, TypeError, KeyError, OverflowError):
        raise InputError(f"{what}: valid: a JSON object whose {KEY} has a list of tokens for each layer") from None
    n_layers = sum(spec.has_experts(layer) for layer in range(spec.n_layers))
    if loads.ndim != 2 or loads.shape[1] != spec.moe.n_experts or len(loads) not in (1, n_layers):
        raise InputError(
            f"{what}: {KEY} has the shape {' x '.join(map(str, loads.shape))}; valid: {n_layers} layers, or 1 for all, "
            f"x {spec.moe.n_experts} experts"
        )
    if not np.isfinite(loads).all() or (loads < 0).any() or not loads.sum(axis=1).all():
        raise InputError(f"{what}: tokens are 0 or more, and each layer has some")
    loads /= loads.mean(axis=1, keepdims=True)
    return UnevenLoad(text, by_layer=tuple(map(tuple, loads.tolist())))
