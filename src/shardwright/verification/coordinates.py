"""The coordinate check of muP: how much activations change in a few steps, on models of several widths.

With the right parametrisation the change of an element of any activation does not depend on the width; with the
standard one it grows (Yang et al., Tensor Programs V, arXiv 2203.03466, appendix D.1). Training is of one process in
fp32, on one batch of random tokens. Shapes: B sequences, T tokens, V vocabulary.
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwright.config import OptimizerSection
from shardwright.model.init import initialise
from shardwright.model.spec import ModelSpec
from shardwright.model.transformer import Transformer
from shardwright.system.errors import InputError
from shardwright.training.optimizer import build_optimizer, set_learning_rate

FLAT = 0.35
"""Largest slope of log change over log width, up or down, that is called flat. Wide enough for the terms that vanish
with the width in models of 64 to 512, and less than the least power of the width that a wrong parametrisation has,
1/2."""
SEQUENCES, TOKENS = 4, 64


@dataclass(frozen=True)
class CoordinateCheck:
    """The change of activations by place, and by width in the order of `widths`: the root mean square of an element's
    change from the first forward pass to the one after `steps` updates, averaged over layers and seeds."""

    widths: tuple[int, ...]
    steps: int
    changes: dict[str, tuple[float, ...]]

    @property
    def slopes(self) -> dict[str, float]:
        """The slope of log change over log width by place, by least squares."""
        x = [math.log(width) for width in self.widths]
        slopes = {}
        for place, changes in self.changes.items():
            y = [math.log(change) for change in changes]
            slopes[place] = statistics.linear_regression(x, y).slope
        return slopes

    @property
    def flat(self) -> bool:
        """Return whether no slope exceeds `FLAT`, up or down."""
        return all(abs(slope) <= FLAT for slope in self.slopes.values())


def at_width(spec: ModelSpec, width: int) -> ModelSpec:
    """Return a model without dropout and adapters whose widths are all multiplied by width / d_model. Heads grow in
    number or, with `mup.base_head_dim`, in width. Raises InputError if a size would not be a whole number."""
    problems: list[str] = []

    def scaled(name: str, size: int) -> int:
        whole, rest = divmod(size * width, spec.d_model)
        if rest or (size and not whole):
            problems.append(
                f"--widths {width}: {name}={size} x {width} / {spec.d_model} = {size * width / spec.d_model:g} is not "
                f"a whole number; valid: multiples of {_least_width(spec)}"
            )
        return whole

    wide = spec.mup is not None and spec.mup.base_head_dim > 0
    names = ["d_ffn", "head_dim"] if wide else ["d_ffn", "n_heads", "n_kv_heads"]
    sizes: dict[str, Any] = {name: scaled(name, getattr(spec, name)) for name in names}
    if spec.moe is not None:
        inner: dict[str, Any] = {name: scaled(f"moe.{name}", getattr(spec.moe, name)) for name in ("d_ffn", "d_shared")}
        sizes["moe"] = replace(spec.moe, **inner)
    if spec.latent_attention is not None:
        inner = {name: scaled(name, getattr(spec.latent_attention, name)) for name in ("kv_rank", "q_rank")}
        sizes["latent_attention"] = replace(spec.latent_attention, **inner)
    if spec.linear_attention is not None:
        inner = {name: scaled(name, getattr(spec.linear_attention, name)) for name in ("n_k_heads", "n_v_heads")}
        sizes["linear_attention"] = replace(spec.linear_attention, **inner)
    if problems:
        raise InputError(*problems[:1])
    changed = replace(spec, d_model=width, dropout=0.0, lora=None, **sizes)
    if problems := changed.problems():
        raise InputError(*(f"--widths {width}: {problem}" for problem in problems))
    return changed


def _least_width(spec: ModelSpec) -> int:
    """Return the smallest width to which heads and networks scale."""
    sizes = [spec.d_ffn, spec.n_kv_heads, spec.n_heads] + ([spec.moe.d_ffn] if spec.moe else [])
    return spec.d_model // math.gcd(spec.d_model, *sizes)


def check_coordinates(
    spec: ModelSpec,
    optimizer: OptimizerSection,
    widths: Sequence[int],
    steps: int,
    seeds: int,
    report: Callable[[str], None] = lambda line: None,
) -> CoordinateCheck:
    """Train models of each of `widths`, as `at_width` has them, for `steps` updates with the optimizer's peak learning
    rate, from `seeds` seeds, and return the changes of their activations. `report` is called with a line for each
    width. Raises InputError for a width to which the model does not scale, if training diverges, and if an activation
    does not change."""
    specs = [at_width(spec, width) for width in widths]
    changes: dict[str, list[float]] = defaultdict(list)
    for spec_of_width in specs:
        report(f"d_model {spec_of_width.d_model}: {spec_of_width.n_parameters:,} parameters")
        per_seed = [_changes(spec_of_width, optimizer, steps, seed) for seed in range(seeds)]
        for place in per_seed[0]:
            change = statistics.fmean(rms_by_place[place] for rms_by_place in per_seed)
            if not 0 < change < math.inf:
                cause = (
                    "training diverged; give a lower one by --set optimizer.lr=VALUE"
                    if change
                    else "fp32 rounds the updates away, or optimizer.lr_scale is 0; give higher values"
                )
                raise InputError(
                    f"the change of {place} at d_model {spec_of_width.d_model} is {change:g} after {steps} steps with "
                    f"optimizer.lr={optimizer.lr:g}: {cause}"
                )
            changes[place].append(change)
    return CoordinateCheck(tuple(widths), steps, {place: tuple(means) for place, means in changes.items()})


def _changes(spec: ModelSpec, section: OptimizerSection, steps: int, seed: int) -> dict[str, float]:
    """Return the change of activations of one model by place."""
    model = Transformer(spec)
    initialise(model, spec, seed)
    model.train()
    generator = torch.Generator().manual_seed(seed)
    shape = (SEQUENCES, min(TOKENS, spec.max_seq_len) + 1)
    tokens_BT = torch.randint(spec.vocab_size, shape, generator=generator)
    optimizer = build_optimizer(dict(model.named_parameters()), spec, section)
    set_learning_rate(optimizer, section.lr)
    before = _activations(model, tokens_BT[:, :-1])
    for _ in range(steps):
        logits_BTV = model(tokens_BT[:, :-1])
        F.cross_entropy(logits_BTV.flatten(0, 1), tokens_BT[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    after = _activations(model, tokens_BT[:, :-1])
    changes: dict[str, list[float]] = defaultdict(list)
    for (place, one), (_, other) in zip(before, after, strict=True):
        changes[place].append(float((other - one).square().mean().sqrt()))
    return {place: statistics.fmean(values) for place, values in changes.items()}


@torch.no_grad()
def _activations(model: Transformer, tokens_BT: Tensor) -> list[tuple[str, Tensor]]:
    """Return the activations of a forward pass with their places, in the order of computation."""
    activations: list[tuple[str, Tensor]] = []

    def keep(place: str) -> Callable[[Any, Any, Tensor], None]:
        return lambda module, inputs, y: activations.append((place, y.detach().clone()))

    handles = [module.register_forward_hook(keep(place)) for place, module in _places(model)]
    logits_BTV = model(tokens_BT)
    for handle in handles:
        handle.remove()
    return [*activations, ("logits", logits_BTV)]


def _places(model: Transformer) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield the modules whose outputs are compared."""
    yield "embedding", model.embedding
    for block in model.layers.values():
        for name, place in (("attention", "attention"), ("ffn", "feed-forward")):
            if (module := getattr(block, name, None)) is not None:
                yield place, module
        yield "residual stream", block
